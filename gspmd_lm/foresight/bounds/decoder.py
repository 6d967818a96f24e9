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
        self.add_layers()
        for matmul in graph.matmuls:
            if self.is_head(matmul):
                self.add_loss(matmul) if self.trains else self.logits(matmul)
        for path in graph.looked_up:
            if path not in graph.used or path in graph.multiplied:
                self.add_look_up(self.weights[path])
        for path in set(graph.used) - graph.multiplied:
            self.add_small(self.weights[path])

    # The layers

    def is_head(self, matmul: Matmul) -> bool:
        """Whether a product gives the logits: it is part of the loss, and of no word for weights."""
        return not set(matmul.node.name.owners) & set(self.weights)

    def add_layers(self) -> None:
        """All products of the layers. How they are read and written is in partial_sums.py."""
        matmuls = [matmul for matmul in self.graph.matmuls if not self.is_head(matmul)]
        inner = {source: matmul for matmul in matmuls if (source := self.graph.gathered_from(matmul.input))}
        adapters = [(first, inner[first.output]) for first in matmuls if first.output in inner]
        reads: dict[Node, list[Matmul]] = collections.defaultdict(list)
        writes: dict[Node, list[Matmul]] = collections.defaultdict(list)
        self.matmul_inputs = {matmul.input for matmul in matmuls}
        for matmul in matmuls:
            if self.graph.gathered_from(matmul.input) and not (matmul.group_axis and matmul.output):
                reads[matmul.input].append(matmul)
            elif matmul.output and self.graph.written_to(matmul.output) is not matmul.output:
                writes[matmul.output].append(matmul)
        adapted = {matmul.node for pair in adapters for matmul in pair}
        for x, group in reads.items():
            if x not in {second.input for _, second in adapters}:
                self.add_input_side(x, group, [matmul for matmul in group if matmul.node not in adapted])
        for y, group in writes.items():
            if y not in {first.output for first, _ in adapters}:
                self.add_output_side(y, [matmul for matmul in group if matmul.node not in adapted])
        for first, second in adapters:
            self.add_adapter(first, second)
        for path in {matmul.path for matmul in matmuls if matmul.node not in adapted}:
            weight, used = self.weights[path], self.graph.used[path][0]
            # Forward and backward. Out of a loop, compilers keep what forward gathered of a weight without gradient.
            for _ in range(2 if self.trains and (weight.trained or used.trip_count > 1) else 1):
                self.gather(weight, self.itemsize(used))

    def add_input_side(self, x: Node, readers: list[Matmul], matmuls: list[Matmul]) -> None:
        """One input, read with several weights; forward and backward. `products` are those of no adapter."""
        stream = self.graph.gathered_from(x)
        assert stream and x.placed
        input_saved = self.rules.remat.policy == "none" or x.placed.array in self.saved
        any_trained = any(self.weights[matmul.path].trained for matmul in readers)
        for _ in range(2 if any_trained and not input_saved else 1):  # the input, gathered; for the weights' gradients again
            self.transfer(self.bytes(x), self.sharding(stream), self.sharding(x), times=x.trip_count)
        for matmul in matmuls:
            self.add_expert_gradient(matmul, x) if matmul.group_axis else self.add_matmul(matmul, x, matmul.output)
        self.add_dispatch(x, [matmul for matmul in matmuls if matmul.group_axis])
        if self.trains:
            self.add_partial_sums(x, stream, matmuls, [matmul.output for matmul in matmuls])

    def add_output_side(self, y: Node, matmuls: list[Matmul]) -> None:
        """Several inputs, each through its own weight, summed into the residual stream; forward and backward."""
        stream = self.graph.written_to(y)
        recomputed = self.rules.remat.policy in ("block", "names") and "residual" not in self.saved
        for _ in range(2 if self.trains and recomputed and self.read_in_same_block(stream) else 1):
            self.add_partial_sums(y, stream, matmuls, [matmul.input for matmul in matmuls])
        if self.trains:
            self.transfer(self.bytes(y), self.sharding(stream), self.sharding(y), times=y.trip_count)  # the gradient
        for matmul in matmuls:
            self.add_expert_gradient(matmul, y) if matmul.group_axis else self.add_matmul(matmul, y, matmul.input)

    def add_expert_gradient(self, matmul: Matmul, stream_end: Node) -> None:
        """The gradient of experts' weights: each device has a sum over its own tokens.

        If a matrix of an adapter lacks the axis along which the weight is split, that of the other matrix is a sum over
        it, and the gradient is one too.
        """
        weight, tokens = self.weights[matmul.path], mesh_axes(self.sharding(stream_end), "batch", "seq")
        inner_sharding = {axis: names for axis, names in self.inner_sharding(matmul, stream_end).items() if axis not in weight.sizes}
        if weight.trained and self.trains:
            over = tokens | mesh_axes(inner_sharding)
            self.transfer(
                self.bytes(matmul.weight), weight.compute, weight.gradient, over, stream_end.trip_count, "gradients"
            )

    def add_dispatch(self, x: Node, matmuls: list[Matmul]) -> None:
        """Tokens on their way to the experts that `products` read them with, and back, if both are split alike."""
        if not matmuls:
            return
        matmul, sharding = matmuls[0], self.sharding(x)
        token_axes, expert_axes = mesh_axes(sharding, "batch", "seq"), self.expert_axes(matmul)
        if not expert_axes or not expert_axes <= token_axes:
            return
        rows, width = matmul.node.shape[0], x.shape[-1]
        # There and back; their gradients the other way; and there again for what is computed again.
        recomputed = self.rules.remat.policy != "none" and "dispatched" not in self.saved
        by_tokens, by_experts = {"batch": tuple(token_axes)}, {"batch": tuple(token_axes - expert_axes), matmul.group_axis: tuple(expert_axes)}
        for _ in range(4 + recomputed if self.trains else 2):
            self.transfer(rows * width * self.itemsize(x), by_tokens, by_experts, times=x.trip_count)
        if self.trains:  # for the gradients of the weights of a token's experts, one number for each of these
            self.transfer(rows * FLOAT32_BYTES, by_tokens, by_experts, times=x.trip_count)

    def expert_axes(self, matmul: Matmul) -> set[str]:
        """The mesh axes that split the experts of a product."""
        return set(self.weights[matmul.path].compute[matmul.group_axis])

    def read_in_same_block(self, node: Node) -> bool:
        """Whether the same block reads what is written here, so that computing it again needs the sum."""
        waiting, seen = [node], {node}
        while waiting:
            for user in waiting.pop().users:
                if user in seen or user.checkpoint_name == "layer_input":
                    continue
                if user in self.matmul_inputs:
                    return True
                seen.add(user)
                waiting.append(user)
        return False

    def add_matmul(self, matmul: Matmul, stream_end: Node, inner_end: Node | None) -> None:
        """What a product and its gradients move, but for sums into the residual stream.

        `near` is its end at the residual stream, `far` the other one.
        """
        assert inner_end
        weight, stream, inner, times = self.weights[matmul.path], self.sharding(stream_end), self.sharding(inner_end), stream_end.trip_count
        inner_axes = self.inner_axes(matmul, stream_end)
        contracted = [axis for axis in stream if axis in weight.sizes]
        rows_bytes = math.prod(stream_end.shape[:2]) * self.itemsize(stream_end)
        inner_bytes = rows_bytes * math.prod(weight.sizes[axis] for axis in inner_axes)
        computed = {"batch": stream["batch"], "seq": stream["seq"], **{axis: weight.compute[axis] for axis in inner_axes}}
        summed_over = mesh_axes(stream, *contracted)
        if not self.trains:
            self.transfer(inner_bytes, computed, inner, summed_over, times)
            return
        assert inner_end.placed
        queries = self.sharding_of_queries(inner_end)
        query_axes = mesh_axes(queries, "seq")
        recomputed = self.rules.remat.policy != "none"
        if self.rules.context == "ulysses" and inner_end.placed.array in (*_READ, _OUT) and mesh_axes(stream, "seq"):
            self.transfer(inner_bytes, computed, {**inner, "seq": stream["seq"]}, summed_over, times)
            apart = {**inner, "seq": (), inner_axes[0]: (*inner[inner_axes[0]], *stream["seq"])}
            recomputed &= inner_end.placed.array != _OUT or _OUT not in self.saved
            for _ in range(2 + recomputed):  # heads for tokens, their gradients, and what is computed again
                self.transfer(inner_bytes, {**inner, "seq": stream["seq"]}, apart, times=times)
        elif query_axes:  # each query reads all keys; their gradients come from everywhere
            all_keys, kind = {**inner, "seq": ()}, "keys" if self.rules.context == "ring" else "activations"
            self.transfer(inner_bytes, computed, all_keys, summed_over, times, kind)
            self.transfer(inner_bytes, all_keys, {**inner, "seq": stream["seq"]}, query_axes, times, kind)
            if recomputed or self.rules.context == "ring":
                self.transfer(inner_bytes, {**all_keys, "seq": stream["seq"]}, all_keys, (), times, kind)
        else:
            self.transfer(inner_bytes, computed, inner, summed_over, times)
        matrix_bytes = self.bytes(matmul.weight)
        if apart := mesh_axes(weight.compute, *contracted) - summed_over:
            # A mesh axis splits the weight in use, but not its input. Either the weight is gathered, or the sums over
            # embed are reduced and the result on the other side is gathered. Only the first is possible where that
            # mesh axis splits the rows.
            gathered = [self.volume(matrix_bytes, weight.compute, {**weight.compute, **dict.fromkeys(contracted, ())})]
            reduced = [self.volume(inner_bytes, computed, inner, apart)]
            result = [self.volume(self.bytes(stream_end), {**stream, contracted[0]: tuple(apart)}, stream)]
            for alternative in (reduced, result):
                self.add_cheapest(gathered, *([] if apart & mesh_axes(computed) else [alternative]), times=times)
        if weight.trained:
            local_gradient = {**{axis: stream[axis] for axis in contracted}, **{axis: inner[axis] for axis in inner_axes}}
            self.transfer(matrix_bytes, local_gradient, weight.gradient, mesh_axes(stream, "batch", "seq"), times, "gradients")
        if head_axes := mesh_axes_except(queries, "batch", "seq") - mesh_axes_except(inner, "batch", "seq"):
            # Heads are split finer than their keys: the gradients of a key's heads meet, in the keys or in the matrix.
            split = {inner_axes[0]: (*inner[inner_axes[0]], *head_axes)}
            in_matrix = [self.volume(matrix_bytes, {**weight.gradient, **split}, weight.gradient)]
            in_keys = [self.volume(inner_bytes, {**inner, **split}, inner)]
            self.add_cheapest(in_keys, *([in_matrix] if weight.trained else []), times=times)

    def inner_axes(self, matmul: Matmul, stream_end: Node) -> list[str]:
        """The axes of a weight that its end at the residual stream has not."""
        assert matmul.weight.placed and stream_end.placed
        return [axis for axis in matmul.weight.placed.axes if axis not in stream_end.placed.axes]

    def inner_sharding(self, matmul: Matmul, stream_end: Node) -> Sharding:
        """How experts' weights are split along the axes that their end at the residual stream has not.

        For an adapter it is how its weight is.
        """
        path = self.rules.vocabulary.adapted(matmul.path)
        compute_spec = self.graph.used[path][0].placed
        assert compute_spec and stream_end.placed
        return {axis: self.weights[path].compute[axis] for axis in compute_spec.axes if axis not in stream_end.placed.axes}

    def sharding_of_queries(self, keys: Node) -> Sharding:
        """Where the queries live that read keys or values; nowhere for other activations."""
        if not keys.placed or "kv_seq" not in keys.placed.axes:
            return {}
        queries = [node for node in self.graph.combined_with(keys) if node.placed and "seq" in node.placed.axes]
        return self.sharding(queries[0]) if queries else {}

    def add_adapter(self, first: Matmul, second: Matmul) -> None:
        """What a low-rank adapter moves: its two matrices, their gradients, and the sum of what lies between.

        An adapter of a matrix that writes to the residual stream makes no such sum: its addends join those of the
        matrix, and the gradient of its second matrix is summed over the axes that split its first.
        """
        inner_axes: set[str] = set()
        stream = self.sharding(self.block_input)
        for matmul in (first, second):
            weight = self.weights[matmul.path]
            gathered = self.volume(weight.elements * self.itemsize(matmul.weight), weight.storage, weight.compute)
            self.add(gathered, 1, "weights", matmul.node.trip_count > 1)
            rank_axes = mesh_axes_except(weight.compute, "layers", *stream)
            if weight.trained:
                row_axes = mesh_axes(stream, "batch", "seq")
                summed_over, times = row_axes | inner_axes, matmul.node.trip_count
                self.transfer(self.bytes(matmul.weight), weight.compute, weight.gradient, summed_over, times, "gradients")
            if matmul is first:
                inner_axes = rank_axes
            elif rank_axes and self.trains:
                self.transfer(self.bytes(matmul.input), stream, stream, rank_axes, matmul.node.trip_count)

    def add_partial_sums(self, written: Node, stream: Node, matmuls: list[Matmul], inner_ends: Iterable[Node | None]) -> None:
        """The sum over heads or hidden units, into the residual; products that are split alike are added up first."""
        token_axes, partials = mesh_axes(self.sharding(written), "batch", "seq"), set()
        for matmul, inner_end in zip(matmuls, inner_ends, strict=True):
            if matmul.group_axis:  # where tokens travel to experts, their results are whole
                over = mesh_axes(self.inner_sharding(matmul, written))
                partials.add(frozenset(over - self.expert_axes(matmul) if self.expert_axes(matmul) <= token_axes else over))
            elif inner_end:
                partials.add(frozenset(mesh_axes(self.sharding(inner_end), *self.inner_axes(matmul, written))))
        for partial in partials:
            self.transfer(self.bytes(written), self.sharding(written), self.sharding(stream), partial, written.trip_count)

    # Before and after the layers

    def add_look_up(self, table: Parameter) -> None:
        """The token table and learned positions, forward and backward: see `partial_sums.look_up`.

        A tied table is gathered for the logits anyway, and its two gradients can be added up before they are reduced.
        """
        tied, size_bytes = table.path in self.graph.multiplied, self.bytes(self.block_input)
        ids, width = table.sizes
        itemsize = self.itemsize(self.block_input)
        residual, block_input = self.sharding(self.residual), self.sharding(self.block_input)
        row_axes, token_axes, column_axes = table.compute[ids], mesh_axes(residual, "batch", "seq"), mesh_axes(table.storage, width)
        if row_axes:
            self.gather(table, 0 if tied else itemsize)
            self.transfer(size_bytes, block_input, residual, row_axes)
            if table.trained:
                self.transfer(size_bytes, residual, block_input)
        elif not (tied and self.trains):
            # Read where it rests, for which the ids of others are needed, or gathered, whichever is less.
            looked_up_where_stored = self.volume(size_bytes, {width: tuple(column_axes)}, residual)
            table_gathered = self.volume(table.elements * itemsize, table.storage, {})
            self.add_cheapest([looked_up_where_stored, self.token_ids(column_axes & token_axes)], [table_gathered])
        # The gradients have two ways too. Those of the tables are reduced, or the gradient of x goes to the devices
        # that hold its columns, where it is added up.
        gradients = [] if tied or not table.trained else [(table, FLOAT32_BYTES)]
        used = [self.weights[path] for path in self.graph.looked_up if path in self.graph.used and path != table.path]
        gradients += [(positions, itemsize) for positions in used if positions.trained]
        shared_axes = set() if row_axes else mesh_axes(table.gradient, width) & token_axes
        remaining = {axis: tuple(name for name in names if name not in shared_axes) for axis, names in residual.items()}
        by_columns = {width: tuple(shared_axes)}
        gradients_reduced = [
            self.volume(like.elements * itemsize, {ids: like.compute.get(ids, ())}, like.gradient, token_axes)
            for like, itemsize in gradients
        ]
        activations_sent = [self.volume(size_bytes, residual, {**remaining, **by_columns}), self.token_ids(shared_axes - column_axes)]
        activations_sent += [
            self.volume(like.elements * itemsize, by_columns, like.gradient, token_axes - shared_axes) for like, itemsize in gradients
        ]
        self.add_cheapest(gradients_reduced, *([activations_sent] if shared_axes and gradients else []))

    def token_ids(self, gathered_axes: set[str]) -> Volume:
        """The token ids, gathered over some mesh axes."""
        ids_bytes = math.prod(self.residual.shape[:2]) * _INT32_BYTES
        other_axes = mesh_axes(self.sharding(self.residual), "batch", "seq") - gathered_axes
        return self.volume(ids_bytes, {"batch": (*gathered_axes, *other_axes)}, {"batch": tuple(other_axes)})

    def add_loss(self, head: Matmul) -> None:
        """Logits, softmax and their gradients, which are found in the forward pass: see model/loss.py."""
        assert head.output
        table, x, logits = self.weights[head.path], self.sharding(head.input), self.sharding(head.output)
        stream, vocab_axes = self.sharding(self.graph.gathered_from(head.input) or head.input), self.inner_axes(head, head.input)
        summed_over = mesh_axes(logits, *vocab_axes)
        self.transfer(self.bytes(head.input), stream, x)
        self.gather(table, self.itemsize(head.weight))
        by_token = {axis: logits[axis] for axis in ("batch", "seq")}
        for _ in range(3):  # the highest logit, the sum of exponentials, the target's logit
            self.transfer(math.prod(head.input.shape[:2]) * FLOAT32_BYTES, by_token, by_token, summed_over)
        self.transfer(self.bytes(head.input), x, stream, summed_over)
        if table.trained:
            local_gradient = {axis: table.compute[axis] for axis in vocab_axes}
            token_axes = mesh_axes(x, "batch", "seq")
            self.transfer(table.elements * FLOAT32_BYTES, local_gradient, table.gradient, token_axes, kind="gradients")

    def logits(self, head: Matmul) -> None:
        """The logits of one token per row, whole on every device, which chooses the next token."""
        assert head.output
        self.gather(self.weights[head.path], self.itemsize(head.weight))
        logits = self.sharding(head.output)
        computed = {axis: names for axis, names in logits.items() if axis != "seq"}
        self.transfer(head.output.shape[0] * head.output.shape[-1] * FLOAT32_BYTES, computed, {})

    def add_small(self, weight: Parameter) -> None:
        """A norm's scale, a bias or a table of positions: used once, its gradient summed over everything else."""
        itemsize = self.itemsize(self.graph.used[weight.path][0])
        self.gather(weight, itemsize)
        applied = self.graph.applied_to(weight.path)
        if weight.path in self.graph.looked_up or not weight.trained or not applied:
            return
        sharding = self.sharding(applied)
        local_gradient = {axis: sharding.get(axis, names) for axis, names in weight.compute.items()}
        summed_over = mesh_axes_except(sharding, *weight.sizes)
        self.transfer(weight.elements * itemsize, local_gradient, weight.gradient, summed_over, kind="gradients")
