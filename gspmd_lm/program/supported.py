"""Settings of a config that kernels or rules do not support, and the choice of the attention kernel."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from gspmd_lm.config import Config, ModelConfig, is_whole, value_at, with_values
from gspmd_lm.hardware.chips import Processor
from gspmd_lm.model.kernels import grouped_gpu
from gspmd_lm.model.kernels.common import unsupported_setting
from gspmd_lm.model.kernels.context import ALIKE, zigzag_supported
from gspmd_lm.program.operands import check_matmul_dtype
from gspmd_lm.sharding.problems import Problem, check, flow
from gspmd_lm.sharding.rules import KERNELS, Rules

_FASTEST = "--set rules.attention=null for the fastest kernel that can do it"
_EXPERTS = "layers.mlp.w_down"  # the weight that is split as what experts compute

Asked = Mapping[str, Callable[[ModelConfig], bool]]  # settings of a model, and whether it asks for them
# What passes of a ring do not support. docs/context.md has the same list.
NOT_IN_A_RING: Asked = {
    "attention.window": lambda model: any(kind.attention.window for kind in model.layer_kinds),
    "positions": lambda model: model.positions in ("alibi", "alibi_bf16"),
    "attention.scores_dtype": lambda model: model.attention.scores_dtype != "float32",
    "attention.sinks": lambda model: model.attention.sinks,
    "attention.mask": lambda model: model.attention.mask == "full",
    **{
        key: lambda model, key=key: bool(value_at(model, key))
        for key in ("attention.relative_positions", "encoder", "vision")
    },
}
# Settings under which layers exchange more than one residual stream, which pipelines and interleaving do not support.
# docs/rules_reference.md has the same list.
BEYOND_ONE_STREAM: Asked = {
    "residual.streams": lambda model: model.residual.streams > 1,
    "residual.layer_embed": lambda model: model.residual.layer_embed > 0,
    "attention.shared_kv_layers": lambda model: model.attention.shared_kv_layers > 0,
    "encoder": lambda model: bool(model.encoder),
    "attention.relative_positions": lambda model: bool(
        model.attention.relative_positions and model.attention.relative_positions.shared
    ),
    "attention.relative_vectors": lambda model: bool(model.attention.relative_vectors),
    "windows": lambda model: bool(model.windows),
}


class Pass(NamedTuple):
    """How a program calls attention, which decides with the config which kernels can compute it."""

    seq: int  # tokens of a row
    segments: bool = False  # whether a row holds several texts
    padded: bool = False  # whether a row holds one text with padding before it


def attention_lacks(
    kernel: str, config: Config, rules: Rules, asked: Pass, capability: tuple[int, ...] = ()
) -> str | None:
    """What a pass asks of attention and `kernel` does not support, or None.

    capability: the compute capability of a GPU; () where it is not known, or is none.
    """
    reason = _stack_lacks(kernel, config.model, rules, asked, capability)
    for of, (other, key, seq) in config.other_stacks.items():
        source = asked if asked.padded else asked._replace(seq=seq)
        if not reason and (reason := _stack_lacks(kernel, other, rules, source, capability)):
            reason = f"{reason.replace('data.seq', key)} of {of}"
    return reason


def _stack_lacks(kernel: str, model: ModelConfig, rules: Rules, asked: Pass, capability: tuple[int, ...]) -> str | None:
    """What a pass asks of attention in one stack of blocks and `kernel` does not support, or None."""
    over, seq, local_seq = split_sequence(rules), asked.seq, asked.seq
    if kernel != "xla" and not over and (rules.split("rules", "q", "seq") or rules.split("rules", "k", "kv_seq")):
        return "a sequence that is split in some arrays only (rules for q.seq or k.kv_seq)"
    if over and rules.context != "ulysses":
        if kernel == "cudnn" and rules.context == "gather":
            return "context: gather (only ring and ulysses)"
        num_shards = rules.num_shards(over)
        zigzag = zigzag_supported(seq, num_shards, rules.context, model.attention.mask)
        local_seq = seq // num_shards // (2 if zigzag else 1)
    kinds = [  # a chunk that is as long as a row restricts nothing
        kind if kind.attention.chunk < seq else with_values(kind, {"attention.chunk": 0})
        for kind in model.layer_kinds
        if not kind.attention.linear
    ]
    if whole := [kind for kind in kinds if is_whole(kind)]:  # XLA computes smaller windows, whatever the kernel
        kinds, seq, local_seq = whole, model.context, model.context

    def lacking(segments: bool) -> str | None:
        known: Any = {"seq": local_seq, "segments": segments, "capability": capability}
        reasons = (unsupported_setting(kernel, kind, **known) for kind in kinds)
        return next(filter(None, reasons), None)

    reason = lacking(asked.segments)
    if not reason and asked.padded and lacking(True):
        return "prompts that are padded on the left"
    if reason and local_seq != seq:
        reason = reason.replace(f"data.seq: {local_seq}", f"pieces of {local_seq} tokens of data.seq: {seq}")
    return reason


def split_sequence(rules: Rules) -> tuple[str, ...]:
    """The mesh axes that split the sequence of all arrays within a block alike."""
    splits = {rules.split("rules", array, "seq") for array in ALIKE}
    return splits.pop() if len(splits) == 1 else ()


def settle_rules(rules: Rules, config: Config, on: Processor, asked: Pass) -> Rules:
    """`rules` with an attention kernel: the one that they choose for the platform, or else the fastest that the
    processor has and that can do what a pass asks.

    Raises ShardingError where the rules choose a kernel that could do so, but not on this processor, and InputError
    where the processor multiplies operands of `model.matmul_dtype` no faster than those of bfloat16.
    """
    check_matmul_dtype(config.model.matmul_dtype, on)
    kernel, capability = rules.attention.get(on.platform), on.compute_capability
    if kernel is None:
        able = (one for one in KERNELS[on.platform] if not attention_lacks(one, config, rules, asked, capability))
        return dataclasses.replace(rules, attention={**rules.attention, on.platform: next(able)})
    reason = attention_lacks(kernel, config, rules, asked, capability)
    if reason and not attention_lacks(kernel, config, rules, asked):  # other reasons are found by `attention_problems`
        place = rules.place(f"attention.{on.platform}", kernel)
        check([Problem(f"attention: {kernel} on {on.name} cannot do {reason}", place, _FASTEST)])
    return rules


def kernel_choice(rules: Rules, config: Config, on: Processor, asked: Pass) -> str:
    """The attention kernel of settled rules, with the reason where it is not the fastest of the platform.

    '' where the platform has only one.
    """
    kernel, reasons = rules.kernel(on.platform), []
    for faster, reason, instead in _faster(rules, config, on, asked):
        if reason is None:
            return f"{kernel}, as {rules.place(f'attention.{on.platform}', kernel)} says; {faster} can do it too"
        fix = f"; fix {instead}" if instead else ""
        reasons.append(f"{faster} on {on.name} does not support {reason}{fix}")
    because = f", since {'; '.join(reasons)}" if reasons else ""
    return f"{kernel}{because}" if len(KERNELS[on.platform]) > 1 else ""


def faster_kernel(rules: Rules, config: Config, on: Processor, asked: Pass) -> str:
    """The flags that would have a faster kernel compute attention; '' where none can."""
    flags = (
        f"--set rules.attention.{on.platform}={faster} {instead}".rstrip()
        for faster, reason, instead in _faster(rules, config, on, asked)
        if reason is None or instead
    )
    return next(flags, "")


def _faster(rules: Rules, config: Config, on: Processor, asked: Pass) -> Iterator[tuple[str, str | None, str]]:
    """The kernels faster than that of settled rules; what each does not support, and the flag with which it does."""
    kernels = KERNELS[on.platform]
    for faster in kernels[: kernels.index(rules.kernel(on.platform))]:
        reason = attention_lacks(faster, config, rules, asked, on.compute_capability)
        yield faster, reason, _instead(faster, reason, config, rules, asked) if reason else ""


def _instead(kernel: str, reason: str, config: Config, rules: Rules, asked: Pass) -> str:
    """The flag with which `kernel` supports a pass; '' if no flag does, because of the model itself."""
    stream = config.objective == "causal" and not config.data.messages_field  # all else is always kept apart
    if reason.startswith("data.packing") and stream:
        able = not attention_lacks(kernel, config, rules, asked._replace(segments=False))
        return "--set data.packing=stream" if able else ""
    if reason.startswith("context"):
        ring = dataclasses.replace(rules, context="ring")
        wrong = [one for one in _context_problems(config, ring, asked.seq, not asked.padded) if not one.warning]
        able = not wrong and not attention_lacks(kernel, config, ring, asked)
        return "--set rules.context=ring" if able else ""
    return ""


def attention_problems(config: Config, rules: Rules, platform: str, asked: Pass) -> list[Problem]:
    """The problems of a pass with the attention kernel that the rules choose, and with `context`.

    The kernel may not support what the pass asks: see `attention_lacks`. The keys of a split sequence may not reach
    their queries in the way that `context` says.
    """
    problems = _context_problems(config, rules, asked.seq, zigzag=not asked.padded)
    kernel = rules.kernel(platform)
    reason = attention_lacks(kernel, config, rules, asked)
    if not reason:
        return problems
    place = rules.place(f"attention.{platform}", kernel)
    instead = _instead(kernel, reason, config, rules, asked) or "change the config"
    fix = f"{_FASTEST}, or {instead}"
    return [*problems, Problem(f"attention: {kernel} cannot do {reason}", place, fix)]


def _context_problems(config: Config, rules: Rules, seq: int, zigzag: bool) -> list[Problem]:
    """The problems of a split sequence with `context`. zigzag: whether rows are sharded in zigzag, as in training.

    A prompt is not, and its keys are gathered.
    """
    form, over, model = rules.context, split_sequence(rules), config.model
    place, problems = rules.place("context", form), []

    def wrong(message: str, fix: str, warning: bool = False) -> None:
        problems.append(Problem(f"context: {message}", place, fix, warning=warning))

    if not over:
        if form != "gather" and any(rules.split("rules", array, "seq") for array in ALIKE):
            fix = "write rules.seq in place of rows for single arrays, or --set rules.context=gather"
            wrong(f"{form} needs a sequence that is split alike in {', '.join(ALIKE)}", fix)
        return problems
    whole, unsplit = "and no device has all of a row", f"do not split seq over {', '.join(over)}"
    if "linear" in model.kind_of_each_layer:
        problems.append(Problem(f"model.attention.linear: a state goes from token to token, {whole}", place, unsplit))
    for key, why in (("masks", "its neck reads all around a patch"), ("windows", "patches of one are not neighbours")):
        if value_at(model, key):
            problems.append(Problem(f"model.{key}: {why}, {whole}", place, unsplit))
    num_shards = rules.num_shards(over)
    split = " x ".join(f"{name}={rules.mesh[name]}" for name in over)
    if form == "ulysses":
        heads = rules.split("rules", "q", "heads")
        stacks = [model, *(stack for stack, _, _ in config.other_stacks.values())]
        repeated = rules.split("rules", "k", "kv_heads") != heads  # keys, for each device's heads
        for rows, key_rows in dict.fromkeys((stack.head_rows, stack.kv_head_rows) for stack in stacks):
            each = (key_heads := rows if repeated else key_rows) // rules.num_shards(heads)
            if key_heads % rules.num_shards(heads) == 0 and each % num_shards:
                most = " x ".join(["kv_heads" if key_heads == key_rows else "heads", *heads])
                wrong(
                    f"ulysses: {each} key heads of a device ({most}) do not divide over {split}",
                    f"--set rules.context=gather, or use a divisor of {each}",
                )
    elif zigzag and model.attention.mask == "causal" and seq % (2 * num_shards) and seq % num_shards == 0:
        fix = f"make data.seq a multiple of {2 * num_shards}"
        if form == "ring":
            wrong(f"ring: data.seq={seq} does not divide into 2 pieces for each of {split}", fix)
        else:
            wrong(
                f"data.seq={seq} does not divide into 2 pieces for each of {split}, so the last device has most of "
                "the work of a causal mask",
                fix,
                warning=True,
            )
    if form == "ring" and zigzag:
        window = next((kind.attention.window for kind in model.layer_kinds if kind.attention.window), 0)
        for key in (key for key, is_asked in NOT_IN_A_RING.items() if is_asked(model)):
            value = window if key == "attention.window" else value_at(model, key)
            said = f": {flow(value)}" if isinstance(value, str | int) else ""
            wrong(f"ring cannot do model.{key}{said}", "--set rules.context=gather, or ulysses")
    return problems


def layer_problems(config: Config, rules: Rules, platform: str, asked: Pass) -> list[Problem]:
    """The problems of rules with the attention (see `attention_problems`) and the experts that a pass asks for."""
    return [*attention_problems(config, rules, platform, asked), *_experts_problems(config, rules, platform)]


def no_pipeline(rules: Rules) -> list[Problem]:
    """The problem that rules have a pipeline, for programs that have no stages."""
    if not rules.pipeline:
        return []
    message = "pipeline: training and its evaluation have stages; generating and scoring texts have none"
    return [Problem(message, _pipeline_row(rules), "use rules without a pipeline: weights are loaded under any rules")]


def pipeline_problems(config: Config, rules: Rules) -> list[Problem]:
    """The problems that a config and the pipeline of the rules do not fit each other in training."""
    model, pipeline, problems = config.model, rules.pipeline, []
    if not pipeline:
        return []
    axis, place = rules.vocabulary.stages, _pipeline_row(rules)

    def wrong(message: str, fix: str, instead: str = "", warning: bool = False) -> None:
        problems.append(Problem(f"pipeline: {message}", place, fix, instead, warning=warning, code="work-repeated"))

    row, over = rules.row("weights", f"{axis}.", axis), rules.stages
    if row is None or not row.mesh_axes:
        wrong(f"no row splits {axis} into stages", f"name the stages' mesh axis, as in weights: {{{axis}: stage}}")
    if not over:
        return problems
    place = f"{place}\n        {row.place}" if row else place
    stages, names = rules.num_shards(over), " x ".join(f"{name}={rules.mesh[name]}" for name in over)
    if model.shared_layers:
        wrong(
            "each stage has layers of its own, and with model.shared_layers all layers have the same weights",
            f"--set rules.pipeline=null --set rules.weights.{axis}=null",
        )
    for key in (*_beyond_one_stream(model), *(["vision"] if model.vision else [])):
        wrong(
            f"stages pass on a residual stream alone, which model.{key} does not go with",
            f"--set rules.pipeline=null --set rules.weights.{axis}=null",
        )
    if rules.split("optimizer", f"{axis}.", axis) != over:
        wrong(f"the table optimizer splits {axis} over other axes than {names}", f"drop its row for {axis}")
    if problems:
        return problems
    if model.experts and model.experts.balance == "batch":
        wrong(
            "model.experts.balance: batch needs the loads of the whole batch, and no microbatch has them",
            "--set model.experts.balance=row or bias",
        )
    if pipeline.gathers_once:
        problems += gather_problems(model, rules, place)
    stack = next(stack for stack in model.stacks if stack.name == axis)
    turns, length = stack.scanned_layers // len(stack.kinds), len(stack.kinds)
    parts = stages * pipeline.repeats
    if turns % parts:
        of_what = f"{turns} turns of a pattern of {length} layers" if length > 1 else f"{turns} layers"
        rounds = f" of {pipeline.repeats} parts each" if pipeline.repeats > 1 else ""
        fewer = [n for n in range(2, stages) if stages % n == 0 and turns % (n * pipeline.repeats) == 0]
        fix = f"make the layers of the config a multiple of {parts * length}"
        instead = ""
        if turns % stages == 0:
            instead = "--set rules.pipeline.repeats=1"
        elif fewer and len(over) == 1:
            instead = f"--mesh={over[0]}={fewer[-1]}, with {rules.devices // stages * fewer[-1]} devices"
        wrong(f"{of_what} do not divide into {names} stages{rounds}", fix, instead)
    batch = rules.split("rules", "residual", "batch")
    shards = rules.microbatches * rules.num_shards(name for name in batch if name not in over)
    rows, microbatches = config.data.rows, pipeline.microbatches
    if microbatches % stages:
        able = [n for n in range(stages, rows + 1, stages) if rows % (n * shards) == 0]
        nearest = min(able, key=lambda n: abs(n - microbatches), default=None)
        fix = f"--set rules.pipeline.microbatches={nearest}" if nearest else f"use a multiple of {stages}"
        wrong(f"microbatches={microbatches} is no multiple of the stages {names}", fix)
    elif rows % (microbatches * shards):
        each = shards // rules.microbatches
        pieces = f"{rules.microbatches} x {microbatches}" if rules.microbatches > 1 else microbatches
        wrong(
            f"data.batch={rows} does not divide into {pieces} microbatches for {each} devices of a stage",
            f"make data.batch a multiple of {microbatches * shards}",
        )
    if not {*over} <= {*batch} and pipeline.schedule != "1f1b":
        wrong(
            f"the batch is not split over {names}, so the devices of all stages compute the same table and loss",
            f"--set rules.rules.batch={_as_value((*over, *batch))}",
            warning=True,
        )
    return problems


def gather_problems(model: ModelConfig, rules: Rules, place: str) -> list[Problem]:
    """The problems of stages that gather their weights once in a step."""
    problems, fix = [], "--set rules.pipeline.gather=turn"
    for key in ("experts.count", "matmul_dtype"):
        if value := value_at(model, key):
            message = f"pipeline: gather: step: layers with model.{key}={value} gather their weights in each turn"
            problems.append(Problem(message, place, fix))
    tokens = {name for axis in ("batch", "seq") for name in rules.split("rules", "block_input", axis)} - {*rules.stages}
    for row in rules.rows:
        if row.table == "rules" and row.axis not in ("batch", "seq", "kv_seq") and tokens & {*row.mesh_axes}:
            message = f"pipeline: gather: step: {', '.join(row.mesh_axes)} splits tokens, and {row.axis} of weights"
            problems.append(Problem(message, f"{place}\n        {row.place}", fix))
    return problems


def interleave_problems(config: Config, rules: Rules) -> list[Problem]:
    """The problems that a config and layers that compute their rows in parts do not fit each other in training."""
    parts, model = rules.interleave, config.model
    if parts == 1:
        return []
    place, without = rules.place("interleave", parts), "--set rules.interleave=1"
    problems = [
        Problem(f"interleave: layers with model.{key} are not computed in parts", place, without)
        for key in (*([f"experts.count={model.num_experts}"] if model.experts else []), *_beyond_one_stream(model))
    ]
    microbatches = rules.microbatches * (rules.pipeline.microbatches if rules.pipeline else 1)
    batch = [name for name in rules.split("rules", "residual", "batch") if name not in rules.stages]
    shards = microbatches * rules.num_shards(batch)
    if config.data.rows % (shards * parts):
        rows = config.data.rows / shards
        message = f"interleave: the {rows:g} rows that a device computes at a time do not divide into {parts} parts"
        problems.append(Problem(message, place, f"make data.batch a multiple of {shards * parts}, or {without}"))
    return problems


def _beyond_one_stream(model: ModelConfig) -> list[str]:
    """The settings of BEYOND_ONE_STREAM that a model asks for."""
    found = {key: value_at(model, key) for key, is_asked in BEYOND_ONE_STREAM.items() if is_asked(model)}
    return [f"{key}={value}" if isinstance(value, int) else key for key, value in found.items()]


def _as_value(names: Sequence[str]) -> str:
    """Mesh axes as the value of a row in a flag, where a space would end it: data, or [stage,data]."""
    return names[0] if len(names) == 1 else f"[{','.join(names)}]"


def _pipeline_row(rules: Rules) -> str:
    return rules.place("pipeline", rules.pipeline.plain if rules.pipeline else {})


def expert_rounds(config: Config, rules: Rules) -> str:
    """How tokens travel to their experts; '' where they stay on their device, or all of them have room there."""
    (names, tokens), factor = _expert_axes(rules), rules.expert_buffer
    if not config.model.experts or not names or not {*names} <= tokens or rules.num_shards(names) <= factor:
        return ""
    over = " x ".join(f"{name}={rules.mesh[name]}" for name in names)
    return (
        f"tokens travel over {over}. A device has room for {factor:g} times the mean number of rows (expert_buffer). "
        "If more arrive anywhere, all devices take a further round; expert_rounds in metrics.jsonl counts them"
    )


def _expert_axes(rules: Rules) -> tuple[tuple[str, ...], set[str]]:
    """The mesh axes that split experts in use, and those that split tokens."""
    tokens = {name for axis in ("batch", "seq") for name in rules.split("rules", "block_input", axis)}
    return rules.split("rules", _EXPERTS, "expert"), tokens


def _experts_problems(config: Config, rules: Rules, platform: str) -> list[Problem]:
    """The problems that rules and the mixtures of experts of a config do not fit each other."""
    model, problems = config.model, []
    if not model.experts:
        return []
    path = _EXPERTS
    (names, tokens), row = _expert_axes(rules), rules.row("rules", path, "expert")
    if row and {*names} & tokens and {*names} - tokens:
        token_axes = [name for name in names if name in tokens]
        other_axes = [name for name in names if name not in tokens]
        both = f"{', '.join(token_axes)}, which splits tokens, and {', '.join(other_axes)}, which does not"
        message = f"experts: expert would be split over {both}"
        fix = f"--set rules.{row.key}={_as_value(token_axes)}, so that tokens travel"
        instead = f"--set rules.{row.key}={_as_value(other_axes)}, so that none does"
        problems.append(Problem(message, row.place, fix, instead))
    if model.moe.capacity_factor and (over := split_sequence(rules)):
        message = (
            "model.experts.capacity_factor: an expert computes the first tokens of a row, "
            "and no device has all of a row"
        )
        place = seq.place if (seq := rules.row("rules", "block_input", "seq")) else rules.path
        fix = f"--set model.experts.capacity_factor=0, or do not split seq over {', '.join(over)}"
        problems.append(Problem(message, place, fix))
    sides = [
        size // rules.num_shards(rules.split("rules", path, axis))
        for axis, size in (("embed", model.embed), ("mlp", model.expert_width))
    ]
    rows = jnp.dtype("int8" if model.matmul_dtype == "int8" else model.compute_dtype)
    if platform == "gpu" and not grouped_gpu.takes(jnp.dtype(model.compute_dtype), *sides, rows=rows):
        lacks, fix = f"model.compute_dtype: {model.compute_dtype}", "--set model.compute_dtype=bfloat16"
        if model.compute_dtype == "bfloat16":
            lacks = f"matrices of {sides[0]} x {sides[1]} on a device"
            fix = f"use multiples of {grouped_gpu.least(rows)}"
        message = f"experts: a slow loop computes them, since the kernel for GPUs does not support {lacks}"
        problems.append(Problem(message, row.place if row else rules.path, fix, warning=True))
    return problems
