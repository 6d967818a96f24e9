"""Predictions from the simulated schedule: a step's time and its parts, exposed communication, a layer's timeline."""

import collections
import dataclasses
from collections.abc import Mapping

from gspmd_lm.foresight.hlo import Instruction, Module
from gspmd_lm.foresight.timing import attention, op_time
from gspmd_lm.foresight.timing.simulate import COMPUTE, HOST, MEMORY, Iteration, Simulation
from gspmd_lm.hardware.chips import Chip
from gspmd_lm.hardware.network import Network
from gspmd_lm.units import human_seconds

UNPRICED = 0.01  # the share of a program's bytes from which operations without a known time matter
COSTLIEST = 12  # how many operations are listed
UNKNOWN_TRIP_COUNT = "while: turns unknown"
_TOO_SHORT = 1e-4  # the share of an iteration below which a span is not shown


@dataclasses.dataclass(frozen=True)
class Span:
    """One span in the timeline of one iteration of a loop."""

    start_s: float
    end_s: float
    lane: str  # compute, or a link: ici fsdp, ici tensor, dcn data, nvlink tensor, host
    kind: str  # matmul, attention, other, all-gather, ..., copy to host, copy from host
    name: str  # the operation
    part: str  # forward or backward


@dataclasses.dataclass(frozen=True)
class Parts:
    """The seconds of a step, and of each part of it. Exposed time is time in which compute waits."""

    step_time_s: float
    matmul_s: float
    attention_s: float
    other_s: float
    exposed_by_axis: Mapping[str, float]  # mesh axes -> communication over them; of a prediction, the longest first
    exposed_host_copy_s: float

    @property
    def parts_s(self) -> dict[str, float]:
        """The seconds of each part, under names for sentences."""
        waits = {f"waiting for {axes}": seconds for axes, seconds in self.exposed_by_axis.items()}
        return {
            "matmuls": self.matmul_s,
            "attention": self.attention_s,
            "other compute": self.other_s,
            **waits,
            "waiting for copies to the host": self.exposed_host_copy_s,
        }


@dataclasses.dataclass(frozen=True)
class Prediction(Parts):
    """The predicted step of a compiled program."""

    exposed_communication_s: float
    communication_s: float  # exposed or not
    mfu: float
    tokens_per_s_per_device: float | None  # None where nothing tells what a token is
    basis: str  # what the op times rest on
    error: str  # the known error of such predictions
    timeline: tuple[Span, ...]
    # An operation whose time is not known -> its share of the bytes of all instructions; the largest first.
    unpriced: Mapping[str, float]
    unpriced_share: float
    missing_flops_share: float  # the share of the model's necessary FLOPs that no matmul or attention kernel does
    fusions: tuple[tuple[str, float], ...] = ()  # the costliest operations: name and seconds per step

    @property
    def without_price(self) -> str:
        """The operations without a known time that may matter, in words; '' if there is none.

        The bytes of a kernel, a matmul or a loop do not tell how long it takes; other operations matter by their bytes.
        """
        of_long = op_time.CALL, op_time.MATMUL_OF, UNKNOWN_TRIP_COUNT
        long = [name for name in self.unpriced if name.startswith(of_long)]
        most = long or [*self.unpriced] if long or self.unpriced_share > UNPRICED else []
        return ", ".join(most[:3]) + (f" and {len(most) - 3} more" if len(most) > 3 else "")


def predict(
    module: Module,
    chip: Chip,
    network: Network,
    flops_per_device: float,
    tokens_per_device: float | None,
    error: str = "",
    least_flops: float = 0.0,
) -> Prediction:
    """The prediction for one step of a program on chips that `network` connects.

    `flops_per_device` are the model's FLOPs without recomputation, which MFU compares with the peak. `error` says how
    wrong predictions for such chips were. `least_flops` are the FLOPs that the matmuls and attention kernels of one
    device must do; 0 means that they are not known.
    """
    simulation = Simulation(module, chip, network)
    exposed_s = {label: seconds for label, seconds in simulation.exposed_s.items() if seconds > 0}
    host_s = exposed_s.pop(HOST, 0.0)
    unpriced = _without_time(module, simulation)
    step_s = simulation.clock_s
    packed = "; packed documents as whole rows" if any(map(attention.has_documents, module.kernels)) else ""
    return Prediction(
        step_time_s=step_s,
        matmul_s=simulation.compute_s["matmul"],
        attention_s=simulation.compute_s["attention"],
        other_s=simulation.compute_s["other"],
        exposed_communication_s=sum(exposed_s.values()),
        exposed_by_axis=dict(sorted(exposed_s.items(), key=lambda wait: -wait[1])),
        exposed_host_copy_s=host_s,
        communication_s=simulation.communication_s,
        mfu=flops_per_device / step_s / chip.peak_bf16_flops_per_s if step_s else 0.0,
        tokens_per_s_per_device=None if tokens_per_device is None else tokens_per_device / step_s if step_s else 0.0,
        basis=_BASIS[chip.platform] + packed + ("; experts with even loads, in one round" if module.buffers else ""),
        error=error,
        timeline=_timeline(simulation.iterations),
        unpriced=unpriced,
        unpriced_share=sum(unpriced.values()),
        missing_flops_share=max(0.0, 1 - _flops(simulation) / least_flops) if least_flops else 0.0,
        fusions=_costliest(simulation),
    )


