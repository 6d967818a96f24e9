"""cuDNN's attention on NVIDIA GPUs, forward and backward, with its softmax sums.

jax.nn.dot_product_attention has no packed documents and rounds the sums to bfloat16. Its own function below that,
jax._src.cudnn, has both. But up to jax 0.10.2 it reads the wrong keys of packed documents if keys have fewer heads than
queries (jax-ml/jax#39521), and it asks the GPU at hand what the kernel may do, also where a program is compiled for
another one. So its two primitives, which are cuDNN's calls, are used here. `common.unsupported_setting` says what
they lack.
"""

import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
from jax._src.cudnn import fused_attention_stablehlo as kernels
from jax.interpreters import batching

from gspmd_lm import config
from gspmd_lm.errors import InputError
from gspmd_lm.hardware.chips import chip_of
from gspmd_lm.model.kernels.common import as_wide, scores_scale, unsupported_setting
from gspmd_lm.model.kernels.documents import CallRanges, Documents, Ranges, each
from gspmd_lm.sharding.annotate import device_kind

_SCORE_MOD = "score_mod" in inspect.signature(kernels.dot_product_attention).parameters  # since jax 0.12
_OFFSETS = 2**31  # cuDNN takes where a document begins as an int32, counted in numbers of an array
_UNSEEN = -1e30  # finite: a query that sees no key then has a sum that vanishes beside any other


def forward(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    cfg: config.ModelConfig,
    packed: Documents | CallRanges | None = None,
    *,
    causal: bool = True,
) -> tuple[jax.Array, jax.Array]:
    """The result of the kernel, [B, T, N, H], and the logarithm of its softmax sums, [B, T, N], float32.

    A causal query sees the keys before it, no more than the window of the config. Any other query sees all keys. Either
    stays within its document, if they are `packed`. A query without a key has the result 0.
    """
    _check(cfg, q_BTNH.shape[1], packed is not None)
    qkv, width = (q_BTNH, k_BSKH, as_wide(v_BSKH, k_BSKH)), v_BSKH.shape[-1]
    call = functools.partial(_call, kernels._dot_product_attention_fwd_p, cfg, causal, qkv)
    if packed is None:
        out_BTNH, sums_BNT = call(is_training=True)
        return out_BTNH[..., :width], jnp.swapaxes(sums_BNT, 1, 2)

    def add(results: Any, part: CallRanges) -> Any:
        (out_BTNH, sums_DNT), queries = call(part=part, is_training=True), part.queries
        # Without a document, any sum will do.
        document_BT, place_BT = (_select(queries, x, jnp.int32(0)) for x in (queries.of_BT, queries.place_BT))
        lse_BTN = sums_DNT[document_BT, :, place_BT]
        return _select(queries, out_BTNH, results[0]), _select(queries, lse_BTN, results[1])

    start = jnp.zeros_like(q_BTNH), jnp.full(q_BTNH.shape[:3], _UNSEEN, jnp.float32)
    out_BTNH, lse_BTN = each(packed, add, start)
    return out_BTNH[..., :width], lse_BTN


