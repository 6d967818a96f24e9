"""cuDNN's attention on NVIDIA GPUs, forward and backward, with its softmax sums.

jax.nn.dot_product_attention has no packed documents and rounds the sums to bfloat16. Its own function below that,
jax._src.cudnn, has both. But up to jax 0.10.2 it reads the wrong keys of packed documents if keys have fewer heads than
queries (jax-ml/jax#39521), and it asks the GPU at hand what the kernel may do, also where a program is compiled for
another one. So its two primitives, which are cuDNN's calls, are used here. `attention.unsupported` says what they lack.
"""

import functools
import inspect
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax._src.cudnn import fused_attention_stablehlo as kernels

from gspmd_lm import config
from gspmd_lm.errors import InputError
from gspmd_lm.kernels.attention import scores_scale
from gspmd_lm.placing import scope

DOCUMENTS = 32  # of a row, on average, that one call attends to; it holds sums of whole rows for each
_SCORE_MOD = "score_mod" in inspect.signature(kernels.dot_product_attention).parameters  # since jax 0.12
_OFFSETS = 2**31  # cuDNN is told in int32 where a document begins, counted in numbers


class Documents(NamedTuple):
    """Where the documents of some rows lie: they are counted through all rows, and so are tokens. int32."""

    of_BT: jax.Array  # the document of each token
    place_BT: jax.Array  # the place of each token in its document
    begins: jax.Array  # the first token of each document; all tokens for those that do not exist
    count: jax.Array


