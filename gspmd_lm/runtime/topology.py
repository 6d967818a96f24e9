"""Where the processes of a run stand: their hosts, their chips and their slices."""

from collections.abc import Sequence
from typing import Any

from gspmd_lm.units import plural


def describe_process(number: int, host: str, devices: Sequence[Any]) -> str:
    """A line about a process and its own devices: 'process 1 on b: 4 TPU v5e devices, slice 0, at (2,0) to (3,1)'.

    Slices and coordinates are left out where devices have none, as simulated devices and GPUs.
    """
    line = f"process {number} on {host}: {plural(len(devices), f'{devices[0].device_kind} device')}"
    places = sorted({place for device in devices if (place := _place(device))})
    if not places:
        return line
    slices = ", ".join(map(str, dict.fromkeys(place[0] for place in places)))
    chips = [f"({','.join(map(str, reversed(place[1:])))})" for place in dict.fromkeys((places[0], places[-1]))]
    return f"{line}, slice {slices}, at {' to '.join(chips)}"


def describe_order(devices: Sequence[Any]) -> str:
    """A sentence about hosts that are not numbered as they stand in the topology; '' where they are.

    devices: of all processes.
    """
    first: dict[int, tuple[int, ...]] = {}
    for device in devices:
        if place := _place(device):
            first[device.process_index] = min(place, first.get(device.process_index, place))
    standing = sorted(first, key=lambda number: first[number])
    moved = [(number, found) for number, found in zip(sorted(first), standing, strict=True) if number != found]
    if not moved:
        return ""
    number, found = moved[0]
    return (
        f"note: the hosts are not numbered in the order of the topology, in which process {found} stands where process "
        f"{number} was expected; the mesh follows the topology"
    )


def _place(device: Any) -> tuple[int, ...]:
    """The slice of a chip and its coordinates, of which the first one varies fastest; () where it has none."""
    coordinates = getattr(device, "coords", None)
    return (getattr(device, "slice_index", None) or 0, *reversed(coordinates)) if coordinates else ()
