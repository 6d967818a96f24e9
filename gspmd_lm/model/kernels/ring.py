"""Ring attention: keys and values go round the devices, and each uses them on the way (arXiv 2310.01889).

Rows are in zigzag (context.py): device i has an early half, piece i, and a late half, piece 2n-1-i. In turn 0 each
device attends to its own tokens, causally. In each other turn it has the keys of another device j, and two of the four
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

from gspmd_lm.config import with_values
from gspmd_lm.model.kernels.blocks import Blocks
from gspmd_lm.model.kernels.common import scores_scale
from gspmd_lm.sharding.annotate import Split
from gspmd_lm.sharding.permutes import permute


class _Part(NamedTuple):
    """The partial result of queries over some of the keys."""

    out_BTNH: jax.Array  # float32
    lse_BTN: jax.Array  # float32: the logarithm of the softmax sum

    def merge(self, other: "_Part") -> "_Part":
        total_BTN = jnp.logaddexp(self.lse_BTN, other.lse_BTN)
        mine, others = (jnp.exp(lse - total_BTN)[..., None] for lse in (self.lse_BTN, other.lse_BTN))
        return _Part(mine * self.out_BTNH + others * other.out_BTNH, total_BTN)


def attend(q_BTNH, k_BTKH, v_BTKH, heads_RN, positions_BT, segments_BT=None, *, over, kernel, cfg):
    """Attention of a device's queries to all keys before them, [B, T, N, H]."""
    del heads_RN, positions_BT  # alibi and sinks are refused
    everyone = None
    if segments_BT is not None:
        everyone = jax.lax.all_gather(segments_BT, over.over)  # [devices, B, T]: small beside keys
    if kernel == "splash":  # which leaves the scale to its caller: queries are scaled once, not in each turn
        q_BTNH, cfg = q_BTNH * scores_scale(cfg), with_values(cfg, {"attention.scale": 1.0})
    return _ring(over, Blocks(kernel, cfg), q_BTNH, k_BTKH, v_BTKH, everyone)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _ring(over: Split, blocks: Blocks, q, k, v, segments):
    return _forward(over, blocks, q, k, v, segments)[0]


def _forward(over: Split, blocks: Blocks, q, k, v, segments):
    with jax.named_scope("ring"):
        turns = _Turns(over, segments)
        kv = turns.pass_on((k, v))
        part = _Part(*blocks.forward(q, k, v, turns.segments(0), causal=True))

        def add(turn, part, kv):
            """The part of the keys so far, with what those of a turn contribute."""

            def all_queries():
                (k, v), segments = map(_early, kv), turns.segments(turn, keys=_early)
                return part.merge(_Part(*blocks.forward(q, k, v, segments, causal=False)))

            def late_queries():
                (k, v), segments = kv, turns.segments(turn, queries=_late)
                new = _Part(*blocks.forward(_late(q), k, v, segments, causal=False))
                late = _Part(*map(_late, part)).merge(new)
                return _Part(*map(_with_late, part, late))

            return jax.lax.cond(turns.before(turn), all_queries, late_queries)

        (out, lse), kv = turns.loop(add, part, kv)
        out, lse = (checkpoint_name(x, "attention_out") for x in (out.astype(q.dtype), lse))
    return out, (q, k, v, segments, out, lse)


