"""The common base of the jitted programs of training, scoring and generation."""

import contextlib
import dataclasses
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from gspmd_lm.hardware.chips import Processor
from gspmd_lm.program.operands import matmul_operands
from gspmd_lm.program.supported import Pass, expert_rounds, kernel_choice
from gspmd_lm.program.task import Batch, Task
from gspmd_lm.runtime import compiler
from gspmd_lm.sharding import mesh as meshes
from gspmd_lm.sharding.annotate import placed_by
from gspmd_lm.sharding.placement import MeshPlacement
from gspmd_lm.sharding.rules import Rules
from gspmd_lm.sharding.shapes import Arrays, bytes_per_device


@dataclasses.dataclass(frozen=True)
class ShardedProgram:
    """A computation under rules on a mesh: where its arrays live, and the context in which it is traced."""

    config: Any  # config.Config; None of a model of one's own
    rules: Rules
    arrays: Arrays
    mesh: Mesh

    @functools.cached_property
    def placement(self) -> MeshPlacement:
        """The placement of arrays, which the model asks for."""
        return MeshPlacement(self.rules, self.mesh)

    @functools.cached_property
    def whole(self) -> Any:
        """The sharding of an array that is replicated on all devices."""
        return self.placement.sharding("rules", "", (), ())

    @property
    def attention_pass(self) -> Pass:
        """The requirements of the program on attention; only those of the decoder have any."""
        raise NotImplementedError

    @property
    def program_kinds(self) -> tuple[str, ...]:
        """The kinds of the program that have compiler options of their own: see `compiler.options`."""
        raise NotImplementedError

    @property
    def processor(self) -> Processor:
        """The processor of the devices, which decides which kernels they can run."""
        return meshes.processor(self.mesh.devices.flat[0])

    @property
    def attention(self) -> str:
        """The attention kernel, with the reason where it is not the fastest; '' where there is nothing to choose."""
        return kernel_choice(self.rules, self.config, self.processor, self.attention_pass) if self.config else ""

    @property
    def choices(self) -> list[str]:
        """The lines of a run before it starts: how attention is computed, products of 8 bits, how tokens travel."""
        operands = matmul_operands(self.config, self.rules, self.processor) if self.config else ""
        rounds = expert_rounds(self.config, self.rules) if self.config else ""
        named = ("attention", self.attention), ("matmuls", operands), ("experts", rounds)
        return [f"{name}: {choice}" for name, choice in named if choice]

    @property
    def matmul_precision(self) -> str:
        """As `jax.default_matmul_precision` takes it."""
        return self.config.model.matmul_precision

    @contextlib.contextmanager
    def trace_under(self, placement: MeshPlacement | None = None) -> Iterator[None]:
        """The context of a whole program: backward rules are traced after the forward pass has returned.

        `placement` answers the model's questions; None: that of the program.
        """
        with placed_by(placement or self.placement), jax.default_matmul_precision(self.matmul_precision):
            yield

    def options(self, *also: str) -> Mapping[str, Any]:
        """The rules' compiler options for the devices of the mesh, and for programs of `also`: see `compiler`."""
        rules, kind = self.rules, self.mesh.devices.flat[0].device_kind
        return compiler.options(meshes.platform(self.mesh), rules.compiler_options, rules.path, kind, also)

    def compile(
        self, lowered: jax.stages.Lowered, what: str = "", fix: str = "", also: Sequence[str] = ()
    ) -> jax.stages.Compiled:
        """A program, compiled with `options`.

        Raises InputError for an option that the compiler refuses and, if `what` is given, where the devices have not
        enough memory: it says that `what` does not fit, and `fix`.
        """
        program = compiler.compile(lowered, self.options(*also), meshes.platform(self.mesh), self.rules.path)
        if what:
            compiler.check_room(program, list(self.mesh.devices.flat), what, fix)
        return program

    def check_held(self, held: Mapping[str, Any]) -> None:
        """Raises InputError if the devices cannot hold arrays: trees of shapes and shardings, by purpose."""
        sizes = {name: sum(map(bytes_per_device, jax.tree.leaves(tree))) for name, tree in held.items()}
        compiler.check_held(sizes, list(self.mesh.devices.flat))


@dataclasses.dataclass(frozen=True)
class TaskProgram(ShardedProgram):
    """A program of a task: training, evaluation or generation."""

    config: Any = dataclasses.field(init=False)  # that of the task; None of a model of one's own
    task: Task

    def __post_init__(self) -> None:
        object.__setattr__(self, "config", self.task.config)

    @property
    def matmul_precision(self) -> str:
        return self.task.matmul_precision

    def batch_of(self, rows: int) -> dict[str, jax.ShapeDtypeStruct]:
        """The shapes and shardings of a batch of `rows` rows."""
        specs = self.task.specs()
        return {
            name: place_shapes(like, self.placement.sharding("rules", specs[name].array, specs[name].axes, like.shape))
            for name, like in self.task.batch(rows).items()
        }

    def evaluate(self, params: Any, batch: Batch) -> dict[str, jax.Array]:
        """The totals of one batch. Evaluation adds up those of all batches: see `add_totals`."""
        with self.trace_under():
            return self.task.totals(params, batch)


def add_totals(totals: Iterable[Mapping[str, jax.Array]]) -> dict[str, Any]:
    """The sums of the totals of batches, in float64: numbers, and arrays of the totals that are arrays."""
    sums: dict[str, Any] = {}
    for of_batch in totals:
        for name, total in jax.device_get(of_batch).items():
            sums[name] = sums.get(name, 0.0) + np.float64(total)
    return sums


def place_shapes(shapes: Any, shardings: Any) -> Any:
    """A tree of shapes with the sharding or format of each."""
    return jax.tree.map(
        lambda like, where: jax.ShapeDtypeStruct(like.shape, like.dtype, sharding=where), shapes, shardings
    )
