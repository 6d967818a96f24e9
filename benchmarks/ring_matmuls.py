"""Whether rings hide tensor parallelism's collectives behind matmuls: docs/rules_reference.md, interleave.

    python -m benchmarks.ring_matmuls [--targets v5p:2x2x2 v6e:2x4 h100:8]

A ring (arXiv 2105.05720) sends an array piece by piece between neighbours, while what has arrived is multiplied. Here
it runs in both directions at once, over four devices of which each has its two neighbours beside it. Two MLPs with the
sizes of Llama 3 8B are compiled, forward, once more, and backward: with all-gathers and reduce-scatters, and with
rings. The pieces of a ring stay apart from the first product to the last one, so that nothing is copied to put them
together. First the gradients of both forms are compared on simulated devices. The steps are predicted, as `explain`
predicts any program.
"""

import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import gspmd_lm
from benchmarks import measure

_TENSOR, _FSDP = 4, 2
_LAYERS, _D, _F, _ROWS, _T = 2, 4096, 14336, 8, 4096  # layers, width, hidden width, rows, tokens of a row
_WEIGHTS = (P(None, None, "tensor"), P(None, "tensor", None))
_X = P("fsdp", "tensor")
_PLACE = {0: 0, -1: 1, 1: 2, 2: 3}  # of the piece of the device that is so many further on, in the list of pieces


def main() -> None:
    parser = measure.flags(__doc__, writes=False)
    parser.add_argument(
        "--targets", nargs="+", default=["v5p:2x2x2", "v6e:2x4", "h100:8"], help="of eight devices each"
    )
    targets = parser.parse_args().targets
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    jax.config.update("jax_platforms", "cpu")
    print(f"rings change a gradient by at most {difference():.1e} of its largest number")
    print(
        "| target | collectives | step, ms | matmuls, ms | other compute, ms | exposed, ms |\n|---|---|---|---|---|---|"
    )
    for target in targets:
        for name, step in (("collectives", step_of_collectives), ("rings", step_of_rings)):
            parts = gspmd_lm.explain(step, target=target).prediction
            assert parts is not None
            times = parts.step_time_s, parts.matmul_s, parts.other_s, parts.exposed_communication_s
            print(f"| {target} | {name} |", " | ".join(f"{1e3 * seconds:.1f}" for seconds in times), "|", flush=True)


def whole(x_BTD: jax.Array, up_DF: jax.Array, down_FD: jax.Array) -> jax.Array:
    """An MLP of a part of a sequence: the whole sequence is gathered, and the products are reduced and scattered."""
    x_BSD = jax.lax.all_gather(x_BTD, "tensor", axis=1, tiled=True)
    return jax.lax.psum_scatter(_act(x_BSD @ up_DF) @ down_FD, "tensor", scatter_dimension=1, tiled=True)


@jax.custom_vjp
def in_rings(x_BTD: jax.Array, up_DF: jax.Array, down_FD: jax.Array) -> jax.Array:
    """The same MLP, whose pieces of a sequence go around."""
    hidden = [_act(x_BTD @ up_DF) for x_BTD in _sent_around(x_BTD)]
    return _summed_around(hidden, down_FD)


def _backward(kept: tuple[jax.Array, jax.Array, jax.Array], dy_BTD: jax.Array) -> tuple[jax.Array, ...]:
    x_BTD, up_DF, down_FD = kept
    xs, dys = _sent_around(x_BTD), _sent_around(dy_BTD)
    hidden, dprojected = [], []
    for x_BTD, dy_BTD in zip(xs, dys, strict=True):
        h_BTF, of_act = jax.vjp(_act, x_BTD @ up_DF)
        hidden.append(h_BTF)
        dprojected += of_act(dy_BTD @ down_FD.T)
    dx_BTD = _summed_around(dprojected, up_DF.T)
    return dx_BTD, _gradient(xs, dprojected), _gradient(hidden, dys)


in_rings.defvjp(lambda *arguments: (in_rings(*arguments), arguments), _backward)


def _act(projected_BTF: jax.Array) -> jax.Array:
    gate_BTF, up_BTF = jnp.split(projected_BTF, 2, axis=-1)
    return jax.nn.silu(gate_BTF) * up_BTF


def _gradient(xs: list[jax.Array], dys: list[jax.Array]) -> jax.Array:
    """The gradient of a weight, summed over the pieces in float32."""
    pairs = zip(xs, dys, strict=True)
    first, *others = (jnp.einsum("btd,btf->df", x, dy, preferred_element_type=jnp.float32) for x, dy in pairs)
    return sum(others, first)


def _to(step: int, x: jax.Array) -> jax.Array:
    return jax.lax.ppermute(x, "tensor", [(i, (i + step) % _TENSOR) for i in range(_TENSOR)])


