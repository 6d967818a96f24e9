"""What becomes of checkpoints when files are damaged, disks are full and processes are killed."""

import importlib.util
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from unittest.mock import Mock

import jax.numpy as jnp
import numpy as np
import pytest

from gspmd_lm import files
from gspmd_lm.config import Train
from gspmd_lm.errors import InputError, RunFailed
from gspmd_lm.workdir import layout
from gspmd_lm.workdir.checkpoint import Checkpoints, open_checkpoints
from tests.workdir.saved import (
    ARCHITECTURE,
    Run,
    abstract,
    assert_equal,
    flip_byte,
    make_state,
)


def flip(run: Run, step: int) -> None:
    flip_byte(run.largest_file(step))


def truncate(run: Run, step: int) -> None:
    os.truncate(run.largest_file(step), 5)


def remove(run: Run, step: int) -> None:
    run.largest_file(step).unlink()


def flip_structure(run: Run, step: int) -> None:
    flip_byte(run.directory / str(step) / "state" / "_METADATA")


def flip_extra(run: Run, step: int) -> None:
    flip_byte(run.directory / str(step) / "run" / "metadata")


def flip_manifest(run: Run, step: int) -> None:
    flip_byte(run.directory / str(step) / "sha256.json")


def remove_manifest(run: Run, step: int) -> None:
    (run.directory / str(step) / "sha256.json").unlink()


def list_as_manifest(run: Run, step: int) -> None:
    (run.directory / str(step) / "sha256.json").write_text("[1, 2]")


def rename_a_field(run: Run, step: int) -> None:
    file = run.directory / str(step) / "sha256.json"
    file.write_text(file.read_text().replace('"bytes"', '"bites"', 1))


def empty(run: Run, step: int) -> None:
    shutil.rmtree(run.directory / str(step))
    (run.directory / str(step)).mkdir()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (flip, "its sha256 has changed"),
        (truncate, "5 bytes instead of"),
        (remove, "missing"),
        (flip_structure, "_METADATA: its sha256 has changed"),
        (flip_extra, "run/metadata: its sha256 has changed"),
        (flip_manifest, ""),
        (remove_manifest, "sha256.json cannot be read"),
        (list_as_manifest, "sha256.json cannot be read"),
        (rename_a_field, "sha256.json cannot be read"),
        (empty, "sha256.json cannot be read"),
    ],
)
def test_a_damaged_step_is_reported_and_the_one_before_is_used(run, damage, words):
    run.save(1, 2)
    damage(run, 2)
    step, state, extra = run.open().restore(abstract(make_state(1)))
    assert (step, extra) == (1, {"data": {"step": 1}})
    assert_equal(state, make_state(1))
    (report,) = run.reports
    assert report.startswith(f"checkpoint 2 in {run.directory} is damaged (") and words in report


def test_damage_that_restoring_does_not_read_is_no_damage(run):
    run.save(1, 2)
    for step in (1, 2):
        (run.directory / str(step) / "_CHECKPOINT_METADATA").write_text("{")
    restarted = run.open()
    assert restarted.restore(abstract(make_state(1)))[0] == 2
    restarted.save(3, make_state(3), {})
    restarted.wait()
    assert restarted.steps() == [1, 2, 3]


FORGED = {
    "run/metadata": (
        (), ("architecture",), ("extra",), ("step",), ("architecture", "layers"),
    ),
    "state/_METADATA": ((), ("tree_metadata",), ("use_ocdbt",), ("tree_metadata", "('step',)", "value_metadata")),
}  # fmt: skip


@pytest.mark.long
def test_forged_metadata_is_refused_or_changes_nothing(run):
    """Whoever forges the checksums, too, gets a message and no traceback, and no other value is read."""
    run.save(1)
    folder, refused = run.directory / "1", 0
    for name, places in FORGED.items():
        before = (folder / name).read_bytes()
        for place, value in itertools.product(places, (None, [1], {"a": {}}, "x", 7)):
            raw = at = {"": json.loads(before)}
            for key in ("", *place)[:-1]:
                at = at[key]
            at[("", *place)[-1]] = value
            (folder / name).write_text(json.dumps(raw[""]))
            files.seal(folder, ("state", "run"))
            try:
                assert_equal(run.open().restore(abstract(make_state(1)))[1], make_state(1))
            except InputError:
                refused += 1
        (folder / name).write_bytes(before)
    assert refused > 30


