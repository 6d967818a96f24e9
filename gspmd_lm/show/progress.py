"""The progress of a long preparation, on a terminal or in a log."""

import time

from rich.console import Console

from gspmd_lm.data.remote import Progress

EVERY_S = 10.0


def progress(console: Console) -> Progress:
    """A function that shows a long preparation: its MB, percent and time left.

    A terminal shows one line that is rewritten. Elsewhere there is a line every EVERY_S seconds, and one for each
    stage that took as long, when it is done.
    """
    stage, began, before, shown = "", 0.0, 0, 0.0

    def show(what: str, done: int, total: int, rate: str = "", /) -> None:
        nonlocal stage, began, before, shown
        now = time.monotonic()
        if what != stage:
            stage, began, before, shown = what, now, done, now if not console.is_terminal else 0.0
        if not total:  # it waits for another process
            console.print(f"{what} ...", highlight=False)
            return
        ended = done >= total
        if now - shown < (0.1 if console.is_terminal else EVERY_S) and not (ended and console.is_terminal):
            return
        shown = now
        left = (now - began) * (total - done) / (done - before) if done > before else 0.0
        time_left = f", {left:.0f} s left" if 0 < left < 90 else f", {left / 60:,.0f} min left" if left else ""
        line = (
            f"{what}: {done / 1e6:,.1f} of {total / 1e6:,.1f} MB, {done / total:.0%}{rate and f', {rate}'}{time_left}"
        )
        if console.is_terminal:
            console.print(f"{line:<90}", end="\n" if ended else "\r", highlight=False)
        else:
            console.print(line, highlight=False)

    return show
