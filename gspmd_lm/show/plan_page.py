"""One self-contained HTML page of a plan, or of plans for several targets: ranking, pictures, and the best layouts."""

from collections.abc import Sequence

from gspmd_lm.plan import candidate
from gspmd_lm.plan.advice import Change
from gspmd_lm.plan.outcome import Outcome, front
from gspmd_lm.show import page, plan_terminal
from gspmd_lm.show.drawing import text
from gspmd_lm.show.pieces import document, file_of, legend, notes_of, pick, rows_of, section, words
from gspmd_lm.show.plot import Axis, Plot
from gspmd_lm.units import human_bytes, human_seconds

IN_FULL = 3  # layouts of which the page says everything
LIMIT_SEEN = 5  # a limit so many times above all that is drawn is not drawn
FARTHEST = 3  # times the best step: slower layouts are not drawn


def render(outcomes: Sequence[Outcome], helps: Sequence[Change], command: str) -> str:
    """The HTML of the page. The first plan of `terminal.ranked` is shown in full."""
    best, *others = plan_terminal.ranked(outcomes)
    body = _targets([best, *others]) if others else ""
    if best.plan.best is None:
        body += section("h2", "Nothing fits", "", f"<p>{text(plan_terminal.summary(best))}.</p>")
        return document(f"Plan of {best.plan.config}", command, body)
    body += _ranking(best, helps) + _memory(best)
    chosen = [line.candidate for line in best.lines() if line.candidate.report][:IN_FULL]
    reports = [one.report for one in chosen if one.report]
    body += section("h2", "The rules file", "", file_of(candidate.rules_file(best.plan, best.plan.best, command)))
    if reports:
        names = "".join(f"{pick(i, one.name)} " for i, one in enumerate(chosen))
        body += f"<p>{names if len(reports) > 1 else ''}</p>" + page.layouts(reports)
    body += words()
    return document(f"Plan of {best.plan.config} on {best.plan.target.text}", command, body, page.data(reports))


def _ranking(outcome: Outcome, helps: Sequence[Change]) -> str:
    headings = plan_terminal.headings(outcome)
    rows = [
        [text(cell) for cell in plan_terminal.cells(outcome, line)] for line in plan_terminal.shown(outcome.lines())
    ]
    said = [*plan_terminal.sentences(outcome, helps), ("answer", plan_terminal.question(outcome))]
    content = (
        f"<p>{text(plan_terminal.summary(outcome))}. = marks a tie within the known error.</p>"
        + rows_of(headings, rows, "Ranking", numbers=_numbers(headings))
        + notes_of((label, words) for label, words in said if words)
    )
    return section("h2", "Ranking", "predicted", content)


def _memory(outcome: Outcome) -> str:
    """Step time against memory, with the Pareto front and the limit."""
    lines = outcome.lines()
    chip = outcome.plan.target.chip
    if chip is None or not lines:
        return ""
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
        about += ", compiled" if compiled else ", priced"
        size = 14 if best else 9 if compiled else 5
        drawn.dot((line.peak_bytes, line.step_time_s), colour, about, size=size, faint=not (best or compiled))
    kinds = [("host", "the best"), ("matmul", "compiled"), ("other", "priced"),
             ("", "dashed: no layout is both faster and smaller")]  # fmt: skip
    label = f"Step time against memory of {len(near)} layouts"
    return section("h2", "Step time and memory", "predicted", legend(kinds) + drawn.html(label, tall=True))


def _targets(outcomes: Sequence[Outcome]) -> str:
    """Several plans side by side, and the time of their tokens against their chips."""
    rows = [[text(cell) for cell in plan_terminal.compared(outcome)] for outcome in outcomes]
    content = rows_of(plan_terminal.COMPARED, rows, "Targets", numbers=_numbers(plan_terminal.COMPARED))
    known = [outcome for outcome in outcomes if outcome.tokens_per_s]
    if known:
        slowest = max(1e9 / outcome.tokens_per_s for outcome in known)
        drawn = Plot(
            Axis("chips", 0, 1.1 * max(outcome.chips for outcome in known), "{:,.0f}".format),
            Axis("time of a billion tokens", 0, 1.05 * slowest, human_seconds),
        )
        for outcome in known:
            at = outcome.chips, 1e9 / outcome.tokens_per_s
            name = f"{outcome.plan.target.text}, {outcome.batch:,} rows"
            drawn.dot(at, "var(--blue)", name)
            drawn.word(at, name, before=drawn.x.share(outcome.chips) > 0.5)
        content += drawn.html("Time of a billion tokens against chips", tall=True)
    return section("h2", "Targets", "predicted", content)


def _numbers(headings: Sequence[str]) -> list[int]:
    """The columns that hold numbers."""
    return [i for i, name in enumerate(headings) if name not in plan_terminal.WORDS]
