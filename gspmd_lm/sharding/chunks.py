"""Parts of a batch: chunks of sequences, which a loop computes, and parts of the rows, which go on in turns."""

import contextvars
import math
from collections.abc import Generator, Sequence
from typing import Any, TypeVar

import jax
from einops import rearrange

from gspmd_lm.sharding.annotate import placement

# Chunks of sequences. Where rules split sequences, a chunk has an equal part of each shard.


def count(rows: int, length: int, tokens: int) -> int:
    """The number of equal chunks into which sequences are cut. A device has at most `tokens` tokens of each."""
    most = length // _shards(length)
    shared = placement().num_shards("logits", "batch") * min(placement().num_shards("logits", "seq"), length)
    wanted = -(-rows * length // (shared * tokens))
    return next((n for n in range(wanted, most) if most % n == 0), most)


def split(x: jax.Array, chunks: int) -> jax.Array:
    """[B, T, ...] as [chunks, B, T / chunks, ...]."""
    return rearrange(x, "B (P C T) ... -> C B (P T) ...", C=chunks, P=_shards(x.shape[1]))


def join(x: jax.Array) -> jax.Array:
    """The inverse of `split`: [chunks, ..., T / chunks, D] as [..., T, D]."""
    length = x.shape[0] * x.shape[-2]
    return rearrange(x, "C ... (P T) D -> ... (P C T) D", P=_shards(length))


def _shards(length: int) -> int:
    """The number of equal shards into which the rules split the sequence of the logits, and of what they are made of.

    A loop cuts each shard further. Rules that split the sequence unequally are refused. For them there is one shard per
    token, so that nothing is cut.
    """
    shards = math.lcm(placement().num_shards("logits", "seq"), placement().num_shards("block_input", "seq"))
    return length if length % shards else shards


# Parts of the rows, side by side: while one part is multiplied, what another part needs is sent (arXiv 2409.15241).

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
