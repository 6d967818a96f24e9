"""What kernels of attention share: what they support, the sizes of their blocks, and the sums of their softmax."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from gspmd_lm import config
from gspmd_lm.config import value_at
from gspmd_lm.hardware.chips import NO_CUDA
from gspmd_lm.sharding.op_names import scope

AMPERE = 8, 0  # the compute capability from which cuDNN has attention (NVIDIA's documentation of cuDNN 9, "Attention")
# The compute capability of the GPUs from which cuDNN has packed documents (jax 0.10.2, jax/_src/cudnn), and that alone
# have a backward pass for heads above 128 (nvidia-cudnn-frontend 1.32.0, scaled_dot_product_flash_attention.h; from
# cuDNN 9.23 on later GPUs have one for heads of 256 too).
HOPPER = 9, 0
LANES = 128  # the width of a TPU register: splash works on blocks of it
SPLASH_BLOCK_BYTES = 1024 * LANES * 2
# The blocks of keys that splash takes at once in a backward pass: it holds the gradients of queries for each of them.
MOST_BLOCKS = 8


def unsupported_setting(
    kernel: str, model: config.ModelConfig, *, seq: int, segments: bool, capability: tuple[int, ...] = ()
) -> str | None:
    """The setting of a config that `kernel` does not support, or None. It begins with the config's key, if it is one.

    capability: the compute capability of a GPU; () where it is not known, or is none.
    """
    if kernel != "xla" and model.attention.scores_dtype != "float32":
        return f"model.attention.scores_dtype: {model.attention.scores_dtype}"
    if kernel != "xla" and model.positions in ("alibi", "alibi_bf16"):
        return f"model.positions: {model.positions}"
    for key in ("attention.relative_positions", "attention.relative_vectors"):
        if kernel != "xla" and value_at(model, key):
            return f"model.{key}"
    if kernel != "xla" and model.windows and not config.is_whole(model):
        return "model.windows"
    if kernel == "cudnn":
        current, oldest, hopper = (".".join(map(str, version)) for version in (capability, AMPERE, HOPPER))
        if capability == NO_CUDA:
            return "GPUs without CUDA"
        if capability and capability < AMPERE:
            return f"compute capability {current} (only {oldest} and newer)"
        if (segments or model.attention.chunk) and capability and capability < HOPPER:  # a chunk is a document, too
            asked = "data.packing: documents" if segments else f"model.attention.chunk: {model.attention.chunk}"
            return f"{asked} on compute capability {current} (only {hopper} and newer)"
        if model.attention.softcap:
            return f"model.attention.softcap: {model.attention.softcap}"
        if model.compute_dtype == "float32":
            return "model.compute_dtype: float32 (only bfloat16)"
        most = 128 if capability and capability[0] != HOPPER[0] else 256
        compared = model.head_dim + (2 * model.windows.size if model.windows and model.windows.vectors else 0)
        if compared % 8 or compared > most:
            with_places = f", {compared} with places" if compared > model.head_dim else ""
            return f"model.head_dim: {model.head_dim}{with_places} (only multiples of 8 up to {most})"
        if seq == 1:
            return "data.seq: 1 (only 2 and more)"
    if kernel == "splash" and seq % LANES:
        return f"data.seq: {seq} (only multiples of {LANES})"
    return None


def scores_scale(cfg: config.ModelConfig) -> float:
    """The factor that multiplies q k."""
    return cfg.attention.scale or cfg.head_dim**-0.5


def sees(cfg: config.ModelConfig) -> Any:
    """The scope of attention, for `foresight`: how far a query sees."""
    return scope("sees", *_reach(cfg))


@functools.cache
def _reach(cfg: config.ModelConfig) -> list[str]:
    """The words of `sees`."""
    window = "all" if cfg.attention.mask == "full" else str(cfg.attention.window or "")
    return list(filter(None, (window, f"chunk{cfg.attention.chunk}" if cfg.attention.chunk else "")))


def as_wide(v_BSKH: jax.Array, k_BSKH: jax.Array) -> jax.Array:
    """Values, or sums of them, with zeros behind them, as wide as keys: for a kernel that takes both of one width."""
    missing = k_BSKH.shape[-1] - v_BSKH.shape[-1]
    return jnp.pad(v_BSKH, ((0, 0), (0, 0), (0, 0), (0, missing))) if missing else v_BSKH


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def with_sums(
    passes: tuple[Any, Any],
    cfg: config.ModelConfig,
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    heads_RN: jax.Array,
    kernel_args: tuple[Any, ...],
) -> jax.Array:
    """Attention by a kernel whose passes, forward and backward, give and take softmax sums, [B, T, N, H].

    `kernel_args` are the other arguments of both. heads_RN: the sinks, if the config has any.
    """
    return _with_sums(passes, cfg, q_BTNH, k_BSKH, v_BSKH, heads_RN, kernel_args)[0]


def _with_sums(passes, cfg, q_BTNH, k_BSKH, v_BSKH, heads_RN, kernel_args):
    out_BTNH, lse_BTN = passes[0](q_BTNH, k_BSKH, v_BSKH, cfg, *kernel_args)
    if cfg.attention.sinks:  # one more logit in the softmax, which takes its share of the result
        total_BTN = jnp.logaddexp(lse_BTN, heads_RN[0].astype(jnp.float32))
        out_BTNH, lse_BTN = jnp.exp(lse_BTN - total_BTN)[..., None] * out_BTNH, total_BTN
    out_BTNH, lse_BTN = (checkpoint_name(x, "attention_out") for x in (out_BTNH.astype(q_BTNH.dtype), lse_BTN))
    return out_BTNH, (q_BTNH, k_BSKH, v_BSKH, heads_RN, kernel_args, out_BTNH, lse_BTN)


def _with_sums_backward(passes, cfg, saved, dout_BTNH):
    q_BTNH, k_BSKH, v_BSKH, heads_RN, kernel_args, out_BTNH, lse_BTN = saved
    dq, dk, dv = passes[1](q_BTNH, k_BSKH, v_BSKH, cfg, out_BTNH, lse_BTN, dout_BTNH, *kernel_args)
    dheads_RN = None
    if cfg.attention.sinks:
        along_BTN = (out_BTNH.astype(jnp.float32) * dout_BTNH).sum(-1)
        shares_BTN = jnp.exp(heads_RN[0].astype(jnp.float32) - lse_BTN)
        dheads_RN = -(shares_BTN * along_BTN).sum((0, 1))[None].astype(heads_RN.dtype)
    return dq.astype(q_BTNH.dtype), dk, dv, dheads_RN, None


with_sums.defvjp(_with_sums, _with_sums_backward)


def splash_block(seq: int, head_dim: int, itemsize: int) -> int:
    """The rows of a block of queries or keys: the most that divide `seq` and leave room in the on-chip memory.

    1024 rows of a bfloat16 head of 128 compile within the 16 MB that one kernel gets by default on v4, v5e and v5p.
    Blocks of 2048, which AI-Hypercomputer/tpu-recipes uses on v6e, need xla_tpu_scoped_vmem_limit_kib: 98304 and
    have the same static schedule per visited score: 21% and 35% of peak forward and backward (causal half, T 8192,
    H 128, libtpu 0.0.42), as blocks of 1024 have; blocks of 512 have 15% and 30%.
    """
    row_bytes = -(-head_dim // LANES) * LANES * itemsize
    most = max(SPLASH_BLOCK_BYTES // row_bytes, LANES)
    return next(block for block in range(min(most, seq), 0, -LANES) if seq % block == 0)
