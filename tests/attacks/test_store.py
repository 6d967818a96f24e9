"""Runs whose workdir is in a bucket: saved, killed, resumed, locked, and compared with a run on a local disk.

pip install -e ".[dev,gcs]" gcp-storage-emulator && pytest -n 0 -m slow tests/attacks/test_store.py
"""

import importlib.util
import json
import os
import random
import signal
import subprocess
import sys
import time
import urllib.request

import pytest

from gspmd_lm import config as configs
from gspmd_lm.data.tokenize import tokenize
from gspmd_lm.errors import FAILED, STOPPED, WRONG_INPUT
from gspmd_lm.launch.local import free_port
from tests.attacks import bucket
from tests.attacks.runs import RANDOM, SMALL, losses
from tests.launched import ROOT

MISSING = [name for name in ("gcsfs", "gcp_storage_emulator") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"not run: {', '.join(MISSING)} not installed"),
]
# Locks whose holder is silent after 6 seconds instead of a minute.
QUICK = """
from gspmd_lm import cli
from gspmd_lm.data import folders
from gspmd_lm.workdir import lock
folders.PATIENCE_S = 3.0
lock.BEAT_S, lock.AGED_S, lock.STALE_S, lock.WAIT_S = 1.0, 3.0, 6.0, 6.0
cli.main()
"""


def serve(port):
    """The emulator."""
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.attacks.bucket", str(port)], cwd=ROOT, stderr=subprocess.DEVNULL
    )
    time.sleep(3)
    return server


@pytest.fixture(scope="module")
def store():
    """The environment of processes that use the emulator."""
    port = free_port()
    server = serve(port)
    yield os.environ | bucket.environment(port)
    server.kill()
    server.wait()


@pytest.fixture
def start(store, tmp_path):
    """Starts a run in a folder of the bucket, or anywhere."""
    started = []

    def start(workdir, *flags, **environment):
        arguments = [*SMALL, *RANDOM, "--rules=none", f"--workdir={workdir}", *flags]
        log = tmp_path / f"log{len(started)}"
        with log.open("w") as out:
            process = subprocess.Popen(
                [sys.executable, "-c", QUICK, *arguments], cwd=ROOT, stdout=out, stderr=out,
                env=store | {"GSPMD_LM_CACHE": str(tmp_path / "cache")} | environment,
            )  # fmt: skip
        process.log = log
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


def finish(process, code=0):
    assert process.wait(600) == code, process.log.read_text()
    return process.log.read_text()


def wait_for(process, words):
    """Returns when a run has said something."""
    while words not in process.log.read_text():
        assert process.poll() is None, process.log.read_text()
        time.sleep(0.2)


@pytest.fixture
def objects(store, monkeypatch):
    """The store, as fsspec has it."""
    import gcsfs.core

    for name in bucket.environment(0):
        monkeypatch.setenv(name, store[name])
    # gcsfs.GCSFileSystem asks by gRPC of which kind a bucket is. The emulator has no gRPC, and each try takes a minute.
    where = {"endpoint_url": store["STORAGE_EMULATOR_HOST"]}
    return gcsfs.core.GCSFileSystem(token="anon", use_listings_cache=False, **where)


def newest(store, run):
    """The newest checkpoint, as the store itself lists them: gcsfs keeps copies of its listings."""
    asked = f"{store['STORAGE_EMULATOR_HOST']}/storage/v1/b/bucket/o?prefix={run}/checkpoints/"
    with urllib.request.urlopen(asked, timeout=60) as response:
        names = [item["name"] for item in json.load(response).get("items", [])]
    return max((int(step) for name in names if (step := name.split("/")[2]).isdigit()), default=0)


