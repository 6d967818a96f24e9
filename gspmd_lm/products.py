"""Products with weights, whose sums over devices are made late, or once for several; on one device plain einsums.

A sum over devices that is still to be made is an array of addends, one per device, along a new first dimension.
Addends are added up before one reduction pays for all of them: in the forward pass what several weights write to the
residual stream, in the backward pass the gradients of what several weights read. XLA does not find that out everywhere
by itself.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gspmd_lm.placing import Spec, Split, Weight, like, parse, placement, remat, scope, shard, split, use

ROWS = "block_input"  # the activation whose rows products with weights are computed on


def read(x: Any, home: str, spec: str) -> Any:
    """`x`, which lives as `home` says, for `einsum`, which gathers it as `spec` says.

    One reduction adds up the gradients of all products with it. A sum that is not made yet stays one.
    """
    if isinstance(x, Partial):
        return x
    return Read(x, home, spec) if placement() else shard(x, spec)


def einsum(equation: str, x: Any, w: "Weight | jax.Array") -> Any:
    """`jnp.einsum` of an activation and a weight.

    A sum over an axis along which the weight is split in use is left to `write`. So is one over the rows of two
    activations.
    """
    if placement() is None:
        return jnp.einsum(equation, x, use(w) if isinstance(w, Weight) else w)
    (a, b), out = _letters(equation), equation.partition("->")[2]
    if not isinstance(w, Weight):
        rows, sums = split(ROWS, "batch"), f"{ROWS}.batch"
        with scope("sum", sums):
            return _partial(_einsum(f"{a},{b}->b{out}", x, w, b=("B", rows)), rows, (sums,), ())
    if isinstance(x, Partial):
        how = _How(f"z{a},{b}->z{out}", f"z{out},{b}->z{a}", f"z{a},z{out}->b{b}", w.holding(None))
        times = functools.partial(_product, how)
        return Partial(
            tuple(dataclasses.replace(p, array=times(p.array, None, w.array), of=(*p.of, w.path)) for p in x.parts)
        )
    among = out if isinstance(x, Read) else a
    splits = [(letter, axis, split(w.path, axis)) for letter, axis in zip(b, w.axes, strict=True)]
    letter, axis, over = next((one for one in splits if one[0] in among and one[2].pieces > 1), ("", "", Split()))
    cut, sums = (letter, over), f"{w.path}.{axis}"
    if isinstance(x, Read):
        how = _How(equation, f"{out},{b}->z{a}", f"{a},{out}->b{b}", w.holding(None), cut, sums)
        return _product(how, *x.given(over, w.path, sums), w.array)
    how = _How(f"{a},{b}->z{out}", f"z{out},{b}->{a}", f"{a},z{out}->b{b}", w.holding(None), cut, sums)
    return _partial(_product(how, x, None, w.array), over, (sums,), () if w.used else (w.path,))


def write(y: Any, spec: str, home: str) -> jax.Array:
    """The sum `y` of what `einsum` gave, where `home` says: one reduction for all of it.

    Its gradient is gathered as `spec` says.
    """
    if isinstance(y, Partial):
        return y.total(parse(home, y.rank), parse(spec, y.rank))
    return like(like(y, spec), home)


def gradient(dw: Any, weight: Weight) -> jax.Array:
    """The gradient of `weight`, where the rules say gradients live."""
    place, home = placement(), Spec(weight.path, weight.axes, "optimizer")
    if isinstance(dw, Partial):
        dw = dw.total(home, home)
    elif place:
        dw = place.constrain(dw, home)
    return dw.astype(weight.array.dtype)


def look_up(table: Weight, ids_BT: jax.Array, spec: str, home: str) -> jax.Array:
    """The rows of `table` for `ids_BT`, [B, T, D], where `home` says. Gradients of a repeated id add up in float32.

    A table that is whole along its rows is read where it rests: when it is split along `embed`, two small
    all-to-alls of the result cost less than gathering the table. One split along its rows is gathered along `embed`
    first; each piece then looks up the rows it has, and one reduction adds them up.
    """
    over, batch = split(table.path, table.axes[0]), split(ROWS, "batch")
    with scope("of", table.path):
        if over.pieces == 1:
            return table.array.astype(jnp.float32)[ids_BT].astype(table.compute_dtype)
        at_home = Spec(table.path, table.axes, "optimizer")
        rows_bVD: Any = _copied(at_home, Spec(table.path, table.axes), batch, use(table, jnp.float32))
        rows_bZRD = rows_bVD.reshape(batch.pieces, over.pieces, -1, rows_bVD.shape[-1])
        ids_bBT = ids_BT.reshape(batch.pieces, -1, *ids_BT.shape[1:])
        first_Z = rows_bZRD.shape[2] * jnp.arange(over.pieces)

        def found(rows_RD: jax.Array, first: jax.Array, ids: jax.Array) -> jax.Array:
            """Zeros for ids of other pieces, whose rows are out of bounds."""
            at = jnp.where(ids >= first, ids - first, len(rows_RD))
            return rows_RD.at[at].get(mode="fill", fill_value=0).astype(table.compute_dtype)

        found_Zb = jax.vmap(jax.vmap(found, (0, None, 0)), (1, 0, None))(rows_bZRD, first_Z, ids_bBT)
        found_ZBTD = found_Zb.reshape(over.pieces, *ids_BT.shape, -1)
        return write(_partial(found_ZBTD, over, (f"{table.path}.{table.axes[0]}",), (table.path,)), spec, home)


class Read:
    """An activation that `einsum` reads, gathered, and slots for the gradients that each way to split weights gives.

    A slot is zeros. Only its gradient is used: the addends that all products with the activation have given.
    """

    def __init__(self, x: jax.Array, home: str, spec: str):
        self.before, self.home = x, parse(home, x.ndim)
        self.x = shard(like(x, home), spec)
        self._fixed = jax.lax.stop_gradient(self.x)
        self._slots: dict[Split, tuple[jax.Array, list[tuple[str, str]]]] = {}

    def given(self, over: Split, path: str, sums: str) -> tuple[jax.Array, jax.Array | None]:
        """The activation and the slot for its gradients in a product with a weight that is split `over` mesh axes."""
        if over.pieces == 1:
            return self.x, None
        if over not in self._slots:
            readers: list[tuple[str, str]] = []
            self._slots[over] = _slot(self.home, over, readers, self.before), readers
        slot, readers = self._slots[over]
        readers.append((path, sums))
        return self._fixed, slot


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Addends:
    """Of one sum: [pieces, ...], one addend for each."""

    array: jax.Array
    over: Split = dataclasses.field(metadata={"static": True})
    sums: tuple[str, ...] = dataclasses.field(metadata={"static": True})  # the axes that are summed over, for `scope`
    of: tuple[str, ...] = dataclasses.field(metadata={"static": True})  # the weights whose products they are


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Partial:
    """A sum over devices that is still to be made, for each way to split it, and what is added to it after that."""

    parts: tuple[Addends, ...]
    rest: tuple[jax.Array, ...] = ()

    @property
    def rank(self) -> int:
        return self.parts[0].array.ndim - 1

    def __add__(self, other: Any) -> "Partial":
        if not isinstance(other, Partial):
            return Partial(self.parts, (*self.rest, other))
        found = {part.over: part for part in self.parts}
        for part in other.parts:
            if before := found.get(part.over):
                sums, of = (tuple(dict.fromkeys(a + b)) for a, b in ((before.sums, part.sums), (before.of, part.of)))
                part = Addends(before.array + part.array, part.over, sums, of)
            found[part.over] = part
        return Partial(tuple(found.values()), self.rest + other.rest)

    __radd__ = __add__

    def __rmul__(self, factor: float) -> "Partial":
        return jax.tree.map(lambda x: factor * x, self)

    def total(self, home: Spec, spec: Spec) -> jax.Array:
        """The sum, where `home` says."""
        sums: list[Any] = [_total(home, spec, part.over, part.sums, part.of, part.array) for part in self.parts]
        return sum((*sums[1:], *self.rest), sums[0])


def _partial(addends: jax.Array, over: Split, sums: tuple[str, ...], of: tuple[str, ...]) -> Any:
    return Partial((Addends(addends, over, sums, of),)) if over.pieces > 1 else addends


def _letters(equation: str) -> list[str]:
    """["BTD", "DNH"] of "BTD,DNH->BTNH"."""
    return equation.partition("->")[0].split(",")


def _einsum(equation: str, x: jax.Array, y: jax.Array, **cuts: tuple[str, Split]) -> jax.Array:
    """`jnp.einsum`, with axes cut into pieces: z=("N", split) makes the axis N two, z for the piece and N within it.

    In the equation z stands where an operand has it already, or where the result keeps it: as addends, if N is summed
    over. Elsewhere the two are one axis again.
    """
    (a, b), out = _letters(equation), equation.partition("->")[2]
    cuts = {piece: cut for piece, cut in cuts.items() if piece in equation}
    for piece, (letter, over) in cuts.items():
        if over.pieces == 1:
            a, b, out = (letters.replace(piece, "") for letters in (a, b, out))
        elif letter:
            (x, a), (y, b) = _cut(x, a, letter, over, piece), _cut(y, b, letter, over, piece)
            out = f"{piece}{out}" if letter in out else out
    found = jnp.einsum(f"{a},{b}->{out}", x, y)  # pieces come first, or it would transpose the result
    for piece, (letter, over) in cuts.items():
        if over.pieces > 1 and letter and letter in out:
            at, out = out.index(piece), out.replace(piece, "")
            to = out.index(letter)
            found = jnp.moveaxis(found, at, to)
            found = found.reshape(*found.shape[:to], -1, *found.shape[to + 2 :])
    return found


def _cut(x: jax.Array, letters: str, letter: str, over: Split, piece: str) -> tuple[jax.Array, str]:
    if letter not in letters:
        return x, letters
    at = letters.index(letter)
    shape = (*x.shape[:at], over.pieces, x.shape[at] // over.pieces, *x.shape[at + 1 :])
    return x.reshape(shape), letters.replace(letter, f"{piece}{letter}")


def _scope(role: str, *names: str) -> Any:
    return scope(role, *names) if names else contextlib.nullcontext()


def _sum(home: Spec, over: Split, sums: Sequence[str], of: Sequence[str], addends: jax.Array) -> jax.Array:
    place = placement()
    assert place
    with _scope("of", *of), scope("sum", *sums):
        return place.total(addends, over, home)


def _copies(spec: Spec, over: Split, of: Sequence[str], x: jax.Array) -> jax.Array:
    place = placement()
    assert place
    with _scope("of", *of):
        return place.copies(place.constrain(x, spec), over, spec)


# Functions and what their derivatives are


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3, 4))
def _total(
    home: Spec, spec: Spec, over: Split, sums: Sequence[str], of: Sequence[str], addends: jax.Array
) -> jax.Array:
    return _sum(home, over, sums, of, addends)


_total.defvjp(
    lambda *given: (_total(*given), None),
    lambda home, spec, over, sums, of, _, dy: (_copies(spec, over, of, dy),),
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _slot(home: Spec, over: Split, readers: list[tuple[str, str]], x: jax.Array) -> jax.Array:
    return jnp.zeros((over.pieces, *x.shape), x.dtype)


def _slot_backward(home: Spec, over: Split, readers: list[tuple[str, str]], _: None, dx: jax.Array) -> tuple[jax.Array]:
    of, sums = zip(*readers, strict=True)
    return (_sum(home, over, sums, of, dx),)


_slot.defvjp(lambda *given: (_slot(*given), None), _slot_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _copied(home: Spec, spec: Spec, over: Split, x: jax.Array) -> jax.Array:
    return _copies(spec, over, (), x)


_copied.defvjp(
    lambda *given: (_copied(*given), None),
    lambda home, spec, over, _, dx: (_sum(home, over, (f"{ROWS}.batch",), (), dx),),
)


class _How(NamedTuple):
    """Of a product with a weight: its equation and those of its derivatives, as `_einsum` reads them."""

    forward: str
    dx: str
    dw: str
    weight: Any  # a Weight without its array
    cut: tuple[str, Split] = ("", Split(pieces=2))  # the letter of the axis along which the weight is split in use
    sums: str = ""


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(how: _How, x: jax.Array, slot: jax.Array | None, w: jax.Array) -> jax.Array:
    """The product in plain einsums.

    It is not left to autodiff: cutting an axis in the forward pass too costs TPU programs copies in attention (4% of a
    step under fsdp2_tp4 on v5p).
    """
    return _forward(how, x, slot, w)[0]


def _forward(how: _How, x: jax.Array, slot: jax.Array | None, w: jax.Array) -> tuple[jax.Array, Any]:
    weight = how.weight.holding(w)
    used = w if weight.used else use(weight)
    sums = (how.sums,) if "z" in how.forward and how.sums else ()
    with _scope("of", *() if weight.used else (weight.path,)), _scope("sum", *sums):
        y = _einsum(how.forward, x, used, z=how.cut)
    return y, (x, used if remat() else w, jnp.zeros((), w.dtype))


def _backward(how: _How, saved: Any, dy: jax.Array) -> tuple[Any, ...]:
    x, w, rest = saved
    weight, rows = how.weight.holding(rest), split(ROWS, "batch")
    rows = Split() if set(rows.over) & set(how.cut[1].over) else rows
    with scope("of", weight.path):
        w = w if remat() else use(weight.holding(w))
        with _scope("sum", *((how.sums,) if how.sums else ())):
            dx = _einsum(how.dx, dy, w, z=how.cut)
        dw = None
        if not weight.frozen:
            with scope("optimizer", weight.path):
                addends = _einsum(how.dw, x, dy, z=how.cut, b=("B", rows))
            dw = gradient(_partial(addends, rows, (f"{ROWS}.batch",), ()), weight)
        found = (dx, None, dw) if "z" in how.forward or how.cut[1].pieces == 1 else (None, dx, dw)
        # In a scan, the gradients of one turn are where they belong before the next turn. Elsewhere a compiler is free
        # to reduce a weight's gradient when the optimizer asks for it, and to hold its addends while the other layers
        # are computed.
        return found if weight.scanned else jax.lax.optimization_barrier(found)


_product.defvjp(_forward, _backward)
