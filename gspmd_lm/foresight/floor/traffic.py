"""What a split of the model must move: the bytes that one device sends in a step, at the least.

What must be moved follows from where the rules put each array, by logic on axes alone:

  an axis that a product sums over is split      its partial sums are reduced: scattered where the result is split
                                                 over the same mesh axis, else reduced to all
  an array rests split, and is used whole        it is gathered
  a mesh axis splits another dimension in use    its devices exchange pieces, all to all

For tensor parallelism that gives Megatron's count, arXiv 1909.08053: four reductions of [B, T, D] per layer, each of
2 (n-1)/n; with a sequence-split residual, arXiv 2205.05198, four reduce-scatters and six all-gathers of (n-1)/n, since
a product's input is gathered again for its weight's gradient. For fully sharded weights it gives ZeRO's, arXiv
1910.02054: gathered once forward and once backward in the compute dtype (recomputation needs no third time) and their
gradients reduce-scattered, all of it in each microbatch. Gradients are reduced in the dtype that model/ sums them in:
float32 for token tables and norms, the compute dtype for the rest. Scalars are left out, and what optimizers such as
muon or adafactor sum over a split matrix.
"""

import collections
import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from gspmd_lm.config import Config

if TYPE_CHECKING:
    from gspmd_lm.arrays import Arrays
    from gspmd_lm.rules import Rules

Place = Mapping[str, tuple[str, ...]]  # logical axis -> the mesh axes that split it
Product = tuple[str, tuple[str, ...], str]  # a weight, its axes other than embed, the activation that has those

_BTD = ("batch", "seq", "embed")
FLOAT32_BYTES = 4
_INT32_BYTES = 4
# The activation that a small weight is multiplied with or added to, by the end of its path or what it belongs to.
_APPLIED_TO = {
    "bq": "q", "bk": "k", "bv": "v", "b_gate": "hidden", "b_up": "hidden", "q_norm": "q", "k_norm": "k",
    "unembedding_bias": "logits",
}  # fmt: skip
ACTIVATION_AXES = {
    "q": ("batch", "seq", "heads", "head_dim"),
    "k": ("batch", "kv_seq", "kv_heads", "head_dim"),
    "v": ("batch", "kv_seq", "kv_heads", "head_dim"),
    "attention_out": ("batch", "seq", "heads", "head_dim"),
    "hidden": ("batch", "seq", "mlp"),
    "logits": ("batch", "seq", "vocab"),
    "residual": _BTD,
    "block_input": _BTD,
}


def model_sizes(config: Config, rows: int) -> dict[str, int]:
    model, seq = config.model, config.data.seq
    return {
        "batch": rows, "seq": seq, "kv_seq": seq, "embed": model.embed, "heads": model.head_rows,
        "kv_heads": model.kv_head_rows, "head_dim": model.head_dim, "mlp": model.mlp, "vocab": model.vocab_rows,
    }  # fmt: skip


def itemsize_of(dtype: str) -> int:
    return {"bfloat16": 2, "float32": 4}[dtype]


def piece_count(rules: "Rules", mesh_axes: Iterable[str]) -> int:
    return math.prod(rules.mesh[name] for name in set(mesh_axes))


def _over(place: Place, *axes: str) -> set[str]:
    """The mesh axes that split some logical axes; all of them where none is named."""
    return {name for axis in axes or place for name in place.get(axis, ())}


@dataclasses.dataclass(frozen=True)
class _Weight:
    path: str
    sizes: Mapping[str, int]  # by logical axis
    itemsize: int
    rest: Place
    use: Place
    gradient: Place
    trained: bool

    @property
    def name(self) -> str:
        return self.path.rsplit(".", 1)[-1]

    @property
    def elements(self) -> int:
        return math.prod(self.sizes.values())


