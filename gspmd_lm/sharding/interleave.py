"""Parts of the rows, side by side: while one part is multiplied, what another part needs is sent (arXiv 2409.15241)."""

import contextvars
from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from einops import rearrange

from gspmd_lm.sharding.annotate import placement, shard
from gspmd_lm.sharding.matmuls import sharing_weights

Result = TypeVar("Result")
Facts = TypeVar("Facts")
# The computation of one part. It yields each input that it gathers, and gets what the part before it has gathered last,
# which is for `after`.
Turns = Generator[jax.Array, jax.Array | None, Result]


def interleave(
    compute: Callable[[jax.Array, Facts], Turns[tuple[jax.Array, Facts]]],
    x: jax.Array,
    facts: Facts,
    of_rows: Facts | None,
    spec: str,
) -> tuple[jax.Array, Facts]:
    """The result of `compute(x, facts)`, with the rows of `x` interleaved in as many parts as the rules say.

    of_rows: the arrays of `facts` that have a row for each row of `x`, which is all that a part is given of them; None:
    the rows are not interleaved. spec: that of `x`. If there are several parts, `facts` come back as they are.
    """
    parts = placement().setting("interleave") if of_rows is not None and x.shape[0] > 1 else 1
    if parts == 1:
        return in_turns([compute(x, facts)])[0]
    # No row moves: each device has rows of every part.
    rows = jax.tree.map(lambda x: rearrange(x, "(b p) ... -> p b ...", p=parts), (x, of_rows))
    with sharing_weights():
        each = [jax.tree.map(lambda x, i=i: x[i], rows) for i in range(parts)]
        ends = in_turns([compute(shard(x, spec), of_part) for x, of_part in each])
    x = jnp.stack([x for x, _ in ends])
    return shard(rearrange(x, "p b ... -> (b p) ..."), spec), facts


def in_turns(parts: Sequence[Turns[Result]]) -> list[Result]:
    """The results of `parts`. In its turn, a part goes on until it gathers its next input.

    Each part makes its next sum over devices `after` the last gather of the part before it. Links then carry gathers
    and sums in the order of the turns, and each is sent while another part is multiplied. Left alone, XLA joins the
    norms of all parts, which then wait for the last sum, and no part can be multiplied while that sum is sent.
    """
    contexts = [contextvars.copy_context() for _ in parts]  # the inputs that a part has gathered are its own
    gathered: list[jax.Array | None] = [context.run(next, part) for context, part in zip(contexts, parts, strict=True)]
    results: dict[int, Result] = {}
    while len(results) < len(parts):
        for i, part in enumerate(parts):
            if i not in results:
                try:
                    gathered[i] = contexts[i].run(part.send, gathered[i - 1] if len(parts) > 1 else None)
                except StopIteration as stop:
                    results[i], gathered[i] = stop.value, None
    return [results[i] for i in range(len(parts))]


def after(x: Any, gathered: jax.Array | None) -> Any:
    """`x`, one or several arrays, which the compiler makes once it has `gathered`. Gradients wait for nothing."""
    return x if gathered is None else _after(x, jax.lax.stop_gradient(gathered))


@jax.custom_vjp
def _after(x: Any, gathered: jax.Array) -> Any:
    return jax.lax.optimization_barrier((x, gathered))[0]


_after.defvjp(lambda x, gathered: (_after(x, gathered), None), lambda _, dx: (dx, None))
