"""Attention and MLP side by side: both read the residual stream before either adds to it (GPT-J, Falcon, Cohere)."""

from collections.abc import Callable

import flax.linen as nn
import jax

from gspmd_lm.model.block import BLOCK_INPUT, RESIDUAL, Branch, Part, Stream
from gspmd_lm.model.norm import Change
from gspmd_lm.model.tokens import Tokens
from gspmd_lm.sharding.matmuls import gathered
from gspmd_lm.sharding.partial_sums import Unreduced


def side_by_side(
    make: Callable[[nn.Module], Branch],
    make_part: Callable[[], Part],
    make_norm: Callable[[nn.Module], Change] | None,
    module: nn.Module,
) -> Callable[[jax.Array, Tokens], Stream]:
    """A branch that adds the outputs of its own part and of another one before they are summed over devices.

    make_norm: makes the norm of the other part's input; None: it is that of the branch.
    """
    branch, part = make(module), make_part()
    before = make_norm and make_norm(module)

    def compute(x_BTD: jax.Array, tokens: Tokens) -> Stream:
        in_BTD = branch.before(x_BTD)
        other_BTD = before(x_BTD) if before else in_BTD

        def both(in_BTD: jax.Array, tokens: Tokens) -> tuple[Unreduced, Tokens]:
            y, tokens = branch.part(in_BTD, tokens)
            with gathered(other_BTD, BLOCK_INPUT, RESIDUAL) as gathered_BTD:
                more, tokens = part(gathered_BTD, tokens)
            return y + more, tokens

        return (yield from branch._replace(before=lambda _: in_BTD, part=both)(x_BTD, tokens))

    return compute
