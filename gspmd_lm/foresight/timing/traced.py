"""The parts of a step in a trace of jax's profiler, with the names that predictions have for them.

An event of the trace names the instruction of the compiled program that ran. The program says the kind of its compute,
or the mesh axes of its collective. At each moment a device computes, or waits for a collective, or does neither: a gap.
Until the last device has come to a collective, the first ones wait for devices and not for links. A kernel of a GPU
whose instruction is not named is told by its own name.
"""

import collections
import dataclasses
import itertools
import re
import warnings
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import jax

from gspmd_lm.foresight.hlo import HOST_SPACE, Instruction, Module
from gspmd_lm.foresight.hlo.work import COLLECTIVES
from gspmd_lm.foresight.timing import op_time
from gspmd_lm.foresight.timing.predict import Parts
from gspmd_lm.foresight.timing.simulate import HOST, Simulation
from gspmd_lm.hardware.chips import KINDS
from gspmd_lm.hardware.network import Groups, Network

GAPS, PEERS = "gaps", "other devices"
LEAST_SHARE = 1e-3  # of a step: a shorter part tells nothing of the chip
MOST_TRIES = 8  # of the factors of links, each of which simulates the program once
LEAST_FACTOR = 1e-6  # of what took no time, or of a link whose collectives hide behind compute
LEAST_NAMED = 0.9  # the share of the kernels' time whose instructions a trace must name
# Words in the names of libraries' kernels on GPUs, as traces of train steps on one H100 had them.
_LIBRARIES = {"matmul": ("nvjet", "gemm", "cutlass", "grouped"), "attention": ("cudnn",)}
SEVERAL = "several axes"  # over any of which a kernel of NCCL may send
_CONTROL = ("while", "conditional", "call")  # what they run has events of its own
_OPERATIONS = "XLA Ops"  # the line of a TPU with what its core runs; its other lines show the same in other ways
_NAME = re.compile(r"%?([\w.\-]+)")


class TracedStep(NamedTuple):
    """The mean step of a trace, on one device. All figures are seconds."""

    step_time_s: float  # from the first operation of the first step to the end of the last one, over the steps
    compute_s: Mapping[str, float]  # matmul, attention, other
    exposed_s: Mapping[str, float]  # mesh axes -> waiting for their collectives; also for PEERS, and for HOST
    gaps_s: Mapping[str, float]  # the kind of what ran before -> time in which nothing runs
    links: Mapping[str, str]  # mesh axes -> the link of their collectives

    @property
    def parts_s(self) -> dict[str, float]:
        """The parts of the step, as `Parts.parts_s` names them, and the gaps."""
        exposed_s = dict(sorted(self.exposed_s.items(), key=lambda wait: -wait[1]))
        host_s = exposed_s.pop(HOST, 0.0)
        matmul_s, attention_s, other_s = (self.compute_s.get(kind, 0.0) for kind in KINDS)
        parts = Parts(self.step_time_s, matmul_s, attention_s, other_s, exposed_s, host_s)
        return {**parts.parts_s, GAPS: sum(self.gaps_s.values())}

    def slowdowns(self, module: Module, network: Network) -> dict[str, float]:
        """How many times as long as predicted each kind of compute took, and each link.

        Gaps count for the kind of compute before them, and waiting for other devices for all compute, which is uneven.
        The factor of a link is the one with which a program that computes as slowly waits for it as long as measured.
        """
        chip = network.chip
        assert chip
        predicted = Simulation(module, chip, network)
        uneven = 1 + self.exposed_s.get(PEERS, 0.0) / (sum(self.compute_s.values()) or 1.0)
        found = {
            kind: max(seconds / predicted.compute_s[kind], LEAST_FACTOR)
            for kind in KINDS
            for seconds in [uneven * self.compute_s.get(kind, 0.0) + self.gaps_s.get(kind, 0.0)]
            if predicted.compute_s[kind] and self._matters(seconds, predicted.compute_s[kind], predicted)
        }
        waits = {link: [axes for axes, its_link in self.links.items() if its_link == link] for link in predicted.link_s}
        waits = {
            link: waits_for
            for link, waits_for in waits.items()
            if self._matters(self._waiting_s(waits_for), predicted.link_s[link], predicted)
        }
        found |= dict.fromkeys(waits, 1.0)
        for _ in range(MOST_TRIES):  # since a collective may hide behind compute until it is slow enough
            slowed = dataclasses.replace(chip, slowdowns=scale_slowdowns(chip.slowdowns, found))
            predicted = Simulation(module, slowed, dataclasses.replace(network, chip=slowed))
            longer_s = {
                link: self._waiting_s(waits_for) - sum(predicted.exposed_s[axes] for axes in waits_for)
                for link, waits_for in waits.items()
            }
            if all(abs(seconds) < LEAST_SHARE * self.step_time_s for seconds in longer_s.values()):
                break
            for link, seconds in longer_s.items():
                found[link] = max(found[link] * (1 + seconds / predicted.link_s[link]), LEAST_FACTOR)
        return found

    def _waiting_s(self, several: Iterable[str]) -> float:
        return sum(self.exposed_s.get(axes, 0.0) for axes in several)

    def _matters(self, measured_s: float, predicted_s: float, predicted: Simulation) -> bool:
        """Whether a part takes a share of the measured or predicted step from which a factor can be told."""
        return measured_s > LEAST_SHARE * self.step_time_s or predicted_s > LEAST_SHARE * predicted.clock_s


