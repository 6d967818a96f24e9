"""Platform, processes, memory and compile cache: in fresh processes where a backend must start."""

import os
import re
from platform import libc_ver

import jax
import pytest
from jaxlib import xla_client

from gspmd_lm.errors import InputError
from gspmd_lm.hardware import chips
from gspmd_lm.launch.local import free_port
from gspmd_lm.runtime import startup
from tests.launched import launch, output

SUM_THEN_TRAIN = """
import contextlib, os, sys, time
import jax, numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from gspmd_lm.runtime import startup
from gspmd_lm.runtime.endings import StopSignal
from gspmd_lm.runtime.preemption import Agreement
here = startup.start(platform="cpu", simulated_devices=2, {flags})
print("found:", here.device_count, here.process_count, here.is_main)
mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
x = jax.make_array_from_callback((4,), NamedSharding(mesh, P("data")), lambda index: np.arange(4.0)[index])
total = jax.jit(lambda x: x.sum(), out_shardings=NamedSharding(mesh, P()))
print("found:", float(total(x)))
agreed, did = Agreement(0), []
with StopSignal(lambda: agreed.want("stop")), agreed:
    for step in range(300):
        total(x).block_until_ready()
        time.sleep(0.02)
        if step == 5 and not here.is_main:
            os.kill(os.getpid(), {signal})
            time.sleep(1.5)  # the other process goes on to step 6, and waits there for this one
        if here.is_main and step == 1:
            agreed.want("save")
        did += [(step, thing) for thing in sorted(agreed.due(step))]
        if "stop" in [thing for _, thing in did]:
            print("found:", *did)
            break
        if step == 5 and here.is_main:
            with contextlib.suppress(RuntimeError):
                multihost_utils.reached_preemption_sync_point(3)  # what Orbax asks, once it has saved step 3
"""


@pytest.fixture
def undetermined(monkeypatch):
    """No platform was asked for, and nothing is installed or plugged in."""
    before: str | None = jax.config.jax_platforms  # pyright: ignore[reportAttributeAccessIssue]
    jax.config.update("jax_platforms", None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(startup.quiet, "is_there", lambda platform: False)
    yield monkeypatch
    jax.config.update("jax_platforms", before)


# Platform and devices


def test_a_fresh_process_simulates_in_silence_and_importing_does_nothing():
    """Also in half an environment of Slurm, which means one process."""
    out, err = output(
        launch(
            """
import os
before = dict(os.environ)
from gspmd_lm.runtime import startup
import jax
assert dict(os.environ).items() - before.items() <= {("TPU_SKIP_MDS_QUERY", "1")}  # jax's own
assert jax.config.jax_platforms is None
print(startup.start(platform="cpu", simulated_devices=12))
print(os.environ["PJRT_NPROC"], os.environ["NPROC"], jax.config.jax_platforms)
""",
            SLURM_NTASKS="4",
        )
    )
    assert out.splitlines() == [
        "Runtime(platform='cpu', device_kind='cpu', device_count=12, process_index=0, process_count=1)",
        "48 48 cpu",
    ]
    noise = ("cudart_stub", "absl::InitializeLog")  # of jax's CUDA plugin where it is installed without a GPU
    assert [line for line in err.splitlines() if not any(word in line for word in noise)] == []


@pytest.mark.parametrize(("devices", "joined", "threads"), [(1, False, None), (1, True, "32"), (8, False, "32")])
def test_only_a_device_that_may_wait_for_others_gets_spare_threads(monkeypatch, devices, joined, threads):
    for name in ("PJRT_NPROC", "NPROC"):
        monkeypatch.delenv(name)
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: joined)
    startup.prepare_cpu(devices)
    assert [os.environ.get(name) for name in ("PJRT_NPROC", "NPROC")] == [threads, threads]


@pytest.mark.parametrize(
    ("devices", "version", "ordered"), [(8, (0, 12, 0), True), (1, (0, 12, 0), False), (8, (0, 10, 2), False)]
)
def test_simulated_devices_of_later_versions_run_in_an_order_that_cannot_hang(monkeypatch, devices, version, ordered):
    monkeypatch.setenv("XLA_FLAGS", "")
    monkeypatch.setattr(jax, "__version_info__", version)
    startup.prepare_cpu(devices)
    (name,) = startup.ORDER_FLAGS
    assert (f"--{name}=false" in os.environ["XLA_FLAGS"].split()) == ordered
    assert all(patient in os.environ["XLA_FLAGS"] for patient in startup.PATIENT_FLAGS)


