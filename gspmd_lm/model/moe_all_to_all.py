"""Dispatch of tokens to the devices of their experts, and back. Each device runs this code on its own tokens."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from gspmd_lm.sharding.annotate import Split, platform
from gspmd_lm.sharding.op_names import scope


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("order_N", "place_N", "sizes_E", "to_experts", "from_experts"),
    meta_fields=("k", "rows"),
)
@dataclasses.dataclass(frozen=True)
class Routing:
    """Which experts compute the rows of a device, and on which devices. A row is a token for one of its experts."""

    k: int  # experts of a token
    order_N: jax.Array  # the rows, sorted by expert
    place_N: jax.Array  # where each of them is in that order
    rows: int  # M: the rows of the buffer of sorted rows where experts compute
    sizes_E: jax.Array  # the rows of each expert of this device
    to_experts: "Segments | None" = None  # the all-to-all of rows; None: they stay on their device
    from_experts: "Segments | None" = None  # that of their results

    def dispatch(self, x_nD: jax.Array, weights_BTk: jax.Array | None = None) -> jax.Array:
        """[M, D]: rows on the devices of their experts, sorted by expert.

        With weights, a row is multiplied by its own before it is sent.
        """
        rows_ND = x_nD[self.order_N // self.k]
        if weights_BTk is not None:
            rows_ND = (weights_BTk.reshape(-1, 1)[self.order_N] * rows_ND).astype(rows_ND.dtype)
        return self.to_experts.exchanged(rows_ND, self.rows) if self.to_experts else rows_ND[: self.rows]

    def combine(self, y_MD: jax.Array, weights_BTk: jax.Array | None = None) -> jax.Array:
        """[n, D]: for each token, the sum of its rows, weighted or not. It is the transpose of `dispatch`."""
        y_nkD = self.returned(y_MD).reshape(-1, self.k, y_MD.shape[1]).astype(jnp.float32)
        if weights_BTk is not None:
            y_nkD *= weights_BTk.reshape(-1, self.k, 1)
        return y_nkD.sum(1).astype(y_MD.dtype)

    def returned(self, y_MD: jax.Array) -> jax.Array:
        """[N, D]: rows back on the devices of their tokens, in the order of tokens."""
        y_ND = self.from_experts.exchanged(y_MD, len(self.order_N)) if self.from_experts else y_MD
        return y_ND.at[self.place_N].get(mode="fill", fill_value=0)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("starts", "sent", "targets", "received"), meta_fields=("over",)
)
@dataclasses.dataclass(frozen=True)
class Segments:
    """What a device sends and receives, one entry for each expert: arguments of `jax.lax.ragged_all_to_all`."""

    over: Split
    starts: jax.Array  # of the slices that are sent
    sent: jax.Array  # their sizes
    targets: jax.Array  # where they begin at their receivers
    received: jax.Array  # the sizes of what arrives

    def exchanged(self, rows_ND: jax.Array, size: int) -> jax.Array:
        """[size, D]: what arrives; zeros where nothing does."""
        into = jnp.zeros((size, *rows_ND.shape[1:]), rows_ND.dtype)
        with scope("rules", "dispatched"):
            exchange = _simulated if platform() == "cpu" else jax.lax.ragged_all_to_all
            segments = self.starts, self.sent, self.targets, self.received
            return exchange(rows_ND, into, *segments, axis_name=self.over.over)


def route(chosen_BTk: jax.Array, experts: int, over: Split, all_to_all: bool, capacity: int) -> Routing:
    """The routing of the tokens of a device that has `experts` experts. `over` says how all experts are split.

    Rows that no expert computes come last: their expert does not exist or, without an all-to-all, is on another device.
    With an all-to-all, the buffer has room for as many rows as may arrive, since any number of tokens may choose the
    experts of one device.
    """
    B, T, k = chosen_BTk.shape
    most = B * T * min(k, experts)  # rows of one device for the experts of another
    most = min(most, B * experts * min(T, capacity)) if capacity else most
    flat_N, all_ = chosen_BTk.reshape(-1), experts * over.num_shards
    if not all_to_all and over.num_shards > 1:
        flat_N = flat_N - experts * jax.lax.axis_index(over.over)
        flat_N = jnp.where(flat_N < 0, experts, flat_N)
    local = all_ if all_to_all else experts
    order_N = jnp.argsort(flat_N)
    sizes = (flat_N[:, None] == jnp.arange(local)).sum(0, dtype=jnp.int32)
    routing = Routing(k, order_N, jnp.argsort(order_N), most if not all_to_all else len(flat_N), sizes)
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
        """What concerns the experts of this device, by sender."""
        return jax.lax.dynamic_slice_in_dim(x_sE, device * experts, experts, 1).reshape(-1)

    to_experts = Segments(over, starts_sE[device], sizes_sE[device], targets_sE[device], mine(sizes_sE))
    from_experts = Segments(over, mine(targets_sE), mine(sizes_sE), mine(starts_sE), sizes_sE[device])
    rows, sizes_E = over.num_shards * most, totals_re[device]
    return dataclasses.replace(routing, rows=rows, sizes_E=sizes_E, to_experts=to_experts, from_experts=from_experts)


def _simulated(rows_ND, into_MD, starts, sent, targets, received, *, axis_name):
    """`jax.lax.ragged_all_to_all` for the CPU, where XLA has none (jax issue 34755): every device receives all rows."""
    all_sND, starts_s, sent_s, targets_s = (
        jax.lax.all_gather(x, axis_name) for x in (rows_ND, starts, sent, targets)
    )  # fmt: skip
    device, each = jax.lax.axis_index(axis_name), len(starts) // len(all_sND)
    first, size, at = (
        jax.lax.dynamic_slice_in_dim(x, device * each, each, 1).reshape(-1, 1) for x in (starts_s, sent_s, targets_s)
    )
    offset_gM = jnp.arange(len(into_MD)) - at  # g: the slices that arrive here
    arrives_gM = (offset_gM >= 0) & (offset_gM < size)
    source_gM = jnp.arange(len(at))[:, None] // each * rows_ND.shape[0] + first + offset_gM
    source_M = jnp.where(arrives_gM, source_gM, 0).sum(0)
    rows_MD = all_sND.reshape(-1, rows_ND.shape[1])[source_M]
    return jnp.where(arrives_gM.any(0)[:, None], rows_MD, into_MD)
