"""Reports of layouts: each is checked, compiled for the target, and read."""

import dataclasses
import operator
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from gspmd_lm import files
from gspmd_lm.config import Config
from gspmd_lm.errors import InputError, did_you_mean
from gspmd_lm.foresight import advice, bounds, collectives, exported, hlo, memory, table, whole_job
from gspmd_lm.foresight.any_step import Program
from gspmd_lm.foresight.compile import PHASES, CompiledProgram, CompileRequest, Progress, programs, sizes
from gspmd_lm.foresight.graph import DataflowGraph
from gspmd_lm.foresight.known_errors import NOT_COMPARED, kind_of, known_error
from gspmd_lm.foresight.report import Report
from gspmd_lm.foresight.table import PlacedArray
from gspmd_lm.foresight.timing import predict
from gspmd_lm.hardware import target as targets
from gspmd_lm.hardware.capacity import Assumptions, Price
from gspmd_lm.hardware.network import Network
from gspmd_lm.hardware.target import Target
from gspmd_lm.infer import programs as generation
from gspmd_lm.program.operands import matmul_operands
from gspmd_lm.program.supported import Pass, kernel_choice, settle_rules
from gspmd_lm.program.task import Task
from gspmd_lm.sharding import rules_file
from gspmd_lm.sharding.mesh import cross_slices
from gspmd_lm.sharding.problems import Problem
from gspmd_lm.sharding.rules import Rules
from gspmd_lm.sharding.shapes import Arrays
from gspmd_lm.train import choices, decoder, state

NO_RULES = dataclasses.replace(rules_file.from_dict({}, ""), problems=())  # of a step that brings its own mesh
NOT_ON_CPU = "simulated devices have no speed of their own; explain predicts one for a --target such as v5p:2x2x2"


def reports(
    config: Config | Task,
    layouts: Sequence[Rules],
    target: Target,
    say: Progress = lambda _: None,
    export: Path | None = None,
    phase: str = "train",
) -> list[Report]:
    """One report for each of `layouts`, in their order, for the step that `train` would run on `target`.

    config: what is computed, by the decoder or by a model of one's own.
    phase: prefill and decode ask instead for generation of `data.batch` rows with `data.seq` slots each. Everything is
    checked before anything is compiled. With `export`, the executable of the only layout is kept there.
    Raises ShardingError, InputError or RunFailed.
    """
    _check_request(layouts, phase, export)
    task = decoder.task(config)
    filled = [settle_layout(task, rules, target, phase, say) for rules in layouts]
    checked = [_check(task, rules, target.platform, phase) for rules in filled]
    parameter_sizes = None if task.config else sizes(checked[0][0])
    keep = export is not None
    compiled = programs(
        [CompileRequest(task.config or task, rules, target, keep, phase, parameter_sizes) for rules in filled], say
    )
    if export and compiled[0].executable:
        files.replace(export, compiled[0].executable.read_bytes())
        exported.record(export)
    return [
        report(task, rules, target, arrays, problems, program, phase)
        for rules, (arrays, problems), program in zip(filled, checked, compiled, strict=True)
    ]


def _check_request(layouts: Sequence[Rules], phase: str, export: Path | None) -> None:
    if not layouts:
        raise InputError("compare needs layouts\n  fix   compare(config, ['fsdp8', 'tp8'], target)")
    if phase not in PHASES:
        raise InputError(f"phase={phase}: no such phase{did_you_mean(phase, PHASES)}\n  fix   use {', '.join(PHASES)}")
    if export and phase != "train":
        raise InputError(f"export={export}: only a train step is exported\n  fix   drop phase={phase}")
    if export and len(layouts) > 1:
        raise InputError(f"export={export}: a file holds one executable\n  fix   give one rules file")


def settle_layout(
    task: Task, rules: Rules, target: Target, phase: str = "train", say: Callable[[str], None] = lambda _: None
) -> Rules:
    """The rules filled for the devices of a target, with what the compiled program will have where they leave it open.

    That is the mesh axis that crosses slices, of which `say` is told, and the attention kernel.
    """
    rules = rules.fill(target.devices, f"a target of {{known}} devices: {target.text} has {target.devices}")
    rules = cross_slices(rules, target.slices, say)
    if phase == "train":
        return choices.settle_rules(task, rules, target.processor)
    return (
        settle_rules(rules, task.config, target.processor, _required_pass(task.config, phase)) if task.config else rules
    )


def _required_pass(config: Config, phase: str) -> Pass:
    """The requirements of a program on attention."""
    if phase == "train":
        return state.attention_pass(config)
    return generation.attention_pass(generation.whole_context(config))


