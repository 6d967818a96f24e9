"""BLOOM."""

from gspmd_lm.convert.families.gpt2 import GPT_EPS
from gspmd_lm.convert.families.gpt_neox import NORM_BEFORE, megatron_tensors
from gspmd_lm.convert.family import BIASES, ONE_WIDTH, PLAIN_LAYERNORM, TIED, Family, four_times
from gspmd_lm.convert.fields import MOST_LAYERS, Given, Renamed
from gspmd_lm.convert.layout import norm

_BLOOM = (
    Renamed("vocab_size", "vocab"),
    Renamed("hidden_size n_embed", "embed"),
    Renamed("n_layer num_hidden_layers", "layers", most=MOST_LAYERS),
    Renamed("n_head num_attention_heads", "heads"),
    Renamed("seq_length", "context", 2048),
    *(ONE_WIDTH, PLAIN_LAYERNORM, GPT_EPS, BIASES, TIED, NORM_BEFORE),
    Given({"mlp": four_times, "feed_forward.activation": "gelu_tanh", "positions": "alibi", "embedding.norm": True}),
)
_TENSORS = (
    *megatron_tensors("transformer", "h", "self_attention", "word_embeddings", "ln_f", "lm_head"),
    *norm("transformer.word_embeddings_layernorm", "embedding_norm", bias=True),
    *norm("transformer.h.{}.input_layernorm", "attention_norm", bias=True),
    *norm("transformer.h.{}.post_attention_layernorm", "mlp_norm", bias=True),
)
_UNREAD = (
    "slow_but_exact", "attention_softmax_in_fp32", "masked_softmax_fusion", "offset_alibi", "skip_bias_add",
    "skip_bias_add_qkv",
)  # fmt: skip
FAMILIES = (Family("BLOOM", "bloom", "BloomForCausalLM", _BLOOM, _TENSORS, prefix="transformer.", irrelevant=_UNREAD),)
