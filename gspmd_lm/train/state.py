"""The state that a run carries from step to step, and the shape, name and placement of each of its arrays."""

import dataclasses
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from gspmd_lm import config as configs
from gspmd_lm.config import Config
from gspmd_lm.errors import InputError, did_you_mean
from gspmd_lm.program.supported import Pass, interleave_problems, layer_problems, pipeline_problems
from gspmd_lm.program.task import Task
from gspmd_lm.sharding import shapes as model_shapes
from gspmd_lm.sharding.names import is_unnamed
from gspmd_lm.sharding.placement import Named, Recorder, mark, record
from gspmd_lm.sharding.problems import UNUSED, Problem
from gspmd_lm.sharding.quantised import EIGHT_BITS
from gspmd_lm.sharding.rules import EXPERT_BUFFER, Rules
from gspmd_lm.sharding.shapes import Arrays
from gspmd_lm.train import decoder, optimizer
from gspmd_lm.units import human_bytes

MOST_RECORDS = 64  # traces of one task


class State(NamedTuple):
    """One step's result and the next step's input. The leaves are arrays, shapes or shardings."""

    step: Any  # int32: steps done, which is also the position in the data
    params: Any
    optimizer: Any
    key: Any  # for dropout; folded with the step
    skipped: Any  # int32: steps so far whose loss or gradient was not finite
    skipped_in_a_row: Any


def arrays(config: Config | Task) -> Arrays:
    """The parameters and the optimizer state of what is computed.

    Raises InputError if a state's axes are not known, for weights of 8 bits, and for `model.frozen` with other names.
    """
    task = decoder.task(config)
    if task.config and (dtype := task.config.model.weight_dtype) in EIGHT_BITS:
        raise InputError(
            f"model.weight_dtype: {dtype}: weights of 8 bits are not trained or converted; generate, eval --text and "
            "explain --phase=decode take them\n  fix   --set model.weight_dtype=float32, or bfloat16 if a run begins "
            f"with it; for matmuls of 8 bits in a train step, --set model.matmul_dtype={dtype}"
        )
    weights = task.weights
    if task.config:
        _check_frozen(task.config.model.frozen, weights)
    given = task.optimizer
    transform = given if isinstance(given, optax.GradientTransformation) else given(weights.named_trained)
    state = jax.eval_shape(transform.init, weights.trained)
    named = optimizer.named_state(state, weights.named_trained, weights.trained)
    return dataclasses.replace(weights, named_optimizer=named, optimizer=state, transform=transform)


def _check_frozen(frozen: Sequence[str], weights: Arrays) -> None:
    """Raises InputError for frozen weights that the model does not have, and where nothing else is left."""
    wrong = [
        f"no weights are named {name}{did_you_mean(name, weights.params)}"
        for name in frozen
        if name not in weights.params
    ]
    if frozen and not wrong and not weights.trained_count:
        wrong = ["no weights are left to train"]
    if wrong:
        known = ", ".join(weights.params)
        raise InputError(f"model.frozen={list(frozen)}: {', and '.join(wrong)}\n  fix   some of {known}")


