"""OPT."""

from typing import Any

from gspmd_lm import config
from gspmd_lm.convert.config_reader import ConfigReader
from gspmd_lm.convert.family import ALL_BIASES, GELU_NEW, ONE_WIDTH, PLAIN_LAYERNORM, SIZES, TIED, Family
from gspmd_lm.convert.fields import Activation, DefaultsTo, Fixed, Flag, Given, Renamed, Values
from gspmd_lm.convert.layout import Tensor, linear, norm, plain_mlp, separate_qkv


class OptNorms:
    """OPT's norms: before attention and MLP, with a last norm that a field removes; or after the residual sums."""

    def read(self, reader: ConfigReader, values: Values) -> None:
        before = reader.flag("do_layer_norm_before", True)
        removed = reader.flag("_remove_final_layer_norm", False)
        values |= {"norm.pre": before, "norm.sum": not before, "norm.final": before and not removed}

    def write(self, model: config.ModelConfig) -> dict[str, Any]:
        removed = model.norm.pre and not model.norm.final
        return {"do_layer_norm_before": model.norm.pre, "_remove_final_layer_norm": removed}


_SIZES = (*SIZES, Renamed("ffn_dim", "mlp"), Renamed("max_position_embeddings", "context"), ONE_WIDTH)
_FIELDS = (
    *(PLAIN_LAYERNORM, OptNorms(), TIED, Flag("enable_bias", ALL_BIASES, True)),
    Given({"norm.eps": 1e-5, "positions": "learned", "embedding.position_offset": 2}),
    Activation("activation_function", "relu", GELU_NEW),
    DefaultsTo("word_embed_proj_dim", "embedding.width", "embed"),
    Fixed("layer_norm_elementwise_affine", True, "has norms without scale, which is not supported"),
)
_DECODER, _LAYER = "model.decoder", "model.decoder.layers.{}"
_TABLE = f"{_DECODER}.embed_tokens.weight"
_TENSORS = (
    Tensor(_TABLE, "V D", ("embedding",), exists_in=lambda model: not model.embedding.width),
    Tensor(_TABLE, "V W", ("embedding",), exists_in=lambda model: model.embedding.width > 0),
    Tensor(f"{_DECODER}.project_in.weight", "D W", ("embedding_in",)),
    Tensor(f"{_DECODER}.project_out.weight", "W D", ("embedding_out",)),
    Tensor(f"{_DECODER}.embed_positions.weight", "p D", ("position_embedding",)),
    *norm(f"{_LAYER}.self_attn_layer_norm", "attention_norm", bias=True),
    *norm(f"{_LAYER}.self_attn_layer_norm", "attention_sum_norm", bias=True),
    *separate_qkv(f"{_LAYER}.self_attn"),
    *linear(f"{_LAYER}.self_attn.out_proj", "D (N H)", "attention.wo"),
    *norm(f"{_LAYER}.final_layer_norm", "mlp_norm", bias=True),
    *norm(f"{_LAYER}.final_layer_norm", "mlp_sum_norm", bias=True),
    *plain_mlp(_LAYER, "fc1", "fc2"),
    *norm(f"{_DECODER}.final_layer_norm", "final_norm", bias=True),
    Tensor("lm_head.weight", "V D", ("unembedding",)),
)
# learned_embeddings: a field of Galactica; true, as in OPT
OPT = Family("OPT", "opt", "OPTForCausalLM", (*_SIZES, *_FIELDS), _TENSORS, irrelevant=("learned_embeddings",))
FAMILIES = (OPT,)
