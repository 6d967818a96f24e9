"""The train step compiled for a target: in a process of its own, several side by side, kept by content.

`programs` is for callers; run as a module, this file is the process that compiles one program.
"""

import contextlib
import dataclasses
import functools
import gzip
import hashlib
import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gspmd_lm import config as configs
from gspmd_lm import files, versions
from gspmd_lm.config import Config, paths
from gspmd_lm.errors import InputError, RunFailed
from gspmd_lm.foresight import exported
from gspmd_lm.foresight.pickled import load_task, pickle_task, read_jax_options
from gspmd_lm.foresight.propagation import Reading
from gspmd_lm.hardware import target as targets
from gspmd_lm.hardware.chips import gpu_target_config
from gspmd_lm.hardware.target import Target
from gspmd_lm.runtime import host, quiet
from gspmd_lm.sharding.problems import ShardingError
from gspmd_lm.sharding.rules import Rules

if TYPE_CHECKING:
    from jax.stages import Compiled

    from gspmd_lm.foresight.any_step import BuiltProgram, Program
    from gspmd_lm.infer.programs import GenerationPrograms
    from gspmd_lm.program.task import Task
    from gspmd_lm.sharding.shapes import Arrays
    from gspmd_lm.train.step import Step

FORMAT = 3  # raise it when the files of an entry change
EXECUTABLE = "executable"
ENTRY = ("facts.json", "program.txt.gz", "notes.json", EXECUTABLE)  # of a kept program; the last two not always
CACHE_LIMIT_BYTES = 4 * 2**30
PROCESS_BYTES = 5 * 2**30  # what one compilation may need: 4 GB were seen, for 405B on 512 chips
# What decides a program besides the request and the packages: the rooms that the step is made of.
_SOURCES = ("config", "hardware", "runtime", "sharding", "model", "program", "train", "infer", "foresight/compile.py")
_READERS = ("foresight/equations.py", "foresight/propagation")  # of its trace

Progress = Callable[[str], None]
PHASES = ("train", "prefill", "decode")


@dataclasses.dataclass(frozen=True)
class CompileRequest:
    """One program to compile. The mesh of `rules` is filled for the devices of `target`."""

    config: "Config | Task | Program"
    rules: Rules  # of a program: without a row, whatever its mesh
    target: Target
    export: bool = False  # keep the executable too
    phase: str = "train"  # one of PHASES
    sizes: Mapping[str, list[int]] | None = None  # of a task's parameters, as the caller's module has them
    jax_options: Mapping[str, Any] = dataclasses.field(default_factory=read_jax_options)

    @property
    def name(self) -> str:
        phase = "" if self.phase == "train" else f"{self.phase} of "
        under = f" under {self.rules.name}" if self.rules.name else ""
        return f"{phase}{self.config.name}{under} for {self.target.text}"

    def key(self) -> str:
        """A hash of all that the program depends on. Paths of files and comments in them are no part of it."""
        if isinstance(self.config, Config):
            computed: Any = configs.to_dict(self.config) | {"name": ""}
        else:
            computed = pickle_task(self.config, {}).hex()
        chip = self.target.chip
        gpu_config = gpu_target_config(chip) if chip and chip.gpu else ""
        wanted = [
            FORMAT,
            computed,
            self.rules.facts(),
            [self.target.platform, chip and chip.compiler_name, self.target.topology, self.target.slices],
            gpu_config,
            compilers(self.target),
            versions.source(*_SOURCES, *_READERS),
            self.export,
            self.phase,
            self.jax_options,
        ]
        return hashlib.sha256(json.dumps(wanted, sort_keys=True).encode()).hexdigest()[:32]