def scale_slowdowns(slowdowns: Mapping[str, float], factors: Mapping[str, float]) -> dict[str, float]:
    """The slowdowns of a chip, each times its factor."""
    return {**slowdowns, **{name: factor * slowdowns.get(name, 1.0) for name, factor in factors.items()}}


class _Event(NamedTuple):
    """An operation that ran on a device."""

    begin_ns: float
    end_ns: float
    kind: str  # of its compute; "" of a collective
    axes: str  # of its collective; or PEERS or HOST


def traced_step(
    xspace: bytes, steps: int, module: Module, network: Network, partitions: Mapping[int, int] | None = None
) -> TracedStep:
    """The parts of a step of a trace with so many whole steps of a program.

    xspace: what a *.xplane.pb file of jax's profiler holds. partitions: of the program, by the number of a device;
    None: each has its own number. Raises ValueError for a trace in which the program did not run, or that does not name
    the instructions of its kernels.
    """
    parts = {one.name: _part(one, network) for one in module.operations if one.opcode not in _CONTROL}
    devices = collections.defaultdict[int, list[_Event]](list)
    sent = collections.defaultdict[str, dict[int, list[tuple[float, float]]]](dict)  # collective -> runs of each device
    kernels = {re.sub(r"[.-]", "_", name): part for name, part in parts.items()}  # as XLA calls those that it makes
    named_ns = unnamed_ns = 0.0
    for device, name, kernel, begin_ns, taken_ns in _events(xspace, module.name):
        place = (partitions or {}).get(device, device)
        part = parts.get(name) or (kernels.get(kernel) or _library_part(kernel, parts) if kernel else None)
        if part and part.groups and name in parts:
            sent[name].setdefault(place, []).append((begin_ns, begin_ns + taken_ns))
        elif part:
            devices[place].append(_Event(begin_ns, begin_ns + taken_ns, part.kind, part.axes))
        named_ns += taken_ns if part else 0.0
        unnamed_ns += taken_ns if kernel and not part else 0.0
    for name, runs in sent.items():
        for place, begin_ns, arrival_ns, end_ns in _arrivals(runs, parts[name].groups):
            devices[place].append(_Event(begin_ns, arrival_ns, "", PEERS))
            devices[place].append(_Event(arrival_ns, end_ns, "", parts[name].axes))
    if not devices or named_ns < LEAST_NAMED * (named_ns + unnamed_ns):
        share = named_ns / (named_ns + unnamed_ns or 1.0)
        raise ValueError(f"the trace names the instructions of {share:.0%} of the time of {module.name}")
    scale = 1e-9 / steps / len(devices)
    sums = [collections.defaultdict[str, float](float) for _ in range(3)]
    for events in devices.values():
        for total, of_device in zip(sums, _attribute(events), strict=True):
            for name, ns in of_device.items():
                total[name] += ns * scale
    spans = [(min(one.begin_ns for one in events), max(one.end_ns for one in events)) for events in devices.values()]
    compute_s, exposed_s, gaps_s = sums
    known = SEVERAL not in exposed_s
    links = {part.axes: network.link(part.groups) for part in parts.values() if part.groups and known}
    return TracedStep(scale * sum(end - begin for begin, end in spans), compute_s, exposed_s, gaps_s, links)


def _arrivals(
    runs: Mapping[int, list[tuple[float, float]]], groups: Groups
) -> Iterable[tuple[int, float, float, float]]:
    """Each run of a collective on a device: when it begins, when the last device of its group has come, and its end.

    runs: the partition of a device -> (begin, end) of each run. Of devices of other processes nothing is known.
    """
    ordered = {place: sorted(pairs) for place, pairs in runs.items()}
    for place, pairs in ordered.items():
        peers = {peer for group in groups if place in group for peer in group if peer in ordered}
        for number, (begin_ns, end_ns) in enumerate(pairs):
            begins = [ordered[peer][number][0] for peer in peers if number < len(ordered[peer])]
            yield place, begin_ns, min(max([begin_ns, *begins]), end_ns), end_ns


