"""The log of a run: what it says of rows that are gone, or that no checkpoint belongs to."""

import pytest
from etils import epath

from gspmd_lm.config import Train
from gspmd_lm.workdir.log import Log

ROWS = '{"step": 1, "loss": 2.0}\n{"step": 2, "loss": 1.0}\n'


@pytest.mark.parametrize(
    ("rows", "start", "said"),
    [
        (ROWS, 2, ""),
        (ROWS, 1, ""),  # the run was killed before its next checkpoint
        (None, 0, ""),
        (None, 21, "has no rows of the 21 steps so far, and begins anew"),
        ("", 21, "has no rows of the 21 steps so far, and begins anew"),
        (ROWS, 0, "has rows of steps that no checkpoint holds; the run begins anew, and they are replaced"),
    ],
)
def test_rows_and_checkpoints_that_do_not_go_together_are_said(tmp_path, rows, start, said):
    if rows is not None:
        (tmp_path / "metrics.jsonl").write_text(rows)
    lines = []
    Log(epath.Path(tmp_path), start, Train(steps=1, trackers=()), {}, lines.append).close()
    assert lines == ([f"warning: {tmp_path / 'metrics.jsonl'}: {said}"] if said else [])
