"""Packed documents as cuDNN takes them: where each begins and how long it is, for a fixed number of them in one call.

The number of documents in a call is fixed when it is compiled, and that of a batch depends on its data. So a loop calls
until all documents are computed. It calls once unless documents are short. Where rows have one text each, there is no
loop: before each of its turns, a GPU would wait for the host.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gspmd_lm.sharding.op_names import scope

# The documents of a row that one call computes: one for so many tokens. Backward, a call holds float32 gradients of all
# queries of a row for each document. More calls only join more results.
TOKENS_OF_ONE = 512
FEWEST, MOST = 2, 32  # a row of one text has two documents: the text and its padding


class Ranges(NamedTuple):
    """Tokens of rows [B, T] that belong to D documents. int32; tokens are counted through all rows."""

    mine_BT: jax.Array | None  # whether a token belongs to one of them; None: all do
    of_BT: jax.Array  # the number of its document
    place_BT: jax.Array  # its position in the document
    begins: jax.Array  # [D + 1]: the first token of each; of what comes after the last one: B * T
    lengths: jax.Array  # [D]: 0 for a document that does not exist


class CallRanges(NamedTuple):
    """The documents of one call."""

    queries: Ranges
    keys: Ranges


class Documents(NamedTuple):
    """All documents of rows, which are counted through all rows; see `Ranges`."""

    of_BT: jax.Array
    place_BT: jax.Array
    begins: jax.Array
    total: jax.Array | None  # None: there are no more than one call has room for
    numbers: tuple[jax.Array, jax.Array] | None  # segments of queries and of keys, where these are other tokens


def runs(segments_BT: jax.Array, key_segments_BS: jax.Array | None = None, one_text: bool = False) -> Documents:
    """The documents of rows: runs of equal segments. Padding is one too, so every token belongs to one.

    key_segments_BS: of keys that are other tokens than the queries. In a row, a run of each side has a number once.
    one_text: a row is one text, with padding on one side of it.
    """
    B, T = segments_BT.shape
    change_BT = jnp.pad(segments_BT[:, 1:] != segments_BT[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    of_BT = jnp.cumsum(change_BT.ravel(), dtype=jnp.int32).reshape(B, T) - 1
    size = _at_once(B, T) + 1 + (0 if one_text else B * T)
    begins = jnp.nonzero(change_BT.ravel(), size=size, fill_value=B * T)[0].astype(jnp.int32)
    place_BT, total = _number_tokens(B, T) - begins[of_BT], None if one_text else of_BT[-1, -1] + 1
    numbers = None if key_segments_BS is None else (segments_BT, key_segments_BS)
    return Documents(of_BT, place_BT, begins, total, numbers)


def shared_documents(segments_BT: jax.Array, key_segments_BS: jax.Array) -> CallRanges:
    """The documents that queries share with keys before them: of each row, the last one of the keys, or none."""
    B = len(segments_BT)
    goes_on_B1 = segments_BT[:, :1] == key_segments_BS[:, -1:]
    first_BT = jnp.cumprod(segments_BT == segments_BT[:, :1], axis=1) * goes_on_B1
    last_BS = jnp.cumprod((key_segments_BS == key_segments_BS[:, -1:])[:, ::-1], axis=1)[:, ::-1] * goes_on_B1

    def ranges(mine_BT: jax.Array) -> Ranges:
        T, lengths_B = mine_BT.shape[1], mine_BT.sum(1, dtype=jnp.int32)
        begins_B = jnp.arange(B, dtype=jnp.int32) * T + jnp.argmax(mine_BT, axis=1).astype(jnp.int32)
        of_BT = jnp.broadcast_to(jnp.arange(B, dtype=jnp.int32)[:, None], mine_BT.shape)
        # cuDNN's call is for two documents of a row at least.
        begins = jnp.pad(begins_B, (0, B + 1), constant_values=B * T)
        place_BT = _number_tokens(B, T) - begins_B[:, None]
        return Ranges(mine_BT > 0, of_BT, place_BT, begins, jnp.pad(lengths_B, (0, B)))

    return CallRanges(ranges(first_BT), ranges(last_BS))


def each(packed: Documents | CallRanges, add: Callable[[Any, CallRanges], Any], results: Any) -> Any:
    """`results` after `add` was called for each part of the documents."""
    if isinstance(packed, CallRanges):
        return add(results, packed)
    at_once, total = _at_once(*packed.of_BT.shape), packed.total

    def part(first: jax.Array | int, mine_BT: jax.Array | None) -> CallRanges:
        begins = jax.lax.dynamic_slice_in_dim(packed.begins, first, at_once + 1)
        ranges = Ranges(mine_BT, packed.of_BT - first, packed.place_BT, begins, jnp.diff(begins))
        return CallRanges(ranges, ranges) if packed.numbers is None else _with_keys(ranges, *packed.numbers)

    if total is None:
        return add(results, part(0, None))

    def body(state: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
        first, results = state
        mine_BT = (packed.of_BT >= first) & (packed.of_BT < first + at_once)
        return first + at_once, add(results, part(first, mine_BT))

    with scope("turns", "1"):
        return jax.lax.while_loop(lambda state: state[0] < total, body, (jnp.int32(0), results))[1]


def _with_keys(queries: Ranges, numbers_BT: jax.Array, numbers_BS: jax.Array) -> CallRanges:
    """The documents of a call with the keys that have their numbers. A document without a key is left out."""
    (B, S), (T, D) = numbers_BS.shape, (numbers_BT.shape[1], len(queries.lengths))
    begins_D = jnp.minimum(queries.begins[:-1], B * T - 1)  # of one that does not exist: any token
    row_D, number_D = begins_D // T, numbers_BT.ravel()[begins_D]
    of_DS = (numbers_BS[row_D] == number_D[:, None]) & (queries.lengths > 0)[:, None]
    lengths_D, first_D = of_DS.sum(1, dtype=jnp.int32), row_D * S + jnp.argmax(of_DS, axis=1).astype(jnp.int32)
    of_BS = jnp.full((B, S), D, jnp.int32).at[row_D].min(jnp.where(of_DS, jnp.arange(D, dtype=jnp.int32)[:, None], D))
    begins = jnp.pad(first_D, (0, 1), constant_values=B * S)
    keys = Ranges(of_BS < D, of_BS, _number_tokens(B, S) - begins[of_BS], begins, lengths_D)
    reads_D = lengths_D > 0
    mine_BT = reads_D[jnp.clip(queries.of_BT, 0, D - 1)]
    if queries.mine_BT is not None:
        mine_BT &= queries.mine_BT
    return CallRanges(queries._replace(mine_BT=mine_BT, lengths=jnp.where(reads_D, queries.lengths, 0)), keys)


def _at_once(B: int, T: int) -> int:
    """The documents that one call computes, of rows [B, T]."""
    return B * min(max(FEWEST, T // TOKENS_OF_ONE), MOST)


def _number_tokens(B: int, T: int) -> jax.Array:
    """[B, T]: the number of each token, counted through all rows."""
    return jnp.arange(B * T, dtype=jnp.int32).reshape(B, T)