def documents(segments_BT: jax.Array) -> Documents:
    """The documents of rows: runs of equal segments. Padding is one too, so every token belongs to one."""
    B, T = segments_BT.shape
    change_BT = jnp.pad(segments_BT[:, 1:] != segments_BT[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    of_BT = jnp.cumsum(change_BT.ravel(), dtype=jnp.int32).reshape(B, T) - 1
    begins = jnp.nonzero(change_BT.ravel(), size=B * T + B * _most(T) + 1, fill_value=B * T)[0].astype(jnp.int32)
    place_BT = jnp.arange(B * T, dtype=jnp.int32).reshape(B, T) - begins[of_BT]
    return Documents(of_BT, place_BT, begins, of_BT[-1, -1] + 1)


def forward(
    q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, cfg: config.Model, packed: Documents | None = None,
    *, causal: bool = True,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """The result of the kernel, [B, T, N, H], and the logarithm of its softmax sums, [B, T, N], float32.

    A causal query sees the keys before it in its document, no more than the window of the config. Any other sees all.
    """
    kernels.check_cudnn_version()  # raises RuntimeError where cuDNN is not installed
    call = functools.partial(_call, kernels._dot_product_attention_fwd_p, cfg, causal, is_training=True)
    if packed is None:
        out_BTNH, sums_BNT = call((q_BTNH, k_BSKH, v_BSKH))
        return out_BTNH, jnp.swapaxes(sums_BNT, 1, 2)

    def add(found: tuple[jax.Array, jax.Array], part: _Part) -> tuple[jax.Array, jax.Array]:
        out_BTNH, sums_DNT = call((q_BTNH, k_BSKH, v_BSKH), part=part)
        lse_BTN = sums_DNT[part.document_BT, :, packed.place_BT]
        return _where(part.mine_BT, (out_BTNH, lse_BTN), found)

    zeros = jnp.zeros_like(q_BTNH), jnp.zeros(q_BTNH.shape[:3], jnp.float32)
    return _over_parts(packed, q_BTNH, k_BSKH, add, zeros)


def backward(
    q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, cfg: config.Model, out_BTNH: jax.Array,
    lse_BTN: jax.Array, dout_BTNH: jax.Array, packed: Documents | None = None, *, causal: bool = True,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    """The gradients of queries, keys and values, given the result and the softmax sums over all keys."""
    call = functools.partial(_call, kernels._dot_product_attention_bwd_p, cfg, causal)
    given, after = (q_BTNH, k_BSKH, v_BSKH), (out_BTNH.astype(q_BTNH.dtype), dout_BTNH.astype(q_BTNH.dtype))
    if packed is None:
        dq, dk, dv = call(given, (jnp.swapaxes(lse_BTN, 1, 2), *after))
        return dq, dk, dv

    B, T, N, _ = q_BTNH.shape

    def add(found: Any, part: _Part) -> Any:
        sums_DNT = jnp.zeros((B * _most(T), N, T), jnp.float32)
        to = jnp.where(part.mine_BT, part.document_BT, len(sums_DNT))  # beyond the end: it is not set
        sums_DNT = sums_DNT.at[to, :, packed.place_BT].set(lse_BTN, mode="drop")
        return _where(part.mine_BT, call(given, (sums_DNT, *after), part), found)

    return _over_parts(packed, q_BTNH, k_BSKH, add, tuple(jnp.zeros_like(x) for x in given))


class _Part(NamedTuple):
    """The documents of one call: D = B * `_most(T)` of them, or fewer if it is the last one."""

    mine_BT: jax.Array  # whether a token is in one
    document_BT: jax.Array  # in which, counted from 0
    lengths: jax.Array  # [B, D / B], as cuDNN's call is given it: the rows have no meaning
    of_queries: jax.Array  # [B, D / B + 1]: the number of the array with which each document begins
    of_keys: jax.Array


def _most(T: int) -> int:
    """The documents of one call over the rows; cuDNN's call takes one document for none."""
    return max(2, min(DOCUMENTS, T))


def _over_parts(packed: Documents, q_BTNH: jax.Array, k_BSKH: jax.Array, add: Any, found: Any) -> Any:
    """`found` after `add` of each part. There is one part unless documents are short."""
    B, T, *heads = q_BTNH.shape
    if q_BTNH.size >= _OFFSETS:
        raise InputError(
            f"attention by cuDNN to packed documents: a device has {B} rows of {T} tokens with {math.prod(heads)} "
            f"numbers in all heads, and cuDNN counts up to {_OFFSETS}\n  fix   use more microbatches"
        )
    most = _most(T)

    def body(state: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
        first, found = state
        # The last row of `of_queries` may end with what no document begins with.
        begins = jnp.pad(
            jax.lax.dynamic_slice_in_dim(packed.begins, first, B * most + 1), (0, B - 1), constant_values=B * T
        )
        lengths = jnp.diff(begins[: B * most + 1]).reshape(B, most)
        mine_BT = (packed.of_BT >= first) & (packed.of_BT < first + B * most)
        at = begins.reshape(B, most + 1)
        width, key_width = math.prod(heads), math.prod(k_BSKH.shape[2:])
        part = _Part(mine_BT, packed.of_BT - first, lengths, at * width, at * key_width)
        return first + B * most, add(found, part)

    with scope("turns", "1"):
        return jax.lax.while_loop(lambda state: state[0] < packed.count, body, (jnp.int32(0), found))[1]


def _where(mine_BT: jax.Array, new: Any, old: Any) -> Any:
    """`new` for the tokens of a part. The kernel leaves the rest of its results as the memory was."""

    def chosen(x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.where(mine_BT.reshape(*mine_BT.shape, *(1,) * (x.ndim - 2)), x, y)

    return tuple(chosen(x, y) for x, y in zip(new, old, strict=True))


def _call(primitive: Any, cfg: config.Model, causal: bool, qkv: Any, after: Any = (), part: _Part | None = None,
          **options: Any) -> list[jax.Array]:  # fmt: skip
    """What a primitive gives. `after` is what a backward pass is given of the forward pass."""
    none, masks = jnp.zeros(0, qkv[0].dtype), kernels.MaskType
    where = [none] * 4 if part is None else [part.lengths, part.lengths, part.of_queries, part.of_keys]
    mask = (masks.CAUSAL if part is None else masks.PADDING_CAUSAL) if causal else masks.NO_MASK
    if _SCORE_MOD:
        options |= {"score_mod_name": None, "score_mod_jaxpr": None}
    return primitive.bind(
        *qkv, none, *where, none, none, *after, scale=scores_scale(cfg), seed=0, dropout_rate=0.0,
        variadic_args=(False, False), mask_type=mask, layout=kernels.AttentionLayout.BTNH.value,
        sliding_window_length=cfg.sliding_window or None, **options,
    )  # fmt: skip
