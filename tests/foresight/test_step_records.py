"""Records of steps: what a run says and keeps, how they are shown, and what they make of a chip."""

import dataclasses
import io
import json
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import sample
from etils import epath
from rich.console import Console

from gspmd_lm import cli, files, session
from gspmd_lm.errors import InputError
from gspmd_lm.foresight import step_records
from gspmd_lm.foresight.step_records import StepRecord
from gspmd_lm.hardware import target as targets
from gspmd_lm.hardware.chips import CHIPS
from gspmd_lm.hardware.chips.reading import read_chip
from gspmd_lm.hardware.network import Network
from gspmd_lm.runtime.startup import Runtime
from gspmd_lm.train.programs import MeasuredStep
from gspmd_lm.workdir import layout

V5E = CHIPS["v5e"]
RECORD = StepRecord(
    date="2026-11-29T10:00:00+00:00", config="tiny", rules="fsdp8", mesh={"fsdp": 8}, target="v5e:2x4", chip="v5e",
    chip_figures=step_records.figures(V5E), device="TPU v5e", versions={"jax": "0.10.2"}, workdir="/runs/a",
    predicted_s=1.15, predicted_parts_s={"matmuls": 1.0, "other compute": 0.15}, measured_s=1.21, wait_s=0.0, steps=40,
)  # fmt: skip
TRACED = dataclasses.replace(
    RECORD, workdir="/runs/b", rules="tp8", traced_s=1.3, slowdowns={"matmul": 2.0, "ici": 8.0},
    measured_parts_s={"matmuls": 1.1, "other compute": 0.1, "gaps": 0.1},
)  # fmt: skip


def test_a_run_says_how_far_its_prediction_was_off():
    assert RECORD.describe() == "step: measured 1.21 s, predicted 1.15 s (-5%)"
    assert TRACED.describe() == (
        "step: measured 1.21 s, predicted 1.15 s (-5%)\n"
        "traced steps took 1.3 s each; measured against predicted: matmuls +100 ms, gaps\n"
        "  +100 ms, other compute -50 ms"
    )
    unknown = dataclasses.replace(TRACED, predicted_s=None, predicted_parts_s={}, wait_s=0.5)
    assert dataclasses.replace(unknown, traced_s=None).describe() == ""
    assert unknown.describe() == (
        "step: measured 1.21 s, of which 500 ms waiting for rows\n"
        "traced steps took 1.3 s each: matmuls 1.1 s, other compute 100 ms, gaps 100 ms"
    )


def test_a_chip_is_corrected_by_runs():
    place = targets.parse("v5e:2x2")
    one = step_records.correct(place, [RECORD, TRACED], "--measured=b").chip
    assert dict(one.slowdowns) == pytest.approx({"matmul": 2.0, "ici": 8.0})
    assert one.note == "corrected by --measured=b (times as long: matmul 2, collectives over ici 8)"
    other = dataclasses.replace(TRACED, slowdowns={"matmul": 0.5, "attention": 3.0})
    mean = step_records.correct(place, [TRACED, other], "-").chip
    assert dict(mean.slowdowns) == pytest.approx({"matmul": 1.0, "ici": 8.0, "attention": 3.0})
    twice = step_records.correct(dataclasses.replace(place, chip=one), [TRACED], "-").chip
    assert dict(twice.slowdowns) == pytest.approx({"matmul": 4.0, "ici": 64.0})
    alike = step_records.correct(place, [dataclasses.replace(RECORD, wait_s=0.06)], "-").chip
    assert {*alike.slowdowns.values()} == {1.0} and {"matmul", "attention", "other", "ici"} <= {*alike.slowdowns}
    larger = next(targets.larger(dataclasses.replace(place, chip=one)))
    assert larger.chip.slowdowns == one.slowdowns and larger.devices > place.devices


@pytest.mark.parametrize(
    ("target", "records", "message"),
    [
        ("cpu:8", [RECORD], r"cpu:8 has no times to correct\n  fix   --chip"),
        ("h100:8", [RECORD], r"predicts nothing for h100, but for v5e\n  fix"),
        ("v5e:2x2", [dataclasses.replace(RECORD, predicted_s=None, chip="")], r"but for v5e:2x4 without a --chip\n"),
        ("v5e:2x2", [dataclasses.replace(RECORD, chip_figures="0")], r"with other figures of v5e than those of now\n"),
    ],
)
def test_runs_that_say_nothing_of_a_chip_are_refused(target, records, message):
    with pytest.raises(InputError, match=f"--measured=a: .*{message}"):
        step_records.correct(targets.parse(target), records, "--measured=a")


def test_figures_of_a_chip_are_those_of_its_description():
    text = step_records.figures(V5E)
    assert text == step_records.figures(dataclasses.replace(V5E, note="n", slowdowns={"ici": 2.0}, usable_hbm_bytes=1))
    assert text != step_records.figures(dataclasses.replace(V5E, hbm_bytes_per_s=1.0))


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """The workdirs of two runs whose records are kept, and the folder of all records."""
    monkeypatch.setenv("GSPMD_LM_RUNS", str(tmp_path / "all"))
    for number, record in enumerate((TRACED, RECORD)):
        folder = tmp_path / record.workdir[1:]
        folder.mkdir(parents=True)
        step_records.keep(dataclasses.replace(record, workdir=str(folder), date=f"2026-11-2{number}T10:00:00+00:00"))
    return tmp_path


