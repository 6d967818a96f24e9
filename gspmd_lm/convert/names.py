"""The names and layouts of each family's tensors, as in transformers' checkpoints."""

from typing import Any

from gspmd_lm.convert.layout import Tensor


def linear(
    name: str, axes: str, *weights: str, bias: bool = True, biases: tuple[str, ...] = (), **options
) -> tuple[Tensor, ...]:
    """The tensors of a linear layer: its weight, and its bias, which has the output's axes (the first of `axes`)."""
    output = axes[: axes.index(")") + 1] if axes.startswith("(") else axes.split()[0]
    biases = biases or tuple(".b".join(weight.rsplit(".w", 1)) for weight in weights)
    return (
        Tensor(f"{name}.weight", axes, weights, **options),
        *(Tensor(f"{name}.bias", output, biases, **options) for _ in range(bias)),
    )


def norm(name: str, ours: str, bias: bool = False, axis: str = "D", **options) -> tuple[Tensor, ...]:
    scale = Tensor(f"{name}.weight", axis, (f"{ours}.scale",), **options)
    return (scale, Tensor(f"{name}.bias", axis, (f"{ours}.bias",), **options)) if bias else (scale,)


def separate_qkv(
    prefix: str, names: tuple[str, str, str] = ("q_proj", "k_proj", "v_proj"), ours: str = "attention", **options
) -> tuple[Tensor, ...]:
    """Queries, keys and values, each with a linear layer of its own. ours: the module that has these weights."""
    return (
        *linear(f"{prefix}.{names[0]}", "(N H) D", f"{ours}.wq", **options),
        *linear(f"{prefix}.{names[1]}", "(K H) D", f"{ours}.wk", **options),
        *linear(f"{prefix}.{names[2]}", "(K H) D", f"{ours}.wv", **options),
    )


QUERY_KEY_VALUE = "query", "key", "value"  # their names in BERT and its kin, and in models of images


