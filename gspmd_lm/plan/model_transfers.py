"""The communication volume of a sharded model: the bytes that one device must send in a step.

For tensor parallelism it is Megatron's count, arXiv 1909.08053: four reductions of [B, T, D] per layer, each of
2 (n-1)/n; with a sequence-split residual, arXiv 2205.05198, four reduce-scatters and six all-gathers of (n-1)/n, since
a matmul's input is gathered again for its weight's gradient. For fully sharded weights it is ZeRO's, arXiv 1910.02054:
weights are gathered once forward and once backward in the compute dtype (recomputation needs no third time) and their
gradients reduce-scattered, all of it in each microbatch. Gradients are reduced in the dtype that model/ sums them in:
float32 for token tables and norms, the compute dtype for the rest.

A split sequence needs all keys and values at each query: gathered, or passed round a ring, which is as much; or heads
are exchanged for tokens, and back (arXiv 2309.14509). Tokens that travel to their experts do so once for each of them,
and their results travel back; so do the gradients of both (arXiv 2006.16668).
"""

import collections
import math
from collections.abc import Iterable

from gspmd_lm.foresight.bounds import FLOAT32_BYTES
from gspmd_lm.foresight.graph import OUT, READ, Matmul, Node
from gspmd_lm.model.parts.latent import K_ROPE
from gspmd_lm.plan.operations import LINEAR
from gspmd_lm.plan.traces import Part
from gspmd_lm.plan.transfers import OF_KEYS, Parameter, Sharding, Transfers, mesh_axes, mesh_axes_except
from gspmd_lm.sharding.remat_policy import KEPT_WITH_DOTS
from gspmd_lm.sharding.shapes import Arrays

_SHARED_KEY = K_ROPE.partition(":")[0]


