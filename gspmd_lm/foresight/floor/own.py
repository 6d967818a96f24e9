"""What a split of a model of one's own must move, as far as its parameters, its rules and its products tell.

`traffic.py` knows the decoder: its attention, experts, look-ups and loss. Here nothing is known but where arrays are
placed: weights are gathered, their gradients are reduced, and a product that sums over a split axis is reduced. What a
model moves between two placements of its activations is not counted, but for what `gathered` and `reduced` of
matmuls.py move.
"""

import collections

from gspmd_lm.foresight.floor.moves import Moves, without
from gspmd_lm.foresight.traced import Node, Product


class OwnTraffic(Moves):
    """`Moves` of any model."""

    def model(self) -> None:
        for path, nodes in self.traced.used.items():
            for _ in range(1 if self.rules.remat.policy == "none" else 2):  # for the backward pass again
                self.gather(self.weights[path], self.itemsize(nodes[0]))
        read, written = collections.defaultdict[Node, list[Product]](list), dict[Node, set[frozenset[str]]]()
        for product in self.traced.products:
            self.result(product, written)
            read[product.x].append(product)
        for x, products in read.items():
            home = self.traced.source(x)
            self.read(x, None if home in written else home, products)
        for path in set(self.traced.used) - self.traced.multiplied:
            weight, applied = self.weights[path], self.traced.applied_to(path)
            if weight.trained and applied:
                place, node = self.place(applied), self.traced.used[path][0]
                have = {axis: names for axis, names in place.items() if axis in weight.sizes}
                over = without(place, *weight.sizes)
                self.move(self.bytes(node), have, weight.gradient, over, node.times, "gradients")

    def result(self, product: Product, written: dict[Node, set[frozenset[str]]]) -> None:
        """The reduction of a product's result. Results that one `write` adds up are reduced once."""
        x, y, times = self.place(product.x), product.y or product.x, product.node.times
        use = self.weights[product.path].use
        over = frozenset(without(use, *(use.keys() - x.keys())))
        home = self.traced.home(y) if product.y else y
        if home is not y:
            if y not in written and self.trains:
                self.move(self.bytes(y), self.place(home), self.place(y), times=times)  # the gradient
            if over in written.setdefault(y, set()):
                return
            written[y].add(over)
        have = {axis: tuple(name for name in names if name not in over) for axis, names in self.place(y).items()}
        self.move(self.bytes(product.node), have, self.place(home), over, times)

    def read(self, x: Node, home: Node | None, products: list[Product]) -> None:
        """The gradients of products that have one input. Where `read` gathers it from `home`, the input too, and one
        sum of all gradients."""
        place = self.place(x)
        if home:
            kept = not self.trains or self.rules.remat.policy == "none" or x.array in self.kept
            for _ in range(1 if kept else 2):
                self.move(self.bytes(x), self.place(home), place, times=x.times)
        if not self.trains:
            return
        sums = [frozenset(without(self.weights[product.path].use, *place)) for product in products]
        for over in dict.fromkeys(sums) if home else sums:
            self.move(self.bytes(x), place, self.place(home or x), over, x.times)
        for product in products:
            weight = self.weights[product.path]
            if weight.trained:
                rows = without(place, *weight.sizes)
                size_bytes, times = self.bytes(product.weight), product.node.times
                self.move(size_bytes, weight.use, weight.gradient, rows, times, "gradients")