@pytest.mark.parametrize("link", [True, False], ids=["link", "copy"])
def test_a_checkpoint_under_another_number_is_not_taken_at_its_word(run, link):
    run.save(1, 2)
    make = (lambda old, new: new.symlink_to(old)) if link else shutil.copytree
    make(run.directory / "1", run.directory / "7")
    step, state, _ = run.open().restore(abstract(make_state(2)))
    assert step == 2 and run.reports[0].startswith(f"checkpoint 7 in {run.directory} is damaged (")
    assert "of step 1, not 7: the folder is a copy of another checkpoint, or a link" in run.reports[0]
    assert_equal(state, make_state(2))
    with pytest.raises(InputError, match="of step 1, not 7"):
        run.open().restore(abstract(make_state(2)), step=7)


def test_all_damaged(run):
    run.save(1, 2)
    flip(run, 1)
    remove(run, 2)
    with pytest.raises(
        InputError, match=r"(?s)no other checkpoint.*\n  2: .*missing\n  1: .*sha256 has changed\n  fix"
    ):
        run.open().restore(abstract(make_state(1)))
    assert len(run.reports) == 2


def test_a_damaged_explicit_step_is_refused(run):
    run.save(1, 2)
    flip(run, 2)
    with pytest.raises(InputError, match=r"2: state/.*sha256 has changed"):
        run.open().restore(abstract(make_state(1)), step=2)


def test_saving_after_a_damaged_step_replaces_it(run):
    run.save(1, 2, 4)
    flip(run, 2)
    flip(run, 4)
    restarted = run.open()
    assert restarted.restore(abstract(make_state(1)))[0] == 1
    restarted.save(2, make_state(22), {})
    restarted.wait()
    assert run.reports[-1].startswith("checkpoint 2 replaces 2, 4 in")
    assert run.open().steps() == [1, 2]
    assert_equal(run.open().restore(abstract(make_state(1)))[1], make_state(22))


def fail_while_writing(run: Run, checkpoints: Checkpoints, monkeypatch) -> None:
    """Lets checkpoint 2 fail: the disk is full when its manifest is written."""

    def full(*args):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("gspmd_lm.files.sum_of", full)
        checkpoints.save(2, make_state(2), {})
        thread = next(thread for thread in threading.enumerate() if thread.name == "save_finalize")
        threading.Thread.join(thread)  # Orbax's own join would already raise


@pytest.mark.parametrize("call", ["wait", "save", "close", "restore"])
def test_a_failed_write_is_raised_by_the_next_call(run, monkeypatch, call):
    checkpoints = run.open(keep=1)
    checkpoints.save(1, make_state(1), {})
    checkpoints.wait()
    fail_while_writing(run, checkpoints, monkeypatch)
    arguments = {"save": (3, make_state(3), {}), "restore": (abstract(make_state(1)),)}.get(call, ())
    with pytest.raises(RuntimeError, match=r"checkpoint 2 was not written to .*No space left on device"):
        getattr(checkpoints, call)(*arguments)
    assert checkpoints.steps() == [1]
    if call != "close":
        checkpoints.save(4, make_state(4), {})
        checkpoints.wait()
        assert run.open().steps() == [4]


@pytest.mark.parametrize("closing", [False, True])
def test_an_error_of_a_run_is_raised_though_its_save_or_closing_fails_too(run, monkeypatch, closing):
    reports = []
    train = Train(steps=1)
    with (
        pytest.raises(RunFailed, match=r"^the first error$"),
        open_checkpoints(run.directory.parent, train, ARCHITECTURE, reports.append) as checkpoints,
    ):
        fail_while_writing(run, checkpoints, monkeypatch)
        if closing:
            monkeypatch.setattr(checkpoints, "_empty_trash", Mock(side_effect=OSError("the disk is gone")))
        raise RunFailed("the first error")
    (report,) = reports
    said = "the disk is gone" if closing else f"checkpoint 2 was not written to {run.directory}: "
    assert report.startswith(said) and (closing or "No space left" in report)


