"""Words and numbers of a report that the terminal and the page share."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

from gspmd_lm.foresight.memory import Memory
from gspmd_lm.foresight.parts import differences, parts_s
from gspmd_lm.foresight.report import Report
from gspmd_lm.foresight.timing.predict import Prediction
from gspmd_lm.units import human_bytes, human_count, human_seconds

ALIKE = 0.01  # the times of two layouts that differ by less are the same


@dataclasses.dataclass(frozen=True)
class ComparisonRow:
    """One line of the comparison of layouts: a cell for each report, and the numbers of the best ones."""

    label: str
    known: str  # compiled, predicted or counted
    cells: tuple[str, ...]
    best: frozenset[int] = frozenset()


def mesh(sizes: Mapping[str, int]) -> str:
    """The sizes of a mesh as 'fsdp=16 x tensor=4'."""
    return " x ".join(f"{name}={size}" for name, size in sizes.items())


def parameters(report: Report) -> str:
    """'8.0B parameters'; '47B parameters, 13B of them active for a token'"""
    active = f", {human_count(report.active_parameters)} of them active for a token"
    some = report.active_parameters < report.parameters
    return f"{human_count(report.parameters)} parameters{active if some else ''}"


def hardware(count: int, chip: str) -> str:
    """'64 x TPU v5p'; '8 simulated devices' where the chip is ''"""
    return f"{count} x {chip}" if chip else f"{count} simulated devices"


def fit(memory: Memory) -> str:
    """A phrase that says whether the program fits, and by how much."""
    if memory.limit_bytes is None:
        return "no limit on this target"
    spare, share = memory.limit_bytes - memory.peak_bytes, memory.peak_bytes / memory.limit_bytes
    if memory.fits:
        return f"fits, {human_bytes(spare)} ({1 - share:.1%}) free"
    if spare < 0:
        return f"does not fit, {human_bytes(-spare)} over ({share:.2f}x the limit)"
    return "does not fit: the compiler refused it"


def parts(memory: Memory) -> tuple[tuple[str, int], ...]:
    """The parts of a device's memory, each a name and bytes."""
    return (
        ("weights", memory.weights_bytes),
        ("cache", memory.cache_bytes) if memory.cache_bytes else ("optimizer", memory.optimizer_bytes),
        ("batch", memory.batch_bytes),
        ("temporaries", memory.temporaries_bytes),
    )


def breakdown(prediction: Prediction) -> tuple[tuple[str, str, float], ...]:
    """The parts of a step's time that are not 0, each a kind, a label and seconds."""
    found = (
        ("matmul", "matmul", prediction.matmul_s),
        ("attention", "attention", prediction.attention_s),
        ("other", "other compute", prediction.other_s),
        *(("wait", f"exposed, {axis}", seconds) for axis, seconds in prediction.exposed_by_axis.items()),
        ("host", "exposed, host copies", prediction.exposed_host_copy_s),
    )
    return tuple(part for part in found if part[2])


def other_temporaries_bytes(memory: Memory) -> int:
    """The bytes of all temporaries but the largest ones, so that the list adds up."""
    return max(0, memory.temporaries_bytes - sum(found.bytes for found in memory.largest))


def verdict(report: Report) -> str:
    """What to make of one layout, in three sentences: whether it fits, what its time goes to, and what it sends."""
    memory, found = report.memory, report.prediction
    needs = f"needs {human_bytes(memory.peak_bytes)} per device" if memory.limit_bytes is None else fit(memory)
    said = [f"{report.layout} {needs}."]
    if found:
        label, most_s = max(list(parts_s(found).items())[:3], key=lambda part: part[1])
        longest = next(iter(found.exposed_by_axis), "")
        said.append(
            f"A step takes {human_seconds(found.step_time_s)}: {label} take{'s' if label != 'matmuls' else ''} "
            f"{most_s / found.step_time_s:.1%} of it, and it waits "
            f"{found.exposed_communication_s / found.step_time_s:.1%} of it for other devices"
            + (f", most for {longest}." if longest else ".")
        )
    if not memory.refusal:
        said.append(f"Each device sends {communication(report)}.")
    return " ".join(said)


