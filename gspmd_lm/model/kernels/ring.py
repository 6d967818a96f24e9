"""Ring attention: keys and values go round the devices, and each uses them on the way (arXiv 2310.01889).

Rows are dealt (context.py): device i has an early half, piece i, and a late half, piece 2n-1-i. In turn 0 each device
attends to its own tokens, causally. In each other turn it has the keys of another device j, and two of the four
products of halves are seen, both of them whole: its late queries see j's early keys, and either its early queries see
them too (j before i), or its late queries see j's late keys. So all devices have equal work, and no block of a mask is
computed in vain.

What each turn gives is merged by its softmax sums, in float32. The backward pass goes round again; gradients of keys
and values travel along with them, added up on the way, one turn behind.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from gspmd_lm.model.kernels.blocks import Blocks
from gspmd_lm.model.kernels.context import permuted
from gspmd_lm.sharding.annotate import Split


class _Part(NamedTuple):
    """What some keys contribute to the result of queries."""

    out_BTNH: jax.Array  # float32
    lse_BTN: jax.Array  # float32: the logarithm of the softmax sum

    def merged(self, other: "_Part", counts: Any = True) -> "_Part":
        """Both together, or this one alone if the other one does not count."""
        lse_BTN = jnp.where(counts, other.lse_BTN, -jnp.inf)
        total_BTN = jnp.logaddexp(self.lse_BTN, lse_BTN)
        mine, others = (jnp.exp(lse - total_BTN)[..., None] for lse in (self.lse_BTN, lse_BTN))
        return _Part(mine * self.out_BTNH + others * other.out_BTNH, total_BTN)


def attend(q_BTNH, k_BTKH, v_BTKH, heads_N, positions_BT, segments_BT=None, *, over, kernel, cfg, interpret):
    """Attention of a device's queries to all keys before them, [B, T, N, H]."""
    del heads_N, positions_BT  # alibi and sinks are refused
    everyone = None
    if segments_BT is not None:
        everyone = jax.lax.all_gather(segments_BT, over.over)  # [devices, B, T]: small beside keys
    return _ring(over, Blocks(kernel, cfg, interpret), q_BTNH, k_BTKH, v_BTKH, everyone)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _ring(over: Split, blocks: Blocks, q, k, v, segments):
    return _forward(over, blocks, q, k, v, segments)[0]


def _forward(over: Split, blocks: Blocks, q, k, v, segments):
    with jax.named_scope("ring"):
        turns = _Turns(over, segments)
        kv = turns.passed((k, v))
        local = _Part(*blocks.forward(q, k, v, turns.local_segments, causal=True))
        parts = tuple(_Part(*half) for half in zip(*map(_halves, local), strict=True))
        parts, kv = turns.loop(lambda turn, parts, kv: _add(turns, blocks, q, turn, parts, kv), parts, kv)
        out, lse = (jnp.concatenate(halves, axis=1) for halves in zip(*parts, strict=True))
        out, lse = (checkpoint_name(x, "attention_out") for x in (out.astype(q.dtype), lse))
    return out, (q, k, v, segments, out, lse)


def _add(turns: "_Turns", blocks: Blocks, q, turn, parts, kv):
    """The parts of the early and of the late queries with what the keys of a turn contribute."""
    early, late = parts
    first, second = _pairs(turns, turn, q, *kv)
    q, k, v, ids = _stack(first, second)
    results = blocks.forward(q, k, v, ids, causal=False)
    of_late, of_other = (_Part(*part) for part in zip(*(jnp.split(x, 2) for x in results), strict=True))
    before = turns.before(turn)
    return early.merged(of_other, before), late.merged(of_late).merged(of_other, ~before)


