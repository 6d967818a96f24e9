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


def layer_number(module: str) -> int | None:
    """The number of a layer whose module is called as `layer_name` says; None for other modules."""
    number = module.removeprefix("layer_")
    return int(number) if module == layer_name(number) and number.isdigit() else None


def block_name(place: int) -> str:
    """The module of a layer of a turn of several, counted from 0 in the turn."""
    return f"block_{place}"


class Held(NamedTuple):
    """The layers whose weights a module holds."""

    layers: tuple[int, ...]
    stacked: bool  # whether its arrays have a first dimension for them


@functools.cache
def held_layers(cfg: config.ModelConfig) -> dict[tuple[str, ...], Held]:
    """What the modules of `addresses` hold."""
    layers: dict[tuple[str, ...], tuple[int, ...]] = {}
    stacked: dict[tuple[str, ...], bool] = {}
    for number, address in enumerate(addresses(cfg)):
        layers[address.module] = (*layers.get(address.module, ()), number)
        stacked[address.module] = address.row is not None
    return {module: Held(layers[module], stacked[module]) for module in layers}