def _events(xspace: bytes, program: str) -> list[tuple[int, str, str, float, float]]:
    """The device, instruction, kernel, begin and duration of each event of a program.

    A device has the number that it has in its process. The instruction is '' where it is not named, and the kernel is
    '' elsewhere than on GPUs.
    """
    found = []
    with warnings.catch_warnings():
        # With Python 3.13, jaxlib 0.12 warns of its own binding, and aborts where that warning is an error.
        warnings.simplefilter("ignore", DeprecationWarning)
        for plane in jax.profiler.ProfileData.from_serialized_xspace(xspace).planes:
            numbered = re.match(r"/device:([A-Z]+):(\d+)", plane.name)
            on_gpu = numbered and numbered[1] == "GPU"
            lines = list(plane.lines)
            operations = [line for line in lines if line.name == _OPERATIONS]
            if not operations and numbered and not on_gpu:
                continue
            for event in itertools.chain.from_iterable(line.events for line in operations or lines):
                facts = dict(event.stats)
                name = facts.get("hlo_op", "")
                if operations and not name and (written := _NAME.match(event.name)):
                    name = written[1]
                if facts.get("hlo_module", program) == program and (name or on_gpu):
                    device = int(numbered[2]) if numbered else facts.get("device_ordinal", 0)
                    found.append((device, name, event.name if on_gpu else "", event.start_ns, event.duration_ns))
    return found


class _Part(NamedTuple):
    """What an instruction does: compute of a kind, or a transfer."""

    kind: str  # "" of a transfer
    axes: str = ""  # of a collective; HOST of a copy to the host or back
    groups: Groups = ()  # of a collective


def _part(instruction: Instruction, network: Network) -> _Part:
    begun = instruction
    while begun.phase in ("-update", "-done") and begun.operands:
        begun = begun.operands[0]
    kind = op_time.compute_kind(instruction)
    places = {array.memory_space for one in (begun, *begun.operands) for array in one.shape.arrays}
    if begun.phase == "-start" and begun.copies and HOST_SPACE in places:
        return _Part("", HOST)
    groups = next((op.groups for op in begun.collectives if network.axes(op.groups)), ())
    return _Part("", "+".join(network.axes(groups)), groups) if groups and kind == "other" else _Part(kind)


def _library_part(kernel: str, parts: Mapping[str, _Part]) -> _Part | None:
    """The part of a kernel of a library or of a copy on a GPU, by its name; None if that says nothing.

    parts: of all instructions. NCCL's kernels name their kind of collective alone.
    """
    letters = _letters(kernel)
    if letters.startswith(("memcpy", "memset")):
        return _Part("", HOST) if letters in ("memcpyd2h", "memcpyh2d") else _Part("other")
    if "nccl" not in letters:
        return next((_Part(kind) for kind, words in _LIBRARIES.items() if any(word in letters for word in words)), None)
    kinds = tuple(word for word in map(_letters, COLLECTIVES) if word in letters)
    kinds = kinds or ("alltoall", "raggedalltoall", "collectivepermute") * ("sendrecv" in letters)
    axes = {part.axes for name, part in parts.items() if part.groups and _letters(name).startswith(kinds)}
    return _Part("", axes.pop() if len(axes) == 1 else SEVERAL)


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _attribute(events: Iterable[_Event]) -> tuple[Mapping[str, float], ...]:
    """The nanoseconds of each kind of compute, of waiting for each mesh axes, and of gaps by what ran before them.

    Compute counts where a collective runs beside it. Of several operations at once, each counts for its share.
    """
    compute_ns, waits_ns, gaps_ns = (collections.defaultdict[str, float](float) for _ in range(3))
    edges = sorted((ns, begins, one) for one in events for ns, begins in ((one.begin_ns, True), (one.end_ns, False)))
    running = collections.Counter[_Event]()
    before_ns, last = edges[0][0], "other"
    for ns, begins, one in edges:
        if ns > before_ns:
            kinds = [other.kind for other in running if other.kind]
            axes = [other.axes for other in running if not other.kind]
            sums, names = (compute_ns, kinds) if kinds else (waits_ns, axes) if axes else (gaps_ns, [last])
            for name in names:
                sums[name] += (ns - before_ns) / len(names)
            before_ns = ns
        running[one] += 1 if begins else -1
        if not running[one]:
            del running[one]
        last = last if begins else one.kind or "other"
    return compute_ns, waits_ns, gaps_ns