def _sent_around(x_BTD: jax.Array) -> list[jax.Array]:
    """The pieces of all four devices, in the order of `_PLACE`; the farthest one comes in halves from both sides."""
    half = x_BTD.shape[1] // 2
    before_BTD, after_BTD = _to(1, x_BTD), _to(-1, x_BTD)
    farthest = _to(1, before_BTD[:, :half]), _to(-1, after_BTD[:, half:])
    return [x_BTD, before_BTD, after_BTD, jnp.concatenate(farthest, axis=1)]


def _summed_around(pieces: list[jax.Array], weight_FD: jax.Array) -> jax.Array:
    """The products of this device's piece, summed over the devices; half of the columns goes around each way."""
    left_FD, right_FD = jnp.split(weight_FD, 2, axis=1)

    def of(place: int) -> jax.Array:
        return pieces[_PLACE[(place + 1) % _TENSOR - 1]]

    a_BTD, b_BTD = of(-1) @ left_FD, of(1) @ right_FD
    for away in range(2, _TENSOR + 1):
        a_BTD, b_BTD = _to(1, a_BTD) + of(-away) @ left_FD, _to(-1, b_BTD) + of(away) @ right_FD
    return jnp.concatenate([a_BTD, b_BTD], axis=-1)


def _gradients(mlp: Callable[..., jax.Array], mesh: Mesh) -> Any:
    def layer(x_BTD: jax.Array, weights: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        scale_BT1 = jax.lax.rsqrt(jnp.square(x_BTD.astype(jnp.float32)).mean(-1, keepdims=True) + 1e-5)
        return x_BTD + mlp(x_BTD * scale_BT1.astype(x_BTD.dtype), *weights), None

    def loss(weights: Any, x_BTD: jax.Array) -> jax.Array:
        y_BTD, _ = jax.lax.scan(jax.checkpoint(layer), x_BTD, weights)
        return jnp.square(y_BTD.astype(jnp.float32)).sum()

    gradients = jax.grad(loss, argnums=(0, 1))
    specs = (_WEIGHTS, _X)
    return jax.jit(jax.shard_map(gradients, mesh=mesh, in_specs=specs, out_specs=specs, check_vma=False))


def step_of_collectives(devices: Sequence[Any]) -> Any:
    """The gradients of the MLPs with all-gathers and reduce-scatters, traced for the devices of a target."""
    return _traced(whole, devices)


def step_of_rings(devices: Sequence[Any]) -> Any:
    """The same gradients with rings."""
    return _traced(in_rings, devices)


def _traced(mlp: Callable[..., jax.Array], devices: Sequence[Any]) -> Any:
    mesh = Mesh(_in_squares(devices), ("fsdp", "tensor"))
    shapes = ((_LAYERS, _D, 2 * _F), (_LAYERS, _F, _D), (_ROWS, _T, _D))
    up, down, x = (
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
        for shape, spec in zip(shapes, (*_WEIGHTS, _X), strict=True)
    )
    return _gradients(mlp, mesh).trace((up, down), x)


def _in_squares(devices: Sequence[Any]) -> np.ndarray:
    """Eight devices as two rings of four; on a TPU, each ring is a square of neighbours."""
    places = [getattr(device, "coords", (i // 4, i % 4, 0)) for i, device in enumerate(devices)]
    if devices[0].platform != "tpu":
        return np.asarray(devices).reshape(_FSDP, _TENSOR)
    long = int(np.argmax(np.max(places, axis=0)))  # 4 of 2x4 or the first 2 of 2x2x2: each half of it is a square
    other, third = (axis for axis in range(3) if axis != long)

    def corner(device: Any) -> tuple[int, int]:
        at = device.coords
        square = at[long] // 2 if max(p[long] for p in places) == 3 else at[third]
        x, y = at[long] % 2, at[other]
        return square, 2 * y + (x if y == 0 else 1 - x)

    return np.asarray(sorted(devices, key=corner)).reshape(_FSDP, _TENSOR)


def difference() -> float:
    """How far the gradients of both forms are apart on eight simulated devices, over the largest number of each."""
    mesh = Mesh(np.asarray(jax.devices()).reshape(_FSDP, _TENSOR), ("fsdp", "tensor"))
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = ((2, 16, 64), (2, 32, 16), (2, 32, 16))
    up, down, x = (0.2 * jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True))
    found, expected = (jax.tree.leaves(_gradients(mlp, mesh)((up, down), x)) for mlp in (in_rings, whole))
    return max(float(abs(a - b).max() / abs(b).max()) for a, b in zip(found, expected, strict=True))


if __name__ == "__main__":
    main()
