"""Parts of the rows, side by side: while one part is multiplied, what another part needs is sent (arXiv 2409.15241)."""

import contextvars
from collections.abc import Generator, Sequence
from typing import Any, TypeVar

import jax

Result = TypeVar("Result")
# It yields each input that it gathers. It gets what the part before it has gathered last, which is for `after`.
Part = Generator[jax.Array, jax.Array | None, Result]


def in_turns(parts: Sequence[Part[Result]]) -> list[Result]:
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
