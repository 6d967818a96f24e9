"""Products of rows, sorted by expert, with the weights of their experts."""

import math

import jax
import jax.numpy as jnp

from gspmd_lm.hardware.chips import KERNEL_MEMORY_BYTES, chip_of
from gspmd_lm.model.kernels import grouped_gpu
from gspmd_lm.model.kernels.common import LANES
from gspmd_lm.sharding.annotate import device_kind, platform
from gspmd_lm.sharding.quantised import Quantised, dtype_of_sums

BLOCK = 256  # the most rows of a block of the plain form
MOST_ROWS = 1024  # of any kernel's block or tile


def grouped(
    rows: jax.Array | Quantised, w: jax.Array | Quantised, sizes_E: jax.Array, transposed: bool = False
) -> jax.Array:
    """[M, F]: the product of each of M rows with the weights of its expert, [E, D, F]. `transposed`: [E, F, D].

    The first sizes_E[0] rows belong to expert 0, and so on. Rows after those of the last expert give zeros. Operands
    may be quantised, with a scale for each row and for each output of an expert; the result is then scaled. Which
    kernel runs is the platform's matter; all give the same:

    - tpu: megablox, the grouped kernel that jax ships; for 8 bits, `_eight_bits`.
    - gpu: Triton's (grouped_gpu.py), in bfloat16 or 8 bits and for widths that it takes.
    - elsewhere: a loop over blocks of rows that belong to one expert. XLA would expand `jax.lax.ragged_dot` there into
      the product of all rows with all experts.
    - recorded: `jax.lax.ragged_dot`, one operation whose shapes tell what is computed.
    """
    scales = _scales(rows, w, sizes_E, transposed)
    dtype = next((one.dtype for one in (rows, w) if isinstance(one, Quantised)), rows.dtype)
    rows_MD, w_EDF = (one.values if isinstance(one, Quantised) else one for one in (rows, w))
    with jax.named_scope("grouped"):
        if platform() == "tpu" and scales:
            y_MF = _eight_bits(rows_MD, w_EDF, scales, sizes_E, transposed, dtype)
        elif platform() == "tpu":
            y_MF = _megablox(rows_MD, w_EDF, sizes_E, transposed)
        elif platform() == "gpu" and grouped_gpu.takes(dtype, *w_EDF.shape[1:], rows=rows_MD.dtype):
            y_MF = _triton(rows_MD, w_EDF, scales, sizes_E, transposed, dtype)
        else:
            w_EDF = w_EDF if rows_MD.dtype.itemsize == w_EDF.dtype.itemsize else w_EDF.astype(rows_MD.dtype)
            sums = dtype_of_sums(rows_MD, dtype)
            if platform() == "recorded":
                y_MF = jax.lax.ragged_dot(rows_MD, w_EDF.mT if transposed else w_EDF, sizes_E, None, sums)
            else:
                y_MF = _blocks(rows_MD, w_EDF, sizes_E, "mD,FD->mF" if transposed else "mD,DF->mF", sums)
            if scales:  # what is recorded does not run, so that the scales of any expert will do
                scale_M, scale_EF = scales
                of_M = scale_EF[:1] if platform() == "recorded" else expert_rows(scale_EF, sizes_E, len(rows_MD))
                y_MF = (y_MF * scale_M[:, None] * of_M).astype(dtype)
        return jnp.where(jnp.arange(len(rows_MD))[:, None] < sizes_E.sum(), y_MF, 0)


def _scales(rows, w, sizes_E: jax.Array, transposed: bool) -> grouped_gpu.Scales:
    """The scales of rows, [M], and of the outputs of experts, [E, F], which are 1 for the operand that has none.

    () where neither is quantised.
    """
    if not isinstance(rows, Quantised) and not isinstance(w, Quantised):
        return ()
    outputs = w.shape[1 if transposed else 2]
    scale_EF = w.scale if isinstance(w, Quantised) else jnp.ones((len(sizes_E), outputs))
    return (rows.scale if isinstance(rows, Quantised) else jnp.ones(rows.shape[0])), scale_EF


