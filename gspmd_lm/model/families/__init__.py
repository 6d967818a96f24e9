"""The families of models. Only `family` asks which family a config describes; the family's answers do the rest."""

from typing import Any

import jax

from gspmd_lm.config import ModelConfig
from gspmd_lm.model.cache import Cache
from gspmd_lm.model.families import bert, blip2, clip, dinov2, gemma3n, sam, swin, t5, text, vit, whisper
from gspmd_lm.model.families.text import Family as Family
from gspmd_lm.sharding.annotate import Weight

# The first one that fits.
_FAMILIES: tuple[Family, ...] = tuple(
    one.FAMILY for one in (sam, swin, dinov2, vit, blip2, clip, whisper, t5, bert, gemma3n, text)
)


def family(cfg: ModelConfig) -> Family:
    """The family of the model that a config describes."""
    return next(one for one in _FAMILIES if one.fits(cfg))


def init(cfg: ModelConfig, key: jax.Array) -> Any:
    """The parameters, a nested dict of LogicallyPartitioned arrays, with the same values under every placement."""
    chosen = family(cfg)
    return chosen.module(cfg).init(key, chosen.dummy(cfg))["params"]


def apply(
    cfg: ModelConfig, params: Any, batch: dict[str, jax.Array], dropout_key: jax.Array | None = None, *more: Any
) -> Any:
    """The output of the model's module for plain (unboxed) parameters."""
    return family(cfg).module(cfg).apply({"params": params}, batch, dropout_key, *more)


def decode(
    cfg: ModelConfig, params: Any, batch: dict[str, jax.Array], dropout_key: jax.Array | None = None
) -> tuple[jax.Array, Weight, Weight | None]:
    """Hidden states, output table and its bias (see `decoder.Decoded`) for plain (unboxed) parameters."""
    return apply(cfg, params, batch, dropout_key)[:3]


def extend(
    cfg: ModelConfig, params: Any, batch: dict[str, jax.Array], cache: Cache
) -> tuple[jax.Array, Weight, Weight | None, Cache]:
    """`decode` for the first tokens of each row, or for one more, with the cache to which they were added."""
    return apply(cfg, params, batch, None, cache)[:4]
