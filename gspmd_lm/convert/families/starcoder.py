"""StarCoder2, and StarCoder with the names of GPT-2."""

from gspmd_lm.convert.families.gpt2 import GPT2, GPT2_FIELDS, GPT2_SIZES, HEAD_SUMMARY, QKV, gpt2_tensors
from gspmd_lm.convert.families.llama import LLAMA, llama_tensors
from gspmd_lm.convert.family import ALL_BIASES, PLAIN_LAYERNORM, TANH, heads, llama_fields
from gspmd_lm.convert.fields import Activation, Flag, Renamed, Window
from gspmd_lm.convert.layout import linear, plain_mlp

_EPS = Renamed("norm_epsilon", "norm.eps", 1e-5)
_STARCODER_2 = (
    *llama_fields(2, eps=_EPS, activation=Activation("hidden_act", "gelu_pytorch_tanh", TANH), tied=True),
    *(PLAIN_LAYERNORM, Window(None), Flag("use_bias", ALL_BIASES, True)),
)
_STARCODER = (
    *(*GPT2_SIZES, *GPT2_FIELDS),
    Activation("activation_function", "gelu_pytorch_tanh", TANH),
    Flag("multi_query", ("kv_heads",), True, on=1, off=heads),
)
_LAYER = "transformer.h.{}"
_TENSORS = gpt2_tensors(
    *linear(f"{_LAYER}.attn.c_attn", "(R H) D", *QKV, order="grouped"),
    *linear(f"{_LAYER}.attn.c_proj", "D (N H)", "attention.wo"),
    *plain_mlp(f"{_LAYER}.mlp", "c_fc", "c_proj"),
)
_UNREAD = (
    "n_ctx", *HEAD_SUMMARY, "attention_softmax_in_fp32", "scale_attention_softmax_in_fp32", "num_key_value_heads",
    "inference_runner", "max_batch_size", "pad_key_length", "pre_allocate_kv_cache",
    "validate_runner_input",
)  # fmt: skip
FAMILIES = (
    LLAMA.relative(
        "StarCoder2",
        "starcoder2",
        "Starcoder2ForCausalLM",
        _STARCODER_2,
        llama_tensors(up="c_fc", down="c_proj"),
        irrelevant=("norm_type", "mlp_type"),
    ),
    GPT2.relative("StarCoder", "gpt_bigcode", "GPTBigCodeForCausalLM", _STARCODER, _TENSORS, irrelevant=_UNREAD),
)