def expert_rows(b_EF: jax.Array, sizes_E: jax.Array, rows: int) -> jax.Array:
    """[M, F]: for each row, that of its expert in `b_EF`; zeros for rows without an expert."""
    return jnp.einsum("ME,EF->MF", hot(sizes_E, rows, b_EF.dtype), b_EF, precision="highest")


def hot(sizes_E: jax.Array, rows: int, dtype: jnp.dtype) -> jax.Array:
    """[M, E]: 1 for the expert of each row."""
    ends_E, at_M1 = jnp.cumsum(sizes_E), jnp.arange(rows)[:, None]
    return ((at_M1 < ends_E) & (at_M1 >= ends_E - sizes_E)).astype(dtype)


def outer(rows_MD: jax.Array, dy_MF: jax.Array, sizes_E: jax.Array) -> jax.Array:
    """[E, D, F]: for each expert, the product of its rows with its rows of `dy_MF`: the gradient of its weights."""
    with jax.named_scope("grouped"):
        if platform() == "recorded":
            return jax.lax.ragged_dot_general(rows_MD, dy_MF, sizes_E, _OUTER)
        if platform() == "tpu":
            return _megablox_outer(rows_MD, dy_MF, sizes_E)
        if platform() == "gpu" and grouped_gpu.takes(rows_MD.dtype, rows_MD.shape[1], dy_MF.shape[1]):
            return _triton_outer(rows_MD, dy_MF, sizes_E)
        return _outer_blocks(rows_MD, dy_MF, sizes_E)


_OUTER = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
)


def _blocks(rows_MD: jax.Array, w_EDF: jax.Array, sizes_E: jax.Array, equation: str, dtype: jnp.dtype) -> jax.Array:
    """`grouped` in `dtype` as a loop over blocks of rows. Each block reads the weights of one expert.

    A block may reach into the rows of the next expert, whose own blocks come later and write these rows again.
    """
    block, blocks = _cut(rows_MD, sizes_E)
    padded_MD = _pad_rows(rows_MD, block)

    def product(expert: jax.Array, start: jax.Array) -> jax.Array:
        x_mD = jax.lax.dynamic_slice_in_dim(padded_MD, start, block)
        w_DF = jax.lax.dynamic_index_in_dim(w_EDF, expert, keepdims=False)
        return jnp.einsum(equation, x_mD, w_DF, preferred_element_type=dtype)

    def write(y_MF: jax.Array, at) -> tuple[jax.Array, None]:
        expert, start, _ = at
        return jax.lax.dynamic_update_slice_in_dim(y_MF, product(expert, start), start, 0), None

    like = jax.eval_shape(product, *(x[0] for x in blocks[:2]))
    zeros = jnp.zeros((len(padded_MD), like.shape[1]), like.dtype)
    return jax.lax.scan(write, zeros, blocks)[0][: len(rows_MD)]


def _outer_blocks(rows_MD: jax.Array, dy_MF: jax.Array, sizes_E: jax.Array) -> jax.Array:
    """`outer` as a loop over blocks of rows, added up in float32."""
    block, blocks = _cut(rows_MD, sizes_E)
    padded_MD, padded_MF = _pad_rows(rows_MD, block), _pad_rows(dy_MF, block)

    def add(total_EDF: jax.Array, at) -> tuple[jax.Array, None]:
        expert, start, stop = at
        inside_m1 = (start + jnp.arange(block))[:, None] < stop
        x_mD, dy_mF = (jax.lax.dynamic_slice_in_dim(x, start, block) for x in (padded_MD, padded_MF))
        found_DF = jnp.einsum("mD,mF->DF", jnp.where(inside_m1, x_mD, 0), dy_mF, preferred_element_type=jnp.float32)
        return total_EDF.at[expert].add(found_DF), None

    zeros = jnp.zeros((len(sizes_E), rows_MD.shape[1], dy_MF.shape[1]), jnp.float32)
    return jax.lax.scan(add, zeros, blocks)[0].astype(rows_MD.dtype)


