"""A step of one's own: whatever `jax.jit` traces, given as a function of the devices that it is for."""

import collections
import dataclasses
import functools
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import mlir
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gspmd_lm.errors import InputError, did_you_mean
from gspmd_lm.foresight import equations, meshes
from gspmd_lm.foresight.propagation import Reading, read_step
from gspmd_lm.sharding import op_names
from gspmd_lm.sharding.shapes import bytes_per_device

_MESH = 'jax.sharding.Mesh(np.reshape(devices, (4, 2)), ("data", "tensor"))'
_ABSTRACT = (
    "jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec)), with shapes of jax.eval_shape(init)"
)
_WITHOUT_VALUES = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.NonConcreteBooleanIndexError,
)
# In what jax says where devices would hold or run something.
_ABSENT = ("compile-only", "has no attribute 'local_devices'")
_NOT_THEIRS = "site-packages/", "dist-packages/", "/lib/python", "<frozen", "gspmd_lm/foresight/"


@dataclasses.dataclass(frozen=True)
class Program:
    """A function from devices to `jax.jit(...).trace(...)`, or where it stands: train:step, or train.py:step."""

    step: Callable[[Sequence[Any]], "jax.stages.Traced"] | str

    @property
    def name(self) -> str:
        if isinstance(self.step, str):
            return os.path.basename(self.step)
        function: Any = self.step.func if isinstance(self.step, functools.partial) else self.step
        place, name = function.__module__, getattr(function, "__qualname__", type(function).__name__)
        if place == "__main__":  # the script that runs; a cell of a notebook stands in no file
            file = getattr(getattr(function, "__code__", None), "co_filename", "")
            place = os.path.basename(file) if os.path.isfile(file) else ""
        return f"{place}:{name}" if place else name


@dataclasses.dataclass(frozen=True)
class BuiltProgram:
    """A program on its mesh, ready to be compiled."""

    traced: jax.stages.Traced
    lowered: jax.stages.Lowered
    mesh: Mesh
    arguments: Mapping[str, jax.ShapeDtypeStruct]  # by path, such as state.params['w']; those that the step reads
    placed: Sequence[jax.ShapeDtypeStruct]  # all arguments: see `place_arguments`
    joined: meshes.JoinedAxes
    options: Mapping[str, Any]  # of the compiler, as `jax.jit` was given them
    callbacks: tuple[str, ...]  # where it calls Python on the host: pure_callback at train.py:7, in train:step

    @property
    def arrays_between_steps(self) -> dict[str, Any]:
        """The arrays that devices hold between steps, in their own memory; simulated devices have that of the host."""
        simulated = self.mesh.devices.flat[0].platform == "cpu"

        def is_on_device(like: Any) -> bool:
            return simulated or like.sharding.memory_kind in (None, "device")

        return {"arguments": {path: like for path, like in self.arguments.items() if is_on_device(like)}}

    @property
    def replaceable(self) -> list[str]:
        """The paths of arguments that are not donated, and whose place a result of their shape and dtype could take."""
        results = collections.Counter((one.shape, one.dtype) for one in jax.tree.leaves(self.traced.out_info))
        donated = [info.donated for info in jax.tree.leaves(self.traced.args_info)]
        # The results of these have a place already.
        results -= collections.Counter(
            (like.shape, like.dtype) for like, is_donated in zip(self.placed, donated, strict=True) if is_donated
        )
        read = [is_donated for is_donated, like in zip(donated, self.placed, strict=True) if like.sharding]
        paths: list[str] = []
        for (path, like), is_donated in zip(self.arguments.items(), read, strict=True):
            if not is_donated and results[like.shape, like.dtype] > 0:
                results[like.shape, like.dtype] -= 1
                paths.append(path)
        return paths

    @property
    def facts(self) -> dict[str, Any]:
        """Plain values for a report, such as its mesh, and the path, shape, split, bytes and dtype of each argument."""
        arguments = [
            [path, like.shape, split(like), bytes_per_device(like), str(like.dtype)]
            for path, like in self.arguments.items()
        ]
        mesh = dict(self.mesh.shape)
        return {"mesh": mesh, "arguments": arguments, "callbacks": self.callbacks, "replaceable": self.replaceable}

    def read(self) -> Reading:
        """The transfers and FLOPs of one device when the program runs."""
        return _read(self.traced, self.placed, self.mesh, self.joined)


