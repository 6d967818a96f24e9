"""Findings about a layout that looks wrong, and their remedies."""

import collections
import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from gspmd_lm.config import Config
from gspmd_lm.foresight.collectives import Collective
from gspmd_lm.foresight.hlo import Module
from gspmd_lm.foresight.memory import Memory
from gspmd_lm.foresight.report import Finding, Report
from gspmd_lm.foresight.table import PlacedArray
from gspmd_lm.foresight.timing import attention
from gspmd_lm.foresight.timing.predict import Prediction
from gspmd_lm.hardware.chips import Processor
from gspmd_lm.model.kernels.attention import DECODE_OUT, DECODE_Q
from gspmd_lm.program.supported import faster_kernel
from gspmd_lm.sharding.problems import Problem
from gspmd_lm.sharding.rules import Rules
from gspmd_lm.train import state
from gspmd_lm.units import human_bytes

LARGE_BYTES = 64 * 2**20  # arrays below that may be left whole
LARGE_SHARE = 0.02  # of the chip's memory, where that is more
ABOVE_FLOOR = 1.05
SMALL_BYTES = 2**16  # of a step, that are not worth a warning however many times the floor they are
TRIFLE = 0.01  # share of all traffic that is not worth a warning
UNFUSED = 0.1  # share of the step that attention without a fused kernel may take
PADDING = 0.05  # share of the state's bytes
SLOW_LINKS = {"dcn": "between slices", "network": "between hosts"}
NEEDLESS = 1.5  # times its share of the products that a device may compute
BUBBLE = 0.1  # share of a pipeline's turns in which a stage may be idle
# Axes that are seldom long enough to be split for memory's sake, or whose rows say what a device computes.
NOT_SPLIT = ("batch", "kv_seq", "layers", "positions", "heads", "kv_heads", "head_dim", "rank", "rope_dim")


def warnings(
    report: Report,
    config: Config | None,
    rules: Rules,
    on: Processor,
    problems: Iterable[Problem],
    looked_up: Collection[str],
    module: Module | None,
    notes: Sequence[str],
) -> tuple[Finding, ...]:
    """Findings about the layout of a report, in the order in which they are worth reading.

    config: of the decoder. on: what it would run on. problems: the warnings of its check. looked_up: tables in which
    rows are looked up. module: None where there is no program. notes: what the compiler said while it worked.
    """
    training = config and report.phase == "train" and rules.kernel(on.platform) == "xla"
    fused = faster_kernel(rules, config, on, state.attention_pass(config)) if config and training else ""
    arrays, moved, memory, predicted = report.arrays, report.collectives, report.memory, report.prediction
    return (
        *_too_large(memory),
        *_workspace(memory, module),
        *_find_unpriced(predicted),
        *_above_floor(report),
        *_reshards(rules, moved, looked_up, report.phase),
        *_slow_links(config.model.layers if config else 1, rules, moved),
        *_bubble(rules),
        *_find_unfused(fused, predicted),
        *_involuntary(notes),
        *_find_replicated(rules.mesh, arrays, memory),
        *_find_repeated(rules, arrays),
        *(_not_effective(rules, arrays, module) if module else ()),
        *_padding(memory),
        *(_padded_vocabulary(config) if config else ()),
        *(
            Finding("mesh-axis-of-size-1", f"mesh: {name}=1 splits nothing", f"drop {name} from the mesh and the rules")
            for name, size in rules.mesh.items()
            if size == 1 and len(rules.mesh) > 1
        ),
        *(Finding(problem.code, problem.message, problem.fix) for problem in problems),
    )


def advise_on_step(
    report: Report,
    notes: Sequence[str],
    callbacks: Sequence[str],
    replaceable: Sequence[PlacedArray],
    module: Module | None,
    knows_trip_counts: bool,
) -> tuple[Finding, ...]:
    """Findings about a step of one's own, whose arrays no rule places.

    callbacks: where it calls Python. replaceable: arguments whose place results could take. knows_trip_counts: see
    `Reading`. The other arguments are as in `warnings`.
    """
    memory = report.memory
    return (
        *_too_large(memory, "a smaller batch, or arguments that are split over more devices"),
        *_find_unpriced(report.prediction),
        *_python_on_host(callbacks),
        *_find_needless_products(report, module, knows_trip_counts),
        *_above_floor(report),
        *_involuntary(notes, "constrain the arrays around it alike (jax.lax.with_sharding_constraint)"),
        *_find_not_donated(memory, replaceable),
        *_find_replicated(report.mesh, report.arrays, memory, "a PartitionSpec with {axis} for {dimension} of it"),
    )