def _llama(
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
    separate_mlp = (
        *linear(f"{mlp}.gate_proj", "F D", "mlp.w_gate"),
        *linear(f"{mlp}.{up}", "F D", "mlp.w_up"),
    )
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


def _qk_norm(q: str = "H", k: str = "H", name: str = "norm", **options):
    """Norms of queries and keys; the axes of their scales."""
    attention = "model.layers.{}.self_attn"
    return (
        *norm(f"{attention}.q_{name}", "attention.q_norm", bias=True, axis=q, **options),
        *norm(f"{attention}.k_{name}", "attention.k_norm", bias=True, axis=k, **options),
    )


def _post_norms(attention: str, mlp: str):
    return (
        *norm(f"model.layers.{{}}.{attention}", "attention_post_norm"),
        *norm(f"model.layers.{{}}.{mlp}", "mlp_post_norm"),
    )


def _routed(prefix: str, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj") -> tuple[Tensor, ...]:
    """A router, and experts with tensors of their own."""
    of_expert = {"bias": False, "mlp": "expert_width"}
    return (
        Tensor(f"{prefix}.gate.weight", "C D", ("mlp.router",)),
        *linear(f"{prefix}.experts.{{expert}}.{gate}", "F D", "mlp.w_gate", **of_expert),
        *linear(f"{prefix}.experts.{{expert}}.{up}", "F D", "mlp.w_up", **of_expert),
        *linear(f"{prefix}.experts.{{expert}}.{down}", "D F", "mlp.w_down", **of_expert),
    )


def _shared(prefix: str) -> tuple[Tensor, ...]:
    """The experts that compute every token."""
    return (
        *linear(f"{prefix}.gate_proj", "F D", "mlp.shared.w_gate", bias=False, mlp="shared_mlp"),
        *linear(f"{prefix}.up_proj", "F D", "mlp.shared.w_up", bias=False, mlp="shared_mlp"),
        *linear(f"{prefix}.down_proj", "D F", "mlp.shared.w_down", bias=False, mlp="shared_mlp"),
    )


LLAMA = _llama()
LLAMA_QK = _llama(more=_qk_norm())
_GEMMA2_POST = _post_norms("post_attention_layernorm", "post_feedforward_layernorm")
GEMMA2 = _llama(mlp_norm="pre_feedforward_layernorm", more=_GEMMA2_POST)
GEMMA3 = _llama(mlp_norm="pre_feedforward_layernorm", more=(*_GEMMA2_POST, *_qk_norm()))
_ALTUP, _LAUREL = "model.layers.{}.altup", "model.layers.{}.laurel"


def _streams(name: str, ours: str) -> Tensor:
    return Tensor(f"model.{name}.{{stream}}.weight", "O D", (f"streams.{ours}",))


GEMMA3N = _llama(
    mlp_norm="pre_feedforward_layernorm",
    more=(
        *_GEMMA2_POST, *_qk_norm(), _streams("altup_projections", "streams_in"),
        _streams("altup_unembed_projections", "streams_out"),
        Tensor("model.embed_tokens_per_layer.weight", "V D", ("per_layer_inputs.layer_table",),
               others=lambda model: {"V": model.layer_vocab or model.vocab, "D": model.layers * model.layer_embed}),
        Tensor("model.per_layer_model_projection.weight", "(L Y) D", ("per_layer_inputs.layer_in",)),
        *norm("model.per_layer_projection_norm", "per_layer_inputs.norm", axis="Y"),
        Tensor(f"{_ALTUP}.modality_router.weight", "M D", ("altup.altup_router",)),
        *norm(f"{_ALTUP}.router_norm", "altup.router_norm"),
        Tensor(f"{_ALTUP}.prediction_coefs.weight", "U M", ("altup.altup_predict",),
               others=lambda model: {"U": model.residual_streams**2}),
        Tensor(f"{_ALTUP}.correction_coefs.weight", "U M", ("altup.altup_correct",),
               others=lambda model: {"U": model.residual_streams}),
        Tensor(f"{_ALTUP}.correct_output_scale", "D", ("altup.altup_scale",)),
        Tensor("model.layers.{}.per_layer_input_gate.weight", "Y D", ("altup.layer_gate",)),
        Tensor("model.layers.{}.per_layer_projection.weight", "D Y", ("altup.layer_out",)),
        *norm("model.layers.{}.post_per_layer_input_norm", "altup.layer_norm"),
        Tensor(f"{_LAUREL}.linear_left.weight", "R D", ("laurel.laurel_in",),
               others=lambda model: {"R": model.laurel_rank}),
        Tensor(f"{_LAUREL}.linear_right.weight", "D R", ("laurel.laurel_out",),
               others=lambda model: {"R": model.laurel_rank}),
        *norm(f"{_LAUREL}.post_laurel_norm", "laurel.norm"),
    ),
)  # fmt: skip
GLM = _llama(interleaved_rope=True, fused="gate_up")
GLM4 = _llama(
    interleaved_rope=True, fused="gate_up", more=_post_norms("post_self_attn_layernorm", "post_mlp_layernorm")
)
PHI3 = _llama(fused="qkv gate_up")
OLMO2 = _llama(mlp_norm="pre_feedforward_layernorm", more=(*_GEMMA2_POST, *_qk_norm("(N H)", "(K H)")))
COHERE = _llama(interleaved_rope=True, more=_qk_norm("N H", "K H", interleaved_rope=True))
ERNIE = _llama(interleaved_rope=True)
STARCODER2 = _llama(up="c_fc", down="c_proj")
PHI = _llama(out="dense", up="fc1", down="fc2", last="final_layernorm", more=_qk_norm(name="layernorm"))
_QKV = ("attention.wq", "attention.wk", "attention.wv")


def _megatron(prefix: str, layers: str, attention: str, table: str, last_norm: str, head: str):
    """Tensors with the names that BLOOM, Falcon and GPT-NeoX took from Megatron, without the norms."""
    layer = f"{prefix}.{layers}.{{}}"
    return (
        Tensor(f"{prefix}.{table}.weight", "V D", ("embedding",)),
        *linear(f"{layer}.{attention}.query_key_value", "(R H) D", *_QKV, order="grouped"),
        *linear(f"{layer}.{attention}.dense", "D (N H)", "attention.wo"),
        *linear(f"{layer}.mlp.dense_h_to_4h", "F D", "mlp.w_up"),
        *linear(f"{layer}.mlp.dense_4h_to_h", "D F", "mlp.w_down"),
        *norm(f"{prefix}.{last_norm}", "final_norm", bias=True),
        Tensor(f"{head}.weight", "V D", ("unembedding",)),
    )


_BLOCK = "transformer.h.{}"


def _gpt(*of_layer: Tensor) -> tuple[Tensor, ...]:
    """Tensors with GPT-2's names, of which `of_layer` are those of a layer without its norms."""
    return (
        Tensor("transformer.wte.weight", "V D", ("embedding",)),
        Tensor("transformer.wpe.weight", "p D", ("position_embedding",)),
        *norm(f"{_BLOCK}.ln_1", "attention_norm", bias=True),
        *of_layer,
        *norm(f"{_BLOCK}.ln_2", "mlp_norm", bias=True),
        *norm("transformer.ln_f", "final_norm", bias=True),
        Tensor("lm_head.weight", "V D", ("unembedding",)),
    )


GPT2 = _gpt(
    # Conv1D: a linear layer whose weight is not transposed.
    Tensor(f"{_BLOCK}.attn.c_attn.weight", "D (R H)", _QKV),
    Tensor(f"{_BLOCK}.attn.c_attn.bias", "(R H)", ("attention.bq", "attention.bk", "attention.bv")),
    Tensor(f"{_BLOCK}.attn.c_proj.weight", "(N H) D", ("attention.wo",)),
    Tensor(f"{_BLOCK}.attn.c_proj.bias", "D", ("attention.bo",)),
    Tensor(f"{_BLOCK}.mlp.c_fc.weight", "D F", ("mlp.w_up",)),
    Tensor(f"{_BLOCK}.mlp.c_fc.bias", "F", ("mlp.b_up",)),
    Tensor(f"{_BLOCK}.mlp.c_proj.weight", "F D", ("mlp.w_down",)),
    Tensor(f"{_BLOCK}.mlp.c_proj.bias", "D", ("mlp.b_down",)),
)
GPT_BIGCODE = _gpt(
    *linear(f"{_BLOCK}.attn.c_attn", "(R H) D", *_QKV, order="grouped"),
    *linear(f"{_BLOCK}.attn.c_proj", "D (N H)", "attention.wo"),
    *linear(f"{_BLOCK}.mlp.c_fc", "F D", "mlp.w_up"),
    *linear(f"{_BLOCK}.mlp.c_proj", "D F", "mlp.w_down"),
)
GPT_NEO = _gpt(
    *separate_qkv(f"{_BLOCK}.attn.attention", bias=False),
    *linear(f"{_BLOCK}.attn.attention.out_proj", "D (N H)", "attention.wo"),
    *linear(f"{_BLOCK}.mlp.c_fc", "F D", "mlp.w_up"),
    *linear(f"{_BLOCK}.mlp.c_proj", "D F", "mlp.w_down"),
)
GPTJ = (
    Tensor("transformer.wte.weight", "V D", ("embedding",)),
    *norm(f"{_BLOCK}.ln_1", "attention_norm", bias=True),
    *separate_qkv(f"{_BLOCK}.attn", bias=False, interleaved_rope=True),
    *linear(f"{_BLOCK}.attn.out_proj", "D (N H)", "attention.wo", bias=False),
    *linear(f"{_BLOCK}.mlp.fc_in", "F D", "mlp.w_up"),
    *linear(f"{_BLOCK}.mlp.fc_out", "D F", "mlp.w_down"),
    *norm("transformer.ln_f", "final_norm", bias=True),
    Tensor("lm_head.weight", "V D", ("unembedding",)),
    Tensor("lm_head.bias", "V", ("unembedding_bias",)),
)
_OPT = "model.decoder.layers.{}"
OPT = (
    Tensor("model.decoder.embed_tokens.weight", "V D", ("embedding",), is_of=lambda model: not model.embedding_width),
    Tensor("model.decoder.embed_tokens.weight", "V W", ("embedding",), is_of=lambda model: model.embedding_width > 0),
    Tensor("model.decoder.project_in.weight", "D W", ("embedding_in",)),
    Tensor("model.decoder.project_out.weight", "W D", ("embedding_out",)),
    Tensor("model.decoder.embed_positions.weight", "p D", ("position_embedding",)),
    *norm(f"{_OPT}.self_attn_layer_norm", "attention_norm", bias=True),
    *norm(f"{_OPT}.self_attn_layer_norm", "attention_sum_norm", bias=True),
    *separate_qkv(f"{_OPT}.self_attn"),
    *linear(f"{_OPT}.self_attn.out_proj", "D (N H)", "attention.wo"),
    *norm(f"{_OPT}.final_layer_norm", "mlp_norm", bias=True),
    *norm(f"{_OPT}.final_layer_norm", "mlp_sum_norm", bias=True),
    *linear(f"{_OPT}.fc1", "F D", "mlp.w_up"),
    *linear(f"{_OPT}.fc2", "D F", "mlp.w_down"),
    *norm("model.decoder.final_layer_norm", "final_norm", bias=True),
    Tensor("lm_head.weight", "V D", ("unembedding",)),
)
BLOOM = (
    *_megatron("transformer", "h", "self_attention", "word_embeddings", "ln_f", "lm_head"),
    *norm("transformer.word_embeddings_layernorm", "embedding_norm", bias=True),
    *norm("transformer.h.{}.input_layernorm", "attention_norm", bias=True),
    *norm("transformer.h.{}.post_attention_layernorm", "mlp_norm", bias=True),
)
FALCON = (
    *_megatron("transformer", "h", "self_attention", "word_embeddings", "ln_f", "lm_head"),
    *norm("transformer.h.{}.input_layernorm", "attention_norm", bias=True, is_of=lambda model: model.shared_norm),
    *norm("transformer.h.{}.post_attention_layernorm", "mlp_norm", bias=True, is_of=lambda model: model.shared_norm),
    *norm("transformer.h.{}.ln_attn", "attention_norm", bias=True, is_of=lambda model: not model.shared_norm),
    *norm("transformer.h.{}.ln_mlp", "mlp_norm", bias=True, is_of=lambda model: not model.shared_norm),
)
NEOX = (
    *_megatron("gpt_neox", "layers", "attention", "embed_in", "final_layer_norm", "embed_out"),
    *norm("gpt_neox.layers.{}.input_layernorm", "attention_norm", bias=True),
    *norm("gpt_neox.layers.{}.post_attention_layernorm", "mlp_norm", bias=True),
)
_CHAT = "transformer.encoder.layers.{}"
CHATGLM = (
    Tensor("transformer.embedding.word_embeddings.weight", "V D", ("embedding",)),
    *norm(f"{_CHAT}.input_layernorm", "attention_norm"),
    *linear(f"{_CHAT}.self_attention.query_key_value", "(R H) D", *_QKV, interleaved_rope=True),
    *linear(f"{_CHAT}.self_attention.dense", "D (N H)", "attention.wo", bias=False),
    *norm(f"{_CHAT}.post_attention_layernorm", "mlp_norm"),
    *linear(f"{_CHAT}.mlp.dense_h_to_4h", "J D", "mlp.w_gate", "mlp.w_up", bias=False),
    *linear(f"{_CHAT}.mlp.dense_4h_to_h", "D F", "mlp.w_down", bias=False),
    *norm("transformer.encoder.final_layernorm", "final_norm"),
    Tensor("transformer.output_layer.weight", "V D", ("unembedding",)),
)
_MLP, _SPARSE = "model.layers.{}.mlp", "model.layers.{}.block_sparse_moe"
_SINKS = Tensor("model.layers.{}.self_attn.sinks", "N", ("attention.sinks",))
MIXTRAL = _llama(more=_routed(_SPARSE, "w1", "w3", "w2"))
QWEN3_MOE = _llama(more=(*_qk_norm(), *_routed(_MLP)))
QWEN2_MOE = _llama(more=(*_routed(_MLP), *_shared(f"{_MLP}.shared_expert"),
                         Tensor(f"{_MLP}.shared_expert_gate.weight", "1 D", ("mlp.shared_gate",))))  # fmt: skip
_DEEPSEEK_EXPERTS = (
    *_routed(_MLP), *_shared(f"{_MLP}.shared_experts"),
    Tensor(f"{_MLP}.gate.e_score_correction_bias", "C", ("mlp.balance_bias",), float32=True),
)  # fmt: skip
GLM4_MOE = _llama(more=(*_qk_norm(), *_DEEPSEEK_EXPERTS))
_ATTENTION = "model.layers.{}.self_attn"
DEEPSEEK = _llama(
    more=(
        Tensor(f"{_ATTENTION}.q_a_proj.weight", "Q D", ("attention.wq_down",)),
        *norm(f"{_ATTENTION}.q_a_layernorm", "attention.q_norm", axis="Q"),
        Tensor(f"{_ATTENTION}.q_b_proj.weight", "(N H) Q", ("attention.wq_up",)),
        Tensor(f"{_ATTENTION}.kv_a_proj_with_mqa.weight", "G D", ("attention.wkv_down", "attention.wk_rope")),
        *norm(f"{_ATTENTION}.kv_a_layernorm", "attention.kv_norm", axis="Z"),
        Tensor(f"{_ATTENTION}.kv_b_proj.weight", "(N X) Z", ("attention.wk_up", "attention.wv_up")),
        *_DEEPSEEK_EXPERTS,
    )
)  # fmt: skip
OLMOE = _llama(more=(*_qk_norm("(N H)", "(K H)"), *_routed(_MLP)))
GRANITE_MOE = _llama(
    more=(
        Tensor(f"{_SPARSE}.router.layer.weight", "C D", ("mlp.router",)),
        Tensor(f"{_SPARSE}.input_linear.weight", "E J D", ("mlp.w_gate", "mlp.w_up"), mlp="expert_width"),
        Tensor(f"{_SPARSE}.output_linear.weight", "E D F", ("mlp.w_down",), mlp="expert_width"),
        Tensor("model.layers.{}.shared_mlp.input_linear.weight", "J D", ("mlp.shared.w_gate", "mlp.shared.w_up"),
               mlp="shared_mlp"),
        Tensor("model.layers.{}.shared_mlp.output_linear.weight", "D F", ("mlp.shared.w_down",), mlp="shared_mlp"),
    )
)  # fmt: skip
_TURNS: dict[str, Any] = {"mlp": "expert_width", "interleaved_gate": True}
GPT_OSS = _llama(
    more=(
        _SINKS, *linear(f"{_MLP}.router", "C D", "mlp.router", biases=("mlp.router_bias",)),
        Tensor(f"{_MLP}.experts.gate_up_proj", "E D J", ("mlp.w_gate", "mlp.w_up"), **_TURNS),
        Tensor(f"{_MLP}.experts.gate_up_proj_bias", "E J", ("mlp.b_gate", "mlp.b_up"), **_TURNS),
        Tensor(f"{_MLP}.experts.down_proj", "E F D", ("mlp.w_down",), mlp="expert_width"),
        Tensor(f"{_MLP}.experts.down_proj_bias", "E D", ("mlp.b_down",), mlp="expert_width"),
    )
)  # fmt: skip
_LINEAR = "model.layers.{}.linear_attn"
_OF_LINEAR: dict[str, Any] = {"linear": True, "is_of": lambda model: model.linear_attention is not None}
QWEN3_NEXT = _llama(
    more=(
        Tensor("model.layers.{}.self_attn.q_proj.weight", "(N X) D", ("attention.wq", "attention.wg")),
        *_qk_norm(), *_routed(_MLP), *_shared(f"{_MLP}.shared_expert"),
        Tensor(f"{_MLP}.shared_expert_gate.weight", "1 D", ("mlp.shared_gate",)),
        Tensor(f"{_LINEAR}.in_proj_qkvz.weight", "(R H) D", tuple(f"linear_attention.linear_{name}" for name in "qkvz"),
               order="grouped", **_OF_LINEAR),
        Tensor(f"{_LINEAR}.in_proj_ba.weight", "R D", ("linear_attention.linear_b", "linear_attention.linear_a"),
               order="grouped", **_OF_LINEAR),
        Tensor(f"{_LINEAR}.conv1d.weight", "(R H) 1 A", tuple(f"linear_attention.conv_{name}" for name in "qkv"),
               **_OF_LINEAR),
        Tensor(f"{_LINEAR}.A_log", "N", ("linear_attention.decay",), **_OF_LINEAR),
        Tensor(f"{_LINEAR}.dt_bias", "N", ("linear_attention.decay_bias",), **_OF_LINEAR),
        *norm(f"{_LINEAR}.norm", "linear_attention.norm", axis="H", **_OF_LINEAR),
        Tensor(f"{_LINEAR}.out_proj.weight", "D (N H)", ("linear_attention.linear_out",), **_OF_LINEAR),
    )
)  # fmt: skip
_FEED = "model.layers.{}.feed_forward"
LLAMA4 = _llama(
    interleaved_rope=True, mlp_name="feed_forward",
    more=(
        Tensor(f"{_FEED}.router.weight", "C D", ("mlp.router",)),
        Tensor(f"{_FEED}.experts.gate_up_proj", "E D J", ("mlp.w_gate", "mlp.w_up"), mlp="expert_width"),
        Tensor(f"{_FEED}.experts.down_proj", "E F D", ("mlp.w_down",), mlp="expert_width"),
        *_shared(f"{_FEED}.shared_expert"),
    ),
)  # fmt: skip
INV_FREQ = (r"rotary_(pos_)?emb\.inv_freq$",)
MASKS = (r"\.attn\.(bias|masked_bias)$", r"\.attention\.(bias|masked_bias)$")
