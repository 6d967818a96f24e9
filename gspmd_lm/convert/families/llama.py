"""Llama and Llama 4, and the names of tensors that many families took from Llama."""

from typing import Any

from gspmd_lm import config
from gspmd_lm.convert.config_reader import ConfigReader
from gspmd_lm.convert.family import (
    ATTENTION_BIAS,
    MLP_BIAS,
    ROTATED,
    SILU,
    SIZES,
    UNTIED,
    Family,
    llama_fields,
    mixture,
)
from gspmd_lm.convert.fields import (
    Flag,
    Given,
    KeyHeads,
    Renamed,
    Values,
    check_each_layer,
    default_rotation,
    number_of_layers,
    shortest_pattern,
)
from gspmd_lm.convert.layout import Tensor, linear, norm, separate_qkv
from gspmd_lm.convert.rope import Rope


def llama_tensors(
    *,
    mlp_norm: str = "post_attention_layernorm",
    more: tuple[Tensor, ...] = (),
    interleaved_rope: bool = False,
    fused: str = "",
    out: str = "o_proj",
    up: str = "up_proj",
    down: str = "down_proj",
    last: str = "norm",
    mlp_name: str = "mlp",
) -> tuple[Tensor, ...]:
    """Tensors with Llama's names. `fused` says which of qkv and gate_up are one tensor; `out` to `last` rename some.

    A family uses the tensors of the weights that its models have.
    """
    layer = "model.layers.{}"
    attention, mlp = f"{layer}.self_attn", f"{layer}.{mlp_name}"
    each_qkv = separate_qkv(attention, interleaved_rope=interleaved_rope)
    one_qkv = linear(f"{attention}.qkv_proj", "(R H) D", "attention.wq", "attention.wk", "attention.wv", bias=False)
    separate_mlp = (*linear(f"{mlp}.gate_proj", "F D", "mlp.w_gate"), *linear(f"{mlp}.{up}", "F D", "mlp.w_up"))
    one_mlp = linear(f"{mlp}.gate_up_proj", "J D", "mlp.w_gate", "mlp.w_up", bias=False)
    return (
        Tensor("model.embed_tokens.weight", "V D", ("embedding",)),
        *norm(f"{layer}.input_layernorm", "attention_norm", bias=True),
        *(one_qkv if "qkv" in fused else each_qkv),
        *linear(f"{attention}.{out}", "D (N H)", "attention.wo"),
        *norm(f"{layer}.{mlp_norm}", "mlp_norm", bias=True),
        *(one_mlp if "gate_up" in fused else separate_mlp),
        *linear(f"{mlp}.{down}", "D F", "mlp.w_down"),
        *more,
        *norm(f"model.{last}", "final_norm", bias=True),
        Tensor("lm_head.weight", "V D", ("unembedding",)),
        Tensor("lm_head.bias", "V", ("unembedding_bias",)),
    )


def qk_norm(q: str = "H", k: str = "H", name: str = "norm", **options):
    """Norms of queries and keys; the axes of their scales."""
    attention = "model.layers.{}.self_attn"
    return (
        *norm(f"{attention}.q_{name}", "attention.q_norm", bias=True, axis=q, **options),
        *norm(f"{attention}.k_{name}", "attention.k_norm", bias=True, axis=k, **options),
    )


def post_norms(attention: str, mlp: str):
    return (
        *norm(f"model.layers.{{}}.{attention}", "attention_post_norm"),
        *norm(f"model.layers.{{}}.{mlp}", "mlp_post_norm"),
    )


def routed_experts(
    prefix: str, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj"
) -> tuple[Tensor, ...]:
    """A router, and experts with tensors of their own."""
    of_expert = {"bias": False, "mlp": "expert_width"}
    return (
        Tensor(f"{prefix}.gate.weight", "C D", ("mlp.router",)),
        *linear(f"{prefix}.experts.{{expert}}.{gate}", "F D", "mlp.w_gate", **of_expert),
        *linear(f"{prefix}.experts.{{expert}}.{up}", "F D", "mlp.w_up", **of_expert),
        *linear(f"{prefix}.experts.{{expert}}.{down}", "D F", "mlp.w_down", **of_expert),
    )


def shared_experts(prefix: str) -> tuple[Tensor, ...]:
    """The experts that compute every token."""
    return (
        *linear(f"{prefix}.gate_proj", "F D", "mlp.shared.w_gate", bias=False, mlp="experts.shared_mlp"),
        *linear(f"{prefix}.up_proj", "F D", "mlp.shared.w_up", bias=False, mlp="experts.shared_mlp"),
        *linear(f"{prefix}.down_proj", "D F", "mlp.shared.w_down", bias=False, mlp="experts.shared_mlp"),
    )


# How a router is trained: model.experts.balance says it here, and is "none" after an import, as dropout is 0.
ROUTER_TRAINING = ("output_router_logits", "router_aux_loss_coef", "router_jitter_noise")
LLAMA = Family(
    "Llama",
    "llama",
    "LlamaForCausalLM",
    (*llama_fields(), ATTENTION_BIAS, MLP_BIAS),
    llama_tensors(),
    no_weights=ROTATED,
)


