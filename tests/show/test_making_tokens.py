"""How far the making of tokens and other long tasks are: in a log, and in a terminal."""

import io

from rich.console import Console

from gspmd_lm.show import progress


class _Clock:
    def __init__(self):
        self.now_s = 1000.0

    def monotonic(self):
        return self.now_s


def _shown(monkeypatch, reports, **console):
    """What is shown of reports (seconds later, stage, bytes done, bytes in all)."""
    clock, out = _Clock(), io.StringIO()
    monkeypatch.setattr(progress, "time", clock)
    show = progress.progress(Console(file=out, width=160, **console))
    for later_s, *report in reports:
        clock.now_s += later_s
        show(*report)
    return out.getvalue()


def test_a_log_gets_a_line_every_ten_seconds(monkeypatch):
    mb = 1_000_000
    reports = [(0, "hashing files", 5 * mb, 10 * mb), (1, "hashing files", 10 * mb, 10 * mb)]  # soon done: nothing
    reports += [(9, "tokenizing", 100 * mb, 1100 * mb)]  # what an earlier run has done does not count as speed
    reports += [(1, "tokenizing", (100 + 10 * i) * mb, 1100 * mb) for i in range(1, 31)]
    reports += [(100, "tokenizing", 1100 * mb, 1100 * mb)]
    assert _shown(monkeypatch, reports).splitlines() == [
        "tokenizing: 200.0 of 1,100.0 MB, 18%, 2 min left",
        "tokenizing: 300.0 of 1,100.0 MB, 27%, 80 s left",
        "tokenizing: 400.0 of 1,100.0 MB, 36%, 70 s left",
        "tokenizing: 1,100.0 of 1,100.0 MB, 100%",
    ]
    assert _shown(monkeypatch, [(0, "waiting for another", 0, 0)]) == "waiting for another ...\n"


def test_a_terminal_gets_one_line_that_is_rewritten(monkeypatch):
    mb = 1_000_000
    reports = [(0.2, "tokenizing", i * mb, 1000 * mb, "9 tokens/s" if i == 2 else "") for i in (1, 2, 1000)]
    shown = _shown(monkeypatch, reports, force_terminal=True, force_interactive=True, no_color=True)
    assert [line.strip() for line in shown.replace("\n", "\r").split("\r")] == [
        "tokenizing: 1.0 of 1,000.0 MB, 0%",
        "tokenizing: 2.0 of 1,000.0 MB, 0%, 9 tokens/s, 3 min left",
        "tokenizing: 1,000.0 of 1,000.0 MB, 100%",
        "",
    ]
