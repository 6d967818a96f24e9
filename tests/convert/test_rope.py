"""The frequencies of rotary positions against those of transformers, for each kind of scaling and length of a row."""

import jax
import numpy as np
import pytest

from gspmd_lm.model.compose import rotary
from gspmd_lm.model.rope import rotate
from gspmd_lm.model.tokens import Tokens
from tests.convert.published_configs import LLAMA31
from tests.convert.test_architecture import model_of

LISTS = {"short_factor": [1 + i / 64 for i in range(64)], "long_factor": [1 + i / 2 for i in range(64)]}
SCALINGS = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    {"rope_type": "dynamic", "factor": 4.0},
    {"rope_type": "yarn", "factor": 4.0},
    {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 2048, "beta_fast": 20, "beta_slow": 2},
    {"rope_type": "yarn", "factor": 4.0, "truncate": False, "mscale": 0.7, "mscale_all_dim": 0.4},
    {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.25, "beta_fast": 2.5, "beta_slow": 2.4},
    {"rope_type": "longrope", "original_max_position_embeddings": 2048, **LISTS},
    {"rope_type": "longrope", "original_max_position_embeddings": 2048, "factor": 3.0, **LISTS},
    {"rope_type": "longrope", "original_max_position_embeddings": 2048, "attention_factor": 1.5, **LISTS},
]


@pytest.mark.parity
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("length", [64, 2048, 2049, 8192, 40000])
@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda scaling: scaling["rope_type"])
def test_frequencies_and_attention_factor(scaling, length):
    import torch
    import transformers
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    raw = LLAMA31 | {"rope_scaling": scaling, "max_position_embeddings": 8192}
    theirs = LlamaRotaryEmbedding(transformers.LlamaConfig(**{k: v for k, v in raw.items() if k != "model_type"}))
    theirs(torch.zeros(1, 1), torch.tensor([[length - 1]]))  # it chooses its frequencies by the last position
    model = model_of(raw)
    np.testing.assert_allclose(rotary(model).frequencies(length), theirs.inv_freq.numpy(), rtol=2e-6)
    factor = model.attention.rope.scaling.attention_factor if model.attention.rope.scaling else 1.0
    assert factor == pytest.approx(theirs.attention_scaling, rel=1e-6)


def test_a_row_longer_than_the_original_context_is_scaled():
    """longrope and dynamic depend on the length of a row, which all rows of a batch share or each has for itself."""
    for scaling in ({"rope_type": "dynamic", "factor": 4.0}, SCALINGS[8]):
        model = model_of(LLAMA31 | {"rope_scaling": scaling, "max_position_embeddings": 2048})
        frequencies = rotary(model).frequencies
        short, at, long = (np.asarray(jax.jit(frequencies, static_argnums=0)(length)) for length in (7, 2048, 2049))
        np.testing.assert_array_equal(short, at)
        assert (long <= short).all() and (long[1:] < short[1:]).all()
        each = jax.jit(frequencies)(Tokens(length_B=np.array([7, 2048, 2049])).lengths(1))[:, 0]
        np.testing.assert_allclose(each, [short, at, long], rtol=1e-6)


def test_queries_and_keys_are_multiplied_by_the_attention_factor():
    model = model_of(LLAMA31 | {"rope_scaling": SCALINGS[7]})
    x_BTNH = np.random.default_rng(0).standard_normal((1, 3, 2, 128), np.float32)
    turned = jax.jit(lambda x_BTNH, at: rotate(rotary(model), x_BTNH, Tokens(at)))(x_BTNH, np.arange(3)[None])
    np.testing.assert_allclose(np.linalg.norm(turned, axis=-1), 1.25 * np.linalg.norm(x_BTNH, axis=-1), rtol=1e-5)