def _check(task: Task, rules: Rules, platform: str, phase: str) -> tuple[Arrays, list[Problem]]:
    if phase == "train":
        return state.arrays_and_warnings(task, rules, platform)
    config = generating_config(task)
    return generation.arrays_and_warnings(config, rules, platform, generation.whole_context(config))


def generating_config(task: Task) -> Config:
    """The config of a task that generates. Raises InputError for another task."""
    if not task.config:
        raise InputError(f"{task.name}: only the decoder generates\n  fix   phase: train")
    generation.check_causal(task.config, or_of_source=True)
    return task.config


def report(
    computed: Config | Task,
    rules: Rules,
    target: Target,
    arrays: Arrays,
    problems: Sequence[Problem],
    program: CompiledProgram,
    phase: str = "train",
) -> Report:
    """The report of a layout from its compiled step. `rules` are those that it was built with, with
    their attention kernel chosen; `problems` are the warnings of its check."""
    task = decoder.task(computed)
    config = task.config
    tokens, unit = (task.rows, "tokens") if phase == "decode" else task.batch_size  # of all devices
    if config is None or phase == "train":
        recorded = state.record_arrays(task, arrays, rules.microbatches, rules)
    else:
        recorded = generation.record_arrays(config, arrays, generation.whole_context(config), rules)[phase]
    named = list(table.rows(task, rules, arrays, recorded.arrays, recorded.used))
    graph = DataflowGraph.from_recorder(recorded, arrays)
    needed = 0.0  # the FLOPs that one device cannot do without; 0: not known
    if config and phase != "train":
        cache_bytes = program.state_bytes["cache"]
        lower_bounds = bounds.generation_bounds(config, rules, arrays, target.chip, graph, program.reading, cache_bytes)
    else:
        lower_bounds = bounds.training_bounds(task, rules, arrays, target.chip, graph, program.reading)
        needed = bounds.necessary_flops(config, rules, graph) if config else lower_bounds.flops
    narrow = matmul_operands(config, rules, target.processor) if config else ""
    # No published step that was compared has operands of 8 bits, or stages.
    compared = phase == "train" and target.chip and not target.chip.note and not narrow and not rules.stages
    experts = config.model.num_experts if config else 0
    error = known_error(kind_of(target, rules, experts)) if compared else _not_compared(target)
    read = _read(program, rules, target, named, graph, lower_bounds.flops, tokens, error, needed)
    attention = ""
    if config and phase != "decode":
        attention = kernel_choice(rules, config, target.processor, _required_pass(config, phase))
    gather = choices.gather_choice(task, rules, target.processor) if phase == "train" else ""
    work = None
    if phase == "train" and read.prediction:
        work = whole_job.describe_work(
            task, rules, arrays, target, read.prediction.step_time_s, read.memory.state_bytes, program.compile_s
        )
    report = Report(
        target=target.text,
        chip=target.chip.kinds[0] if target.chip else "",
        devices=target.devices,
        config=task.name,
        rules=rules.path,
        phase=phase,
        mesh=dict(rules.mesh),
        attention=attention,
        gather=gather,
        matmuls=narrow,
        job=work and whole_job.predict(work, Assumptions(), target.price({})),
        parameters=arrays.parameter_count,
        active_parameters=arrays.active_count(config.model) if config else arrays.parameter_count,
        tokens=tokens,
        unit=unit,
        memory=read.memory,
        collectives=read.collectives,
        prediction=read.prediction,
        no_prediction=read.no_prediction,
        floor=lower_bounds,
        warnings=(),
        compile_s=program.compile_s,
        versions=_versions(program),
        arrays=tuple(named),
        rules_text=rules.text,
    )
    report = dataclasses.replace(report, floor=bounds.checked_bounds(report.floor, report.above_floor))
    warned = advice.warnings(
        report, config, rules, target.processor, problems, graph.looked_up, read.module, program.notes
    )
    return dataclasses.replace(report, warnings=warned)


def with_job(report: Report, assumed: Assumptions, price: Price) -> Report:
    """The report with the course of its whole job under other assumptions, and at another price of a chip."""
    return dataclasses.replace(report, job=report.job and whole_job.predict(report.job.work, assumed, price))


