"""A run that nobody watches: `launch` starts it again while its processes are killed, stopped and cut off at random.

    pip install -e ".[dev,gcs]" gcp-storage-emulator
    python -m tests.attacks.unattended --attacks=100                  # as root, for the network namespaces
    python -m tests.attacks.unattended --processes=4 --minutes=30     # as many as come within half an hour

Each process stands for a host: it is in a network namespace with an address and a link of its own. The workdir is in an
emulated bucket, which all of them reach over their links. At random moments, one process gets SIGTERM or SIGKILL, is
stopped for some seconds (SIGSTOP), or has its link cut, briefly or for longer than the others wait for it. A quarter of
the attacks comes while the run starts again. After each attack the run must go on by itself. At the end its losses must
be bitwise those of a run that nobody disturbed, each step once. `--seed` draws other attacks. Each is a line of
--folder/results.jsonl.
"""

import argparse
import contextlib
import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from gspmd_lm.errors import STOPPED
from gspmd_lm.launch import logs
from gspmd_lm.launch.job import Job
from gspmd_lm.launch.local import Local, free_port
from gspmd_lm.launch.loop import Launch, Waits
from tests.attacks import bucket
from tests.attacks.runs import PATIENCE_S, RANDOM, SMALL, losses
from tests.launched import FROM_OUTSIDE, ROOT
from tests.quick import QUICK_FLAGS

NAME = "gspmdlm"  # of the bridge, and with a number of each namespace and its link
SUBNET = "10.77.0."  # the namespaces from 1 on
BRIDGE = f"{SUBNET}254"
HOSTS = Path("/etc/netns")  # `ip netns exec` shows the files of a folder there as those of /etc
# kind -> how often it is drawn, and for how many seconds it lasts
ATTACKS = {
    "SIGKILL": (3, (0, 0)),
    "SIGTERM": (3, (0, 0)),
    "SIGSTOP": (2, (1, 25)),
    "link cut briefly": (2, (1, 10)),
    "link cut for long": (1, (40, 70)),
}
ENDS_ALL = ("SIGKILL", "SIGTERM")  # after these, all processes must be started again
ENDS_NOTHING = ("SIGSTOP",)  # after these, the same processes must go on


class Hosts(Local):
    """Processes of this machine, each in a network namespace of its own."""

    def commands(self, program, port):
        """The command of each process."""
        commands = super().commands(program, port)
        for number, command in enumerate(commands):
            elsewhere = [word.replace("=localhost:", f"={SUBNET}1:") for word in command]
            commands[number] = ["ip", "netns", "exec", f"{NAME}{number}", *elsewhere]
        return commands


def ip(*words):
    subprocess.run(["ip", *map(str, words)], check=True)


@contextlib.contextmanager
def network(count):
    """A context with `count` namespaces, which a bridge connects with each other and with this machine."""
    with contextlib.ExitStack() as stack:
        ip("link", "add", NAME, "type", "bridge")
        stack.callback(ip, "link", "del", NAME)
        ip("addr", "add", f"{BRIDGE}/24", "dev", NAME)
        ip("link", "set", NAME, "up")
        for number in range(count):
            name, address = f"{NAME}{number}", f"{SUBNET}{number + 1}"
            ip("netns", "add", name)
            stack.callback(ip, "netns", "del", name)
            (HOSTS / name).mkdir(parents=True)
            stack.callback(shutil.rmtree, HOSTS / name)
            # Gloo listens at the address of the host's name.
            (HOSTS / name / "hosts").write_text(f"127.0.0.1 localhost\n{address} {os.uname().nodename}\n")
            ip("link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("link", "set", name, "master", NAME, "up")
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield


@contextlib.contextmanager
def emulated_bucket():
    """A context with a bucket that all namespaces reach. Gives its file system."""
    import gcsfs.core

    port = free_port()
    os.environ |= bucket.environment(port, BRIDGE)
    command = [sys.executable, "-m", "tests.attacks.bucket", str(port), BRIDGE]
    server = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)
    try:
        where = {"endpoint_url": os.environ["STORAGE_EMULATOR_HOST"]}
        yield gcsfs.core.GCSFileSystem(token="anon", use_listings_cache=False, **where)
    finally:
        server.kill()
        server.wait()


