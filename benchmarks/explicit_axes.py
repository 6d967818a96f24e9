"""Which placements of a decoder's parts JAX refuses where the axes of the mesh are explicit: why ours are automatic.

    python -m benchmarks.explicit_axes

A rules file may ask for each of these placements, and under automatic axes each of them works. Each part is plain JAX,
lowered with its gradients for 8 simulated devices; nothing is compiled or run. What is refused would need the placement
of its result said at the operation itself, in the model or within jax.nn.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from benchmarks import measure

B, T, N, K, H, D, V = 8, 16, 8, 2, 16, 32, 64
DATA, TENSOR = "data", "tensor"


def rope(x_BTNH: jax.Array) -> jax.Array:
    first, second = jnp.split(x_BTNH, 2, axis=-1)
    angle = jnp.arange(T)[None, :, None, None] * jnp.ones(H // 2)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def attention(q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array) -> jax.Array:
    return jax.nn.dot_product_attention(q_BTNH, k_BSKH, v_BSKH, is_causal=True)


def norm(x_BTD: jax.Array, scale_D: jax.Array) -> jax.Array:
    return x_BTD * jax.lax.rsqrt(jnp.square(x_BTD).mean(-1, keepdims=True)) * scale_D


def product(x_BTD: jax.Array, w_DNH: jax.Array) -> jax.Array:
    return jnp.einsum("BTD,DNH->BTNH", x_BTD, w_DNH)


def look_up(table_VD: jax.Array, ids_BT: jax.Array) -> jax.Array:
    return table_VD[ids_BT]


def dropout(x_BTD: jax.Array) -> jax.Array:
    return jnp.where(jax.random.bernoulli(jax.random.key(0), 0.5, x_BTD.shape), x_BTD, 0)


# A part, how it is split, and for each of its arrays the shape and the mesh axes of the first dimensions.
CASES: list[tuple[Callable[..., Any], str, list[tuple[tuple[int, ...], tuple[str | None, ...]]]]] = [
    *(
        (part, f"{name} split", [((B, T, N, H), (DATA, *names))] * arrays)
        for part, arrays in ((rope, 1), (attention, 3))
        for name, names in {"no other axis": (), "heads": (None, TENSOR), "seq": (TENSOR,),
                            "head_dim": (None, None, TENSOR)}.items()
    ),
    (attention, "seq of queries split", [((B, T, N, H), (DATA, TENSOR)), *[((B, T, N, H), (DATA,))] * 2]),
    (attention, "heads split, key heads whole",
     [((B, T, N, H), (DATA, None, TENSOR)), *[((B, T, K, H), (DATA,))] * 2]),
    (product, "embed of both split", [((B, T, D), (DATA, None, TENSOR)), ((D, N, H), (TENSOR,))]),
    (product, "embed of the weight split", [((B, T, D), (DATA,)), ((D, N, H), (TENSOR,))]),
    (product, "embed of the activation split", [((B, T, D), (DATA, None, TENSOR)), ((D, N, H), ())]),
    (product, "heads split", [((B, T, D), (DATA,)), ((D, N, H), (None, TENSOR))]),
    (product, "seq and heads over one mesh axis", [((B, T, D), (DATA, TENSOR)), ((D, N, H), (None, TENSOR))]),
    (product, "batch and embed over one mesh axis", [((B, T, D), (DATA,)), ((D, N, H), (DATA,))]),
    (norm, "embed of the activation split", [((B, T, D), (DATA, None, TENSOR)), ((D,), ())]),
    (norm, "embed of both split", [((B, T, D), (DATA, None, TENSOR)), ((D,), (TENSOR,))]),
    (look_up, "rows of the table split", [((V, D), (TENSOR,)), ((B, T), (DATA,))]),
    (look_up, "embed of the table split", [((V, D), (None, TENSOR)), ((B, T), (DATA,))]),
    (look_up, "embed and batch over one mesh axis", [((V, D), (None, DATA)), ((B, T), (DATA,))]),
    (dropout, "batch split", [((B, T, D), (DATA,))]),
]  # fmt: skip


def rows() -> Iterator[dict[str, str]]:
    """What becomes of each case."""
    mesh = jax.make_mesh((2, 4), (DATA, TENSOR), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        for part, split, arrays in CASES:
            inputs = [
                jax.ShapeDtypeStruct(shape, jnp.int32 if shape == (B, T) else jnp.float32,
                                     sharding=NamedSharding(mesh, PartitionSpec(*names)))
                for shape, names in arrays
            ]  # fmt: skip
            of = [number for number, like in enumerate(inputs) if like.dtype == jnp.float32]
            refused = ""
            try:
                jax.jit(jax.grad(lambda *given, part=part: part(*given).sum(), of)).lower(*inputs)
            except Exception as error:  # the types of JAX's own have no public name
                refused = f"{type(error).__name__}: {str(error).splitlines()[0][:70]}"
            yield {"part": part.__name__, "placement": split, "refused": refused}


def main() -> None:
    measure.simulate(8)
    found = list(rows())
    print(measure.markdown(found, {"part": "part", "placement": "placement", "refused": "refused"}))
    print(f"\njax {jax.__version__} refuses {sum(bool(row['refused']) for row in found)} of {len(found)}")


if __name__ == "__main__":
    main()
