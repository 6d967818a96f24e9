"""Whole runs, as people start them: the README's command, several processes, many runs in a row, the wheel."""

import contextlib
import json
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import time
import venv
import zipfile
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import gspmd_lm
from gspmd_lm import cli
from gspmd_lm.errors import STOPPED
from gspmd_lm.launch.local import free_port
from gspmd_lm.runtime import processes
from tests.quick import QUICK_FLAGS

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT / "examples"))

import classifier  # noqa: E402

SMALL = [
    "--config=bench_4m",
    *(f"--set={item}" for item in ("model.layers=1", "model.embed=64", "model.mlp=128", "data.batch=8", "data.seq=32")),
    "--set=train.log_every=1",
    "--set=train.trackers=[]",
    *QUICK_FLAGS,
]


THEN_A_TASK = """
import sys
from gspmd_lm import cli
from gspmd_lm.errors import STOPPED
try:
    cli.main(sys.argv)
except SystemExit as end:
    assert not end.code
sys.path.insert(0, "examples")
import gspmd_lm, classifier
from tests.quick import QUICK_FLAGS
quick = [flag.removeprefix("--set=") for flag in QUICK_FLAGS]
rules = gspmd_lm.load_rules("examples/rules/plain_fsdp.yaml", classifier.TASK, overrides=quick)
(workdir,) = [flag.partition("=")[2] for flag in sys.argv if flag.startswith("--workdir=")]
gspmd_lm.train(classifier.TASK, rules, f"{workdir}/task", 2, data=classifier.batch)
"""


# A process that is killed; the system then has counted one more of those that it killed for want of memory, or not.
KILLED = """
import os, pathlib, sys, time
from gspmd_lm.runtime import processes
workdir, counter, after = sys.argv[1:]
pathlib.Path(counter).write_text("low 3\\noom_kill 7\\n")
processes.OUT_OF_MEMORY_COUNTERS = counter, counter + ".none"
processes.last_words(workdir, workdir + "/checkpoints")
time.sleep(0.3)  # until the shell has read it
pathlib.Path(counter).write_text(f"low 4\\noom_kill {after}\\n")
os.kill(os.getpid(), 9)
"""


def start(*flags, what=("main.py",), **environment):
    return subprocess.Popen(
        [sys.executable, *what, *flags],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | environment,
    )


def finish(process, timeout_s=300):
    output, _ = process.communicate(timeout=timeout_s)
    assert process.returncode == 0, output
    return output


def here(*flags):
    """Runs a command in this process, which has eight devices."""
    with pytest.raises(SystemExit) as end:
        cli.main(["main.py", *flags])
    assert not end.value.code


def losses(workdir):
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


@pytest.mark.long
def test_the_command_of_the_readme(tmp_path, capfd):
    command = re.search(r"python main.py (--rules=\S+)", (ROOT / "README.md").read_text())
    assert command
    small = "--set=data.batch=2", "--set=data.seq=32"
    here(command[1], "--steps=2", f"--workdir={tmp_path}/run", *small, *QUICK_FLAGS)
    output = "".join(capfd.readouterr())
    lines = output.splitlines()
    first_step = next(at for at, line in enumerate(lines) if line.startswith("step"))
    assert first_step <= 40
    assert f"{tmp_path}/run" in output and "held-out loss" in output
    assert len(losses(tmp_path / "run")) == 2


# Each process computes a stage.
STAGES = "--set=model.layers=2", "--rules=pp2_fsdp2_tp2", "--set=rules.pipeline.schedule=1f1b"


