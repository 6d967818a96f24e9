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

from gspmd_lm.foresight.floor.moves import FLOAT32_BYTES, Cost, Moves, Place, Weight, axes_of, without
from gspmd_lm.foresight.traced import Node, Product
from gspmd_lm.model.kernels import attention

_INT32_BYTES = 4
*_READ, _OUT = (spec.partition(":")[0] for spec in (attention.Q, attention.K, attention.V, attention.OUT))


class Traffic(Moves):
    """`Moves` of the decoder, or of any model that reads and writes a residual stream."""

    def model(self) -> None:
        traced = self.traced
        # What blocks read is the residual stream, gathered: their inputs come from there, and their sums go there.
        self.block_input = next(product.x for product in traced.products if traced.source(product.x))
        self.residual = traced.source(self.block_input) or self.block_input
        self.blocks()
        for product in traced.products:
            if self.is_head(product):
                self.loss(product) if self.trains else self.logits(product)
        for path in traced.looked_up:
            if path not in traced.used or path in traced.multiplied:
                self.look_up(self.weights[path])
        for path in set(traced.used) - traced.multiplied:
            self.small(self.weights[path])

    # The layers

    def is_head(self, product: Product) -> bool:
        """Whether a product gives the logits: it is part of the loss, and of no word for weights."""
        return not set(product.node.name.of) & set(self.weights)

    def blocks(self) -> None:
        """All products of the layers. How they are read and written is in sharding/matmuls.py."""
        products = [product for product in self.traced.products if not self.is_head(product)]
        inner = {source: product for product in products if (source := self.traced.source(product.x))}
        adapters = [(first, inner[first.y]) for first in products if first.y in inner]
        reads: dict[Node, list[Product]] = collections.defaultdict(list)
        writes: dict[Node, list[Product]] = collections.defaultdict(list)
        self.read = {product.x for product in products}
        for product in products:
            if self.traced.source(product.x) and not (product.group and product.y):
                reads[product.x].append(product)
            elif product.y and self.traced.home(product.y) is not product.y:
                writes[product.y].append(product)
        adapted = {product.node for pair in adapters for product in pair}
        for x, group in reads.items():
            if x not in {second.x for _, second in adapters}:
                self.fan_out(x, group, [product for product in group if product.node not in adapted])
        for y, group in writes.items():
            if y not in {first.y for first, _ in adapters}:
                self.fan_in(y, [product for product in group if product.node not in adapted])
        for first, second in adapters:
            self.adapter(first, second)
        for path in {product.path for product in products if product.node not in adapted}:
            weight, used = self.weights[path], self.traced.used[path][0]
            # Forward and backward. Out of a loop, compilers keep what forward gathered of a weight without gradient.
            for _ in range(2 if self.trains and (weight.trained or used.times > 1) else 1):
                self.gather(weight, self.itemsize(used))

    def fan_out(self, x: Node, group: list[Product], products: list[Product]) -> None:
        """One input, read with several weights; forward and backward. `products` are those of no adapter."""
        home = self.traced.source(x)
        assert home and x.placed
        kept = self.rules.remat.policy == "none" or x.placed.array in self.kept
        learns = any(self.weights[product.path].trained for product in group)
        for _ in range(2 if learns and not kept else 1):  # the input, gathered; for the weights' gradients again
            self.move(self.bytes(x), self.place(home), self.place(x), times=x.times)
        for product in products:
            self.mixed(product, x) if product.group else self.product(product, x, product.y)
        self.travel(x, [product for product in products if product.group])
        if self.trains:
            self.summed(x, home, products, [product.y for product in products])

    def fan_in(self, y: Node, products: list[Product]) -> None:
        """Several inputs, each through its own weight, summed into the residual stream; forward and backward."""
        home = self.traced.home(y)
        again = self.rules.remat.policy in ("block", "names") and "residual" not in self.kept
        for _ in range(2 if self.trains and again and self.read_again(home) else 1):
            self.summed(y, home, products, [product.x for product in products])
        if self.trains:
            self.move(self.bytes(y), self.place(home), self.place(y), times=y.times)  # the gradient
        for product in products:
            self.mixed(product, y) if product.group else self.product(product, y, product.x)

    def mixed(self, product: Product, near: Node) -> None:
        """The gradient of experts' weights: each device has a sum over its own tokens.

        If a matrix of an adapter lacks the axis along which the weight is split, that of the other matrix is a sum over
        it, and the gradient is one too.
        """
        weight, tokens = self.weights[product.path], axes_of(self.place(near), "batch", "seq")
        far = {axis: names for axis, names in self.far(product, near).items() if axis not in weight.sizes}
        if weight.trained and self.trains:
            over = tokens | axes_of(far)
            self.move(self.bytes(product.weight), weight.use, weight.gradient, over, near.times, "gradients")

    def travel(self, x: Node, products: list[Product]) -> None:
        """Tokens on their way to the experts that `products` read them with, and back, if both are split alike."""
        if not products:
            return
        product, place = products[0], self.place(x)
        tokens, over = axes_of(place, "batch", "seq"), self.experts(product)
        if not over or not over <= tokens:
            return
        rows, width = product.node.shape[0], x.shape[-1]
        # There and back; their gradients the other way; and there again for what is computed again.
        again = self.rules.remat.policy != "none" and "dispatched" not in self.kept
        here, there = {"batch": tuple(tokens)}, {"batch": tuple(tokens - over), product.group: tuple(over)}
        for _ in range(4 + again if self.trains else 2):
            self.move(rows * width * self.itemsize(x), here, there, times=x.times)
        if self.trains:  # for the gradients of the weights of a token's experts, one number for each of these
            self.move(rows * FLOAT32_BYTES, here, there, times=x.times)

    def experts(self, product: Product) -> set[str]:
        """The mesh axes that split the experts of a product."""
        return set(self.weights[product.path].use[product.group])

    def read_again(self, node: Node) -> bool:
        """Whether the same block reads what is written here, so that computing it again needs the sum."""
        waiting, seen = [node], {node}
        while waiting:
            for user in waiting.pop().users:
                if user in seen or user.label == "layer_input":
                    continue
                if user in self.read:
                    return True
                seen.add(user)
                waiting.append(user)
        return False

    def product(self, product: Product, near: Node, far: Node | None) -> None:
        """What a product and its gradients move, but for sums into the residual stream.

        `near` is its end at the residual stream, `far` the other one.
        """
        assert far
        weight, x, y, times = self.weights[product.path], self.place(near), self.place(far), near.times
        wide = self.wide(product, near)
        shared = [axis for axis in x if axis in weight.sizes]
        rows_bytes = math.prod(near.shape[:2]) * self.itemsize(near)
        size_bytes = rows_bytes * math.prod(weight.sizes[axis] for axis in wide)
        have = {"batch": x["batch"], "seq": x["seq"], **{axis: weight.use[axis] for axis in wide}}
        over_shared = axes_of(x, *shared)
        if not self.trains:
            self.move(size_bytes, have, y, over_shared, times)
            return
        assert far.placed
        queries = self.queries(far)
        apart_queries = axes_of(queries, "seq")
        again = self.rules.remat.policy != "none"
        if self.rules.context == "ulysses" and far.placed.array in (*_READ, _OUT) and axes_of(x, "seq"):
            self.move(size_bytes, have, {**y, "seq": x["seq"]}, over_shared, times)
            apart = {**y, "seq": (), wide[0]: (*y[wide[0]], *x["seq"])}
            again &= far.placed.array != _OUT or _OUT not in self.kept
            for _ in range(2 + again):  # heads for tokens, their gradients, and what is computed again
                self.move(size_bytes, {**y, "seq": x["seq"]}, apart, times=times)
        elif apart_queries:  # each query reads all keys; their gradients come from everywhere
            whole, what = {**y, "seq": ()}, "keys" if self.rules.context == "ring" else "activations"
            self.move(size_bytes, have, whole, over_shared, times, what)
            self.move(size_bytes, whole, {**y, "seq": x["seq"]}, apart_queries, times, what)
            if again or self.rules.context == "ring":
                self.move(size_bytes, {**whole, "seq": x["seq"]}, whole, (), times, what)
        else:
            self.move(size_bytes, have, y, over_shared, times)
        matrix_bytes = self.bytes(product.weight)
        if apart := axes_of(weight.use, *shared) - over_shared:
            # A mesh axis splits the weight in use, but not its input. Either the weight is gathered, or the sums over
            # embed are reduced and the result on the other side is gathered. Only the first is possible where that
            # mesh axis splits the rows.
            gathered = [self.cost(matrix_bytes, weight.use, {**weight.use, **dict.fromkeys(shared, ())})]
            reduced = [self.cost(size_bytes, have, y, apart)]
            result = [self.cost(self.bytes(near), {**x, shared[0]: tuple(apart)}, x)]
            for instead in (reduced, result):
                self.cheaper(gathered, *([] if apart & axes_of(have) else [instead]), times=times)
        if weight.trained:
            has = {**{axis: x[axis] for axis in shared}, **{axis: y[axis] for axis in wide}}
            self.move(matrix_bytes, has, weight.gradient, axes_of(x, "batch", "seq"), times, "gradients")
        if finer := without(queries, "batch", "seq") - without(y, "batch", "seq"):
            # Heads are split finer than their keys: the gradients of a key's heads meet, in the keys or in the matrix.
            split = {wide[0]: (*y[wide[0]], *finer)}
            in_matrix = [self.cost(matrix_bytes, {**weight.gradient, **split}, weight.gradient)]
            in_keys = [self.cost(size_bytes, {**y, **split}, y)]
            self.cheaper(in_keys, *([in_matrix] if weight.trained else []), times=times)

    def wide(self, product: Product, near: Node) -> list[str]:
        """The axes of a weight that its end at the residual stream has not."""
        assert product.weight.placed and near.placed
        return [axis for axis in product.weight.placed.axes if axis not in near.placed.axes]

    def far(self, product: Product, near: Node) -> Place:
        """How experts' weights are split along the axes that their end at the residual stream has not.

        For an adapter it is how its weight is.
        """
        path = self.rules.vocabulary.adapted(product.path)
        used = self.traced.used[path][0].placed
        assert used and near.placed
        return {axis: self.weights[path].use[axis] for axis in used.axes if axis not in near.placed.axes}

    def queries(self, keys: Node) -> Place:
        """Where the queries live that read keys or values; nowhere for other activations."""
        if not keys.placed or "kv_seq" not in keys.placed.axes:
            return {}
        found = [node for node in self.traced.met(keys) if node.placed and "seq" in node.placed.axes]
        return self.place(found[0]) if found else {}

    def adapter(self, first: Product, second: Product) -> None:
        """What a low-rank adapter moves: its two matrices, their gradients, and the sum of what lies between.

        An adapter of a matrix that writes to the residual stream makes no such sum: its addends join those of the
        matrix, and the gradient of its second matrix is summed over the axes that split its first.
        """
        inner: set[str] = set()
        stream = self.place(self.block_input)
        for product in (first, second):
            weight = self.weights[product.path]
            gathered = self.cost(weight.elements * self.itemsize(product.weight), weight.rest, weight.use)
            self.add(gathered, 1, "weights", product.node.times > 1)
            wide = without(weight.use, "layers", *stream)
            if weight.trained:
                rows = axes_of(stream, "batch", "seq")
                over, times = rows | inner, product.node.times
                self.move(self.bytes(product.weight), weight.use, weight.gradient, over, times, "gradients")
            if product is first:
                inner = wide
            elif wide and self.trains:
                self.move(self.bytes(product.x), stream, stream, wide, product.node.times)

    def summed(self, near: Node, home: Node, products: list[Product], far: Iterable[Node | None]) -> None:
        """The sum over heads or hidden units, into the residual; products that are split alike are added up first."""
        tokens, partials = axes_of(self.place(near), "batch", "seq"), set()
        for product, end in zip(products, far, strict=True):
            if product.group:  # where tokens travel to experts, their results are whole
                over = axes_of(self.far(product, near))
                partials.add(frozenset(over - self.experts(product) if self.experts(product) <= tokens else over))
            elif end:
                partials.add(frozenset(axes_of(self.place(end), *self.wide(product, near))))
        for partial in partials:
            self.move(self.bytes(near), self.place(near), self.place(home), partial, near.times)

    # Before and after the layers

    def look_up(self, table: Weight) -> None:
        """The token table and learned positions, forward and backward: see `matmuls.look_up`.

        A tied table is gathered for the logits anyway, and its two gradients can be added up before they are reduced.
        """
        tied, size_bytes = table.path in self.traced.multiplied, self.bytes(self.block_input)
        ids, width = table.sizes
        itemsize = self.itemsize(self.block_input)
        residual, block_input = self.place(self.residual), self.place(self.block_input)
        rows, batch, columns = table.use[ids], axes_of(residual, "batch", "seq"), axes_of(table.rest, width)
        if rows:
            self.gather(table, 0 if tied else itemsize)
            self.move(size_bytes, block_input, residual, rows)
            if table.trained:
                self.move(size_bytes, residual, block_input)
        elif not (tied and self.trains):
            # Read where it rests, for which the ids of others are needed, or gathered, whichever is less.
            there = self.cost(size_bytes, {width: tuple(columns)}, residual)
            gathered = self.cost(table.elements * itemsize, table.rest, {})
            self.cheaper([there, self.ids(columns & batch)], [gathered])
        # The gradients have two ways too. Those of the tables are reduced, or the gradient of x goes to the devices
        # that hold its columns, where it is added up.
        gradients = [] if tied or not table.trained else [(table, FLOAT32_BYTES)]
        used = [self.weights[path] for path in self.traced.looked_up if path in self.traced.used and path != table.path]
        gradients += [(positions, itemsize) for positions in used if positions.trained]
        meet = set() if rows else axes_of(table.gradient, width) & batch
        back = {axis: tuple(name for name in names if name not in meet) for axis, names in residual.items()}
        apart = {width: tuple(meet)}
        reduced = [
            self.cost(like.elements * itemsize, {ids: like.use.get(ids, ())}, like.gradient, batch)
            for like, itemsize in gradients
        ]
        sent = [self.cost(size_bytes, residual, {**back, **apart}), self.ids(meet - columns)]
        sent += [
            self.cost(like.elements * itemsize, apart, like.gradient, batch - meet) for like, itemsize in gradients
        ]
        self.cheaper(reduced, *([sent] if meet and gradients else []))

    def ids(self, over: set[str]) -> Cost:
        """The token ids, gathered over some mesh axes."""
        ids_bytes = math.prod(self.residual.shape[:2]) * _INT32_BYTES
        elsewhere = axes_of(self.place(self.residual), "batch", "seq") - over
        return self.cost(ids_bytes, {"batch": (*over, *elsewhere)}, {"batch": tuple(elsewhere)})

    def loss(self, head: Product) -> None:
        """Logits, softmax and their gradients, which are found in the forward pass: see model/loss.py."""
        assert head.y
        table, x, logits = self.weights[head.path], self.place(head.x), self.place(head.y)
        home, wide = self.place(self.traced.source(head.x) or head.x), self.wide(head, head.x)
        columns = axes_of(logits, *wide)
        self.move(self.bytes(head.x), home, x)
        self.gather(table, self.itemsize(head.weight))
        by_token = {axis: logits[axis] for axis in ("batch", "seq")}
        for _ in range(3):  # the highest logit, the sum of exponentials, the target's logit
            self.move(math.prod(head.x.shape[:2]) * FLOAT32_BYTES, by_token, by_token, columns)
        self.move(self.bytes(head.x), x, home, columns)
        if table.trained:
            have = {axis: table.use[axis] for axis in wide}
            rows = axes_of(x, "batch", "seq")
            self.move(table.elements * FLOAT32_BYTES, have, table.gradient, rows, what="gradients")

    def logits(self, head: Product) -> None:
        """The logits of one token per row, whole on every device, which chooses the next token."""
        assert head.y
        self.gather(self.weights[head.path], self.itemsize(head.weight))
        logits = self.place(head.y)
        have = {axis: names for axis, names in logits.items() if axis != "seq"}
        self.move(head.y.shape[0] * head.y.shape[-1] * FLOAT32_BYTES, have, {})

    def small(self, weight: Weight) -> None:
        """A norm's scale, a bias or a table of positions: used once, its gradient summed over everything else."""
        itemsize = self.itemsize(self.traced.used[weight.path][0])
        self.gather(weight, itemsize)
        applied = self.traced.applied_to(weight.path)
        if weight.path in self.traced.looked_up or not weight.trained or not applied:
            return
        place = self.place(applied)
        have = {axis: place.get(axis, names) for axis, names in weight.use.items()}
        over = without(place, *weight.sizes)
        self.move(weight.elements * itemsize, have, weight.gradient, over, what="gradients")