def test_a_run_is_saved_killed_and_resumed(start, store, objects, tmp_path):
    flags = "--set=train.checkpoint_every=3", "--set=train.steps=100000"
    draw, saved = random.Random(0), 0
    for _ in range(4):
        process = start("gs://bucket/killed", *flags)
        while newest(store, "killed") <= saved:
            assert process.poll() is None, finish(process)
            time.sleep(0.2)
        time.sleep(draw.uniform(0, 2))
        process.kill()
        process.wait()
        saved = newest(store, "killed")
    output = finish(start("gs://bucket/killed", *flags, f"--steps={saved + 9}"))
    assert "restored step" in output
    finish(start(tmp_path / "local", *flags, f"--steps={saved + 9}"))
    remote = objects.cat_file("bucket/killed/metrics.jsonl").decode()
    assert losses(remote) == losses((tmp_path / "local/metrics.jsonl").read_text())  # each step once, bit for bit
    assert not objects.exists("bucket/killed/lock.json")
    output = finish(start("gs://bucket/killed", *flags, f"--steps={saved + 9}"))
    assert f"the checkpoint is at step {saved + 9}: nothing to do" in output


def test_a_second_run_waits_and_takes_over_from_one_that_ends(start):
    first = start("gs://bucket/shared", "--set=train.checkpoint_every=50", "--set=train.steps=100000")
    wait_for(first, "loss ")
    second = start("gs://bucket/shared", "--steps=100000", "--set=train.steps=100000")
    wait_for(second, "holds the lock; waiting until it ends or is silent")
    first.send_signal(signal.SIGTERM)
    said = finish(first, STOPPED)
    stopped = int(said.split("stopped at step ")[1].split()[0])
    wait_for(second, "loss ")
    second.send_signal(signal.SIGTERM)
    assert f"restored step {stopped} of" in finish(second, STOPPED)


def test_a_living_run_is_not_disturbed(start, objects):
    first = start("gs://bucket/alive", "--set=train.steps=100000")
    while not objects.exists("bucket/alive/lock.json"):
        time.sleep(0.5)
    output = finish(start("gs://bucket/alive", "--steps=5"), 2)
    assert f"process {first.pid} on" in output and "is writing there" in output
    first.send_signal(signal.SIGTERM)
    finish(first, STOPPED)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_run_that_lost_a_process_starts_again_at_once(start, objects, victim):
    workdir, held = f"gs://bucket/lost{victim}", f"bucket/lost{victim}/lock.json"

    def together():
        port = free_port()
        where = "--rules=dp8", "--set=train.steps=100000", f"--coordinator=127.0.0.1:{port}", "--num_processes=2"
        return [start(workdir, *where, f"--process_id={number}") for number in range(2)]

    first = together()
    wait_for(first[0], "loss ")
    first[victim].kill()
    assert first[1 - victim].wait(60) not in (0, WRONG_INPUT, STOPPED)  # jax may abort it before it ends by itself
    assert objects.exists(held) == (victim == 0)  # process 0 holds it, and cannot give it back when it is killed
    second = together()
    wait_for(second[0], "loss ")
    said = second[0].log.read_text()
    assert ("holds the lock; waiting" in said) == ("taken over: that process is gone" in said) == (victim == 0)
    second[1].send_signal(signal.SIGTERM)
    for process in second:
        finish(process, STOPPED)
    assert not objects.exists(held)


def test_a_run_that_is_stopped_before_its_first_step_leaves_no_lock(start, objects):
    process = start("gs://bucket/early")
    wait_for(process, "workdir gs://")
    assert objects.exists("bucket/early/lock.json")
    process.send_signal(signal.SIGTERM)
    assert "nothing had to be saved" in finish(process, STOPPED)
    assert not objects.exists("bucket/early/lock.json")


