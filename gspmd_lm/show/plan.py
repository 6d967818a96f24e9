"""A plan, or plans for several targets: the ranking and notes on it, on a terminal and as a page."""

import math
from collections.abc import Mapping, Sequence

from rich.console import Console

from gspmd_lm.foresight import known_errors
from gspmd_lm.hardware.target import with_chips
from gspmd_lm.plan import candidate
from gspmd_lm.plan.advice import Change, Larger
from gspmd_lm.plan.candidate import Plan
from gspmd_lm.plan.outcome import SHOWN, Line, Outcome, front, not_ranked
from gspmd_lm.show import comparison, html, terminal, whole_job
from gspmd_lm.show.document import Cell, Figure, Notes, Section, Text, figure, table_of
from gspmd_lm.show.report import hardware
from gspmd_lm.show.svg import Axis, Plot
from gspmd_lm.train.progress import SHORT
from gspmd_lm.units import human_amount, human_bytes, human_count, human_duration, human_seconds, plural

MOST_EXPOSED = 2  # mesh axes in a cell
IN_FULL = 3  # layouts of which the page says everything
LIMIT_SEEN = 5  # a limit so many times above all that is drawn is not drawn
FARTHEST = 3  # times the best step: slower layouts are not drawn
WORDS = ("layout", "exposed", "target", "known by", "searched")  # columns that hold no numbers

Note = tuple[str, str]  # a label and a text


def show(outcomes: Sequence[Outcome], console: Console, advice: Sequence[Note] = ()) -> None:
    """Prints the plans side by side if they are several, and the best in full. `advice` is what would help the best."""
    terminal.show(console, sections(outcomes, advice))


def page(outcomes: Sequence[Outcome], advice: Sequence[Note], command: str) -> str:
    """The HTML of a page with what `show` prints, pictures, the best rules file, and reports on the best layouts."""
    best = rank(outcomes)[0]
    content, plan = sections(outcomes, advice), best.plan
    if plan.best is None:
        return html.page(f"Plan of {plan.config}", command, html.sections(content))
    reports = [line.candidate.report for line in best.lines() if line.candidate.report][:IN_FULL]
    content += [
        *_memory(best),
        Section("The rules file", "", [html.file(candidate.rules_file(plan, plan.best, command))]),
    ]
    body = html.sections(content) + comparison.layouts(reports) + html.words()
    return html.page(f"Plan of {plan.config} on {plan.target.text}", command, body, comparison.data(reports))


def sections(outcomes: Sequence[Outcome], advice: Sequence[Note] = ()) -> list[Section]:
    """What a terminal and a page show: the targets if they are several, and the ranking of the best plan."""
    best, *others = rank(outcomes)
    compared = [_targets([best, *others])] if others else []
    job = [whole_job.section(best.job)] if best.job else []
    return [*compared, _ranking(best, advice) if best.plan.best else _nothing_fits(best, advice), *job]


