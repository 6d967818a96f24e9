"""Seed-OSS."""

from gspmd_lm.convert.families.llama import LLAMA
from gspmd_lm.convert.family import MLP_BIAS, llama_fields
from gspmd_lm.convert.fields import Flag

_SEED_OSS = (
    *(*llama_fields(8, 128), MLP_BIAS),
    Flag("attention_bias", ("attention.qkv_bias",), True),
    Flag("attention_out_bias", ("attention.out_bias",), False),
)
FAMILIES = (LLAMA.relative("Seed-OSS", "seed_oss", "SeedOssForCausalLM", _SEED_OSS),)
