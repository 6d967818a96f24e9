"""States to save, and the checkpoints of one folder that are opened again and again."""

from pathlib import Path
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from gspmd_lm.workdir.checkpoint import Checkpoints

ARCHITECTURE = {"layers": 4, "embed": 8, "norm.kind": "rmsnorm", "attention.rope.scaling": None}
SIZES = {"data": 2, "tensor": 2}  # of the devices: each piece of an array is a file to write


class Counters(NamedTuple):
    skipped: jax.Array
    pairs: tuple[jax.Array, None]


@flax.struct.dataclass
class State:
    step: jax.Array
    weights: dict[str, Any]
    opt_state: optax.OptState
    key: jax.Array
    counters: Counters


def make_state(step: int, axes: tuple[str | None, ...] = ("data",), optimizer=None, embed: int = 8) -> State:
    """A state whose values depend on `step`; weights are sharded over `axes`, all else is replicated."""
    auto = (AxisType.Auto,) * 2
    mesh = jax.make_mesh(tuple(SIZES.values()), tuple(SIZES), auto, devices=jax.devices()[:4])
    split, whole = (NamedSharding(mesh, PartitionSpec(*spec)) for spec in (axes, ()))
    table = np.random.default_rng(step).normal(size=(16, embed)).astype(np.float32)
    weights = {
        "table": jax.device_put(table, split),
        "block": {
            "w": jax.device_put(jnp.asarray(table, jnp.bfloat16), split),
            "scale": jax.device_put(table[0], whole),
        },
    }
    optimizer = optimizer or optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    others = jax.device_put(
        (jnp.int32(step), jax.random.key(step), Counters(jnp.int32(7), (jnp.arange(step, step + 3), None))), whole
    )
    opt_state = jax.tree.map(lambda x: x + step if x.ndim else jax.device_put(x + step, whole), optimizer.init(weights))
    return State(others[0], weights, opt_state, others[1], others[2])


def abstract(state: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


def assert_equal(actual: State, expected: State) -> None:
    """Same tree, values, dtypes and shardings, bit for bit."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim)
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


class Run:
    """Opens the checkpoints of one directory again and again, as restarts would; collects the reports."""

    def __init__(self, directory: Path):
        self.directory = directory
        self.reports: list[str] = []
        self.opened: list[Checkpoints] = []

    def open(self, *, keep: int = 3, keep_every: int = 0, architecture=ARCHITECTURE) -> Checkpoints:
        checkpoints = Checkpoints(
            str(self.directory), keep=keep, keep_every=keep_every, architecture=architecture, report=self.reports.append
        )
        self.opened.append(checkpoints)
        return checkpoints

    def save(self, *steps: int) -> Checkpoints:
        checkpoints = self.open()
        for step in steps:
            checkpoints.save(step, make_state(step), {"data": {"step": step}})
        checkpoints.wait()
        return checkpoints

    def largest_file(self, step: int) -> Path:
        files = [path for path in (self.directory / str(step) / "state").rglob("*") if path.is_file()]
        return max((path for path in files if path.parent.name == "d"), key=lambda path: path.stat().st_size)


def flip_byte(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(bytes(data))