class ModelTransfers(Transfers):
    """The transfers of any model.

    A matmul has a `stream_end` and an `inner_end`. The stream end is what it reads, or the sum that it is a part of:
    where blocks read from a residual stream and write to it, the residual stream, gathered. Of what a model moves
    between two shardings of its activations, these moves are counted: those of `gathered` and `reduced` of
    sharding/matmuls.py, of keys and values that all queries read, of rows that are looked up, and of an array that is
    made of another one without a matmul.
    """

    def __init__(self, part: Part, arrays: Arrays, forward_alone: bool = False):
        super().__init__(part, arrays, forward_alone)
        self.add_model()
        self.add_update()

    def add_model(self) -> None:
        """Adds all that the program does before its weights are updated."""
        graph = self.graph
        # The blocks to which remat applies: their inputs have a name. Where none has, any operation may be in a block.
        self.blocks = {node.name.modules for node in graph.nodes if node.checkpoint_name == "layer_input"} or {()}
        # Attention whose keys are made from an array that is whole: its queries stay where their tokens are.
        self.with_whole_keys = {
            _module(matmul)
            for matmul in self.matmuls
            if matmul.output and matmul.output.array in READ[1:] and matmul.input.array not in OF_KEYS
            if not self.sharding(matmul.input).get("seq")
        }
        self.add_matmuls()
        if self.part.of_stages and not self.forward_alone:
            self.add_stages(self.part.stream)
        for matmul in self.matmuls:
            if self.is_head(matmul) and not self.forward_alone:
                self.add_loss(matmul)
        looked_up = {path: self.rows_of(nodes) for path, nodes in graph.looked_up.items() if self.part.has(path)}
        added = set[str]()  # tables whose gradients are added with those of another one
        for path, found in looked_up.items():
            if path in graph.placements_in_use and path not in graph.matrix_paths:
                continue
            for rows in found:
                used = [one for one in looked_up if one in graph.placements_in_use and one != path]
                small = [one for one in used if rows in looked_up[one]]
                is_gathered = path in graph.matrix_paths and len(found) == 1
                self.add_look_up(self.weights[path], rows, [self.weights[one] for one in small], is_gathered)
                added.update(small)
        for path in set(self.used) - graph.matrix_paths:
            self.add_small(self.weights[path], has_sum=path in added)
        if self.part.of_stages is None:
            self.add_moves()

    def rows_of(self, look_ups: Iterable[Node]) -> list[Node]:
        """Where the rows are placed that some operations look up."""
        return [placed for node in look_ups for placed in self.graph.after([node])[:1]]

    # Matmuls

    def add_matmuls(self) -> None:
        """Adds what all matmuls move but those of the loss. matmuls.py says how they read and write the stream."""
        matmuls = [matmul for matmul in self.matmuls if not self.is_head(matmul)]
        inner = {source: matmul for matmul in matmuls if (source := self.graph.gathered_from(matmul.input))}
        names = self.rules.vocabulary
        low_rank = [matmul for matmul in matmuls if names.placing_path(matmul.path) != matmul.path]
        adapters = [(first, inner[first.output]) for first in low_rank if first.output in inner]
        reads: dict[Node, list[Matmul]] = collections.defaultdict(list)
        writes: dict[Node, list[Matmul]] = collections.defaultdict(list)
        for matmul in matmuls:
            is_read = self.graph.gathered_from(matmul.input) and not (matmul.group_axis and matmul.output)
            if matmul.output and not is_read and self.graph.written_to(matmul.output) is not matmul.output:
                writes[matmul.output].append(matmul)
            else:
                reads[matmul.input].append(matmul)
        adapted = {matmul.node for pair in adapters for matmul in pair}
        writes = {y: group for y, group in writes.items() if y not in {first.output for first, _ in adapters}}
        self.summed = {self.graph.written_to(y) for y in writes}  # where sums of matmuls are placed in the stream
        for x, group in reads.items():
            if x not in {second.input for _, second in adapters}:
                self.add_input_side(x, group, [matmul for matmul in group if matmul.node not in adapted])
        for y, group in writes.items():
            self.add_output_side(y, [matmul for matmul in group if matmul.node not in adapted])
        for first, second in adapters:
            self.add_adapter(first, second)
        for matmul in {matmul.path: matmul for matmul in matmuls if matmul.node not in adapted}.values():
            self.add_weight(matmul)

    def add_weight(self, matmul: Matmul) -> None:
        """Adds the gathers of a matmul's weight, forward and backward."""
        weight, used = self.weights[matmul.path], self.graph.placements_in_use[matmul.path][0]
        assert used.placed
        # Out of loops and of what is computed again, compilers keep what forward gathered. A loop takes a stack apart,
        # even one of a single layer.
        in_loop = used.trip_count > 1 or len(weight.sizes) > len(used.placed.axes)
        again = in_loop or self.is_in_block(used)
        passes = 1 + (again and self.has_gradient(matmul.node) and not self.is_shared(matmul))
        if self.forward_alone:
            passes = 0 if self.part.gathers_once else 1
        elif self.part.gathers_once or self.part.gathers_ahead:
            whole = self.volume(weight.elements * used.itemsize, weight.storage, weight.compute)
            self.add_once(whole, "weights", 1 if self.part.gathers_once else self.part.step_rules.microbatches)
            passes = 0 if self.part.gathers_once else passes - 1
        for _ in range(passes):
            self.gather(weight, used.itemsize)

    def is_shared(self, matmul: Matmul) -> bool:
        """Whether a weight is gathered once for the matmuls of all layers, and its gradient reduced once."""
        return matmul.node.trip_count > matmul.weight.trip_count

    def is_in_block(self, node: Node) -> bool:
        """Whether the backward pass computes an operation again, unless the policy keeps its result."""
        return self.rules.remat.policy != "none" and self.block_of(node) is not None

    def block_of(self, node: Node) -> tuple[str, ...] | None:
        """The path of the block that an operation stands in; None outside of blocks."""
        return next((block for block in self.blocks if node.name.modules[: len(block)] == block), None)

    def add_input_side(self, x: Node, readers: list[Matmul], matmuls: list[Matmul]) -> None:
        """Adds what one input of several matmuls moves, forward and backward. `matmuls`: those without adapters."""
        stream = None if x in self.summed else self.graph.gathered_from(x)
        # What comes from outside of a loop is gathered once for all its iterations, and so is the sum of its gradients.
        times = self.changes(stream or x)
        if stream:
            # The input is gathered, and once more for the gradients of the weights, and for what is computed again.
            again = times == x.trip_count and x.array not in self.saved and any(map(self.reads_again, readers))
            count = 1 + again
            for _ in range(0 if self.gather_vectors(stream, count) else count):
                self.transfer(x.bytes, self.sharding(stream), self.sharding(x), times=times)
        for matmul in matmuls:
            self.add_expert_gradient(matmul, x) if matmul.group_axis else self.add_matmul(matmul, x, matmul.output)
        self.add_dispatch(x, [matmul for matmul in matmuls if matmul.group_axis])
        # `gathered` adds up the gradients of all matmuls before it sums them over devices.
        together = [matmuls] if stream else [[matmul] for matmul in matmuls]
        for group in together if self.has_gradient(x) else []:
            self.add_partial_sums(x, stream or x, group, [matmul.output for matmul in group], times)

    def reads_again(self, matmul: Matmul) -> bool:
        """Whether the backward pass needs the input of a matmul, and has to gather it again."""
        trained, remat = self.weights[matmul.path].trained, self.rules.remat
        saved = remat.policy == "dots" or (matmul.output and matmul.output.array in self.saved)
        return self.is_in_block(matmul.node) and self.has_gradient(matmul.node) and (trained or not saved)

    def add_output_side(self, y: Node, matmuls: list[Matmul]) -> None:
        """Adds what several matmuls move whose outputs are summed into the residual stream, forward and backward."""
        stream = self.graph.written_to(y)
        in_block = self.is_in_block(matmuls[0].node)
        is_summed_again = self.has_gradient(y) and in_block and self.read_in_same_block(matmuls[0], y)
        for _ in range(1 + is_summed_again):
            self.add_partial_sums(y, stream, matmuls, [matmul.input for matmul in matmuls], y.trip_count)
        if self.has_gradient(y):
            self.transfer(y.bytes, self.sharding(stream), self.sharding(y), times=y.trip_count)
        for matmul in matmuls:
            self.add_expert_gradient(matmul, y) if matmul.group_axis else self.add_matmul(matmul, y, matmul.input)

    def read_in_same_block(self, matmul: Matmul, y: Node) -> bool:
        """Whether a derivative in a matmul's block needs the sum that it adds to, before a name keeps the sum."""
        kept = {"layer_input", *self.saved, *(KEPT_WITH_DOTS if self.rules.remat.policy == "dots" else ())}
        block, start = self.block_of(matmul.node), self.graph.written_to(y)
        waiting, seen = [start], {start}
        while waiting:
            node = waiting.pop()
            for user in node.users:
                outside = user.trip_count < start.trip_count or self.block_of(user) != block
                if user in seen or outside or user.checkpoint_name in kept:
                    continue
                if user in self.matmul_inputs or self.needs(user, node):
                    return True
                seen.add(user)
                waiting.append(user)
        return False

    def needs(self, user: Node, node: Node) -> bool:
        """Whether the derivative of an operation needs one of its operands."""
        if user.primitive == "mul":
            others = [one for one in user.inputs if one is not node]
            return not others or any(map(self.has_gradient, others))
        return user.primitive not in LINEAR

    def add_expert_gradient(self, matmul: Matmul, stream_end: Node) -> None:
        """Adds the reduction of the gradient of experts' weights, of which each device has a sum over its own tokens.

        If a matrix of an adapter lacks the axis along which the weight is split, the result of the other matrix is a
        partial sum over that axis, and so is the gradient.
        """
        weight, tokens = self.weights[matmul.path], mesh_axes(self.sharding(stream_end), "batch", "seq")
        inner = self.inner_sharding(matmul, stream_end)
        lacking = {axis: names for axis, names in inner.items() if axis not in weight.sizes}
        if weight.trained:
            summed_over, times = tokens | mesh_axes(lacking), stream_end.trip_count
            self.transfer(matmul.weight.bytes, weight.compute, weight.gradient, summed_over, times, "gradients")

    def add_dispatch(self, x: Node, matmuls: list[Matmul]) -> None:
        """Adds the dispatch of tokens to their experts, and the combine, if both are split over the same mesh axes."""
        if not matmuls:
            return
        matmul, sharding = matmuls[0], self.sharding(x)
        token_axes, expert_axes = mesh_axes(sharding, "batch", "seq"), self.expert_axes(matmul)
        if not expert_axes or not expert_axes <= token_axes:
            return
        rows, width = matmul.node.shape[0], x.shape[-1]
        # Dispatch and combine, the same for the gradients, and one more dispatch where it is recomputed.
        passes = 1 + self.has_gradient(matmul.node)
        recomputed = passes > 1 and self.rules.remat.policy != "none" and "dispatched" not in self.saved
        by_tokens = {"batch": tuple(token_axes)}
        by_experts = {"batch": tuple(token_axes - expert_axes), matmul.group_axis: tuple(expert_axes)}
        for _ in range(2 * passes + recomputed):
            self.transfer(rows * width * x.itemsize, by_tokens, by_experts, times=x.trip_count)
        if passes > 1:  # one number for each expert of a token: the gradient of its router weight
            self.transfer(rows * FLOAT32_BYTES, by_tokens, by_experts, times=x.trip_count)

    def expert_axes(self, matmul: Matmul) -> set[str]:
        """The mesh axes that split the experts of a matmul."""
        return set(self.weights[matmul.path].compute[matmul.group_axis])

    def add_matmul(self, matmul: Matmul, stream_end: Node, inner_end: Node | None) -> None:
        """Adds what a matmul and its gradients move, but for the partial sums at the residual stream."""
        weight, times = self.weights[matmul.path], stream_end.trip_count
        stream, inner_axes = self.sharding(stream_end), self.inner_axes(matmul, stream_end)
        stream_axes = [axis for axis in stream if axis in weight.sizes]
        inner_elements = math.prod(matmul.node.shape if stream_end is matmul.input else matmul.input.shape)
        inner_bytes = inner_elements * stream_end.itemsize
        rows = {axis: names for axis, names in stream.items() if axis not in weight.sizes}
        computed = {**rows, **{axis: weight.compute[axis] for axis in inner_axes}}
        summed_over = mesh_axes(stream, *stream_axes)
        # What is not placed stays as it is computed.
        inner, array = (self.sharding(inner_end), inner_end.array) if inner_end else (computed, "")
        # A key of latent attention has numbers besides what this weight gives it.
        sent_bytes = inner_end.bytes if inner_end and array in (*READ, OUT) else inner_bytes
        queries = self.sharding_of_queries(inner_end) if inner_end else {}
        query_axes = mesh_axes(queries, "seq")
        whole_rows = stream_end.array in OF_KEYS and not stream["seq"]  # what keys are made from was gathered
        goes_back = self.has_gradient(inner_end or matmul.node)
        recomputed = goes_back and self.rules.remat.policy != "none"
        by_heads = self.rules.context == "ulysses" and array in (*READ, OUT) and stream.get("seq")
        by_heads = by_heads and _module(matmul) not in self.with_whole_keys
        if inner_end and (by_heads or (query_axes and not whole_rows)):
            own, heads = {**inner, "seq": stream["seq"]}, inner_axes[0] if by_heads else ""
            ring = self.rules.context == "ring"
            self.add_exchange(inner_end, sent_bytes, own, computed, summed_over, query_axes, heads, ring)
        elif goes_back or stream_end is matmul.input:  # of what writes to the stream, it is the gradient
            self.transfer(inner_bytes, computed, inner, summed_over, times)
        matrix_bytes = matmul.weight.bytes
        gradient_bytes = math.prod(matmul.weight.shape) * max(matmul.weight.itemsize, stream_end.itemsize)
        if weight_only := mesh_axes(weight.compute, *stream_axes) - summed_over:
            # A mesh axis splits the weight, but not the array at the stream. Either the weight is gathered, or partial
            # sums are reduced at the inner end and the result at the stream is gathered. Only the first is possible
            # where that mesh axis splits the rows.
            gathered = [self.volume(matrix_bytes, weight.compute, {**weight.compute, **dict.fromkeys(stream_axes, ())})]
            reduced = [self.volume(inner_bytes, computed, inner, weight_only)]
            result = [self.volume(stream_end.bytes, {**stream, stream_axes[0]: tuple(weight_only)}, stream)]
            ways = (reduced, result) if stream_end is matmul.input else (result, reduced)  # forward and backward
            for alternative in ways[: 1 + self.has_gradient(matmul.node)]:
                self.add_cheapest(gathered, *([] if weight_only & mesh_axes(computed) else [alternative]), times=times)
        if weight.trained:
            local_gradient = {
                **{axis: stream[axis] for axis in stream_axes},
                **{axis: inner.get(axis, weight.compute[axis]) for axis in inner_axes},
            }
            token_axes = mesh_axes(rows) | (query_axes if whole_rows else set())
            if self.part.gathers_once:
                whole = self.volume(weight.elements * FLOAT32_BYTES, local_gradient, weight.gradient, token_axes)
                self.add_once(whole, "gradients", self.part.step_rules.microbatches)
            elif self.is_shared(matmul):
                size_bytes = weight.elements * FLOAT32_BYTES
                self.transfer(size_bytes, local_gradient, weight.gradient, token_axes, kind="gradients")
            else:
                self.transfer(gradient_bytes, local_gradient, weight.gradient, token_axes, times, "gradients")
        if inner_end and array == _SHARED_KEY:
            self.gather_vectors(inner_end, 1 + recomputed)
        if not goes_back:
            return
        if array == _SHARED_KEY:  # its gradient is the sum of those of all heads' keys
            self.transfer(inner_bytes, inner, inner, self.rules.split("rules", READ[1], "heads"), times)
        if head_axes := mesh_axes_except(queries, "batch", "seq") - mesh_axes_except(inner, "batch", "seq"):
            # Query heads are split over more mesh axes than key heads. The gradients of the query heads of a key head
            # are summed as those of the keys.
            split = {inner_axes[0]: (*inner[inner_axes[0]], *head_axes)}
            self.transfer(inner_bytes, {**inner, **split}, inner, times=times)

    def inner_axes(self, matmul: Matmul, stream_end: Node) -> list[str]:
        """The axes of a weight that the array at the residual stream lacks."""
        assert matmul.weight.placed and stream_end.placed
        return [axis for axis in matmul.weight.placed.axes if axis not in stream_end.placed.axes]

    def inner_sharding(self, matmul: Matmul, stream_end: Node) -> Sharding:
        """How experts' weights are split along the axes that the array at the residual stream lacks.

        An adapter is split as its weight is.
        """
        path = self.rules.vocabulary.placing_path(matmul.path)
        compute_spec = self.graph.placements_in_use[path][0].placed
        assert compute_spec and stream_end.placed
        return {
            axis: self.weights[path].compute[axis] for axis in compute_spec.axes if axis not in stream_end.placed.axes
        }

    def add_adapter(self, first: Matmul, second: Matmul) -> None:
        """Adds what a low-rank adapter moves: its two matrices, their gradients, and the sum between the two matmuls.

        An adapter of a weight that writes to the residual stream makes no such sum: its partial sums join those of the
        weight, and the gradient of its second matrix is summed over the mesh axes that split its first.
        """
        inner_axes: set[str] = set()
        stream = self.sharding(first.input if self.graph.gathered_from(first.input) else second.output or second.input)
        for matmul in (first, second):
            weight = self.weights[matmul.path]
            gathered = self.volume(weight.elements * matmul.weight.itemsize, weight.storage, weight.compute)
            self.add(gathered, 1, "weights", matmul.node.trip_count > 1)
            rank_axes = mesh_axes_except(weight.compute, "layers", *stream)
            if weight.trained:
                row_axes = mesh_axes(stream, "batch", "seq")
                summed_over, times = row_axes | inner_axes, matmul.weight.trip_count
                self.transfer(matmul.weight.bytes, weight.compute, weight.gradient, summed_over, times, "gradients")
            if matmul is first:
                inner_axes = rank_axes
            elif rank_axes:
                self.transfer(matmul.input.bytes, stream, stream, rank_axes, matmul.node.trip_count)

    def add_partial_sums(
        self, written: Node, stream: Node, matmuls: list[Matmul], inner_ends: Iterable[Node | None], times: int
    ) -> None:
        """Adds the reduction into the residual stream of sums over heads or hidden units, `times` in each microbatch.

        Matmuls that are summed over the same mesh axes are reduced once.
        """
        token_axes, partials = mesh_axes(self.sharding(written), "batch", "seq"), set()
        for matmul, inner_end in zip(matmuls, inner_ends, strict=True):
            if matmul.group_axis:  # what is combined from experts is whole
                over = mesh_axes(self.inner_sharding(matmul, written))
                partials.add(
                    frozenset(over - self.expert_axes(matmul) if self.expert_axes(matmul) <= token_axes else over)
                )
            else:
                inner = self.sharding(inner_end) if inner_end else self.weights[matmul.path].compute
                partials.add(frozenset(mesh_axes(inner, *self.inner_axes(matmul, written))))
        for partial in partials:
            self.transfer(written.bytes, self.sharding(written), self.sharding(stream), partial, times)

    # Before and after the layers

    def add_loss(self, head: Matmul) -> None:
        """Adds logits, softmax and their gradients, which the forward pass computes: see model/loss.py."""
        assert head.output
        table, x, logits = self.weights[head.path], self.sharding(head.input), self.sharding(head.output)
        stream = self.sharding(self.graph.gathered_from(head.input) or head.input)
        vocab_axes = self.inner_axes(head, head.input)
        summed_over = mesh_axes(logits, *vocab_axes)
        self.transfer(head.input.bytes, stream, x)
        self.gather(table, head.weight.itemsize)
        by_token = {axis: logits[axis] for axis in ("batch", "seq")}
        for _ in range(3):  # the highest logit, the sum of exponentials, the target's logit
            self.transfer(math.prod(head.input.shape[:2]) * FLOAT32_BYTES, by_token, by_token, summed_over)
        if self.has_gradient(head.input):
            self.transfer(head.input.bytes, x, stream, summed_over)
        if table.trained:
            local_gradient = {axis: table.compute[axis] for axis in vocab_axes}
            token_axes = mesh_axes(x, "batch", "seq")
            self.transfer(table.elements * FLOAT32_BYTES, local_gradient, table.gradient, token_axes, kind="gradients")

    def add_small(self, weight: Parameter, has_sum: bool) -> None:
        """Adds a norm's scale, a bias or a table of positions: it is gathered once, and its gradient is summed.

        has_sum: whether the sum of its gradient is added already.
        """
        itemsize = self.graph.placements_in_use[weight.path][0].itemsize
        self.gather(weight, itemsize)
        applied = self.graph.applied_to(weight.path)
        if has_sum or not weight.trained or not applied:
            return
        sharding = self.sharding(applied)
        local_gradient = {axis: sharding.get(axis, names) for axis, names in weight.compute.items()}
        summed_over = mesh_axes_except(sharding, *weight.sizes)
        self.transfer(weight.elements * itemsize, local_gradient, weight.gradient, summed_over, kind="gradients")

    def add_moves(self) -> None:
        """Adds the moves of arrays that are made from another array without a matmul, and are split otherwise."""
        by_matmuls = {matmul.input for matmul in self.matmuls} | self.summed
        for node in self.graph.activations:
            placed_before = self.graph.gathered_from(node)
            before = [placed_before] if placed_before else self.graph.before([node], past_matmuls=False)
            if (placed_before and node in by_matmuls) or not before:
                continue
            made_from, times, target = before[0], self.changes(node), self.sharding(node)
            source = self.sharding(made_from)
            one_token = node.shape == tuple(
                1 if axis == "seq" else size for axis, size in zip(source, made_from.shape, strict=True)
            )
            dimensions = [*zip(made_from.shape, source.values(), strict=True)]
            if node.shape != made_from.shape:  # then it may lack those of size 1
                dimensions = [(size, names) for size, names in dimensions if size > 1]
            is_renamed = made_from.array != node.array or [*source] != [*target]
            if is_renamed and node.shape == tuple(size for size, _ in dimensions):
                source = dict(zip(target, (names for _, names in dimensions), strict=True))
                self.transfer(node.bytes, source, target, times=times)
                if self.has_gradient(node):  # a sum over what reads it, which may be split where this is not
                    read_by = {axis for one in self.graph.after([node]) for axis in mesh_axes(self.sharding(one))}
                    summed_over = read_by & mesh_axes(source) - mesh_axes(target)
                    self.transfer(node.bytes, target, source, summed_over, times)
            elif one_token and made_from.shape != node.shape:  # the devices that hold it send it to all
                self.transfer(node.bytes, target, target, mesh_axes(source, "seq") - mesh_axes(target), times)


def _module(matmul: Matmul) -> str:
    """The path of the module that a matmul's weight belongs to."""
    return matmul.path.rpartition(".")[0]
