"""Several residual streams, keys that layers share, embeddings of tokens for each layer, and sparse activations."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gspmd_lm.model.cache import empty_cache
from gspmd_lm.model.compose import activation
from gspmd_lm.model.families import decode, init
from tests.model.cached import both_ways

# Layers: 0 sliding, 1 full, 2 sliding, and 3 full and 4 sliding with the keys of 1 and 2. The last one stands alone.
KINDS = {"layers": 5, "layer_pattern": ("sliding", "full"), "attention.window": 4, "attention.shared_kv_layers": 2}
STREAMS = {
    "residual.streams": 2,
    "residual.laurel_rank": 4,
    "residual.layer_embed": 8,
    "residual.layer_vocab": 50,
    "attention.value_norm": True,
}


def drawn(cfg):
    shapes = nn.unbox(jax.eval_shape(lambda: init(cfg, jax.random.key(0))))
    rng = np.random.default_rng(0)  # faster than the model's own weights, which would be compiled
    return cfg, jax.tree.map(lambda like: 0.3 * rng.standard_normal(like.shape, np.float32), shapes)


@pytest.fixture(scope="module")
def model(small):
    return drawn(small(**KINDS, **STREAMS).model)


def rows(cfg, length):
    tokens = np.random.default_rng(1).integers(0, cfg.residual.layer_vocab, (2, length), np.int32)
    return {"tokens": tokens, "positions": np.arange(length)[None].repeat(2, 0), "row": np.arange(2)}


def test_layers_that_share_keys_make_none(model):
    """So they have no weights for keys, and no place in the cache."""
    cfg, params = model
    assert not {"wk", "wv"} & params["shared_kv_layers"]["block_0"]["attention"].keys()
    assert [len(stack.kinds) for stack in cfg.stacks] == [2, 2]
    assert [layer.attention.shared_kv_layers > 0 for layer in cfg.each_layer] == [False] * 3 + [True] * 2
    cache = jax.eval_shape(lambda: empty_cache(cfg, 2, 8))
    assert cache.k_LBSKH.shape[0] == 3


def test_tokens_one_by_one_give_what_whole_rows_do(model):
    """Through the cache, in which layers that share keys have no place. Prompts with padding before them."""
    cfg, params = model
    T, new = 8, 2
    found, wanted = both_ways(cfg, params, rows(cfg, T + new)["tokens"], np.array([0, 5], np.int32), T)
    np.testing.assert_allclose(found, wanted, atol=2e-5)


@pytest.mark.long
def test_tokens_beyond_the_table_have_the_first_ones_embeddings(small):
    """Their embeddings for layers, not those at the beginning."""
    cfg, params = drawn(small(layers=1, **STREAMS).model)
    batch = rows(cfg, 8)

    batch["tokens"][:] = 7
    batch["tokens"][:, -1] = cfg.vocab - 1

    @jax.jit
    def slopes(params):
        def total(table):
            own = params["per_layer_inputs"] | {"layer_table": table}
            return jnp.square(decode(cfg, params | {"per_layer_inputs": own}, batch)[0]).sum()

        return jnp.abs(jax.grad(total)(params["per_layer_inputs"]["layer_table"])).sum(1)

    assert set(np.flatnonzero(slopes(params))) == {0, 7}


@pytest.mark.parametrize("share", [0.5, 0.9])
def test_the_share_of_a_gate_that_is_cut_off(small, share):
    """Of normal numbers, whatever their mean and their size."""
    cfg = small(**{"feed_forward.sparsity": share, "feed_forward.activation": "relu"}).model
    gate = np.random.default_rng(0).normal(3, 5, (4, 20_000)).astype(np.float32)
    found = jax.jit(activation(cfg))(gate, np.ones_like(gate))
    np.testing.assert_allclose((np.asarray(found) == 0).mean(-1), share, atol=0.01)


def test_a_gate_of_equal_numbers_has_a_gradient(small):
    cfg = small(**{"feed_forward.sparsity": 0.9}).model
    slope = jax.jit(jax.grad(lambda gate: activation(cfg)(gate, jnp.ones_like(gate)).sum()))(
        np.zeros((1, 4), np.float32)
    )
    assert np.isfinite(slope).all()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"residual.laurel_rank": 4, "block": "parallel"}, "residual.laurel_rank does not go with block: parallel"),
        ({"residual.layer_embed": 4}, "set streams"),
        ({"residual.layer_vocab": 62}, "residual.layer_vocab=62 is above vocab=61"),
        ({"feed_forward.sparsity": 0.5, "feed_forward.kind": "plain"}, "kind: gated"),
        ({"feed_forward.sparse_layers": 1}, "sparse_layers=1: set sparsity"),
        ({"feed_forward.sparse_layers": 3, "feed_forward.sparsity": 0.5}, "is above layers=2"),
        (
            {"attention.shared_kv_layers": 1, "experts.count": 8, "experts.per_token": 2},
            "experts does not go with attention.shared_kv_layers",
        ),
        ({"attention.shared_kv_layers": 2}, "no layer before them is of kind full"),
        (
            {"attention.shared_kv_layers": 1, "layer_pattern": ("full", "sliding"), "attention.window": 4},
            "is of kind sliding",
        ),
        ({"attention.shared_kv_layers": 1, "attention.chunk": 4}, "kind sliding and full"),
    ],
)
def test_what_does_not_go_together(small, wrong, message):
    with pytest.raises(ValueError, match=message):
        small(**wrong)
