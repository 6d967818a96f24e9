"""The remat policy: the values of a block that are kept for the backward pass, as a policy of `jax.checkpoint`."""

import functools
from collections.abc import Callable
from typing import Any

import jax

from gspmd_lm.sharding.quantised import SCALED
from gspmd_lm.sharding.rules import Rules

KEPT_WITH_DOTS = "residual", SCALED  # the names that `remat: dots` keeps besides matmuls


def kept_dots(primitive: Any, *operands: Any, mapped: int = 0, **params: Any) -> bool:
    """Whether `remat: dots` keeps the result of an operation: of a matmul that has no batch dimensions but those that
    are mapped. Of operands of 8 bits, it keeps what is scaled and cast: the result itself may be int32."""
    if primitive.name != "dot_general" or operands[0].dtype.itemsize == 1:
        return False
    _, (batch, _) = params["dimension_numbers"]
    return len(batch) == mapped


def policy(rules: Rules, mapped: int = 0) -> Callable[..., Any] | None:
    """The rules' remat policy for a block, as a policy of `jax.checkpoint`; None if nothing is recomputed.

    mapped: see `MeshPlacement`.
    """
    policies, chosen = jax.checkpoint_policies, rules.remat
    if chosen.policy == "none":
        return None
    if chosen.policy == "block":
        return policies.nothing_saveable
    if chosen.policy == "dots":
        # The partial sums of a matmul have a batch dimension, so they are not kept. Their sum is, as `residual`.
        dots = functools.partial(kept_dots, mapped=mapped)
        return policies.save_from_both_policies(dots, policies.save_only_these_names(*KEPT_WITH_DOTS))
    return policies.save_and_offload_only_these_names(
        names_which_can_be_saved=list(chosen.save),
        names_which_can_be_offloaded=list(chosen.offload),
        offload_src="device",
        offload_dst="pinned_host",
    )
