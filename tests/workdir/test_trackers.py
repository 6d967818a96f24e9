"""Trackers: what they are told at the start, and what a run that is resumed or rewound finds there."""

import dataclasses
import os
import struct
import subprocess
import sys
import types
from pathlib import Path

import pytest
from etils import epath

from gspmd_lm.config import Train
from gspmd_lm.errors import InputError
from gspmd_lm.workdir import trackers
from gspmd_lm.workdir.log import Log, Sample

ROOT = Path(__file__).parent.parent.parent
PROGRAM = """
import sys
from etils import epath
from gspmd_lm.config import Train
from gspmd_lm.workdir.log import Log
log = Log(epath.Path(sys.argv[1]), 0, Train(steps=4, trackers=("tensorboard",)), {})
log.write(3, {"loss": 0.25})
log.close()
assert "torch" not in sys.modules
import torch
print(torch.HERE)
"""


def events(workdir):
    """The events of TensorBoard's files, the oldest file first. A record has its length and two checksums around it."""
    from tensorboardX.proto import event_pb2  # which imports torch where there is one

    for path in sorted((workdir / "tensorboard").iterdir()):
        data, at = path.read_bytes(), 0
        while at < len(data):
            (size,) = struct.unpack_from("<Q", data, at)
            yield event_pb2.Event.FromString(data[at + 12 : at + 12 + size])
            at += 12 + size + 4


def test_tensorboard_is_told_which_points_a_rewind_leaves_behind(tmp_path):
    train = Train(steps=9, trackers=("tensorboard",))
    for start, steps in ((0, (1, 4, 8)), (4, (5, 8))):
        log = Log(epath.Path(tmp_path), start, train, {})
        for step in steps:
            log.write(step, {"loss": float(step)})
        log.write_samples(steps[-1], [Sample("Once", " upon")])
        log.close()
        if not start:  # files are named by the second in which they are made
            (first,) = (tmp_path / "tensorboard").iterdir()
            first.rename(first.with_name("events.out.tfevents.0.before"))
    found = list(events(tmp_path))
    starts = [event.step for event in found if event.session_log.status == event.session_log.START]
    assert starts == [1, 5]  # a viewer then drops what came before with these steps or later ones
    assert [event.step for event in found if event.summary.value and event.summary.value[0].tag == "loss"] == [
        1, 4, 8, 5, 8,
    ]  # fmt: skip
    texts = [value.tensor.string_val[0] for event in found for value in event.summary.value if "sample" in value.tag]
    assert texts == [b"**Once** upon"] * 2
    rows = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert rows == [f'{{"step": {step}, "loss": {float(step)}}}' for step in (1, 4, 5, 8)]
    assert (tmp_path / "samples.jsonl").read_text() == '{"step": 8, "prompt": "Once", "text": " upon"}\n'


@pytest.fixture
def online(monkeypatch):
    """wandb and trackio, replaced by modules that note what they are asked for."""
    asked = []

    def init(**options):
        name = options["name"] + "-2" * (options["resume"] == "never")  # trackio does not use a name twice
        return types.SimpleNamespace(
            name=name,
            log=lambda values, step: asked.append((step, values)),
            finish=lambda: asked.append("finished"),
            options=options,
        )

    for name in ("wandb", "trackio"):
        monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(init=init))
    return asked


def test_a_resumed_run_is_the_same_run_elsewhere(online, tmp_path):
    train = Train(steps=9, trackers=("wandb", "trackio"), project="ours", group="width", tags=("a", "b"))
    workdir = epath.Path(tmp_path) / "run"
    workdir.mkdir()
    first = trackers.start(workdir, 0, train, {"model": {}})
    again = trackers.start(workdir, 4, train, {"model": {}})
    (wandb, trackio), (wandb_again, trackio_again) = ([one.run.options for one in found] for found in (first, again))
    assert wandb == wandb_again
    assert wandb == {"project": "ours", "group": "width", "tags": ("a", "b"), "name": "run", "id": wandb["id"],
                     "resume": "allow", "config": {"model": {}}, "dir": str(workdir)}  # fmt: skip
    assert (trackio["name"], trackio["resume"]) == ("run", "never")
    assert (trackio_again["name"], trackio_again["resume"]) == ("run-2", "allow")
    assert len(wandb["id"]) == 8 and wandb["id"] in (workdir / "trackers.json").read_text()
    other = epath.Path(tmp_path) / "other"
    other.mkdir()
    (new, _) = trackers.start(other, 0, dataclasses.replace(train, group=""), {})
    assert new.run.options["id"] != wandb["id"] and new.run.options["group"] is None


