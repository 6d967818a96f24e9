"""Runs in words and numbers: the table in the terminal, and the facts on the page."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from gspmd_lm.units import human_seconds, human_short
from gspmd_lm.workdir.history import RunHistory as Run

HEADINGS = ("run", "step", "loss", "held-out", "best", "at step", "step time", "tokens/s", "tokens")


def cells(run: Run) -> list[str]:
    """The cells of a run's row, below HEADINGS."""
    held_out = run.evaluations[-1].get("eval_loss") if run.evaluations else None
    best = run.best
    return [
        run.name,
        f"{run.step:,}",
        _number(run.last("loss")),
        _number(held_out),
        _number(best["eval_loss"] if best else None),
        f"{best['step']:,.0f}" if best else "-",
        _seconds(run),
        _short(run.speed("tokens_per_s")),
        human_short(run.step * run.step_tokens) if run.step_tokens else "-",
    ]


def facts(run: Run) -> list[tuple[str, str, str]]:
    """Name, value and note of each figure that a reader looks for first."""
    best, mfu, epoch = run.best, run.speed("mfu"), run.last("epoch")
    steps = run.whole("train", "steps")
    found = [
        ("step", f"{run.step:,}", f"of {steps:,}" if steps else ""),
        ("loss", _number(run.last("loss")), "training, the last logged step"),
    ]
    if best:
        found.append(("held-out loss", _number(best["eval_loss"]), f"the best, at step {best['step']:,.0f}"))
    tokens = human_short(run.step * run.step_tokens) if run.step_tokens else "-"
    found += [
        ("tokens", tokens, f"{epoch:.2f} epochs" if epoch is not None else ""),
        ("step time", _seconds(run), "median of the last logged steps"),
        ("tokens/s", _short(run.speed("tokens_per_s")), f"MFU {mfu:.1%}" if mfu else ""),
    ]
    return found


def show(runs: Sequence[Run], console: Console) -> None:
    """Prints a row for each run."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in HEADINGS:
        table.add_column(heading, justify="left" if heading == "run" else "right", overflow="fold")
    for run in runs:
        table.add_row(*cells(run))
    console.print(table)
    for run in runs:
        for line in run.damage.splitlines():
            console.print(f"warning: {line}", soft_wrap=True, markup=False)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _short(value: float | None) -> str:
    return "-" if value is None else human_short(value)


def _seconds(run: Run) -> str:
    value = run.speed("step_time_s")
    return "-" if value is None else human_seconds(value)
