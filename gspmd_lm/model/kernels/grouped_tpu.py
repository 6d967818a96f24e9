"""The grouped product of rows and weights of 8 bits on TPUs. Megablox, which jax ships, takes none of 8 bits."""

import math

import jax
import jax.numpy as jnp


def product(
    padded_MD: jax.Array,
    w_EDF: jax.Array,
    scales: tuple[jax.Array, jax.Array],
    sizes_E: jax.Array,
    tile: tuple[int, int, int],
    transposed: bool,
    dtype: jnp.dtype,
    interpret: bool = False,
) -> jax.Array:
    """[M, F] in `dtype`: each row times the weights of its expert, scaled. `transposed`: they are given as [E, F, D].

    There are as many rows as fill tiles, and those after the last expert's are not written. scales: of rows, without
    padding, and of the outputs of experts. Rows may be wider than weights. Sums are int32 or float32.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu
    from jax.experimental.pallas.ops.tpu.megablox.gmm import make_group_metadata

    scale_M, scale_EF = scales
    (M, D), (E, F) = padded_MD.shape, scale_EF.shape
    scale_M1 = jnp.pad(scale_M, (0, M - len(scale_M)))[:, None]
    rows, inner, columns = tile
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
    return call(groups, padded_MD, w_EDF, scale_M1, scale_EF[:, None])