@dataclasses.dataclass(frozen=True)
class CompiledProgram:
    """A compiled step, or the compiler's refusal. Entry k of coords, slices and hosts belongs to partition k."""

    text: str  # compiled and scheduled, as XLA writes it; "" after a refusal
    executable: Path | None  # where it was exported
    refusal: str  # what the compiler said when memory does not suffice
    memory: Mapping[str, int]  # bytes per device as the compiler counts them; empty after a refusal
    state_bytes: Mapping[str, int]  # weights, optimizer, batch, cache: bytes per device, counted from shapes
    coords: tuple[tuple[int, ...], ...]
    slices: tuple[int, ...]
    hosts: tuple[int, ...]
    reading: Reading  # of the traced step
    options: Mapping[str, Any]  # what the compiler was told
    versions: Mapping[str, str]
    compile_s: float
    notes: tuple[str, ...] = ()  # what the partitioner complained of while it compiled
    step: Mapping[str, Any] | None = None  # the facts of a `BuiltProgram`; None for a config or a task


def compilers(target: Target) -> dict[str, str]:
    """The packages that decide what is compiled, without importing any."""
    compiler = {"cpu": (), "tpu": ("libtpu",), "gpu": (versions.cuda_plugin(),)}[target.platform]
    installed = versions.installed_versions(("jax", "jaxlib", "flax", "optax", *compiler))
    return {name: version or "not installed" for name, version in installed.items()}


def programs(
    requests: Sequence[CompileRequest], say: Progress = lambda _: None, cache: str | None = None
) -> list[CompiledProgram]:
    """The compiled programs, in the order of `requests`: found in the cache, or compiled now.

    Those of a model of one's own are compiled each time: nothing tells whether the code that it is made of has changed.
    `cache` is a folder; "none" keeps nothing. By default explain/ in $GSPMD_LM_CACHE or in the user's cache directory.
    Raises InputError for what is wrong with a request, RunFailed where the compiler fails for another reason.
    """
    if getattr(sys.modules["__main__"].__spec__, "name", "") == __spec__.name:
        raise InputError(
            "explain is called while a process that compiles imports its caller\n"
            '  fix   put the call below if __name__ == "__main__":'
        )
    with tempfile.TemporaryDirectory() as scratch:
        of_one_s_own = not all(isinstance(request.config, Config) for request in requests)
        nowhere = of_one_s_own or cache == "none"
        root = Path(scratch) if nowhere else Path(cache) if cache else paths.cache_folder("explain")
        _make(root)
        keys = [request.key() for request in requests]  # each once: what is sent need not be the same bytes twice
        distinct = dict(zip(keys, requests, strict=True))
        with ThreadPoolExecutor(side_by_side(len(distinct))) as pool:
            waiting = {key: pool.submit(_program, request, root / key, say) for key, request in distinct.items()}
            compiled = {key: future.result() for key, future in waiting.items()}
        files.trim(root.iterdir(), CACHE_LIMIT_BYTES, keep=compiled)
        return [compiled[key] for key in keys]


