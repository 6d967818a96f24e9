"""The estimated transfers of a train step of any model: one with several stacks, or one of the user's own."""

import collections
import math

from gspmd_lm.foresight.bounds import FLOAT32_BYTES
from gspmd_lm.foresight.graph import Matmul, Node
from gspmd_lm.plan.transfers import Transfers, mesh_axes, mesh_axes_except


class AnyModelTransfers(Transfers):
    """The transfers of any model.

    Nothing is known but how arrays are sharded: weights are gathered, their gradients are reduced, and a matmul that
    sums over a split axis is reduced. Of what a model moves between two shardings of its activations, these moves are
    counted: those of `gathered` and `reduced` of matmuls.py, of keys and values that all queries read, of rows that are
    looked up, and of an array that is made of another one without a matmul (`add_moves`).
    """

    def add_model(self) -> None:
        forward_alone = {matmul.path for matmul in self.graph.matmuls if not self.has_gradient(matmul.node)}
        # What remat speaks of: blocks, whose input has a name. Where none has, any operation may be within a block.
        self.blocks = {node.name.modules[:1] for node in self.graph.nodes if node.checkpoint_name == "layer_input"}
        for path, nodes in self.graph.placements_in_use.items():
            # For the backward pass, unless compilers find that it is there already.
            again = path not in forward_alone and (nodes[0].trip_count > 1 or self.is_in_block(nodes[0]))
            for _ in range(1 + again):
                self.gather(self.weights[path], nodes[0].itemsize)
        readers, written = collections.defaultdict[Node, list[Matmul]](list), dict[Node, set[frozenset[str]]]()
        for matmul in self.graph.matmuls:
            self.add_output_side(matmul, written)
            self.add_keys(matmul)
            readers[matmul.input].append(matmul)
        for x, matmuls in readers.items():
            source = self.graph.gathered_from(x)
            self.add_input_side(x, None if source in written else source, matmuls)
        for path, nodes in self.graph.looked_up.items():
            if path not in self.graph.placements_in_use or path in self.graph.matrix_paths:
                is_gathered = path in self.graph.matrix_paths and len(nodes) == 1
                for rows in (placed for node in nodes for placed in self.graph.after([node])[:1]):
                    self.add_look_up(self.weights[path], rows, is_gathered=is_gathered)
        self.add_moves()
        for path in set(self.graph.placements_in_use) - self.graph.matrix_paths:
            weight, applied = self.weights[path], self.graph.applied_to(path)
            if weight.trained and applied:
                sharding, node = self.sharding(applied), self.graph.placements_in_use[path][0]
                local_gradient = {axis: names for axis, names in sharding.items() if axis in weight.sizes}
                summed_over = mesh_axes_except(sharding, *weight.sizes)
                self.transfer(node.bytes, local_gradient, weight.gradient, summed_over, node.trip_count, "gradients")

    def add_moves(self) -> None:
        """Adds what moves an array that is made without a matmul of another array, and is split otherwise."""
        for node in self.graph.activations:
            before = self.graph.before([node], past_matmuls=False)
            if self.graph.gathered_from(node) or not before or before[0].array == node.array:
                continue
            made_from, times = before[0], self.changes(node)
            assert node.placed and made_from.placed
            if (node.placed.axes, node.shape) == (made_from.placed.axes, made_from.shape):
                self.transfer(node.bytes, self.sharding(made_from), self.sharding(node), times=times)
                if self.has_gradient(node):
                    self.transfer(node.bytes, self.sharding(node), self.sharding(made_from), times=times)

    def is_in_block(self, node: Node) -> bool:
        """Whether the backward pass computes an operation again, unless the policy keeps its result."""
        within = not self.blocks or node.name.modules[:1] in self.blocks
        return within and self.rules.remat.policy != "none"

    def add_output_side(self, matmul: Matmul, written: dict[Node, set[frozenset[str]]]) -> None:
        """Adds the reduction of a matmul's partial sums. Results that one `reduced` adds up are reduced once."""
        x, y, times = self.sharding(matmul.input), matmul.output or matmul.input, matmul.node.trip_count
        compute = self.weights[matmul.path].compute
        summed_over = frozenset(mesh_axes_except(compute, *(compute.keys() - x.keys())))
        destination = self.graph.written_to(y) if matmul.output else y
        if destination is not y:
            if y not in written and self.has_gradient(y):
                self.transfer(y.bytes, self.sharding(destination), self.sharding(y), times=times)  # the gradient
            if summed_over in written.setdefault(y, set()):
                return
            written[y].add(summed_over)
        computed = {
            axis: tuple(name for name in names if name not in summed_over) for axis, names in self.sharding(y).items()
        }
        kept = self.rules.remat.policy == "dots" or "residual" in self.saved or not self.blocks
        recomputed = not kept and self.has_gradient(y) and self.is_in_block(matmul.node)
        for _ in range(2 if recomputed and self.read_in_same_block(destination) else 1):
            self.transfer(matmul.node.bytes, computed, self.sharding(destination), summed_over, times)

    def add_keys(self, matmul: Matmul) -> None:
        """Adds what keys and values move whose queries are split over their sequence: see `add_exchange`.

        With ulysses, queries move with the keys, and results, which are as large as queries, with the values.
        """
        y, split = matmul.output, self.sharding(matmul.input).get("seq", ())
        queries = self.queries_of(y) if y else None
        if not y or not queries or not (query_axes := mesh_axes(self.sharding(queries), "seq")):
            return
        ulysses = self.rules.context == "ulysses" and split
        for node, heads in ((y, "kv_heads"), (queries, "heads"))[: 2 if ulysses else 1]:
            own = {**self.sharding(node), "seq": split}
            self.add_exchange(node, node.bytes, own, own, query_axes=query_axes, heads=heads if ulysses else "")

    def add_input_side(self, x: Node, source: Node | None, matmuls: list[Matmul]) -> None:
        """Adds the gradients of matmuls that have one input.

        Where `gathered` gathers that input from a `source`, the gather is added too, and the gradients are summed once.
        """
        sharding = self.sharding(x)
        # What comes from outside of a loop is gathered once for all its iterations, and so is the sum of its gradients.
        times = self.changes(source or x)
        if source:
            again = times == x.trip_count and x.array not in self.saved and self.is_in_block(matmuls[0].node)
            again &= any(self.has_gradient(matmul.node) for matmul in matmuls)
            for _ in range(1 + again):
                self.transfer(x.bytes, self.sharding(source), sharding, times=times)
        passed_back = matmuls if self.has_gradient(x) else []
        sums = [frozenset(mesh_axes_except(self.weights[matmul.path].compute, *sharding)) for matmul in passed_back]
        for summed_over in dict.fromkeys(sums) if source else sums:
            self.transfer(x.bytes, sharding, self.sharding(source or x), summed_over, times)
        for matmul in matmuls:
            weight = self.weights[matmul.path]
            if weight.trained:
                row_axes = mesh_axes_except(sharding, *weight.sizes)
                size_bytes, times = matmul.weight.bytes, matmul.node.trip_count
                if times > matmul.weight.trip_count:  # a loop over parts of its rows adds up its gradient
                    size_bytes, times = math.prod(matmul.weight.shape) * FLOAT32_BYTES, matmul.weight.trip_count
                self.transfer(size_bytes, weight.compute, weight.gradient, row_axes, times, "gradients")
