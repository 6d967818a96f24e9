"""GLM-4, GLM-4-0414, GLM-4.5, GLM-4.7-Flash and ChatGLM 3."""

from typing import Any

from gspmd_lm import config
from gspmd_lm.convert.config_reader import ConfigReader
from gspmd_lm.convert.families.deepseek import (
    DEEPSEEK_EXPERTS,
    DEEPSEEK_V3,
    NUMBERS,
    LatentSizes,
    LaterTokens,
    SharedExperts,
    deepseek_router,
    first_layers,
    latent_fields,
)
from gspmd_lm.convert.families.gpt2 import QKV
from gspmd_lm.convert.families.gpt_neox import NORM_BEFORE
from gspmd_lm.convert.families.llama import LLAMA, ROUTER_TRAINING, llama_tensors, post_norms, qk_norm
from gspmd_lm.convert.family import ROTATED, UNTIED, Family, llama_fields, mixture
from gspmd_lm.convert.fields import MOST_LAYERS, Fixed, Flag, Given, Renamed, Values, number_of_layers
from gspmd_lm.convert.layout import Tensor, linear, norm
from gspmd_lm.convert.rope import Rope


class MlpTypes:
    """mlp_layer_types: which layers are dense, the first ones, and which have experts."""

    def read(self, reader: ConfigReader, values: Values) -> None:
        layers = number_of_layers(values)
        types = reader.get("mlp_layer_types", _mlp_types(1, layers))
        count = types.count("dense") if isinstance(types, list) else 0
        if types != _mlp_types(count, layers):
            reader.refuse("mlp_layer_types", types, "are not dense ones and then sparse ones, one for each layer")
        if (first := reader.get("first_k_dense_replace", count)) != count:
            reader.refuse("first_k_dense_replace", first, f"contradicts mlp_layer_types, which has {count} dense ones")
        values["experts.dense_layers"] = count

    def write(self, model: config.ModelConfig) -> dict[str, Any]:
        return {"mlp_layer_types": _mlp_types(config.value_at(model, "experts.dense_layers"), model.layers)}


def _mlp_types(dense: int, layers: int) -> list[str]:
    return ["dense"] * dense + ["sparse"] * (layers - dense)


CHATGLM2_VOCAB = 65024  # of ChatGLM 2 and 3


class ChatRope:
    """ChatGLM's rotary positions, on the first half of a head. rope_ratio multiplies rope_theta, but in ChatGLM 2."""

    def read(self, reader: ConfigReader, values: Values) -> None:
        ratio, path = reader.number("rope_ratio", 1), reader.raw.get("_name_or_path")
        if ratio != 1 and values["vocab"] == CHATGLM2_VOCAB and "chatglm3" not in str(path):
            reader.refuse("rope_ratio", ratio, "divides positions in ChatGLM 2, which is not supported, and multiplies "
                          f"rope_theta in ChatGLM 3, which _name_or_path has to name: {path}")  # fmt: skip
        values |= {
            "positions": "rope",
            "attention.rope.theta": 10000.0 * ratio,
            "attention.rope.dim": values["head_dim"] // 2,
        }

    def write(self, model: config.ModelConfig) -> dict[str, Any]:
        return {"rope_ratio": model.attention.rope.theta / 10000}


