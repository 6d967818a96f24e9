"""Tiles of the grouped products on GPUs: where they lie, and that Triton takes them."""

import functools

import jax
import jax.numpy as jnp
import pytest

from gspmd_lm.model.kernels import grouped as kernels
from gspmd_lm.model.kernels import grouped_gpu


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (5, 3), (8, 2), (19, 4)])
def test_each_tile_of_triton_is_computed_once_and_those_of_some_rows_side_by_side(rows, columns):
    tiles = [tuple(map(int, grouped_gpu.tile_at(jnp.int32(n), rows, columns))) for n in range(rows * columns)]
    assert sorted(tiles) == [(row, column) for row in range(rows) for column in range(columns)]
    together = min(rows, grouped_gpu.TOGETHER)
    assert tiles[: together * columns] == [(row, column) for column in range(columns) for row in range(together)]


@pytest.mark.parametrize("kind", ["NVIDIA H100 80GB HBM3", "NVIDIA B200"])
@pytest.mark.parametrize(("rows", "columns", "inner"), [(4096, 1408, 2048), (4096, 384, 4096), (64, 2880, 2880)])
def test_grouped_products_of_triton_compile_whatever_their_last_tiles_hold(rows, columns, inner, kind, monkeypatch):
    """Triton refuses more than the interpreter does. The programs of a kernel are as many as `tile` says."""
    monkeypatch.setattr(kernels, "device_kind", lambda: kind)
    E, scales = 8, (jnp.ones(rows), jnp.ones((8, columns)))
    sizes = jnp.full((E,), rows // E, jnp.int32)

    def programs(function, *arrays):
        """The grid of the kernel, which is lowered for GPUs."""
        device = jax.sharding.AbstractDevice(kind, None, "gpu")  # from jax 0.12 on, Triton asks for one
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((1,), ("data",), abstract_device=device)):
            traced = jax.jit(function).trace(*(jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in arrays))
            traced.lower(lowering_platforms=("cuda",))
        (kernel,) = (eqn for eqn in traced.jaxpr.eqns if eqn.primitive.name == "pallas_call")
        return kernel.params["grid_mapping"].grid

    def product(x, w, scales=()):
        return kernels._triton(x, w, scales, sizes, False, jnp.bfloat16)

    x, w = ((rows, inner), jnp.bfloat16), ((E, inner, columns), jnp.bfloat16)
    block = grouped_gpu.rows_of_block(rows, E, grouped_gpu.LEAST, grouped_gpu.LINES)
    _, width = grouped_gpu.tile(block, inner, columns, outer=False)
    blocks = min(rows, rows // block + E)
    assert programs(product, x, w) == (blocks * -(-columns // width),)
    for dtype in (jnp.int8, jnp.float8_e4m3fn):
        programs(functools.partial(product, scales=scales), (x[0], dtype), (w[0], dtype))
    height, width = grouped_gpu.tile(block, inner, columns, outer=True)
    found = programs(lambda x, dy: kernels._triton_outer(x, dy, sizes), x, ((rows, columns), jnp.bfloat16))
    assert found == (-(-columns // width) * -(-inner // height), E)
