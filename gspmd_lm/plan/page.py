"""One self-contained HTML page of a plan, or of plans for several targets: ranking, pictures, and the best layouts."""

from collections.abc import Sequence

from gspmd_lm.foresight.show import page
from gspmd_lm.foresight.show.drawing import text
from gspmd_lm.foresight.show.pieces import document, file_of, made_by, rows_of, section, words
from gspmd_lm.plan import terminal, written
from gspmd_lm.plan.advice import Change
from gspmd_lm.plan.outcome import Outcome, front
from gspmd_lm.units import human_bytes, human_seconds

IN_FULL = 3  # layouts of which the page says everything
LIMIT_SEEN = 5  # a limit so many times above all that is drawn is not drawn
FARTHEST = 3  # times the best step: slower layouts are not drawn
WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 900, 340, 70, 40, 16  # of a picture, in pixels


def render(outcomes: Sequence[Outcome], helps: Sequence[Change], command: str) -> str:
    """The HTML of the page. The first plan of `terminal.ranked` is shown in full."""
    best, *others = terminal.ranked(outcomes)
    body = made_by(command)
    if others:
        body += _targets([best, *others])
    if best.plan.best is None:
        body += section("h2", "Nothing fits", "", f"<p>{text(terminal.summary(best))}.</p>")
        return document(f"Plan of {best.plan.config}", body, "[]")
    body += _ranking(best, helps) + _memory(best)
    chosen = [line.candidate for line in best.lines() if line.candidate.report][:IN_FULL]
    reports = [one.report for one in chosen if one.report]
    body += section("h2", "The rules file", "", file_of(written.rules_file(best.plan, best.plan.best, command)))
    if reports:
        names = "".join(
            f'<button type="button" class="pick" data-layout="{i}" aria-pressed="false">{text(one.name)}</button> '
            for i, one in enumerate(chosen)
        )
        body += f"<p>{names if len(reports) > 1 else ''}</p>" + page.layouts(reports)
    body += words()
    return document(f"Plan of {best.plan.config} on {best.plan.target.text}", body, page.data(reports))


def _ranking(outcome: Outcome, helps: Sequence[Change]) -> str:
    headings = terminal.headings(outcome)
    rows = [[text(cell) for cell in terminal.cells(outcome, line)] for line in terminal.shown(outcome.lines())]
    said = [*terminal.sentences(outcome, helps), ("answer", terminal.question(outcome))]
    notes = "".join(f"<dt>{text(label)}</dt><dd>{text(words)}</dd>" for label, words in said if words)
    content = (
        f"<p>{text(terminal.summary(outcome))}. = marks a tie within the known error.</p>"
        + rows_of(headings, rows, "Ranking", numbers=_numbers(headings))
        + f'<dl class="notes">{notes}</dl>'
    )
    return section("h2", "Ranking", "predicted", content)


def _memory(outcome: Outcome) -> str:
    """Step time against memory, with the Pareto front and the limit."""
    lines = outcome.lines()
    chip = outcome.plan.target.chip
    if chip is None or not lines:
        return ""
    near = [line for line in lines if line.step_time_s <= FARTHEST * lines[0].step_time_s]
    most_s = max(line.step_time_s for line in near)
    limit, most = chip.usable_hbm_bytes, 1.08 * max(line.peak_bytes for line in near)
    limited = most > limit / LIMIT_SEEN  # a small model leaves nearly all of a chip's memory free
    most = max(most, 1.08 * limit) if limited else most
    on_front = front([line for line in near if line.candidate.compiled]) or front(near)

    def at(peak_bytes: float, step_s: float) -> tuple[float, float]:
        across = LEFT + (WIDTH - LEFT - 10) * peak_bytes / most
        return across, TOP + (HEIGHT - TOP - BOTTOM) * (1 - step_s / (1.05 * most_s))

    dots = []
    for line in sorted(near, key=lambda line: (line.candidate.compiled, -line.rank)):
        x, y = at(line.peak_bytes, line.step_time_s)
        best, compiled = line.candidate is outcome.plan.best, line.candidate.compiled
        kind = "host" if best else "matmul" if compiled else "other"
        about = f"{line.candidate.name}: {human_seconds(line.step_time_s)}, {human_bytes(line.peak_bytes)}"
        about += ", compiled" if compiled else ", priced"
        radius, opacity = (7, 1) if best else (4.5, 1) if compiled else (2.2, 0.45)
        dots.append(f'<circle class="k-{kind}" cx="{x:.1f}" cy="{y:.1f}" r="{radius}" opacity="{opacity}">'
                    f"<title>{text(about)}</title></circle>")  # fmt: skip
    path = " ".join("{:.1f},{:.1f}".format(*at(line.peak_bytes, line.step_time_s)) for line in on_front)
    x_limit, _ = at(limit, 0)
    drawn = (
        _axes([(at(most * n / 8, 0)[0], human_bytes(most * n / 8)) for n in range(0, 8, 2)],
              [(at(0, most_s * n / 4)[1], human_seconds(most_s * n / 4)) for n in range(5)],
              "memory of a device", "step time")
        + (f'<line x1="{x_limit:.1f}" x2="{x_limit:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}" stroke="var(--bad)"/>'
           f'<text x="{x_limit - 4:.1f}" y="{TOP + 10}" text-anchor="end">limit {human_bytes(limit)}</text>'
           if limited else "")
        + f'<polyline points="{path}" fill="none" stroke="var(--accent)" stroke-dasharray="4 3"/>'
        + "".join(dots)
    )  # fmt: skip
    legend = (
        '<p class="legend"><span><i class="swatch k-host"></i>the best</span>'
        '<span><i class="swatch k-matmul"></i>compiled</span><span><i class="swatch k-other"></i>priced</span>'
        "<span>dashed: no layout is both faster and smaller</span></p>"
    )
    label = f"Step time against memory of {len(near)} layouts"
    return section("h2", "Step time and memory", "predicted", legend + _picture(label, drawn))