def test_records_are_found_by_workdir_by_folder_and_in_the_folder_of_all(kept):
    (one,) = step_records.read_records([str(kept / "runs" / "b")])
    assert dataclasses.replace(one, date="", workdir="") == dataclasses.replace(TRACED, date="", workdir="")
    for names in ((), [str(kept / "runs")]):
        assert [record.rules for record in step_records.read_records(names)] == ["tp8", "fsdp8"]
    step_records.keep(one)  # of the same run: it takes the place of the one before
    assert len(step_records.read_records()) == 2
    path = kept / "runs" / "a" / layout.STEP
    path.write_text(path.read_text().replace("1.21", "9.99"))
    with pytest.raises(InputError, match=rf"{path}: its sha256 has changed"):
        step_records.read_records([str(kept / "runs" / "a")])
    files.replace_json(path, {"schema": 0})
    with pytest.raises(InputError, match=rf"{path}: not a record of a step, or one of another version\n  fix   delete"):
        step_records.read_records([str(path)])
    with pytest.raises(InputError, match=r"nothing: no step of a run is recorded here\n  fix   train for three steps"):
        step_records.read_records([str(kept / "nothing")])


def test_errors_shows_each_run_and_the_errors_of_each_chip(kept, capsys):
    step_records.keep(dataclasses.replace(RECORD, workdir=str(kept / "runs"), chip="", predicted_s=None))
    with pytest.raises(SystemExit) as end:
        cli.main(["main.py", "errors", f"--json={kept / 'e.json'}"])
    out, _ = capsys.readouterr()
    assert end.value.code == 0
    assert "tiny under fsdp8" in out and "1.15 s" in out and "-5%" in out and "matmuls +100 ms" in out
    assert "of 1 run nothing was predicted" in out and "not traced" in out
    assert "v5e: 5.0% in the mean of 2 runs, 5.0% at most" in out
    plain = json.loads((kept / "e.json").read_text())
    assert plain["mean_error"] == plain["largest_error"] == pytest.approx(0.0496, abs=1e-3)
    assert [run["error"] for run in plain["runs"]] == [pytest.approx(-0.0496, abs=1e-3)] * 2 + [None]


@pytest.fixture
def begun():
    """A session whose console keeps what it says."""
    machine = Runtime("cpu", "cpu", 8, 0, 1)
    return session.Session(None, None, machine, [], Console(file=io.StringIO(), width=240), None)


def test_a_trace_or_a_folder_that_is_damaged_costs_a_run_nothing_but_warnings(begun, tmp_path, monkeypatch):
    monkeypatch.setenv("GSPMD_LM_RUNS", str(tmp_path / "file" / "runs"))
    (tmp_path / "file").write_text("in the way")
    (tmp_path / "x.xplane.pb").write_bytes(b"not a trace")
    measured = MeasuredStep(epath.Path(tmp_path), 20.0, 0.0, 9, tmp_path / "x.xplane.pb", 2)
    network = Network(V5E, ((0, 0, 0),), (0,), (0,), {"data": 1})
    built = SimpleNamespace(mesh=jax.make_mesh((1,), ("data",), devices=jax.devices()[:1]))
    session._compare_step(begun, SimpleNamespace(as_text=lambda: "HloModule m"), sample.LLAMA, network, built, measured)
    first, second, third = begun.console.file.getvalue().splitlines()
    assert first.startswith("warning: the trace cannot be read, and the parts of a step are not known (")
    assert second.startswith("warning: the record of the step is not kept (") and "file" in second
    assert third.startswith("step: measured 20 s, predicted ")


def test_a_step_that_cannot_be_predicted_is_trained_all_the_same(begun, monkeypatch):
    def fail(*_):
        raise KeyError("an opcode")

    monkeypatch.setattr(session.explain, "report", fail)
    monkeypatch.setattr(session.compile, "describe_compiled", lambda *_: None)
    monkeypatch.setattr(session, "read_train", lambda *_: None)
    mesh = SimpleNamespace(devices=np.array(jax.devices()[:1]))
    built = SimpleNamespace(mesh=mesh, config=None, task=None, rules=None, arrays=None)
    report = session._report_step(built, [], begun)(None, None, {}, 0.0)
    assert report.lines == "warning: nothing is predicted (KeyError: 'an opcode')" and report.flops == 0


def test_a_file_may_state_what_a_run_has_measured_of_a_chip(tmp_path):
    (tmp_path / "my.yaml").write_text("name: my\nlike: v5e\nslowdowns: [{matmul: 1.2, ici: 3.0}, measured]\n")
    assert dict(read_chip(tmp_path / "my.yaml").slowdowns) == {"matmul": 1.2, "ici": 3.0}