def test_starting_again_needs_no_more_devices():
    here = startup.start(platform="cpu", simulated_devices=8)
    assert (here.device_count, here.is_simulated, here.is_main) == (8, True, True)
    assert startup.start(platform="cpu", simulated_devices=4) == here
    with pytest.raises(InputError, match=r"9 simulated devices asked for, but jax already runs with 8\n  fix   use 8"):
        startup.start(platform="cpu", simulated_devices=9)


@pytest.mark.parametrize(
    ("given", "share"),
    [
        ({}, {"XLA_CLIENT_MEM_FRACTION": "0.92"}),
        ({"XLA_CLIENT_MEM_FRACTION": "0.5"}, {"XLA_CLIENT_MEM_FRACTION": "0.5"}),
        ({"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.6"}, {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.6"}),
    ],
)
def test_the_memory_of_a_gpu_that_is_taken_is_set_unless_the_user_has_and_is_said(monkeypatch, caplog, given, share):
    for name in startup.MEMORY_SHARES:
        monkeypatch.setenv(name, "")
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    with caplog.at_level("INFO"):
        startup._take_memory()
    assert {name: os.environ[name] for name in startup.MEMORY_SHARES if os.environ[name]} == share
    assert f"{share}"[2:-2].replace("': '", "=") in caplog.text
    assert float(xla_client.generate_pjrt_gpu_plugin_options()["memory_fraction"]) == float(*share.values())
    assert chips.CHIPS["h100"].usable_hbm_bytes == int(0.92 * chips.CHIPS["h100"].hbm_bytes)


@pytest.mark.long
def test_a_platform_that_is_not_there(monkeypatch):
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "0.92")  # as a start on GPUs sets it
    before: str | None = jax.config.jax_platforms  # pyright: ignore[reportAttributeAccessIssue]
    try:
        with pytest.raises(InputError, match=r"platform gpu cannot be used(.|\n)*fix .*\[cuda\].*--platform=cpu"):
            startup.start(platform="cuda", simulated_devices=8)
    finally:
        jax.config.update("jax_platforms", before)
    code = """
from gspmd_lm import InputError
from gspmd_lm.runtime import startup
try:
    startup.start(platform="{}")
except InputError as error:
    print(error)
"""
    for platform in ("gpu", "tpu"):
        out, err = launch(code.format(platform)).communicate(timeout=300)
        assert out.startswith(f"platform {platform} cannot be used: ") and out.count("\n") == 2
        assert "Traceback" not in err and "jax" not in err and "TPU" not in err  # plugins write of their own accord


@pytest.mark.parametrize("asked, error", [("gpuu", "did you mean gpu"), ("metal", "--platform=metal: unknown")])
def test_an_unknown_platform(asked, error):
    with pytest.raises(InputError, match=error):
        startup.start(platform=asked)


def test_the_platform_is_what_was_asked_for_or_is_there(undetermined, caplog):
    class Plugin:
        name = "xla_cuda12"

    choose = startup._choose_platform
    assert choose(None) == "cpu"
    assert not caplog.records
    undetermined.setattr(startup.quiet, "is_there", lambda platform: platform == "gpu")
    undetermined.setattr(startup, "entry_points", lambda group: [])
    assert choose(None) == "cpu"
    assert "gspmd_lm[cuda]" in caplog.text
    undetermined.setattr(startup, "entry_points", lambda group: [Plugin])
    assert choose(None) == "gpu"
    assert choose("cpu") == "cpu"
    undetermined.setenv("CUDA_VISIBLE_DEVICES", "")
    assert choose(None) == "cpu"
    jax.config.update("jax_platforms", "tpu,cpu")  # what jax does on a TPU host when it is imported
    assert (choose(None), choose("cpu")) == ("tpu", "cpu")


def test_a_tpu_host_without_libtpu_is_pointed_out(undetermined, caplog):
    undetermined.setattr(startup.quiet, "is_there", lambda platform: platform == "tpu")
    undetermined.setattr(startup.importlib.util, "find_spec", lambda name: None)
    assert startup._choose_platform(None) == "cpu"
    assert "gspmd_lm[tpu]" in caplog.text


# Processes


@pytest.mark.parametrize(
    "flags, error",
    [
        ({"num_processes": 2}, "--num_processes given without --coordinator and --process_id"),
        ({"coordinator": "a:1", "num_processes": 2}, "without --process_id"),
        ({"coordinator": "a", "num_processes": 2, "process_id": 0}, "--coordinator=a: no port"),
        ({"coordinator": "a:1", "num_processes": 2, "process_id": 2}, "--process_id=2 must be at least 0 and below"),
        ({"coordinator": "a:1", "num_processes": 2, "process_id": -1}, "--process_id=-1"),
        ({"num_processes": 0}, "--num_processes=0: at least 1"),
        ({"simulated_devices": 0}, "--devices=0"),
    ],
)
def test_wrong_flags(flags, error):
    with pytest.raises(InputError, match=f"^{re.escape(error)}|{re.escape(error)}.*\n  fix   "):
        startup.start(platform="cpu", **flags)


def test_what_looks_like_one_of_several_processes(monkeypatch):
    for name in ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "JOB_COMPLETION_INDEX"):
        monkeypatch.delenv(name, raising=False)
    assert not startup._launched_in_parallel("cpu")
    assert startup._launched_in_parallel("tpu")
    for name, value, expected in [
        ("SLURM_NTASKS", "1", False),
        ("SLURM_NTASKS", "4", True),
        ("OMPI_COMM_WORLD_SIZE", "2", True),
        ("JOB_COMPLETION_INDEX", "0", True),
    ]:
        with monkeypatch.context() as inside:
            inside.setenv(name, value)
            assert startup._launched_in_parallel("gpu") is expected


