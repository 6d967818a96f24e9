"""One of two processes is slow, and one of them is sent signals: the kind `slowed` of kills.py."""

import atexit
import json
import multiprocessing
import os
import re
import shutil
import signal
import sys
import time

from gspmd_lm.errors import STOPPED
from gspmd_lm.launch.local import free_port
from tests.attacks.runs import PATIENCE_S, RANDOM, SMALL, arrays, checkpoints, losses
from tests.launched import ROOT


def forked(arguments, folder, log, lag_s=0.0):
    """A process of the command line that sleeps for `lag_s` after each step, before it asks whether to stop.

    It is forked from this process, which has imported what it needs: that is half of the start of a small run.
    """
    process = multiprocessing.get_context("fork").Process(target=_command, args=(arguments, folder, log, lag_s))
    process.start()
    return process


def _command(arguments, folder, log, lag_s):
    from gspmd_lm import cli
    from gspmd_lm.runtime.preemption import Agreement

    os.setsid()
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.environ["GSPMD_LM_CACHE"] = str(folder / "cache")
    os.chdir(ROOT)
    sys.argv = ["main.py", *arguments]
    due = Agreement.due
    Agreement.due = lambda self, step: time.sleep(lag_s) or due(self, step)
    code = 1
    try:
        cli.main(sys.argv)
    except SystemExit as error:
        code = error.code
    finally:
        atexit._run_exitfuncs()  # where jax waits for the other processes
        sys.stdout.flush()
        os._exit(code)


def slowed_pair(folder, log, workdir, slow=None, lag_s=0.0):
    """Two processes of one run of 40 steps, of which `slow` is slow."""
    port = free_port()
    run = [*SMALL, *RANDOM, "--rules=dp8", f"--workdir={workdir}", f"--compile_cache={folder}/compile",
           "--set=train.checkpoint_every=2", "--set=train.steps=40"]  # fmt: skip
    return [
        forked([*run, f"--coordinator=127.0.0.1:{port}", "--num_processes=2", f"--process_id={index}"], folder,
               log.with_name(f"{log.stem}-{index}.txt"), lag_s if index == slow else 0.0)
        for index in range(2)
    ]  # fmt: skip


def ended(processes, limit_s):
    """The exit codes of processes; None for one that does not end in time, and is killed."""
    until = time.monotonic() + limit_s
    for process in processes:
        process.join(max(0.1, until - time.monotonic()))
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
        process.join()
    return codes


def left_of_pair(workdir):
    """The losses of all steps and a hash of the last state, read in another process: jax must not start in this one."""

    def read(path):
        steps = losses((workdir / "metrics.jsonl").read_text())
        path.write_text(json.dumps({"losses": steps, "state": arrays(workdir / "checkpoints/40/state")}))
        os._exit(0)

    path = workdir / "left.json"
    process = multiprocessing.get_context("fork").Process(target=read, args=(path,))
    process.start()
    process.join()
    return json.loads(path.read_text())


def slowed(folder, record, draw):
    """Signals to one of two processes, one of which is slow; then the run is started again, and compared at its end."""
    import grain  # noqa: F401
    import orbax.checkpoint  # noqa: F401

    import gspmd_lm.session  # noqa: F401

    base = folder / "slowed"
    reference = base / "reference.json"
    if not reference.exists():
        base.mkdir(exist_ok=True)
        assert ended(slowed_pair(base, base / "log.txt", base / "run"), PATIENCE_S) == [0, 0], base
        reference.write_text(json.dumps(left_of_pair(base / "run")))
    trial = base / f"trial{int(time.time() * 1000)}"
    trial.mkdir()
    workdir, slow, victim, lag_s = trial / "run", draw.randrange(2), draw.randrange(2), draw.uniform(0.1, 3)
    sent = draw.choice([["SIGTERM"], ["SIGTERM"], ["SIGTERM", "SIGTERM"], ["SIGKILL"]])
    gap_s = draw.choice([0.01, 0.5, 2.0])
    processes = slowed_pair(base, trial / "log.txt", workdir, slow, lag_s)
    step = draw.randrange(9)  # 0: while it starts
    if step:
        while (
            not (workdir / "metrics.jsonl").exists()
            or len((workdir / "metrics.jsonl").read_bytes().splitlines()) < step
        ):
            time.sleep(0.05)
            if any(process.exitcode is not None for process in processes):
                raise RuntimeError(f"a process ended before it was sent anything; see {trial}")
    time.sleep(draw.uniform(0, 1.5 * lag_s))
    for name in sent:
        if processes[victim].is_alive():
            os.kill(processes[victim].pid, signal.Signals[name])
        time.sleep(gap_s if len(sent) > 1 else 0)
    began = time.monotonic()
    codes = ended(processes, 60)
    took_s = time.monotonic() - began
    said = (trial / "log-0.txt").read_text()
    saved = checkpoints(workdir) if (workdir / "checkpoints").exists() else []
    promised = re.findall(r"stopped at step (\d+) on request", said)
    why = []
    if None in codes:
        why.append("not all ended")
    if step and sent == ["SIGTERM"] and not (codes == [STOPPED] * 2 and promised):
        why.append("SIGTERM was not followed")
    if [int(at) for at in promised] != saved[-1:] * len(promised):
        why.append(f"promised {promised}, saved {saved}")
    again = ended(slowed_pair(base, trial / "again.txt", workdir), PATIENCE_S)
    if again != [0, 0] or left_of_pair(workdir) != json.loads(reference.read_text()):
        why.append(f"did not resume as the undisturbed run: {again}")
    at = f"{'+'.join(sent)} to the {'slow' if slow == victim else 'fast'} process{'' if step else ' while it starts'}"
    record({"kind": "slowed", "kills": [{"at": at}], "victim": victim, "lag_s": round(lag_s, 2), "codes": codes,
            "took_s": round(took_s, 1), "promised": promised, "saved": saved[-1:], "survived": not why,
            "why": f"{', '.join(why)}; see {trial}" if why else ""})  # fmt: skip
    if not why:
        shutil.rmtree(trial)
