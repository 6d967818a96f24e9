"""Linear attention by the gated delta rule: chunks against single tokens, documents apart, and the state in a cache."""

import jax
import numpy as np
import pytest

from gspmd_lm.config import LinearAttention
from gspmd_lm.model.cache import empty_cache
from gspmd_lm.model.families import decode
from gspmd_lm.model.parts import linear
from tests.courses import weights
from tests.model.cached import both_ways

N, H = 2, 4


def one_by_one(q, k, v, log_decay, rate, segments):
    """The rule as it is written, in float64: [T, N, H] of one row."""
    state, read = np.zeros((N, H, H)), []
    for t in range(len(q)):
        state = state * (0 if t and segments[t] != segments[t - 1] else np.exp(log_decay[t])[:, None, None])
        new = rate[t][:, None] * (v[t] - np.einsum("ni,nih->nh", k[t], state))
        state = state + k[t][:, :, None] * new[:, None]
        read.append(np.einsum("ni,nih->nh", q[t], state))
    return np.array(read), state


@pytest.mark.parametrize("length", [1, 6, 64, 150])
def test_chunks_compute_what_single_tokens_do(length):
    """Rows shorter and longer than a chunk, with documents that end within one, at its end, and after it."""
    rng = np.random.default_rng(length)
    q, k, v = rng.normal(size=(3, 2, length, N, H))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    log_decay, rate = -0.1 * rng.exponential(size=(2, length, N)), rng.uniform(size=(2, length, N))
    segments = np.stack([np.zeros(length, int), (np.arange(length)[:, None] >= [3, 64, 70, 149]).sum(1)])
    given = [x.astype(np.float32) for x in (q, k, v, log_decay, rate)]
    with jax.default_matmul_precision("highest"):
        read, state = map(np.asarray, jax.jit(linear._in_chunks)(*given, segments.astype(np.int32)))
    for row in range(2):
        want, last = one_by_one(*(x[row] for x in (q, k, v, log_decay, rate, segments)))
        np.testing.assert_allclose(read[row], want, atol=2e-5)
        np.testing.assert_allclose(state[row], last, atol=2e-5)


def test_repeated_keys_are_inverted_exactly():
    """The powers of this triangle grow to 1e17, and its inverse has ones alone."""
    ones = np.tril(np.ones((64, 64), np.float32), -1)
    np.testing.assert_array_equal(jax.jit(linear._inverse)(ones), np.linalg.inv(np.eye(64) + ones).round())


@pytest.fixture(scope="module")
def model(small):
    """Linear layers around one with keys, of which the last stands behind the loop."""
    sizes = LinearAttention(key_heads=2, value_heads=4, head_dim=8, taps=3)
    kinds = {"layer_pattern": ("linear", "full"), "layers": 3, "context": 128}
    cfg = small(**{"attention.linear": sizes, "attention.gate": True}, init_std=0.2, **kinds).model
    return cfg, weights(cfg)


@pytest.mark.long
def test_nothing_leaves_a_document(model):
    """Nothing of one document depends on the tokens of another one, nor on later ones."""
    cfg, params = model
    T, cut = 80, 33
    tokens = np.random.default_rng(1).integers(0, cfg.vocab, (1, T), np.int32)
    at = np.arange(T, dtype=np.int32)[None]
    batch = {"positions": np.where(at < cut, at, at - cut), "segment_ids": np.where(at < cut, 1, 2), "row": at[0, :1]}
    decoded = jax.jit(lambda tokens: decode(cfg, params, batch | {"tokens": tokens})[0][0])

    def hidden(tokens):
        return np.asarray(decoded(tokens))

    one = hidden(tokens)
    for changed, alike in ((0, slice(cut, T)), (cut, slice(0, cut)), (60, slice(0, 60))):
        other = hidden(tokens + (at == changed))
        np.testing.assert_allclose(one[alike], other[alike], atol=5e-5)  # sums of decays round differently
        assert abs(one[changed] - other[changed]).max() > 0.1


@pytest.mark.long
def test_a_state_goes_from_prompts_of_any_length_to_the_next_tokens(model):
    """Prompts with padding before them, one of them shorter than the short convolution, and two tokens more."""
    cfg, params = model
    T, new = 80, 2
    tokens = np.random.default_rng(1).integers(0, cfg.vocab, (3, T + new), np.int32)
    cache = jax.eval_shape(lambda: empty_cache(cfg, 3, T + new))
    assert cache.k_LBSKH.shape[0] == 1 and cache.linear.s_LBNIH.shape[:2] == (2, 3)  # only layers that need them
    found, wanted = both_ways(cfg, params, tokens, np.array([0, 7, 79], np.int32), T)
    np.testing.assert_allclose(found, wanted, atol=5e-5)