def _make(folder: Path) -> None:
    """Makes a folder of the cache. Raises InputError if that is not possible."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise paths.unwritable(folder, error.strerror, "compiled programs ") from error


def side_by_side(wanted: int) -> int:
    """The number of compilations to run at once, which cores and free memory limit."""
    free = host.free_bytes()
    fit = wanted if free is None else free // PROCESS_BYTES
    return max(1, min(wanted, host.count_cpus(), fit))


def _program(request: CompileRequest, folder: Path, say: Progress) -> CompiledProgram:
    folder = folder if not (theirs := paths.cache_entry(folder)).exists() else theirs
    if folder.exists() and (damage := files.damage(folder, ENTRY)):
        say(f"the kept program of {request.name} is damaged ({damage}) and is made anew")
        shutil.rmtree(folder, ignore_errors=True)  # another process may be at it too
        folder = paths.cache_entry(folder)
    if folder.exists():
        with contextlib.suppress(PermissionError):  # of another user
            os.utime(folder)
    else:
        say(f"compiling {request.name} ...")
        started = time.monotonic()
        partial = folder.with_name(f"{folder.name}.{secrets.token_hex(4)}{files.PARTIAL}")
        _make(partial)
        try:
            (partial / "request.pickle").write_bytes(pickle_task(request, request.jax_options))
            _run_compiler(request, partial)
            (partial / "request.pickle").unlink()
            files.seal(partial, ENTRY)
            try:
                partial.rename(folder)
            except OSError:  # somebody else was faster
                if not folder.exists():
                    raise
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        say(f"compiled {request.name} in {time.monotonic() - started:.0f} s")
    facts = json.loads((folder / "facts.json").read_text())
    text = "" if facts["refusal"] else gzip.decompress((folder / "program.txt.gz").read_bytes()).decode()
    facts["reading"] = Reading.from_plain(facts["reading"])
    facts["coords"] = tuple(map(tuple, facts["coords"]))
    executable, notes = folder / EXECUTABLE, folder / "notes.json"
    facts["executable"] = executable if executable.exists() else None
    facts["notes"] = tuple(json.loads(notes.read_text())) if notes.exists() else ()
    return CompiledProgram(text=text, **facts)


def _run_compiler(request: CompileRequest, folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "gspmd_lm.foresight.compile", str(folder)],
        env=_environment(() if isinstance(request.config, Config) else sys.path),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    if (folder / "error.json").exists():
        kind, message = json.loads((folder / "error.json").read_text())
        raise (ShardingError if kind == ShardingError.__name__ else InputError)(message)
    if done.returncode:
        last = "\n".join(f"  {line}" for line in done.stderr.strip().splitlines()[-12:])
        raise RunFailed(f"{request.name}: the compiler failed (exit code {done.returncode})\n{last}")
    notes = re.findall(r"\[SPMD\] (Involuntary full rematerialization.*)", done.stderr)
    if notes:
        (folder / "notes.json").write_text(json.dumps(notes))


def sizes(arrays: "Arrays") -> dict[str, list[int]]:
    """The shape of each parameter of a task, which another process must find as well."""
    from gspmd_lm.sharding.shapes import pairs

    return {leaf.path: list(like.shape) for leaf, like in pairs(arrays.named_params, arrays.params)}


def _check_sizes(caller_sizes: Mapping[str, list[int]], compiler_sizes: Mapping[str, list[int]], name: str) -> None:
    other = next(
        (what for what in {**caller_sizes, **compiler_sizes} if caller_sizes.get(what) != compiler_sizes.get(what)),
        None,
    )
    if other:
        caller, compiler = (sizes.get(other, "nothing") for sizes in (caller_sizes, compiler_sizes))
        raise InputError(
            f"task {name}: its functions have other sizes in the process that compiles, which imports their module "
            f"anew\n  {other}: {caller} here, {compiler} there\n"
            "  fix   hand sizes to the functions, as in init=functools.partial(init, sizes), instead of changing "
            "globals of a module after its import"
        )


def _environment(modules: Sequence[str]) -> dict[str, str]:
    """The environment of the compiling process: nothing of an accelerator that may be here, no flags of the caller.

    `modules`: the folders in which it finds the caller's own modules.
    """
    environment = quiet.environment_without_accelerators(modules) | {"JAX_ENABLE_COMPILATION_CACHE": "false"}
    return {name: value for name, value in environment.items() if name not in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")}


# The process that compiles


def _compile(request: CompileRequest, folder: Path) -> None:
    """Writes program.txt.gz and facts.json into `folder`."""
    import jax

    from gspmd_lm.foresight import any_step, target_answers
    from gspmd_lm.runtime import compiler, startup

    config, rules, target = request.config, request.rules, request.target
    startup.start(platform="cpu", simulated_devices=target.devices if target.platform == "cpu" else 1)
    devices = targets.devices(target)
    with target_answers.target_answers(target, devices):
        if isinstance(config, any_step.Program):
            built = any_step.build(config, devices)
            options, facts_of_step, traced, lowered = {**built.options}, built.facts, built.traced, built.lowered
            read = built.read
        else:
            built = _build(config, request, devices)
            kind = {"train": "trace_train", "prefill": "trace_prefill", "decode": "trace_decode"}[request.phase]
            options, facts_of_step = {**built.options(*built.program_kinds)}, None
            traced = getattr(built, kind)()
            lowered = traced.lower()
            read = functools.partial(any_step.read, traced, lowered, built.mesh)
    if target.chip and target.chip.gpu:
        options["xla_gpu_autotune_level"] = 0  # it would time candidates on a GPU
    lowered_at = time.monotonic()
    reading = read()
    try:
        compiled = compiler.compile(lowered, options, target.platform, rules.path or config.name)
    except jax.errors.JaxRuntimeError as error:
        if "CustomSPMDPartitioning" in str(error):
            raise any_step.no_partitioner(traced, request.name) from error
        if "ptxas too old" in str(error):
            raise InputError(
                f"--target={target.text}: the ptxas that is installed does not know the GPU, as that of CUDA 13 does "
                "not know Volta\n  fix   put a ptxas that knows it first in PATH: of CUDA 12 for a V100"
            ) from error
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        compiled = str(error)
    compile_s = time.monotonic() - lowered_at
    program = describe_compiled(built, compiled, reading, options, target, compile_s)
    facts: dict[str, Any] = dataclasses.asdict(program) | {"step": facts_of_step}
    text, _ = facts.pop("text"), facts.pop("executable")
    if request.export and not isinstance(compiled, str):
        packed = exported.pack(compiled, request.key(), request.name, compilers(target))
        (folder / EXECUTABLE).write_bytes(packed)
    (folder / "program.txt.gz").write_bytes(gzip.compress(text.encode(), compresslevel=5, mtime=0))
    (folder / "facts.json").write_text(json.dumps(facts))


def _build(config: "Config | Task", request: CompileRequest, devices: Sequence[Any]) -> "Step | GenerationPrograms":
    """The step of a config or task, or the programs of generation. Raises as `_check_sizes`."""
    from gspmd_lm.infer import programs as generation
    from gspmd_lm.train import state, step

    rules, platform = request.rules, request.target.platform
    if request.phase == "train":
        arrays = state.arrays_and_warnings(config, rules, platform)[0]
        if request.sizes is not None:
            _check_sizes(request.sizes, sizes(arrays), config.name)
        return step.build_step(config, rules, arrays, devices)
    assert isinstance(config, Config), "the caller has checked it"
    whole = generation.whole_context(config)
    arrays, _ = generation.arrays_and_warnings(config, rules, platform, whole)
    return generation.build_programs(config, rules, arrays, devices, whole)


def describe_compiled(
    built: "Step | GenerationPrograms | BuiltProgram",
    compiled: "Compiled | str",
    reading: Reading,
    options: Mapping[str, Any],
    target: Target,
    compile_s: float,
) -> CompiledProgram:
    """The facts about a compiled step; `compiled` is the compiler's message where it refused to compile."""
    import jax

    from gspmd_lm.sharding.shapes import bytes_per_device

    text, memory = "", {}
    if not isinstance(compiled, str):
        analysis: Any = compiled.memory_analysis()
        memory = {name: getattr(analysis, name) for name in dir(analysis) if name.endswith("_in_bytes")}
        text = compiled.as_text() or ""
    return CompiledProgram(
        text=text,
        executable=None,
        refusal=compiled if isinstance(compiled, str) else "",
        memory=memory,
        state_bytes={
            name: sum(map(bytes_per_device, jax.tree.leaves(tree))) for name, tree in built.arrays_between_steps.items()
        },
        **targets.device_locations(built.mesh),
        reading=reading,
        options=dict(options),
        versions=compilers(target),
        compile_s=compile_s,
    )


def _main(folder: Path) -> int:
    quiet.collect_seldom()
    request = load_task((folder / "request.pickle").read_bytes())
    try:
        _compile(request, folder)
    except InputError as error:
        (folder / "error.json").write_text(json.dumps([type(error).__name__, str(error)]))
        return 2
    return 0


if __name__ == "__main__":
    from gspmd_lm.foresight.compile import _main as main  # not __main__'s: what was pickled knows the module's name

    sys.exit(main(Path(sys.argv[1])))