_BASIS = {
    "tpu": "the TPU compiler's cycles for matmuls; memory traffic for the rest; links first come, first served",
    "cpu": "matmuls at rates that were measured; memory traffic or arithmetic for the rest; collectives as measured",
    "gpu": "matmuls at a share of peak; memory traffic and launches for the rest; links first come, first served",
}


def _without_time(module: Module, simulation: Simulation) -> dict[str, float]:
    """Operations whose time is not known, with their place, each with its share of the bytes of all instructions."""
    total, bytes_of = 0, collections.Counter[str]()
    for instruction in module.operations:
        if instruction.opcode == "while" and instruction.trip_count is None:
            bytes_of[UNKNOWN_TRIP_COUNT] += 1
        if instruction.opcode in _MOVE_NOTHING or instruction.phase in ("-update", "-done"):
            continue
        size = instruction.executions * instruction.moved_bytes.total()
        total += size
        unknown = simulation.op_time(instruction).unknown
        if unknown:
            bytes_of[f"{unknown} at {_label(instruction)}" if instruction.op_name else unknown] += size
    return {name: size / total if total else 0.0 for name, size in bytes_of.most_common()}


def _flops(simulation: Simulation) -> float:
    """The FLOPs of matmuls and kernels in one step, without recomputation."""
    total = 0.0
    for instruction in simulation.operations:
        if instruction.name_in_model.phase == "recomputation":
            continue
        done = instruction.flops
        for call in op_time.kernels_of(instruction):
            done += attention.flops(call) or (op_time.kernel_work(call) or (0.0,))[0]
        total += instruction.executions * done
    return total


_MOVE_NOTHING = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "call", "conditional")


def _costliest(simulation: Simulation) -> tuple[tuple[str, float], ...]:
    """The operations that compute longest, each with its seconds."""
    seconds: collections.defaultdict[str, float] = collections.defaultdict(float)
    for instruction in simulation.operations:
        time = simulation.op_time(instruction)
        if time.seconds:
            seconds[f"{_label(instruction)} ({time.kind})"] += instruction.executions * time.seconds
    return tuple(sorted(seconds.items(), key=lambda item: -item[1])[:COSTLIEST])


def _label(instruction: Instruction) -> str:
    """The place of an instruction in the model, such as layers.attention.wq."""
    name = instruction.name_in_model
    return "+".join(name.owners) or ".".join(name.modules[:3]) or instruction.name


def _timeline(iterations: Mapping[Instruction, Iteration]) -> tuple[Span, ...]:
    """One iteration of the longest loop of the forward pass, then one of the backward pass."""
    parts = {loop: _part(iteration) for loop, iteration in iterations.items()}
    longest: dict[str, Iteration] = {}
    for loop in sorted(iterations, key=lambda loop: iterations[loop].loop_s * loop.executions):
        if len({parts[inner] for inner in iterations if loop in inner.loops}) < 2:
            longest[parts[loop]] = iterations[loop]  # a loop over microbatches contains loops of both passes
    return tuple(span for part in ("forward", "backward") if part in longest for span in _spans(longest[part], part))


def _part(iteration: Iteration) -> str:
    """The pass, forward or backward, of most of an iteration's compute. Recomputation belongs to the backward pass."""
    compute_s = {"forward": 0.0, "backward": 0.0}
    for event in iteration.events:
        if event.track == COMPUTE:
            phase = event.instruction.name_in_model.phase
            compute_s["forward" if phase in ("forward", "other") else "backward"] += event.end_s - event.begin_s
    return "backward" if compute_s["backward"] > compute_s["forward"] else "forward"


def _spans(iteration: Iteration, part: str) -> list[Span]:
    """The spans of an iteration. A transfer that ends in the next one is also shown as it comes from the one before."""
    spans: list[Span] = []
    for event in iteration.events:
        begin_s, end_s = event.begin_s - iteration.begin_s, event.end_s - iteration.begin_s
        if event.track == MEMORY or begin_s < 0:  # of the iteration before; this one has the same event
            continue
        for shift_s in (0.0, iteration.seconds):
            low, high = max(0.0, begin_s - shift_s), min(iteration.seconds, end_s - shift_s)
            if high - low > iteration.seconds * _TOO_SHORT:
                spans.append(Span(low, high, event.track, event.kind, _label(event.instruction), part))
    joined: list[Span] = []
    for span in sorted(spans, key=lambda span: (span.lane != COMPUTE, span.lane, span.start_s)):
        last = joined[-1] if joined else span
        same = dataclasses.replace(span, start_s=last.start_s, end_s=last.end_s) == last
        if joined and same and span.start_s - last.end_s <= iteration.seconds * _TOO_SHORT:
            joined[-1] = dataclasses.replace(last, end_s=span.end_s)
        else:
            joined.append(span)
    return joined


def differences(before: Mapping[str, float], after: Mapping[str, float], step_s: float) -> str:
    """Which parts are longer after than before, and which are shorter: 'waiting for fsdp +12 ms, matmuls -3 ms'.

    A part may be missing on one side. Parts that differ by less than a thousandth of `step_s` are left out.
    """
    gaps = {name: after.get(name, 0.0) - before.get(name, 0.0) for name in (*before, *after)}
    shown = sorted((gap, name) for name, gap in gaps.items() if abs(gap) > 0.001 * step_s)
    longer = [f"{name} +{human_seconds(gap)}" for gap, name in reversed(shown) if gap > 0]
    shorter = [f"{name} -{human_seconds(-gap)}" for gap, name in shown if gap < 0]
    return ", ".join([*longer, *shorter]) or "no part differs by more than a thousandth of the step"
