"""The layouts that a plan chooses from: plain values of rules files, each of which passes the rules' own checks.

What can be split is asked of the model: of its arrays and its traced step. These roles come out of it.

  rows      the rows of the batch, over data and fsdp
  width     the axes that nearly all weights have: weights rest split along them (ZeRO-3 over fsdp, ZeRO-1 over data)
  hidden    the first other axis of each matrix, over tensor (arXiv 1909.08053); of the array that blocks read from and
            write to, its axis that no weight has, too (arXiv 2205.05198)
  groups    the axis of matrices of which each row meets one, such as experts, over expert (arXiv 2006.16668)
  sequence  the axis of what blocks read that is neither rows nor of a weight, over context, where it is long
  layers    the stack that a pipeline cuts, over stage (arXiv 1811.06965)

Nothing here changes what is computed.
"""

import collections
import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from gspmd_lm.config import Config
from gspmd_lm.foresight.graph import DataflowGraph
from gspmd_lm.hardware.target import Target
from gspmd_lm.plan import variants
from gspmd_lm.plan.estimate import Estimate, Estimator
from gspmd_lm.plan.traces import TraceCache
from gspmd_lm.program.supported import kernel_choice
from gspmd_lm.program.task import Task
from gspmd_lm.runtime import compiler
from gspmd_lm.sharding import rules_file, slices
from gspmd_lm.sharding.rules import CONTEXTS, Rules, divisors
from gspmd_lm.train.choices import settle_rules
from gspmd_lm.train.state import attention_pass
from gspmd_lm.units import plural

# Compiler options that are tried on the best layout, beside the defaults. On GPUs, smaller combined collectives hide
# better behind compute where a layer's weights are small; the sizes are those of published runs on two hosts. And what
# overlaps may take more memory where that is nearly full. On TPUs, fusions that may take more of the memory on the chip
# read wider blocks in matrix products (docs/rules_reference.md); published runs on v6e and tpu7x have these limits. It
# is no default, because a program then takes about five times as long to compile.
OPTIONS: dict[str, tuple[dict[str, Any], ...]] = {  # platform, or chip -> options
    "v5e": ({"xla_tpu_scoped_vmem_limit_kib": 98304},),
    "v6e": ({"xla_tpu_scoped_vmem_limit_kib": 98304},),
    "tpu7x": ({"xla_tpu_scoped_vmem_limit_kib": 65536},),
    "gpu": (
        {
            "xla_gpu_all_gather_combine_threshold_bytes": 128 * 2**20,
            "xla_gpu_all_reduce_combine_threshold_bytes": 64 * 2**20,
            "xla_gpu_reduce_scatter_combine_threshold_bytes": 64 * 2**20,
        },
        {"xla_gpu_memory_limit_slop_factor": 130},
    ),
}
MOST_TENSOR = 16  # shards of a matrix: beyond that, matmuls are thin on every chip
MICROBATCHES = (1, 2, 4, 8, 16)
LONG = 32768  # positions of a sequence from which on a split of it is tried ...
LEAST_POSITIONS = 4096  # ... into shards of so many


@dataclasses.dataclass(frozen=True)
class Roles:
    """The role of each part of a model. Axes are logical axes."""

    rows: str
    width: tuple[str, ...]  # axes, and of matrices without them array.axis
    hidden: tuple[str, ...]
    between: tuple[str, ...]  # rows of the table `rules`, such as residual.seq
    groups: tuple[str, ...]
    sequence: tuple[str, ...]
    sizes: Mapping[str, tuple[int, ...]]  # axis, or array.axis -> its sizes in weights and activations

    def divides(self, axis: str, num_shards: int) -> bool:
        return all(size % num_shards == 0 for size in self.sizes.get(axis, ()))


