"""Adapters: what they add, that merging is the same, and settings that make no sense."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict

from gspmd_lm import config as configs
from gspmd_lm.config import Lora
from gspmd_lm.errors import InputError
from gspmd_lm.model import lora
from gspmd_lm.model.families import decode, init
from gspmd_lm.model.loss import losses
from gspmd_lm.sharding.axes import ADAPTERS

ATTENTION, PLAIN = ("wq", "wk", "wv", "wo"), ("w_up", "w_down")
EVERY = (*ATTENTION, "w_gate", *PLAIN)


def model(small, targets=EVERY, **fields):
    return small(lora=Lora(rank=3, alpha=6.0, targets=targets), **fields).model


def drawn(cfg):
    """Random parameters; the adapters have learned something."""
    abstract = nn.unbox(jax.eval_shape(lambda: init(cfg, jax.random.key(0))))
    rng = np.random.default_rng(0)

    def draw(path, x):
        scale = 0.3 if path[-1] in ADAPTERS else 0.1
        return (scale * rng.standard_normal(x.shape) + (path[-1] == "scale")).astype(x.dtype)

    return jax.device_put(unflatten_dict({path: draw(path, x) for path, x in sorted(flatten_dict(abstract).items())}))


def loss(params, cfg):
    tokens = jax.random.randint(jax.random.key(1), (4, 16), 0, cfg.vocab)
    positions = jnp.broadcast_to(jnp.arange(16), tokens.shape)
    with jax.default_matmul_precision("highest"):
        x_BTD, table, bias = decode(cfg, params, {"tokens": tokens, "positions": positions, "row": jnp.arange(4)})
        return losses(x_BTD, table, bias, jnp.roll(tokens, -1, 1), cfg).loss


@pytest.mark.long
@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"block": "parallel", "kv_heads": 4, "embedding.tied": True, "padded_heads": 10},
                     marks=pytest.mark.slow),
        pytest.param({"feed_forward.kind": "plain", "targets": (*ATTENTION, *PLAIN), "logits.bias": True, "layers": 3,
                      "attention.window": 4, "layer_pattern": ("sliding", "full")}, marks=pytest.mark.slow),
        {"experts.count": 4, "experts.per_token": 2, "experts.mlp": 16, "feed_forward.bias": True,
         "experts.shared_mlp": 8, "layers": 1},
    ],
    ids=["sequential", "parallel", "pattern", "mixture"],
)  # fmt: skip
def test_merging_computes_the_same_and_so_do_gradients(small, fields):
    cfg = model(small, **fields)
    weights, adapters = lora.partition(drawn(cfg), cfg)
    assert {path[-1].removesuffix("_a") for path in flatten_dict(adapters) if path[-1].endswith("_a")} == {
        *cfg.lora.targets
    }

    def with_adapters(adapters):
        return loss(lora.join_trees(weights, adapters), cfg)

    def with_merged(adapters):
        return loss(*lora.merge_adapters(lora.join_trees(weights, adapters), cfg))

    got, want = (jax.device_get(jax.jit(jax.value_and_grad(f))(adapters)) for f in (with_adapters, with_merged))
    assert float(got[0]) == pytest.approx(float(want[0]), rel=1e-6)
    for (path, a), b in zip(sorted(flatten_dict(got[1]).items()), jax.tree.leaves(want[1]), strict=True):
        assert np.linalg.norm(a - b) <= 1e-4 * np.linalg.norm(b), path
        assert np.linalg.norm(b) > 0, path


@pytest.mark.long
def test_training_begins_at_the_base_model(small):
    cfg = model(small)
    params = nn.unbox(jax.jit(init, static_argnums=0)(cfg, jax.random.key(0)))
    merged = jax.jit(lambda params: lora.merge_adapters(params, cfg)[0])(params)
    assert lora.merge_adapters({}, cfg)[1] == dataclasses.replace(cfg, lora=None)
    jax.tree.map(np.testing.assert_array_equal, merged, lora.weights(params))
    for path, x in flatten_dict(lora.adapters(params)).items():
        if path[-1].endswith("_b"):
            assert not np.asarray(x).any()
        else:  # what it makes of its input is as large
            read = {"wo": 32, "w_down": 64}.get(path[-1].removesuffix("_a"), 32)
            assert np.asarray(x).std() == pytest.approx(read**-0.5, rel=0.25), path


def test_adapters_of_bfloat16_weights_are_float32(small):
    cfg = model(small, weight_dtype="bfloat16", compute_dtype="bfloat16")
    params = nn.unbox(jax.eval_shape(lambda: init(cfg, jax.random.key(0))))
    assert {x.dtype.name for x in jax.tree.leaves(lora.adapters(params))} == {"float32"}
    assert {x.dtype.name for x in jax.tree.leaves(lora.weights(params))} == {"bfloat16"}
    merged = jax.eval_shape(lambda p: lora.merge_adapters(p, cfg)[0], params)
    assert {x.dtype.name for x in jax.tree.leaves(merged)} == {"bfloat16"}


@pytest.mark.long
def test_a_frozen_weight_has_no_gradient(small):
    """Not even where somebody asks for it: nothing is computed for it."""
    cfg = model(small, targets=("wq",), layers=1)
    found = flatten_dict(jax.device_get(jax.jit(jax.grad(lambda params: loss(params, cfg)))(drawn(cfg))))
    for path in ("layers.attention.wq", "layers.attention.wo", "layers.mlp.w_down", "unembedding"):
        assert not np.any(found[tuple(path.split("."))]), path
    assert np.any(found["layers", "attention", "wq_a"]) and np.any(found["layers", "attention", "wq_b"])


def test_settings_that_make_no_sense():
    def message(*overrides):
        with pytest.raises(InputError) as error:
            configs.load("tiny", overrides)
        return str(error.value)

    assert "did you mean w_gate?" in message("model.lora={targets: [w_gat]}")
    assert "a plain MLP has no w_gate, only w_up and w_down" in message(
        "model.lora={targets: [wq, w_gate]}", "model.feed_forward.kind=plain"
    )
    wrong = message("model.lora={rank: 0, alpha: 0, targets: [wq]}")
    assert "rank: must be at least 1, got 0" in wrong and "alpha: must be above 0" in wrong
    assert "each once" in message("model.lora={rank: 1, alpha: 1, targets: [wq, wq]}")
    assert "missing" in message("model.lora={rank: 4}")
