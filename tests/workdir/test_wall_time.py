"""Where the wall time of a run goes, over several starts."""

import json

import pytest
from etils import epath

from gspmd_lm.config import Train
from gspmd_lm.workdir import wall_time
from gspmd_lm.workdir.log import Log
from gspmd_lm.workdir.wall_time import KINDS, WallTime


class Clock:
    now = 100.0

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(wall_time, "time", clock)
    return clock


def test_each_moment_counts_for_one_kind(clock):
    time = WallTime(began=90.0)
    clock.now = 105.0
    with time.spending("steps"):
        clock.now += 4
        with time.spending("saves"):
            clock.now += 2
        clock.now += 1
    clock.now += 0.5
    assert time.totals() == {f"wall_{kind}_s": 0.0 for kind in KINDS} | {
        "wall_start_s": 15.5, "wall_steps_s": 5.0, "wall_saves_s": 2.0,
    }  # fmt: skip
    assert sum(time.seconds.values()) == clock.now - 90
    assert wall_time.goodput(time.seconds) == 5 / 22.5


def test_steps_after_the_last_checkpoint_of_a_killed_run_are_lost(clock, tmp_path):
    """What earlier starts took besides steps stays what it was."""
    for start, steps in ((0, 8), (4, 6)):
        log, time = Log(epath.Path(tmp_path), start, Train(steps=9, trackers=()), {}), WallTime()
        time.add_earlier(log.wall_s)
        clock.now += 3
        with time.spending("steps"):
            for step in range(start + 1, steps + 1):
                clock.now += 1
                log.write(step, {"loss": 1.0} | time.totals())
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    seconds = wall_time.read_totals(rows)
    assert (seconds["start"], seconds["steps"], seconds["lost"]) == (6, 6, 4)


def test_a_hang_is_counted_apart_from_what_hung_and_each_new_kind_is_told(clock):
    time, kinds = WallTime(), []
    time.observe = kinds.append
    with time.spending("steps"):
        clock.now += 4
        with time.spending("saves"):
            clock.now += 70
            time.count_hang("saves", 65.0)
            clock.now += 1
        clock.now += 2
        time.count_hang("steps", 100.0)  # more than was counted is not there
    assert (time.seconds["steps"], time.seconds["saves"], time.seconds["hangs"]) == (0, 6, 71)
    assert kinds == ["steps", "saves", "steps", "start"]


def test_the_rows_of_a_version_that_counted_no_hangs_are_read():
    seconds = wall_time.read_totals([{f"wall_{kind}_s": 2 for kind in KINDS if kind != "hangs"}])
    assert seconds == {kind: 0.0 if kind == "hangs" else 2.0 for kind in KINDS}


def test_a_run_that_was_not_counted_begins_to_be(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "loss": 2.0, "wall_steps_s": 1}\n')
    log = Log(epath.Path(tmp_path), 2, Train(steps=9, trackers=()), {})
    assert log.wall_s == {} and log.metrics.rows == 2
