"""What the exit codes of several processes say together, and what a process leaves in its log."""

import types

import pytest

from gspmd_lm.errors import STOPPED, WRONG_INPUT
from gspmd_lm.launch import budget, logs, place
from gspmd_lm.launch.job import Job


@pytest.mark.parametrize(
    ("codes", "together"),
    [
        ([0, 0], 0),
        ([0, STOPPED], STOPPED),
        ([1, 0, STOPPED], 1),  # a process has failed, and the others have saved or ended
        ([STOPPED, 137], 137),
        ([1, None], None),  # the others fail because of the one that is lost
        ([None, WRONG_INPUT], WRONG_INPUT),
        ([1, WRONG_INPUT], WRONG_INPUT),
        ([], None),
    ],
)
def test_exit_codes_together(codes, together):
    assert place.combine(codes) == together


@pytest.mark.parametrize("given", ["--compile_cache=none", "--compile-cache=none"])
def test_programs_are_kept_where_the_flags_say(given):
    assert place.with_cache(Job(workdir="gs://b/run", train=given)) == [given, "--workdir=gs://b/run"]


def test_a_log_tells_of_its_process(tmp_path):
    (tmp_path / "0.log").write_text("step 9/99  loss 1\nsaved\n")
    (tmp_path / "10.log").write_text(f"step 12/99\n{logs.ENDED} 75\n")
    (tmp_path / "2.log").write_text(f"{logs.ENDED} 1\nrequeued\n")
    (tmp_path / "gcloud.txt").write_text("step 50/99")
    assert [path.name for path in logs.files(tmp_path)] == ["0.log", "2.log", "10.log"]
    assert [logs.exit_code(path) for path in logs.files(tmp_path)] == [None, None, 75]
    assert list(map(logs.read_code, [0, 1, -9, -15, 143, 137])) == [0, 1, 137, STOPPED, STOPPED, 137]
    assert logs.step(tmp_path) == 9
    assert logs.last_lines(tmp_path, 1) == ["0: saved", "2: requeued", f"10: {logs.ENDED} 75"]


def test_lines_that_are_written_again_are_shown_once(tmp_path):
    file = tmp_path / "0.log"
    follower = logs.Follower(file)
    assert list(follower.lines()) == []
    file.write_text("one\ntw")
    assert list(follower.lines()) == ["one"]
    file.write_text("one\n")  # another connection begins at the first line
    assert list(follower.lines()) == []
    file.write_text("one\ntwo\nthree\n")
    assert list(follower.lines()) == ["two", "three"]


def test_only_the_time_with_a_slice_costs(monkeypatch):
    now_s = [0.0]
    monkeypatch.setattr(budget, "time", types.SimpleNamespace(monotonic=lambda: now_s[0]))
    spent = budget.Budget(Job(max_hours=10.0, max_usd=25.0), 10.0)
    now_s[0] = 3600
    spent.hold()
    now_s[0] = 2 * 3600
    spent.hold()
    assert spent.is_held and spent.usd == 10 and spent.over == ""
    spent.release()
    now_s[0] = 5 * 3600
    assert spent.usd == 10 and not spent.is_held
    spent.hold()
    now_s[0] = 6.5 * 3600
    assert spent.over == "max_usd: 25.00 USD are spent" and spent.spent == "2h30m, 25.00 USD"