def _backward(over: Split, blocks: Blocks, saved, dout):
    q, k, v, segments, out, lse = saved
    with jax.named_scope("ring"):
        turns = _Turns(over, segments)
        kv = turns.passed((k, v))
        dq, *local_dkv = blocks.backward(q, k, v, turns.local_segments, out, lse, dout, causal=True)
        dqs = tuple(x.astype(jnp.float32) for x in _halves(dq))
        of_queries = [_halves(x) for x in (out, lse, dout)]

        def add(turn, carried, kv):
            (early, late), travelling = carried
            # The gradients come from the device before while this turn is computed.
            travelling = None if travelling is None else turns.passed(travelling)
            first, second = _pairs(turns, turn, q, *kv)
            before = turns.before(turn)
            pair = [_stack(x[1], jnp.where(before, *x)) for x in of_queries]
            gradients = blocks.backward(*_stack(first, second), *pair, causal=False)
            (dq_late, dq_other), *dkv = (jnp.split(x.astype(jnp.float32), 2) for x in gradients)
            early = early + jnp.where(before, dq_other, 0)
            late = late + dq_late + jnp.where(before, 0, dq_other)
            new = tuple(
                jnp.concatenate([mine + jnp.where(before, more, 0), jnp.where(before, 0, more)], axis=1)
                for mine, more in dkv
            )
            if travelling is not None:
                new = jax.tree.map(lambda a, b: a + b.astype(jnp.float32), new, travelling)
            return (early, late), tuple(x.astype(k.dtype) for x in new)

        (dqs, travelling), _ = turns.loop(add, (dqs, None), kv)
        received_dkv = turns.passed(travelling)
        dk, dv = (
            (a.astype(jnp.float32) + b.astype(jnp.float32)).astype(k.dtype)
            for a, b in zip(local_dkv, received_dkv, strict=True)
        )
    return jnp.concatenate(dqs, axis=1).astype(q.dtype), dk, dv, None


_ring.defvjp(_forward, _backward)


class _Turns:
    """The turns of a ring. In turn t, device i has the keys of device i - t."""

    def __init__(self, over: Split, segments: jax.Array | None):
        self.over, self.segments = over, segments
        self.device = jax.lax.axis_index(over.over)

    def passed(self, arrays: Any) -> Any:
        """The arrays of the device before this one."""
        n = self.over.pieces
        return jax.tree.map(lambda x: permuted(x, self.over, {i: (i + 1) % n for i in range(n)}), arrays)

    def loop(self, turn, carried: Any, kv: Any) -> tuple[Any, Any]:
        """`carried` after turns 1 to n - 1, of which the last one passes nothing on. `kv` are the keys of turn 1."""
        n = self.over.pieces
        if n > 2:
            # The first turn stands before the loop: it may give what it carries another form.
            following = self.passed(kv)
            carried, kv = turn(1, carried, kv), following
        if n > 3:

            def body(state, number):
                carried, kv = state
                following = self.passed(kv)
                return (turn(number, carried, kv), following), None

            (carried, kv), _ = jax.lax.scan(body, (carried, kv), jnp.arange(2, n - 1))
        return turn(n - 1, carried, kv), kv

    def before(self, turn: Any) -> jax.Array:
        """Whether the keys of a turn come from a device whose early half is before that of this device."""
        return self.device >= turn

    @property
    def local_segments(self) -> tuple[jax.Array, jax.Array] | None:
        """The segments of queries and keys in turn 0."""
        return None if self.segments is None else (self._of(self.device), self._of(self.device))

    def of_keys(self, turn: Any) -> jax.Array | None:
        return None if self.segments is None else self._of((self.device - turn) % self.over.pieces)

    def _of(self, device: jax.Array) -> jax.Array:
        assert self.segments is not None
        return jax.lax.dynamic_index_in_dim(self.segments, device, keepdims=False)


def _pairs(turns: _Turns, turn: Any, q, k, v) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Queries, keys, values and segments of the two products of halves that a turn computes."""
    (q_early, q_late), (k_early, k_late), (v_early, v_late) = map(_halves, (q, k, v))
    before = turns.before(turn)
    ids: Any = (None, None)
    if turns.local_segments is not None:
        (early, late), (k_ids, k_late_ids) = _halves(turns.local_segments[0]), _halves(turns.of_keys(turn))
        ids = (late, k_ids), (jnp.where(before, early, late), jnp.where(before, k_ids, k_late_ids))
    other = jnp.where(before, q_early, q_late), jnp.where(before, k_early, k_late), jnp.where(before, v_early, v_late)
    return (q_late, k_early, v_early, ids[0]), (*other, ids[1])


def _halves(x_BT: Any) -> list[jax.Array]:
    return jnp.split(x_BT, 2, axis=1)


def _stack(first: Any, second: Any) -> Any:
    """Two products as the rows of one."""
    return jax.tree.map(lambda a, b: jnp.concatenate([a, b]), first, second)
