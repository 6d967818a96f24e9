"""Gemma 3n: several residual streams, embeddings for each layer, and layers that share keys and values."""

import dataclasses
from typing import Any

from gspmd_lm import config
from gspmd_lm.config import value_at
from gspmd_lm.convert.config_reader import ConfigReader
from gspmd_lm.convert.families.gemma import EACH_GEMMA, POST_NORMS, ROPE, Cap, all_but_every
from gspmd_lm.convert.families.llama import LLAMA, llama_tensors, qk_norm
from gspmd_lm.convert.family import SIZES, TANH, TIED
from gspmd_lm.convert.fields import Activation, Fixed, Given, KeyHeads, LayerTypes, Renamed, Values, number_of_layers
from gspmd_lm.convert.layout import Tensor, norm


@dataclasses.dataclass(frozen=True)
class EachLayer:
    """A field with a number for all layers, or a list with one for each, which must be equal."""

    name: str
    setting: str
    default: int

    def read(self, reader: ConfigReader, values: Values) -> None:
        value = reader.get(self.name, self.default)
        each = value if isinstance(value, list) and value else [value]
        if isinstance(value, list) and (len(value) != values["layers"] or any(one != value[0] for one in value)):
            reader.refuse(self.name, value, f"is not one number, or {values['layers']} that are equal")
        values[self.setting] = reader.positive(self.name, each[0])

    def write(self, model: config.ModelConfig) -> dict[str, Any]:
        return {self.name: [value_at(model, self.setting)] * model.layers}


class SparseActivation:
    """activation_sparsity_pattern: a number for each layer, one and the same for the first ones, then 0."""

    def read(self, reader: ConfigReader, values: Values) -> None:
        layers, name = number_of_layers(values), "activation_sparsity_pattern"
        usual = [0.95 if i < 10 < layers else 0.0 for i in range(layers)]
        shares = reader.get(name, usual)
        count = sum(map(bool, shares)) if isinstance(shares, list) else 0
        share = shares[0] if count else 0.0
        if not isinstance(share, float) or not 0 <= share < 1 or shares != [share] * count + [0] * (layers - count):
            reader.refuse(name, shares, f"is not {layers} shares, of which the first are equal and the others 0")
            count = 0
        values["feed_forward.sparsity"] = float(share) if count else 0.0
        values["feed_forward.sparse_layers"] = count if count < layers else 0

    def write(self, model: config.ModelConfig) -> dict[str, Any]:
        share = model.feed_forward.sparsity
        count = (model.feed_forward.sparse_layers or model.layers) if share else 0
        return {"activation_sparsity_pattern": [share] * count + [0.0] * (model.layers - count)}


_SIZES = (
    *(*SIZES, KeyHeads(2), EachLayer("intermediate_size", "mlp", 16384)),
    Renamed("max_position_embeddings", "context", 32768),
    Renamed("rms_norm_eps", "norm.eps", 1e-6),
    Renamed("head_dim", "head_dim", 256),
    TIED,
)
_ATTENTION = (
    ROPE,
    LayerTypes(512, all_but_every(5)),
    Given({"norm.post": True, "attention.qk_norm": True, "attention.value_norm": True, "attention.scale": 1.0}),
    Cap("final_logit_softcapping", "logits.softcap", 30.0),
    Renamed("num_kv_shared_layers", "attention.shared_kv_layers", 15, may_be_zero=True),
)
_STREAMS = (
    Activation("hidden_activation", "gelu_pytorch_tanh", TANH),
    SparseActivation(),
    Renamed("altup_num_inputs", "residual.streams", 4),
    Renamed("laurel_rank", "residual.laurel_rank", 64),
    Renamed("hidden_size_per_layer_input", "residual.layer_embed", 256),
    Renamed("vocab_size_per_layer_input", "residual.layer_vocab", 262144),
    Fixed("altup_active_idx", 0, "makes another stream than the first one the block's, which is not supported"),
    Fixed("altup_correct_scale", True, "leaves a scale out, which is not supported"),
)
_LAYER = "model.layers.{}"
_ALTUP, _LAUREL = f"{_LAYER}.altup", f"{_LAYER}.laurel"


def _table_sizes(model: config.ModelConfig) -> dict[str, int]:
    return {"V": model.residual.layer_vocab or model.vocab, "D": model.layers * model.residual.layer_embed}


def _streams(name: str, ours: str) -> Tensor:
    return Tensor(f"model.{name}.{{stream}}.weight", "O D", (f"streams.{ours}",))


def _coefficients(name: str, ours: str, power: int) -> Tensor:
    sizes = lambda model: {"U": model.residual.streams**power}  # noqa: E731
    return Tensor(f"{_ALTUP}.{name}.weight", "U M", (f"altup.{ours}",), others=sizes)


def _laurel(name: str, axes: str, ours: str) -> Tensor:
    return Tensor(
        f"{_LAUREL}.{name}.weight", axes, (f"laurel.{ours}",), others=lambda model: {"R": model.residual.laurel_rank}
    )


_TENSORS = (
    *(*POST_NORMS, *qk_norm()),
    _streams("altup_projections", "streams_in"),
    _streams("altup_unembed_projections", "streams_out"),
    Tensor("model.embed_tokens_per_layer.weight", "V D", ("per_layer_inputs.layer_table",), others=_table_sizes),
    Tensor("model.per_layer_model_projection.weight", "(L Y) D", ("per_layer_inputs.layer_in",)),
    *norm("model.per_layer_projection_norm", "per_layer_inputs.norm", axis="Y"),
    Tensor(f"{_ALTUP}.modality_router.weight", "M D", ("altup.altup_router",)),
    *norm(f"{_ALTUP}.router_norm", "altup.router_norm"),
    _coefficients("prediction_coefs", "altup_predict", 2),
    _coefficients("correction_coefs", "altup_correct", 1),
    Tensor(f"{_ALTUP}.correct_output_scale", "D", ("altup.altup_scale",)),
    Tensor(f"{_LAYER}.per_layer_input_gate.weight", "Y D", ("altup.layer_gate",)),
    Tensor(f"{_LAYER}.per_layer_projection.weight", "D Y", ("altup.layer_out",)),
    *norm(f"{_LAYER}.post_per_layer_input_norm", "altup.layer_norm"),
    _laurel("linear_left", "R D", "laurel_in"),
    _laurel("linear_right", "D R", "laurel_out"),
    *norm(f"{_LAUREL}.post_laurel_norm", "laurel.norm"),
)
FAMILIES = (
    LLAMA.relative(
        "Gemma 3n",
        "gemma3n_text",
        "Gemma3nForCausalLM",
        (*_SIZES, *EACH_GEMMA, *_ATTENTION, *_STREAMS),
        llama_tensors(mlp_norm="pre_feedforward_layernorm", more=_TENSORS),
        # altup_coef_clip is of training: transformers cuts off coefficients above it, which no published model
        # reaches. transformers does not read the others.
        irrelevant=("altup_coef_clip", "altup_lr_multiplier", "query_pre_attn_scalar"),
    ),
)