class LayoutSpace:
    """What the candidates for a step of training and of decoding have in common."""

    phase: str
    counted: str  # what `tables` counts

    def __init__(self, task: Task, target: Target):
        self.task, self.target = task, target
        self.refused = 0  # how many a check of the rules refused
        self.tables = 0  # layouts, before what is tried of each, in all
        self.left_out = 0  # those for which there was no time
        self.notes: list[str] = []  # what the user should know of the choice
        # The best layout is compiled with the settings that each of these adds, whose effect no estimate knows.
        self.variants: tuple[Callable[[Mapping[str, Any]], Iterator[dict[str, Any]]], ...] = ()

    def in_time(self, layouts: Iterable[dict[str, Any]], until_s: float) -> Iterator[dict[str, Any]]:
        """The layouts for which there is time, and at least one. Those whose meshes have fewest axes come first.

        until_s: what `time.monotonic` says when it must end.
        """
        ordered = sorted(layouts, key=lambda layout: len(layout["mesh"]))
        self.tables = len(ordered)
        for number, layout in enumerate(ordered):
            if number and time.monotonic() > until_s:
                self.left_out = len(ordered) - number
                return
            yield layout

    @property
    def not_estimated(self) -> str:
        """How many of the layouts there was no time for; '' if there was time for all."""
        left_out = f"{self.left_out:,} of {self.tables:,} {self.counted} were not estimated for want of time"
        return left_out if self.left_out else ""


