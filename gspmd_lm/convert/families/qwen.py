"""Qwen2, Qwen3, their mixtures of experts, and Qwen3-Next with layers of linear attention."""

from collections.abc import Callable
from typing import Any

from gspmd_lm import config
from gspmd_lm.convert.config_reader import ConfigReader
from gspmd_lm.convert.families.llama import (
    LLAMA,
    ROUTER_TRAINING,
    llama_tensors,
    qk_norm,
    routed_experts,
    shared_experts,
)
from gspmd_lm.convert.family import ATTENTION_BIAS, NO_HEAD_DIM, ROTATED, llama_fields, mixture
from gspmd_lm.convert.fields import (
    FieldCodec,
    Fixed,
    Flag,
    Given,
    LayerTypes,
    Renamed,
    Values,
    Window,
    check_each_layer,
    number_of_layers,
    shortest_pattern,
)
from gspmd_lm.convert.layout import Tensor
from gspmd_lm.convert.rope import Rope


def last_layers(reader: ConfigReader) -> Callable[[int], bool]:
    first = reader.whole("max_window_layers", 28, 0)
    return lambda i: i >= first


def _first_window_layer(model):
    """max_window_layers, for families in which the layers from that one on have the window."""
    slides = [kind == "sliding" for kind in model.kind_of_each_layer]
    return {"max_window_layers": model.layers - sum(slides)} if slides == sorted(slides) else {}


def _first_every_second(reader):
    first = reader.whole("max_window_layers", 28, 0)
    return lambda i: i % 2 == 0 and i < first


class DualChunks(FieldCodec):
    """dual_chunk_attention_config: attention (arXiv 2402.17463) that is plain for a context that is not too long.

    Positions are those of plain attention as long as no row is longer than a chunk, than twice the part of a chunk that
    is not local, or than the context that the model was trained with.
    """

    def read(self, reader: ConfigReader, values: Values) -> None:
        name = "dual_chunk_attention_config"
        if not (chunks := reader.get(name)):
            return
        if not isinstance(chunks, dict) or "chunk_size" not in chunks:
            reader.refuse(name, chunks, "is not an object with chunk_size")
            return
        sizes = ("chunk_size", "local_size", "original_max_position_embeddings")
        chunk, local, original = (reader.positive(f"{name}.{size}", chunks.get(size, 1)) for size in sizes)
        plain, context = min(chunk, 2 * (chunk - local), original if original > 1 else chunk), values["context"]
        if plain < 1:
            reader.refuse(f"{name}.local_size", local, f"is not below chunk_size: {chunk}")
        elif plain < context:
            values["context"] = plain
            reader.notes.append(
                f"{name} is attention within chunks, which is not supported. For up to {plain:,} tokens it is plain "
                f"attention, so model.context is {plain}, not {context}"
            )


class LinearLayers:
    """Qwen3-Next's layers with linear attention: layer_types, or all but every full_attention_interval-th."""

    def read(self, reader: ConfigReader, values: Values) -> None:
        interval = reader.whole("full_attention_interval", 4, 1)
        usual = [
            "linear_attention" if (i + 1) % interval else "full_attention" for i in range(number_of_layers(values))
        ]
        known = {"linear_attention": "linear", "full_attention": "full"}
        types = check_each_layer(reader, "layer_types", reader.get("layer_types", usual), usual, known)
        key_dim, value_dim = (reader.number(f"linear_{name}_head_dim", 128) for name in ("key", "value"))
        if key_dim != value_dim:
            reader.refuse("linear_key_head_dim", key_dim, f"is not linear_value_head_dim: {value_dim}")
        sizes = {
            "key_heads": reader.number("linear_num_key_heads", 16),
            "value_heads": reader.number("linear_num_value_heads", 32),
            "head_dim": value_dim,
            "taps": reader.number("linear_conv_kernel_dim", 4),
        }
        values["attention.linear"] = sizes if "linear_attention" in types else None
        values["layer_pattern"] = shortest_pattern([known[kind] for kind in types])

    def write(self, model: config.ModelConfig) -> dict[str, Any]:
        kinds = ["linear_attention" if kind == "linear" else "full_attention" for kind in model.kind_of_each_layer]
        written: dict[str, Any] = {"layer_types": kinds}
        if linear := model.attention.linear:
            written |= {
                "linear_num_key_heads": linear.key_heads, "linear_num_value_heads": linear.value_heads,
                "linear_key_head_dim": linear.head_dim, "linear_value_head_dim": linear.head_dim,
                "linear_conv_kernel_dim": linear.taps,
            }  # fmt: skip
        return written


class DenseLayers:
    """mlp_only_layers: the layers without experts, which must be the first ones."""

    def read(self, reader: ConfigReader, values: Values) -> None:
        dense = reader.get("mlp_only_layers", [])
        count = len(dense) if isinstance(dense, list) else 0
        if dense != list(range(count)):
            reader.refuse("mlp_only_layers", dense, "are not the first layers: other layers without experts are not "
                          "supported")  # fmt: skip
        values["experts.dense_layers"] = count
        values["experts.step"] = reader.whole("decoder_sparse_step", 1, 1)

    def write(self, model: config.ModelConfig) -> dict[str, Any]:
        return {
            "mlp_only_layers": list(range(config.value_at(model, "experts.dense_layers"))),
            "decoder_sparse_step": config.value_at(model, "experts.step"),
        }


