"""GPT-J."""

from typing import Any

from gspmd_lm import config
from gspmd_lm.convert.config_reader import ConfigReader
from gspmd_lm.convert.families.gpt2 import GPT2, GPT2_SIZES, GPT_ACTIVATION, GPT_EPS, HEAD_SUMMARY, SCALED
from gspmd_lm.convert.family import PLAIN_LAYERNORM, UNTIED
from gspmd_lm.convert.fields import Given, Values
from gspmd_lm.convert.layout import Tensor, linear, norm, plain_mlp, separate_qkv


class RotaryDim:
    """GPT-J's rotary positions: the number of dimensions that are rotated."""

    def read(self, reader: ConfigReader, values: Values) -> None:
        rotated = reader.get("rotary_dim", None if "rotary_dim" in reader.raw else 64)
        rotated = reader.positive("rotary_dim", rotated)
        values["positions"] = "rope"
        values["attention.rope.dim"] = 0 if rotated == values["head_dim"] else rotated

    def write(self, model: config.ModelConfig) -> dict[str, Any]:
        return {"rotary_dim": model.attention.rope.dim or model.head_dim}


_GPTJ = (
    *(*GPT2_SIZES, PLAIN_LAYERNORM, GPT_ACTIVATION, GPT_EPS, RotaryDim(), UNTIED, SCALED),
    Given({"block": "parallel", "feed_forward.bias": True, "logits.bias": True}),
)
_LAYER = "transformer.h.{}"
_TENSORS = (
    Tensor("transformer.wte.weight", "V D", ("embedding",)),
    *norm(f"{_LAYER}.ln_1", "attention_norm", bias=True),
    *separate_qkv(f"{_LAYER}.attn", bias=False, interleaved_rope=True),
    *linear(f"{_LAYER}.attn.out_proj", "D (N H)", "attention.wo", bias=False),
    *plain_mlp(f"{_LAYER}.mlp", "fc_in", "fc_out"),
    *norm("transformer.ln_f", "final_norm", bias=True),
    Tensor("lm_head.weight", "V D", ("unembedding",)),
    Tensor("lm_head.bias", "V", ("unembedding_bias",)),
)
FAMILIES = (GPT2.relative("GPT-J", "gptj", "GPTJForCausalLM", _GPTJ, _TENSORS, irrelevant=(*HEAD_SUMMARY, "rotary")),)
