"""What a run says of its data: before its steps, and where they wait for it."""

import time

import numpy as np
import pytest

from gspmd_lm.data.loader import Loader
from gspmd_lm.data.speed import Speed
from gspmd_lm.train import reading
from gspmd_lm.workdir.wall_time import read_totals
from tests.train.runs import rows_of


@pytest.mark.long
def test_a_run_whose_data_is_slow(run, tmp_path, monkeypatch):
    """Its lines and its goodput say that it waits. When it goes on, it says before that it will."""
    read, said = Loader.rows_at, []
    monkeypatch.setattr(Loader, "rows_at", lambda *given: time.sleep(0.1) or read(*given))
    for stop in (4, 8):
        started = run(tmp_path)
        started.train(stop)
        said.append(started.console.file.getvalue())
    assert "\nsteps    4 steps read 32 rows, 544 tokens: 0.533 epochs\nsource   gives " in said[0]
    assert "warning: data" not in said[0], "nothing is known of the time of a step"
    waits = [line for line in said[0].splitlines() if line.startswith("step ") and line.endswith("% waiting for data")]
    assert len(waits) >= 2 and int(waits[-1].split("%")[0].split()[-1]) > 30
    assert "times what the steps need\nwarning: data limits the steps: they need " in said[1]
    seconds = read_totals(rows_of(tmp_path))
    assert seconds["data"] > 0.3 and seconds["steps"] > 0


@pytest.mark.parametrize(
    ("step", "processes", "lines"),
    [
        (None, 1, ["reading  8.0 kB a step", "source   gives 100 rows/s and 100.0 kB/s"]),
        (
            reading.StepTime(0.04, "predicted"), 4,
            ["reading  8.0 kB a step in each of 4 processes, 200.0 kB/s at 40 ms a step, predicted",
             "source   gives 100 rows/s and 100.0 kB/s, 0.5 times what the steps need",
             "warning: data limits the steps: they need 200 rows/s in this process, and the source gives 100, so that "
             "a step takes 80 ms"],
        ),
    ],
)  # fmt: skip
def test_lines_of_a_source(step, processes, lines, monkeypatch):
    rows = Loader(rows=range(640), batch=32, seed=0, repeat=True, description="", fingerprint="", tokens=6400,
                  padded_batch=40)  # fmt: skip
    monkeypatch.setattr(Loader, "local_rows", lambda *_: np.asarray([0, 1, 2, 3, 28, 29, 30, 31, 39]))
    monkeypatch.setattr(reading, "mean_row_bytes", lambda _: 1000.0)
    monkeypatch.setattr(reading, "measure_speed", lambda _, local, at: Speed(8 * len(local), 0.64, 1000.0))
    said = reading.describe(rows, {}, (10, 50), step, processes).splitlines()
    assert said == ["steps    40 steps read 1,280 rows, 12,800 tokens: 2 epochs", *lines]


def test_the_time_of_a_step_is_predicted_or_that_of_earlier_starts():
    assert reading.find_step_time(0.5, {"steps": 8.0}, 4) == (0.5, "predicted")
    assert reading.find_step_time(None, {"steps": 8.0}, 4) == (2.0, "measured before")
    assert reading.find_step_time(None, {}, 0) is None
