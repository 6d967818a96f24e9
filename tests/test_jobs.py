"""The files in jobs/, run with stand-ins of gcloud and srun that start two processes on this machine."""

import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
import tomllib

import pytest
import yaml

from gspmd_lm import cli
from gspmd_lm.sharding import rules_file
from tests.launched import FROM_OUTSIDE, ROOT, free_port
from tests.quick import QUICK_FLAGS

TRAIN = [
    "--platform=cpu", "--devices=2", "--config=tiny", "--rules=fsdp", "--set=data.source=random:64",
    "--set=data.held_out=0.0", "--set=model.vocab=128", "--set=model.layers=1", "--set=train.steps=2",
    "--set=train.trackers=[]", *QUICK_FLAGS,
]  # fmt: skip
TOGETHER = "mesh fsdp=4 on 4 simulated cpu devices"  # two of each process
# How the two find each other is what Slurm says, also for the workers of a TPU slice: they would ask its metadata.
TWO = """
for index in 0 1; do
  ( export SLURM_JOB_ID=7 SLURM_STEP_NODELIST=127.0.0.1 SLURM_NTASKS=2 SLURM_PROCID=$index SLURM_LOCALID=0
    export JAX_COORDINATOR_PORT=$PORT
    {each} ) &
  pids+=($!)
done
failed=0
for pid in "${{pids[@]}}"; do wait "$pid" || failed=1; done
exit $failed
"""
GCLOUD = """
case "$*" in
  *"tpu-vm ssh"*)
    command=${{@: -1}}; command=${{command#--command=}}
    {two}
    ;;
  *"queued-resources describe"*--format*)
    state=$(head -1 "$STUBS/states"); sed -i 1d "$STUBS/states"; echo "$state" ;;
  *"queued-resources describe"*) test -e "$STUBS/created" ;;
  *"queued-resources create"*) echo "$*" > "$STUBS/created" ;;
esac
"""
WORKER = 'export HOME=$STUBS/worker$index; mkdir -p "$HOME/.local/bin"; cp "$STUBS/uv" "$HOME/.local/bin/"; cd "$HOME"; bash -c "$command"'  # noqa: E501
UV = """
case $1 in
  venv)
    mkdir -p .venv/bin; printf '#!/bin/sh\\nexec "%s" "$@"\\n' "$PYTHON" > .venv/bin/python; chmod +x .venv/bin/python
    ;;
  pip) echo "$*" >> "$STUBS/installed" ;;
esac
"""
PIP = 'echo "$*" >> "$STUBS/installed"'


@pytest.fixture
def machine(tmp_path):
    """Runs a file of jobs/ in a shell whose commands are stand-ins. Returns its exit code and what it printed."""
    stubs = tmp_path / "stubs"
    stubs.mkdir()
    (stubs / "states").write_text("WAITING_FOR_RESOURCES\nPROVISIONING\nACTIVE\n")
    for name, code in {
        "gcloud": GCLOUD.format(two=TWO.format(each=WORKER)),
        "srun": 'echo "$*" > "$STUBS/srun_was_given"; shift\n' + TWO.format(each='"$@"'),
        "uv": UV,
        "python3": PIP,
        "sleep": "true",
    }.items():
        (stubs / name).write_text(f"#!/usr/bin/env bash\n{code}")
        (stubs / name).chmod(stat.S_IRWXU)

    def run(job, **variables):
        jobs = tmp_path / "jobs"
        shutil.copytree(ROOT / "jobs", jobs, dirs_exist_ok=True)
        filled, count = re.subn(r"(?m)^TRAIN=\(.*\)$", f"TRAIN=({shlex.join(TRAIN)})", (jobs / job_of(job)).read_text())
        assert count == 1
        (jobs / job_of(job)).write_text(filled)
        clean = {name: value for name, value in os.environ.items() if not name.startswith(FROM_OUTSIDE)}
        environment = clean | {
            "XLA_FLAGS": os.environ["XLA_FLAGS"], "PYTHON": sys.executable,
            "STUBS": str(stubs), "PATH": f"{stubs}:{os.environ['PATH']}", "PORT": str(free_port()),
            "GSPMD_LM_CACHE": str(tmp_path / "cache"), "WORKDIR": str(tmp_path / "runs/one"), **variables,
        }  # fmt: skip
        done = subprocess.run(
            ["bash", jobs / job], cwd=ROOT, env=environment, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, timeout=600,
        )  # fmt: skip
        return done.returncode, done.stdout

    return run


def job_of(job):
    """The file that says what is trained."""
    return "tpu_vm.sh" if job == "queued_resource.sh" else job


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """This package as a repository that workers can clone."""
    folder = tmp_path_factory.mktemp("repository")
    for name in ("gspmd_lm", "configs", "rules"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "main.py", folder)
    git = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "--quiet", "--initial-branch=main"], ["add", "."], ["commit", "--quiet", "-m", "all"]):
        subprocess.run([*git, *command], check=True)
    return str(folder)


