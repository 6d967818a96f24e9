"""The lines and the bar of a run."""

import io
import re
import types
from concurrent.futures import Future

import jax
import pytest
from rich.console import Console

from gspmd_lm.train import progress
from gspmd_lm.train.progress import Meter
from gspmd_lm.units import human_clock, human_short
from gspmd_lm.workdir import wall_time

LARGEST = {
    "loss": 12.34567, "gradient_norm": 123.456, "step_time_s": 0.999, "tokens_per_s": 9.99e6, "mfu": 1.0,
    "tokens": 1.234e13, "epoch": 12.345, "left_s": 86400 * 99.0, "skipped_steps": 0.0,
}  # fmt: skip
HOSTILE = LARGEST | {"loss": float("nan"), "gradient_norm": 1.0e30, "step_time_s": 5000.0, "mfu": 0.0, "epoch": 1e6}


@pytest.mark.parametrize("values", [LARGEST, HOSTILE, {"loss": 0.0, "gradient_norm": 0.0}], ids=["large", "nan", "few"])
@pytest.mark.parametrize("stop", [7, 999_999, 20_000_000])
def test_a_line_fits_80_columns_below_its_heading(stop, values):
    line, heading = progress.line(stop, stop, values, mfu=True), progress.heading(stop, mfu=True)
    assert len(line) == len(heading) <= 80
    assert line.startswith(f"step {stop}")
    assert len(line.split()) == len(heading.split()) + 4 + line.count(" ms") + line.count(" s")  # each in its column


def test_what_a_line_says():
    values = LARGEST | {"loss": 2.34567, "gradient_norm": 0.5321, "step_time_s": 0.0412, "tokens_per_s": 39765.0,
                        "tokens": 1.966e6, "epoch": 0.1234, "left_s": 7749.0}  # fmt: skip
    assert progress.heading(20000, mfu=True) == (
        "                              |grad|    time  tok/s  MFU  tokens  epoch   left"
    )
    assert progress.line(120, 20000, values, mfu=True) == (
        "step   120/20000  loss 2.3457  0.532   41 ms  39.8k 100%   1.97M   0.12  2h09m"
    )
    assert "MFU" not in progress.heading(20000, mfu=False)


def test_numbers_of_columns():
    assert [human_short(value) for value in (0, 999, 1000, 9994, 99_960, 999_600, 1.5e9, 7e12, 2e16)] == [
        "0", "999", "1.00k", "9.99k", "100k", "1.00M", "1.50B", "7.00T", "20000T",
    ]  # fmt: skip
    assert [human_clock(value) for value in (0, 59.4, 59.6, 3599, 3600, 86399, 86400, 1e6)] == [
        "0s", "59s", "1m00s", "59m59s", "1h00m", "23h59m", "1d00h", "11d13h",
    ]  # fmt: skip


def shown(terminal, **options):
    console = Console(file=io.StringIO(), force_terminal=terminal, width=80)
    return progress.Shown(console, 0, 100, **{"main": True, "mfu": False} | options), console.file


def test_headings_come_again_and_skipped_steps_are_said(caplog):
    lines, file = shown(False)
    for step in range(1, 42):
        lines.line(step, LARGEST | {"skipped_steps": 3.0 * (step >= 30)}, 5.0)
    said = file.getvalue().splitlines()
    assert [number for number, line in enumerate(said) if "|grad|" in line] == [0, 21, 43]
    assert [line for line in said if "changed nothing" in line] == [
        "step 30: 3 steps so far changed nothing, because the loss or gradient was not finite"
    ]
    silent, file = shown(False, main=False)
    silent.line(1, LARGEST, None)
    assert file.getvalue() == "" == caplog.text
    silent.line(2, LARGEST | {"data_wait_s": 0.5}, None)
    assert file.getvalue() == "" and "process 0, step 2:  50% waiting for data" in caplog.text