def test_a_run_is_read_where_it_is(start, store, tmp_path):
    """Its config and rules are found, and the files that came with its weights are exported with them."""

    def verb(*words):
        ended = subprocess.run([sys.executable, *words], cwd=ROOT, env=store, capture_output=True, text=True)
        assert ended.returncode == 0, ended.stderr + ended.stdout
        return ended.stdout

    published, again = tmp_path / "published", tmp_path / "again"
    finish(start(tmp_path / "run", "--steps=2"))
    verb("main.py", "convert", f"--workdir={tmp_path / 'run'}", f"--to={published}")
    (published / "LICENSE").write_text("terms")
    verb("main.py", "convert", f"--from={published}", "--workdir=gs://bucket/imported")
    verb("main.py", "convert", "--workdir=gs://bucket/imported", f"--to={again}")
    assert (again / "LICENSE").read_text() == "terms"
    assert (again / "config.json").read_text() == (published / "config.json").read_text()
    finish(start("gs://bucket/run", "--steps=2"))
    assert "held-out loss" in verb("main.py", "eval", "--workdir=gs://bucket/run", "--set=data.held_out=0.1")
    loaded = "import gspmd_lm; print(gspmd_lm.load('gs://bucket/run').config.model.embed)"
    assert verb("-c", loaded).splitlines()[-1] == "32"


def test_programs_are_found_again_in_a_bucket(start):
    flags = "--steps=1", "--compile_cache=gs://bucket/compiled"
    assert "0 found" in finish(start("gs://bucket/cold", *flags))
    assert "compile cache gs://bucket/compiled" in (output := finish(start("gs://bucket/warm", *flags)))
    assert " 0 found" not in output


def test_a_trace_comes_into_the_bucket(start, objects):
    output = finish(start("gs://bucket/traced", "--steps=4", "--set=train.steps=4", "--profile=1:2"))
    assert "trace of steps 1 to 2: gs://bucket/traced/profile" in output and "step 4/4" in output
    assert objects.glob("bucket/traced/profile/plugins/profile/*/*.xplane.pb")


def test_a_store_that_goes_away_while_rows_are_read(start, tmp_path):
    """For a moment, and for good: then the run is saved, and goes on when the store is back."""
    import gcsfs.core

    port = free_port()
    server, where = serve(port), bucket.environment(port)
    source = tmp_path / "text.jsonl"
    source.write_text("".join(json.dumps({"text": f"{n} texts " * (1 + n % 30)}) + "\n" for n in range(1500)))
    tokenize(configs.load("tiny", [f"data.source={source}"]), str(tmp_path / "tokens"))

    def fill():
        there = gcsfs.core.GCSFileSystem(token="anon", endpoint_url=where["STORAGE_EMULATOR_HOST"])
        for path in (tmp_path / "tokens").iterdir():
            there.pipe_file(f"bucket/tokens/{path.name}", path.read_bytes())

    flags = "--set=model.vocab=0", "--set=train.steps=100000"
    far = "--set=data.source=gs://bucket/tokens", *flags
    try:
        fill()
        process = start(tmp_path / "far", *far, **where)
        wait_for(process, "step     20/")
        server.send_signal(signal.SIGSTOP)
        time.sleep(5)
        server.send_signal(signal.SIGCONT)
        step = process.log.read_text().count("  loss ") + 20
        wait_for(process, f"step {step:>6}/")
        server.kill()
        server.wait()
        said = finish(process, FAILED)
        assert "the store does not answer" in said and "it is asked again for up to 3 s" in said
        saved = int(said.split("\nsaved step ")[1].split(";")[0])
        assert saved >= step and f"saved step {saved}; when the store answers, the same command goes on" in said
        server = serve(port)
        fill()
        said = finish(start(tmp_path / "far", *far, f"--steps={saved + 5}", **where))
        assert f"restored step {saved} of" in said
    finally:
        server.kill()
        server.wait()
    finish(start(tmp_path / "near", f"--set=data.source={tmp_path / 'tokens'}", *flags, f"--steps={saved + 5}"))
    far, near = (losses((tmp_path / name / "metrics.jsonl").read_text()) for name in ("far", "near"))
    assert far == near and len(near) == saved + 5