_GLM = (*llama_fields(2, 128, 1.5625e-7, Rope(part=0.5)), Flag("attention_bias", ("attention.qkv_bias",), True))
_GLM_4_5 = (
    *(*llama_fields(8, eps=1e-5, rope=Rope(part=0.5)), Flag("attention_bias", ("attention.qkv_bias",), False)),
    *(
        Flag("use_qk_norm", ("attention.qk_norm",), False),
        *deepseek_router(1, 1, 1.0),
        *mixture(NUMBERS, 128, 8, width=1408),
    ),
    *(first_layers(1), SharedExperts(), LaterTokens()),
)
_GLM_4_7 = (
    *(*latent_fields(LatentSizes(768, 192, 256), 1e-5), *deepseek_router(1, 1, 1.8)),
    *(*mixture(NUMBERS, 64, 4, width=1536), MlpTypes(), SharedExperts(), LaterTokens()),
)
_OTHER_ORDER = "orders queries, keys and values otherwise, which is not supported"
_CHATGLM = (
    Renamed("padded_vocab_size vocab_size", "vocab"),
    Renamed("hidden_size", "embed"),
    Renamed("num_layers num_hidden_layers", "layers", most=MOST_LAYERS),
    Renamed("num_attention_heads", "heads"),
    Renamed("multi_query_group_num", "kv_heads"),
    Renamed("kv_channels", "head_dim", 128),
    Renamed("ffn_hidden_size", "mlp"),
    Renamed("seq_length", "context", 2048),
    *(ChatRope(), UNTIED),
    Renamed("layernorm_epsilon", "norm.eps", 1e-5),
    Flag("add_qkv_bias", ("attention.qkv_bias",), False),
    Fixed("multi_query_attention", True, _OTHER_ORDER),
    Fixed("interleaved_qkv", False, _OTHER_ORDER),
    Fixed("add_bias_linear", False, "has biases behind attention and in the MLP, which are not supported"),
    NORM_BEFORE,
    Fixed("rmsnorm", True, "has LayerNorm, which is not supported"),
    Fixed("post_layer_norm", True, "has no norm after the last layer, which is not supported"),
    Fixed("original_rope", True, "rotates otherwise, which is not supported"),
    Fixed("fp32_residual_connection", False, "adds up in float32, which is not supported"),
)
_POST_NORMS = post_norms("post_self_attn_layernorm", "post_mlp_layernorm")
_LAYER = "transformer.encoder.layers.{}"
_CHATGLM_TENSORS = (
    Tensor("transformer.embedding.word_embeddings.weight", "V D", ("embedding",)),
    *norm(f"{_LAYER}.input_layernorm", "attention_norm"),
    *linear(f"{_LAYER}.self_attention.query_key_value", "(R H) D", *QKV, interleaved_rope=True),
    *linear(f"{_LAYER}.self_attention.dense", "D (N H)", "attention.wo", bias=False),
    *norm(f"{_LAYER}.post_attention_layernorm", "mlp_norm"),
    *linear(f"{_LAYER}.mlp.dense_h_to_4h", "J D", "mlp.w_gate", "mlp.w_up", bias=False),
    *linear(f"{_LAYER}.mlp.dense_4h_to_h", "D F", "mlp.w_down", bias=False),
    *norm("transformer.encoder.final_layernorm", "final_norm"),
    Tensor("transformer.output_layer.weight", "V D", ("unembedding",)),
)
_GLM_TENSORS = llama_tensors(interleaved_rope=True, fused="gate_up")
FAMILIES = (
    LLAMA.relative("GLM-4", "glm", "GlmForCausalLM", _GLM, _GLM_TENSORS),
    LLAMA.relative(
        "GLM-4-0414", "glm4", "Glm4ForCausalLM", (*_GLM, Given({"norm.post": True})), (*_GLM_TENSORS, *_POST_NORMS)
    ),
    LLAMA.relative(
        "GLM-4.5",
        "glm4_moe",
        "Glm4MoeForCausalLM",
        _GLM_4_5,
        llama_tensors(more=(*qk_norm(), *DEEPSEEK_EXPERTS)),
        irrelevant=ROUTER_TRAINING,
    ),
    DEEPSEEK_V3.relative("GLM-4.7-Flash", "glm4_moe_lite", "Glm4MoeLiteForCausalLM", _GLM_4_7, also=()),
    Family(
        "ChatGLM 3",
        "chatglm",
        "ChatGLMModel",
        _CHATGLM,
        _CHATGLM_TENSORS,
        prefix="transformer.",
        no_weights=ROTATED,
        irrelevant=("apply_query_key_layer_scaling", "attention_softmax_in_fp32", "prefix_projection"),
    ),
)
