"""The least that one step of generation could take: `floor`, for prefill and decode.

The same logic as in `floor`, of the forward pass alone, on one token per row for decode. Every weight and, in decode,
every slot of the cache is read once; prefill writes the cache. Sources: the counts of arXiv 2211.05102.
"""

import math
from typing import TYPE_CHECKING

from gspmd_lm.config import Config
from gspmd_lm.foresight.floor import Floor, looked_up
from gspmd_lm.foresight.floor.traffic import FLOAT32_BYTES, Product, Traffic, itemsize_of
from gspmd_lm.foresight.machine.hardware import Chip
from gspmd_lm.train.metrics import flops_per_token

if TYPE_CHECKING:
    from gspmd_lm.arrays import Arrays
    from gspmd_lm.infer.programs import Sizes
    from gspmd_lm.rules import Rules

_FORWARD = 1 / 3  # of the FLOPs of a training step


def floor(
    config: Config, rules: "Rules", arrays: "Arrays", chip: Chip | None, sizes: "Sizes", tokens: int, state_bytes: int
) -> Floor:
    """The floor of prefill (`tokens` per row, all slots of a prompt) or decode (one token per row).

    `state_bytes`: weights and cache of one device.
    """
    model = config.model
    keys = sizes.prompt if tokens > 1 else sizes.slots
    per_token = flops_per_token(model, arrays.parameter_count, keys) * _FORWARD
    per_token -= 2 * model.vocab_rows * model.embed * (1 - 1 / tokens)  # only the last token of a row has logits
    flops = per_token * sizes.rows * tokens / rules.devices
    sent = _Forward(config, rules, arrays, sizes.rows, tokens).sent
    return Floor(
        compute_s=chip and flops / chip.peak_bf16_flops_per_s,
        memory_s=chip and state_bytes / chip.hbm_bytes_per_s,
        communication_bytes=round(sum(sent.values())),
        communication_by_axis={axes: round(count) for axes, count in sent.items() if round(count)},
        flops=flops,
        dtype=config.model.compute_dtype,
    )


class _Forward(Traffic):
    """What one device sends in a forward pass of `tokens` tokens in each of `rows` rows."""

    def __init__(self, config: Config, rules: "Rules", arrays: "Arrays", rows: int, tokens: int):
        self.tokens = tokens
        super().__init__(config, rules, arrays, rows, tokens)

    def place(self, array: str) -> dict[str, tuple[str, ...]]:
        """Where the rules put an activation; a single token is not split."""
        found = super().place(array)
        return found if self.tokens > 1 else found | {"seq": ()}

    def everything(self) -> None:
        self.times = 1
        self.look_up()
        self.blocks()
        self.loss()
        for weight in (weight for alike in self.weights.values() for weight in alike):
            self.small(weight)

    def blocks(self) -> None:
        attention, hidden, out, down = self.products()
        self.times = self.model.layers
        gathered = self.cost(self.bytes(("batch", "seq", "embed")), self.residual, self.block_input)
        parallel = self.model.block == "parallel"
        self.add(gathered, self.times * (1 if parallel and self.model.shared_norm else 2))
        for product in (*attention, *hidden, out, down):
            self.product(product)
        for together in [[out, down]] if parallel else [[out], [down]]:
            self.summed(together)
        self.times = 1
        for name, *_ in (*attention, *hidden, out, down):
            for weight in self.weights[name]:
                self.gather(weight, self.compute_bytes)

    def product(self, product: Product) -> None:
        name, wide, array = product
        weight = self.weights[name][0]
        x, y = self.block_input, self.place(array)
        have = {"batch": x["batch"], "seq": x["seq"], **{axis: weight.use[axis] for axis in wide}}
        over = {axis for axis in x.get("embed", ())}
        self.move(self.bytes(("batch", "seq", *wide)), have, y, over)

    def look_up(self) -> None:
        table = self.weights["embedding"][0]
        size_bytes = self.bytes(("batch", "seq", "embed"))
        if rows := table.use["vocab"]:
            self.gather(table, 0 if self.model.tied_embeddings else self.compute_bytes)
            self.move(size_bytes, self.block_input, self.residual, rows)
            return
        columns = set(table.rest.get("embed", ()))
        there = self.cost(size_bytes, {"embed": tuple(columns)}, self.residual)
        gathered = self.cost(table.elements * self.compute_bytes, table.rest, {})
        batch = {name for axis in ("batch", "seq") for name in self.residual.get(axis, ())}
        self.cheaper([there, self.ids(columns & batch)], [gathered])

    def loss(self) -> None:
        """The logits of one token per row, whole on every device, which chooses the next token."""
        (table,) = self.weights["embedding" if self.model.tied_embeddings else "unembedding"]
        self.gather(table, self.compute_bytes)
        rows, logits = self.sizes["batch"], self.place("logits")
        have = {axis: logits[axis] for axis in ("batch", "vocab")}
        self.move(rows * self.sizes["vocab"] * FLOAT32_BYTES, have, {})

    def small(self, weight) -> None:
        if not weight.name.startswith("w") and weight.name not in ("embedding", "unembedding"):
            itemsize = FLOAT32_BYTES if weight.name in ("scale", "bias") else self.compute_bytes
            self.gather(weight, itemsize)


def read_bytes(config: Config, rules: "Rules", arrays: "Arrays") -> float:
    """The bytes of weights that one device reads in use, once, in the compute dtype."""
    from gspmd_lm.arrays import pairs

    total, itemsize = 0.0, itemsize_of(config.model.compute_dtype)
    for leaf, like in pairs(arrays.named_params, arrays.params):
        if not looked_up(config, leaf.path):
            spec = rules.resolve("rules", leaf.path, leaf.axes, like.shape)[0]
            total += math.prod(like.shape) * itemsize / math.prod(rules.mesh[n] for names in spec for n in names)
    return total