def _megablox(rows_MD: jax.Array, w_EDF: jax.Array, sizes_E: jax.Array, transposed: bool, interpret: bool = False):
    """`grouped` by megablox. The rows after those of the last expert are not written.

    `jax.lax.ragged_dot` is a kernel on TPU too, but the gradient of its weights is the product of all rows with all
    experts (jax 0.10.2, libtpu 0.0.42).
    """
    from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm

    inner, columns = w_EDF.shape[:0:-1] if transposed else w_EDF.shape[1:]
    tile = _tile(len(rows_MD), inner, columns, rows_MD.dtype.itemsize, device_kind())
    padded_MD = _pad_rows(rows_MD, -len(rows_MD) % tile[0])
    y_MF = gmm(padded_MD, w_EDF, sizes_E, rows_MD.dtype, tile, transpose_rhs=transposed, interpret=interpret)
    return y_MF[: len(rows_MD)]


def _eight_bits(
    rows_MD: jax.Array,
    w_EDF: jax.Array,
    scales: tuple[jax.Array, jax.Array],
    sizes_E: jax.Array,
    transposed: bool,
    dtype: jnp.dtype,
    interpret: bool = False,
) -> jax.Array:
    """`grouped` of 8 bits on TPUs, in `dtype`. Megablox, which jax ships, takes none of 8 bits.

    The rows after those of the last expert are not written. Rows may be wider than weights. Sums are int32 or float32.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu
    from jax.experimental.pallas.ops.tpu.megablox.gmm import make_group_metadata

    scale_M, scale_EF = scales
    D, (E, F) = rows_MD.shape[1], scale_EF.shape
    rows, inner, columns = _tile(len(rows_MD), D, F, w_EDF.dtype.itemsize, device_kind())
    padded_MD = _pad_rows(rows_MD, -len(rows_MD) % rows)
    M = len(padded_MD)
    scale_M1 = jnp.pad(scale_M, (0, M - len(scale_M)))[:, None]
    turns = math.ceil(D / inner)
    sums = jnp.int32 if padded_MD.dtype == w_EDF.dtype == jnp.int8 else jnp.float32
    groups, count = make_group_metadata(
        group_sizes=sizes_E, m=M, tm=rows, start_group=jnp.int32(0), num_nonzero_groups=E, visit_empty_groups=False
    )

    def inside(x: jax.Array, axis: int, turn: jax.Array) -> jax.Array:
        """`x` with zeros beyond the inner columns, where a last tile has numbers of any kind."""
        at = turn * inner + jax.lax.broadcasted_iota(jnp.int32, x.shape, axis)
        return jnp.where(at < D, x.astype(jnp.float32), 0).astype(x.dtype)

    def kernel(groups, x, w, scale_m1, scale_1F, y, total):
        (starts, experts, places), at, turn = groups, pl.program_id(1), pl.program_id(2)

        @pl.when(turn == 0)
        def _() -> None:
            total[...] = jnp.zeros(total.shape, sums)

        x_mD = x[...]
        w_DF = w[...] if x.dtype.itemsize == w.dtype.itemsize else w[...].astype(x.dtype)
        if D % inner:
            x_mD, w_DF = inside(x_mD, 1, turn), inside(w_DF, int(transposed), turn)
        summed = ((1,), (int(transposed),)), ((), ())
        total[...] += jax.lax.dot_general(x_mD, w_DF, summed, preferred_element_type=sums)

        @pl.when(turn == turns - 1)
        def _() -> None:
            row = places[at] * rows + jax.lax.broadcasted_iota(jnp.int32, total.shape, 0)
            own = (row >= starts[experts[at]]) & (row < starts[experts[at] + 1])
            scaled = total[...].astype(jnp.float32) * scale_m1[...] * scale_1F[...]
            y[...] = jnp.where(own, scaled, y[...].astype(jnp.float32)).astype(dtype)

    matrix = pl.BlockSpec((None, inner, columns), lambda n, at, turn, groups: (groups[1][at], turn, n))
    if transposed:
        matrix = pl.BlockSpec((None, columns, inner), lambda n, at, turn, groups: (groups[1][at], n, turn))
    call = pl.pallas_call(
        kernel,
        jax.ShapeDtypeStruct((M, F), dtype),
        grid_spec=tpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(math.ceil(F / columns), count, turns),
            in_specs=[
                pl.BlockSpec((rows, inner), lambda n, at, turn, groups: (groups[2][at], turn)),
                matrix,
                pl.BlockSpec((rows, 1), lambda n, at, turn, groups: (groups[2][at], 0)),
                pl.BlockSpec((None, 1, columns), lambda n, at, turn, groups: (groups[1][at], 0, n)),
            ],
            out_specs=pl.BlockSpec((rows, columns), lambda n, at, turn, groups: (groups[2][at], n)),
            scratch_shapes=[tpu.VMEM((rows, columns), sums)],
        ),
        compiler_params=tpu.CompilerParams(dimension_semantics=("parallel", "arbitrary", "arbitrary")),
        interpret=interpret,
        name="grouped",
    )
    return call(groups, padded_MD, w_EDF, scale_M1, scale_EF[:, None])[: len(rows_MD)]


def _megablox_outer(rows_MD: jax.Array, dy_MF: jax.Array, sizes_E: jax.Array, interpret: bool = False) -> jax.Array:
    """`outer` by megablox."""
    from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm

    tile = _tile(len(rows_MD), rows_MD.shape[1], dy_MF.shape[1], rows_MD.dtype.itemsize, device_kind(), outer=True)
    padded_MD, padded_MF = (_pad_rows(x, -len(x) % tile[0]) for x in (rows_MD, dy_MF))
    return tgmm(padded_MD.T, padded_MF, sizes_E, rows_MD.dtype, tile, interpret=interpret)


def _triton(
    rows_MD, w_EDF, scales: grouped_gpu.Scales, sizes_E, transposed: bool, dtype: jnp.dtype, interpret: bool = False
):
    """`grouped` by Triton. The rows after those of the last expert are not written."""
    if rows_MD.dtype == jnp.float8_e4m3fn and grouped_gpu.on_hopper(device_kind()):
        rows_MD = rows_MD.astype(dtype)  # exact, and faster
    mean_rows = len(rows_MD) / len(sizes_E)
    if rows_MD.dtype.itemsize > w_EDF.dtype.itemsize and grouped_gpu.widens(w_EDF.dtype, device_kind(), mean_rows):
        w_EDF = w_EDF.astype(rows_MD.dtype)
    block, blocks = _cut(rows_MD, sizes_E, grouped_gpu.LEAST, grouped_gpu.LINES)
    least = grouped_gpu.least(rows_MD.dtype)
    padded_MD, columns = _pad_rows(_wide(rows_MD, 1, least), block), w_EDF.shape[1 if transposed else 2]
    w_EDF = _wide(w_EDF, 2, least)
    many = mean_rows >= grouped_gpu.MANY_ROWS  # with fewer, such as a token's, reading the weights once is all
    if rows_MD.dtype == w_EDF.dtype == jnp.int8 and many and not transposed:
        # Tensor cores read both operands of int8 along the sum. On one H100, a kernel that turned them took 8 times as
        # long as one that found them so. XLA turns weights where it quantises them, if nothing stands between.
        w_EDF, transposed = w_EDF.swapaxes(1, 2), True
    y_MF = grouped_gpu.product(padded_MD, w_EDF, scales, blocks, block, transposed, dtype, interpret)
    return y_MF[: len(rows_MD), :columns]


def _triton_outer(rows_MD: jax.Array, dy_MF: jax.Array, sizes_E: jax.Array, interpret: bool = False) -> jax.Array:
    """`outer` by Triton."""
    padded_MD, padded_MF = (_pad_rows(_wide(x, 1), grouped_gpu.INNER) for x in (rows_MD, dy_MF))
    return grouped_gpu.outer(padded_MD, padded_MF, sizes_E, interpret)[:, : rows_MD.shape[1], : dy_MF.shape[1]]


def _tile(
    rows: float, inner: float, columns: float, itemsize: int, kind: str, outer: bool = False
) -> tuple[int, int, int]:
    """The rows, inner columns and columns of megablox's tile, for devices of a `kind`.

    It fills most of the on-chip memory of a kernel: 16 or 32 MiB. Of `grouped`, where a tile holds
    all inner columns, an expert's weights stay there while its rows pass by. So few rows are enough: 256, the width of
    the widest matrix units, as for `outer`, which reads no weights. Otherwise weights are read again for each tile of
    rows. Then a tile has more rows, so that this takes no longer than the products.
    """
    chip, itemsize = chip_of(kind), max(itemsize, 2)  # operands of 8 bits may meet wider ones
    room = (chip.kernel_memory_bytes if chip else KERNEL_MEMORY_BYTES) // KERNEL_MEMORY_BYTES
    side, whole, weights = 2048 // itemsize, -(-int(inner) // LANES) * LANES, room * 2**22 // itemsize
    least, sides = 256, (_side(inner, side), _side(columns, room * side))
    if not outer and whole * itemsize <= room * 8192:
        sides = whole, _side(columns, min(side, weights // whole))
    elif not outer:
        least = room * MOST_ROWS // 2
    return least if rows >= least else LANES, min(sides[0], int(inner)), min(sides[1], int(columns))


def _side(size: float, most: int) -> int:
    """A side of a tile, at least half of `most`: the one with the least beyond the last column, then the largest."""
    sides = range(most // LANES * LANES, max(most // 2, 1) - 1, -LANES)
    return min(sides, key=lambda side: -(-size // side) * side)


def work(
    rows: float,
    experts: float,
    inner: float,
    columns: float,
    itemsize: int,
    kind: str,
    outer: bool = False,
    tile: tuple[int, int, int] | None = None,
) -> tuple[float, float]:
    """The share of what megablox computes that was asked for, and the bytes that it moves, of `grouped` or `outer`.

    Its tiles reach past the last column. The rows of experts begin anywhere in a tile, so each expert but the first
    computes a tile of rows again that the expert before it has ended in. `tile` is as `_tile` gives it, or of another
    program.
    """
    tile_rows, *sides = tile or _tile(rows, inner, columns, itemsize, kind, outer)
    visited = rows / tile_rows + experts - 1
    inner_tiles, column_tiles = math.ceil(inner / sides[0]), math.ceil(columns / sides[1])
    computed = visited * tile_rows * inner_tiles * sides[0] * column_tiles * sides[1]
    if outer:
        moved = inner_tiles * column_tiles * visited * tile_rows * sum(sides) + experts * inner * columns
    else:
        read = column_tiles * inner_tiles * sides[0] * sides[1] * (experts if inner_tiles == 1 else visited)
        result = rows * columns * max(itemsize, 2) / itemsize  # no result has 8 bits
        moved = read + column_tiles * visited * tile_rows * inner_tiles * sides[0] + result
    return rows * inner * columns / computed, moved * itemsize


def _cut(rows_MD: jax.Array, sizes_E: jax.Array, least: int = 1, most: int = BLOCK) -> tuple[int, grouped_gpu.Blocks]:
    """The rows of a block, from `least` to `most`; and for each block its expert, its first row and its rows' end.

    A quarter of an expert's mean load is a block, so that what blocks compute in vain is at most a quarter of the
    work. There are as many blocks as any sizes may need. Those that are not needed stand behind the last row.
    """
    M, E = len(rows_MD), len(sizes_E)
    block = grouped_gpu.rows_of_block(M, E, least, most)
    count = min(M, M // block + E)
    blocks_E = -(-sizes_E // block)
    after_E, ends_E = jnp.cumsum(blocks_E), jnp.cumsum(sizes_E)
    number = jnp.arange(count)
    expert = jnp.minimum((number[:, None] >= after_E).sum(-1), E - 1)
    start = (ends_E - sizes_E)[expert] + block * (number - (after_E - blocks_E)[expert])
    used = number < after_E[-1]
    return block, (expert, jnp.where(used, start, M), jnp.where(used, ends_E[expert], M))


def _wide(x: jax.Array, sides: int, least: int = grouped_gpu.LEAST) -> jax.Array:
    """`x` with zeros where its last `sides` dimensions, such as the rank of an adapter, are too narrow for Triton."""
    missing = [max(0, least - size) for size in x.shape[-sides:]]
    return jnp.pad(x, [(0, 0)] * (x.ndim - sides) + [(0, count) for count in missing]) if any(missing) else x


def _pad_rows(x_MD: jax.Array, block: int) -> jax.Array:
    """`x_MD` with a block of zeros behind it."""
    return jnp.pad(x_MD, ((0, block), (0, 0)))
