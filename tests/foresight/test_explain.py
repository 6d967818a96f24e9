"""explain and compare as a user types them, and what a run says of itself before it starts."""

import dataclasses
import json

import pytest

from gspmd_lm import cli
from gspmd_lm.errors import InputError
from gspmd_lm.foresight import explain, known_errors, report
from gspmd_lm.hardware import chips, target
from gspmd_lm.sharding import rules_file
from tests.quick import QUICK_FLAGS

SMALL = ["--set=model.layers=2", "--set=model.embed=64", "--set=model.mlp=128", "--set=data.seq=64", *QUICK_FLAGS]


@pytest.fixture
def run(cache, monkeypatch, capsys):
    """A function that runs the command line and returns its exit code, its output and its errors."""
    monkeypatch.setenv("GSPMD_LM_CACHE", str(cache.parent))

    def call(*argv):
        with pytest.raises(SystemExit) as ended:
            cli.main(["main.py", *argv])
        return ended.value.code, *capsys.readouterr()

    return call


def test_explain_says_what_there_is_to_say(run, tmp_path):
    files = [tmp_path / name for name in ("out.json", "out.html")]
    code, out, _ = run("explain", "--rules=fsdp8", "--target=cpu:8", *SMALL, f"--json={files[0]}", f"--html={files[1]}")
    assert code == 0
    for words in (
        "Memory per device",
        "Collectives",
        "all-gather",
        "reduce-scatter",
        "weights.embed",
        "no speed of their own",
    ):
        assert words.lower() in out.lower(), words
    found = json.loads(files[0].read_text())
    assert (found["schema"], found["target"], found["devices"]) == (report.SCHEMA, "cpu:8", 8)
    assert found["prediction"]["step_time_s"] is None and found["prediction"]["reason"] == explain.NOT_ON_CPU
    assert found["memory"]["fits"] is True and found["memory"]["limit_bytes"] is None
    assert all(one["rules"] for one in found["collectives"])
    assert files[1].read_text().startswith("<!doctype html>")


def test_a_prediction_for_a_chip_that_is_not_here(run, tmp_path):
    path = tmp_path / "out.json"
    # The program that other tests look at too.
    asked = (*SMALL, "--set=model.compute_dtype=bfloat16", "--set=data.packing=stream", "--set=data.batch=2")
    code, out, _ = run("explain", "fsdp2_tp4", "--target=v5e:2x4", *asked, f"--json={path}")
    assert code == 0 and "Step time" in out
    found = json.loads(path.read_text())
    prediction = found["prediction"]
    parts = ("matmul_s", "attention_s", "other_s", "exposed_communication_s", "exposed_host_copy_s")
    assert sum(prediction[name] for name in parts) == pytest.approx(prediction["step_time_s"], rel=1e-3)
    assert prediction["step_time_s"] > found["floor"]["compute_s"] > 0
    assert 0 < prediction["mfu"] < 1
    assert prediction["missing_flops_share"] == 0.0 and found["unpriced"] == {}
    assert prediction["error"] == known_errors.known_error(known_errors.Kind("v5e", False, "xla"))
    assert found["timeline"] and {span["part"] for span in found["timeline"]} == {"forward", "backward"}
    assert "libtpu" in found["versions"]


def test_compare_ranks(run, tmp_path):
    path, same = tmp_path / "out.json", tmp_path / "same.yaml"
    same.write_text(rules_file.load("fsdp8").text)  # test_api.py compares two programs
    code, out, _ = run("compare", "fsdp8", str(same), "--target=cpu:8", *SMALL, f"--json={path}")
    assert code == 0 and "fsdp8" in out and "same" in out
    assert [one["rules"].rsplit("/")[-1] for one in json.loads(path.read_text())] == ["fsdp8.yaml", "same.yaml"]