def _workspace(memory: Memory, module: Module | None) -> Iterator[Finding]:
    """The workspace that cuDNN allocates when it runs, which a compiler without a GPU does not count."""
    most = max(map(attention.workspace_bytes, module.kernels), default=0) if module else 0
    if memory.fits and memory.limit_bytes is not None and memory.peak_bytes + most > memory.limit_bytes:
        yield Finding(
            "workspace",
            f"cuDNN takes up to {human_bytes(most)} more while it computes gradients of attention: "
            f"{human_bytes(memory.limit_bytes - memory.peak_bytes)} are free",
            "a smaller data.batch or data.seq, or more rules.microbatches",
        )


def _find_not_donated(memory: Memory, replaceable: Sequence[PlacedArray]) -> Iterator[Finding]:
    """Arguments whose place results could take. Other results, such as logits, need memory of their own anyway."""
    beside_bytes = min(memory.results_bytes, sum(array.bytes_per_device for array in replaceable))
    if beside_bytes > max(LARGE_BYTES, LARGE_SHARE * (memory.limit_bytes or 0)):
        largest = max(replaceable, key=lambda array: array.bytes_per_device)
        others = f" and {len(replaceable) - 1} more" if len(replaceable) > 1 else ""
        yield Finding(
            "not-donated",
            f"{human_bytes(beside_bytes)} per device of results stand beside arguments of the same shape: "
            f"{largest.path}{others}",
            "jax.jit(..., donate_argnums=...) with the numbers of these arguments puts results in their place",
        )


def _above_floor(report: Report) -> Iterator[Finding]:
    """A step that sends clearly more than its floor. The mesh axes and phase with the largest excess are named.

    There is no such finding where branches of a conditional send different amounts: the floor has those that send
    least, and the program may need more.
    """
    floor, ratio, total = report.floor, report.above_floor, report.sent_bytes
    known = floor.communication_bytes is not None and not floor.estimated_because
    known &= floor.branch_bytes <= TRIFLE * total
    if not known or total <= SMALL_BYTES or (ratio and ratio <= ABOVE_FLOOR):
        return
    excess = _excess_bytes(report)
    axes, phase = max(excess, key=excess.__getitem__)
    above = f"{ratio:.2f}x the necessary communication" if ratio else "communication that nothing makes necessary"
    too_much = f"{human_bytes(excess[axes, phase])} too much over {axes} ({phase})"
    yield Finding(
        "above-floor",
        f"{above}: {human_bytes(total)} per device and step; {too_much}",
        f"look at {_most_excessive(report, axes, phase)}",
    )


def _excess_bytes(report: Report) -> Mapping[tuple[str, str], int]:
    """Mesh axes and phase -> the bytes that are sent above the floor, which is scaled to the width that is sent."""
    floor, ratio = report.floor, report.above_floor
    width = report.sent_bytes / ratio / floor.communication_bytes if ratio and floor.communication_bytes else 1.0
    excess = collections.Counter[tuple[str, str]]()
    for one in report.collectives:
        excess["+".join(one.mesh_axes), one.phase] += one.bytes_per_device_per_step
    for one in floor.by_array:
        excess[one.mesh_axes, one.phase] -= round(width * one.bytes_per_device_per_step)
    return excess


def _most_excessive(report: Report, axes: str, phase: str) -> str:
    """The largest collective of those that run more often than they must, or of all; in words."""
    moved = [one for one in report.collectives if ("+".join(one.mesh_axes), one.phase) == (axes, phase)]
    least, times = collections.Counter[str](), collections.Counter[str]()
    for one in report.floor.by_array:
        if (one.mesh_axes, one.phase) == (axes, phase):
            least[one.array] += one.times_per_step
    for one in moved:
        times[one.op] += one.times_per_step
    largest = next((one for one in moved if times[one.op] > least[one.op] > 0), moved[0])
    often, enough = times[largest.op], least[largest.op]
    repeated = f": {often:,} times in a step, where {enough:,} would do" if often > enough > 0 else ""
    because = f", because of {', '.join(largest.rules)}" if largest.rules else ""
    place = ", ".join(dict.fromkeys(filter(None, (largest.op, largest.source))))
    return f"the {largest.kind} at {place}{repeated}{because}"