def winner(reports: Sequence[Report]) -> str:
    """Which of several layouts to take, and why. `reports` are ranked."""
    best, *others = reports
    name = best.layout
    fitting = [report for report in others if report.memory.fits]
    if not best.memory.fits:
        nearest = min(reports, key=lambda report: report.memory.peak_bytes)
        return f"None of the {len(reports)} layouts fits; {nearest.layout} comes nearest, with {fit(nearest.memory)}."
    if not fitting:
        return f"{name} wins: no other layout fits."
    if best.prediction is None:
        least = min((best, *fitting), key=lambda report: report.sent_bytes)
        smallest = min((best, *fitting), key=lambda report: report.memory.peak_bytes)
        return (f"No times are predicted here. {least.layout} sends least ({human_bytes(least.sent_bytes)}), and "
                f"{smallest.layout} needs the least memory ({human_bytes(smallest.memory.peak_bytes)}).")  # fmt: skip
    second = fitting[0]
    if second.prediction is None:
        return f"{name} wins: for the other layouts that fit no time is predicted."
    step_s = best.prediction.step_time_s
    behind = second.prediction.step_time_s / step_s - 1
    if behind < ALIKE:
        return f"{name} and {second.layout} take the same time within {ALIKE:.0%}: memory or simplicity may decide."
    return (f"{name} wins: a step of {second.layout}, the next, takes {behind:.1%} longer "
            f"({differences(best.prediction, second.prediction, step_s)}).")  # fmt: skip


def of_floor(report: Report) -> str:
    """Communication beside its floor; '' if nothing can be compared.

    '1.20x the floor', or '1.02x the floor, both as float32: 52% in bf16'.
    """
    ratio, other = report.above_floor, report.other_width
    if ratio is None:
        return ""
    return f"{ratio:.2f}x the floor" + (f", both as float32: {other}" if other else "")


def communication(report: Report) -> str:
    """What one device sends in one step, as '31.2 GB, 1.20x the floor'."""
    return ", ".join(filter(None, (human_bytes(report.sent_bytes), of_floor(report))))


def errors(reports: Sequence[Report]) -> list[str]:
    """The known errors of several predictions, each named once."""
    return list(dict.fromkeys(report.prediction.error for report in reports if report.prediction))


def ranked(reports: Sequence[Report]) -> list[Report]:
    """The reports, best first: those that fit come before the others, and shorter predicted times come first."""

    def cost(report: Report) -> tuple[bool, float]:
        return not report.memory.fits, report.prediction.step_time_s if report.prediction else math.inf

    return sorted(reports, key=cost)


def compared(reports: Sequence[Report]) -> list[ComparisonRow]:
    """The lines of the comparison. A layout that does not fit is never best, and neither is one of several equals."""

    def line(label: str, known: str, values: Sequence[float | None], text: Callable[[float], str], sign=1):
        able = {i: sign * x for i, x in enumerate(values) if x is not None and reports[i].memory.fits}
        distinct = set(able.values())
        best = frozenset(i for i, x in able.items() if len(distinct) > 1 and x == min(distinct))
        return ComparisonRow(label, known, tuple("-" if x is None else text(x) for x in values), best)

    def predicted(name: str) -> list[float | None]:
        return [getattr(report.prediction, name) if report.prediction else None for report in reports]

    sent = [None if report.memory.refusal else report.sent_bytes for report in reports]
    above = [report.above_floor for report in reports]
    others = [report.other_width if x is not None else "" for x, report in zip(above, reports, strict=True)]
    of_floors = line("sent / floor", "counted", above, "{:.2f}x".format)
    told = tuple(", ".join(filter(None, pair)) for pair in zip(of_floors.cells, others, strict=True))
    rows = [ComparisonRow("mesh", "", tuple(mesh(report.mesh) for report in reports))]
    for label in ("config", "target"):
        cells = tuple(getattr(report, label) for report in reports)
        rows += [ComparisonRow(label, "", cells)] if len(set(cells)) > 1 else []
    return [
        *rows,
        ComparisonRow("fits", "compiled", tuple("yes" if report.memory.fits else "NO" for report in reports)),
        line("peak memory", "compiled", [report.memory.peak_bytes for report in reports], human_bytes),
        line("step time", "predicted", predicted("step_time_s"), human_seconds),
        line("tokens/s/device", "predicted", predicted("tokens_per_s_per_device"), "{:,.0f}".format, -1),
        line("MFU", "predicted", predicted("mfu"), "{:.1%}".format, -1),
        line("exposed comm.", "predicted", predicted("exposed_communication_s"), human_seconds),
        line("sent", "compiled", sent, human_bytes),
        dataclasses.replace(of_floors, cells=told),
        line("warnings", "", [len(report.warnings) for report in reports], str),
    ]