def test_the_bar_of_a_terminal():
    bar, file = shown(True)
    with bar.bar:
        bar.line(10, LARGEST | {"loss": 2.5}, 60.0)
        bar.advance(11, 39_800.0, 125.0)
        bar.bar.refresh()
    last = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", file.getvalue()).replace("\r", "\n")
    bars = re.findall(r"^step 11/100 (.*?) loss", last, re.M)[-1]
    assert bars.strip() and len(bars.strip()) < 0.2 * len(bars)  # the rest is blank
    assert re.search(r"^step 11/100 .*loss 2\.5000 39\.8k tok/s 0:00:00 2m05s left *$", last, re.M)
    logged, file = shown(False)
    with logged.bar:
        logged.advance(11, 39_800.0, 125.0)
    assert file.getvalue() == ""


def test_the_first_step_has_no_speed_and_gives_none_to_the_time_left(monkeypatch):
    """The clock below is read when the meter is made, when a step is read, and for the time left."""
    now = 0.0
    monkeypatch.setattr(progress, "time", types.SimpleNamespace(perf_counter=lambda: now))
    meter = Meter(start=4, stop=20, counted=(100, "tokens"), epochs=0.25, flops=1e3, peak_flops_per_s=1e4)
    now = 30.0  # rows were loaded, and devices started
    values = {"loss": 1.0, "cross_entropy": 1.0}
    first = meter.read(5, values)
    assert not {"step_time_s", "tokens_per_s", "mfu"} & set(first) and first["tokens"] == 500 and first["epoch"] == 1.25
    assert meter.first_step_s == 30.0 and meter.left_s(5) is None
    now = 32.0
    later = meter.read(9, values)
    assert (later["step_time_s"], later["tokens_per_s"], later["mfu"]) == (0.5, 200.0, 0.2)
    now = 38.0  # an evaluation
    meter.restart(9)
    assert meter.left_s(9) == (38 - 30) / 4 * 11
    with meter.once():  # a program is compiled
        now = 138.0
    meter.restart(9)
    assert meter.left_s(9) == (38 - 30) / 4 * 11
    now = 139.0
    assert meter.read(11, values)["step_time_s"] == 0.5


def test_a_wait_for_rows_counts_only_while_the_devices_have_nothing_to_do(monkeypatch):
    now = 0.0

    def batches(*waits):
        nonlocal now
        for wait in waits:
            now += wait
            yield wait

    monkeypatch.setattr(progress, "time", types.SimpleNamespace(perf_counter=lambda: now))
    counted = wall_time.WallTime()
    counted.begin("steps")
    counted.move = lambda *given: moved.append(given)
    meter, moved = Meter(0, 9, (100, "tokens"), 0.0, 0.0, None), []
    waiting = meter.waiting(batches(1.0, 4.0, 2.0), counted)
    next(waiting)
    assert meter.wait_s == 1.0, "nothing was dispatched"
    ends: Future[float] = Future()
    meter.device._end = ends
    ends.set_result(3.5)  # of the 4 seconds from 1.0 on, the step ran 2.5
    next(waiting)
    assert meter.wait_s == 1.0 + 1.5
    meter.device._end = Future()  # a step that runs
    next(waiting)
    assert meter.wait_s == 2.5 and moved == [("data", "steps", idle) for idle in (0.0, 2.5, 2.0)]
    meter.device.follow({"loss": jax.numpy.ones(())})
    assert meter.device._end.result() == 7.0 and next(waiting, None) is None
    line = progress.line(5, 9, LARGEST | {"data_wait_s": 0.32, "step_time_s": 0.999}, mfu=True)
    assert line.endswith(" 99d00h  32% waiting for data")
    for waited_s, step_time_s in ((0.09, 0.999), (0.0049, 0.01)):  # a small share, and a short time
        assert progress.describe_wait({"data_wait_s": waited_s, "step_time_s": step_time_s}) == ""
