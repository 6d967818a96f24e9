"""The blocks of an array on a mesh, against jax's own account of which device holds what."""

import io
import itertools

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rich.console import Console

from gspmd_lm.show import blocks
from tests.reader import Reader

SHAPE, AXES = (8, 4, 16), ("layers", "seq", "embed")
MESHES = [
    {"data": 8},
    {"fsdp": 2, "tensor": 4},
    {"stage": 2, "fsdp": 2, "tensor": 2},
    {"tensor": 4, "fsdp": 1, "data": 2},
]


def splits(mesh):
    """Every way to give each mesh axis to one dimension, or to none."""
    for at in itertools.product([None, 0, 1, 2], repeat=len(mesh)):
        spec = [tuple(name for name, d in zip(mesh, at, strict=True) if d == n) for n in range(3)]
        pieces = [int(np.prod([mesh[name] for name in names])) for names in spec]
        if all(size % count == 0 for size, count in zip(SHAPE, pieces, strict=True)):
            yield tuple(spec)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_devices_hold_what_jax_gives_them(mesh):
    """Devices stand in one block if jax gives them the same part, and blocks are in the order of these parts."""
    devices = jax.devices()[:8]
    of_jax = Mesh(np.array(devices).reshape(*mesh.values()), tuple(mesh))
    number = {device: n for n, device in enumerate(devices)}
    for spec in splits(mesh):
        parts = {}
        for device, index in NamedSharding(of_jax, PartitionSpec(*spec)).devices_indices_map(SHAPE).items():
            parts.setdefault(tuple(one.start or 0 for one in index), []).append(number[device])
        cut = blocks.cut_array(AXES, SHAPE, spec, mesh)
        held = [tuple(sorted(one)) for row in cut.devices for one in row]
        assert held == [tuple(sorted(parts[start])) for start in sorted(parts)], spec
        assert cut.copies == len(held[0]) and cut.size[0] * cut.size[1] == len(parts)
        assert cut.shape == tuple(
            n // m for n, m in zip(SHAPE, [np.prod([mesh[x] for x in s]) for s in spec], strict=True)
        )


def test_the_order_of_mesh_axes_in_a_split_counts():
    mesh = {"fsdp": 2, "tensor": 2}
    orders = [(("tensor", "fsdp"),), (("fsdp", "tensor"),)]
    first, second = (blocks.cut_array(("embed",), (8,), spec, mesh).devices for spec in orders)
    assert first == (((0,), (2,), (1,), (3,)),) and second == (((0,), (1,), (2,), (3,)),)


def test_the_mesh_itself():
    cut = blocks.cut_mesh({"stage": 2, "fsdp": 2, "tensor": 2})
    assert cut.devices == (((0,), (1,)), ((2,), (3,)), ((4,), (5,)), ((6,), (7,)))
    assert cut.directions == "stage 2 x fsdp 2 down, tensor 2 across"
    assert blocks.cut_mesh({"tensor": 8}).directions == "tensor 8 across"


def test_a_number_has_one_block():
    cut = blocks.cut_array((), (), (), {"data": 4})
    assert cut.devices == (((0, 1, 2, 3),),) and cut.about == "whole, 4 copies" and cut.directions == ""


def test_words():
    cut = blocks.cut_array(AXES, SHAPE, ((), ("fsdp",), ()), {"fsdp": 2, "tensor": 4})
    assert cut.about == "2 blocks of 8 x 2 x 16, 4 copies of each"
    assert cut.directions == "seq 4 down, embed 16 across"


@pytest.mark.parametrize(
    ("devices", "words"),
    [([3], "3"), ([0, 1, 2, 3], "0-3"), ([4, 0], "0 4"), ([0, 1, 8, 9], "0-1 8-9"), (range(0, 32, 4), "0 4 … 28")],
)
def test_devices_in_words(devices, words):
    assert blocks.list_devices(devices) == words


@pytest.mark.parametrize("mesh", [{"fsdp": 2, "tensor": 4}, {"fsdp": 64, "tensor": 64}], ids=str)
def test_pictures_have_each_device_or_a_gap(mesh):
    cut = blocks.cut_mesh(mesh)
    few = cut.size[0] * cut.size[1] == 8
    out = io.StringIO()
    Console(file=out, width=200, color_system="truecolor", force_terminal=True).print(blocks.table(cut))
    page = Reader(f"<div>{blocks.drawing(cut, 'mesh <a>')}</div>")
    numbers = [one["text"] for one in page.elements if one["tag"] == "text"]
    assert (
        not page.unclosed and not page.open and (blocks.GAP in numbers) == (blocks.GAP in out.getvalue()) == (not few)
    )
    shown = [number for number in numbers if number != blocks.GAP]
    assert len(shown) == (8 if few else (blocks.MOST[0] - 1) * (blocks.MOST[1] - 1))
    assert "0" in shown and str(cut.devices[-1][-1][0]) in shown
    colours = [one["fill"] for one in page.elements if one["tag"] == "rect"]
    assert len(set(colours)) == len(colours) or not few
    assert "mesh &lt;a&gt;" in blocks.drawing(cut, "mesh <a>")
    assert out.getvalue().count("\x1b[30;48;2;") >= len(shown)


def test_blocks_that_differ_have_different_colours():
    cut = blocks.cut_array(("embed", "mlp"), (8, 8), (("fsdp",), ("tensor",)), {"fsdp": 4, "tensor": 2})
    page = Reader(blocks.drawing(cut, "x"))
    assert len({one["fill"] for one in page.elements if one["tag"] == "rect"}) == 8
