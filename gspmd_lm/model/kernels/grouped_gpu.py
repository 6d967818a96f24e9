"""Grouped products on GPUs, by Triton: each program computes one tile, and reads the weights of one expert."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from gspmd_lm.hardware.chips import chip_of

INNER, LINES, COLUMNS = 64, 128, 256  # of a tile, at most
TOGETHER = 8  # rows of tiles that are computed side by side, so that the weights they share stay in the cache
LEAST = 16  # the smallest side of a product that tensor cores take
# That of rows of int8: in a tile of 16 inner columns, the Triton of jax 0.10.2 multiplies each number twice.
LEAST_OF_INT8 = 32
FLOAT8 = (8, 9)  # the compute capability from which GPUs have float8
# Hopper's products read weights from shared memory. A kernel that converts them must write them there first, and takes
# twice as long (CONVERTING_SLOWDOWN in foresight/timing/op_time.py). With 315 rows for each expert on an H100, or 231
# on an H200, it loses as much as a pass over the weights takes, in which a byte of each is read and two are written.
MANY_ROWS = 256

Scales = tuple[()] | tuple[jax.Array, jax.Array]  # of rows, and of the outputs of experts; () without 8 bits
Blocks = tuple[jax.Array, jax.Array, jax.Array]  # of each block of rows: its expert, its first row, its rows' end


def least(rows: jnp.dtype) -> int:
    """The smallest side of matrices that the kernels here multiply rows of a dtype with."""
    return LEAST_OF_INT8 if rows == jnp.int8 else LEAST


def takes(dtype: jnp.dtype, *sides: int, rows: jnp.dtype | None = None) -> bool:
    """Whether the kernels here can multiply matrices of experts with these sides, narrow ones made as wide as `least`.

    dtype: of what they give. rows: of what they multiply, if not that.
    """
    smallest = least(rows or dtype)
    return dtype == jnp.bfloat16 and all(math.gcd(max(side, smallest), COLUMNS) >= smallest for side in sides)


def rows_of_block(rows: float, experts: float, least: int, most: int) -> int:
    """A quarter of an expert's mean load, as a power of two from `least` to `most`."""
    block = least
    while 2 * block <= min(rows // (4 * experts), most):
        block *= 2
    return block


def tile(block: int, inner: int, columns: int, outer: bool) -> tuple[int, int]:
    """The sides of the tile of a result that a program here computes: of `product` in blocks of rows, or of `outer`."""
    heights = [LINES >> n for n in range(4)] if outer else [block]
    widths = [COLUMNS >> n for n in range(5)]
    sides = [(height, width) for height in heights for width in widths]
    return max(sides, key=lambda sides: _speed(*sides, inner, columns, outer))


def speed(rows: float, experts: float, inner: int, columns: int, outer: bool) -> float:
    """The share of the speed of the largest tiles, all full, that `product` or `outer` reaches."""
    block = rows_of_block(rows, experts, LEAST, LINES)
    return _speed(*tile(block, inner, columns, outer), inner, columns, outer)


def _speed(height: int, width: int, inner: int, columns: int, outer: bool) -> float:
    """The speed of a tile beside the largest one, times the share of the tiles that the result fills.

    Small tiles read what they multiply more often from shared memory. With tiles of 64 columns, 22 kernels of gpt-oss
    took 37.4 ms on one H100. 41.4 ms are predicted with this factor, and 19.0 ms without it.
    """
    share = columns / (math.ceil(columns / width) * width)
    if outer:
        share *= inner / (math.ceil(inner / height) * height)
    return share * (1 / LINES + 1 / COLUMNS) / (1 / height + 1 / width)


def on_hopper(kind: str) -> bool:
    """Whether devices of a `kind` are Hopper's. Triton widens float8 there to float16, and multiplies without wgmma."""
    chip = chip_of(kind)
    return bool(chip and chip.gpu and chip.gpu.compute_capability[0] == 9)


def widens(weights: jnp.dtype, kind: str, rows: float) -> bool:
    """Whether weights of 8 bits that meet wider rows, so many for each expert, are widened before the kernel.

    Otherwise it widens them while it reads them. LLVM aborts for float8 on GPUs that have none.
    """
    chip = chip_of(kind)
    has_float8 = bool(chip and chip.gpu and chip.gpu.compute_capability >= FLOAT8)
    return (weights != jnp.int8 and not has_float8) or (on_hopper(kind) and rows >= MANY_ROWS)


def product(
    padded_MD: jax.Array,
    w_EDF: jax.Array,
    scales: Scales,
    blocks: Blocks,
    block: int,
    transposed: bool,
    dtype: jnp.dtype,
    interpret: bool = False,
) -> jax.Array:
    """[M, F] in `dtype`: each row times the weights of its expert. Rows of no block are not written.

    `padded_MD` has `block` rows behind those of the last block. scales: those of operands of 8 bits, without padding.
    Rows may be wider than weights.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    D, F = w_EDF.shape[1:][::-1] if transposed else w_EDF.shape[1:]
    inner, (_, columns) = math.gcd(D, INNER), tile(block, D, F, outer=False)
    count = math.ceil(F / columns)
    if scales:
        scale_M, scale_EF = scales
        missing = len(padded_MD) - len(scale_M), F - scale_EF.shape[1]
        scales = jnp.pad(scale_M, (0, missing[0])), jnp.pad(scale_EF, ((0, 0), (0, missing[1]))).reshape(-1)
    sums = jnp.int32 if padded_MD.dtype == w_EDF.dtype == jnp.int8 else jnp.float32

    def kernel(expert, first, after, x, w, *scales_and_y):
        *scales, y = scales_and_y
        at, number = tile_at(pl.program_id(0), len(blocks[0]), count)
        column, inside_F = pl.ds(number * columns, columns), _inside(number * columns, columns, F)
        e, start, stop = expert[at], first[at], after[at]
        rows, mask_m1 = pl.ds(start, block), (start + jnp.arange(block))[:, None] < stop

        def add(i: jax.Array, total_mF: jax.Array) -> jax.Array:
            part = pl.ds(i * inner, inner)
            x_mD = triton.load(x.at[rows, part], mask=mask_m1, other=0.0)
            if transposed:
                w_DF = _load(w.at[e, column, part], _column(inside_F)).T
            else:
                w_DF = _load(w.at[e, part, column], _row(inside_F))
            w_DF = w_DF if x.dtype.itemsize == w.dtype.itemsize else w_DF.astype(x.dtype)
            return total_mF + triton.dot(x_mD, w_DF)

        turns = D // inner * (start < stop).astype(jnp.int32)
        y_mF = jax.lax.fori_loop(0, turns, add, jnp.zeros((block, columns), sums))
        if scales:
            scale_m = triton.load(scales[0].at[rows], mask=start + jnp.arange(block) < stop, other=0.0)
            scale_F = _load(scales[1].at[pl.ds(e * F + number * columns, columns)], inside_F)
            y_mF = y_mF.astype(jnp.float32) * scale_m[:, None] * scale_F
        triton.store(y.at[rows, column], y_mF.astype(y.dtype), mask=_both(mask_m1, _row(inside_F)))

    shape = jax.ShapeDtypeStruct((len(padded_MD), F), dtype)
    call = pl.pallas_call(
        kernel,
        shape,
        grid=(len(blocks[0]) * count,),
        interpret=interpret,
        name="grouped",
        compiler_params=triton.CompilerParams(num_warps=4 if block <= 64 else 8, num_stages=3),
    )
    return call(*(x.astype(jnp.int32) for x in blocks), padded_MD, w_EDF, *scales)


def outer(padded_MD: jax.Array, padded_MF: jax.Array, sizes_E: jax.Array, interpret=False) -> jax.Array:
    """[E, D, F]: for each expert, the product of its rows of both arrays, which have INNER rows behind the last one."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    (_, D), (_, F) = padded_MD.shape, padded_MF.shape
    lines, columns = tile(INNER, D, F, outer=True)
    down, across = math.ceil(D / lines), math.ceil(F / columns)

    def kernel(first, after, x, dy, dw):
        e, at = pl.program_id(1), tile_at(pl.program_id(0), down, across)
        line, column = at[0] * lines, at[1] * columns
        inside_D, inside_F = _inside(line, lines, D), _inside(column, columns, F)
        start, stop = first[e], after[e]

        def add(i: jax.Array, total_DF: jax.Array) -> jax.Array:
            at = start + i * INNER
            mask_m1 = (at + jnp.arange(INNER))[:, None] < stop
            x_mD, dy_mF = (
                triton.load(array.at[pl.ds(at, INNER), place], mask=_both(mask_m1, _row(inside)), other=0.0)
                for array, place, inside in (
                    (x, pl.ds(line, lines), inside_D),
                    (dy, pl.ds(column, columns), inside_F),
                )
            )
            return total_DF + triton.dot(x_mD.T, dy_mF)

        turns = (stop - start + INNER - 1) // INNER
        total_DF = jax.lax.fori_loop(0, turns, add, jnp.zeros((lines, columns), jnp.float32))
        triton.store(
            dw.at[e, pl.ds(line, lines), pl.ds(column, columns)],
            total_DF.astype(dw.dtype),
            mask=_both(_column(inside_D), _row(inside_F)),
        )

    ends_E = jnp.cumsum(sizes_E).astype(jnp.int32)
    call = pl.pallas_call(
        kernel,
        jax.ShapeDtypeStruct((len(sizes_E), D, F), padded_MD.dtype),
        grid=(across * down, len(sizes_E)),
        interpret=interpret,
        name="grouped_outer",
        compiler_params=triton.CompilerParams(num_warps=8, num_stages=3),
    )
    return call(ends_E - sizes_E.astype(jnp.int32), ends_E, padded_MD, padded_MF)


Mask = jax.Array | None  # None: all is true, which costs no time


def _inside(first: jax.Array, size: int, side: int) -> Mask:
    """Which of a tile's rows or columns lie within a side."""
    return None if side % size == 0 else first + jnp.arange(size) < side


def _row(mask_F: Mask) -> Mask:
    return None if mask_F is None else mask_F[None]


def _column(mask_D: Mask) -> Mask:
    return None if mask_D is None else mask_D[:, None]


def _both(one: Mask, other: Mask) -> Mask:
    return other if one is None else one if other is None else one & other


def _load(ref: Any, mask: Mask) -> jax.Array:
    """The values that `ref` names; zeros outside of the mask, which has as many dimensions."""
    from jax.experimental.pallas import triton

    return triton.load(ref, mask=mask, other=None if mask is None else 0.0)


def tile_at(number: jax.Array, rows: int, columns: int) -> tuple[jax.Array, jax.Array]:
    """The row and the column of a tile by its number, in a grid of `rows` x `columns` tiles."""
    first = number // (TOGETHER * columns) * TOGETHER
    height, within = jnp.minimum(rows - first, TOGETHER), number % (TOGETHER * columns)
    return first + within % height, within // height