@pytest.mark.parametrize(("tasks", "said"), [("1", "looking for other processes"), ("4", "waiting for the other")])
def test_a_run_alone_does_not_say_that_it_waits_for_others(tasks, said, monkeypatch, caplog):
    monkeypatch.setenv("SLURM_NTASKS", tasks)  # and nothing else that Slurm says
    with caplog.at_level("INFO", "gspmd_lm"):
        startup._join("tpu", None, None, None)
    assert [record.message.startswith(said) for record in caplog.records] == [True]


@pytest.mark.parametrize("tasks", ["1", "2"])
def test_steps_of_a_slurm_job_meet_at_ports_of_their_own_and_a_process_alone_at_none(tasks, monkeypatch):
    met = []
    slurm = {"JOB_ID": "70000", "STEP_NODELIST": "head,b", "NTASKS": tasks, "PROCID": "0", "LOCALID": "3"}
    for name, value in slurm.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setattr(startup.rendezvous, "meet", lambda *given: met.append(given[:3]))
    monkeypatch.setattr(startup.jax.distributed, "initialize", lambda *given, **named: met.append(given))
    monkeypatch.setattr(startup.jax.config, "update", lambda *given: None)
    monkeypatch.delenv("JAX_COORDINATOR_PORT", raising=False)
    for step in ("0", "1"):
        monkeypatch.setenv("SLURM_STEP_ID", step)
        startup._join("tpu", None, None, None)
    monkeypatch.setenv("JAX_COORDINATOR_PORT", "1234")
    startup._join("tpu", None, None, None)
    ports = [61440 + 70000 % 4096, 61440 + 70000 % 4096 + 1031, 1234]  # the first one is what jax takes for the job
    joined = [both for port in ports for both in ((f"head:{port}", 2, 0), (f"head:{port}", 2, 0, [3]))]
    assert met == (joined if tasks == "2" else [])


@pytest.mark.long
@pytest.mark.parametrize("way", ["flags", pytest.param("slurm", marks=pytest.mark.slow)])  # test_jobs.py has Slurm
def test_two_processes_reduce_together_and_stop_at_the_same_step(way):
    """SIGTERM with flags, Ctrl-C under Slurm, each on the second process, which is slower than the first one."""
    port, processes = free_port(), []
    for index in range(2):
        if way == "flags":
            flags = f"coordinator='127.0.0.1:{port}', num_processes=2, process_id={index}"
            processes.append(launch(SUM_THEN_TRAIN.format(flags=flags, signal=15)))
        else:
            slurm = {"JOB_ID": "7", "STEP_NODELIST": "127.0.0.1", "NTASKS": "2", "PROCID": f"{index}", "LOCALID": "0"}
            env = {f"SLURM_{name}": value for name, value in slurm.items()} | {"JAX_COORDINATOR_PORT": str(port)}
            processes.append(launch(SUM_THEN_TRAIN.format(flags="", signal=2), **env))
    # Gloo's threads write into each other's lines, and may leave one without an end.
    outputs = [re.findall("found: (.*)", output(process)[0]) for process in processes]
    assert outputs[0][:2] == ["4 2 True", "6.0"]
    assert outputs[1][:2] == ["4 2 False", "6.0"]
    assert outputs[0][2] == outputs[1][2]
    assert outputs[0][2].count("stop") == outputs[0][2].count("save") == 1


# Being asked to stop


@pytest.mark.long
@pytest.mark.skipif(libc_ver()[0] != "glibc", reason="only glibc is told to")
def test_memory_that_a_step_frees_stays_for_the_next_one():
    process = launch("""
import resource
from gspmd_lm.runtime import startup
startup.start(platform="cpu", simulated_devices=1, keep_memory=True)
for _ in range(2):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    bytes(range(256)) * 400_000
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
""")
    first, second = map(int, output(process)[0].split())
    assert first > 1000 and second < 100