def backward(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    cfg: config.ModelConfig,
    out_BTNH: jax.Array,
    lse_BTN: jax.Array,
    dout_BTNH: jax.Array,
    packed: Documents | CallRanges | None = None,
    *,
    causal: bool = True,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The gradients of queries, keys and values, given the result and the softmax sums over all keys."""
    qkv, width = (q_BTNH, k_BSKH, as_wide(v_BSKH, k_BSKH)), v_BSKH.shape[-1]
    call = functools.partial(_call, kernels._dot_product_attention_bwd_p, cfg, causal, qkv)
    after = [as_wide(x_BTNH.astype(q_BTNH.dtype), k_BSKH) for x_BTNH in (out_BTNH, dout_BTNH)]
    if packed is None:
        dq, dk, dv = call((jnp.swapaxes(lse_BTN, 1, 2), *after))
        return dq, dk, dv[..., :width]

    def add(gradients: Any, part: CallRanges) -> Any:
        queries, D = part.queries, len(part.queries.lengths)
        to = _select(queries, queries.of_BT, jnp.int32(D))  # beyond the end: it is not set
        sums_DNT = jnp.zeros((D, q_BTNH.shape[2], q_BTNH.shape[1]), jnp.float32)
        sums_DNT = sums_DNT.at[to, :, queries.place_BT].set(lse_BTN, mode="drop")
        new = call((sums_DNT, *after), part)
        return tuple(map(_select, (queries, part.keys, part.keys), new, gradients))

    dq, dk, dv = each(packed, add, tuple(jnp.zeros_like(x) for x in qkv))
    return dq, dk, dv[..., :width]


def _check(cfg: config.ModelConfig, seq: int, packed: bool) -> None:
    """Raises InputError for what the GPU that is compiled for cannot do, RuntimeError where cuDNN is not installed."""
    kernels.check_cudnn_version()
    chip = chip_of(device_kind())
    capability = chip.gpu.compute_capability if chip and chip.gpu else ()
    if reason := unsupported_setting("cudnn", cfg, seq=seq, segments=packed, capability=capability):
        raise InputError(f"attention by cuDNN on {device_kind()} cannot do {reason}\n  fix   attention: {{gpu: xla}}")


def _select(ranges: Ranges, new: jax.Array, old: jax.Array) -> jax.Array:
    """`new` for tokens of these documents, and `old` for others, whose results the kernel does not write."""
    if ranges.mine_BT is None:
        return new
    return jnp.where(ranges.mine_BT.reshape(*ranges.mine_BT.shape, *(1,) * (new.ndim - 2)), new, old)


def _call(
    primitive: Any,
    cfg: config.ModelConfig,
    causal: bool,
    qkv: Any,
    after: Any = (),
    part: CallRanges | None = None,
    **options: Any,
) -> list[jax.Array]:
    """The results of a primitive. `after`: what a backward pass takes of the forward pass."""
    none, masks = jnp.zeros(0, qkv[0].dtype), kernels.MaskType
    where, mask = [none] * 4, masks.CAUSAL if causal else masks.NO_MASK
    if part:
        lengths_and_begins = [_lengths_and_begins(*of) for of in zip(part, qkv[:2], strict=True)]
        where = [x for pair in zip(*lengths_and_begins, strict=True) for x in pair]
        mask = masks.PADDING_CAUSAL if causal else masks.PADDING
    if _SCORE_MOD:
        options |= {"score_mod_name": None, "score_mod_jaxpr": None}
    return primitive.bind(
        *qkv,
        none,
        *where,
        none,
        none,
        *after,
        scale=scores_scale(cfg),
        seed=0,
        dropout_rate=0.0,
        variadic_args=(False, False),
        mask_type=mask,
        layout=kernels.AttentionLayout.BTNH.value,
        sliding_window_length=cfg.attention.window or None,
        **options,
    )


def _one_by_one(primitive: Any, arrays: Any, axes: Any, **options: Any) -> tuple[list[jax.Array], list[int]]:
    """The results of a primitive under `jax.vmap`, for which jax has no rule: there is a call for each element.

    The replicas of data parallelism are such a dimension while gradients of microbatches are added up, and so are the
    stages of a pipeline. A device has one element of it.
    """
    count = next(x.shape[axis] for x, axis in zip(arrays, axes, strict=True) if axis is not None)
    calls = [
        primitive.bind(
            *(x if axis is None else jnp.take(x, number, axis) for x, axis in zip(arrays, axes, strict=True)),
            **options,
        )
        for number in range(count)
    ]
    return [jnp.stack(results) for results in zip(*calls, strict=True)], [0] * len(calls[0])


for _primitive in (kernels._dot_product_attention_fwd_p, kernels._dot_product_attention_bwd_p):
    batching.primitive_batchers[_primitive] = functools.partial(_one_by_one, _primitive)


def _lengths_and_begins(ranges: Ranges, x_BTNH: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The lengths of documents, and where they begin, in numbers of the array and in the shapes of jax's primitives.

    These have a row of D / B documents for each row of tokens, and of one more where they begin. cuDNN itself takes D
    and D + 1 of them, one after the other.
    """
    B, T, heads, size = x_BTNH.shape
    if x_BTNH.size >= _OFFSETS:
        raise InputError(
            f"attention by cuDNN to packed documents: a device has {B} rows of {T} tokens with {heads} heads of "
            f"{size} numbers, and cuDNN counts up to {_OFFSETS}\n  fix   use more microbatches"
        )
    begins = jnp.pad(ranges.begins, (0, B - 1), constant_values=B * T) * (heads * size)
    return ranges.lengths.reshape(B, -1), begins.reshape(B, -1)