def _reshards(rules: Rules, moved: Sequence[Collective], looked_up: Collection[str], phase: str) -> Iterator[Finding]:
    """Exchanges that no table of the rules asks for: all-to-alls, permutes, and gathers of activations that no row for
    activations splits. Those of a look-up cost less than what would avoid them."""
    total = sum(one.bytes_per_device_per_step for one in moved)
    scattered = {one.op: one.bytes_per_device_per_step for one in moved if one.kind == "reduce-scatter"}
    for one in moved:
        asked = _is_context_movement(rules, one) or (
            one.kind == "collective-permute" and {*one.mesh_axes} <= {*rules.stages}
        )
        asked |= phase == "decode" and _is_query_movement(rules, one)
        unasked = (one.kind in ("all-to-all", "collective-permute") and not asked) or (
            one.kind == "all-gather"
            and one.phase != "optimizer"
            and not (_is_weight(rules, one.op) and one.rules)
            and not any(row.startswith("rules.") for row in one.rules)
        )
        if one.kind == "collective-permute" and one.bytes_per_device_per_step < scattered.get(one.op, 0) / 4:
            continue  # puts right what a reduce-scatter in whole tiles has left; TPU
        small = not one.in_loop and one.bytes_per_device_per_step < max(TRIFLE * total, LARGE_BYTES / 64)
        if not unasked or small or one.op.partition("+")[0] in looked_up:
            continue
        what = f"{one.kind} over {'+'.join(one.mesh_axes)} at {one.op or one.source} ({one.phase})"
        yield Finding(
            "unasked-reshard",
            f"{what}, {one.times_per_step} times, {human_bytes(one.bytes_per_device_per_step)}: no rule asks for it",
            f"make the rows of the arrays around it agree ({', '.join(one.rules) or one.source or 'see --json'})",
        )


def _bubble(rules: Rules) -> Iterator[Finding]:
    busy, turns = rules.turns
    if rules.pipeline and busy < (1 - BUBBLE) * turns:
        yield Finding(
            "pipeline-bubble",
            f"in {turns - busy} of {turns} turns, a stage computes what nobody reads: {1 - busy / turns:.0%}",
            f"--set rules.pipeline.microbatches={2 * rules.pipeline.microbatches}, if the batch has the rows",
        )


def _is_context_movement(rules: Rules, one: Collective) -> bool:
    """Whether the form of attention over a split sequence asks for a movement."""
    form = {"collective-permute": "ring", "all-to-all": "ulysses"}.get(one.kind)
    return rules.context == form and {*one.mesh_axes} <= {*rules.split("rules", "q", "seq")}


def _is_query_movement(rules: Rules, one: Collective) -> bool:
    """Whether rows ask for the movement of the queries of decoded tokens to the cache, or of results back."""
    rows = [row for row in rules.rows if row.array in (DECODE_Q.partition(":")[0], DECODE_OUT.partition(":")[0])]
    return one.kind == "all-to-all" and {*one.mesh_axes} <= {name for row in rows for name in row.mesh_axes}


def _is_weight(rules: Rules, op: str) -> bool:
    return op.rpartition(".")[2] in rules.vocabulary.weights


def _slow_links(layers: int, rules: Rules, moved: Sequence[Collective]) -> Iterator[Finding]:
    """What every layer sends there. Gradients that are summed once a step have to cross.

    The optimizer runs once a step, however many arrays one of its collectives moves together.
    """
    slow = collections.defaultdict[str, list[Collective]](list)
    for one in moved:
        gradient = one.phase == "backward" and one.kind in ("all-reduce", "reduce-scatter")
        gradient &= "rules.batch" in one.rules and (_is_weight(rules, one.op) or one.op.endswith("_norm"))
        often = one.times_per_step >= max(2, layers) and one.phase != "optimizer"
        if one.link in SLOW_LINKS and often and not (gradient and rules.microbatches == 1):
            slow[one.link].append(one)
    for link, over in slow.items():
        rows = dict.fromkeys(row for one in over for row in one.rules)
        because = f", because of {', '.join(rows)}" if rows else ""
        axes = "+".join(dict.fromkeys(axis for one in over for axis in one.mesh_axes))
        sent = sum(one.bytes_per_device_per_step for one in over)
        if sent <= SMALL_BYTES:
            continue
        yield Finding(
            "slow-link",
            f"{axes} sends {human_bytes(sent)} per device {SLOW_LINKS[link]}, in every layer{because}",
            "let an axis cross that only the gradients use: --set rules.dcn.data=..., with batch split over data too",
        )