def report_of_step(function: Callable[..., Any] | str, target_text: str, say: Progress = lambda _: None) -> Report:
    """The report on a step of one's own, whose function is as of `any_step.Program`. Raises InputError or RunFailed."""
    step, target = Program(function), targets.parse(target_text)
    (program,) = programs([CompileRequest(step, NO_RULES, target)], say)
    assert program.step
    mesh, lower_bounds = program.step["mesh"], bounds.program_bounds(target.chip, target.devices, program.reading)
    arrays = [
        PlacedArray(path, tuple(f"dimension_{n}" for n in range(len(shape))), tuple(shape), spec, spec, held, dtype)
        for path, shape, split, held, dtype in program.step["arguments"]
        for spec in [tuple(map(tuple, split))]
    ]
    rules, graph = dataclasses.replace(NO_RULES, mesh=mesh), DataflowGraph(jax.make_jaxpr(lambda: ())(), ())
    read = _read(program, rules, target, [], graph, lower_bounds.flops, None, _not_compared(target))
    report = Report(
        target=target.text,
        chip=target.chip.kinds[0] if target.chip else "",
        devices=target.devices,
        config=step.name,
        rules="",
        phase="step",
        mesh=mesh,
        parameters=None,
        active_parameters=None,
        tokens=None,
        memory=read.memory,
        collectives=read.collectives,
        prediction=read.prediction,
        no_prediction=read.no_prediction,
        floor=lower_bounds,
        warnings=(),
        compile_s=program.compile_s,
        versions=_versions(program),
        arrays=tuple(arrays),
    )
    report = dataclasses.replace(report, floor=bounds.checked_bounds(report.floor, report.above_floor))
    replaceable = [array for array in arrays if array.path in program.step["replaceable"]]
    warned = advice.advise_on_step(
        report, program.notes, program.step["callbacks"], replaceable, read.module, program.reading.knows_trip_counts
    )
    return dataclasses.replace(report, warnings=warned)


def _not_compared(target: Target) -> str:
    """What is said of predictions that were compared with no measured step."""
    return target.chip.note if target.chip and target.chip.note else NOT_COMPARED


class _Read(NamedTuple):
    """The results of reading a compiled program. Without a program, the module is None and there is no prediction."""

    module: hlo.Module | None
    memory: memory.Memory
    collectives: tuple[collectives.Collective, ...]
    prediction: predict.Prediction | None
    no_prediction: str  # the reason where there is none


def _read(
    program: CompiledProgram,
    rules: Rules,
    target: Target,
    named: Sequence[PlacedArray],
    graph: DataflowGraph,
    flops: float,
    tokens: int | None,
    error: str,
    needed: float = 0.0,
) -> _Read:
    """The program, read with what is known of the arrays `named` and of the rows that place them.

    flops, needed: of one device, as in `predict.predict`. tokens: of all devices; None: not known.
    """
    links = network(program, rules, target)
    limit_bytes = target.chip and target.chip.usable_hbm_bytes
    if program.refusal:
        refused = memory.refused_memory(program.refusal, program.state_bytes, limit_bytes)
        return _Read(None, refused, (), None, "the compiler refused the program: it does not fit")
    module = hlo.parse(program.text, program.slices)
    known, accepted = _device_arrays(named, rules), target.platform == "tpu"
    device_memory = memory.measure(program.memory, program.state_bytes, limit_bytes, module, known, accepted)
    moved = collectives.find(module, rules, {row.path: row.axes for row in named}, links, graph)
    if not target.chip:
        return _Read(module, device_memory, moved, None, NOT_ON_CPU)
    each = None if tokens is None else tokens / target.devices
    predicted = predict.predict(module, target.chip, links, flops, each, error, needed)
    if not predicted.step_time_s:
        return _Read(module, device_memory, moved, None, "the program computes nothing")
    return _Read(module, device_memory, moved, predicted, "")


def network(program: CompiledProgram, rules: Rules, target: Target) -> Network:
    """The devices of a program on its target, and the links between them."""
    hosts = target.simulated_hosts if target.platform == "cpu" else program.hosts
    return Network(target.chip, program.coords, program.slices, hosts, rules.mesh)


def _versions(program: CompiledProgram) -> dict[str, str]:
    return {**program.versions, **{name: str(value) for name, value in program.options.items()}}


def _device_arrays(arrays: Sequence[PlacedArray], rules: Rules) -> Iterator[memory.DeviceArray]:
    """The shards that a device holds of each array, at rest and in use."""
    for array in arrays:
        for spec in filter(None, (array.in_use, array.at_rest)):
            pieces = map(rules.num_shards, spec)
            yield memory.DeviceArray(array.path, array.axes, tuple(map(operator.floordiv, array.shape, pieces)))
