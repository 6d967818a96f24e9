"""What the decoder computes, on one device."""

import dataclasses
import functools
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gspmd_lm.config import RopeScaling
from gspmd_lm.model import block, norm
from gspmd_lm.model.decoder import Decoder
from gspmd_lm.model.families import init
from gspmd_lm.model.parts.activations import gelu
from gspmd_lm.model.parts.dropout import dropout
from gspmd_lm.model.tokens import Tokens
from tests.courses import weights

T = 12
VARIANTS = {
    "llama": {},
    "gpt2": {"norm.kind": "layernorm", "norm.bias": True, "feed_forward.kind": "plain",
             "feed_forward.activation": "gelu_tanh", "positions": "learned", "attention.qkv_bias": True,
             "attention.out_bias": True, "feed_forward.bias": True, "embedding.tied": True},
    "parallel": {"block": "parallel", "attention.qk_norm": True, "kv_heads": 2, "positions": "sinusoidal",
                 "feed_forward.activation": "gelu", "logits.bias": True},
    "plain": {"norm.scale": False, "positions": "none", "feed_forward.kind": "plain", "feed_forward.activation": "relu",
              "attention.softcap": 5.0, "attention.rope.scaling": RopeScaling()},
    "olmo": {"norm.pre": False, "norm.post": True, "attention.qk_norm": True, "attention.qk_norm_kind": "joint",
             "attention.window": 5, "layer_pattern": ("sliding", "nope"), "feed_forward.activation": "relu2"},
}  # fmt: skip


@pytest.fixture(params=VARIANTS, name="cfg")
def variant(request, small):
    return small(**VARIANTS[request.param]).model


def rows(cfg, tokens, segments=None, positions=None):
    tokens = np.atleast_2d(np.asarray(tokens, np.int32))
    place = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
    return {
        "tokens": tokens,
        "positions": place if positions is None else positions,
        "segment_ids": np.ones_like(tokens) if segments is None else segments,
        "row": np.arange(tokens.shape[0], dtype=np.int32),
    }


@functools.partial(jax.jit, static_argnums=0)
def hidden(cfg, params, batch, key=None):
    x_BTD, *_ = Decoder(cfg).apply({"params": params}, batch, key)
    return x_BTD


def test_a_layer_is_traced_once(small, monkeypatch):
    """Most of the time that a small program takes to start would be spent on a second trace of the layers."""
    cfg, traced, named = small().model, [], block.checkpoint_name
    params = weights(cfg)
    monkeypatch.setattr(block, "checkpoint_name", lambda x, name: traced.append(name) or named(x, name))
    jax.eval_shape(lambda: Decoder(cfg).apply({"params": params}, rows(cfg, np.arange(T)))[0])
    assert traced == ["layer_input", "residual"]


# What a position sees depends on windows and softcaps, and on no other difference of the variants.
@pytest.mark.parametrize(
    "cfg",
    [
        "llama",
        "plain",
        pytest.param("olmo", marks=pytest.mark.long),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("gpt2", "parallel")),
    ],
    indirect=True,
)
def test_a_position_sees_itself_and_what_came_before(cfg):
    """By gradient: the hidden state at t depends on the embeddings of tokens up to t and on no later one."""
    tokens = np.random.default_rng(0).permutation(cfg.vocab)[:T]  # all different, so each has its own row
    params, places = weights(cfg), (0, 5, T - 1)

    @jax.jit
    def gradients(params):
        def of(embedding):
            return hidden(cfg, params | {"embedding": embedding}, rows(cfg, tokens))[0]

        x_TD, pull = jax.vjp(of, params["embedding"])
        # A norm's output sums to a constant: weigh it, so that there is a gradient.
        weigh = jnp.linspace(-1, 1, cfg.embed)
        return jax.vmap(lambda t: pull(jnp.zeros_like(x_TD).at[t].set(weigh))[0])(jnp.array(places))

    for t, gradient in zip(places, gradients(params), strict=True):
        touched = np.abs(np.asarray(gradient))[tokens].max(axis=1) > 0
        assert touched.tolist() == [i <= t for i in range(T)]


