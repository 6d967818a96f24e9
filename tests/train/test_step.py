"""One step against the definitions: the mean over targets, Adam by hand, the steps that are skipped, dropout's keys."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from gspmd_lm.model.families import decode
from gspmd_lm.model.loss import logits
from tests.courses import begun, trace_gradients

PEAK, WARMUP, DECAY, CLIP, B1, B2 = 1.0e-2, 5, 0.1, 0.5, 0.9, 0.95


@pytest.fixture(scope="module")
def trained(small, built):
    """A step that accumulates over microbatches, its program, and its state at step 0 on the host."""
    optimizer = {"learning_rate": PEAK, "warmup_steps": WARMUP, "weight_decay": DECAY, "clip_norm": CLIP}
    config = small(layers=1, **{"logits.z_loss": 1e-3, "logits.bias": True}, optimizer=optimizer | {"b1": B1, "b2": B2})
    step = built(config, "single", microbatches=4)
    return step, step.lower_train().compile(), jax.device_get(begun(step))


@pytest.fixture(scope="module")
def ragged(trained, batch_of):
    """A function that draws a batch whose rows, and so whose microbatches, have very different numbers of targets."""

    def make(at):
        batch = batch_of(trained[0], at)
        rows, seq = batch["targets"].shape
        kept = (np.arange(rows) % 4) ** 2 + 1  # row r is in microbatch r % 4
        return batch | {"targets": np.where(np.arange(seq) < kept[:, None], batch["targets"], -1)}

    return make


def placed(step, state):
    return jax.device_put(state, step.state_shardings, may_alias=False)  # a step uses up what it is given


def plain_loss(params, batch, cfg):
    """The mean cross-entropy and z-loss of all tokens that have a target, from all logits at once."""
    x_BTD, table, bias = decode(cfg, params, batch)
    targets, counted = batch["targets"], batch["targets"] >= 0
    logits_BTV = logits(x_BTD, table, bias, cfg)[..., : cfg.vocab]
    each = optax.softmax_cross_entropy_with_integer_labels(logits_BTV, jnp.maximum(targets, 0))
    each += cfg.logits.z_loss * jax.nn.logsumexp(logits_BTV, -1) ** 2
    return jnp.where(counted, each, 0).sum() / counted.sum()


def test_two_steps_by_hand(trained, ragged):
    """Adam (arXiv 1412.6980) with decay of matrices, on gradients that are clipped by their global norm."""
    step, program, state = trained
    moments = jax.tree.map(lambda x: (np.zeros(x.shape), np.zeros(x.shape)), state.params)
    reference = jax.jit(jax.value_and_grad(lambda params, batch: plain_loss(params, batch, step.config.model)))
    for number in (1, 2):
        batch, before = ragged(number), state.params
        with jax.default_matmul_precision("highest"):
            loss, gradients = jax.device_get(reference(before, batch))
        norm = np.sqrt(sum(np.square(g, dtype=np.float64).sum() for g in jax.tree.leaves(gradients)))
        assert norm > 1.2 * CLIP
        rate = PEAK * number / WARMUP

        def updated(path, p, g, moment, norm=norm, rate=rate, number=number):
            g = g.astype(np.float64) * CLIP / norm
            first, second = moment
            first += (1 - B1) * (g - first)
            second += (1 - B2) * (g**2 - second)
            update = first / (1 - B1**number) / (np.sqrt(second / (1 - B2**number)) + 1e-8)
            return p - rate * (update + DECAY * p * (path[-1].key not in ("scale", "unembedding_bias")))

        wanted = jax.tree_util.tree_map_with_path(updated, before, gradients, moments)
        state, values = jax.device_get(program(placed(step, state), batch))
        assert values["loss"] == pytest.approx(loss, abs=1e-5)
        assert values["gradient_norm"] == pytest.approx(norm, rel=1e-4)
        assert values["learning_rate"] == pytest.approx(rate, rel=1e-5)
        assert values["target_tokens"] == (np.asarray(batch["targets"]) >= 0).sum()
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=2e-5), state.params, wanted)
        assert state.step == number


def unfit(params, why):
    """Weights of which the loss, the gradient or both are not finite.

    The loss alone is not because of the z-loss; the gradient alone, because of a projection whose weights are 0 and
    whose input is large.
    """
    if why == "loss":
        return params | {"unembedding_bias": np.full_like(params["unembedding_bias"], 2e19)}
    attention = params["layers"]["attention"]
    large = {"wv": 1e30 * attention["wv"], "wo": np.zeros_like(attention["wo"])}
    changed = {"wo": np.full_like(attention["wo"], np.inf)} if why == "both" else large
    return params | {"layers": params["layers"] | {"attention": attention | changed}}


@pytest.mark.parametrize("why", ["loss", "gradient", "both"])
def test_a_step_that_is_not_finite_changes_nothing(trained, ragged, why):
    step, program, state = trained
    good = jax.device_get(program(placed(step, state), ragged(0))[0])  # so that moments are not 0
    spoilt = good._replace(params=unfit(good.params, why))
    for times in (1, 2):
        after, values = jax.device_get(program(placed(step, spoilt), ragged(times)))
        assert np.isfinite(values["loss"]) == (why == "gradient")
        assert np.isfinite(values["gradient_norm"]) == (why == "loss")
        jax.tree.map(np.testing.assert_array_equal, after.params, spoilt.params)
        jax.tree.map(np.testing.assert_array_equal, after.optimizer, spoilt.optimizer)
        assert (after.step, after.skipped, after.skipped_in_a_row) == (1 + times, times, times)
        assert (values["skipped_steps"], values["skipped_in_a_row"]) == (times, times)
        spoilt = after
    recovered, values = jax.device_get(program(placed(step, after._replace(params=good.params)), ragged(3)))
    assert np.isfinite(values["loss"]) and np.isfinite(values["gradient_norm"])
    assert (recovered.step, recovered.skipped, recovered.skipped_in_a_row) == (4, 2, 0)
    for tree in (recovered.params, optax.tree.get(recovered.optimizer, "mu")):
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(tree))
    assert not np.array_equal(recovered.params["embedding"], good.params["embedding"])


@pytest.mark.long
def test_gradients_of_bfloat16_weights_are_summed_in_float32(small, built, batch_of):
    """32 equal rows: the sum of as many equal gradients is exact in float32, and far off in bfloat16."""
    step = built(small(layers=1, weight_dtype="bfloat16", optimizer={"clip_norm": 0.0}), "single", microbatches=32)
    batch = {name: np.repeat(x[:1], 32, 0) for name, x in jax.device_get(batch_of(step)).items()}
    state = jax.device_get(begun(step))
    _, found = jax.device_get(trace_gradients(step).lower().compile()(placed(step, state), batch))
    params = jax.tree.map(lambda x: x.astype(np.float32), state.params)
    wanted = jax.device_get(jax.jit(jax.grad(lambda params: plain_loss(params, batch, step.config.model)))(params))
    for got, want in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
        np.testing.assert_allclose(got.astype(np.float32), want, rtol=2**-6, atol=2**-6 * np.abs(want).mean())


@pytest.mark.long
def test_dropout_differs_from_step_to_step(small, built, batch_of):
    step = built(small(layers=1, dropout=0.5), "single")
    program, state = trace_gradients(step).lower().compile(), begun(step)
    batch, losses = batch_of(step), []
    for at in (0, 1, 2, 0):
        values, _ = program(state._replace(step=np.int32(at)), batch)
        losses.append(float(values["loss"]))
    assert losses[3] == losses[0] and len(set(losses)) == 3