class Space(LayoutSpace):
    """The candidates for training one config or task on one target."""

    phase, counted = "train", "meshes and tables"

    def __init__(self, config: Config | Task, target: Target, traces: TraceCache | None = None):
        self.traces = traces or TraceCache(config)
        super().__init__(self.traces.task, target)
        self.variants = self.interleave_rows, self.with_options
        single = rules_file.from_dict({"mesh": {"data": 1}}, "plan", vocabulary=self.task.names)
        self.trace = self.traces.trace(single)
        self.asked = self.trace.recorder.asked
        self.roles = _roles(self.traces, self.trace.graph, "attention" in self.asked)
        self.estimator = Estimator(self.task, target, self.traces)
        if decoder_config := self.task.config:
            plain = self.rules({"mesh": {"data": target.devices}})
            kernel_note = kernel_choice(plain, decoder_config, target.processor, attention_pass(decoder_config))
            self.notes += [f"attention: {kernel_note}"] if kernel_note else []

    def fill_layouts(self, until_s: float = math.inf) -> Iterator[tuple[dict[str, Any], Rules]]:
        """The plain values of each rules file, and its rules, filled. until_s: see `in_time`."""
        for layout in self.in_time(self._layouts(), until_s):
            for raw in self._in_microbatches(layout):
                rules = self.rules(raw)
                if self.traces.problems(rules, self.target.platform):
                    self.refused += 1
                    continue
                for remat in (
                    variants.policies(self.estimator, rules, self.names) if "remat" in self.asked else (rules.remat,)
                ):
                    if remat.offload and rules.pipeline:
                        continue
                    named = raw | ({} if remat.policy == "none" else {"remat": remat.plain})
                    yield named, dataclasses.replace(rules, remat=remat, path=describe(named))

    @property
    def batch_size(self) -> tuple[int, str]:
        """What speeds count of a step: so many tokens, or rows."""
        return self.task.batch_size

    def interleave_rows(self, raw: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """A layout with layers interleaved in two parts, which hides the gathers of tensor parallelism."""
        parts, wanted = {**raw, "interleave": 2}, "tensor" in raw["mesh"] and self.task.config
        if wanted and not self.traces.problems(self.rules(parts), self.target.platform):
            yield parts

    def with_options(self, raw: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """A layout under each set of OPTIONS that its target does not have by default."""
        platform, chip = self.target.platform, self.target.chip
        defaults = [compiler.DEFAULT_OPTIONS.get(f"{platform} {kind}", {}) for kind in self.rules(raw).program_kinds]
        for options in (*OPTIONS.get(platform, ()), *OPTIONS.get(chip.name if chip else "", ())):
            if all(rows.keys().isdisjoint(options) for rows in defaults):  # what offloads has its own limit of memory
                yield {**raw, "compiler_options": {platform: options}}

    def rules(self, raw: Mapping[str, Any]) -> Rules:
        """The rules of plain values, filled, with the attention kernel that they would run with."""
        rules = rules_file.from_dict(raw, describe(raw), vocabulary=self.task.names)
        return settle_rules(self.task, rules.fill(self.target.devices), self.target.processor)

    # Meshes and tables

    def _layouts(self) -> Iterator[dict[str, Any]]:
        """Mesh, dcn and the three tables."""
        devices, roles = self.target.devices, self.roles
        for stage, tensor, context, expert in itertools.product(
            variants.stage_counts(self.task, self.target), divisors(devices), self._contexts, self._experts
        ):
            inner = stage * tensor * context * expert
            if stage > 1 and context > 1:
                continue
            hidden = [axis for axis in roles.hidden if roles.divides(axis, tensor)]
            if (tensor > 1 and (tensor > MOST_TENSOR or not hidden)) or devices % inner:
                continue
            for data in divisors(devices // inner):
                fsdp = devices // inner // data
                if self.task.rows % (stage * data * fsdp * expert):
                    continue
                # Stages have weights that are split over fsdp or whole, and both only across slices or hosts.
                if stage > 1 and data not in (1, max(1, self._outer // stage), devices // inner):
                    continue
                sizes = {"stage": stage, "data": data, "fsdp": fsdp, "context": context, "expert": expert}
                sizes["tensor"] = tensor
                mesh = {name: size for name, size in sizes.items() if size > 1} or {"data": 1}
                between = [row for row in roles.between if roles.divides(row, tensor)] if context == 1 else []
                for dcn, split, state, form in itertools.product(
                    variants.across(self.target, self._outer, mesh) if stage > 1 else self._across(mesh),
                    (False, True) if tensor > 1 and between else (False,),
                    self._states(data, fsdp, context) if stage == 1 else self._stage_tables(data, fsdp),
                    CONTEXTS if context > 1 else ("",),
                ):
                    rules: dict[str, Any] = {}
                    if over := [name for name in ("stage", "data", "fsdp", "expert") if name in mesh]:
                        rules[roles.rows] = over[0] if len(over) == 1 else over
                    rules |= dict.fromkeys(roles.sequence, "context") if context > 1 else {}
                    rules |= dict.fromkeys(roles.groups, "expert") if expert > 1 else {}
                    if tensor > 1:
                        rules |= dict.fromkeys(hidden, "tensor")
                        rules |= dict.fromkeys(between, "tensor") if split else {}
                    split_by = {"context": form} if form else {}
                    yield {"mesh": mesh, **({"dcn": dcn} if dcn else {}), "rules": rules, **split_by, **state}

    @functools.cached_property
    def _contexts(self) -> list[int]:
        """The numbers of shards that a sequence may be split into."""
        positions = max((size for axis in self.roles.sequence for size in self.roles.sizes[axis]), default=0)
        most = positions // LEAST_POSITIONS if positions >= LONG else 1
        return [n for n in divisors(self.target.devices) if n <= most and positions % (2 * n) == 0] or [1]

    @functools.cached_property
    def _experts(self) -> list[int]:
        """The numbers of shards that the groups may be split into."""
        groups, devices = self.roles.groups, self.target.devices
        return [n for n in divisors(devices) if n == 1 or (groups and all(self.roles.divides(g, n) for g in groups))]

    def _states(self, data: int, fsdp: int, context: int) -> list[dict[str, Any]]:
        """The tables of weights and of the optimizer: whole, ZeRO-1 over data, ZeRO-3 over fsdp and context."""
        roles = self.roles
        if context > 1:
            over = ["fsdp", "context"] if fsdp > 1 else "context"
            rest = [axis for axis in roles.width if roles.divides(axis, fsdp * context)]
            return [{"weights": dict.fromkeys(rest, over)}] if rest else []
        rest = [axis for axis in roles.width if roles.divides(axis, fsdp)]
        if fsdp > 1 and not rest:
            return []
        weights = {"weights": dict.fromkeys(rest, "fsdp")} if fsdp > 1 else {}
        finer = [axis for axis in roles.width if roles.divides(axis, data * fsdp)]
        if data == 1 or not finer:
            return [weights]
        over = ["fsdp", "data"] if fsdp > 1 else "data"
        return [weights, {**weights, "optimizer": {axis: over for axis in finer}}]

    def _stage_tables(self, data: int, fsdp: int) -> list[dict[str, Any]]:
        """The tables in stages, where weights are split over fsdp, or whole, with ZeRO-1 over data or without."""
        return [
            {**state, "weights": {self.task.names.stages: "stage", **state.get("weights", {})}}
            for state in self._states(data if fsdp == 1 else 1, fsdp, 1)
        ]

    @property
    def _outer(self) -> int:
        """The number of slices, or of GPU hosts."""
        return self.target.topology[0] if self.target.platform == "gpu" else self.target.slices

    def _across(self, mesh: Mapping[str, int]) -> list[dict[str, int]]:
        """Which parts of a mesh cross slices or hosts: data, fsdp or both, never tensor while others can."""
        gpu, count = self.target.platform == "gpu", self._outer
        if count == 1:
            return [{}]
        splits = slices.find_crossings(mesh, count)
        if gpu:  # hosts follow the order of devices, in which the first mesh axis is the outermost
            natural = math.gcd(count, mesh.get("data", 1))
            implied = {name: n for name, n in (("data", natural), ("fsdp", count // natural)) if n > 1}
            splits = [{} if dcn == implied else dcn for dcn in splits]
        return splits

    def _in_microbatches(self, layout: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """A layout with each number of microbatches; of one with stages, the pipelines that are worth trying."""
        if "stage" not in layout["mesh"]:
            rows = self.task.rows // math.prod(layout["mesh"].get(name, 1) for name in ("data", "fsdp", "expert"))
            for microbatches in (n for n in MICROBATCHES if rows % n == 0):
                yield {**layout, **({"microbatches": microbatches} if microbatches > 1 else {})}
            return
        assert self.target.chip

        def estimate(pipeline: dict[str, Any]) -> Estimate | None:
            rules = self.rules({**layout, "pipeline": pipeline, "remat": "block"})
            if self.traces.problems(rules, self.target.platform):
                self.refused += 1
                return None
            return self.estimator.estimate(rules)

        limit_bytes = self.target.chip.usable_hbm_bytes
        for pipeline in variants.pipelines(self.task, layout, estimate, limit_bytes):
            yield {**layout, "pipeline": pipeline}

    # What a device computes and keeps

    @functools.cached_property
    def has_fused_attention(self) -> bool:
        """Whether layouts that do not split the sequence have a fused attention kernel."""
        plain = self.rules({"mesh": {"data": self.target.devices}})
        return "attention" in self.asked and plain.kernel(self.target.platform) != "xla"

    @functools.cached_property
    def names(self) -> variants.Names:
        """The names that a remat policy may save or offload."""
        return variants.Names.from_trace(self.trace, self.has_fused_attention, self.task.names.saveable_names)


def describe(raw: Mapping[str, Any]) -> str:
    """A layout in one line: fsdp 4 x tensor 2, residual.seq, ZeRO-1, save attention_out, 2 microbatches."""
    parts = [" x ".join(f"{name} {size}" for name, size in raw["mesh"].items())]
    if dcn := raw.get("dcn"):
        parts.append(" x ".join(f"{name} {size}" for name, size in dcn.items()) + " across")
    parts += [row for row in raw.get("rules", {}) if "." in row]
    parts += [raw["context"]] if "context" in raw else []
    if "optimizer" in raw:
        parts.append("ZeRO-1")
    remat = raw.get("remat", "none")
    if isinstance(remat, str):
        parts.append({"none": "no remat"}.get(remat, f"remat {remat}"))
    else:
        parts += [f"{verb} {' '.join(names)}" for verb, names in remat.items()]
    if (microbatches := raw.get("microbatches", 1)) > 1:
        parts.append(f"{microbatches} microbatches")
    if pipeline := raw.get("pipeline"):
        parts.append(f"{pipeline['microbatches']} microbatches in stages")
        parts += [f"{pipeline['repeats']} repeats"] if "repeats" in pipeline else []
        parts += [f"gathered once a {pipeline['gather']}"] if "gather" in pipeline else []
        parts += ["stages keep their inputs"] if "keep" in pipeline else []
        parts += ["one forward and one backward"] if "schedule" in pipeline else []
    if "interleave" in raw:
        parts.append(f"in {raw['interleave']} parts")
    count = sum(map(len, raw.get("compiler_options", {}).values()))
    if count:
        parts.append(plural(count, "compiler option"))
    return ", ".join(parts)


def _roles(traces: TraceCache, graph: DataflowGraph, splits_sequence: bool) -> Roles:
    """`splits_sequence`: the model asks how keys reach the queries of a split sequence."""
    rows = traces.task.names.rows
    used = {path: nodes[0] for path, nodes in graph.placements_in_use.items()}
    matrices = [path for path in used if path in graph.matrix_paths]
    axes = {path: node.placed.axes for path, node in used.items() if node.placed}
    groups = dict.fromkeys(matmul.group_axis for matmul in graph.matmuls if matmul.group_axis)
    count = collections.Counter(axis for path in used for axis in axes[path] if axis != rows)
    width: list[str] = []
    for axis, _ in count.most_common():
        alone = all(not {*width} & {*axes[path]} for path in used if axis in axes[path])
        if alone and any(axis in axes[path] for path in matrices):
            width.append(axis)
    # Axes that activations sum over among themselves stay whole: a head's size.
    # What chooses groups, as routers do, stays whole too.
    firsts = collections.Counter[str]()
    grouped = {matmul.path for matmul in graph.matmuls if matmul.group_axis}
    beside = {path.rpartition(".")[0] for path in grouped}
    for path in matrices:
        if path.rpartition(".")[0] in beside and path not in grouped:
            continue
        others = [axis for axis in axes[path] if axis not in width and axis not in groups]
        if len(others) > 1 and not {*width} & {*axes[path]}:  # what it reads was made smaller before
            others = others[1:]
        if others:
            firsts[others[0]] += math.prod(used[path].shape) * used[path].trip_count
    # What is put beside other numbers stays whole, such as the part of keys that all heads share.
    joined = {
        near.placed.axes[-1]
        for node in graph.nodes
        if node.primitive == "concatenate"
        for near in graph.before([node], past_matmuls=False)
        if near.placed and near.placed.axes
    }
    hidden: list[str] = []
    arrays = [*axes.values(), *(node.placed.axes for node in graph.activations if node.placed)]
    for axis, _ in firsts.most_common():
        if axis not in joined and not any(axis in names and {*hidden} & {*names} for names in arrays):
            hidden.append(axis)
    adapters = traces.task.names.placed_like
    # Matrices inside a block that have no width, as those that make keys from a shorter vector.
    inside = {
        f"{name}.{axes[path][0]}": used[path]
        for path in matrices
        if (name := path.rpartition(".")[2]) not in adapters
        and not {*width} & {*axes[path]}
        and {*hidden} & {*axes[path][1:]}
        and axes[path][0] not in (*hidden, *groups)
    }
    streams = [stream for matmul in graph.matmuls if (stream := graph.gathered_from(matmul.input))]
    between = dict.fromkeys(
        f"{stream.placed.array}.{axis}"
        for stream in streams
        if stream.placed
        for axis in stream.placed.axes
        if axis != rows and axis not in count
    )
    sizes: dict[str, set[int]] = collections.defaultdict(set)
    for node in (*used.values(), *graph.activations):
        if node.placed:  # the loss takes a sequence apart, so that its axis has several sizes
            for axis, size in zip(node.placed.axes, node.shape, strict=True):
                sizes[axis].add(size)
                sizes[f"{node.placed.array}.{axis}"].add(size)
    sizes |= {row: {node.shape[0]} for row, node in inside.items()}
    sequence = dict.fromkeys(row.rpartition(".")[2] for row in between) if splits_sequence else {}
    sizes_of = {axis: tuple(several) for axis, several in sizes.items()}
    return Roles(rows, (*width, *inside), tuple(hidden), tuple(between), tuple(groups), tuple(sequence), sizes_of)
