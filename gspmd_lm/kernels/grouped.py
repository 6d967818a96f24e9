"""Products of rows, sorted by expert, with the weights of their experts."""

import functools

import jax
import jax.numpy as jnp

from gspmd_lm.placing import grouped_kernel

BLOCK = 256  # the most rows of a block of the plain form


def grouped(rows_MD: jax.Array, w_EDF: jax.Array, sizes_E: jax.Array) -> jax.Array:
    """[M, F]: the product of each row with the weights of its expert.

    The first sizes_E[0] rows belong to expert 0, and so on. Rows after the last one of an expert give zeros. Every
    kernel does the same; which one runs is the platform's matter:

    - TPU: XLA's own kernel for `jax.lax.ragged_dot`.
    - elsewhere: a loop over blocks of rows that belong to one expert. XLA would expand `ragged_dot` there into a
      product of all rows with all experts.
    """
    return _grouped(grouped_kernel(), rows_MD, w_EDF, sizes_E)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _grouped(kernel: str, rows_MD: jax.Array, w_EDF: jax.Array, sizes_E: jax.Array) -> jax.Array:
    y_MF = jax.lax.ragged_dot(rows_MD, w_EDF, sizes_E) if kernel == "ragged" else _blocks(rows_MD, w_EDF, sizes_E)
    return jnp.where(jnp.arange(len(rows_MD))[:, None] < sizes_E.sum(), y_MF, 0)


def _forward(kernel: str, rows_MD: jax.Array, w_EDF: jax.Array, sizes_E: jax.Array):
    return _grouped(kernel, rows_MD, w_EDF, sizes_E), (rows_MD, w_EDF, sizes_E)


def _backward(kernel: str, saved, dy_MF: jax.Array):
    rows_MD, w_EDF, sizes_E = saved
    return _grouped(kernel, dy_MF, w_EDF.mT, sizes_E), outer(rows_MD, dy_MF, sizes_E, w_EDF.dtype), None


_grouped.defvjp(_forward, _backward)

_OUTER = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
)


def outer(rows_MD: jax.Array, dy_MF: jax.Array, sizes_E: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """[E, D, F]: the gradient of the weights of `grouped`: for each expert, the product of its rows and theirs."""
    if grouped_kernel() == "ragged":
        return jax.lax.ragged_dot_general(rows_MD, dy_MF, sizes_E, _OUTER, preferred_element_type=dtype)
    block, blocks = _cut(rows_MD, sizes_E)

    def add(total_EDF: jax.Array, at) -> tuple[jax.Array, None]:
        expert, start, stop = at
        inside_m1 = (start + jnp.arange(block))[:, None] < stop
        x_mD, dy_mF = (jax.lax.dynamic_slice_in_dim(x, start, block) for x in (padded_MD, padded_MF))
        found_DF = jnp.einsum("mD,mF->DF", jnp.where(inside_m1, x_mD, 0), dy_mF, preferred_element_type=jnp.float32)
        return total_EDF.at[expert].add(found_DF), None

    padded_MD, padded_MF = _padded(rows_MD, block), _padded(dy_MF, block)
    zeros = jnp.zeros((len(sizes_E), rows_MD.shape[1], dy_MF.shape[1]), jnp.float32)
    return jax.lax.scan(add, zeros, blocks)[0].astype(dtype)


def _blocks(rows_MD: jax.Array, w_EDF: jax.Array, sizes_E: jax.Array) -> jax.Array:
    """`grouped` as a loop over blocks of rows. Each block reads the weights of one expert.

    A block may reach into the rows of the next expert, whose own blocks come later and write these rows again.
    """
    block, blocks = _cut(rows_MD, sizes_E)
    padded_MD = _padded(rows_MD, block)

    def write(y_MF: jax.Array, at) -> tuple[jax.Array, None]:
        expert, start, _ = at
        x_mD = jax.lax.dynamic_slice_in_dim(padded_MD, start, block)
        w_DF = jax.lax.dynamic_index_in_dim(w_EDF, expert, keepdims=False)
        y_mF = jnp.einsum("mD,DF->mF", x_mD, w_DF)
        return jax.lax.dynamic_update_slice_in_dim(y_MF, y_mF, start, 0), None

    zeros = jnp.zeros((len(padded_MD), w_EDF.shape[2]), jnp.result_type(rows_MD, w_EDF))
    return jax.lax.scan(write, zeros, blocks)[0][: len(rows_MD)]


def _cut(rows_MD: jax.Array, sizes_E: jax.Array) -> tuple[int, tuple[jax.Array, jax.Array, jax.Array]]:
    """The rows of a block; and for each block its expert, its first row and the end of its expert's rows.

    A quarter of an expert's mean load is a block, so that what blocks compute in vain is at most a quarter of the
    work. There are as many blocks as any sizes may need. Those that are not needed stand behind the last row.
    """
    M, E = len(rows_MD), len(sizes_E)
    block = 1
    while 2 * block <= min(M // (4 * E), BLOCK):
        block *= 2
    count = min(M, M // block + E)
    blocks_E = -(-sizes_E // block)
    after_E, ends_E = jnp.cumsum(blocks_E), jnp.cumsum(sizes_E)
    number = jnp.arange(count)
    expert = jnp.minimum((number[:, None] >= after_E).sum(-1), E - 1)
    start = (ends_E - sizes_E)[expert] + block * (number - (after_E - blocks_E)[expert])
    used = number < after_E[-1]
    return block, (expert, jnp.where(used, start, M), jnp.where(used, ends_E[expert], M))


def _padded(x_MD: jax.Array, block: int) -> jax.Array:
    """`x_MD` with a block of zeros behind it."""
    return jnp.pad(x_MD, ((0, block), (0, 0)))
