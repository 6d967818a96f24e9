"""What of a model does not go together: settings of which only one group is supported in a model."""

import itertools
from typing import Any

from gspmd_lm.config import core_yaml
from gspmd_lm.config.values import Section, default_at, differing, value_at

Groups = tuple[tuple[str, ...], ...]
_ALIBI = "positions: alibi or alibi_bf16"
_EIGHT_BITS = "weight_dtype: int8 or fp8"
# In each row, no setting of one group is supported beside one of another group. A path means that the setting, or one
# of its section, is not its default. A path with values means that the setting has one of these values.
EXCLUSIONS: tuple[Groups, ...] = (
    # What layers or their stacks are.
    (
        ("vision.projection",), ("windows", "masks"), ("convolution",), ("shared_layers",), ("experts",), ("encoder",),
        ("attention.shared_kv_layers",),
    ),
    (("encoder", "vision.projection", "convolution", "shared_layers"), ("feed_forward.sparse_layers",)),
    (
        ("encoder", "vision.projection", "windows"),
        ("residual.streams", "attention.window", "attention.chunk", "attention.linear", "attention.latent",
         "attention.relative_vectors", "padded_heads"),
    ),
    (("encoder", "vision.projection"), ("residual.layer_scale",), ("block: parallel",)),
    # What is added to the scores of attention.
    (("attention.relative_positions",), ("attention.relative_vectors",), ("attention.sinks",), (_ALIBI,)),
    (("attention.mask: full",), ("attention.window", "attention.linear", _ALIBI)),
    (("attention.mask: causal",), ("attention.relative_vectors", "convolution", "patches", "classes")),
    (
        ("attention.latent",),
        ("attention.qkv_bias", "attention.qk_norm", "attention.value_norm", "attention.gate",
         "attention.shared_kv_layers"),
    ),
    (
        ("attention.relative_vectors",),
        ("attention.latent", "attention.qk_norm", "attention.softcap", "attention.qkv_bias: false", "positions: rope",
         "lora", "patches", "shared_layers"),
    ),
    (("residual.laurel_rank",), ("block: parallel", "norm.pre: false", "norm.sum", "windows")),
    (("experts",), ("feed_forward.sparsity",)),
    (("classes",), ("masks", "experts", "encoder", "vision", "logits")),
    (("shared_layers",), ("residual.layer_embed", _EIGHT_BITS)),
    (("convolution",), ("patches", "lora", "residual.streams", "vision")),
    (("encoder",), ("attention.mask: full", _ALIBI)),
    (("vision",), ("attention.mask: full", "patches", "frames", "embedding.width", "residual.streams", "lora")),
    (
        ("vision.projection",),
        ("attention.relative_positions", "layer_pattern", "logits", "embedding.tied"),
    ),
    (("windows", "masks"), ("attention.sinks", "lora", "matmul_dtype")),
    (("windows",), ("attention.temperature",)),
    (("masks",), ("attention.qk_norm", "padded_heads")),
    (("patches",), ("embedding.token_types", "embedding.width", "embedding.position_offset")),
    (("lora",), ("frozen",)),
)  # fmt: skip


def contradictions(model: Any) -> list[str]:
    """A sentence for each two settings of a model that do not go together."""
    found: dict[str, None] = {}
    for row in EXCLUSIONS:
        present = [[name for setting in group for name in _find(model, setting)] for group in row]
        for group, other_group in itertools.combinations(present, 2):
            pairs = itertools.product(group, other_group)
            found |= dict.fromkeys(f"{one} does not go with {other}" for one, other in pairs)
    return list(found)


def _find(model: Any, setting: str) -> list[str]:
    """The settings of a model that are meant by a path, or by a path and values."""
    path, _, values = setting.partition(": ")
    value, default = value_at(model, path), default_at(type(model), path)
    if values:
        wanted = [core_yaml.scalar(one) for one in values.split(" or ")]
        return [f"{path}: {core_yaml.dump(value, flow=True).split()[0]}"] if value in wanted else []
    if isinstance(value, Section) and isinstance(default, Section):
        return [f"{path}.{name}" for name, _, _ in differing(value, default)]
    return [path] if value != default else []