def _backward(over: Split, blocks: Blocks, saved, dout):
    q, k, v, segments, out, lse = saved
    with jax.named_scope("ring"):
        turns = _Turns(over, segments)
        kv = turns.pass_on((k, v))
        dq, *local_dkv = blocks.backward(q, k, v, turns.segments(0), out, lse, dout, causal=True)
        dq = dq.astype(jnp.float32)

        def add(turn, carried, kv):
            dq, travelling = carried
            # The gradients come from the device before while this turn is computed.
            travelling = None if travelling is None else turns.pass_on(travelling)

            def all_queries():
                (k, v), segments = map(_early, kv), turns.segments(turn, keys=_early)
                more, *dkv = blocks.backward(q, k, v, segments, out, lse, dout, causal=False)
                without_late = ((0, 0), (0, k.shape[1]), (0, 0), (0, 0))
                return dq + more, tuple(jnp.pad(x, without_late) for x in dkv)

            def late_queries():
                (k, v), segments = kv, turns.segments(turn, queries=_late)
                late = [_late(x) for x in (q, out, lse, dout)]
                more, *dkv = blocks.backward(late[0], k, v, segments, late[1], late[2], late[3], causal=False)
                return _with_late(dq, _late(dq) + more), tuple(dkv)

            dq, new = jax.lax.cond(turns.before(turn), all_queries, late_queries)
            if travelling is not None:
                new = jax.tree.map(lambda a, b: a.astype(jnp.float32) + b.astype(jnp.float32), new, travelling)
            return dq, tuple(x.astype(k.dtype) for x in new)

        (dq, travelling), _ = turns.loop(add, (dq, None), kv)
        received_dkv = turns.pass_on(travelling)
        dk, dv = (
            (a.astype(jnp.float32) + b.astype(jnp.float32)).astype(k.dtype)
            for a, b in zip(local_dkv, received_dkv, strict=True)
        )
    return dq.astype(q.dtype), dk, dv, None


_ring.defvjp(_forward, _backward)


class _Turns:
    """The turns of a ring. In turn t, device i has the keys of device i - t."""

    def __init__(self, over: Split, segments: jax.Array | None):
        self.over, self.all_segments = over, segments
        self.device = jax.lax.axis_index(over.over)

    def pass_on(self, arrays: Any) -> Any:
        """The arrays of the device before this one."""
        n = self.over.num_shards
        return jax.tree.map(lambda x: permute(x, self.over, {i: (i + 1) % n for i in range(n)}), arrays)

    def loop(self, turn, carried: Any, kv: Any) -> tuple[Any, Any]:
        """`carried` after turns 1 to n - 1, of which the last one passes nothing on. `kv` are the keys of turn 1.

        Keys are passed on once the turn before is computed. Without barriers, XLA gathers all of them first on GPUs.
        """
        n = self.over.num_shards
        carried, kv = jax.lax.optimization_barrier((carried, kv))
        if n > 2:
            # The first turn stands before the loop: it may give what it carries another form.
            following = self.pass_on(kv)
            carried, kv = jax.lax.optimization_barrier((turn(1, carried, kv), following))
        if n > 3:

            def body(state, number):
                carried, kv = state
                following = self.pass_on(kv)
                return (turn(number, carried, kv), following), None

            (carried, kv), _ = jax.lax.scan(body, (carried, kv), jnp.arange(2, n - 1))
        return turn(n - 1, carried, kv), kv

    def before(self, turn: Any) -> jax.Array:
        """Whether the keys of a turn come from a device whose early half is before that of this device."""
        return self.device >= turn

    def segments(self, turn: Any, queries: Any = None, keys: Any = None) -> tuple[jax.Array, jax.Array] | None:
        """The segments of queries, and of the keys of a turn; `queries` and `keys` take a part of them."""
        if self.all_segments is None:
            return None
        of_queries, of_keys = (
            jax.lax.dynamic_index_in_dim(self.all_segments, device, keepdims=False)
            for device in (self.device, (self.device - turn) % self.over.num_shards)
        )
        return queries(of_queries) if queries else of_queries, keys(of_keys) if keys else of_keys


def _early(x_BT: jax.Array) -> jax.Array:
    return x_BT[:, : x_BT.shape[1] // 2]


def _late(x_BT: jax.Array) -> jax.Array:
    return x_BT[:, x_BT.shape[1] // 2 :]


def _with_late(x_BT: jax.Array, late_BT: jax.Array) -> jax.Array:
    """The array with another late half."""
    return jax.lax.dynamic_update_slice_in_dim(x_BT, late_BT, x_BT.shape[1] // 2, axis=1)