def record_arrays(config: Config | Task, arrays: Arrays, microbatches: int, rules: Rules) -> Recorder:
    """A record of the arrays that the model places in one microbatch under `rules`, inputs included.

    `arrays` are those of the config or task. Rules that the model cannot tell apart share one trace.
    """
    task = decoder.task(config)
    specs, rows = task.specs(), max(task.rows // microbatches, 1)
    for traced_rows, known in task.records:
        if traced_rows == rows and known.traces_alike(rules):
            return known.under(rules)

    def forward(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
        # A model may multiply its inputs with weights without placing them first.
        floats = [name for name, x in batch.items() if jnp.issubdtype(x.dtype, jnp.floating)]
        batch = batch | {name: mark(batch[name], specs[name]) for name in floats}
        return task.sum_batch(params, batch, None)[0].loss

    batch = task.batch(rows)
    recorder = record(rules, forward, arrays.params, batch)
    for name, spec in specs.items():
        if spec.array not in recorder.arrays:  # the model reads it without placing it
            recorder.note(spec, batch[name].shape)
    task.records[:] = [(rows, recorder), *task.records][:MOST_RECORDS]
    return recorder


def arrays_and_warnings(config: Config | Task, rules: Rules, platform: str) -> tuple[Arrays, list[Problem]]:
    """The arrays of what is computed, and the warnings about `rules` for it. Nothing is compiled or allocated.

    Raises ShardingError that lists everything that does not fit.
    """
    task = decoder.task(config)
    if rules.vocabulary != task.names:
        raise InputError(
            f"{rules.path}: was loaded with another vocabulary than that of {task.name}\n"
            "  fix   load it with the vocabulary of the task"
        )
    shapes, more = arrays(task), []
    whole = task.rows % rules.microbatches == 0
    if not whole:
        first = next(iter(task.specs().values()))
        more.append(
            Problem(
                f"{first.array}: {first.axes[0]}={task.rows} does not divide into microbatches={rules.microbatches}",
                rules.place("microbatches", rules.microbatches),
                f"use a divisor of {task.names.settings.get(first.axes[0], task.rows)}",
            )
        )
    more += task_problems(task, rules, platform)
    named = record_arrays(task, shapes, rules.microbatches if whole else 1, rules)
    chosen = {"remat": rules.remat.policy, f"attention.{platform}": rules.kernel(platform), "context": rules.context}
    chosen |= {"unroll": str(rules.unroll or "none"), "pipeline": "stages" if rules.pipeline else "none"}
    chosen["interleave"] = "none" if rules.interleave == 1 else str(rules.interleave)
    chosen["expert_buffer"] = "none" if rules.expert_buffer == EXPERT_BUFFER else f"{rules.expert_buffer:g}"
    for key, value in chosen.items():
        if value not in ("none", "xla", "gather") and key.partition(".")[0] not in named.asked:
            message = f"{key}: the model does not use this key, so the key has no effect"
            place = f"{rules.path}: {key}"
            more.append(Problem(message, place, f"drop {key}", warning=True, code=UNUSED))
    if not task.config:
        more += _not_placed(task, shapes, rules, named)
    return shapes, model_shapes.check_layout(shapes, rules, [named], more)


def _not_placed(task: Task, arrays: Arrays, rules: Rules, named: Recorder) -> list[Problem]:
    """The warnings that a model of one's own does not ask the rules where its arrays live."""
    warnings, place, moved = [], f"task {task.name}: sums", []
    for leaf, like in model_shapes.pairs(arrays.named_params, arrays.params):
        at_rest, in_use = (rules.resolve(table, leaf.path, leaf.axes, like.shape)[0] for table in ("weights", "rules"))
        if leaf.path not in named.used and at_rest != in_use:
            moved.append(leaf.path)
    if moved:
        others, them = (f" and {len(moved) - 1} more weights", "them") if len(moved) > 1 else ("", "it")
        message = f"{moved[0]}{others}: read without use(), so `rules` does not place {them}"
        fix = "read each with use(parameter(...)); without it, the compiler may move activations in place of weights"
        warnings.append(Problem(message, place, fix, warning=True))
    if rules.devices > 1:
        warnings += _unnamed_problem(task, arrays)
    whole, rows = named.unmapped_constraints, rules.row("rules", "", task.names.rows)
    if whole and rows and rules.num_shards(rows.mesh_axes) > 1:
        axes = list(dict.fromkeys(axis for spec in whole for axis in spec.axes))
        message = (
            f"{place}: of {len(named.constraints)} kinds of constraints, {len(whole)} name no axis that "
            f"a row of rules maps ({', '.join(axes)}), so each device holds these arrays whole"
        )
        warnings.append(Problem(message, rows.place, f"rules.{axes[0]}: {rows.mesh_axes[0]}", warning=True))
    return warnings


def _unnamed_problem(task: Task, arrays: Arrays) -> list[Problem]:
    """The warning about trained parameters with dimensions that the model does not name. Layers share a line."""
    alike: dict[str, list[Named]] = {}
    unnamed = [(leaf, like) for leaf, like in model_shapes.pairs(arrays.named_trained, arrays.trained) if leaf.left_out]
    for leaf, like in unnamed:
        alike.setdefault(f"{re.sub(r'[0-9]+', '*', leaf.path)}: {_sizes(leaf, like)}", []).append(leaf)
    if not unnamed:
        return []
    held = human_bytes(sum(like.size * like.dtype.itemsize for _, like in unnamed))
    message = (
        f"task {task.name}: parameters with dimensions that have no logical axis ({len(unnamed)}, {held}). No row can "
        "split such a dimension, so each device holds it whole"
    )
    for line, leaves in alike.items():
        path, _, sizes = line.partition(": ")
        times = f", {len(leaves)} of them" if len(leaves) > 1 else ""
        message += f"\n  {path if times else leaves[0].path}: {sizes}{times}"
    fix = "name what is to be split, with nn.with_logical_partitioning or nnx.with_partitioning; None: on purpose whole"
    return [Problem(message, f"task {task.name}: init", fix, warning=True)]


def _sizes(leaf: Named, like: Any) -> str:
    """The size of each dimension of a parameter, with its logical axis if it has one: embed=64 x 4 x 16."""
    return " x ".join(
        str(size) if is_unnamed(axis) else f"{axis}={size}" for axis, size in zip(leaf.axes, like.shape, strict=True)
    )


def describe_run(config: Config | Task) -> dict[str, Any]:
    """A description of a run for its workdir, as plain values; for a user's own model, its name and the settings."""
    if isinstance(config, Config):
        return configs.to_dict(config)
    return {"task": config.name} | ({"train": configs.to_dict(config.train)} if config.train else {})


def attention_pass(config: Config) -> Pass:
    """The requirements of a train step on attention."""
    return Pass(config.data.seq, segments=config.data.packing == "documents")


def task_problems(task: Task, rules: Rules, platform: str) -> list[Problem]:
    """Problems of a task with rules, besides those of its arrays: attention, experts and their balancing, state."""
    config = task.config
    if config is None:
        return _state_problems(task, rules)
    problems = layer_problems(config, rules, platform, attention_pass(config))
    problems += [*pipeline_problems(config, rules), *interleave_problems(config, rules)]
    return [*problems, *_whole_batch_problems(config, rules)]


def _state_problems(task: Task, rules: Rules) -> list[Problem]:
    """The problems of rules with the state of a model of one's own, and with arrays of it that never change."""
    left, problems = [task.partition(tree)[0] for tree in (task.weights.named_params, task.weights.params)], []
    if task.changed_paths and rules.microbatches > 1:
        message = f"{min(task.changed_paths)}: each step leaves it new from the whole batch, which no microbatch has"
        place = rules.place("microbatches", rules.microbatches)
        problems.append(Problem(message, place, "set microbatches to 1"))
    for leaf, _ in model_shapes.pairs(*left):
        if leaf.path not in task.changed_paths and not task.is_module:
            message = f"{leaf.path}: neither gradients nor sums() change it, so it stays as init gave it"
            fix = "return the variables that a step changes too: return losses, changed"
            problems.append(Problem(message, f"task {task.name}: sums", fix, warning=True))
    return problems


def _whole_batch_problems(config: Config, rules: Rules) -> list[Problem]:
    """The problems of rules that split a batch which the loss needs whole, and warnings of tokens that experts drop."""
    model, problems = config.model, []
    place, one = rules.place("microbatches", rules.microbatches), "--set rules.microbatches=1"
    if model.experts and model.experts.balance == "batch" and rules.microbatches > 1:
        message = "model.experts.balance: batch needs the loads of the whole batch, and no microbatch has them"
        problems.append(Problem(message, place, one, "--set model.experts.balance=row or bias"))
    if config.objective == "contrastive" and rules.microbatches > 1:
        message = "objective: contrastive scores each text with all images of the batch, and no microbatch has them"
        problems.append(Problem(message, place, one))
    if model.experts and model.experts.capacity_factor:
        message = (
            f"model.experts.capacity_factor: {model.moe.capacity_factor} drops the tokens that an expert gets beyond "
            f"{model.moe.capacity_factor} times the mean of a row"
        )
        place, fix = f"config {config.name}: model.experts.capacity_factor: {model.moe.capacity_factor}", "drop the key"
        problems.append(Problem(message, place, f"{fix}, so that every token is computed", warning=True))
    return problems
