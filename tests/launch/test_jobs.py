"""The files in jobs/: they are what launch --print makes, and they start what they say."""

import os
import re
import shlex
import subprocess
import tomllib

import pytest
import yaml

from gspmd_lm import cli
from gspmd_lm.errors import STOPPED
from gspmd_lm.launch import launch_file, place, places, tpu
from tests.launched import ROOT

DERIVED = {"tpu_vm": "tpu_vm.sh", "queued_resource": "queued_resource.sh", "slurm": "slurm.sbatch",
           "gke": "gke_jobset.yaml"}  # fmt: skip


@pytest.mark.parametrize("name", DERIVED)
def test_a_file_is_what_launch_prints(name, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as end:
        cli.main(["main.py", "launch", f"jobs/{name}.yaml", "--print"])
    assert not end.value.code
    assert (ROOT / "jobs" / DERIVED[name]).read_text() == capsys.readouterr().out, (
        f"python main.py launch jobs/{name}.yaml --print > jobs/{DERIVED[name]}"
    )


def test_what_is_by_hand_is_tested_here():
    names = {path.name for path in (ROOT / "jobs").iterdir()}
    by_hand = {"Dockerfile", "skypilot.yaml", "xpk.sh"}
    assert names == {*by_hand, *DERIVED.values(), *(f"{name}.yaml" for name in DERIVED)}


def test_skypilot_starts_what_launch_does_on_the_same_slice(monkeypatch):
    monkeypatch.chdir(ROOT)
    job, task = (
        launch_file.read("jobs/queued_resource.yaml", {}),
        yaml.safe_load((ROOT / "jobs/skypilot.yaml").read_text()),
    )
    asked = task["resources"]
    assert asked["accelerators"] == f"tpu-{job.accelerator}" and asked["infra"].endswith(f"/{job.zone}")
    assert asked["use_spot"] is job.spot and asked["job_recovery"]["recover_on_exit_codes"] == [STOPPED]
    assert f"--runtime-version={asked['accelerator_args']['runtime_version']}" in places.find(job)._create("")
    assert set(task["setup"].splitlines()) < set(tpu._INSTALL.splitlines())
    assert shlex.split(task["run"].replace("\\\n", " ")) == [
        "exec", ".venv/bin/python", "main.py", "train", *place.with_cache(job)]  # fmt: skip


def test_xpk_starts_what_launch_does_on_the_same_slice(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    (tmp_path / "xpk").write_text('#!/bin/sh\nfor word in "$@"; do printf "%s\\0" "$word"; done\n')
    (tmp_path / "xpk").chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    called = subprocess.run(["bash", "jobs/xpk.sh"], capture_output=True, text=True, check=True).stdout.split("\0")
    asked = dict(word.removeprefix("--").partition("=")[::2] for word in called if word.startswith("--"))
    job, pods = launch_file.read("jobs/gke.yaml", {}), yaml.safe_load((ROOT / "jobs/gke_jobset.yaml").read_text())
    pod = pods["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert called[:2] == ["workload", "create"] and asked["tpu-type"] == job.accelerator
    assert asked["docker-image"] == job.image and asked["max-restarts"] == str(job.max_retries)
    assert asked["workload"] == job.name and asked["env"] == f"JAX_COORDINATOR_PORT={job.port}"
    assert asked["termination-grace-period-seconds"] == str(pod["terminationGracePeriodSeconds"])
    assert shlex.split(asked["command"]) == ["exec", *container["command"]]


@pytest.mark.parametrize("name", DERIVED)
def test_the_example_of_a_place_fits(name, monkeypatch):
    """Its mesh fills the slice, and its memory is there."""
    monkeypatch.chdir(ROOT)
    from gspmd_lm.cli import launch

    job = launch_file.read(f"jobs/{name}.yaml", {})
    launch_file.check(job, places.find(job).needed)
    said = []
    monkeypatch.setattr("gspmd_lm.cli.outputs.say", said.append)
    launch._check(job)
    assert any(line.startswith("memory: about") and "too much" not in line for line in said), said


@pytest.mark.parametrize("place", ["tpu-vm", "queued-resource"])
def test_a_printed_script_trains_on_each_host(cloud, place, tmp_path, monkeypatch):
    cloud.attempts('echo "step 9/9"')
    cloud.program("sleep", "#!/bin/sh")
    monkeypatch.chdir(tmp_path)
    script = places.find(cloud.job(place)).script()
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert cloud.started() == cloud.started(1) and cloud.started()[0].startswith("main.py train --config=tiny")
    assert not cloud.calls("delete")


def test_a_printed_job_of_slurm_trains_in_each_task(cloud, monkeypatch):
    cloud.attempts('echo "step 9/9"')
    monkeypatch.chdir(cloud.at)
    job = cloud.job("slurm", accelerator="h100:2x1", python=str(cloud.at / "trained"))
    (cloud.at / "logs").mkdir()
    done = subprocess.run(["bash", "-c", places.find(job).script()], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert len(cloud.started()) == len(cloud.started(1)) == 1
    assert (cloud.at / "logs/1.log").read_text() == "step 9/9\ngspmd_lm launch: ended with 0\n"


def test_the_pods_of_a_job_set_run_a_command_that_is_taken(tmp_path):
    pods = yaml.safe_load((ROOT / "jobs/gke_jobset.yaml").read_text())["spec"]["replicatedJobs"][0]["template"]["spec"]
    program, *flags = pods["template"]["spec"]["containers"][0]["command"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert program in project["project"]["scripts"]
    with pytest.raises(SystemExit) as end:
        flags = [flag.replace("gs://bucket", str(tmp_path)) for flag in flags]
        cli.main(["main.py", *flags, "--dry_run", "--platform=cpu", "--devices=8"])
    assert not end.value.code


def test_the_image_has_all_that_the_package_is_built_from():
    text = (ROOT / "jobs/Dockerfile").read_text()
    copied = {name for line in re.findall(r"^COPY (.+) \S+$", text, re.M) for name in line.split()}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert copied == {"pyproject.toml", "README.md", "LICENSE", *wheel["packages"],
                      *wheel["force-include"]}  # fmt: skip
    extras = set(project["project"]["optional-dependencies"])
    assert {"gcs", *re.findall("HARDWARE=(\\w+)", text)} <= extras
    assert list(project["project"]["scripts"]) == re.findall(r'ENTRYPOINT \["(.+)"\]', text)