ASKED = dict.fromkeys(("PROJECT", "ZONE", "TPU", "ACCELERATOR", "RUNTIME_VERSION"), "x")


@pytest.fixture
def noted(tmp_path):
    """A stand-in for Python, and a function that says whether each process was given the training with `flags`."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$SLURM_PROCID $*" >> "$STUBS/started"\n')
    python.chmod(stat.S_IRWXU)

    def started(*flags):
        command = " ".join(["main.py", *TRAIN, *flags])
        return sorted((tmp_path / "stubs/started").read_text().splitlines()) == [f"{n} {command}" for n in (0, 1)]

    return str(python), started


def test_slurm_starts_the_command_in_each_process(machine, noted, tmp_path):
    python, started = noted
    code, said = machine("slurm.sbatch", PYTHON=python)
    assert code == 0, said
    assert started(f"--workdir={tmp_path}/runs/one")
    assert (tmp_path / "stubs/srun_was_given").read_text().startswith("--kill-on-bad-exit=1 ")


def test_a_queued_slice_is_waited_for_and_starts_the_command_on_each_worker(machine, noted, repository, tmp_path):
    python, started = noted
    slice_ = {"REPOSITORY": repository, "WORKDIR": f"{tmp_path}/runs/two", "COMPILED": f"{tmp_path}/compiled"}
    code, said = machine("queued_resource.sh", **ASKED, **slice_, PYTHON=python)
    assert code == 0, said
    assert re.search(r"x: WAITING_FOR_RESOURCES\n.*x: PROVISIONING\n.*x: ACTIVE\n", said)
    assert "--spot" in (tmp_path / "stubs/created").read_text()
    assert (tmp_path / "stubs/installed").read_text().count("pip install --quiet -e .[tpu,gcs]") == 2
    assert started(f"--workdir={tmp_path}/runs/two", f"--compile_cache={tmp_path}/compiled")


@pytest.mark.slow
def test_a_slice_that_is_made_anew_starts_warm(machine, repository, tmp_path):
    asked = ASKED | {"REPOSITORY": repository}
    code, said = machine("queued_resource.sh", **asked)
    assert code == 0 and TOGETHER in said and (tmp_path / "runs/one/checkpoints/2").is_dir(), said
    # The slice was preempted: another one, whose disks are empty, takes the same command.
    for worker in ("worker0", "worker1"):
        shutil.rmtree(tmp_path / "stubs" / worker)
    shutil.rmtree(tmp_path / "runs/one")
    (tmp_path / "stubs/states").write_text("ACTIVE\n")
    code, said = machine("queued_resource.sh", **asked)
    assert code == 0, said
    assert f"compile cache {tmp_path}/runs/compiled" in said and not re.search(r"\b0 found", said)


def test_a_slice_that_was_preempted_is_said_so(machine, tmp_path):
    (tmp_path / "stubs/states").write_text("SUSPENDED\n")
    (tmp_path / "stubs/created").touch()
    code, said = machine("queued_resource.sh", PROJECT="p", ZONE="z", TPU="t", ACCELERATOR="a", RUNTIME_VERSION="v")
    assert code == 1 and "queued-resources delete t --project=p --zone=z --force" in said


@pytest.mark.parametrize("job", ["queued_resource.sh", "tpu_vm.sh", "slurm.sbatch"])
def test_what_is_not_filled_in_is_asked_for(machine, job):
    code, said = machine(job, WORKDIR="")
    assert code != 0 and "fill it in" in said


@pytest.mark.slow
def test_slurm_trains_and_goes_on_in_the_next_job(machine, tmp_path):
    for said_last in ("step 2/2", "nothing to do"):
        code, said = machine("slurm.sbatch", PYTHON=sys.executable)
        assert code == 0 and said_last in said, said
        assert TOGETHER in said and (tmp_path / "runs/one/checkpoints/2").is_dir()


def test_the_pods_of_a_job_set_run_a_command_that_is_taken(tmp_path):
    text = (ROOT / "jobs/gke_jobset.yaml").read_text()
    for name in re.findall(r"#   export (\w+)=", text):
        text = text.replace(f"${{{name}}}", f"{tmp_path}/{name}" if name in ("WORKDIR", "COMPILED") else "2")
    assert "${" not in text
    pods = yaml.safe_load(text)["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    program, *flags = pods["containers"][0]["command"]
    (layout,) = (flag.partition("=")[2] for flag in flags if flag.startswith("--rules="))
    assert program == "gspmd-lm" and rules_file.load(layout).fill(8).problems == ()
    with pytest.raises(SystemExit) as end:
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