def build(program: Program, devices: Sequence[Any]) -> BuiltProgram:
    """The program for `devices`, traced and lowered. Raises InputError for what is wrong or not supported."""
    name = program.name
    function = find(program.step) if isinstance(program.step, str) else program.step
    traced = _call(name, function, devices)
    traced = getattr(traced, "traced", traced)  # flax.nnx.jit has it there
    if not isinstance(traced, jax.stages.Traced):
        raise InputError(
            f"{name}: gives a {type(traced).__name__}, and one traced step is explained\n"
            "  fix   return jax.jit(update).trace(state, batch); of several programs, explain one after the other; a "
            "step of jax.pmap is written as jax.jit of a jax.shard_map"
        )
    if traced.fun_name in op_names.PROGRAMS:  # jax has no public way to give a traced function another name
        internal: Any = traced
        internal._params = {**internal._params, "name": traced.fun_name.lstrip("_")}
    calls = [
        one
        for one in _equations(traced.jaxpr.jaxpr)
        if "callback" in one.primitive.name or one.primitive.name == "debug_print"
    ]
    for primitive in {one.primitive for one in calls} if devices[0].platform != "cpu" else ():
        for platform in ("tpu", "gpu"):
            mlir.register_lowering(primitive, _lower_without_python, platform=platform)
    callbacks = tuple(
        dict.fromkeys(f"{one.primitive.name} at {_place(one.source_info.traceback, name)}" for one in calls)
    )
    # jax has no public name for the shardings of a step that is not compiled yet, nor for the options of jax.jit.
    lowered = _call(name, traced.lower)
    lowering: Any = lowered._lowering
    placed: list[Any] = [one.mesh for one in _shardings(lowered) if isinstance(one, NamedSharding)]
    if not placed and traced.jaxpr.in_avals and not lowering.compile_args["kept_var_idx"]:
        raise InputError(f"{name}: it reads none of its arguments\n  fix   return what the step computes of them")
    if not placed:
        what = "no argument that it reads has a NamedSharding, which says where it lives"
        raise InputError(f"{name}: {what}\n  fix   {_ABSTRACT}")
    others = _other_meshes(traced, lowered)
    mesh = meshes.choose_mesh(placed[0], others)
    if {*mesh.devices.flat} != {*devices}:
        wrong = f"has {mesh.size} devices" if mesh.size != len(devices) else "is not made of the devices"
        raise InputError(
            f"{name}: its mesh ({meshes.say_sizes(mesh)}) {wrong}, and the function is given {len(devices)}\n"
            f"  fix   make it of those that are given, such as {_MESH}, or name a target of {mesh.size} devices"
        )
    joined = meshes.join_axes(mesh, others, name)
    paths, leaves = traced.jaxpr.jaxpr.debug_info.arg_names, place_arguments(traced, lowered, mesh, joined)
    named = paths if paths and len(paths) == len(leaves) else [None] * len(leaves)
    arguments = {
        path or f"argument {number}": like
        for number, (path, like) in enumerate(zip(named, leaves, strict=True))
        if like.sharding
    }
    options = dict(lowering._compiler_options_kvs)
    return BuiltProgram(traced, lowered, mesh, arguments, leaves, joined, options, callbacks)


def _lower_without_python(ctx: Any, *operands: Any, **_: Any) -> Any:
    """The stand-in for a call of Python, in a program whose devices are not here: results of the right shape.

    A call without results leaves nothing, so the compiler leaves out what only such a call reads.
    """

    def results(*arrays: jax.Array) -> list[jax.Array]:
        # They are made of all operands, so that the compiler does not leave out what makes these.
        first = sum(jnp.ravel(array)[0].astype(jnp.float32) for array in arrays if array.size)
        return [jnp.full(aval.shape, first, aval.dtype) for aval in ctx.avals_out]

    return mlir.lower_fun(results, multiple_results=True)(ctx, *operands)


def place_arguments(
    traced: jax.stages.Traced, lowered: jax.stages.Lowered, mesh: Mesh, joined: meshes.JoinedAxes
) -> list[jax.ShapeDtypeStruct]:
    """The arguments of a program, each with a sharding of `mesh`; without one where the program does not read it.

    joined: the axes of `mesh` that those of other meshes are.
    """
    lowering: Any = lowered._lowering
    known, leaves = lowering.compile_args, [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in traced.jaxpr.in_avals]
    for number, sharding in zip(sorted(known["kept_var_idx"]), known["in_shardings"], strict=True):
        is_named = isinstance(sharding, NamedSharding)
        placed = meshes.place_on(mesh, sharding, joined) if is_named else NamedSharding(mesh, PartitionSpec())
        leaves[number] = jax.ShapeDtypeStruct(leaves[number].shape, leaves[number].dtype, sharding=placed)
    return leaves


def read(traced: jax.stages.Traced, lowered: jax.stages.Lowered, mesh: Mesh) -> Reading:
    """The transfers and FLOPs of one device when a program that was not built here runs on a mesh."""
    joined = meshes.join_axes(mesh, _other_meshes(traced, lowered), "the program")
    return _read(traced, place_arguments(traced, lowered, mesh, joined), mesh, joined)


