"""What is wrong with a launch is said before anything is asked for."""

import re
import shutil

import pytest

from gspmd_lm import api, cli
from gspmd_lm.errors import InputError
from gspmd_lm.foresight import explain
from gspmd_lm.hardware import target as targets
from gspmd_lm.launch import archive, checks, places
from gspmd_lm.launch.job import Job
from gspmd_lm.plan.estimate import Estimator
from gspmd_lm.train import decoder
from gspmd_lm.units import human_bytes
from tests.launched import ROOT

FILE = """
place: queued-resource
zone: us-west4-a
accelerator: v5litepod-8
workdir: gs://bucket/runs/one
train: --config=tiny --rules=fsdp8
"""


def launch(*arguments):
    with pytest.raises(SystemExit) as end:
        cli.main(["main.py", "launch", *arguments])
    return end.value.code


@pytest.fixture
def file(cloud, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "one.yaml").write_text(FILE)
    cloud.attempts('echo "step 9/9"')
    return cloud


WRONG = {
    "a place that does not exist": (["--place=tpu-vn"], "place: must be", "did you mean tpu-vm?"),
    "keys that are missing": (["--workdir=", "--zone="], "is empty"),
    "a budget of nothing": (["--max_usd=0"], "max_usd: must be above 0"),
    "hours of nothing": (["--max_hours=0"], "max_hours: must be above 0"),
    "a price that is not known": (["--accelerator=v4-16", "--max_usd=3"], "the price of v4-16 is not known"),
    "a slice that does not exist": (["--accelerator=v5litepod-17"], "accelerator: v5litepod-17", "v5litepod-16 (4x4)"),
    "a chip that does not exist": (["--accelerator=v5f:4x4"], "accelerator: v5f:4x4: unknown chip"),
    "no TPU": (["--accelerator=h100:8"], "accelerator: h100:8: no TPU"),
    "several slices of one VM": (
        ["--place=tpu-vm", "--accelerator=2@v5e:2x2"],
        "has no 2 slices",
        "place: queued-resource",
    ),
    "a chip that has no TPU VMs": (["--accelerator=tpu7x:2x2x1"], "has no tpu7x", "place: gke"),
    "a mesh that does not fill the slice": (["--accelerator=v5litepod-16"], "multiply to 8", "devices is 16"),
    "a mesh that does not divide": (["--", "--rules=tp8", "--mesh=tensor=3"], "multiply to 3"),
    "a layout that is too large": (["--", "--config=llama3_8b"], "needs about", "finds a layout that fits"),
    "a config that is wrong": (["--", "--set=model.heads=3"], "model.heads"),
    "a flag that train lacks": (["--", "--stepps=3"], "--stepps: train has no such flag"),
    "a name that is none": (["--", "rules"], "train: rules: flags begin with --"),
    "a second workdir": (["--", "--workdir=runs/x"], "train: --workdir=runs/x", "move it to workdir"),
    "a workdir that is lost with the slice": (["--workdir=runs/x"], "the workdir is in a bucket"),
    "a name for no slice": (["--name=Llama_3"], "name: 'Llama_3' is no name"),
    "something unknown of the job": (["--assume=notices=3", "--print"], "assume: notices=3: no such key", "notice_s"),
    "a time that Slurm does not know": (["--time=abc", "--print"], "time: 'abc' is no time limit", "08:00:00"),
    "a port that no machine has": (["--port=99999999"], "port: must be"),
    "a file that no host would find": (["--", "--rules=../rules.yaml"], "lies outside of this folder"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_input_asks_for_nothing(file, capsys, case):
    arguments, *said = WRONG[case]
    shutil.copy(ROOT / "rules/fsdp8.yaml", file.at.parent.parent / "rules.yaml")
    assert launch("one.yaml", *arguments) == 2
    error = capsys.readouterr().err
    assert all(words in error for words in said), error
    assert not (file.at / "calls").exists()


def test_all_missing_keys_are_in_one_message(file, capsys):
    assert launch("--place=queued-resource") == 2
    assert "workdir, accelerator, zone missing" in capsys.readouterr().err


def test_a_key_that_does_not_exist_and_a_value_of_another_kind_are_in_one_message(file, capsys):
    file.at.with_name("one.yaml").write_text(f"{FILE}zones: z\nspot: 3\n")
    assert launch("one.yaml") == 2
    error = capsys.readouterr().err
    assert "zones: unknown key (did you mean zone?)" in error and "spot: must be true or false, got 3" in error


def test_a_bucket_that_may_not_be_written_is_said_before_the_request(file, capsys):
    file.behave(bucket="refused")
    assert launch("one.yaml") == 2
    error = capsys.readouterr().err
    assert "gs://bucket/runs/one cannot be written" in error and "storage.objects.create" in error
    assert file.calls("create") == []


NOWHERE = {
    "nothing in the bucket": (
        {"data": "missing"},
        "gs://bucket/data/*.jsonl",
        "nothing is to be read",
        "matched no obj",
    ),
    "an empty folder of a bucket": ({"data": "empty"}, "gs://bucket/data", "nothing is to be read at", "it is empty"),
    "a file of this machine": ({}, "texts/*.txt", "is not on the hosts of a new slice", "gcloud storage cp"),
}


@pytest.mark.parametrize("case", NOWHERE)
def test_data_that_no_host_would_find_is_said_before_the_request(file, capsys, case):
    behaviour, source, *said = NOWHERE[case]
    file.behave(**behaviour)
    assert launch("one.yaml", "--", f"--set=data.source={source}") == 2
    error = capsys.readouterr().err
    assert f"data.source: {source}" in error or f"read at {source}" in error
    assert all(words in error for words in said), error
    assert file.calls("create") == []


def test_data_that_is_there_or_cannot_be_looked_up(file, capsys):
    job, said = file.job("tpu-vm"), {}
    for source in ("gs://bucket/data/*.jsonl", "hf://datasets/x/y", "random:64"):
        config = api.load_config("tiny", [f"data.source={source}"])
        said[source] = list(checks.check_data(config, places.find(job)))
    assert said == {"gs://bucket/data/*.jsonl": [], "random:64": [],
                    "hf://datasets/x/y": ["data.source: hf://datasets/x/y was not looked up"]}  # fmt: skip
    assert file.calls("gs://bucket/data/*.jsonl") == [] and "ls" in (file.at / "calls").read_text()
    (note,) = checks.check_data(api.load_config("tiny", ["data.source=/data"]), places.find(file.job("gke", image="i")))
    assert note == "data.source: /data must be on each host: launch does not send it"


def test_nodes_of_slurm_find_what_is_here(file, tmp_path):
    (tmp_path / "a.txt").write_text("text")
    place = places.find(file.job("slurm", accelerator="h100:2x1"))
    assert list(checks.check_data(api.load_config("tiny", [f"data.source={tmp_path}/*.txt"]), place)) == []
    with pytest.raises(InputError, match="there is no such file"):
        list(checks.check_data(api.load_config("tiny", [f"data.source={tmp_path}/*.json"]), place))


@pytest.mark.long
def test_a_config_that_a_run_in_the_bucket_may_have_is_said(file, capsys):
    said = "gs://bucket/runs/one was not looked into: if a run is there, its config will be used"
    for train, expected in (("--rules=fsdp8", True), ("--config=tiny --rules=fsdp8", False)):
        file.behave(states=["ACTIVE"])
        assert launch("one.yaml", f"--train={train}", "--autodelete") == 0, capsys.readouterr()
        assert (said in capsys.readouterr().err) == expected


def test_a_tool_that_is_not_there_is_named(file, capsys, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert launch("one.yaml") == 2
    assert "gcloud and tar not found" in capsys.readouterr().err


def test_the_files_of_this_folder_and_the_code_are_sent(file, capsys, monkeypatch):
    shutil.copy(ROOT / "rules/fsdp8.yaml", file.at.with_name("mine.yaml"))
    file.behave(states=["ACTIVE"])
    assert launch("one.yaml", "--autodelete", "--", "--rules=mine.yaml") == 0, capsys.readouterr()
    sent = file.at / "host1/gspmd_lm_launch/code"
    assert (sent / "mine.yaml").read_text() == (ROOT / "rules/fsdp8.yaml").read_text()
    assert (sent / "gspmd_lm/launch/loop.py").exists() and (sent / "pyproject.toml").exists()
    assert not list(sent.rglob("__pycache__"))
    assert file.started() == ["main.py train --config=tiny --rules=fsdp8 --rules=mine.yaml "
                              "--workdir=gs://bucket/runs/one --compile_cache=gs://bucket/runs/compiled"]  # fmt: skip
    assert (file.at.parent / "runs/one.launch/1/0.log").read_text().startswith("step 9/9")
    assert "the run is finished" in capsys.readouterr().out


def test_a_file_beside_the_code_is_sent_and_one_of_the_code_is_not_sent_twice(monkeypatch, tmp_path):
    checkout = tmp_path / "checkout"
    for name in ("gspmd_lm", "rules"):
        (checkout / name).mkdir(parents=True)
    for name in ("own.yaml", "tokens.json", "mine.chip.yaml", "step.bin", "rules/mine.yaml"):
        (checkout / name).touch()
    monkeypatch.setattr("gspmd_lm.versions.PACKAGE", checkout / "gspmd_lm")
    monkeypatch.chdir(checkout)
    for train in (
        "--config=own.yaml --rules=rules/mine.yaml --set=data.tokenizer=tokens.json --chip=mine.chip.yaml "
        "--executable=step.bin",
        "--config own.yaml --rules rules/mine.yaml --set data.tokenizer=tokens.json --chip mine.chip.yaml "
        "--executable step.bin",
    ):
        assert archive.own_files(Job(train=train)) == ["own.yaml", "tokens.json", "mine.chip.yaml", "step.bin"]
    assert archive.own_files(Job(train="")) == []
    with pytest.raises(InputError, match="is all of this folder"):
        archive.own_files(Job(train="--config=."))


def test_memory_is_that_of_the_attention_kernel_that_will_run():
    """XLA's attention would hold all scores, and launch would refuse a layout that fits."""
    config, target = api.load_config("llama3_8b", ["data.batch=256", "data.seq=8192"]), targets.parse("v5e:16x16")
    rules = api.load_rules("fsdp_tp")
    settled = explain.settle_layout(decoder.task(config), rules, target)
    needed = Estimator(config, target).estimate(settled).peak_bytes
    lines = checks.check_layout(config, rules, target, Job(place="tpu-vm", accelerator="v5e:16x16"))
    assert next(lines).startswith(f"memory: about {human_bytes(needed)} a device")


def lines_of_job(**keys):
    config, job = api.load_config("llama3_8b", ["train.steps=10000"]), Job(accelerator="v5e:16x16", **keys)
    rules = api.load_rules("fsdp_tp", overrides=["rules.remat=block", "rules.microbatches=4"])
    return "\n".join(checks.check_layout(config, rules, job.target, job))


def test_the_time_and_price_of_the_job_are_said_beforehand():
    known = "preemptions_per_day=12,away_s=600,notice_s=3"
    said = lines_of_job(spot=True, usd_per_hour=0.6, assume=known, max_usd=100.0, max_hours=2.0)
    found = re.search(r"job: about ([\d.]+) days, ([\d,]+) dollars, goodput ([\d.]+)% for 10,000 steps", said)
    days, usd, goodput = (float(figure.replace(",", "")) for figure in found.groups())
    # Of 256 chips, which are away for ten minutes twelve times a day.
    assert usd == pytest.approx(days * 24 / (1 + 12 * 600 / 86400) * 256 * 0.6, rel=0.01)
    assert 50 < goodput < 90
    assert re.search(r"checkpoints: 96.4 GB, every \d+m\d\ds; each is whole after .*, too late for a notice of 3", said)
    assert "max_hours: 2 h end before the job does" in said
    assert "max_usd: 100.00 are spent before the job ends" in said


def test_what_is_not_known_of_spot_is_said():
    assert "without preemptions, since assume does not say" in lines_of_job(spot=True)
    assert "preemptions_per_day" not in lines_of_job()
    assert "max_usd" not in lines_of_job(max_usd=1e9)


@pytest.mark.long
def test_an_elastic_job_is_checked_with_the_rules_that_its_slice_will_have(file, capsys):
    """A mesh of eight does not fill sixteen chips, which is refused where the job is not elastic."""
    file.behave(states=["ACTIVE"])
    assert launch("one.yaml", "--accelerator=v5litepod-16", "--elastic", "--autodelete") == 0
    said = capsys.readouterr().err
    assert "--elastic: 16 devices: mesh data=2 x fsdp=8, in place of fsdp=8; a step has the same 16 rows" in said
    assert "memory: about" in said and "--rules=fsdp8 --elastic --workdir" in file.started()[0]
