"""Generators of small models with random weights, under any rules."""

import functools

import flax.linen as nn
import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from gspmd_lm.data.tokenizer import Bytes
from gspmd_lm.infer import eight_bits
from gspmd_lm.infer.generate import Generator, programs_for
from gspmd_lm.model.families import init
from gspmd_lm.sharding import rules_file


@pytest.fixture(scope="session")
def speaking(small):
    """A function that makes a config whose tokens are bytes: speaking(kv_heads=4)."""
    return lambda **model: small(vocab=257, padded_vocab=264, **model)


@pytest.fixture(scope="session")
def weights():
    """A function that draws the weights of a model, larger than they start so that every part of it matters."""

    @functools.cache
    def drawn(cfg):
        rng, shapes = np.random.default_rng(3), nn.unbox(jax.eval_shape(lambda: init(cfg, jax.random.key(0))))

        def draw(path, like):
            values = 0.15 * rng.standard_normal(like.shape, np.float32)
            return values + np.float32(path[-1].key == "scale")

        return jax.tree_util.tree_map_with_path(draw, shapes)

    return drawn


@pytest.fixture(scope="session")
def prompts():
    """Three prompts of different lengths."""
    rng = np.random.default_rng(1)
    return [rng.integers(0, 256, size).tolist() for size in (7, 1, 4)]


@pytest.fixture(scope="session")
def filled():
    """A function that loads rules (a name, or a mapping), their mesh filled."""

    def load(rules):
        found = rules_file.load(rules) if isinstance(rules, str) else rules_file.from_dict(rules, "here.yaml")
        return found.fill(found.devices)

    return load


@pytest.fixture(scope="session")
def generator(weights, filled, prompts):
    """A function that builds the generator of a config under rules, for 10 new tokens after prompts, those above."""

    def build(cfg, rules, batch=3, prompts=prompts):
        rules = filled(rules)
        devices = jax.devices()[: rules.devices]
        built, _ = programs_for(cfg, rules, devices, "cpu", prompts, new_tokens=10, batch=batch, tokenizer=Bytes())
        drawn = flatten_dict(weights((eight_bits.without(cfg) or cfg).model))

        def read(wanted):
            return jax.tree_util.tree_map_with_path(
                lambda path, like: jax.device_put(drawn[*(key.key for key in path)].astype(like.dtype), like.sharding),
                wanted,
            )

        return Generator(built, eight_bits.reading(cfg.model, read)(built.abstract_params), Bytes())

    return build