def _targets(outcomes: Sequence[Outcome]) -> str:
    """Several plans side by side, and the time of their tokens against their chips."""
    rows = [[text(cell) for cell in terminal.compared(outcome)] for outcome in outcomes]
    content = rows_of(terminal.COMPARED, rows, "Targets", numbers=_numbers(terminal.COMPARED))
    known = [outcome for outcome in outcomes if outcome.tokens_per_s]
    if known:
        most_chips = 1.1 * max(outcome.chips for outcome in known)
        slowest = max(1e9 / outcome.tokens_per_s for outcome in known)

        def at(chips: float, seconds: float) -> tuple[float, float]:
            across = LEFT + (WIDTH - LEFT - 120) * chips / most_chips
            return across, TOP + (HEIGHT - TOP - BOTTOM) * (1 - seconds / (1.05 * slowest))

        dots = []
        for outcome in known:
            x, y = at(outcome.chips, 1e9 / outcome.tokens_per_s)
            name = text(f"{outcome.plan.target.text}, {outcome.batch:,} rows")
            dots.append(f'<circle class="k-matmul" cx="{x:.1f}" cy="{y:.1f}" r="5"/>'
                        f'<text x="{x + 8:.1f}" y="{y + 4:.1f}">{name}</text>')  # fmt: skip
        content += _picture(
            "Time of a billion tokens against chips",
            _axes([(at(most_chips * n / 4, 0)[0], f"{most_chips * n / 4:,.0f}") for n in range(4)],
                  [(at(0, slowest * n / 4)[1], human_seconds(slowest * n / 4)) for n in range(5)],
                  "chips", "time of a billion tokens")
            + "".join(dots),
        )  # fmt: skip
    return section("h2", "Targets", "predicted", content)


def _numbers(headings: Sequence[str]) -> list[int]:
    """The columns that hold numbers."""
    return [i for i, name in enumerate(headings) if name not in terminal.WORDS]


def _axes(across: Sequence[tuple[float, str]], up: Sequence[tuple[float, str]], x_name: str, y_name: str) -> str:
    low = HEIGHT - BOTTOM
    lines = []
    for y, name in up:
        lines.append(f'<line x1="{LEFT}" x2="{WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="var(--line)"/>')
        lines.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{text(name)}</text>')
    lines += [f'<text x="{x:.1f}" y="{low + 16}" text-anchor="middle">{text(name)}</text>' for x, name in across]
    lines.append(f'<text x="{WIDTH}" y="{HEIGHT - 6}" text-anchor="end">{text(x_name)}</text>')
    lines.append(f'<text x="{LEFT + 6}" y="{TOP - 4}">{text(y_name)}</text>')
    return "".join(lines)


def _picture(label: str, drawn: str) -> str:
    style = "fill:currentColor;font-size:12px;width:100%;height:auto;display:block"
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" style="{style}" role="img" aria-label="{text(label)}">{drawn}</svg>'