VANISHED = """
import shutil, sys
import jax
from gspmd_lm.workdir.checkpoint import Checkpoints
checkpoints = Checkpoints(sys.argv[1], keep=3, keep_every=0, architecture={})
state = {"w": jax.numpy.arange(1000)}
checkpoints.save(1, state, {})
checkpoints.wait()
shutil.rmtree(sys.argv[1])
open(sys.argv[1], "w").close()
checkpoints.save(2, state, {})
checkpoints.close()
"""


@pytest.mark.long
def test_a_directory_that_vanished_is_an_error_and_the_process_ends(run):
    command = [sys.executable, "-c", VANISHED, str(run.directory)]
    process = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert process.returncode == 1
    assert f"RunFailed: checkpoint 2 was not written to {run.directory}: [Errno 20] Not a dir" in process.stderr


def test_a_clock_that_is_set_forward_during_a_save_ends_no_run(run, monkeypatch):
    """As after a laptop's sleep. Each look at the time of day is a day later than the one before."""
    days = itertools.count(int(time.time()), 24 * 3600)
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: float(next(days)))
        run.save(1, 2)
    assert run.open().steps() == [1, 2]
    assert_equal(run.open().restore(abstract(make_state(2)))[1], make_state(2))


def test_a_file_as_directory_is_refused(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(InputError, match="not a directory"):
        Checkpoints(str(file), keep=1, keep_every=0, architecture={})


def test_a_store_that_orbax_cannot_write_to_is_refused(monkeypatch):
    with pytest.raises(InputError, match="not to s3://\n  fix   mount the bucket"):
        Checkpoints("s3://bucket/run", keep=1, keep_every=0, architecture={})
    with pytest.raises(InputError, match="not to s3://\n  fix   mount the bucket"):
        layout.find_earlier("s3://bucket/run", layout.CONFIG)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match="gs:// needs a package that is not installed\n  fix   pip install gcsfs"):
        layout.find_earlier("gs://bucket/run", layout.CONFIG)


def test_values_that_json_cannot_hold_are_refused_at_once(run):
    with pytest.raises(TypeError, match="not JSON serializable"):
        run.open().save(1, make_state(1), {"array": np.zeros(3)})
    assert run.open().steps() == []


KILLED = """
import os, signal, sys
import jax, numpy as np
import gspmd_lm.workdir.checkpoint as checkpoint
from gspmd_lm import files
checkpoints = checkpoint.Checkpoints(sys.argv[1], keep=3, keep_every=0, architecture={})
state = {"w": jax.numpy.arange(1000)}
checkpoints.save(1, state, {})
checkpoints.wait()
if sys.argv[2] == "before the manifest":
    files.sum_of = lambda file: os.kill(os.getpid(), signal.SIGKILL)
else:
    checkpoints._manager._checkpoint_deleter.delete_steps = lambda steps: os.kill(os.getpid(), signal.SIGKILL)
checkpoints.save(2, state, {})
checkpoints.wait()
"""


@pytest.mark.parametrize(("moment", "newest"), [("before the manifest", 1), ("after the commit", 2)])
def test_a_kill_while_saving_leaves_a_usable_step(run, moment, newest):
    command = [sys.executable, "-c", KILLED, str(run.directory), moment]
    assert subprocess.run(command, capture_output=True, timeout=300).returncode == -signal.SIGKILL
    state = {"w": jnp.arange(1000)}
    restarted = run.open(architecture={})
    assert restarted.steps() == list(range(1, newest + 1))
    step, found, _ = restarted.restore(abstract(state))
    assert step == newest and np.array_equal(found["w"], state["w"])
    restarted.save(3, state, {})
    restarted.close()
    assert sorted(path.name for path in run.directory.iterdir()) == [*map(str, range(1, newest + 1)), "3"]
    assert not run.reports
