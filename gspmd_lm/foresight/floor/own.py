"""What a split of a model of one's own must move, as far as its parameters, its rules and its products tell.

`traffic.py` knows how the decoder reads and writes its residual stream. Here nothing is known but where arrays are
placed: weights are gathered, their gradients are reduced, and a product that sums over a split axis is reduced. What a
model moves between two placements of its activations is not counted.
"""

from gspmd_lm.foresight.floor.moves import Moves, without
from gspmd_lm.foresight.traced import Product


class OwnTraffic(Moves):
    """`Moves` of any model."""

    def model(self) -> None:
        for path, nodes in self.traced.used.items():
            for _ in range(1 if self.rules.remat.policy == "none" else 2):  # for the backward pass again
                self.gather(self.weights[path], self.itemsize(nodes[0]))
        for product in self.traced.products:
            self.sums(product)
        for path in set(self.traced.used) - self.traced.multiplied:
            weight, applied = self.weights[path], self.traced.applied_to(path)
            if weight.trained and applied:
                place, node = self.place(applied), self.traced.used[path][0]
                have = {axis: names for axis, names in place.items() if axis in weight.sizes}
                over = without(place, *weight.sizes)
                self.move(self.bytes(node), have, weight.gradient, over, node.times, "gradients")

    def sums(self, product: Product) -> None:
        """The reductions of a product's result and of its two gradients."""
        weight, x, times = self.weights[product.path], self.place(product.x), product.node.times
        y = self.place(product.y) if product.y else x
        self.move(self.bytes(product.node), y, y, without(weight.use, *(weight.use.keys() - x.keys())), times)
        if not self.trains:
            return
        self.move(self.bytes(product.x), x, x, without(weight.use, *x), times)
        if weight.trained:
            rows = without(x, *weight.sizes)
            self.move(self.bytes(product.weight), weight.use, weight.gradient, rows, times, "gradients")