class Attacker:
    """Attacks a run in a thread of its own, and asks launch to stop when it is done."""

    def __init__(self, place, folder, options, record):
        self.place, self.folder, self.options, self.record = place, folder, options, record
        self.draw, self.until = random.Random(options.seed), time.monotonic() + 60 * options.minutes
        self.done, self.farthest, self.error = 0, 0, None
        self.over = threading.Event()  # whether launch has ended
        self.thread = threading.Thread(target=self._attack_all, daemon=True)

    def _attack_all(self):
        try:
            self._wait(lambda: self._at()[1] > 0)
            while self.done < self.options.attacks and time.monotonic() < self.until:
                self._attack()
        except Exception as error:
            self.error = error
        finally:
            if not self.over.is_set():
                os.kill(os.getpid(), signal.SIGTERM)

    def _at(self):
        """The number of the newest attempt, and the last step that it has printed; 0 where there is none yet."""
        number = max((int(path.name) for path in self.folder.glob("[0-9]*")), default=0)
        steps = re.findall(rb"^step +(\d+)[ /]", logs.end(self.folder / str(number) / "0.log"), re.M)
        return number, int(steps[-1]) if steps else 0

    def _wait(self, holds):
        """Seconds until something holds. Raises RuntimeError if it does not come true in time, or if launch ends."""
        began = time.monotonic()
        while not holds():
            if self.over.is_set() or time.monotonic() - began > PATIENCE_S:
                raise RuntimeError(f"the run does not go on; see {self.folder}")
            time.sleep(0.1)
        return time.monotonic() - began

    def _attack(self):
        draw = self.draw
        kind = draw.choices(list(ATTACKS), [often for often, _ in ATTACKS.values()])[0]
        lasts_s = draw.uniform(*ATTACKS[kind][1])
        victim, again = draw.randrange(self.options.processes), draw.random() < 0.25
        # Launch gives up where three attempts in a row come no farther, so an attack waits until the run has.
        self._wait(lambda: self._at()[1] > self.farthest)
        farther = self.farthest + draw.randrange(1, 12)
        self._wait(lambda: self._at()[1] > farther)
        time.sleep(draw.uniform(0, 0.5))
        attempt, step = self._strike(kind, victim, lasts_s)
        facts = {"kind": kind, "victim": victim, "lasts_s": round(lasts_s, 1), "step": step, "while": "a step"}
        if again and kind in ENDS_ALL:
            self._wait(lambda: self._at()[0] > attempt)
            self.record(facts)
            kind, delay_s, victim = draw.choice(["SIGKILL", "SIGTERM"]), draw.uniform(0, 30), self.options.processes - 1
            time.sleep(delay_s)
            attempt, step = self._strike(kind, victim, 0)
            facts = {"kind": kind, "victim": victim, "step": step, "while": f"the first {delay_s:.0f} s of a start"}
            self.done += 1
        least = (attempt + 1, 0) if kind in ENDS_ALL else (attempt, step)
        back_s = self._wait(lambda: self._at() > least and self._at()[1] > 0)
        same = self._at()[0] == attempt
        if kind in ENDS_NOTHING and not same:
            raise RuntimeError(f"{facts} ended the run; see {self.folder}/{attempt}")
        self.done += 1
        self.record(facts | {"ended": not same, "back_s": round(back_s, 1)})

    def _strike(self, kind, victim, lasts_s):
        """Does it, and waits until it is over. Returns the attempt and the step that were under way."""
        attempt, step = self._at()
        self.farthest = max(self.farthest, step)
        process, link = self.place._running[victim], ("link", "set", f"{NAME}{victim}")
        if kind.startswith("link"):
            ip(*link, "down")
            time.sleep(lasts_s)
            ip(*link, "up")
        elif process.poll() is None:  # its number is still its own
            process.send_signal(signal.Signals[kind])
            if kind == "SIGSTOP":
                time.sleep(lasts_s)
                process.send_signal(signal.SIGCONT)
        return attempt, step


