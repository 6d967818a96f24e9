"""Plans on a terminal: the ranking, why the best layout wins, and what it waits for; or targets side by side."""

import math
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gspmd_lm.foresight import known_errors
from gspmd_lm.plan.advice import Change, Larger
from gspmd_lm.plan.candidate import Plan
from gspmd_lm.plan.outcome import SHOWN, Line, Outcome
from gspmd_lm.show.figures import hardware
from gspmd_lm.units import human_bytes, human_count, human_duration, human_seconds

MOST_EXPOSED = 2  # mesh axes in a cell
WORDS = ("layout", "exposed", "target", "known by")  # columns that hold no numbers
# Of `compared`.
COMPARED = ("target", "batch", "chips", "layout", "step", "tokens/s", "$/B tok", "days", "$ in all", "in time")


def show(outcome: Outcome, console: Console, helps: Sequence[Change] = ()) -> None:
    """Prints one plan in which something fits."""
    plan, lines = outcome.plan, outcome.lines()
    console.print(Text(summary(outcome), style="bold"))
    console.print(_table(outcome, shown(lines)))
    left = len(lines) - len(shown(lines))
    if left:
        console.print(Text(f"  and {left:,} more that may fit", style="dim"))
    console.print()
    for label, said in sentences(outcome, helps):
        console.print(Text.assemble((f"{label:12}", "bold"), said))
    if plan.stopped:
        console.print(Text(f"search      {'; '.join(filter(None, (plan.stopped, price_error(plan))))}", style="dim"))


def shown(lines: Sequence[Line]) -> list[Line]:
    """The lines of a table: the best of those that were compiled, then of those that were priced."""
    compiled = [line for line in lines if line.candidate.compiled][:SHOWN]
    return compiled or list(lines[:SHOWN])


def summary(outcome: Outcome) -> str:
    """The first line: what was planned for, and how much was looked at."""
    plan = outcome.plan
    chips = hardware(outcome.chips, plan.target.chip.kinds[0] if plan.target.chip else "")
    return (
        f"{plan.config}, {outcome.batch:,} rows a step, on {chips} ({plan.target.text}): {plan.searched:,} layouts "
        f"priced, {plan.compiled} compiled in {human_duration(plan.seconds)}"
    )


def sentences(outcome: Outcome, helps: Sequence[Change]) -> list[tuple[str, str]]:
    """What is said below the ranking, each with its label."""
    plan, best = outcome.plan, outcome.plan.best
    assert best
    if plan.target.chip is None:
        return [("best", f"{best.name}: least bytes sent, then least memory; simulated devices have no times")]
    runner = outcome.runner_up()
    told = [("best", f"{best.name}; error of predictions: {best.report.prediction.error}" if best.report and
             best.report.prediction else best.name),
            ("waits for", outcome.waits())]  # fmt: skip
    if runner:
        told.append(("runner-up", f"{runner.name}: {outcome.why_not(runner)}"))
    if len(plan.ties) > 1:
        told.append(("ties", f"{len(plan.ties)} layouts are within the known error of {plan.error:.1%}; prefer the "
                     "one that leaves more memory, or measure"))  # fmt: skip
    if helps:
        told.append(("would help", "; ".join(f"{change.what}: {change.gain:+.0%} tokens/s" for change in helps[:4])))
    return told


def price_error(plan: Plan) -> str:
    """How wrong prices are, and how that is known; '' where layouts have no times."""
    chip, known = plan.target.chip, known_errors.estimate_error(plan.target)
    if chip is None:
        return ""
    if plan.estimate_error is not None:
        return f"corrected prices missed the layouts compiled here by {plan.estimate_error:.1%} in the mean"
    where = f"{chip.name}, {'several' if known_errors.is_several(plan.target) else 'one'} "
    where += {"tpu": "slice", "gpu": "host"}[chip.platform] + "s" * known_errors.is_several(plan.target)
    if known is None:
        return f"no prices were compared with compiled layouts of {where}"
    return (f"too few were compiled to say how wrong prices are here; elsewhere, prices missed {known[0]} compiled "
            f"layouts of {where}, by {known[1]:.1%}")  # fmt: skip


def no_fit(outcome: Outcome, found: Larger | None, savings: Sequence[tuple[str, int]], console: Console) -> None:
    """Prints what a plan says where nothing fits."""
    plan, nearest = outcome.plan, outcome.plan.nearest
    console.print(Text(summary(outcome), style="bold"))
    assert plan.target.chip
    limit = plan.target.chip.usable_hbm_bytes
    if nearest:
        needs = f"{human_bytes(nearest.peak_bytes)} of {human_bytes(limit)}"
        what = "nothing fits" if all(one.fits is False for one in plan.candidates) else "nothing that was compiled fits"
        console.print(f"{what}: {nearest.name} needs least, {needs}", soft_wrap=True)
    if found:
        console.print(f"  fix   {found.target.text} is the smallest {plan.target.chip.name} target on which it fits: "
                      f"{found.candidate.name}, {human_bytes(found.candidate.peak_bytes)}", soft_wrap=True)  # fmt: skip
    else:
        console.print("  fix   no larger target that was tried is large enough either", soft_wrap=True)
    if savings:
        setting, saved = savings[0]
        console.print(f"  or    --set {setting} saves most memory here, about {human_bytes(saved)} per device; it "
                      "changes what is computed", soft_wrap=True)  # fmt: skip


