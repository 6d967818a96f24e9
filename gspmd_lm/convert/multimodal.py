"""The text part of a model of several parts, such as one that sees images: its config.json and its tensors.

The text part is read as a model of its own, and an export writes it as one. The other parts are left out, and so are
layers that predict later tokens.
"""

import re
from collections.abc import Mapping
from typing import Any, TypeVar

from gspmd_lm.convert.strict_json import show_value
from gspmd_lm.errors import InputError

Stored = TypeVar("Stored")
_QWEN2 = {"rms_norm_eps": 1e-5, "rope_theta": 1e6, "max_window_layers": 80}
# model_type of the whole -> the families of its text part, of which text_config may name one, and fields that
# text_config may leave out although that family needs them or has other defaults. Values: transformers' classes.
PARTS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": ("gemma3_text", {
        "vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131072,
    }),
    "gemma3n": ("gemma3n_text", {
        "vocab_size": 262400, "hidden_size": 2048, "num_hidden_layers": 35, "num_attention_heads": 8,
        "num_key_value_heads": 2,
    }),
    "llama4": ("llama4_text", {
        "vocab_size": 202048, "hidden_size": 5120, "num_hidden_layers": 48, "num_attention_heads": 40,
        "num_key_value_heads": 8,
    }),
    "mistral3": ("mistral ministral3", {}),
    "qwen2_vl": ("qwen2", _QWEN2),
    "qwen2_5_vl": ("qwen2", _QWEN2),
    "qwen3_vl": ("qwen3", {"rope_theta": 5e5}),
}  # fmt: skip
# Fields of the whole that also hold for its text.
_SHARED = ("quantization_config", "is_causal", "torch_dtype", "dtype", "tie_word_embeddings")
# Fields of text parts, and of older files that have no text_config, that are about images or name the whole.
_DROPPED = ("architectures", "vision_config", "image_token_id", "video_token_id", "vision_start_token_id",
            "vision_end_token_id", "vision_token_id")  # fmt: skip
# Rotation by three positions is plain rotation in text, where the three are equal.
_MROPE = ("mrope_section", "mrope_interleaved")
LATER_TOKENS = "num_nextn_predict_layers"  # how many layers behind the last one predict later tokens
_LAYER = re.compile(r"^model\.layers\.(\d+)\.")
_KEYS = re.compile(r"^model\.layers\.(\d+)\.self_attn\.[kv]_(?:proj|norm)\.")
_TEXT = re.compile(r"^(?:language_model\.model\.|model\.language_model\.)")
_HEAD = re.compile(r"^language_model\.(?=lm_head\.)")
_OTHERS = re.compile(
    r"^(?:model\.)?(?:vision_tower|vision_model|audio_tower|embed_vision|embed_audio|multi_modal_projector|visual)\."
)


def text_config(raw: Mapping[str, Any], place: str) -> Mapping[str, Any]:
    """The config.json of the text part alone; `raw` itself if it is that of a text model."""
    whole = raw.get("model_type")
    if not isinstance(whole, str) or whole not in PARTS:
        return raw
    kinds, defaults = PARTS[whole]
    inner = raw.get("text_config", raw)
    if not isinstance(inner, Mapping):
        raise InputError(f"{place}: text_config: is not an object\n  fix   fetch the folder again")
    first, *others = kinds.split()
    named = inner.get("model_type", first)
    if named not in (first, *others, whole, f"{whole}_text"):
        raise InputError(f"{place}: text_config.model_type: {show_value(named)} is not supported in {whole}\n"
                         f"  fix   a model whose text part is one of {', '.join(kinds.split())}")  # fmt: skip
    fields = defaults | {name: value for name, value in inner.items() if name not in _DROPPED}
    fields |= {name: raw[name] for name in _SHARED if raw.get(name) is not None}
    for name in ("rope_scaling", "rope_parameters"):
        if isinstance(rope := fields.get(name), dict):
            plain = {field: value for field, value in rope.items() if field not in _MROPE}
            for field in ("type", "rope_type"):
                if plain.get(field) == "mrope":
                    plain[field] = "default"
            fields[name] = plain
    return fields | {"model_type": named if named in others else first}


def text_tensors(stored: Mapping[str, Stored]) -> dict[str, Stored]:
    """The tensors of the text part, by the names that they have in a model of text alone."""
    names = {_HEAD.sub("", _TEXT.sub("model.", name)): name for name in stored if not _OTHERS.search(name)}
    return {name: stored[original] for name, original in names.items()}


def without_unused(stored: Mapping[str, Stored], raw: Mapping[str, Any]) -> dict[str, Stored]:
    """The tensors without those of layers behind the last one, which predict later tokens, and without the keys and
    values of the last layers, if they read those of another layer."""
    layers, later, sharing = (raw.get(name) for name in ("num_hidden_layers", LATER_TOKENS, "num_kv_shared_layers"))
    kept = dict(stored)
    if isinstance(layers, int) and isinstance(later, int):
        kept = _without(kept, _LAYER, range(layers, layers + later))
    if isinstance(layers, int) and isinstance(sharing, int):
        kept = _without(kept, _KEYS, range(layers - sharing, layers))
    return kept


def _without(stored: Mapping[str, Stored], pattern: re.Pattern[str], layers: range) -> dict[str, Stored]:
    numbers = {name: int(match[1]) for name in stored if (match := pattern.match(name))}
    return {name: where for name, where in stored.items() if numbers.get(name) not in layers}