def _read(
    traced: jax.stages.Traced, arguments: Sequence[jax.ShapeDtypeStruct], mesh: Mesh, joined: meshes.JoinedAxes
) -> Reading:
    platform = mesh.devices.flat[0].platform
    return read_step(
        traced.jaxpr,
        arguments,
        traced.out_info,
        mesh.shape,
        traced.fun_name,
        joined,
        "cuda" if platform == "gpu" else platform,  # as `jax.lax.platform_dependent` has it
    )


def _shardings(lowered: jax.stages.Lowered) -> list[Any]:
    lowering: Any = lowered._lowering
    known = lowering.compile_args
    return [*known["in_shardings"], *known["out_shardings"], *known["intermediate_shardings"]]


def _other_meshes(traced: jax.stages.Traced, lowered: jax.stages.Lowered) -> list[Any]:
    return [*meshes.find_meshes(_shardings(lowered), _equations(traced.jaxpr.jaxpr))]


def split(like: jax.ShapeDtypeStruct) -> list[list[str]]:
    """The mesh axes that split each dimension of an array."""
    sharding: Any = like.sharding
    spec = [*sharding.spec, *[None] * (len(like.shape) - len(sharding.spec))]
    return [[axes] if isinstance(axes, str) else [*(axes or ())] for axes in spec]


def find(place: str) -> Any:
    """The function at module:function or file.py:function. Raises InputError where there is none."""
    module_name, colon, function = place.rpartition(":")
    if not (colon and module_name and function):
        raise InputError(f"{place}: no such form\n  fix   module:function, or file.py:function")
    if module_name.endswith(".py"):
        file = Path(module_name)
        if not file.is_file():
            raise InputError(f"{place}: there is no file {file} in {Path.cwd()}\n  fix   file.py:function")
        sys.path.insert(0, str(file.absolute().parent))  # as when the file runs
        spec: Any = importlib.util.spec_from_file_location(f"program_{file.stem}", file)  # a name that nothing else has
        module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        _call(place, spec.loader.exec_module, module)
    else:
        try:
            missing = importlib.util.find_spec(module_name) is None
        except ModuleNotFoundError:
            missing = True
        if missing:
            raise InputError(
                f"{place}: there is no module {module_name} in {Path.cwd()} or in what is installed\n"
                "  fix   module:function, in the folder where the command runs, or file.py:function"
            )
        module = _call(place, importlib.import_module, module_name)
    try:
        return functools.reduce(getattr, function.split("."), module)
    except AttributeError as error:
        raise InputError(
            f"{place}: {os.path.basename(module_name)} has no {function}{did_you_mean(function, vars(module))}\n"
            "  fix   name a function from devices to jax.jit(...).trace(...)"
        ) from error


def _call(name: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """The result of a function of the user. What it raises becomes an InputError that names its line."""
    try:
        return function(*arguments)
    except InputError:
        raise
    except (Exception, SystemExit) as error:
        message = str(error).strip().partition("\n")[0]
        if isinstance(error, _WITHOUT_VALUES):
            fix = "a step is traced from shapes: jnp.where and jax.lax.cond choose by values, static_argnums hands them"
        elif any(words in str(error) for words in _ABSENT):
            message, fix = "real arrays or running programs on devices that need not be here", _ABSTRACT
        else:
            fix = "the same function runs here, with its whole traceback: step(jax.devices())"
        what = f"{type(error).__name__}: " if fix != _ABSTRACT else ""
        raise InputError(f"{_place(error.__traceback__, name)}: {what}{message}\n  fix   {fix}") from error


def no_partitioner(traced: jax.stages.Traced, name: str) -> InputError:
    """The error to raise where the compiler cannot partition a function of the step."""
    program = traced.jaxpr.jaxpr
    frames = [one.source_info.traceback for one in _equations(program) if one.primitive.name == "custom_partitioning"]
    return InputError(
        f"{_place(next(iter(frames), None), name)}: custom_partitioning: Python says there how a function is split "
        "among devices, and a compiler for TPUs that are not here does not ask it\n"
        "  fix   call the function in a jax.shard_map over all mesh axes, or explain the step for GPUs"
    )


def _place(frames: Any, name: str) -> str:
    """file:line of the innermost of the user's frames of a traceback, Python's or jax's, and the step's name."""
    if frames is None:
        return name
    python = frames.as_python_traceback() if hasattr(frames, "as_python_traceback") else frames
    lines = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(python)]
    theirs = [f"{file}:{line}" for file, line in lines if not any(folder in file for folder in _NOT_THEIRS)]
    return f"{theirs[-1]}, in {name}" if theirs else name


def _equations(jaxpr: Any) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        yield equation
        for inner in equations.inner_jaxprs(equation.params):
            yield from _equations(inner)
