"""What of a model does not go together: each part, and the settings that are not supported beside it."""

from typing import Any

from gspmd_lm.config import core_yaml
from gspmd_lm.config.values import default_at, value_at

_ALIBI = ("positions: alibi", "positions: alibi_bf16")
# Of two stacks of blocks, neither may have these.
_TWO_STACKS = (
    "experts", "residual.layer_embed", "residual.streams", "attention.window", "attention.chunk", "attention.linear",
    "attention.latent", "attention.relative_vectors", "attention.shared_kv_layers", "feed_forward.sparse_layers",
    "padded_heads", "embedding.token_types", "block: parallel",
)  # fmt: skip
# A path means that the setting is not its default, and a path with a value that it has this value.
NOT_WITH: dict[str, tuple[str, ...]] = {
    "attention.mask: full": ("attention.window", "attention.linear", *_ALIBI),
    "attention.mask: causal": ("attention.relative_vectors", "convolution", "windows"),
    "attention.sinks": _ALIBI,
    "attention.relative_positions": ("attention.sinks", *_ALIBI),
    "attention.latent": (
        "attention.qkv_bias", "attention.qk_norm", "attention.value_norm", "attention.gate",
        "attention.shared_kv_layers",
    ),
    "attention.relative_vectors": (
        "attention.latent", "attention.relative_positions", "attention.qk_norm", "attention.softcap",
        "attention.sinks", "attention.qkv_bias: false", "positions: rope", "lora", "patches", "shared_layers",
    ),
    "experts": ("attention.shared_kv_layers", "feed_forward.sparsity"),
    "residual.laurel_rank": ("block: parallel", "norm.pre: false", "norm.sum"),
    "residual.layer_scale": ("block: parallel", "encoder"),
    "classes": ("logits.transform", "logits.bias", "logits.softcap", "experts", "encoder"),
    "shared_layers": (
        "experts", "encoder", "feed_forward.sparse_layers", "attention.shared_kv_layers", "residual.layer_embed",
        "weight_dtype: int8", "weight_dtype: fp8",
    ),
    "convolution": (
        "encoder", "patches", "experts", "feed_forward.sparse_layers", "shared_layers", "attention.shared_kv_layers",
        "lora", "residual.streams",
    ),
    "encoder": (*_TWO_STACKS, *_ALIBI),
    "vision": (
        "embedding.width", "patches", "classes", "residual.layer_embed", "residual.streams", "convolution", "frames",
        "attention.mask: full", "lora",
    ),
    "vision.projection": (
        *_TWO_STACKS, "encoder", "attention.relative_positions", "layer_pattern", "logits.transform", "logits.bias",
        "embedding.tied", "residual.layer_scale", "shared_layers",
    ),
    "windows": (
        "attention.latent", "attention.sinks", "attention.temperature", "attention.shared_kv_layers",
        "attention.chunk", "residual.laurel_rank", "residual.streams", "shared_layers", "padded_heads", "lora",
        "matmul_dtype",
    ),
    "masks": (
        "encoder", "vision", "experts", "shared_layers", "attention.qk_norm", "attention.sinks",
        "attention.relative_vectors", "padded_heads", "lora", "matmul_dtype",
    ),
    "patches": ("embedding.token_types", "embedding.width", "embedding.position_offset"),
    "lora": ("frozen",),
}  # fmt: skip


def contradictions(model: Any) -> list[str]:
    """A sentence for each two settings of a model that do not go together."""
    return [
        f"{part} does not go with {other}"
        for part, others in NOT_WITH.items()
        if _has(model, part)
        for other in others
        if _has(model, other)
    ]


def _has(model: Any, setting: str) -> bool:
    path, colon, value = setting.partition(": ")
    if colon:
        return value_at(model, path) == core_yaml.scalar(value)
    return value_at(model, path) != default_at(type(model), path)
