"""Cohere and Cohere 2."""

from gspmd_lm.convert.families.gemma import patterned_layers
from gspmd_lm.convert.families.llama import LLAMA, llama_tensors, qk_norm
from gspmd_lm.convert.family import ATTENTION_BIAS, LAYERNORM_EPS, NO_HEAD_DIM, llama_fields
from gspmd_lm.convert.fields import FieldCodec, Flag, Given, MustEqual, Renamed
from gspmd_lm.convert.rope import Rope

_COHERE = (
    ATTENTION_BIAS,
    Given({"norm.kind": "layernorm", "block": "parallel", "attention.qk_norm_kind": "per_head"}),
    Renamed("logit_scale", "logits.scale", 0.0625),
    MustEqual("head_dim", "head_dim", "is not hidden_size / num_attention_heads"),
)


def _like_llama(rope: Rope) -> tuple[FieldCodec, ...]:
    return llama_fields(head_dim=NO_HEAD_DIM, eps=LAYERNORM_EPS, rope=rope, tied=True)


_TENSORS = llama_tensors(interleaved_rope=True, more=qk_norm("N H", "K H", interleaved_rope=True))
# Cohere's own code has them; transformers does not.
_UNREAD = (
    "layer_switch", "order_of_interleaved_layers", "position_embedding_type", "rotary_pct", "use_embedding_sharing",
    "use_gated_activation", "use_parallel_block", "use_parallel_embedding", "_sliding_window_pattern",
)  # fmt: skip
FAMILIES = (
    LLAMA.relative(
        "Cohere",
        "cohere",
        "CohereForCausalLM",
        (*_like_llama(Rope(5e5)), *_COHERE, Flag("use_qk_norm", ("attention.qk_norm",), False)),
        _TENSORS,
    ),
    LLAMA.relative(
        "Cohere 2",
        "cohere2",
        "Cohere2ForCausalLM",
        (*_like_llama(Rope()), *_COHERE, patterned_layers(4, full="nope")),
        _TENSORS,
        irrelevant=_UNREAD,
    ),
)
