"""What a split of the decoder must move: the bytes that one device sends in a step, at the least.

For tensor parallelism that gives Megatron's count, arXiv 1909.08053: four reductions of [B, T, D] per layer, each of
2 (n-1)/n; with a sequence-split residual, arXiv 2205.05198, four reduce-scatters and six all-gathers of (n-1)/n, since
a product's input is gathered again for its weight's gradient. For fully sharded weights it gives ZeRO's, arXiv
1910.02054: gathered once forward and once backward in the compute dtype (recomputation needs no third time) and their
gradients reduce-scattered, all of it in each microbatch. Gradients are reduced in the dtype that model/ sums them in:
float32 for token tables and norms, the compute dtype for the rest.

A split sequence needs all keys and values at each query: gathered, or passed round a ring, which is as much; or heads
are exchanged for tokens, and back (arXiv 2309.14509). Tokens that travel to their experts do so once for each of them,
and their results travel back; so do the gradients of both (arXiv 2006.16668).
"""

import collections
import math
from collections.abc import Iterable

from gspmd_lm.foresight.bounds.transfers import (
    FLOAT32_BYTES,
    Parameter,
    Sharding,
    Transfers,
    Volume,
    mesh_axes,
    mesh_axes_except,
)
from gspmd_lm.foresight.graph import Matmul, Node
from gspmd_lm.model.kernels import attention

_INT32_BYTES = 4
*_READ, _OUT = (spec.partition(":")[0] for spec in (attention.Q, attention.K, attention.V, attention.OUT))


