"""Seed-OSS."""

from gspmd_lm.convert.families.llama import LLAMA
from gspmd_lm.convert.family import EPS, HEAD_128, MLP_BIAS, SILU, UNTIED, llama_sizes
from gspmd_lm.convert.fields import Flag
from gspmd_lm.convert.rope import Rope

_SEED_OSS = (
    *(*llama_sizes(8), EPS, HEAD_128, Rope(), SILU, MLP_BIAS, UNTIED),
    Flag("attention_bias", ("qkv_bias",), True),
    Flag("attention_out_bias", ("attention_out_bias",), False),
)
FAMILIES = (LLAMA.relative("Seed-OSS", "seed_oss", "SeedOssForCausalLM", _SEED_OSS),)