def rank(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """The plans that are in time first, then the others; the cheapest first if prices are known, else the fastest."""

    def key(outcome: Outcome) -> tuple[bool, float, float]:
        line = next(iter(outcome.lines()), None) if outcome.plan.best else None
        usd = line.usd_per_billion_tokens if line else None
        return outcome.in_time is False, math.inf if usd is None else usd, -outcome.tokens_per_s

    return sorted(outcomes, key=key)


# ---- the best plan


def _ranking(outcome: Outcome, advice: Sequence[Note]) -> Section:
    plan, lines = outcome.plan, outcome.lines()
    left = len(lines) - len(top_lines(lines))
    more = [Text(f"and {left:,} more that may fit", "dim")] if left else []
    rows = [
        {
            name: Cell(cell, style="best" if line.candidate is plan.best else "")
            for name, cell in cells(outcome, line).items()
        }
        for line in top_lines(lines)
    ]
    notes = [*_notes(outcome), *advice, ("answer", answer(outcome))]
    if plan.stopped:
        notes.append(("search", "; ".join(filter(None, (plan.stopped, estimate_error(plan))))))
    notes += [("not ranked", not_ranked(plan)), *(("note", note) for note in plan.notes)]
    blocks = [Text(summary(outcome)), table_of("Ranking", rows, WORDS), *more]
    return Section("Ranking", "predicted", [*blocks, Notes([note for note in notes if note[1]])])


def top_lines(lines: Sequence[Line]) -> list[Line]:
    """The lines of a table: the best of those that were compiled, then of those that were estimated."""
    compiled = [line for line in lines if line.candidate.compiled][:SHOWN]
    return compiled or list(lines[:SHOWN])


def summary(outcome: Outcome) -> str:
    """The first line: what was planned for, and how much was looked at."""
    plan = outcome.plan
    chips = hardware(plan.target.chips, plan.target.chip.kinds[0] if plan.target.chip else "")
    return (
        f"{plan.config}, {plural(outcome.batch, 'row')} a step, on {chips} ({plan.target.text}): "
        f"{plural(plan.searched, 'layout')} estimated, {plan.compiled} compiled in {human_duration(plan.seconds)}"
    )


def cells(outcome: Outcome, line: Line) -> dict[str, str]:
    """The cells of one layout in the ranking, below their headings."""
    target, one = outcome.plan.target, line.candidate
    limit = target.chip.usable_hbm_bytes if target.chip else None
    memory = human_bytes(line.peak_bytes) + (f" ({line.peak_bytes / limit:.0%})" if limit else "")
    short = SHORT[outcome.plan.unit]
    row = {"#": f"{line.rank}{'=' if line.tied and line.rank > 1 else ''}", "layout": one.name}
    if target.chip is None:
        return row | {"sent": human_bytes(one.estimate.sent_bytes), "memory": memory}
    return row | {
        "step": human_seconds(line.step_time_s),
        f"{short}/s/dev": f"{line.tokens_per_s / target.devices:,.0f}",
        "MFU": figure(line.mfu, "{:.1%}".format),
        "memory": memory,
        "exposed": _waits(line.exposed_by_axis, line.step_time_s) or "-",
        f"$/B {short}": figure(line.usd_per_billion_tokens, "{:,.2f}".format),
        "known by": "compiled" if one.compiled else "estimated",
    }


def _waits(by_axis: Mapping[str, float], step_s: float) -> str:
    """The mesh axes that a step waits for, each with its share of the step."""
    waits = sorted(by_axis.items(), key=lambda pair: -pair[1])
    return ", ".join(
        f"{axes} {seconds / step_s:.0%}" for axes, seconds in waits[:MOST_EXPOSED] if seconds > 0.005 * step_s
    )


def _notes(outcome: Outcome) -> list[Note]:
    plan, best = outcome.plan, outcome.plan.best
    assert best
    if plan.target.chip is None:
        return [("best", f"{best.name}: least bytes sent, then least memory; simulated devices have no times")]
    error = best.report and best.report.prediction and f"; error of predictions: {best.report.prediction.error}"
    runner = outcome.runner_up()
    ties = (
        f"{len(plan.ties)} layouts, marked =, are within the known error of {plan.error:.1%}; prefer the one that "
        "leaves more memory, or measure"
    )
    if plan.late and not best.compiled:
        error = "; it is the best estimate: there was no time to compile any layout"
    return [
        ("best", f"{best.name}{error or ''}"),
        ("waits for", outcome.waits()),
        ("runner-up", f"{runner.name}: {outcome.why_not(runner)}" if runner else ""),
        ("1f1b", outcome.one_by_one()),
        ("ties", ties if len(plan.ties) > 1 else ""),
    ]


def helps(changes: Sequence[Change]) -> list[Note]:
    """The changes that would help the best layout of a plan, the most effective first."""
    return [("would help", "; ".join(f"{change.what}: {change.gain:+.0%} tokens/s" for change in changes[:4]))]


def answer(outcome: Outcome) -> str:
    """Time and cost for the requested number of tokens; '' if --tokens was not given."""
    if not outcome.tokens or not outcome.tokens_per_s:
        return ""
    price = (
        ""
        if outcome.usd is None
        else f", for {human_amount(outcome.usd)} dollars at {outcome.price.on_demand:g} a chip and hour"
    )
    sentence = f"{human_count(outcome.tokens)} tokens take {human_amount(outcome.days_needed)} days{price}"
    if outcome.in_time is False:
        return (
            f"{sentence}: {outcome.days_needed / outcome.days:.2f} times the {outcome.days:g} days that there are; "
            f"{enough(outcome)} would do if each chip stayed as fast"
        )
    return f"{sentence}: within the {outcome.days:g} days that there are" if outcome.in_time else sentence


def enough(outcome: Outcome) -> str:
    """The chips that would do the tokens in time: '42 chips (h100:6x8)'."""
    chips, target = outcome.chips_in_time, outcome.plan.target
    assert chips
    larger = with_chips(target, chips)
    return f"{chips:,} chips" + (f" ({larger.text})" if larger else "")


def estimate_error(plan: Plan) -> str:
    """How wrong estimates are, and how that is known; '' where layouts have no times."""
    chip, known = plan.target.chip, known_errors.estimate_error(plan.target)
    if chip is None:
        return ""
    if plan.estimate_error is not None:
        return f"corrected estimates missed the layouts compiled here by {plan.estimate_error:.1%} in the mean"
    if plan.phase != "train":
        return "too few were compiled to say how wrong estimates are"
    where = f"{chip.name}, {'several' if known_errors.is_several(plan.target) else 'one'} "
    where += ("slice" if chip.platform == "tpu" else "host") + "s" * known_errors.is_several(plan.target)
    if known is None:
        return f"no estimates were compared with compiled layouts of {where}"
    return (
        "too few were compiled to say how wrong estimates are here; elsewhere, estimates missed "
        f"{known[0]} compiled layouts of {where}, by {known[1]:.1%}"
    )


# ---- where nothing fits


def _nothing_fits(outcome: Outcome, advice: Sequence[Note]) -> Section:
    plan, nearest = outcome.plan, outcome.plan.nearest
    paragraphs = [Text(summary(outcome))]
    if nearest and plan.target.chip:
        needs = f"{human_bytes(nearest.peak_bytes)} of {human_bytes(plan.target.chip.usable_hbm_bytes)}"
        paragraphs.append(Text(f"{outcome.found_nothing}: {nearest.name} needs least, {needs}", "bad"))
    if plan.stopped:
        paragraphs.append(Text(plan.stopped, "dim"))
    return Section(outcome.found_nothing.capitalize(), "", [*paragraphs, *([Notes(advice)] if advice else [])])


def fixes(larger: Larger | None, savings: Sequence[tuple[str, int]], late: bool = False) -> list[Note]:
    """Remedies where nothing fits: a larger target, or a setting that saves memory.

    late: whether there was no time to try all larger targets.
    """
    fix = "no larger target that was tried is large enough either"
    if late:
        fix = "the minutes were over before a larger target was found that is large enough: more --minutes"
    if larger:
        fix = (
            f"{larger.target.text} is the smallest target of its chip on which it fits: {larger.candidate.name}, "
            f"{human_bytes(larger.candidate.peak_bytes)}"
        )
    notes = [("fix", fix)]
    if savings:
        setting, saved = savings[0]
        most = f"saves most memory here, about {human_bytes(saved)} per device"
        notes.append(("or", f"--set {setting} {most}; it changes what is computed"))
    return notes


# ---- several targets, and pictures


def _targets(outcomes: Sequence[Outcome]) -> Section:
    """Several plans side by side, and the time of their tokens against their chips."""
    table = table_of("Targets", [target_row(outcome) for outcome in outcomes], WORDS)
    notes = Notes([(f"{one.plan.target.text}, {one.batch:,} rows", _search_words(one)) for one in outcomes])
    known = [outcome for outcome in outcomes if outcome.tokens_per_s]
    if not known:
        return Section("Targets", "predicted", [table, notes])
    slowest = max(1e9 / outcome.tokens_per_s for outcome in known)
    drawn = Plot(
        Axis("chips", 0, 1.1 * max(outcome.plan.target.chips for outcome in known), "{:,.0f}".format),
        Axis("time of a billion tokens", 0, 1.05 * slowest, human_seconds),
    )
    for outcome in known:
        at = outcome.plan.target.chips, 1e9 / outcome.tokens_per_s
        name = f"{outcome.plan.target.text}, {outcome.batch:,} rows"
        drawn.dot(at, "var(--blue)", name)
        drawn.word(at, name, before=drawn.x.share(outcome.plan.target.chips) > 0.5)
    picture = Figure(drawn.html("Time of a billion tokens against chips", tall=True))
    return Section("Targets", "predicted", [table, notes, picture])


def _search_words(outcome: Outcome) -> str:
    """What is to be known of one plan beside others: how far its search came, and what its target asks for."""
    plan, left = outcome.plan, not_ranked(outcome.plan)
    said = f"{plan.searched:,} layouts estimated, {plan.compiled} compiled in {human_duration(plan.seconds)}"
    parts = said, plan.stopped, left and f"not ranked: {left}", *plan.notes, answer(outcome)
    return "; ".join(filter(None, parts))


def target_row(outcome: Outcome) -> dict[str, str]:
    """The cells of one plan beside others, below their headings."""
    line = next(iter(outcome.lines()), None) if outcome.plan.best else None
    return {
        "target": outcome.plan.target.text,
        "batch": f"{outcome.batch:,}",
        "chips": f"{outcome.plan.target.chips:,}",
        "layout": line.candidate.name if line else outcome.found_nothing,
        "step": figure(line and line.step_time_s, human_seconds),
        "tokens/s": figure(line and line.tokens_per_s, "{:,.0f}".format),
        "$/B tok": figure(line and line.usd_per_billion_tokens, "{:,.2f}".format),
        "days": figure(outcome.days_needed if line and outcome.tokens else None, human_amount),
        "$ in all": figure(line and outcome.usd, human_amount),
        "in time": {None: "-", True: "yes", False: "NO"}[outcome.in_time if line else None],
        "searched": outcome.searched,
    }


def _memory(outcome: Outcome) -> list[Section]:
    """Step time against memory, with the Pareto front and the limit."""
    lines = outcome.lines()
    chip = outcome.plan.target.chip
    if chip is None or not lines:
        return []
    near = [line for line in lines if line.step_time_s <= FARTHEST * lines[0].step_time_s]
    limit, most = chip.usable_hbm_bytes, 1.08 * max(line.peak_bytes for line in near)
    limited = most > limit / LIMIT_SEEN  # a small model leaves nearly all of a chip's memory free
    drawn = Plot(
        Axis("memory of a device", 0, max(most, 1.08 * limit) if limited else most, human_bytes),
        Axis("step time", 0, 1.05 * max(line.step_time_s for line in near), human_seconds),
    )
    if limited:
        drawn.limit(limit, f"limit {human_bytes(limit)}")
    on_front = front([line for line in near if line.candidate.compiled]) or front(near)
    drawn.line([(line.peak_bytes, line.step_time_s) for line in on_front], "var(--accent)", dashed=True)
    for line in sorted(near, key=lambda line: (line.candidate.compiled, -line.rank)):
        best, compiled = line.candidate is outcome.plan.best, line.candidate.compiled
        colour = "var(--teal)" if best else "var(--blue)" if compiled else "var(--grey)"
        about = f"{line.candidate.name}: {human_seconds(line.step_time_s)}, {human_bytes(line.peak_bytes)}"
        about += ", compiled" if compiled else ", estimated"
        size = 14 if best else 9 if compiled else 5
        drawn.dot((line.peak_bytes, line.step_time_s), colour, about, size=size, faint=not (best or compiled))
    kinds = [
        ("host", "the best"),
        ("matmul", "compiled"),
        ("other", "estimated"),
        ("", "dashed: no layout is both faster and smaller"),
    ]
    label = f"Step time against memory of {len(near)} layouts"
    picture = Figure(html.legend(kinds) + drawn.html(label, tall=True))
    return [Section("Step time and memory", "predicted", [picture])]