class DecoderTransfers(Transfers):
    """`Moves` of the decoder, or of any model that reads and writes a residual stream."""

    def add_model(self) -> None:
        graph = self.graph
        # What blocks read is the residual stream, gathered: their inputs come from there, and their sums go there.
        self.block_input = next(matmul.input for matmul in graph.matmuls if graph.gathered_from(matmul.input))
        self.residual = graph.gathered_from(self.block_input) or self.block_input
        self.blocks()
        for matmul in graph.matmuls:
            if self.is_head(matmul):
                self.loss(matmul) if self.trains else self.logits(matmul)
        for path in graph.looked_up:
            if path not in graph.used or path in graph.multiplied:
                self.look_up(self.weights[path])
        for path in set(graph.used) - graph.multiplied:
            self.small(self.weights[path])

    # The layers

    def is_head(self, matmul: Matmul) -> bool:
        """Whether a product gives the logits: it is part of the loss, and of no word for weights."""
        return not set(matmul.node.name.owners) & set(self.weights)

    def blocks(self) -> None:
        """All products of the layers. How they are read and written is in partial_sums.py."""
        matmuls = [matmul for matmul in self.graph.matmuls if not self.is_head(matmul)]
        inner = {source: matmul for matmul in matmuls if (source := self.graph.gathered_from(matmul.input))}
        adapters = [(first, inner[first.output]) for first in matmuls if first.output in inner]
        reads: dict[Node, list[Matmul]] = collections.defaultdict(list)
        writes: dict[Node, list[Matmul]] = collections.defaultdict(list)
        self.read = {matmul.input for matmul in matmuls}
        for matmul in matmuls:
            if self.graph.gathered_from(matmul.input) and not (matmul.group_axis and matmul.output):
                reads[matmul.input].append(matmul)
            elif matmul.output and self.graph.written_to(matmul.output) is not matmul.output:
                writes[matmul.output].append(matmul)
        adapted = {matmul.node for pair in adapters for matmul in pair}
        for x, group in reads.items():
            if x not in {second.input for _, second in adapters}:
                self.fan_out(x, group, [matmul for matmul in group if matmul.node not in adapted])
        for y, group in writes.items():
            if y not in {first.output for first, _ in adapters}:
                self.fan_in(y, [matmul for matmul in group if matmul.node not in adapted])
        for first, second in adapters:
            self.adapter(first, second)
        for path in {matmul.path for matmul in matmuls if matmul.node not in adapted}:
            weight, used = self.weights[path], self.graph.used[path][0]
            # Forward and backward. Out of a loop, compilers keep what forward gathered of a weight without gradient.
            for _ in range(2 if self.trains and (weight.trained or used.trip_count > 1) else 1):
                self.gather(weight, self.itemsize(used))

    def fan_out(self, x: Node, group: list[Matmul], matmuls: list[Matmul]) -> None:
        """One input, read with several weights; forward and backward. `products` are those of no adapter."""
        home = self.graph.gathered_from(x)
        assert home and x.placed
        kept = self.rules.remat.policy == "none" or x.placed.array in self.saved
        learns = any(self.weights[matmul.path].trained for matmul in group)
        for _ in range(2 if learns and not kept else 1):  # the input, gathered; for the weights' gradients again
            self.transfer(self.bytes(x), self.sharding(home), self.sharding(x), times=x.trip_count)
        for matmul in matmuls:
            self.mixed(matmul, x) if matmul.group_axis else self.matmul(matmul, x, matmul.output)
        self.travel(x, [matmul for matmul in matmuls if matmul.group_axis])
        if self.trains:
            self.summed(x, home, matmuls, [matmul.output for matmul in matmuls])

    def fan_in(self, y: Node, matmuls: list[Matmul]) -> None:
        """Several inputs, each through its own weight, summed into the residual stream; forward and backward."""
        home = self.graph.written_to(y)
        again = self.rules.remat.policy in ("block", "names") and "residual" not in self.saved
        for _ in range(2 if self.trains and again and self.read_again(home) else 1):
            self.summed(y, home, matmuls, [matmul.input for matmul in matmuls])
        if self.trains:
            self.transfer(self.bytes(y), self.sharding(home), self.sharding(y), times=y.trip_count)  # the gradient
        for matmul in matmuls:
            self.mixed(matmul, y) if matmul.group_axis else self.matmul(matmul, y, matmul.input)

    def mixed(self, matmul: Matmul, near: Node) -> None:
        """The gradient of experts' weights: each device has a sum over its own tokens.

        If a matrix of an adapter lacks the axis along which the weight is split, that of the other matrix is a sum over
        it, and the gradient is one too.
        """
        weight, tokens = self.weights[matmul.path], mesh_axes(self.sharding(near), "batch", "seq")
        far = {axis: names for axis, names in self.far(matmul, near).items() if axis not in weight.sizes}
        if weight.trained and self.trains:
            over = tokens | mesh_axes(far)
            self.transfer(
                self.bytes(matmul.weight), weight.compute, weight.gradient, over, near.trip_count, "gradients"
            )

    def travel(self, x: Node, matmuls: list[Matmul]) -> None:
        """Tokens on their way to the experts that `products` read them with, and back, if both are split alike."""
        if not matmuls:
            return
        matmul, place = matmuls[0], self.sharding(x)
        tokens, over = mesh_axes(place, "batch", "seq"), self.experts(matmul)
        if not over or not over <= tokens:
            return
        rows, width = matmul.node.shape[0], x.shape[-1]
        # There and back; their gradients the other way; and there again for what is computed again.
        again = self.rules.remat.policy != "none" and "dispatched" not in self.saved
        here, there = {"batch": tuple(tokens)}, {"batch": tuple(tokens - over), matmul.group_axis: tuple(over)}
        for _ in range(4 + again if self.trains else 2):
            self.transfer(rows * width * self.itemsize(x), here, there, times=x.trip_count)
        if self.trains:  # for the gradients of the weights of a token's experts, one number for each of these
            self.transfer(rows * FLOAT32_BYTES, here, there, times=x.trip_count)

    def experts(self, matmul: Matmul) -> set[str]:
        """The mesh axes that split the experts of a product."""
        return set(self.weights[matmul.path].compute[matmul.group_axis])

    def read_again(self, node: Node) -> bool:
        """Whether the same block reads what is written here, so that computing it again needs the sum."""
        waiting, seen = [node], {node}
        while waiting:
            for user in waiting.pop().users:
                if user in seen or user.checkpoint_name == "layer_input":
                    continue
                if user in self.read:
                    return True
                seen.add(user)
                waiting.append(user)
        return False

    def matmul(self, matmul: Matmul, near: Node, far: Node | None) -> None:
        """What a product and its gradients move, but for sums into the residual stream.

        `near` is its end at the residual stream, `far` the other one.
        """
        assert far
        weight, x, y, times = self.weights[matmul.path], self.sharding(near), self.sharding(far), near.trip_count
        wide = self.wide(matmul, near)
        shared = [axis for axis in x if axis in weight.sizes]
        rows_bytes = math.prod(near.shape[:2]) * self.itemsize(near)
        size_bytes = rows_bytes * math.prod(weight.sizes[axis] for axis in wide)
        have = {"batch": x["batch"], "seq": x["seq"], **{axis: weight.compute[axis] for axis in wide}}
        over_shared = mesh_axes(x, *shared)
        if not self.trains:
            self.transfer(size_bytes, have, y, over_shared, times)
            return
        assert far.placed
        queries = self.queries(far)
        apart_queries = mesh_axes(queries, "seq")
        again = self.rules.remat.policy != "none"
        if self.rules.context == "ulysses" and far.placed.array in (*_READ, _OUT) and mesh_axes(x, "seq"):
            self.transfer(size_bytes, have, {**y, "seq": x["seq"]}, over_shared, times)
            apart = {**y, "seq": (), wide[0]: (*y[wide[0]], *x["seq"])}
            again &= far.placed.array != _OUT or _OUT not in self.saved
            for _ in range(2 + again):  # heads for tokens, their gradients, and what is computed again
                self.transfer(size_bytes, {**y, "seq": x["seq"]}, apart, times=times)
        elif apart_queries:  # each query reads all keys; their gradients come from everywhere
            whole, what = {**y, "seq": ()}, "keys" if self.rules.context == "ring" else "activations"
            self.transfer(size_bytes, have, whole, over_shared, times, what)
            self.transfer(size_bytes, whole, {**y, "seq": x["seq"]}, apart_queries, times, what)
            if again or self.rules.context == "ring":
                self.transfer(size_bytes, {**whole, "seq": x["seq"]}, whole, (), times, what)
        else:
            self.transfer(size_bytes, have, y, over_shared, times)
        matrix_bytes = self.bytes(matmul.weight)
        if apart := mesh_axes(weight.compute, *shared) - over_shared:
            # A mesh axis splits the weight in use, but not its input. Either the weight is gathered, or the sums over
            # embed are reduced and the result on the other side is gathered. Only the first is possible where that
            # mesh axis splits the rows.
            gathered = [self.volume(matrix_bytes, weight.compute, {**weight.compute, **dict.fromkeys(shared, ())})]
            reduced = [self.volume(size_bytes, have, y, apart)]
            result = [self.volume(self.bytes(near), {**x, shared[0]: tuple(apart)}, x)]
            for instead in (reduced, result):
                self.add_cheapest(gathered, *([] if apart & mesh_axes(have) else [instead]), times=times)
        if weight.trained:
            has = {**{axis: x[axis] for axis in shared}, **{axis: y[axis] for axis in wide}}
            self.transfer(matrix_bytes, has, weight.gradient, mesh_axes(x, "batch", "seq"), times, "gradients")
        if finer := mesh_axes_except(queries, "batch", "seq") - mesh_axes_except(y, "batch", "seq"):
            # Heads are split finer than their keys: the gradients of a key's heads meet, in the keys or in the matrix.
            split = {wide[0]: (*y[wide[0]], *finer)}
            in_matrix = [self.volume(matrix_bytes, {**weight.gradient, **split}, weight.gradient)]
            in_keys = [self.volume(size_bytes, {**y, **split}, y)]
            self.add_cheapest(in_keys, *([in_matrix] if weight.trained else []), times=times)

    def wide(self, matmul: Matmul, near: Node) -> list[str]:
        """The axes of a weight that its end at the residual stream has not."""
        assert matmul.weight.placed and near.placed
        return [axis for axis in matmul.weight.placed.axes if axis not in near.placed.axes]

    def far(self, matmul: Matmul, near: Node) -> Sharding:
        """How experts' weights are split along the axes that their end at the residual stream has not.

        For an adapter it is how its weight is.
        """
        path = self.rules.vocabulary.adapted(matmul.path)
        used = self.graph.used[path][0].placed
        assert used and near.placed
        return {axis: self.weights[path].compute[axis] for axis in used.axes if axis not in near.placed.axes}

    def queries(self, keys: Node) -> Sharding:
        """Where the queries live that read keys or values; nowhere for other activations."""
        if not keys.placed or "kv_seq" not in keys.placed.axes:
            return {}
        found = [node for node in self.graph.combined_with(keys) if node.placed and "seq" in node.placed.axes]
        return self.sharding(found[0]) if found else {}

    def adapter(self, first: Matmul, second: Matmul) -> None:
        """What a low-rank adapter moves: its two matrices, their gradients, and the sum of what lies between.

        An adapter of a matrix that writes to the residual stream makes no such sum: its addends join those of the
        matrix, and the gradient of its second matrix is summed over the axes that split its first.
        """
        inner: set[str] = set()
        stream = self.sharding(self.block_input)
        for matmul in (first, second):
            weight = self.weights[matmul.path]
            gathered = self.volume(weight.elements * self.itemsize(matmul.weight), weight.storage, weight.compute)
            self.add(gathered, 1, "weights", matmul.node.trip_count > 1)
            wide = mesh_axes_except(weight.compute, "layers", *stream)
            if weight.trained:
                rows = mesh_axes(stream, "batch", "seq")
                over, times = rows | inner, matmul.node.trip_count
                self.transfer(self.bytes(matmul.weight), weight.compute, weight.gradient, over, times, "gradients")
            if matmul is first:
                inner = wide
            elif wide and self.trains:
                self.transfer(self.bytes(matmul.input), stream, stream, wide, matmul.node.trip_count)

    def summed(self, near: Node, home: Node, matmuls: list[Matmul], far: Iterable[Node | None]) -> None:
        """The sum over heads or hidden units, into the residual; products that are split alike are added up first."""
        tokens, partials = mesh_axes(self.sharding(near), "batch", "seq"), set()
        for matmul, end in zip(matmuls, far, strict=True):
            if matmul.group_axis:  # where tokens travel to experts, their results are whole
                over = mesh_axes(self.far(matmul, near))
                partials.add(frozenset(over - self.experts(matmul) if self.experts(matmul) <= tokens else over))
            elif end:
                partials.add(frozenset(mesh_axes(self.sharding(end), *self.wide(matmul, near))))
        for partial in partials:
            self.transfer(self.bytes(near), self.sharding(near), self.sharding(home), partial, near.trip_count)

    # Before and after the layers

    def look_up(self, table: Parameter) -> None:
        """The token table and learned positions, forward and backward: see `partial_sums.look_up`.

        A tied table is gathered for the logits anyway, and its two gradients can be added up before they are reduced.
        """
        tied, size_bytes = table.path in self.graph.multiplied, self.bytes(self.block_input)
        ids, width = table.sizes
        itemsize = self.itemsize(self.block_input)
        residual, block_input = self.sharding(self.residual), self.sharding(self.block_input)
        rows, batch, columns = table.compute[ids], mesh_axes(residual, "batch", "seq"), mesh_axes(table.storage, width)
        if rows:
            self.gather(table, 0 if tied else itemsize)
            self.transfer(size_bytes, block_input, residual, rows)
            if table.trained:
                self.transfer(size_bytes, residual, block_input)
        elif not (tied and self.trains):
            # Read where it rests, for which the ids of others are needed, or gathered, whichever is less.
            there = self.volume(size_bytes, {width: tuple(columns)}, residual)
            gathered = self.volume(table.elements * itemsize, table.storage, {})
            self.add_cheapest([there, self.ids(columns & batch)], [gathered])
        # The gradients have two ways too. Those of the tables are reduced, or the gradient of x goes to the devices
        # that hold its columns, where it is added up.
        gradients = [] if tied or not table.trained else [(table, FLOAT32_BYTES)]
        used = [self.weights[path] for path in self.graph.looked_up if path in self.graph.used and path != table.path]
        gradients += [(positions, itemsize) for positions in used if positions.trained]
        meet = set() if rows else mesh_axes(table.gradient, width) & batch
        back = {axis: tuple(name for name in names if name not in meet) for axis, names in residual.items()}
        apart = {width: tuple(meet)}
        reduced = [
            self.volume(like.elements * itemsize, {ids: like.compute.get(ids, ())}, like.gradient, batch)
            for like, itemsize in gradients
        ]
        sent = [self.volume(size_bytes, residual, {**back, **apart}), self.ids(meet - columns)]
        sent += [
            self.volume(like.elements * itemsize, apart, like.gradient, batch - meet) for like, itemsize in gradients
        ]
        self.add_cheapest(reduced, *([sent] if meet and gradients else []))

    def ids(self, over: set[str]) -> Volume:
        """The token ids, gathered over some mesh axes."""
        ids_bytes = math.prod(self.residual.shape[:2]) * _INT32_BYTES
        elsewhere = mesh_axes(self.sharding(self.residual), "batch", "seq") - over
        return self.volume(ids_bytes, {"batch": (*over, *elsewhere)}, {"batch": tuple(elsewhere)})

    def loss(self, head: Matmul) -> None:
        """Logits, softmax and their gradients, which are found in the forward pass: see model/loss.py."""
        assert head.output
        table, x, logits = self.weights[head.path], self.sharding(head.input), self.sharding(head.output)
        home, wide = self.sharding(self.graph.gathered_from(head.input) or head.input), self.wide(head, head.input)
        columns = mesh_axes(logits, *wide)
        self.transfer(self.bytes(head.input), home, x)
        self.gather(table, self.itemsize(head.weight))
        by_token = {axis: logits[axis] for axis in ("batch", "seq")}
        for _ in range(3):  # the highest logit, the sum of exponentials, the target's logit
            self.transfer(math.prod(head.input.shape[:2]) * FLOAT32_BYTES, by_token, by_token, columns)
        self.transfer(self.bytes(head.input), x, home, columns)
        if table.trained:
            have = {axis: table.compute[axis] for axis in wide}
            rows = mesh_axes(x, "batch", "seq")
            self.transfer(table.elements * FLOAT32_BYTES, have, table.gradient, rows, what="gradients")

    def logits(self, head: Matmul) -> None:
        """The logits of one token per row, whole on every device, which chooses the next token."""
        assert head.output
        self.gather(self.weights[head.path], self.itemsize(head.weight))
        logits = self.sharding(head.output)
        have = {axis: names for axis, names in logits.items() if axis != "seq"}
        self.transfer(head.output.shape[0] * head.output.shape[-1] * FLOAT32_BYTES, have, {})

    def small(self, weight: Parameter) -> None:
        """A norm's scale, a bias or a table of positions: used once, its gradient summed over everything else."""
        itemsize = self.itemsize(self.graph.used[weight.path][0])
        self.gather(weight, itemsize)
        applied = self.graph.applied_to(weight.path)
        if weight.path in self.graph.looked_up or not weight.trained or not applied:
            return
        place = self.sharding(applied)
        have = {axis: place.get(axis, names) for axis, names in weight.compute.items()}
        over = mesh_axes_except(place, *weight.sizes)
        self.transfer(weight.elements * itemsize, have, weight.gradient, over, what="gradients")