class Traffic:
    """What one device sends in a step, added up by mesh axes as the model is gone through once."""

    def __init__(
        self, config: Config, rules: "Rules", arrays: "Arrays", rows: int | None = None, seq: int | None = None
    ):
        """`rows` of a microbatch and their length: those of the config unless given."""
        from gspmd_lm.arrays import pairs

        self.model, self.rules = config.model, rules
        self.sizes = model_sizes(config, rows or config.data.batch // rules.microbatches)
        self.sizes |= {"seq": seq or config.data.seq, "kv_seq": seq or config.data.seq}
        self.compute_bytes = itemsize_of(config.model.compute_dtype)
        self.sent: dict[str, float] = collections.defaultdict(float)
        self.weights: dict[str, list[_Weight]] = collections.defaultdict(list)
        trained = {leaf.path for leaf, _ in pairs(arrays.named_trained, arrays.trained)}
        for leaf, like in pairs(arrays.named_params, arrays.params):
            tables = ("weights", "rules", "optimizer")
            specs = (rules.resolve(table, leaf.path, leaf.axes, like.shape)[0] for table in tables)
            rest, use, gradient = (dict(zip(leaf.axes, spec, strict=True)) for spec in specs)
            sizes = dict(zip(leaf.axes, like.shape, strict=True))
            weight = _Weight(leaf.path, sizes, like.dtype.itemsize, rest, use, gradient, leaf.path in trained)
            self.weights[weight.name].append(weight)
        self.residual, self.block_input = self.place("residual"), self.place("block_input")
        self.everything()

    def everything(self) -> None:
        """Goes through the model once."""
        self.times = self.rules.microbatches
        self.look_up()
        self.blocks()
        self.loss()
        for weight in (weight for alike in self.weights.values() for weight in alike):
            self.small(weight)
            # The update runs where the optimizer's state lives; its result goes where weights rest.
            if weight.trained:
                self.add(self.cost(weight.elements * weight.itemsize, weight.gradient, weight.rest), 1)

    def place(self, array: str) -> dict[str, tuple[str, ...]]:
        """Where the rules put an activation. Key positions are called seq here: both come from the block's input."""
        return {
            "seq" if axis == "kv_seq" else axis: self.rules.split("rules", array, axis)
            for axis in ACTIVATION_AXES[array]
        }

    def bytes(self, axes: Iterable[str]) -> int:
        """Of a whole activation in the compute dtype."""
        return math.prod(self.sizes[axis] for axis in axes) * self.compute_bytes

    def move(self, size_bytes: float, have: Place, want: Place, partial: Iterable[str] = ()) -> None:
        """Adds what a device sends for an array of `size_bytes` in all to get from where it is to where it is wanted.

        `partial` are mesh axes over which it is still to be summed. Dropping what is not wanted costs nothing, and
        comes first.
        """
        self.add(self.cost(size_bytes, have, want, partial), self.times)

    def add(self, cost: Mapping[str, float], times: int) -> None:
        for axes, sent_bytes in cost.items():
            self.sent[axes] += sent_bytes * times

    def cost(self, size_bytes: float, have: Place, want: Place, partial: Iterable[str] = ()) -> dict[str, float]:
        """What `move` adds in one microbatch."""
        has, wants = _over(have), _over(want)
        summed = set(partial) - has
        moved = {name for axis, names in have.items() for name in names if name in wants - set(want.get(axis, ()))}
        found: dict[str, float] = collections.defaultdict(float)
        local = size_bytes / piece_count(self.rules, has | (wants - summed))
        for over, passes, shrinks in ((summed & wants, 1, True), (summed - wants, 2, False), (moved, 1, False)):
            pieces = piece_count(self.rules, over)
            if pieces > 1:
                found[self.key(over)] += passes * local * (pieces - 1) / pieces
            local /= pieces if shrinks else 1
        if (pieces := piece_count(self.rules, has - wants)) > 1:
            found[self.key(has - wants)] += local * (pieces - 1)
        return found

    def key(self, mesh_axes: Iterable[str]) -> str:
        return "+".join(name for name in self.rules.mesh if name in set(mesh_axes))

    def gather(self, weight: _Weight, itemsize: int) -> None:
        """A weight goes from where it rests to where it is used; one outside the layers stays for all microbatches."""
        times = self.rules.microbatches if "layers" in weight.sizes else 1
        self.add(self.cost(weight.elements * itemsize, weight.rest, weight.use), times)

    def blocks(self) -> None:
        """All layers. What a block reads and writes is in model/transformer.py, how in products.py."""
        attention, hidden, out, down = self.products()
        self.times = self.rules.microbatches * self.model.layers
        if self.model.block == "parallel":
            for read in [[*attention, *hidden]] if self.model.shared_norm else [attention, hidden]:
                self.fan_out(read)
            self.fan_in([out, down])
        else:
            self.fan_out(attention)
            self.fan_in([out])
            self.fan_out(hidden)
            self.fan_in([down])
            remat = self.rules.remat
            if remat.policy == "block" or (remat.policy == "names" and "residual" not in (*remat.save, *remat.offload)):
                self.summed([out])  # computed again: what the second half of the block reads
        self.times = self.rules.microbatches
        for name, *_ in (*attention, *hidden, out, down):
            for weight in self.weights[name] * 2:  # forward and backward
                self.gather(weight, self.compute_bytes)

    def products(self) -> tuple[list[Product], list[Product], Product, Product]:
        """A block's products: those of attention and of the MLP that read its input, and the two that write."""
        heads, kv_heads, mlp = ("heads", "head_dim"), ("kv_heads", "head_dim"), ("mlp",)
        attention: list[Product] = [("wq", heads, "q"), ("wk", kv_heads, "k"), ("wv", kv_heads, "v")]
        gate: list[Product] = [("w_gate", mlp, "hidden")] * (self.model.mlp_kind == "gated")
        return attention, [*gate, ("w_up", mlp, "hidden")], ("wo", heads, "attention_out"), ("w_down", mlp, "hidden")

    def fan_out(self, products: list[Product]) -> None:
        """One input, read with several weights; forward and backward."""
        x, remat = self.block_input, self.rules.remat
        kept = remat.policy == "none" or "block_input" in (*remat.save, *remat.offload)
        learns = any(self.weights[name][0].trained or f"{name}_a" in self.weights for name, *_ in products)
        for _ in range(2 if learns and not kept else 1):  # the input, gathered; for the weights' gradients again
            self.move(self.bytes(_BTD), self.residual, x)
        for product in products:
            self.product(product)
        self.summed(products)

    def fan_in(self, products: list[Product]) -> None:
        """Several inputs, each through its own weight, summed into the residual stream; forward and backward."""
        self.summed(products)
        self.move(self.bytes(_BTD), self.residual, self.block_input)  # the gradient
        for product in products:
            self.product(product)

    def product(self, product: Product) -> None:
        """What a product and its gradients move, but for sums into the residual stream."""
        name, wide, array = product
        weight = self.weights[name][0]  # those of a layer pattern are split alike
        x, y, size_bytes = self.block_input, self.place(array), self.bytes(("batch", "seq", *wide))
        have = {"batch": x["batch"], "seq": x["seq"], **{axis: weight.use[axis] for axis in wide}}
        over_embed = _over(x, "embed")
        queries = self.rules.split("rules", "q", "seq")
        if array in ("k", "v") and queries:  # each query reads all keys; their gradients come from everywhere
            whole = {**y, "seq": ()}
            self.move(size_bytes, have, whole, over_embed)
            self.move(size_bytes, whole, {**y, "seq": x["seq"]}, queries)
        else:
            self.move(size_bytes, have, y, over_embed)
        matrix_bytes = sum(one.elements for one in self.weights[name]) * self.compute_bytes / self.model.layers
        if apart := _over(weight.use, "embed") - over_embed:
            # Split in use over what its input is not: it is gathered, or the sums over embed are reduced and, on its
            # other side, where embed is the result, that is gathered. It must be where that mesh axis splits the rows.
            gathered = [self.cost(matrix_bytes, weight.use, {**weight.use, "embed": ()})]
            reduced = [self.cost(size_bytes, have, y, apart)]
            result = [self.cost(self.bytes(_BTD), {**x, "embed": tuple(apart)}, x)]
            for instead in (reduced, result):
                self.cheaper(gathered, *([] if apart & _over(have) else [instead]))
        rows = _over(x, "batch", "seq")
        if weight.trained:
            self.move(matrix_bytes, {"embed": x["embed"], **{axis: y[axis] for axis in wide}}, weight.gradient, rows)
        self.adapter(name, rows)
        if shared := _over(self.place("q"), "heads") - _over(y, "kv_heads") if array in ("k", "v") else set():
            # Heads are split finer than their keys: the gradients of a key's heads meet, in the keys or in the matrix.
            split = {"kv_heads": (*y["kv_heads"], *shared)}
            in_matrix = [self.cost(matrix_bytes, {**weight.gradient, **split}, weight.gradient)]
            self.cheaper([self.cost(size_bytes, {**y, **split}, y)], *([in_matrix] if weight.trained else []))

    def adapter(self, name: str, rows: set[str]) -> None:
        """What the low-rank adapter of a matrix moves: itself, its gradients, and the sum of what lies between.

        An adapter of a matrix that writes to the residual stream makes no such sum: its addends join those of the
        matrix, and the gradient of its second matrix is summed over the axes that split its first.
        """
        inner: set[str] = set()
        for part in "ab":
            for weight in self.weights[f"{name}_{part}"]:
                self.add(self.cost(weight.elements * self.compute_bytes, weight.rest, weight.use), 1)
                own = weight.elements * self.compute_bytes / self.model.layers
                self.move(own, weight.use, weight.gradient, rows | inner)
                wide = _over(weight.use) - _over(weight.use, "embed", "layers")
                if part == "a":
                    inner = wide
                elif wide:
                    between = self.bytes(("batch", "seq")) * weight.sizes["rank"]
                    self.move(between, self.block_input, self.block_input, wide)

    def summed(self, products: list[Product]) -> None:
        """The sum over heads or hidden units, into the residual; products that are split alike are added up first."""
        alike = {frozenset(_over(self.place(array), *wide)) for _, wide, array in products}
        for partial in alike:
            self.move(self.bytes(_BTD), self.block_input, self.residual, partial)

    def look_up(self) -> None:
        """The token table and learned positions, forward and backward: see `products.look_up`.

        A tied table is gathered for the logits anyway, and its two gradients can be added up before they are reduced.
        """
        (table,), tied = self.weights["embedding"], self.model.tied_embeddings
        gradients = [] if tied else [(table, FLOAT32_BYTES)]
        gradients += [(positions, self.compute_bytes) for positions in self.weights["position_embedding"]]
        gradients = [pair for pair in gradients if pair[0].trained]
        rows, batch = table.use["vocab"], _over(self.residual, "batch", "seq")
        columns = _over(table.rest, "embed")
        if rows:
            self.gather(table, 0 if tied else self.compute_bytes)
            self.move(self.bytes(_BTD), self.block_input, self.residual, rows)
            self.move(self.bytes(_BTD), self.residual, self.block_input)
        elif not tied:
            # Read where it rests, for which the ids of others are needed, or gathered, whichever is less.
            there = self.cost(self.bytes(_BTD), {"embed": tuple(columns)}, self.residual)
            gathered = self.cost(table.elements * self.compute_bytes, table.rest, {})
            self.cheaper([there, self.ids(columns & batch)], [gathered])
        # So too the gradients: reduced as tables, or x's gradient goes to who has its columns, and is added up there.
        meet = set() if rows else _over(table.gradient, "embed") & batch
        back = {axis: tuple(name for name in names if name not in meet) for axis, names in self.residual.items()}
        apart = {"embed": tuple(meet)}
        reduced = [
            self.cost(like.elements * itemsize, {"vocab": like.use.get("vocab", ())}, like.gradient, batch)
            for like, itemsize in gradients
        ]
        sent = [self.cost(self.bytes(_BTD), self.residual, {**back, **apart}), self.ids(meet - columns)]
        sent += [
            self.cost(like.elements * itemsize, apart, like.gradient, batch - meet) for like, itemsize in gradients
        ]
        self.cheaper(reduced, *([sent] if meet and gradients else []))

    def ids(self, over: set[str]) -> dict[str, float]:
        """The token ids, gathered over some mesh axes."""
        ids_bytes = self.sizes["batch"] * self.sizes["seq"] * _INT32_BYTES
        elsewhere = _over(self.residual, "batch", "seq") - over
        return self.cost(ids_bytes, {"batch": (*over, *elsewhere)}, {"batch": tuple(elsewhere)})

    def cheaper(self, *ways: list[dict[str, float]]) -> None:
        """Adds the way that sends least."""
        for cost in min(ways, key=lambda way: sum(sum(cost.values()) for cost in way)):
            self.add(cost, self.times)

    def rows_gradient(self, table: _Weight) -> None:
        """The gradient of a table of the vocabulary, in float32."""
        if not table.trained:
            return
        have = {"vocab": table.use["vocab"]}
        self.move(table.elements * FLOAT32_BYTES, have, table.gradient, _over(self.block_input, "batch", "seq"))

    def loss(self) -> None:
        """Logits, softmax and their gradients, which are found in the forward pass: see model/loss.py."""
        (table,) = self.weights["embedding" if self.model.tied_embeddings else "unembedding"]
        columns = self.rules.split("rules", "logits", "vocab")
        logits = self.place("logits")
        self.move(self.bytes(_BTD), self.residual, self.block_input)
        self.gather(table, self.compute_bytes)
        by_token = {axis: logits[axis] for axis in ("batch", "seq")}
        for _ in range(3):  # the highest logit, the sum of exponentials, the target's logit
            self.move(self.bytes(("batch", "seq")) // self.compute_bytes * FLOAT32_BYTES, by_token, by_token, columns)
        self.move(self.bytes(_BTD), self.block_input, self.residual, columns)
        self.rows_gradient(table)

    def small(self, weight: _Weight) -> None:
        """A norm's scale, a bias or a table of positions: used once, its gradient summed over everything else."""
        if weight.name.startswith("w") or weight.name in ("embedding", "unembedding"):
            return
        itemsize = FLOAT32_BYTES if weight.name in ("scale", "bias") else self.compute_bytes
        self.gather(weight, itemsize)
        if weight.name == "position_embedding" or not weight.trained:
            return  # see look_up
        owner = weight.path.rpartition(".")[0].rpartition(".")[2]
        applied = self.place(_APPLIED_TO.get(weight.name) or _APPLIED_TO.get(owner) or "residual")
        elsewhere = {name for axis, names in applied.items() if axis not in weight.sizes for name in names}
        have = {axis: names for axis, names in applied.items() if axis in weight.sizes}
        self.move(weight.elements * itemsize, have, weight.gradient, elsewhere)