def compare(outcomes: Sequence[Outcome], console: Console) -> None:
    """Prints the best of several plans, the one with most tokens for its money or its time first."""
    table = _columns(*COMPARED)
    for outcome in ranked(outcomes):
        table.add_row(*(Text(cell) for cell in compared(outcome)))
    console.print(table)


def ranked(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Those that are in time come first; then the cheapest where prices are known, else the fastest."""

    def key(outcome: Outcome) -> tuple[bool, float, float]:
        line = next(iter(outcome.lines()), None) if outcome.plan.best else None
        usd = line.usd_per_billion_tokens if line else None
        return outcome.in_time is False, math.inf if usd is None else usd, -outcome.tokens_per_s

    return sorted(outcomes, key=key)


def compared(outcome: Outcome) -> list[str]:
    """The cells of one plan in the comparison."""
    plan, line = outcome.plan, next(iter(outcome.lines()), None)
    start = [plan.target.text, f"{outcome.batch:,}", f"{outcome.chips:,}"]
    if plan.best is None or line is None:
        return [*start, "nothing fits", *["-"] * (len(COMPARED) - len(start) - 1)]
    usd, total = line.usd_per_billion_tokens, outcome.usd
    return [
        *start,
        line.candidate.name,
        human_seconds(line.step_time_s),
        f"{line.tokens_per_s:,.0f}",
        "-" if usd is None else f"{usd:,.2f}",
        f"{outcome.days_needed:,.1f}" if outcome.tokens else "-",
        "-" if total is None else f"{total:,.0f}",
        {None: "-", True: "yes", False: "NO"}[outcome.in_time],
    ]


def cells(outcome: Outcome, line: Line) -> list[str]:
    """The cells of one layout in the ranking."""
    plan, one = outcome.plan, line.candidate
    limit = plan.target.chip.usable_hbm_bytes if plan.target.chip else None
    memory = human_bytes(line.peak_bytes) + (f" ({line.peak_bytes / limit:.0%})" if limit else "")
    usd = line.usd_per_billion_tokens
    found = [f"{line.rank}{'=' if line.tied and line.rank > 1 else ''}", one.name]
    if plan.target.chip is None:
        return [*found, human_bytes(one.estimate.sent_bytes), memory]
    return [
        *found,
        human_seconds(line.step_time_s),
        f"{line.tokens_per_s / plan.target.devices:,.0f}",
        "-" if line.mfu is None else f"{line.mfu:.1%}",
        memory,
        exposed(line.exposed_by_axis, line.step_time_s) or "-",
        "-" if usd is None else f"{usd:,.2f}",
        "compiled" if one.compiled else "priced",
    ]


def headings(outcome: Outcome) -> list[str]:
    """Of `cells`."""
    if outcome.plan.target.chip is None:
        return ["#", "layout", "sent", "memory"]
    return ["#", "layout", "step", "tok/s/dev", "MFU", "memory", "exposed", "$/B tok", "known by"]


def exposed(by_axis: Mapping[str, float], step_s: float) -> str:
    """The mesh axes that a step waits for, each with its share of the step."""
    waits = sorted(by_axis.items(), key=lambda pair: -pair[1])
    return ", ".join(
        f"{axes} {seconds / step_s:.0%}" for axes, seconds in waits[:MOST_EXPOSED] if seconds > 0.005 * step_s
    )


def question(outcome: Outcome) -> str:
    """What was asked of a plan besides the best layout, answered; '' if nothing was."""
    if not outcome.tokens or not outcome.tokens_per_s:
        return ""
    days, count = outcome.days_needed, human_count(outcome.tokens)
    price = (
        ""
        if outcome.usd is None
        else f", for {outcome.usd:,.0f} dollars at {outcome.usd_per_chip_hour:g} a chip and hour"
    )
    said = f"{count} tokens take {days:,.1f} days{price}"
    if outcome.in_time is False:
        return f"{said}: {days / outcome.days:.2f} times the {outcome.days:g} days that there are"
    return f"{said}: within the {outcome.days:g} days that there are" if outcome.in_time else said


def _table(outcome: Outcome, lines: Sequence[Line]) -> Table:
    table = _columns(*headings(outcome))
    for line in lines:
        style = "bold green" if line.candidate is outcome.plan.best else ""
        table.add_row(*(Text(cell, style=style) for cell in cells(outcome, line)))
    return table


def _columns(*names: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for name in names:
        table.add_column(
            Text(name), justify="left" if name in WORDS else "right", overflow="fold", no_wrap=name == "target"
        )
    return table
