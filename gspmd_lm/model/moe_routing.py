"""Which rows experts compute, on which devices, and in which rounds. A row is a token for one of its experts.

Nobody knows before a step how many tokens choose the experts of one device, and none is dropped. So where tokens
travel, a device has a buffer for some multiple of the mean number of rows. Rows beyond it arrive in further rounds, of
which there are as many as the fullest device needs.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from gspmd_lm.config import ModelConfig
from gspmd_lm.sharding.annotate import Split
from gspmd_lm.sharding.op_names import scope
from gspmd_lm.sharding.permutes import Segments, largest_anywhere

ARRAY = "dispatched"  # what is sent, as rules and remat policies call it


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Slices:
    """For each of several experts, a slice of the rows that one device sends to another."""

    at_sender_E: jax.Array  # where they begin among the sorted rows of the sender
    at_receiver_E: jax.Array  # and at the receiver, if its buffer had room for all
    sizes_E: jax.Array


@dataclasses.dataclass(frozen=True)
class Round:
    """The rows that experts compute at once."""

    shape: tuple[int, int]  # N, M: the sorted rows of a device, and those of the buffer where experts compute
    sizes_E: jax.Array  # the rows of each expert of this device
    to_experts: Segments | None = None  # the all-to-all of rows; None: they stay on their device
    from_experts: Segments | None = None  # that of their results

    def dispatch(self, rows_ND: jax.Array) -> jax.Array:
        """[M, D]: the rows of this round on the devices of their experts, sorted by expert."""
        N, M = self.shape
        assert len(rows_ND) == N
        return self.to_experts.exchange_rows(rows_ND, _zeros(M, rows_ND), ARRAY) if self.to_experts else rows_ND[:M]

    def send_back(self, y_MD: jax.Array, into_ND: jax.Array | None = None) -> jax.Array:
        """[N, D]: results back on the devices of their tokens; where this round has none, what is in `into_ND`."""
        if not self.from_experts:
            return y_MD
        into_ND = _zeros(self.shape[0], y_MD) if into_ND is None else into_ND
        return self.from_experts.exchange_rows(y_MD, into_ND, ARRAY)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Routing:
    """The routing of the tokens of a device."""

    k: int = dataclasses.field(metadata={"static": True})  # experts of a token
    order_N: jax.Array  # the rows, sorted by expert
    place_N: jax.Array  # where each of them is in that order
    rows: int = dataclasses.field(metadata={"static": True})  # M: of the buffer of sorted rows where experts compute
    sizes_E: jax.Array  # the rows of each expert of this device, in all rounds
    rounds: jax.Array  # int32, [1]: the same on all devices
    has_rounds: bool = dataclasses.field(default=False, metadata={"static": True})  # whether there may be several
    over: Split = dataclasses.field(default=Split(), metadata={"static": True})  # the devices that share the experts
    sent: Slices | None = None  # from this device to the experts of all devices; None: rows stay on their device
    received: Slices | None = None  # from all devices to the experts of this one

    def sort_rows(self, x_nD: jax.Array, weights_BTk: jax.Array | None = None) -> jax.Array:
        """[N, D]: the rows of tokens, sorted by expert. With weights, a row is multiplied by its own."""
        rows_ND = x_nD[self.order_N // self.k]
        if weights_BTk is not None:
            rows_ND = (weights_BTk.reshape(-1, 1)[self.order_N] * rows_ND).astype(rows_ND.dtype)
        return rows_ND

    def combine(self, y_ND: jax.Array, weights_BTk: jax.Array | None = None) -> jax.Array:
        """[n, D]: for each token, the sum of its rows, weighted or not. It is the transpose of `sort_rows`."""
        y_nkD = self.in_order_of_tokens(y_ND).reshape(-1, self.k, y_ND.shape[1]).astype(jnp.float32)
        if weights_BTk is not None:
            y_nkD *= weights_BTk.reshape(-1, self.k, 1)
        return y_nkD.sum(1).astype(y_ND.dtype)

    def in_order_of_tokens(self, y_ND: jax.Array) -> jax.Array:
        """[N, D]: sorted rows in the order of tokens; zeros for those that no expert has computed."""
        return y_ND.at[self.place_N].get(mode="fill", fill_value=0)

    def round(self, number: jax.Array | int) -> Round:
        """The round of that number, from 0: the rows whose indices at their receivers are in its part of them."""
        shape = len(self.order_N), self.rows
        if self.sent is None or self.received is None:
            return Round(shape, self.sizes_E)
        begin, M = number * self.rows, self.rows

        def within(starts: jax.Array, sizes: jax.Array) -> tuple[jax.Array, jax.Array]:
            """The rows of each slice that lie before the round, and those in it: how many."""
            skipped = jnp.clip(begin - starts, 0, sizes)
            return skipped, jnp.clip(begin + M - starts, 0, sizes) - skipped

        def cut(slices: Slices) -> tuple[jax.Array, jax.Array, jax.Array]:
            skipped, sizes = within(slices.at_receiver_E, slices.sizes_E)
            at_receiver = jnp.clip(slices.at_receiver_E + skipped - begin, 0, M)
            return slices.at_sender_E + skipped, at_receiver, sizes

        from_, to, sent = cut(self.sent)
        theirs, mine, received = cut(self.received)
        _, sizes_E = within(jnp.cumsum(self.sizes_E) - self.sizes_E, self.sizes_E)
        to_experts = Segments(self.over, from_, sent, to, received)
        return Round(shape, sizes_E, to_experts, Segments(self.over, mine, received, theirs, sent))

    def other_rounds(self, add: Callable[[Round, Any, Any], Any], added: Any, given: Any) -> Any:
        """`added` by the first round, after `add` has added to it what each of the other rounds gives.

        given: what rounds read. Nothing is made of it where there is one round.
        """
        if not self.has_rounds:
            return added

        def body(carried: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
            # What no round changes would be computed before the loop, in vain where there is one round.
            number, inputs = jax.lax.optimization_barrier((carried[0], given))
            return number + 1, add(self.round(number), carried[1], inputs)

        with scope("turns", "0"):
            return jax.lax.while_loop(lambda carried: carried[0] < self.rounds[0], body, (jnp.int32(1), added))[1]


def route(chosen_BTk: jax.Array, experts: int, over: Split, all_to_all: bool, capacity: int, buffer: float) -> Routing:
    """The routing of the tokens of a device that has `experts` experts. `over` says how all experts are split.

    Rows that no expert computes come last: their expert does not exist or, without an all-to-all, is on another device.
    buffer: with an all-to-all, the room for what arrives at a device in one round, in multiples of the mean number of
    rows; 0: any number has room.
    """
    B, T, k = chosen_BTk.shape
    flat_N, all_ = chosen_BTk.reshape(-1), experts * over.num_shards
    if not all_to_all and over.num_shards > 1:
        flat_N = flat_N - experts * jax.lax.axis_index(over.over)
        flat_N = jnp.where(flat_N < 0, experts, flat_N)
    local = all_ if all_to_all else experts
    order_N = jnp.argsort(flat_N)
    sizes = (flat_N[:, None] == jnp.arange(local)).sum(0, dtype=jnp.int32)
    rows = buffer_rows(B, T, k, experts, 1, capacity) if not all_to_all else len(flat_N)
    routing = Routing(k, order_N, jnp.argsort(order_N), rows, sizes, jnp.ones(1, jnp.int32))
    if not all_to_all or over.num_shards == 1:
        return routing
    device = jax.lax.axis_index(over.over)
    sizes_sE = jax.lax.all_gather(sizes, over.over)  # s: the device that sends
    before_sE = jnp.cumsum(sizes_sE, 0) - sizes_sE  # what earlier devices send to the same expert
    starts_sE = jnp.cumsum(sizes_sE, 1) - sizes_sE
    totals_re = sizes_sE.sum(0).reshape(over.num_shards, experts)  # r: the device that receives
    first_E = (jnp.cumsum(totals_re, 1) - totals_re).reshape(-1)  # where the rows of an expert begin at its device
    targets_sE = first_E + before_sE

    def mine(x_sE: jax.Array) -> jax.Array:
        """The part of a table that concerns the experts of this device, by sender."""
        return jax.lax.dynamic_slice_in_dim(x_sE, device * experts, experts, 1).reshape(-1)

    rows, most = (buffer_rows(B, T, k, experts, over.num_shards, capacity, one) for one in (buffer, 0.0))
    if rows < most:
        fullest = largest_anywhere(totals_re.sum(1).max())  # a loop has as many turns on all devices
        rounds = jnp.maximum(-(-fullest // rows), 1).reshape(1)
        routing = dataclasses.replace(routing, rounds=rounds, has_rounds=True)
    return dataclasses.replace(
        routing,
        rows=rows,
        sizes_E=totals_re[device],
        over=over,
        sent=Slices(starts_sE[device], targets_sE[device], sizes_sE[device]),
        received=Slices(mine(starts_sE), mine(targets_sE), mine(sizes_sE)),
    )


def capacity(model: ModelConfig, length: int) -> int:
    """The most tokens of a row of `length` tokens that an expert computes; 0 if there is no limit."""
    return math.ceil(model.moe.capacity_factor * length * model.moe.per_token / model.num_experts)


def buffer_rows(B: int, T: int, k: int, experts: int, devices: int, capacity: int = 0, buffer: float = 0.0) -> int:
    """The rows of the buffer of a device that has `experts` experts, for B x T tokens on each of so many devices.

    No more may arrive than each device has for these experts. buffer: see `route`.
    """
    most = B * T * min(k, experts)
    most = devices * (min(most, B * experts * min(T, capacity)) if capacity else most)
    return min(most, math.ceil(buffer * B * T * k)) if buffer else most


def _zeros(rows: int, like_MD: jax.Array) -> jax.Array:
    return jnp.zeros((rows, *like_MD.shape[1:]), like_MD.dtype)