_MLP, _LINEAR = "model.layers.{}.mlp", "model.layers.{}.linear_attn"
_LAYERS = LayerTypes(4096, last_layers, "use_sliding_window", _first_window_layer)
_NUMBERS = "num_experts num_local_experts"
_SUM_TO_ONE = Flag("norm_topk_prob", ("experts.normalized_weights",), False)
_QWEN_2 = (*llama_fields(32), Given({"attention.qkv_bias": True}), _LAYERS)
_QWEN_3 = (*llama_fields(32, 128), Given({"attention.qk_norm": True}), ATTENTION_BIAS, _LAYERS)
_QWEN_2_MOE = (
    *llama_fields(16, NO_HEAD_DIM),
    Flag("qkv_bias", ("attention.qkv_bias",), True),
    LayerTypes(4096, _first_every_second, "use_sliding_window"),
    *mixture(_NUMBERS, 60, 4, width=1408),
    Renamed("shared_expert_intermediate_size", "experts.shared_mlp", 5632),
    Given({"experts.shared_gate": True}),
    _SUM_TO_ONE,
    DenseLayers(),
)
_QWEN_3_MOE = (
    *llama_fields(4),
    ATTENTION_BIAS,
    Given({"attention.qk_norm": True}),
    Window(4096, "use_sliding_window"),
    *mixture(_NUMBERS, 128, 8, width=768),
    _SUM_TO_ONE,
    DenseLayers(),
)
_QWEN_3_NEXT = (
    *llama_fields(2, 256, rope=Rope(part=0.25)),
    LinearLayers(),
    Fixed("attention_bias", False, "has biases in attention with a gate, which are not supported"),
    Given({"norm.offset": 1.0, "attention.qk_norm": True, "attention.gate": True, "experts.shared_gate": True}),
    *mixture(_NUMBERS, 512, 10, width=512),
    Flag("norm_topk_prob", ("experts.normalized_weights",), True),
    Renamed("shared_expert_intermediate_size", "experts.shared_mlp", 512),
    DenseLayers(),
)
_SHARED = (
    *routed_experts(_MLP),
    *shared_experts(f"{_MLP}.shared_expert"),
    Tensor(f"{_MLP}.shared_expert_gate.weight", "1 D", ("mlp.shared_gate",)),
)


def _linear(name: str, axes: str, *weights: str, **options: Any) -> Tensor:
    """A tensor of a layer with linear attention."""
    ours = tuple(f"linear_attention.{weight}" for weight in weights)
    has_linear_layers = lambda model: model.attention.linear is not None  # noqa: E731
    return Tensor(f"{_LINEAR}.{name}", axes, ours, linear=True, exists_in=has_linear_layers, **options)


_NEXT = (
    Tensor("model.layers.{}.self_attn.q_proj.weight", "(N X) D", ("attention.wq", "attention.wg")),
    *(*qk_norm(), *_SHARED),
    _linear("in_proj_qkvz.weight", "(R H) D", *(f"linear_{name}" for name in "qkvz"), order="grouped"),
    _linear("in_proj_ba.weight", "R D", "linear_b", "linear_a", order="grouped"),
    _linear("conv1d.weight", "(R H) 1 A", *(f"conv_{name}" for name in "qkv")),
    _linear("A_log", "N", "decay"),
    _linear("dt_bias", "N", "decay_bias"),
    _linear("norm.weight", "H", "norm.scale"),
    _linear("out_proj.weight", "D (N H)", "linear_out"),
)
FAMILIES = (
    LLAMA.relative("Qwen2", "qwen2", "Qwen2ForCausalLM", _QWEN_2),
    LLAMA.relative("Qwen3", "qwen3", "Qwen3ForCausalLM", _QWEN_3, llama_tensors(more=qk_norm())),
    LLAMA.relative(
        "Qwen2-MoE",
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        _QWEN_2_MOE,
        llama_tensors(more=_SHARED),
        irrelevant=ROUTER_TRAINING,
    ),
    LLAMA.relative(
        "Qwen3-MoE",
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        _QWEN_3_MOE,
        llama_tensors(more=(*qk_norm(), *routed_experts(_MLP))),
        irrelevant=(*ROUTER_TRAINING, "max_window_layers"),
    ),
    LLAMA.relative(
        "Qwen3-Next",
        "qwen3_next",
        "Qwen3NextForCausalLM",
        _QWEN_3_NEXT,
        llama_tensors(more=_NEXT),
        no_weights=(*ROTATED, r"^mtp\."),  # layers that predict later tokens
        irrelevant=ROUTER_TRAINING,
    ),
)