def _find_unfused(fused: str, predicted: Prediction | None) -> Iterator[Finding]:
    share = predicted.attention_s / predicted.step_time_s if predicted else 0.0
    if fused and share > UNFUSED:
        yield Finding(
            "unfused-attention",
            f"attention takes {share:.0%} of the step: XLA's own writes all scores to memory",
            fused,
        )


def _find_unpriced(predicted: Prediction | None) -> Iterator[Finding]:
    """Operations that the predicted time leaves out."""
    if predicted is None:
        return
    if names := predicted.without_price:
        yield Finding(
            "unpriced",
            f"nothing is known of how long this takes: {names} ({predicted.unpriced_share:.0%} of the program's bytes)",
            "read the predicted time as a lower bound; a Pallas kernel for TPU is priced by its cost_estimate",
        )
    if predicted.missing_flops_share > TRIFLE:
        yield Finding(
            "unpriced",
            f"no matmul or attention kernel that is priced does {predicted.missing_flops_share:.1%} of what the model "
            "must multiply",
            "read the predicted time as a lower bound",
        )


def _find_needless_products(report: Report, module: Module | None, knows_trip_counts: bool) -> Iterator[Finding]:
    """Products of devices that compute the same, or of rows with matrices that are not theirs.

    Where the floor counts a loop once for want of its trip count, products in loops say nothing.
    """
    needed = report.floor.flops
    done: dict[str, float] = collections.defaultdict(float)
    for one in module.operations if module else ():
        if one.flops and one.name_in_model.phase != "recomputation" and (knows_trip_counts or not one.loops):
            done[one.source or one.op_name or one.name] += one.flops * one.executions
    total = sum(done.values())
    if needed and total > NEEDLESS * needed:
        place = max(done, key=done.__getitem__)
        yield Finding(
            "needless-products",
            f"a device computes {total / needed:.1f} times the products that are its share; {place} has "
            f"{done[place] / total:.0%} of them",
            "split what is multiplied there over all mesh axes; jax.lax.ragged_dot multiplies all rows with all "
            "matrices where a chip has no kernel for it",
        )


def _python_on_host(callbacks: Sequence[str]) -> Iterator[Finding]:
    if callbacks:
        more = f" and {len(callbacks) - 3} more" if len(callbacks) > 3 else ""
        yield Finding(
            "python-on-the-host",
            f"neither the time of calls of Python nor what they send is counted: {'; '.join(callbacks[:3])}{more}",
            "leave them out of what is traced: jax.debug.print, and checks of values, which equinox, diffrax, lineax "
            "and optimistix leave out with throw=False or with EQX_ON_ERROR=nan in the environment",
        )


def _too_large(
    memory: Memory, fix: str = "a smaller data.batch or data.seq, or weights that are split over more devices"
) -> Iterator[Finding]:
    """plan/advice.py finds a better fix for a train step."""
    if not memory.fits and memory.limit_bytes is not None:
        yield Finding(
            "does-not-fit",
            f"{human_bytes(memory.peak_bytes)} per device at the peak, {human_bytes(memory.limit_bytes)} are there",
            fix,
        )


def _involuntary(
    notes: Sequence[str], fix: str = "make the rows of the arrays around it agree, or place one in between"
) -> Iterator[Finding]:
    if notes:
        more = f" (and {len(notes) - 1} more)" if len(notes) > 1 else ""
        yield Finding(
            "involuntary-remat",
            f"the partitioner replicates an array to reshard it: {notes[0]}{more}",
            fix,
        )


