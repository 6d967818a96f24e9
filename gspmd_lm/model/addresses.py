"""Where the weights of each layer lie in the tree."""

import functools
from typing import NamedTuple

from gspmd_lm import config


class Address(NamedTuple):
    """Where the weights of a layer lie in the tree."""

    module: tuple[str, ...]  # the names from the root of the stack: ("layers", "block_1")
    row: int | None  # of arrays whose first dimension is the layers of a loop; None: they hold this layer alone


@functools.cache
def addresses(cfg: config.ModelConfig) -> tuple[Address, ...]:
    """Where each layer lies in the tree of the weights of its stack.

    The layers of a loop are stacked in arrays under the loop's name. Where a turn of the loop has several layers, each
    of them has arrays of its own. Layers that run after the loop have a module each. Layers that share their weights
    share their arrays.
    """
    found: list[Address] = []
    for stack in cfg.stacks:
        turn = len(stack.kinds)
        for i in range(stack.layers):
            if i >= stack.scanned_layers:
                found.append(Address((layer_name(stack.first + i),), None))
            else:
                row = None if cfg.shared_layers else i // turn
                found.append(Address((stack.name, *([block_name(i % turn)] if turn > 1 else [])), row))
    return tuple(found)


def layer_name(number: int | str) -> str:
    """The module of a layer that runs after a loop, counted from 0 in its stack."""
    return f"layer_{number}"


def block_name(place: int) -> str:
    """The module of a layer of a turn of several, counted from 0 in the turn."""
    return f"block_{place}"


def level_name(number: int) -> str:
    """The module of a level of a model whose layers have several widths, counted from 0."""
    return f"level_{number}"


@functools.cache
def inner_stacks(cfg: config.ModelConfig) -> dict[str, config.ModelConfig]:
    """The settings of the stacks of layers inside of a model, by the names of their modules."""
    if cfg.windows and not cfg.masks:
        return {level_name(number): level for number, level in enumerate(config.levels(cfg))}
    masks = cfg.masks and cfg.masks.of(cfg)
    inner = {"encoder": cfg.encoder_config, "vision": cfg.vision_config, "queries": cfg.queries_config, "masks": masks}
    return {name: stack for name, stack in inner.items() if stack}


class Held(NamedTuple):
    """The layers whose weights a module holds."""

    layers: tuple[int, ...]
    stacked: bool  # whether its arrays have a first dimension for them
    stack: str = ""  # the name of their stack, if it is one of `inner_stacks`


@functools.cache
def held_layers(cfg: config.ModelConfig) -> dict[tuple[str, ...], Held]:
    """The layers that each module of a model holds, by the names of the modules from the root of the model."""
    found: dict[tuple[str, ...], Held] = {}
    inner = inner_stacks(cfg)
    outer = {} if level_name(0) in inner else {"": cfg}  # all layers of a model of levels are in its levels
    for stack, own in (outer | inner).items():
        # The decoder of masks (SAM) runs its layers one by one, without a loop.
        alone = [Address((layer_name(i),), None) for i in range(own.layers)]
        for number, address in enumerate(alone if stack == "masks" else addresses(own)):
            module = (*stack.split(), *address.module)
            layers = found[module].layers if module in found else ()
            found[module] = Held((*layers, number), address.row is not None, stack)
    return found