@pytest.mark.parametrize("content", [b"", b"[1]", b"\xff", b"[" * 100_000, b'{"wandb": 3}'])
def test_damaged_names_of_runs_elsewhere_are_refused_with_their_place(online, tmp_path, content):
    (tmp_path / "trackers.json").write_bytes(content)
    with pytest.raises(InputError, match=r"(?s)trackers\.json: .*\n  fix   remove it: online trackers then begin a"):
        trackers.start(epath.Path(tmp_path), 4, Train(steps=9, trackers=("wandb",)), {})


def test_a_damaged_file_is_kept_beside_what_could_be_read(tmp_path):
    train, said = Train(steps=9, trackers=()), []
    for name, good in (("metrics.jsonl", b'{"step": 1, "loss": NaN}\n'),
                       ("samples.jsonl", b'{"step": 2, "prompt": "a", "text": "b"}\n')):  # fmt: skip
        for number, bad in enumerate((b"{\n", b'{"step": "1", "loss": 2}\n', b'{"step": 3, "lo')):
            (tmp_path / name).write_bytes(good + bad)
            Log(epath.Path(tmp_path), 4, train, {}, said.append).close()
            assert (tmp_path / name).read_bytes() == good
            aside = f"{name}.damaged{number or ''}"
            assert (tmp_path / aside).read_bytes() == good + bad
            assert said.pop().endswith(f"{name}: line 2 cannot be read and is left out; {aside} is the file as it was")
            assert not said
    Log(epath.Path(tmp_path), 4, train, {}, said.append).close()
    assert not said


def test_a_tracker_that_fails_ends_no_run(online, tmp_path):
    said = []
    log = Log(epath.Path(tmp_path), 0, Train(steps=9, trackers=("wandb", "trackio")), {}, said.append)

    def broken(*given, **options):
        raise ConnectionError("no network")

    log.trackers[0].run.log = broken
    for step in (1, 2):
        log.write(step, {"loss": 1.0})
    log.close()
    assert said == ["warning: wandb failed (no network) and gets no more figures; metrics.jsonl has them all"]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2
    assert [tracker.name for tracker in log.trackers] == ["trackio"]


def test_that_an_online_tracker_keeps_old_points_is_said(online, tmp_path):
    train, said = Train(steps=9, trackers=("wandb",)), []
    for start in (0, 8, 4):
        log = Log(epath.Path(tmp_path), start, train, {}, said.append)
        log.write(start + 4, {"loss": 1.0, "accuracy": float("nan")})
        log.close()
    assert said == ["wandb keeps the points of steps after 4 that it has, and may leave out new ones"]
    assert online == [(4, {"loss": 1.0}), "finished", (12, {"loss": 1.0}), "finished", (8, {"loss": 1.0}), "finished"]


def test_a_tracker_that_cannot_be_imported(tmp_path, monkeypatch):
    (tmp_path / "trackio.py").write_text("import not_installed_anywhere\n")
    monkeypatch.syspath_prepend(tmp_path)
    trackers.check_installed(("trackio",))
    with pytest.raises(
        InputError, match=r"(?s)trackio cannot be imported: No module named 'not_installed_.*fix   inst"
    ):
        trackers.import_tracker("trackio")


def test_tensorboard_gets_scalars_and_does_not_import_torch(tmp_path):
    (tmp_path / "torch.py").write_text("HERE = 'found afterwards'\nclass Tensor: pass\n")
    (tmp_path / "run").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "run")],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "found afterwards\n"
    (events,) = (tmp_path / "run" / "tensorboard").iterdir()
    assert b"\n\x04loss" in events.read_bytes() and b"\x15\x00\x00\x80>" in events.read_bytes()  # tag, 0.25 as a float
