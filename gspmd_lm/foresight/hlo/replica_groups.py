"""The groups of devices that exchange data in a collective, from all forms in which programs write them."""

from __future__ import annotations

import functools
import itertools
import math
import re
from typing import TYPE_CHECKING

import numpy as np

from gspmd_lm.errors import InputError
from gspmd_lm.hardware.network import Groups

if TYPE_CHECKING:
    from gspmd_lm.foresight.hlo.instruction import Instruction

_IOTA = re.compile(r"\[([\d,]+)\](?:<=\[([\d,]+)\])?(?:T\(([\d,]+)\))?")
_MESH = re.compile(r"mesh\[([^\]]*)\](?:, device_ids=\((.*)\))? \{(.*)\}$")
_SIZE = re.compile(r"'?([^'=,\s]+)'?=(\d+)")
_AXIS = re.compile(r"'?([^',:\s]+)'?(?::\((\d+)\)(\d+))?")


def groups(instruction: Instruction, devices: int) -> Groups:
    """The groups of a collective, each in its order; for a permute, its (source, target) pairs. Raises as `read`."""
    pairs = instruction.attributes.get("source_target_pairs")
    return parse(pairs if pairs is not None else instruction.attributes.get("replica_groups", "{}"), devices)


@functools.lru_cache(maxsize=4096)
def parse(text: str, devices: int) -> Groups:
    """The groups in the text of an attribute; {} means all devices.

    Raises: InputError for a way of writing that is not known.
    """
    text = text.strip()
    if text in ("", "{}", "{{}}"):
        return (tuple(range(devices)),)
    if text.startswith("{"):
        return tuple(_numbers(group) for group in re.findall(r"\{([\d,\s]+)\}", text))
    if match := _MESH.match(text):
        return _of_mesh(*match.groups())
    if (match := _IOTA.fullmatch(text)) and match.group(2):
        return tuple(map(tuple, _iota(match).reshape(_numbers(match.group(1))).tolist()))
    raise InputError(f"replica_groups={text[:80]}: an unknown form of replica groups")


def _of_mesh(sizes: str, device_ids: str | None, axes: str) -> Groups:
    """The groups of mesh['a'=2,'b'=4] {'b'}. 'b':(2)2 is the part of b of size 2 that follows 2 parts."""
    mesh = {name: int(size) for name, size in _SIZE.findall(sizes)}
    wanted = [(name, int(before or 1), int(size or mesh[name])) for name, before, size in _AXIS.findall(axes)]
    devices = np.arange(math.prod(mesh.values()))
    if device_ids:
        iota = _IOTA.fullmatch(device_ids)
        devices = _iota(iota) if iota else np.array(_numbers(re.sub(r"[^\d,]", "", device_ids)))
    dimensions: list[tuple[str, int, int]] = []  # name, how many parts are before it, size
    for name, size in mesh.items():
        cuts = {(before, before * part) for other, before, part in wanted if other == name}
        edges = sorted({1, size}.union(*cuts))
        dimensions += [(name, low, high // low) for low, high in itertools.pairwise(edges)]
    inside = [dimensions.index(axis) for axis in wanted if axis[2] > 1]
    outside = [n for n in range(len(dimensions)) if n not in inside]
    shaped = devices.reshape([size for _, _, size in dimensions]).transpose(outside + inside)
    return tuple(map(tuple, shaped.reshape(-1, math.prod(size for _, _, size in wanted)).tolist()))


def _iota(match: re.Match) -> np.ndarray:
    """The devices of [4,2]<=[2,4]T(1,0), or of [2,4]T(1,0), in their order."""
    sizes = _numbers(match.group(2) or match.group(1))
    order = np.arange(math.prod(sizes)).reshape(sizes)
    return order.transpose(_numbers(match.group(3))) if match.group(3) else order


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.split(",") if n.strip())
