"""GPT-2, and what others took from it: the names of its sizes and of its tensors."""

from gspmd_lm.convert.family import BIASES, CAUSAL_MASKS, GELU_NEW, ONE_WIDTH, PLAIN_LAYERNORM, TIED, Family, four_times
from gspmd_lm.convert.fields import MOST_LAYERS, Activation, Fixed, Given, Renamed
from gspmd_lm.convert.layout import Tensor, norm

GPT2_SIZES = (
    Renamed("vocab_size", "vocab"),
    Renamed("n_embd hidden_size", "embed"),
    Renamed("n_layer num_hidden_layers", "layers", most=MOST_LAYERS),
    Renamed("n_head num_attention_heads", "heads"),
    Renamed("n_positions max_position_embeddings", "context"),
    Renamed("n_inner", "mlp", four_times),
    ONE_WIDTH,
)
GPT_EPS = Renamed("layer_norm_epsilon", "norm.eps", 1e-5)
SCALED = Fixed("scale_attn_weights", True, "leaves attention scores as they are, which is not supported")
ALONE = Fixed("add_cross_attention", False, "attends to an encoder, which is not supported")
GPT2_FIELDS = (PLAIN_LAYERNORM, GPT_EPS, Given({"positions": "learned"}), BIASES, TIED, SCALED, ALONE)
GPT_ACTIVATION = Activation("activation_function", "gelu_new", GELU_NEW)
HEAD_SUMMARY = ("summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels")  # of other heads
QKV = ("attention.wq", "attention.wk", "attention.wv")
_BY_LAYER = Fixed("scale_attn_by_inverse_layer_idx", False, "scales attention by layer, which is not supported")


_BLOCK = "transformer.h.{}"


def gpt2_tensors(*layer_tensors: Tensor) -> tuple[Tensor, ...]:
    """Tensors with GPT-2's names, of which `layer_tensors` are those of a layer without its norms."""
    return (
        Tensor("transformer.wte.weight", "V D", ("embedding",)),
        Tensor("transformer.wpe.weight", "p D", ("position_embedding",)),
        *norm(f"{_BLOCK}.ln_1", "attention_norm", bias=True),
        *layer_tensors,
        *norm(f"{_BLOCK}.ln_2", "mlp_norm", bias=True),
        *norm("transformer.ln_f", "final_norm", bias=True),
        Tensor("lm_head.weight", "V D", ("unembedding",)),
    )


_TENSORS = gpt2_tensors(
    # Conv1D: a linear layer whose weight is not transposed.
    Tensor(f"{_BLOCK}.attn.c_attn.weight", "D (R H)", QKV),
    Tensor(f"{_BLOCK}.attn.c_attn.bias", "(R H)", ("attention.bq", "attention.bk", "attention.bv")),
    Tensor(f"{_BLOCK}.attn.c_proj.weight", "(N H) D", ("attention.wo",)),
    Tensor(f"{_BLOCK}.attn.c_proj.bias", "D", ("attention.bo",)),
    Tensor(f"{_BLOCK}.mlp.c_fc.weight", "D F", ("mlp.w_up",)),
    Tensor(f"{_BLOCK}.mlp.c_fc.bias", "F", ("mlp.b_up",)),
    Tensor(f"{_BLOCK}.mlp.c_proj.weight", "F D", ("mlp.w_down",)),
    Tensor(f"{_BLOCK}.mlp.c_proj.bias", "D", ("mlp.b_down",)),
)
GPT2 = Family(
    "GPT-2",
    "gpt2",
    "GPT2LMHeadModel",
    (*GPT2_SIZES, GPT_ACTIVATION, *GPT2_FIELDS, _BY_LAYER),
    _TENSORS,
    prefix="transformer.",
    no_weights=CAUSAL_MASKS,
    irrelevant=("n_ctx", *HEAD_SUMMARY, "reorder_and_upcast_attn"),
)
FAMILIES = (GPT2,)