def job(options, name, *flags):
    """The job of a run in the bucket."""
    train = [*SMALL, *RANDOM, "--rules=fsdp", "--platform=cpu", "--devices=1",
             f"--compile_cache={options.folder}/compiled", "--set=train.checkpoint_every=5",
             "--set=train.steps=1000000", *QUICK_FLAGS, *flags]  # fmt: skip
    return Job(place="local", name=name, processes=options.processes, workdir=f"gs://bucket/{name}",
               logs=f"{options.folder}/{name}", train=shlex.join(train), max_retries=10**6)  # fmt: skip


def launch(place, tell):
    """The exit code of a launch. It waits less than on a real machine."""
    return Launch(place, 0, tell, Waits(poll=0.5, retry=1, longest=20, stop=120)).run()


def report(rows):
    """A table of the attacks."""
    print("| attack | how often | the run was started again | seconds to the next step: median, most |")
    print("| --- | --- | --- | --- |")
    for kind in ATTACKS:
        mine = [row for row in rows if row["kind"] == kind]
        back = sorted(row["back_s"] for row in mine if "back_s" in row)
        ended = sum(row.get("ended", True) for row in mine)
        shown = f"{back[len(back) // 2]}, {back[-1]}" if back else ""
        print(f"| {kind} | {len(mine)} | {ended} | {shown} |")


def attack(options, store):
    """Attacks a run, lets it end, and compares its losses with those of an undisturbed one. Returns an exit code."""
    rows = []
    results = options.folder / "results.jsonl"

    def record(row):
        rows.append(row)
        with results.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(len(rows), json.dumps(row), flush=True)

    def tell(line):
        if not line.startswith(("step", " ")):
            print(f"    {line}", flush=True)

    place = Hosts(job(options, "attacked"))
    attacker = Attacker(place, options.folder / "attacked", options, record)
    attacker.thread.start()
    try:
        code = launch(place, tell)
    finally:
        attacker.over.set()
    attacker.thread.join()
    report(rows)
    if attacker.error or code != STOPPED:
        print(f"after {attacker.done} attacks: {attacker.error or f'launch ended with {code}'}")
        return 1
    steps = attacker.farthest + 20
    ends = {"attacked": [], "undisturbed": ["--set=train.checkpoint_every=0"]}  # saves change no loss, but take long
    codes = [launch(Hosts(job(options, name, f"--steps={steps}", *more)), tell) for name, more in ends.items()]
    attacked, undisturbed = (losses(store.cat_file(f"bucket/{name}/metrics.jsonl").decode()) for name in ends)
    same = attacked == undisturbed and [step for step, _ in attacked] == list(range(1, len(attacked) + 1))
    print(f"{attacker.done} attacks on {options.processes} processes, {len(attacked)} steps, exit codes {codes}: the "
          f"losses are {'bitwise those' if same else 'NOT those'} of an undisturbed run")  # fmt: skip
    return 0 if same and codes == [0, 0] else 1


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attacks", type=int, default=100)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--minutes", type=float, default=600, help="no attack begins later; the comparison follows")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("runs/unattended"), help="is emptied")
    options = parser.parse_args(argv)
    options.folder = options.folder.absolute()
    shutil.rmtree(options.folder, ignore_errors=True)
    options.folder.mkdir(parents=True)
    for name in [name for name in os.environ if name.startswith(FROM_OUTSIDE)]:
        del os.environ[name]
    os.environ["GSPMD_LM_CACHE"] = str(options.folder / "cache")
    os.environ["PYTHONUNBUFFERED"] = "1"
    with network(options.processes), emulated_bucket() as store:
        return attack(options, store)


if __name__ == "__main__":
    sys.exit(main())
