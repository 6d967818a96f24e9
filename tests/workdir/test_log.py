"""The log of a run: what it says of rows that are gone, or that no checkpoint belongs to."""

import errno
import os
import queue
import threading
import types

import pytest
from etils import epath

from gspmd_lm import files
from gspmd_lm.config import Train
from gspmd_lm.workdir import trackers
from gspmd_lm.workdir.log import Log, read_rows

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


def test_a_run_that_goes_on_keeps_its_rows_up_to_that_step(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(ROWS + '{"step": 3, "loss": 0.5}\n')
    Log(epath.Path(tmp_path), 2, Train(steps=9, trackers=()), {}).close()
    assert (tmp_path / "metrics.jsonl").read_text() == ROWS


def test_no_step_waits_for_an_object_store(tmp_path, monkeypatch):
    """What is logged while the store is slow is written together. A store that fails loses no row."""
    lines, workdir, replace = [], epath.Path(tmp_path), files.replace
    answers, waiting, contents = queue.Queue(), threading.Semaphore(0), []

    def replace_slowly(path, content):
        waiting.release()
        if not answers.get(timeout=10):
            raise ConnectionError("gone")
        contents.append(len(content.splitlines()))
        replace(path, content)

    monkeypatch.setattr(files, "is_remote", lambda path: True)
    monkeypatch.setattr(files, "replace", replace_slowly)
    log = Log(workdir, 0, Train(steps=9, trackers=()), {}, lines.append)
    for step in (1, 2, 3):
        log.write(step, {"loss": 1.0})
    assert waiting.acquire(timeout=10) and not waiting.acquire(blocking=False)  # one writes, and nobody waits for it
    for answer in (True, False):
        answers.put(answer)
    log.flush()
    assert lines == [f"warning: {workdir / 'metrics.jsonl'}: gone; the run goes on, and tries to write the rows later"]
    answers.put(True)
    log.write(4, {"loss": 1.0})
    log.flush()
    assert contents == [1, 4] and lines[1:] == [f"{workdir / 'metrics.jsonl'}: can be written again, and has all rows"]
    for answer in (False, True):
        answers.put(answer)
    log.write(5, {"loss": 1.0})
    log.close()
    rows, damaged = read_rows(workdir / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5] and not damaged and lines[2:] == lines[:2]


def test_rows_that_cannot_be_written_are_written_later(tmp_path):
    """As on a full disk, or where a folder has the name of the file."""
    lines, path = [], tmp_path / "metrics.jsonl"
    log = Log(epath.Path(tmp_path), 0, Train(steps=9, trackers=()), {}, lines.append)
    log.write(1, {"loss": 3.0})
    path.rename(tmp_path / "aside")
    path.mkdir()
    log.write(2, {"loss": 2.0})
    log.write(3, {"loss": 1.0})
    assert lines == [f"warning: {path}: Is a directory; the run goes on, and tries to write the rows later"]
    path.rmdir()
    (tmp_path / "aside").rename(path)
    log.write(4, {"loss": 0.5})
    assert lines[1:] == [f"{path}: can be written again, and has all rows"]
    assert path.read_text().splitlines() == [
        f'{{"step": {step}, "loss": {loss}}}' for step, loss in ((1, 3.0), (2, 2.0), (3, 1.0), (4, 0.5))
    ]
    path.unlink()
    path.mkdir()
    log.write(5, {"loss": 0.4})
    log.close()
    assert lines[-1] == f"warning: {path}: the last 1 rows are not written"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="not run: there is no /dev/full here")
def test_a_full_disk_is_said_with_the_words_of_the_system(tmp_path):
    lines = []
    log = Log(epath.Path(tmp_path), 0, Train(steps=9, trackers=()), {}, lines.append)
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    log.write(1, {"loss": 3.0})
    assert lines == [
        f"warning: {tmp_path / 'metrics.jsonl'}: {os.strerror(errno.ENOSPC)}; the run goes on, and tries to write the "
        "rows later"
    ]


def test_a_row_of_which_a_part_was_written_is_taken_back(tmp_path, monkeypatch):
    """The system writes as much as there is room for."""
    lines, path = [], tmp_path / "metrics.jsonl"
    log = Log(epath.Path(tmp_path), 0, Train(steps=9, trackers=()), {}, lines.append)
    log.write(1, {"loss": 3.0})
    whole = path.read_bytes()

    class Cut:
        def __init__(self, *given, **options):
            self.file = path.open(*given, **options)

        def __enter__(self):
            return types.SimpleNamespace(
                tell=self.file.tell, truncate=self.file.truncate, write=lambda text: self.file.write(text[:5])
            )

        def __exit__(self, *_):
            self.file.close()

    with monkeypatch.context() as patched:
        patched.setattr("gspmd_lm.workdir.log.Path", lambda _: types.SimpleNamespace(open=Cut))
        log.write(2, {"loss": 2.0})
    assert path.read_bytes() == whole and os.strerror(errno.ENOSPC) in lines[0]
    log.write(3, {"loss": 1.0})
    assert len(path.read_bytes().splitlines()) == 3


def test_a_tracker_that_cannot_start_ends_no_run(tmp_path, monkeypatch):
    def refuse(**options):
        raise ConnectionError("no network")

    monkeypatch.setitem(trackers.sys.modules, "wandb", types.SimpleNamespace(init=refuse))
    (tmp_path / "tensorboard").write_text("in the way")
    lines = []
    log = Log(epath.Path(tmp_path), 0, Train(steps=9, trackers=("wandb", "tensorboard")), {}, lines.append)
    log.write(1, {"loss": 1.0})
    log.close()
    assert [line.partition(" (")[0] for line in lines] == ["warning: wandb failed", "warning: tensorboard failed"]
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1, "loss": 1.0}\n'


def test_a_full_disk_ends_tensorboard_and_not_the_run(tmp_path):
    """Its own thread would end, and the queue that it empties would hold the run up without a word."""
    lines = []
    log = Log(epath.Path(tmp_path), 0, Train(steps=99, trackers=("tensorboard",)), {}, lines.append)
    writer = log.trackers[0].writer.file_writer.event_writer._ev_writer

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    writer._py_recordio_writer.write = full
    for step in range(1, 31):
        log.write(step, {"loss": 1.0})
    log.close()
    assert len(lines) == 1 and "tensorboard failed" in lines[0] and os.strerror(errno.ENOSPC) in lines[0]