class Temperature:
    """Llama 4's queries that grow with their position, in layers without positions."""

    def read(self, reader: ConfigReader, values: Values) -> None:
        tuned = reader.flag("attn_temperature_tuning", True)
        scale, every = reader.number("attn_scale", 0.1), reader.number("floor_scale", 8192)
        temperature = {"scale": float(scale), "every": every, "offset": 1, "layers": "nope"}
        values["attention.temperature"] = temperature if tuned else None

    def write(self, model: config.ModelConfig) -> dict[str, Any]:
        tuned = model.attention.temperature
        if tuned is None:
            return {"attn_temperature_tuning": False}
        return {"attn_temperature_tuning": True, "attn_scale": tuned.scale, "floor_scale": tuned.every}


class ChunkedLayers:
    """Llama 4's layers: those with positions attend within chunks, and those with 0 in no_rope_layers to all tokens."""

    def read(self, reader: ConfigReader, values: Values) -> None:
        usual = default_rotation(reader, values)
        rotated = check_each_layer(reader, "no_rope_layers", reader.get("no_rope_layers", usual) or usual, usual, "01")
        theirs = {"chunked": "chunked_attention", "full": "full_attention", "nope": "full_attention"}
        chunked = ["chunked" if one else "nope" for one in rotated]
        types = reader.get("layer_types", [theirs[kind] for kind in chunked])
        known = next((kinds for kinds in (chunked, ["full" if one else "nope" for one in rotated])
                      if types == [theirs[kind] for kind in kinds]), None)  # fmt: skip
        if known is None:
            reader.refuse("layer_types", types, "are not chunked_attention in layers with positions alone")
        kinds = known or chunked
        chunk = reader.get("attention_chunk_size", None if "attention_chunk_size" in reader.raw else 8192)
        if "chunked" in kinds:
            values["attention.chunk"] = reader.positive("attention_chunk_size", chunk)
        values["layer_pattern"] = shortest_pattern(kinds)

    def write(self, model: config.ModelConfig) -> dict[str, Any]:
        kinds = model.kind_of_each_layer
        types = ["chunked_attention" if kind == "chunked" else "full_attention" for kind in kinds]
        rotated = [int(kind != "nope") for kind in kinds]
        return {"no_rope_layers": rotated, "layer_types": types, "attention_chunk_size": model.attention.chunk or None}


class SparseLayers:
    """Llama 4's layers with experts: moe_layers, or every interleave_moe_layer_step-th."""

    def read(self, reader: ConfigReader, values: Values) -> None:
        layers = number_of_layers(values)
        step = reader.whole("interleave_moe_layer_step", 1, 1)
        sparse = reader.get("moe_layers", list(range(step - 1, layers, step)))
        if isinstance(sparse, list) and sparse and type(sparse[0]) is int:
            step = max(sparse[0] + 1, 1)
        if not sparse or sparse != list(range(step - 1, layers, step)):
            reader.refuse("moe_layers", sparse, "are not every n-th layer: other layers with experts are not supported")
        values["experts.step"] = step

    def write(self, model: config.ModelConfig) -> dict[str, Any]:
        step = config.value_at(model, "experts.step")
        return {"interleave_moe_layer_step": step, "moe_layers": list(range(step - 1, model.layers, step))}


_FEED = "model.layers.{}.feed_forward"
_SIZES = (*SIZES, KeyHeads(8), Renamed("max_position_embeddings", "context", 131072))
_EPS, _HEAD = Renamed("rms_norm_eps", "norm.eps", 1e-5), Renamed("head_dim", "head_dim", 128)
_ATTENTION = (
    _EPS,
    _HEAD,
    Rope(5e5),
    ATTENTION_BIAS,
    ChunkedLayers(),
    Temperature(),
    Flag("use_qk_norm", ("attention.qk_norm",), True),
)
_EXPERTS = (
    *mixture("num_local_experts num_experts", 16, 1),
    Renamed("intermediate_size_mlp", "mlp", 16384),
    Renamed("intermediate_size", "experts.mlp", 8192),
    SparseLayers(),
    Given({"experts.shared_mlp": lambda values: values["experts.mlp"], "experts.weighted_input": True}),
    Given({"experts.routing": "sigmoid", "experts.normalized_weights": False, "attention.qk_norm_kind": "unscaled"}),
)
_LLAMA_4_EXPERTS = (
    Tensor(f"{_FEED}.router.weight", "C D", ("mlp.router",)),
    Tensor(f"{_FEED}.experts.gate_up_proj", "E D J", ("mlp.w_gate", "mlp.w_up"), mlp="expert_width"),
    Tensor(f"{_FEED}.experts.down_proj", "E F D", ("mlp.w_down",), mlp="expert_width"),
    *shared_experts(f"{_FEED}.shared_expert"),
)
FAMILIES = (
    LLAMA,
    LLAMA.relative(
        "Llama 4",
        "llama4_text",
        "Llama4ForCausalLM",
        (*_SIZES, *_ATTENTION, *_EXPERTS, SILU, UNTIED),
        llama_tensors(interleaved_rope=True, mlp_name="feed_forward", more=_LLAMA_4_EXPERTS),
        irrelevant=(*ROUTER_TRAINING, "for_llm_compressor"),
    ),
)