@pytest.mark.parametrize(
    ("argv", "said", "fix"),
    [
        (["explain", "--target=cpu:8"], "explain needs --rules", "--rules=fsdp8"),
        (["compare", "fsdp8"], "compare needs --target", "--target=v5p:2x2x2"),
        (["explain", "fsdp8", "--target=v5p"], "--target=v5p: no such form", "v5p:4x4x4"),
        (
            ["explain", "tp8", "--target=v5p:4x4x4"],
            "its sizes multiply to 8, but the number of devices is 64",
            "--set rules.mesh.data=8 --set rules.rules.batch=data",
        ),
        (["explain", "tp9", "--target=cpu:8"], "tp9: no such file", "did you mean"),
        (["explain", "tp8", "fsdp8", "--target=cpu:8", "--export=x"], "holds one executable", "one rules file"),
        (["explain", "tp8", "--target=cpu:8", "--json=no/such/folder.json"], "there is no folder", "make it"),
        (
            ["explain", "tp8", "--target=cpu:8", "--set=model.kv_heads=2"],
            "kv_heads=2 does not divide",
            "--mesh=tensor=2",
        ),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_compiled(run, monkeypatch, argv, said, fix):
    monkeypatch.setattr("gspmd_lm.foresight.compile.subprocess.run", None)
    code, _, errors = run(*argv)
    assert code == 2 and said in errors and fix in errors


@pytest.mark.long
def test_an_exported_step_is_that_of_its_config_alone(run, tmp_path):
    """cli/test_commands.py trains with one."""
    path, data = tmp_path / "step", ("--set=data.source=random:64", "--set=data.held_out=0.0")
    code, _, errors = run("explain", "fsdp8", "--target=cpu:8", *SMALL, *data, f"--export={path}")
    assert code == 0, errors
    train = ("--rules=fsdp8", *SMALL, *data, "--steps=2")
    code, _, errors = run(*train, "--set=model.layers=3", f"--executable={path}", f"--workdir={tmp_path / 'b'}")
    assert code == 2 and "make it anew with explain --export" in errors


@pytest.mark.long
def test_a_run_says_what_it_will_cost_and_one_that_cannot_fit_does_not_start(run, tmp_path, monkeypatch):
    """test_memory.py has memory of just the bytes that a program needs."""
    data = "--set=data.source=random:64", "--set=data.held_out=0.0"

    found = []
    for workdir, usable_bytes in (("large", 10**9), ("small", 10**6)):  # both programs name this line, and are one
        small = dataclasses.replace(chips.CHIPS["h100"], usable_hbm_bytes=usable_bytes)
        monkeypatch.setattr(target, "from_devices", lambda *_, chip=small: target.Target("h100:8", "gpu", chip, (1, 8)))
        found.append(run("--rules=fsdp8", *SMALL, *data, "--steps=1", f"--workdir={tmp_path / workdir}"))
    (code, out, errors), refused = found
    assert code == 0, errors
    before, _, _ = out.partition("step 1/1")
    said = before[before.index("train step: ") :].splitlines()[1:]
    said = [line for line in said if not line.startswith("warning: data limits the steps")]  # as on a busy machine
    assert [line for line in said if len(line) > 80] == []
    assert [line.split()[0] for line in said if line[0] != " "][:4] == ["saves", "memory", "network", "time"]
    code, out, errors = refused
    assert code == 2 and "step 1/1" not in out and not (tmp_path / "small" / "metrics.jsonl").exists()
    assert "the layout does not fit, and nothing was started" in errors and "Memory per device" in errors


def test_every_layout_is_checked_first(request_of, monkeypatch):
    monkeypatch.setattr(explain, "programs", None)
    wanted = request_of("fsdp8")
    wrong = request_of("tp8", "cpu:8").rules
    with pytest.raises(InputError, match="its sizes multiply to 8, but the number of devices is 4"):
        explain.reports(wanted.config, [wanted.rules, wrong], explain.Target("cpu:4", "cpu", None, (4,)))