@pytest.mark.long
@pytest.mark.parametrize(
    ("layout", "and_a_task"),
    [
        (("--rules=fsdp2_tp4",), False),
        pytest.param(("--rules=fsdp2_tp4",), True, marks=pytest.mark.slow),
        pytest.param(STAGES, False, marks=pytest.mark.slow),
    ],
)
def test_two_processes_of_four_devices_compute_what_one_of_eight_does(layout, and_a_task, tmp_path):
    port, what = free_port(), ("-c", THEN_A_TASK) if and_a_task else ("main.py",)
    flags = [*SMALL, *layout, "--steps=4"]
    together = [
        start(*flags, f"--workdir={tmp_path}/two", f"--coordinator=127.0.0.1:{port}", "--num_processes=2",
              f"--process_id={i}", what=what, PYTHONPATH=str(ROOT))
        for i in range(2)
    ]  # fmt: skip
    first, second = (finish(process) for process in together)
    assert "step 4/4" in first
    assert "step" not in re.sub(r"\[Gloo\].*", "", second)  # only the first process speaks
    assert f"process 1 on {socket.gethostname()}: 4 cpu devices" in second
    assert {path.name for path in (tmp_path / "two/checkpoints").iterdir()} >= {"0", "4"}
    sealed = (tmp_path / "two/checkpoints/4/state").glob("ocdbt.process_*/sha256.json")
    assert len([*sealed]) == 2  # each process has the sums of what it wrote
    here(*flags, f"--workdir={tmp_path}/one")
    two, one = losses(tmp_path / "two"), losses(tmp_path / "one")
    assert len(two) == len(one) == 4
    assert max(abs(a - b) for a, b in zip(two, one, strict=True)) < 1e-5

    # What two processes saved, one goes on with.
    here(*flags[:-1], "--steps=6", f"--workdir={tmp_path}/two")
    assert len(losses(tmp_path / "two")) == 6

    if not and_a_task:
        return
    # A model of one's own, which the same two processes trained.
    step = gspmd_lm.build(classifier.TASK, "none")
    with gspmd_lm.checkpoints(tmp_path / "two/task", classifier.TASK) as checkpoints:
        number, state, _ = checkpoints.restore(step.abstract_state)
    last = losses(tmp_path / "two/task")[-1]
    program, one = step.compile(step.lower_train()), step.compile(step.lower_init())()
    for at in range(2):
        one, metrics = program(one, jax.device_put(classifier.batch(at), step.batch_shardings))
    assert number == 2 and abs(last - float(metrics["loss"])) < 1e-5
    averages = [x.params["batch_stats"]["block_1"]["norm"]["mean"] for x in (state, one)]
    np.testing.assert_allclose(*averages, rtol=0, atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize(
    "given, differences",
    [
        (
            (["--set=optimizer.b1=0.8", "--mesh=fsdp=4,tensor=2"], ["--set=optimizer.b1=0.9"]),
            [
                "config.optimizer.b1: 0.8 in process 0, 0.9 in",
                'rules.mesh: [["fsdp", 4], ["tensor", 2]] in process 0, [',
            ],
        ),
        pytest.param(
            (["--set=data.source=~/text.txt", "--set=data.held_out=0.0"],) * 2, ["data: "], marks=pytest.mark.slow
        ),
    ],
)
def test_processes_that_were_not_given_the_same_end_before_the_first_step(tmp_path, given, differences):
    port, started = free_port(), []
    for i, flags in enumerate(given):
        home = tmp_path / str(i)  # each has another text by the same name
        home.mkdir()
        (home / "text.txt").write_text("".join(f"text {n} of {i}\n" for n in range(500)))
        own = {"HOME": str(home), "GSPMD_LM_CACHE": str(home / "cache")}
        where = [f"--coordinator=127.0.0.1:{port}", "--num_processes=2", f"--process_id={i}"]
        flags = [*SMALL, "--rules=fsdp2_tp4", "--steps=2", f"--workdir={tmp_path}/run", *flags, *where]
        started.append(start(*flags, **own))
    outputs = [process.communicate(timeout=300)[0] for process in started]
    assert [process.returncode for process in started] == [2, 2], outputs
    for output in outputs:
        assert "the processes of this run were given different inputs" in output
        assert all(difference in output for difference in differences)
        assert "step " not in output and "Traceback" not in output
    assert not (tmp_path / "run/checkpoints").exists()


def test_the_first_process_gathers_what_all_have(monkeypatch):
    """With a store in place of jax's, which processes write to one after the other."""
    assert processes.gather({"alone": 1}) == [{"alone": 1}]
    store = {}
    monkeypatch.setattr(processes, "several", lambda: True)
    monkeypatch.setattr(processes, "client", lambda: SimpleNamespace(key_value_set=store.__setitem__))
    monkeypatch.setattr(processes, "read_stored", lambda key: store.get(key))
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    monkeypatch.setattr(processes, "next_key", lambda what: what)
    for index in (2, 1, 0):
        monkeypatch.setattr(jax, "process_index", lambda index=index: index)
        gathered = processes.gather({"of": index})
        assert gathered == ([{"of": 0}, {"of": 1}, {"of": 2}] if index == 0 else [])


@pytest.fixture
def connect(monkeypatch):
    """Connects to the watch of the first of four processes, as the process of a number; that of None sends a line."""

    def connect(number, line=None):
        port, secret, _ = json.loads(store["gspmd_lm/watch"])
        connection = sockets.enter_context(socket.create_connection(("127.0.0.1", port), timeout=10))
        hello = {"secret": secret, "process": number, "host": "here", "pid": 7}
        connection.sendall(line or (json.dumps(hello) + "\n").encode())
        while number is not None and number not in watch.connections:
            time.sleep(0.01)
        return connection

    store = {}
    monkeypatch.setattr(processes, "client", lambda: SimpleNamespace(key_value_set=store.__setitem__))
    monkeypatch.setattr(jax, "process_count", lambda: 4)
    watch = processes._Watch()
    with contextlib.ExitStack() as sockets:
        yield connect
        watch.leaving = True
        for connection in watch.connections.values():
            connection.close()


def test_a_process_that_fails_while_others_connect_ends_the_first_one(connect, monkeypatch):
    ended = queue.Queue()

    def send(connection, line):
        connect(3)  # while the others are told

    monkeypatch.setattr(processes, "send", send)
    monkeypatch.setattr(processes, "GRACE_S", 0)
    monkeypatch.setattr(processes.endings, "end", lambda *end: ended.put(end))
    failing, _ = connect(1), connect(2)
    failing.sendall(b'{"code": 1, "message": "out of memory", "process": 1}\n')
    code, message = ended.get(timeout=10)
    assert code == 1 and message.startswith("process 1 ended with exit code 1. out of memory\n")


@pytest.mark.parametrize("line", [b"5\n", b"GET / HTTP/1.1\r\n", b"\xff" * 5000, b'{"secret": "x", "process": 1}\n'])
def test_strangers_are_hung_up_on(connect, line):
    with contextlib.suppress(ConnectionResetError):
        assert connect(None, line).recv(1) == b""


@pytest.mark.slow
def test_a_stop_before_the_first_step_ends_all_processes_with_the_code_of_a_stop(tmp_path):
    where = f"--workdir={tmp_path}/run", f"--coordinator=127.0.0.1:{free_port()}", "--num_processes=2"
    first, second = (start(*SMALL, "--rules=fsdp2_tp4", *where, f"--process_id={number}") for number in range(2))
    assert any(line.startswith("workdir ") for line in first.stdout)
    second.send_signal(signal.SIGTERM)
    outputs = [process.communicate(timeout=60)[0] for process in (first, second)]
    assert [process.returncode for process in (first, second)] == [STOPPED] * 2
    assert "process 1 was stopped\n  fix   start all processes again" in outputs[0]
    assert "nothing had to be saved" in outputs[1]
    assert not (tmp_path / "run/lock.json").exists()


@pytest.mark.slow
def test_the_first_of_two_processes_plans_for_both(tmp_path):
    flags = [flag for flag in SMALL if flag not in QUICK_FLAGS]  # they are of rules, which a plan chooses
    flags += ["--rules=plan", "--steps=2", "--devices=4", f"--workdir={tmp_path}/run", "--num_processes=2"]
    flags.append(f"--coordinator=127.0.0.1:{free_port()}")
    first, second = (finish(one) for one in [start(*flags, f"--process_id={number}") for number in range(2)])
    assert "layouts are ranked by bytes and memory" in first and "ranked" not in second
    assert "under plan, mesh" in first and "step 2/2" in first
    assert "found by: " in (tmp_path / "run/rules.yaml").read_text()


@pytest.mark.slow
def test_runs_on_two_mesh_axes_survive(tmp_path):
    """Simulated devices on few cores can deadlock where threads are too few; see runtime/startup.py.

    Four of five runs did in their first 45 steps.
    """
    for run in range(5):
        output = finish(start(*SMALL, "--rules=dp2_tp4", "--steps=100", f"--workdir={tmp_path}/{run}"))
        assert "step 100/100" in output


@pytest.mark.slow
def test_the_wheel_carries_rules_and_configs(tmp_path):
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", f"--outdir={tmp_path}", str(ROOT)], check=True, capture_output=True
    )
    (wheel,) = tmp_path.glob("gspmd_lm-*.whl")
    with zipfile.ZipFile(wheel) as files:
        (metadata,) = (name for name in files.namelist() if name.endswith("dist-info/METADATA"))
        assert "gspmd_lm/py.typed" in files.namelist()
        links = re.findall(r"\]\(([^)]+)\)", files.read(metadata).decode())
        assert len(links) > 10 and all("://" in link for link in links), "the README is read elsewhere"
    venv.create(tmp_path / "venv", with_pip=True)
    bin_folder = tmp_path / "venv/bin"
    subprocess.run([bin_folder / "pip", "install", "-q", wheel], check=True, capture_output=True)
    empty = tmp_path / "empty"
    empty.mkdir()
    run = subprocess.run(
        [bin_folder / "gspmd-lm", "--rules=tp8.yaml", "--steps=2"], cwd=empty, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert list(empty.glob("runs/tiny-tp8-*/metrics.jsonl"))


@pytest.mark.parametrize(("after", "saved"), [(7, False), (8, True)])
def test_the_end_of_a_process_that_is_killed_is_explained(tmp_path, after, saved):
    (tmp_path / "checkpoints" / "3.orbax-checkpoint-tmp-1").mkdir(parents=True)  # is not one yet
    if saved:
        (tmp_path / "checkpoints" / "20").mkdir()
    process = start(str(tmp_path), str(tmp_path / "counter"), str(after), what=("-c", KILLED))
    said, _ = process.communicate(timeout=60)
    assert process.returncode == -9
    what, fix = said.splitlines()[-2:]
    assert what.startswith(
        "this process was ended from outside, or" if after == 7 else "out of memory: the system ended"
    )
    assert fix.startswith("  fix   give the same command again: " if after == 7 else "  fix   a smaller data.batch, ")
    end = (
        f": it goes on from the newest checkpoint in {tmp_path}" if saved else ": nothing was saved, so it begins anew"
    )
    assert fix.endswith(end)


def test_last_words_about_a_workdir_that_is_not_here(tmp_path):
    process = start("gs://here/run", str(tmp_path / "counter"), "7", what=("-c", KILLED))
    assert process.communicate(timeout=60)[0].endswith(" newest checkpoint in gs://here/run, if there is one\n")
