"""What a program must read of its arguments, and write in their place: no more than a compiler can leave out."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from gspmd_lm.foresight.propagation import read_step
from gspmd_lm.foresight.propagation.arguments import Share, needed_shares

X = jax.ShapeDtypeStruct((8, 64), jnp.float32)
X_BYTES, ROW_BYTES, SCALAR_BYTES = 4 * 8 * 64, 4 * 64, 4


def reverse_twice(x):
    """A program in a program."""
    return jax.jit(lambda x: x.T)(jax.jit(lambda x: x[::-1])(x).T)


def halves_in_turn(x):
    """Each iteration makes another half of what it carries."""
    return lax.scan(lambda x, _: (jnp.concatenate([x[4:], x[:4] * 2]), None), x, length=2)[0]


def sum_until(x):
    return lax.while_loop(lambda state: state[1] < 9, lambda state: (state[0], state[1] + state[0].sum()), (x, 0.0))[1]


READ = {
    "all of it": (lambda x: x * 2, 1),
    "a part": (lambda x: x[2:4] * 2, 1 / 4),
    "a part of what is computed of it": (lambda x: jnp.tanh(x)[:, :16], 1 / 4),
    "one of several parts": (lambda x: jnp.split(x, 8)[3] * 2, 1 / 8),
    "several parts": (lambda x: sum(jnp.split(x, 8)[3:5]), 1 / 4),
    "a row": (lambda x: jnp.unstack(x)[1] * 2, 1 / 8),
    "a part of a view": (lambda x: x.reshape(8, 4, 16)[:, 3] * 2, 1 / 4),
    "a part of a transposed view": (lambda x: x.T.reshape(16, 4, 8)[:4].sum(), 1 / 4),
    "the larger of two parts": (lambda x: x[:2].sum() + x[1:5].sum(), 1 / 2),
    "a part of a product": (lambda x: (x @ jnp.ones((64, 64)))[:2], 1 / 4),
    "all of a view": (lambda x: jnp.squeeze(x[None].transpose(0, 2, 1)) * 2, 1),
    "rows that are looked up": (lambda x: x[jnp.array([1, 5, 5])], 0),
    "what is cut off": (lambda x: lax.pad(x, 0.0, ((-4, 0, 0), (0, 0, 0))), 0),
    "all, beside others": (lambda x: jnp.concatenate([x, x]), 1),
    "perhaps the others": (lambda x: jnp.concatenate([x, jnp.ones((8, 64))])[8:], 0),
    "what functions read": (reverse_twice, 1),
    "a part in each iteration": (lambda x: lax.scan(lambda c, i: (c + x[i], None), x[0], jnp.arange(8))[0], 1 / 8),
    "what a loop begins with": (lambda x: lax.scan(lambda x, _: (x * 2, None), x, length=3)[0], 1),
    "what a loop takes apart": (lambda x: lax.scan(lambda c, x: (c + x, None), jnp.ones(64), x)[0], 1),
    "what a loop begins with and leaves": (
        lambda x: lax.scan(lambda _, row: (row, None), x[0], jnp.ones((3, 64)))[0],
        0,
    ),
    "what each iteration leaves in part": (halves_in_turn, 0),
    "what a loop of unknown length reads": (sum_until, 1),
    "what all branches read": (lambda x: lax.cond(x[0, 0] > 0, lambda: x[:2] * 2, lambda: x[4:6] * 3), 1 / 4),
    "what one of the branches reads": (
        lambda x: lax.cond(jnp.arange(2)[0] > 0, lambda: x * 2, lambda: jnp.ones((8, 64))),
        0,
    ),
    "what a loop that does not run would read": (
        lambda x: lax.scan(lambda c, _: (c + x.sum(), None), 0.0, length=0)[0],
        0,
    ),
    "what is sorted along with keys and not read": (lambda x: lax.sort((jnp.ones((8, 64)), x), num_keys=1)[0], 0),
    "what is printed": (lambda x: jax.debug.print("{x}", x=x), 1),
}


@pytest.mark.parametrize("name", READ)
def test_the_share_of_an_argument_that_is_read(name):
    function, share = READ[name]
    jaxpr = jax.make_jaxpr(function)(X).jaxpr
    assert [one.read for one in needed_shares(jaxpr, [Share(0.0, 1.0)] * len(jaxpr.outvars))] == [share]


def set_row(cache, row, at):
    return lax.dynamic_update_slice(cache, row[None], (at, 0))


def set_rows(cache, row, at):
    return lax.while_loop(lambda state: state[1] < at, lambda s: (set_row(s[0], row, s[1]), s[1] + 1), (cache, 0))[0]


def set_three(cache, row, at):
    return lax.fori_loop(jnp.int32(0), jnp.int32(3), lambda n, cache: set_row(cache, row, n + at), cache)


def set_in_view(cache, row, at):
    return cache.reshape(2, 4, 64).at[:, at].set(row).reshape(8, 64)


def set_if_asked(cache, row, at):
    return lax.cond(at > 0, lambda: set_row(cache, row, at), lambda: cache.at[:2].set(row))


def set_in_one_branch(cache, row, at):
    return lax.cond(at > 0, lambda: set_row(cache, row, at), lambda: cache * 2)


def set_under_a_name(cache, row, at):
    return checkpoint_name(set_row(cache, row, at), "cache")


def set_very_often(cache, row, at):
    for _ in range(1100):  # more often than functions may call each other
        cache = set_row(cache, row, at)
    return cache


CHANGED = {  # the bytes that are read besides the place, and those that are written
    "handed on": (lambda cache, row, at: (cache, row, at), -SCALAR_BYTES, 0),
    "in another shape": (lambda cache, row, at: (cache.T, at + 1), X_BYTES, X_BYTES + SCALAR_BYTES),
    "a row": (set_row, ROW_BYTES, ROW_BYTES),
    "at least one": (set_rows, ROW_BYTES, ROW_BYTES),
    "as often as a loop runs": (set_three, ROW_BYTES, 3 * ROW_BYTES),
    "in a view": (set_in_view, ROW_BYTES, 2 * ROW_BYTES),
    "where it is computed": (lambda x, row, at: set_row(x * 2, row, at), X_BYTES * 7 / 8 + ROW_BYTES, X_BYTES),
    "several times": (lambda *args: set_row(set_row(*args), *args[1:]), ROW_BYTES, 2 * ROW_BYTES),
    "in the branch that sets least": (set_if_asked, ROW_BYTES, ROW_BYTES),
    "under a name": (set_under_a_name, ROW_BYTES, ROW_BYTES),
    "as a whole, at most": (set_very_often, ROW_BYTES, X_BYTES),
    "in one branch": (set_in_one_branch, 0, ROW_BYTES),
}


@pytest.mark.parametrize("name", CHANGED)
def test_what_is_written_of_an_argument_that_is_changed(name):
    function, read_bytes, written_bytes = CHANGED[name]
    row, at = jax.ShapeDtypeStruct((64,), jnp.float32), jax.ShapeDtypeStruct((), jnp.int32)
    found = read_step(jax.make_jaxpr(function)(X, row, at))
    assert found.held_bytes == SCALAR_BYTES + read_bytes + written_bytes