def test_packed_documents_do_not_see_each_other(cfg):
    """Two documents in one row give what each gives at the beginning of a row of its own."""
    rng = np.random.default_rng(1)
    first, second = rng.integers(0, cfg.vocab, 5), rng.integers(0, cfg.vocab, T - 5)
    tokens = np.stack([np.r_[first, second], np.r_[first, second], np.r_[second, first]])
    segments, positions = np.ones((3, T), int), np.tile(np.arange(T), (3, 1))
    segments[0, 5:], positions[0, 5:] = 2, np.arange(T - 5)
    together, apart, turned = np.asarray(hidden(cfg, weights(cfg), rows(cfg, tokens, segments, positions)))
    np.testing.assert_allclose(together[:5], apart[:5], atol=2e-5)
    np.testing.assert_allclose(together[5:], turned[: T - 5], atol=2e-5)
    assert np.abs(apart[5:] - together[5:]).max() > 1e-3


def test_logits_follow_the_reference_formula(small):
    """One layer written out in numpy from the definitions: RMSNorm, rotary grouped-query attention, gated MLP."""
    cfg = small(layers=1, kv_heads=2).model
    params = jax.device_get(weights(cfg))
    tokens = np.random.default_rng(2).integers(0, cfg.vocab, T)
    block = jax.tree.map(lambda x: x[0], params["layers"])

    def norm(x, scale):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + cfg.norm.eps) * scale

    def rotate(x_TNH):
        half = cfg.head_dim // 2
        angle = np.arange(T)[:, None, None] / cfg.attention.rope.theta ** (np.arange(half) / half)
        z = (x_TNH[..., :half] + 1j * x_TNH[..., half:]) * np.exp(1j * angle)
        return np.concatenate([z.real, z.imag], -1)

    x = params["embedding"][tokens]
    y = norm(x, block["attention_norm"]["scale"])
    q = rotate(np.einsum("td,dnh->tnh", y, block["attention"]["wq"]))
    k = rotate(np.einsum("td,dkh->tkh", y, block["attention"]["wk"])).repeat(4, 1)
    v = np.einsum("td,dkh->tkh", y, block["attention"]["wv"]).repeat(4, 1)
    scores = np.einsum("tnh,snh->nts", q, k) / np.sqrt(cfg.head_dim)
    scores = np.where(np.tril(np.ones((T, T), bool)), scores, -np.inf)
    share = np.exp(scores - scores.max(-1, keepdims=True))
    share /= share.sum(-1, keepdims=True)
    x = x + np.einsum("tnh,nhd->td", np.einsum("nts,snh->tnh", share, v), block["attention"]["wo"])
    y = norm(x, block["mlp_norm"]["scale"])
    gate, up = y @ block["mlp"]["w_gate"], y @ block["mlp"]["w_up"]
    x = norm(x + (gate / (1 + np.exp(-gate)) * up) @ block["mlp"]["w_down"], params["final_norm"]["scale"])
    np.testing.assert_allclose(hidden(cfg, params, rows(cfg, tokens))[0], x, atol=3e-5)


def test_dropout_masks_belong_to_tokens(small):
    """The mask of a token is the same wherever it stands, differs between tokens, and keeps the expected share."""
    keys = jax.random.split(jax.random.key(0), (4, 64))
    x = np.ones((4, 64, 32), np.float32)

    @jax.jit
    def found(x, keys):
        one_row, reversed_rows = (dropout(x[cut], 0.25, keys[cut], 1) for cut in (np.s_[2:3], np.s_[:, ::-1]))
        return dropout(x, 0.25, keys, 1), one_row, reversed_rows, dropout(x, 0.25, keys, 2)

    dropped, one_row, reversed_rows, of_another_site = map(np.asarray, found(x, keys))
    np.testing.assert_array_equal(one_row[0], dropped[2])
    np.testing.assert_array_equal(reversed_rows, dropped[:, ::-1])
    assert not np.array_equal(dropped[0], dropped[1]) and not np.array_equal(dropped[0, 0], dropped[0, 1])
    assert not np.array_equal(of_another_site, dropped)
    assert np.mean(dropped > 0) == pytest.approx(0.75, abs=0.02)
    assert dropped.mean() == pytest.approx(1, abs=0.03)
    assert dropout(x, 0.25, None, 1) is x


