"""Relative positions in attention: biases (T5, ALiBi) and products of queries and keys with them (DeBERTa)."""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from einops import rearrange

from gspmd_lm import config

BLOCK = 128  # the rows of a block of products with relative position vectors


@functools.cache
def score_bias(cfg: config.ModelConfig, scale: float) -> Callable[..., jax.Array | None]:
    """A function that gives the bias of scores, [B or 1, N, T, S], or None where a model has none.

    Its arguments are numbers of each head, [R, N], see `attention.head_numbers`; the positions of queries, [A, T], and
    of keys, [A or B, S]; and the number of rows of the batch, which A divides. scale: the factor of q k.
    """
    table: dict[str, Callable[..., jax.Array | None]] = {
        "alibi": _alibi,
        "alibi_bf16": functools.partial(_rounded_alibi, scale),
    }
    if cfg.attention.relative_positions:
        return functools.partial(_bias_of_ranges, cfg)
    return table.get(cfg.positions, lambda *_: None)


def _bias_of_ranges(
    cfg: config.ModelConfig, heads_RN: jax.Array, queries_BT: jax.Array, keys_BS: jax.Array, rows: int
) -> jax.Array:
    """The learned bias of the range of each relative position (T5, BEiT)."""
    assert cfg.attention.relative_positions
    queries_BT1, keys_B1S = queries_BT[:, :, None], keys_BS[:, None, :]
    plane = cfg.attention.relative_positions.side > 0
    range_BTS = ranges_of_plane(queries_BT1, keys_B1S, cfg) if plane else ranges(keys_B1S - queries_BT1, cfg)
    bias = jnp.moveaxis(heads_RN.astype(jnp.float32)[range_BTS], -1, 1)
    return jnp.repeat(bias, rows // len(bias), axis=0) if len(bias) > 1 else bias


def _alibi(heads_RN: jax.Array, queries_BT: jax.Array, keys_BS: jax.Array, rows: int) -> jax.Array:
    """ALiBi: the relative position times the slope of each head (arXiv 2108.12409)."""
    distance_BTS = (keys_BS[:, None, :] - queries_BT[:, :, None]).astype(jnp.float32)
    return heads_RN[0, :, None, None] * distance_BTS[:, None]


def _rounded_alibi(
    scale: float, heads_RN: jax.Array, queries_BT: jax.Array, keys_BS: jax.Array, rows: int
) -> jax.Array:
    """ALiBi as in Falcon: a key's position times each head's slope, both rounded to bfloat16, scaled as scores are.

    The compiler may leave out a conversion to bfloat16 and back, which would not round then.
    """
    bfloat16 = functools.partial(jax.lax.reduce_precision, exponent_bits=8, mantissa_bits=7)
    keys_B11S = keys_BS.astype(jnp.float32)[:, None, None]
    return scale * bfloat16(bfloat16(heads_RN[0, :, None, None]) * bfloat16(keys_B11S))


def alibi_slopes(heads: int) -> jax.Array:
    """The ALiBi slope of each head, [N], float32 (arXiv 2108.12409).

    For a power of two, 2^(-8/N), 2^(-16/N), ...; otherwise those of the power below, then every other one of the
    power above, as BLOOM has it.
    """
    below = 2 ** int(math.log2(heads))
    slopes = [2 ** (-8 * (i + 1) / below) for i in range(below)]
    slopes += [2 ** (-4 * (2 * i + 1) / below) for i in range(heads - below)]
    return jnp.asarray(slopes, jnp.float32)


def ranges(ahead: jax.Array, cfg: config.ModelConfig) -> jax.Array:
    """The index of the range (bucket) of a relative position: see `config.RelativePositions`."""
    relative, first = cfg.attention.relative_positions, 0
    assert relative
    count, far = relative.ranges, jnp.maximum(-ahead, 0)
    if cfg.attention.mask == "full":  # keys after the query have the second half of the ranges
        count //= 2
        first, far = jnp.where(ahead > 0, count, 0), jnp.abs(ahead)
    exact = count // 2
    log = jnp.log(jnp.maximum(far, exact).astype(jnp.float32) / exact) / math.log(relative.distance / exact)
    wide = jnp.minimum(exact + (log * (count - exact)).astype(jnp.int32), count - 1)
    return first + jnp.where(far < exact, far, wide)


def ranges_of_plane(queries: jax.Array, keys: jax.Array, cfg: config.ModelConfig) -> jax.Array:
    """The index of the range of the relative position in the image of two patches, from their positions in a row.

    Position 0 is that of a learned token. Positions beyond the patches are padding, whose range does not matter.
    """
    relative = cfg.attention.relative_positions
    assert relative
    side, last, first = relative.side, relative.ranges - 1, int(relative.learned_row)
    (query_y, query_x), (key_y, key_x) = (jnp.divmod(jnp.maximum(at - first, 0), side) for at in (queries, keys))
    of_patches = (query_y - key_y + side - 1) * (2 * side - 1) + query_x - key_x + side - 1
    if not first:
        return of_patches
    of_row = last - 2 * (queries == 0) * (keys > 0) - (queries > 0) * (keys == 0)
    return jnp.where((queries == 0) | (keys == 0), of_row, jnp.clip(of_patches, 0, last))


def scores_by_distance(
    q_BTNH: jax.Array,
    k_BSNH: jax.Array,
    heads_RN: jax.Array,
    queries_BT: jax.Array,
    keys_BS: jax.Array,
    relative: config.RelativeVectors,
) -> jax.Array:
    """The terms that are added to the products of queries and keys before both are scaled, [B, N, T, S].

    heads_RN: the query and the key of each range, see `parts.relative.range_projections`. queries_BT, keys_BS: the
    position of each in its row, each one more than that of the token before; one row stands for all of a batch's shard.
    """
    queries_RNH, keys_RNH = rearrange(heads_RN, "(z R H) N -> z R N H", z=2, H=q_BTNH.shape[-1])
    first_B, (T, S) = queries_BT[:, :1] - keys_BS[:, :1], (q_BTNH.shape[1], k_BSNH.shape[1])
    of_queries = range_numbers(first_B[:, None] + distances(T, S), relative)
    of_keys = range_numbers(first_B[:, None] - distances(S, T), relative)
    of_keys_BNST = with_vectors(k_BSNH, queries_RNH, of_keys)
    return with_vectors(q_BTNH, keys_RNH, of_queries) + jnp.swapaxes(of_keys_BNST, 2, 3)


def distances(rows: int, columns: int) -> jax.Array:
    """The relative positions of rows to columns, int32 [P blocks of rows, columns + rows of a block].

    [p, d] is that of the last row of block p to column d. Those of row r of the block begin at d = size - 1 - r: see
    `skew`.
    """
    size = BLOCK if rows % BLOCK == 0 else rows
    return jnp.arange(size - 1, rows, size)[:, None] - jnp.arange(columns + size)


def with_vectors(x_BTNH: jax.Array, vectors_RNH: jax.Array, range_APD: jax.Array) -> jax.Array:
    """The products of rows and the vectors of their relative positions to columns, [B, N, T, S].

    range_APD: the ranges of `distances`, once for each of A shards of the batch.

    Each relative position gets the vector of its range before the product, so that few vectors are gathered. A gather
    of products has a scatter for its derivative, which adds them up one by one: 105 ms of a step of 303 ms of DeBERTa
    v3 large on one H100.
    """
    A, P, _ = range_APD.shape
    vectors_APDNH: jax.Array = take_vectors(len(vectors_RNH), vectors_RNH, range_APD)
    x_ABPtNH = rearrange(x_BTNH, "(A B) (P t) N H -> A B P t N H", A=A, P=P)
    # In this order the relative positions of a row are contiguous in memory.
    products = jnp.einsum("ABPtNH,APDNH->APNBtD", x_ABPtNH, vectors_APDNH)
    return rearrange(skew(products), "A P N B t S -> (A B) N (P t) S")


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def take_vectors(ranges: int, vectors_RNH: jax.Array, range_APD: jax.Array) -> jax.Array:
    """The vectors of some ranges, [A, P, D, N, H]. Their gradients are added up by a product with ones and zeros."""
    return vectors_RNH[range_APD]


def _take_vectors_backward(ranges, range_APD, d_APDNH):
    ones_APDR = jax.nn.one_hot(range_APD, ranges, dtype=d_APDNH.dtype)
    return jnp.einsum("APDR,APDNH->RNH", ones_APDR, d_APDNH, precision="highest"), None


take_vectors.defvjp(lambda ranges, vectors_RNH, range_APD: (vectors_RNH[range_APD], range_APD), _take_vectors_backward)


def skew(x_TD: jax.Array) -> jax.Array:
    """The last row from 0 on, the one before it from 1 on, and so forth, of the last two axes [T, D]: [T, D - T].

    As one long row, after the first T - 1 numbers, they are cut into rows that are one number shorter.
    """
    T, D = x_TD.shape[-2:]
    long = x_TD.reshape(*x_TD.shape[:-2], T * D)[..., T - 1 : T * D - 1]
    return long.reshape(*x_TD.shape[:-2], T, D - 1)[..., : D - T]


def range_numbers(ahead: jax.Array, relative: config.RelativeVectors) -> jax.Array:
    """The index of the range (bucket) of a relative position.

    A relative position up to a quarter of the ranges has a range of its own; beyond, ranges grow with the logarithm.
    Where there are enough ranges for all relative positions, each has its own.
    """
    if relative.distance == relative.ranges // 2:
        return jnp.clip(ahead + relative.distance, 0, relative.ranges - 1)
    own, last, far = relative.ranges // 4, relative.distance - 1, jnp.abs(ahead)
    share = jnp.log(jnp.maximum(far, own).astype(jnp.float32) / own) / math.log(last / own)
    share = jnp.where(far == last, 1.0, share)  # rounding must not decide whether it is in the last range but one
    beyond = jnp.sign(ahead) * (jnp.ceil(share * (own - 1)).astype(jnp.int32) + own)
    return jnp.clip(jnp.where(far <= own, ahead, beyond) + 2 * own, 0, relative.ranges - 1)
