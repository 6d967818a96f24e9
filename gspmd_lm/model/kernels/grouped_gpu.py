"""Grouped products on GPUs, by Triton: each program computes one tile, and reads the weights of one expert."""

import functools
import math

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
    inner, columns = math.gcd(D, INNER), math.gcd(F, COLUMNS)
    if scales:
        scale_M, scale_EF = scales
        missing = len(padded_MD) - len(scale_M), F - scale_EF.shape[1]
        scales = jnp.pad(scale_M, (0, missing[0])), jnp.pad(scale_EF, ((0, 0), (0, missing[1]))).reshape(-1)
    sums = jnp.int32 if padded_MD.dtype == w_EDF.dtype == jnp.int8 else jnp.float32

    def kernel(expert, first, after, x, w, *scales_and_y):
        *scales, y = scales_and_y
        at, number = tile_at(pl.program_id(0), len(blocks[0]), F // columns)
        column = pl.ds(number * columns, columns)
        e, start, stop = expert[at], first[at], after[at]
        rows, mask_m1 = pl.ds(start, block), (start + jnp.arange(block))[:, None] < stop

        def add(i: jax.Array, total_mF: jax.Array) -> jax.Array:
            part = pl.ds(i * inner, inner)
            x_mD = triton.load(x.at[rows, part], mask=mask_m1, other=0.0)
            w_DF = triton.load(w.at[e, column, part]).T if transposed else triton.load(w.at[e, part, column])
            w_DF = w_DF if x.dtype.itemsize == w.dtype.itemsize else w_DF.astype(x.dtype)
            return total_mF + triton.dot(x_mD, w_DF)

        turns = D // inner * (start < stop).astype(jnp.int32)
        y_mF = jax.lax.fori_loop(0, turns, add, jnp.zeros((block, columns), sums))
        if scales:
            scale_m = triton.load(scales[0].at[rows], mask=start + jnp.arange(block) < stop, other=0.0)
            scale_F = triton.load(scales[1].at[pl.ds(e * F + number * columns, columns)])
            y_mF = y_mF.astype(jnp.float32) * scale_m[:, None] * scale_F
        triton.store(y.at[rows, column], y_mF.astype(y.dtype), mask=mask_m1)

    shape = jax.ShapeDtypeStruct((len(padded_MD), F), dtype)
    call = pl.pallas_call(
        kernel, shape, grid=(len(blocks[0]) * (F // columns),), interpret=interpret, name="grouped",
        compiler_params=triton.CompilerParams(num_warps=4 if block <= 64 else 8, num_stages=3),
    )  # fmt: skip
    return call(*(x.astype(jnp.int32) for x in blocks), padded_MD, w_EDF, *scales)


def outer(padded_MD: jax.Array, padded_MF: jax.Array, sizes_E: jax.Array, interpret=False) -> jax.Array:
    """[E, D, F]: for each expert, the product of its rows of both arrays, which have INNER rows behind the last one."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    (_, D), (_, F) = padded_MD.shape, padded_MF.shape
    lines, columns = math.gcd(D, LINES), math.gcd(F, COLUMNS)

    def kernel(first, after, x, dy, dw):
        e, at = pl.program_id(1), tile_at(pl.program_id(0), D // lines, F // columns)
        line, column = at[0] * lines, at[1] * columns
        start, stop = first[e], after[e]

        def add(i: jax.Array, total_DF: jax.Array) -> jax.Array:
            at = start + i * INNER
            mask_m1 = (at + jnp.arange(INNER))[:, None] < stop
            load = functools.partial(triton.load, mask=mask_m1, other=0.0)
            x_mD, dy_mF = (
                load(x.at[pl.ds(at, INNER), pl.ds(line, lines)]),
                load(dy.at[pl.ds(at, INNER), pl.ds(column, columns)]),
            )
            return total_DF + triton.dot(x_mD.T, dy_mF)

        turns = (stop - start + INNER - 1) // INNER
        total_DF = jax.lax.fori_loop(0, turns, add, jnp.zeros((lines, columns), jnp.float32))
        triton.store(dw.at[e, pl.ds(line, lines), pl.ds(column, columns)], total_DF.astype(dw.dtype))

    ends_E = jnp.cumsum(sizes_E).astype(jnp.int32)
    call = pl.pallas_call(
        kernel, jax.ShapeDtypeStruct((len(sizes_E), D, F), padded_MD.dtype),
        grid=(F // columns * (D // lines), len(sizes_E)), interpret=interpret, name="grouped_outer",
        compiler_params=triton.CompilerParams(num_warps=8, num_stages=3),
    )  # fmt: skip
    return call(ends_E - sizes_E.astype(jnp.int32), ends_E, padded_MD, padded_MF)


def tile_at(number: jax.Array, rows: int, columns: int) -> tuple[jax.Array, jax.Array]:
    """The row and the column of a tile by its number, in a grid of `rows` x `columns` tiles."""
    first = number // (TOGETHER * columns) * TOGETHER
    height, within = jnp.minimum(rows - first, TOGETHER), number % (TOGETHER * columns)
    return first + within % height, within // height