@pytest.mark.parametrize(("block", "writes"), [("sequential", 5), ("parallel", 3)])
def test_every_dropout_of_a_model_has_a_mask_of_its_own(block, writes, small):
    """Where all that is written to the residual stream is 1, an entry counts the writes that their masks have kept.

    Masks of their own give a binomial distribution; two equal ones would give only even counts of theirs.
    """
    cfg = small(
        block=block, dropout=0.5, embed=64, layers=2, **{"attention.out_bias": True, "feed_forward.bias": True}
    ).model
    written = 1.0 if block == "sequential" else 0.5  # by each of attention and MLP, which a parallel block adds up

    values = {"bo": written, "b_down": written, "scale": 1, "embedding": 1}

    def value(path, x):
        return np.full(x.shape, values.get(path[-1].key, 0), x.dtype)

    params = jax.tree_util.tree_map_with_path(value, nn.unbox(jax.eval_shape(lambda: init(cfg, jax.random.key(0)))))
    batch = rows(cfg, np.zeros((8, T), int))
    x_BTD = hidden(cfg, params, batch, jax.random.key(7))
    found = np.asarray(x_BTD).reshape(-1, 64)
    one = np.where(found > 0, found, np.inf).min(-1, keepdims=True)  # the last norm has scaled each token
    share = np.bincount(np.rint(found / one).astype(int).ravel(), minlength=writes + 1) / found.size
    np.testing.assert_allclose(share, [math.comb(writes, kept) / 2**writes for kept in range(writes + 1)], atol=0.02)


def test_dropout_changes_training_only(small):
    cfg = small(dropout=0.5).model
    params, batch = weights(cfg), rows(cfg, np.arange(T))

    def program(cfg, *key):
        return str(jax.make_jaxpr(hidden, static_argnums=0)(cfg, params, batch, *key))

    assert program(cfg) == program(dataclasses.replace(cfg, dropout=0.0)) != program(cfg, jax.random.key(0))


def test_matrices_that_write_to_the_residual_stream_start_smaller_with_depth(small):
    cfg = small(layers=8, embed=64, mlp=128, init_std=0.05, **{"embedding.tied": False}).model
    params = jax.jit(lambda key: nn.unbox(init(cfg, key)))(jax.random.key(0))
    attention, mlp = params["layers"]["attention"], params["layers"]["mlp"]
    for name, x in ({"embedding": params["embedding"], "unembedding": params["unembedding"]} | attention | mlp).items():
        std = 0.05 / math.sqrt(2 * 8) if name in ("wo", "w_down") else 0.05
        assert np.asarray(x).std() == pytest.approx(std, rel=0.05), name
        assert abs(np.asarray(x).mean()) < 0.1 * std, name


@pytest.mark.parametrize("kind", ["rmsnorm", "layernorm"])
def test_norms_of_bfloat16_are_computed_in_float32(kind, small):
    """What comes out is the exact result, rounded once."""
    cfg = small(
        **{"norm.kind": kind, "norm.bias": kind == "layernorm", "norm.eps": 1e-5}, compute_dtype="bfloat16"
    ).model
    rng = np.random.default_rng(0)
    x = rng.normal(30.0, 1.0, (64, 32)).astype(jnp.bfloat16)
    params = {name: rng.normal(1.0, 0.1, 32).astype(np.float32) for name in ("scale", "bias")[: 1 + cfg.norm.bias]}
    found = np.asarray(jax.jit(norm.Norm(cfg).apply)({"params": params}, x))
    y = np.asarray(x, np.float64)
    y -= y.mean(-1, keepdims=True) * (kind == "layernorm")
    y = y / np.sqrt(np.square(y).mean(-1, keepdims=True) + 1e-5) * params["scale"] + params.get("bias", 0)
    assert found.dtype == jnp.bfloat16 and np.mean(found == y.astype(jnp.bfloat16)) > 0.99


