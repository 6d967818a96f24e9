"""How a token is chosen, against the definitions written out in numpy."""

import jax
import numpy as np
import pytest

from gspmd_lm.errors import InputError
from gspmd_lm.infer import sampling as functions
from gspmd_lm.infer.sampling import Sampling

V = 50
best, choose, filtered = (jax.jit(function) for function in (functions.best, functions.choose, functions.filter_scores))
noise = jax.jit(functions.noise, static_argnums=3)


def logits(seed=0, rows=3):
    return (3 * np.random.default_rng(seed).normal(size=(rows, V))).astype(np.float32)


def softmax(x):
    e = np.exp(x - x.max())
    return e / e.sum()


def reference(row, top_k, top_p, min_p):
    """The ids that are left, one filter after the other as transformers' warpers have it."""
    row = row.astype(np.float64)
    if top_k:
        row = np.where(row < np.sort(row)[-top_k], -np.inf, row)
    if top_p < 1:
        order = np.argsort(row)
        drop = np.cumsum(softmax(row)[order]) <= 1 - top_p
        drop[-1] = False
        row[order[drop]] = -np.inf
    if min_p:
        share = softmax(row)
        row = np.where(share < min_p * share.max(), -np.inf, row)
    return np.flatnonzero(row > -np.inf).tolist()


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [(0, 1.0, 0.0), (1, 1.0, 0.0), (7, 1.0, 0.0), (0, 0.7, 0.0), (0, 1e-6, 0.0), (0, 1.0, 0.05), (0, 1.0, 1.0),
     (9, 0.8, 0.1), (200, 0.9, 0.0)],
)  # fmt: skip
def test_filters_keep_what_the_definitions_keep(top_k, top_p, min_p):
    settings = Sampling(1.0, top_k, top_p, min_p).settings
    found = np.asarray(filtered(logits(), settings))
    for row, kept in zip(logits(), found, strict=True):
        wanted = reference(row, min(top_k, V), top_p, min_p)
        assert np.flatnonzero(kept > -np.inf).tolist() == wanted
        np.testing.assert_array_equal(kept[wanted], row[wanted])


def test_equal_scores_at_the_border_are_all_kept():
    scores = np.array([[1.0, 2.0, 2.0, 0.0]], np.float32)
    for sampling in (Sampling(1.0, top_k=1), Sampling(1.0, top_p=0.3)):
        assert np.isfinite(filtered(scores, sampling.settings)).tolist() == [[False, True, True, False]]


def test_all_of_the_probability_is_all_tokens():
    """Rounded sums of probabilities reach 1 before the last tokens: top-k 40 of logits that lie far apart."""
    scores = 10 * logits(rows=8)
    assert (np.isfinite(filtered(scores, Sampling(1.0, top_k=40).settings)).sum(-1) == 40).all()


def test_what_the_better_tokens_reach_exactly_is_enough():
    """Half of the probability is that of the best token: no other is needed to reach one half."""
    with np.errstate(divide="ignore"):
        scores = np.log(np.array([[0.25, 0.5, 0.25, 0.0]], np.float32))
    assert jax.jit(jax.nn.softmax)(scores).tolist() == [[0.25, 0.5, 0.25, 0.0]]
    for top_p, left in ((0.5, [False, True, False, False]), (0.51, [True, True, True, False])):
        assert np.isfinite(filtered(scores, Sampling(1.0, top_p=top_p).settings)).tolist() == [left]


def test_greedy_takes_the_first_best_and_says_how_far_the_next_one_is():
    choice = best(np.array([[0.0, 3.0, 1.0], [2.0, 2.0, -np.inf], [5.0, -np.inf, -np.inf]], np.float32))
    assert choice.tokens_B.tolist() == [1, 0, 0]
    assert choice.gap_B.tolist() == [2.0, 0.0, np.inf]


def test_draws_follow_the_probabilities():
    settings, rows = Sampling(temperature=2.0, top_k=4, seed=11).settings, 4000
    one = logits(rows=1)
    same = np.broadcast_to(one, (rows, V))
    choice = choose(same, settings, np.arange(rows), np.full(rows, 9))
    kept = reference(one[0], 4, 1.0, 0.0)
    share = np.bincount(np.asarray(choice.tokens_B), minlength=V) / rows
    np.testing.assert_allclose(share[kept], softmax(one[0][kept] / 2.0), atol=0.03)
    assert share[kept].sum() == pytest.approx(1)


def test_noise_depends_on_seed_number_and_position_alone():
    seed, numbers, positions = np.uint32(1), np.array([4, 5, 4]), np.array([7, 7, 8])
    together = np.asarray(noise(seed, numbers, positions, V))
    for row in range(3):
        np.testing.assert_array_equal(noise(seed, numbers[row:][:1], positions[row:][:1], V), together[row : row + 1])
    distinct = [*together, *np.asarray(noise(np.uint32(2), numbers[:1], positions[:1], V))]
    assert len({tuple(row.tolist()) for row in distinct}) == 4


def test_one_program_serves_all_settings():
    traces = []

    @jax.jit
    def run(*args):
        traces.append(args)
        return functions.choose(*args)

    places = np.arange(3), np.zeros(3, np.int32)
    greedy = run(logits(), Sampling().settings, *places)
    assert greedy.tokens_B.tolist() == logits().argmax(-1).tolist()
    for sampling in (Sampling(0.7, seed=1), Sampling(1.0, 5, 0.5, 0.1)):
        run(logits(), sampling.settings, *places)
    top = run(logits(), Sampling(5.0, top_k=1, seed=9).settings, *places)
    assert top.tokens_B.tolist() == greedy.tokens_B.tolist()
    assert len(traces) == 1


def test_values_out_of_range_are_listed():
    with pytest.raises(InputError) as caught:
        Sampling(temperature=-1.0, top_k=-1, top_p=0.0, min_p=2.0, seed=-1)
    lines = str(caught.value).split("\n")
    assert [line.split("=")[0] for line in lines[:-1]] == ["temperature", "top_k", "top_p", "min_p", "seed"]
    assert lines[-1].startswith("  fix ")
    with pytest.raises(InputError) as caught:
        Sampling("0.7", None, None, "0", "1")  # pyright: ignore[reportArgumentType]
    assert str(caught.value).split("\n")[:3] == [
        "temperature='0.7': must be a number: 0 (greedy) or above",
        "top_k=None: must be a whole number from 1, or 0 to keep all tokens",
        "top_p=None: must be a number above 0 and up to 1",
    ]
    with pytest.raises(InputError, match=r"^top_k=2\.5: must be a whole number .*\nseed=0\.5: must"):
        Sampling(temperature=1.0, top_k=2.5, seed=0.5)  # pyright: ignore[reportArgumentType]
