"""What is shown of a step of one's own, which brings its shardings: its arguments, its mesh and what it sends."""

from collections.abc import Iterator, Sequence
from typing import Any

from gspmd_lm.explore.headline import describe_memory, figure
from gspmd_lm.explore.layer import describe_transfer
from gspmd_lm.explore.views import describe_array, show_mesh
from gspmd_lm.foresight import any_step
from gspmd_lm.foresight.any_step import BuiltProgram, Program
from gspmd_lm.foresight.propagation import Reading
from gspmd_lm.foresight.table import PlacedArray
from gspmd_lm.hardware.target import Target, numbered_locations
from gspmd_lm.sharding.shapes import bytes_per_device
from gspmd_lm.units import human_bytes

NOT_KNOWN = "times, MFU and price: nothing tells them of a step of one's own before it is compiled"


def show_step(program: Program, target: Target, devices: Sequence[Any]) -> dict[str, Any]:
    """All that is shown of a step on compile-only or simulated devices of a target. Raises InputError as `explain`."""
    built = any_step.build(program, devices)
    reading = built.read()
    held_bytes = sum(map(bytes_per_device, built.arguments.values()))
    limit_bytes = target.chip.usable_hbm_bytes if target.chip else None
    sent_bytes = reading.communication_bytes
    return {
        "not_known": [NOT_KNOWN],
        "headline": {
            "figures": [figure("sent_bytes", "sent per device", sent_bytes, human_bytes(sent_bytes), kind="counted")],
            "memory": describe_memory(held_bytes, limit_bytes, {"arguments": held_bytes})
            | {"text": f"{human_bytes(held_bytes)} of arguments"},
            "exposed": [],
        },
        "mesh": show_mesh(built.mesh.shape, numbered_locations(built.mesh)),
        "arrays": list(_arrays(built)),
        "layer": _layer(reading),
    }


def _arrays(built: BuiltProgram) -> Iterator[dict[str, Any]]:
    for path, like in built.arguments.items():
        axes, split = tuple(f"dimension_{n}" for n in range(len(like.shape))), tuple(map(tuple, any_step.split(like)))
        array = PlacedArray(path, axes, like.shape, split, split, bytes_per_device(like), str(like.dtype))
        yield describe_array(array, "weights")


def _layer(reading: Reading) -> dict[str, Any]:
    """What the step sends, in its order, after the parts of the step that send it."""
    blocks: list[dict[str, Any]] = []
    collectives = []
    for one in reading.transfers:
        phase = "backward" if one.phase in ("backward", "recomputation") else "forward"
        block = {"name": one.array or "step", "phase": phase, "ops": []}
        if block not in blocks:
            blocks.append(block)
        words = describe_transfer(one, one.array or "step", [])
        collectives.append({**words, "phase": phase, "after": blocks.index(block), "array": None})
    return {"blocks": blocks, "collectives": collectives}
