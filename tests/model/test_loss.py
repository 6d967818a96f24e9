"""The chunked loss against the plain formula, and its memory."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from gspmd_lm.model import loss
from gspmd_lm.sharding.annotate import Weight

B, T, D = 4, 24, 16


@functools.partial(jax.jit, static_argnums=(0, 1))
def arrays(cfg, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 4)
    x = jax.random.normal(keys[0], (B, T, D), dtype)
    table = jax.random.normal(keys[1], (cfg.vocab_rows, D))
    bias = jax.random.normal(keys[2], (cfg.vocab_rows,))
    targets = jax.random.randint(keys[3], (B, T), 0, cfg.vocab)
    likely = _logits(cfg, x, table, bias).argmax(-1)
    targets = jnp.where(jnp.arange(T) % 3 == 0, likely, targets)  # one in three is right
    # Many tokens have no target. Those of a whole row have no logit above 0 either, if there is no bias.
    return x.at[1].set(0), table, bias, targets.at[1].set(-1).at[0, :5].set(-1).at[2:, ::4].set(-1)


def chunked(cfg, x, table, bias, targets):
    weight = Weight(table, "unembedding", ("vocab", "embed"), jnp.dtype("float32"))
    held = None if bias is None else Weight(bias, "unembedding_bias", ("vocab",), jnp.dtype("float32"))
    return loss.losses(x, weight, held, targets, cfg)


def _logits(cfg, x, table, bias):
    logits = jnp.einsum("btd,vd->btv", x, table) + (0 if bias is None else bias)
    if cfg.logits.softcap:
        logits = cfg.logits.softcap * jnp.tanh(logits / cfg.logits.softcap)
    return logits[..., : cfg.vocab]


def plain(cfg, x, table, bias, targets):
    logits, counted = _logits(cfg, x, table, bias), targets >= 0
    cross_entropy = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(targets, 0))
    total = cross_entropy + cfg.logits.z_loss * jax.nn.logsumexp(logits, -1) ** 2
    correct = (logits.argmax(-1) == targets) & counted
    return jnp.where(counted, total, 0).sum(), jnp.where(counted, cross_entropy, 0).sum(), correct.sum()


OPTIONS = {"plain": {}, "capped": {"logits.softcap": 3.0}, "z": {"logits.z_loss": 0.01},
           "both": {"logits.softcap": 3.0, "logits.z_loss": 0.01}}  # fmt: skip
CHUNKS = [(24, 4), (10**6, 1)]
CASES = list(itertools.product(OPTIONS, [False, True], CHUNKS))
FIRST = ("both", False, CHUNKS[0])
# With FIRST, every pair of values of two of the three, with both options or none.
PAIRS = [("plain", True, CHUNKS[0]), ("plain", False, CHUNKS[1]), ("both", True, CHUNKS[1])]
MARKS = {case: pytest.mark.long if case in PAIRS else pytest.mark.slow for case in CASES if case != FIRST}


@pytest.mark.parametrize(
    ("options", "with_bias", "chunked_as"),
    [pytest.param(*case, marks=MARKS.get(case, ())) for case in CASES],
)
def test_sums_and_gradients_are_those_of_the_formula(options, with_bias, chunked_as, small, monkeypatch):
    chunk_tokens, chunks = chunked_as
    monkeypatch.setattr(loss, "CHUNK_TOKENS", chunk_tokens)
    cfg = small(**OPTIONS[options]).model
    x, table, bias, targets = arrays(cfg)
    bias = bias if with_bias else None
    assert loss.chunk_count(B, T) == chunks
    inputs = (x, table, bias) if with_bias else (x, table)

    def of(function):
        def half(*inputs):
            sums = function(cfg, *inputs, *(() if with_bias else (None,)), targets)[:3]
            return 0.5 * sums[0], sums

        gradients, sums = jax.jit(jax.grad(half, range(len(inputs)), has_aux=True))(*inputs)
        return np.array(sums), gradients

    alone = jax.jit(lambda *given: chunked(cfg, *given)[:3])(x, table, bias, targets)
    (sums, gradients), (wanted_sums, wanted) = of(chunked), of(plain)
    assert 0 < wanted_sums[2] < (np.asarray(targets) >= 0).sum() < B * T
    np.testing.assert_allclose(np.array(alone), wanted_sums, rtol=1e-5)
    np.testing.assert_allclose(sums, wanted_sums, rtol=1e-5)
    for got, want in zip(gradients, wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize(
    ("chunk_tokens", "rows", "length", "chunks"),
    [(7, 4, 24, 24), (24, 4, 24, 4), (25, 4, 24, 4), (23, 4, 24, 6), (96, 4, 24, 1), (95, 4, 24, 2), (1, 1, 7, 7)],
)
def test_chunks_are_equal_and_no_longer_than_they_may_be(chunk_tokens, rows, length, chunks, monkeypatch):
    monkeypatch.setattr(loss, "CHUNK_TOKENS", chunk_tokens)
    assert loss.chunk_count(rows, length) == chunks
    monkeypatch.setattr(loss, "GPU_CHUNK_TOKENS", chunk_tokens)
    monkeypatch.setattr(loss, "CHUNK_TOKENS", 1)
    monkeypatch.setattr(loss, "platform", lambda: "gpu")
    assert loss.chunk_count(rows, length) == chunks


def test_rows_of_padding_are_never_predicted(small):
    cfg = small(vocab=61, padded_vocab=64).model
    x, table, _, targets = arrays(cfg)
    loud = np.array(table)
    loud[61:] = 100.0  # would win every comparison
    sums = jax.jit(lambda table: chunked(cfg, x, table, None, targets)[:3])
    np.testing.assert_allclose(np.array(sums(loud)), np.array(sums(table)), rtol=1e-6)
    gradient = jax.jit(jax.grad(lambda table: chunked(cfg, x, table, None, targets).loss))(loud)
    assert np.all(np.asarray(gradient)[61:] == 0)


def test_the_backward_pass_waits_until_the_gradients_of_table_and_bias_are_reduced(small):
    """Without a barrier, the compiler may hold partial sums of the whole table until the optimizer reads them."""
    cfg = small().model
    x, table, bias, targets = arrays(cfg)
    lowered = jax.jit(jax.grad(lambda *given: chunked(cfg, *given, targets).loss, range(3))).lower(x, table, bias)
    (barrier,) = re.findall(r"stablehlo.optimization_barrier .* : (.*)", lowered.as_text())
    assert barrier.split(", ") == [f"tensor<{'x'.join(map(str, like.shape))}xf32>" for like in (x, table, bias)]


@pytest.mark.parametrize("layout", ["single", "fsdp8", "tp8"])
def test_memory_of_the_loss_does_not_grow_with_tokens_times_vocabulary(layout, small, built):
    """Doubling the sequence of a model whose logits would dwarf everything adds less than its logits would."""
    wide = dict(layers=1, vocab=32768, padded_vocab=0, context=8192, embed=64, head_dim=8)
    temporaries = {}
    for seq in (2048, 4096):
        step = built(small(**wide, data={"seq": seq, "batch": 8, "packing": "stream"}, train={"steps": 20}), layout)
        shapes = step.abstract_state.params
        x = jax.ShapeDtypeStruct((8, seq, 64), jnp.float32, sharding=step.placement.sharding(
            "rules", "residual", ("batch", "seq", "embed"), (8, seq, 64)))  # fmt: skip

        def forward_and_back(x, table, targets, step=step):
            from gspmd_lm.sharding.annotate import placed_by

            with placed_by(step.placement):
                return jax.grad(lambda x, t: chunked(step.config.model, x, t, None, targets).loss, (0, 1))(x, table)

        targets = step.abstract_batch["targets"]
        compiled = jax.jit(forward_and_back).lower(x, shapes["unembedding"], targets).compile()
        temporaries[seq] = compiled.memory_analysis().temp_size_in_bytes
    pieces = 1 if layout == "single" else 8
    logits_bytes = 8 * 2048 * 32768 * 4 // pieces  # of the added tokens, on one device
    activations_bytes = 8 * 2048 * 64 * 4
    growth = temporaries[4096] - temporaries[2048]
    assert growth < logits_bytes / 10 + 4 * activations_bytes, (temporaries, logits_bytes)