def _find_replicated(
    mesh: Mapping[str, int],
    arrays: Sequence[PlacedArray],
    memory: Memory,
    fix: str = "--set rules.{row}={axis} would split them",
) -> Iterator[Finding]:
    """Large arrays that every device along a mesh axis holds whole, though they could be split over it.

    They are weights and the residual, which is kept for the backward pass. Other activations come and go.
    """
    large = max(LARGE_BYTES, LARGE_SHARE * (memory.limit_bytes or 0))
    for name, size in mesh.items():
        whole: list[tuple[PlacedArray, str]] = []
        for array in arrays:
            spec = array.at_rest or array.in_use
            kept = array.at_rest is not None or array.path == "residual"
            if kept and array.bytes_per_device >= large and not any(name in names for names in spec):
                lengths = zip(array.axes, array.shape, spec, strict=True)
                free = (axis for axis, length, names in lengths if not names and length % size == 0)
                whole += [(array, axis) for axis in free if axis not in NOT_SPLIT][:1]
        if size == 1 or not whole:
            continue
        largest, axis = max(whole, key=lambda pair: pair[0].bytes_per_device)
        split = {one for array in arrays for names in array.at_rest or () if name in names for one in array.axes}
        only = f"{largest.path.rpartition('.')[2]}." if axis in split else ""  # elsewhere, the mesh axis is taken
        row = f"rules.residual.{axis}" if largest.at_rest is None else f"weights.{only}{axis}"
        others = f" and {len(whole) - 1} more" if len(whole) > 1 else ""
        total = sum(array.bytes_per_device for array, _ in whole)
        yield Finding(
            "replicated-array",
            f"{largest.path}{others}, {human_bytes(total)} per device, are the same on all {size} devices along {name}",
            fix.format(row=row, axis=name, dimension=axis.replace("_", " ")),
        )


def _find_repeated(rules: Rules, arrays: Sequence[PlacedArray]) -> Iterator[Finding]:
    """Mesh axes that split weights, but nothing that is computed. A split weight in use splits its matmuls."""
    known = any(array.at_rest is None for array in arrays)
    for name, size in rules.mesh.items():
        used = known and any(name in row.mesh_axes for row in rules.rows)
        if size > 1 and used and not any(name in names for array in arrays for names in array.in_use):
            yield Finding(
                "replicated-array",
                f"every activation is the same on all {size} devices along {name}: they compute the same",
                f"--set rules.rules.batch={name} would share the work out",
            )


def _not_effective(rules: Rules, arrays: Sequence[PlacedArray], module: Module) -> Iterator[Finding]:
    """Activations that the rules split, but that the program holds whole where it names them."""
    sizes: dict[str, set[int]] = collections.defaultdict(set)
    for instruction in module.instructions:
        scope = instruction.op_name.rpartition("/rules.")[2].partition("/")[0]
        if scope and len(instruction.shape.arrays) == 1:
            sizes[scope].add(instruction.shape.arrays[0].elements)
    for array in arrays:
        pieces = rules.num_shards(itertools.chain(*array.in_use))
        whole, held = math.prod(array.shape), sizes[array.path]
        if array.at_rest is None and pieces > 1 and whole in held and whole // pieces not in held:
            yield Finding(
                "constraint-not-effective",
                f"{array.path}: the rules split it into {pieces} pieces, but the program holds it whole",
                "look at the arrays it is made from: one of them may be placed against it",
            )


def _padding(memory: Memory) -> Iterator[Finding]:
    state_bytes = memory.weights_bytes + memory.optimizer_bytes + memory.batch_bytes + memory.cache_bytes
    if memory.padding_bytes > PADDING * state_bytes and memory.padding_bytes > LARGE_BYTES:
        yield Finding(
            "padding",
            f"tiles add {human_bytes(memory.padding_bytes)} per device to weights and optimizer state "
            f"({memory.padding_bytes / state_bytes:.0%})",
            "split a larger dimension: one of few kv_heads or a small head_dim is padded to 8 x 128",
        )


def _padded_vocabulary(config: Config) -> Iterator[Finding]:
    rows = config.model.vocab_rows - config.model.vocab
    if rows > PADDING * config.model.vocab:
        yield Finding(
            "padding",
            f"model.padded_vocab adds {rows:,} rows ({rows / config.model.vocab:.0%}) that are computed for nothing",
            "pad to the next multiple of what splits the vocabulary",
        )