@pytest.mark.long
def test_gradients_add_up_in_float32(small):
    """Those of 1024 equal rows are sums of equal ones: in bfloat16 they would stop growing at 256 of them."""
    biases = {name: True for name in ("norm.bias", "attention.qkv_bias", "attention.out_bias", "feed_forward.bias")}
    exact = small(layers=1, positions="learned", **{"norm.kind": "layernorm"}, embed=16, mlp=16, **biases).model
    batch = rows(exact, np.tile(np.arange(2), (1024, 1)))
    rng, abstract = np.random.default_rng(0), nn.unbox(jax.eval_shape(lambda: init(exact, jax.random.key(0))))
    params = jax.tree.map(lambda x: rng.normal(0.5, 0.5, x.shape).astype(jnp.bfloat16), abstract)

    def gradients(**dtypes):
        cfg = dataclasses.replace(exact, **dtypes)
        weights = jax.tree.map(lambda x: x.astype(cfg.weight_dtype), params)
        loss = lambda p: hidden(cfg, p, batch)[..., :8].astype(jnp.float32).sum()  # noqa: E731
        found = jax.jit(jax.grad(loss))(weights)
        return {path[-1].key: np.asarray(x, np.float32) for path, x in jax.tree_util.tree_leaves_with_path(found)}

    found, wanted = gradients(compute_dtype="bfloat16", weight_dtype="bfloat16"), gradients()
    for name, gradient in wanted.items():
        if name != "bk":  # which is 0 but for rounding: attention does not change when all keys do
            assert np.linalg.norm(found[name] - gradient) <= 0.1 * np.linalg.norm(gradient), name


@pytest.mark.long
@pytest.mark.parametrize(
    ("kv_heads", "more"),
    [pytest.param(8, {}, marks=pytest.mark.slow), (4, {"attention.qk_norm": True, "attention.qk_norm_kind": "joint"})],
)
def test_padded_heads_add_nothing_and_learn_nothing(kv_heads, more, small):
    """Whatever stands in their weights: what is computed is what the other heads alone compute."""
    cfg = small(layers=1, kv_heads=kv_heads, **{"attention.qkv_bias": True}, **more).model
    padded = dataclasses.replace(cfg, padded_heads=12)
    wanted = nn.unbox(jax.eval_shape(lambda: init(cfg, jax.random.key(0))))
    rng, batch = np.random.default_rng(0), rows(cfg, np.arange(T))
    params = jax.tree.map(
        lambda x: 0.3 * rng.standard_normal(x.shape, np.float32),
        nn.unbox(jax.eval_shape(lambda: init(padded, jax.random.key(0)))),
    )
    real = jax.tree.map(lambda x, like: x[tuple(map(slice, like.shape))], params, wanted)
    assert real["layers"]["attention"]["wo"].size < params["layers"]["attention"]["wo"].size

    def of(params, cfg):
        x_BTD = hidden(cfg, params, batch)
        return jnp.sin(x_BTD).sum(), x_BTD

    run = jax.jit(jax.grad(of, has_aux=True), static_argnums=1)
    with jax.default_matmul_precision("highest"):
        (gradients, found), (real_gradients, real_found) = run(params, padded), run(real, cfg)
    np.testing.assert_allclose(found, real_found, atol=1e-5)
    for g, want in zip(jax.tree.leaves(gradients), jax.tree.leaves(real_gradients), strict=True):
        filled = np.pad(want, [(0, size - kept) for size, kept in zip(g.shape, want.shape, strict=True)])
        np.testing.assert_allclose(g, filled, atol=1e-4 * np.abs(want).max())


def test_gelu_rounds_once():
    """In bfloat16, it is as near to the normal distribution's share as its rounding lets it be."""
    x = np.linspace(-3, 3, 601).astype(jnp.bfloat16)
    exact = [float(value) * 0.5 * math.erfc(-float(value) / math.sqrt(2)) for value in x]
    slopes = [
        0.5 * math.erfc(-v / math.sqrt(2)) + v * math.exp(-v * v / 2) / math.sqrt(2 * math.pi) for v in map(float, x)
    ]
    found, slope = jax.jit(jax.vmap(jax.value_and_grad(gelu)))(x)
    np.testing.assert_allclose(np.asarray(found, np.float32), exact, rtol=2**-8, atol=1e-6)
    np.testing.assert_allclose(np.asarray(slope, np.float32), slopes, rtol=2**-8, atol=1e-6)


def test_the_arrays_with_a_row_for_each_row_of_the_batch_are_split_along_with_it():
    """The encoder output is one of them, and its segments are: cross-attention reads those of its own rows."""
    rows = Tokens(*Tokens._fields).rows
    assert {name for name, x in rows._asdict().items() if x} == {
        "positions_BT", "segments_BT", "places_BT", "keys_BT", "start_B", "length_B", "memory_BSM",
        "memory_segments_BS", "input_BTY",
    }  # fmt: skip
