"""Kills runs at random moments, starts them again, and compares what they leave with a run that nobody disturbed.

    python -m tests.attacks.kills --kind=train --kills=80         # training and saving
    python -m tests.attacks.kills --kind=shards --kills=20        # training on shards of tokens
    python -m tests.attacks.kills --kind=tokens --kills=40        # while a corpus is tokenized
    python -m tests.attacks.kills --kind=compile --kills=40       # while programs are compiled and kept
    python -m tests.attacks.kills --kind=convert --kills=40       # while a Hugging Face folder is converted, both ways
    python -m tests.attacks.kills --kind=processes --kills=20     # one of two or four processes; the others must end
    python -m tests.attacks.kills --kind=signals                  # SIGINT once and twice, SIGTERM; 1, 2, 4 processes
    python -m tests.attacks.kills --kind=slowed --kills=50        # SIGTERM, two, SIGKILL; one of two processes is slow
    python -m tests.attacks.kills --report                        # the table of all that was done so far

A trial is a chain: a run is killed and started again with the same command until it ends by itself, and then compared
bit for bit. Each trial is a line in --folder/results.jsonl, and the same command goes on where it stopped, so that an
hour of kills may be done in pieces.
"""

import argparse
import contextlib
import hashlib
import json
import random
import shutil
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path

from gspmd_lm.errors import STOPPED
from gspmd_lm.launch.local import free_port
from tests.attacks.runs import ENDS_S, PATIENCE_S, RANDOM, SMALL, arrays, checkpoints, finished, losses, start
from tests.attacks.slowed import slowed


def digest(folder, leave_out=("lock", "lock.json", "versions.json", "_CHECKPOINT_METADATA", "commit_success.txt")):
    """The sha256 of each file in a folder; of a checkpoint that of its arrays, whose files may be cut otherwise."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.name == "state" and path.is_dir():
            found[name] = arrays(path)
        elif path.is_file() and path.name not in leave_out and "/state/" not in name and path.name != "sha256.json":
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


class Kind:
    """What is done, and what must be the same afterwards. `prepare` makes what all trials share, in `self.shared`."""

    done_before = ()  # how what is said ends where a run was killed after all was done
    latest = 1.05  # when a kill comes, at the latest, as a share of the time of a run that nobody disturbs

    def __init__(self, folder):
        self.folder, self.shared = folder, folder / "shared"

    def prepare(self):
        self.shared.mkdir(parents=True, exist_ok=True)

    def command(self, trial):
        raise NotImplementedError

    def left(self, trial):
        raise NotImplementedError

    def at(self, trial):
        """What a kill met, for the table."""
        return ""


class Train(Kind):
    latest = 0.22  # so that one trial is killed several times

    def command(self, trial):
        return [*SMALL, *RANDOM, "--rules=none", f"--workdir={trial}/run", f"--compile_cache={self.shared}/compile",
                "--set=train.checkpoint_every=2", "--set=train.steps=600"]  # fmt: skip

    def left(self, trial):
        # What a kill after the last save left to be deleted stays there: a run with nothing to do changes nothing.
        steps = sorted(path.name for path in (trial / "run/checkpoints").iterdir() if path.name != "deleted")
        logged = losses((trial / "run/metrics.jsonl").read_text())
        return {"losses": logged, "steps": steps, "state": arrays(trial / "run/checkpoints/600/state")}

    def at(self, trial):
        folder = trial / "run/checkpoints"
        if folder.is_dir() and any("tmp" in path.name for path in folder.iterdir()):
            return "a save under way"
        return "training" if folder.is_dir() else "starting"


class Shards(Train):
    """Two folders of tokens, of documents of random lengths, of which 600 steps read about a tenth."""

    def prepare(self):
        super().prepare()
        draw = random.Random(0)
        for name in "ab":
            text = self.shared / f"{name}.jsonl"
            if not text.exists():
                lines = (json.dumps({"text": "".join(draw.choices("abcdefgh ", k=draw.randint(1, 90)))}) + "\n"
                         for _ in range(9000))  # fmt: skip
                text.write_text("".join(lines))
            finished(["tokenize", f"--set=data.source={text}", f"--out={self.shared / name}"], self.shared,
                     self.shared / "log.txt")  # fmt: skip

    def command(self, trial):
        source = f"--set=data.source=[{self.shared / 'a'}, {self.shared / 'b'}]"
        return [*super().command(trial), source, "--set=model.vocab=0", "--set=data.packing=documents"]


class Tokens(Kind):
    """A tokenizer of 512 tokens on 40 MB, in segments of 256 kB, so that progress is noted 160 times."""

    def prepare(self):
        super().prepare()
        draw = random.Random(0)
        words = ["".join(draw.choices("abcdefghijklmnop", k=draw.randint(2, 9))) for _ in range(5000)]
        if not (self.shared / "text.txt").exists():
            (self.shared / "text.txt").write_text(
                "\n".join(" ".join(draw.choices(words, k=12)) for _ in range(500_000))
            )
            finished(
                [*SMALL, "--rules=none", f"--set=data.source={self.shared}/text.txt", "--set=model.vocab=512",
                 f"--train_tokenizer={self.shared}/tokenizer.json"], self.shared, self.shared / "log.txt"
            )  # fmt: skip

    def command(self, trial):
        return [*SMALL, "--rules=none", "--steps=1", f"--workdir={trial}/run", "--set=model.vocab=512",
                f"--set=data.source={self.shared}/text.txt",
                f"--set=data.tokenizer={self.shared}/tokenizer.json"]  # fmt: skip

    def left(self, trial):
        return digest(trial / "cache/data", leave_out=())

    def at(self, trial):
        partial = list((trial / "cache/data").glob("*.partial"))
        return "tokenizing" if partial else "before or after"


class Compile(Kind):
    def command(self, trial):
        return [*SMALL, *RANDOM, "--rules=none", f"--workdir={trial}/run", f"--compile_cache={trial}/cache/compile",
                "--steps=4"]  # fmt: skip

    def left(self, trial):
        return {"losses": losses((trial / "run/metrics.jsonl").read_text())}

    def at(self, trial):
        entries = list((trial / "cache/compile").glob("*-cache")) if (trial / "cache/compile").is_dir() else []
        return f"{len(entries)} programs kept"


class Convert(Kind):
    """There and back: a folder of 90 MB becomes a workdir, and the workdir a folder."""

    done_before = ("has checkpoints already", "holds something already")

    def prepare(self):
        super().prepare()
        if (self.shared / "hub").exists():
            return
        import flax.linen as nn
        import jax
        import numpy as np

        from gspmd_lm import config
        from gspmd_lm.convert import export
        from gspmd_lm.model.families import init

        model = config.ModelConfig(layers=4, embed=512, heads=8, kv_heads=8, head_dim=64, mlp=2048, vocab=16000,
                                   context=64, compute_dtype="float32")  # fmt: skip
        export.write_folder(
            self.shared / "hub", model, jax.tree.map(np.asarray, nn.unbox(init(model, jax.random.key(0))))
        )

    def command(self, trial):
        if (trial / "imported").exists():
            return ["convert", f"--workdir={trial}/run", f"--to={trial}/out", "--rules=none"]
        return [
            "convert",
            f"--from={self.shared}/hub",
            f"--workdir={trial}/run",
            "--rules=none",
            "--set=data.source=random:64",
        ]

    def left(self, trial):
        (trial / "run/config.yaml").write_text("")  # it names the trial's folder
        return digest(trial / "run") | digest(trial / "out")


KINDS = {"train": Train, "shards": Shards, "tokens": Tokens, "compile": Compile, "convert": Convert}


def chain(kind, name, folder, record, draw, wanted):
    """One trial: killed again and again, until it ends by itself or `wanted` kills were done; then compared."""
    reference = folder / name / "reference.json"
    plain = folder / name / "undisturbed"
    log = folder / name / "log.txt"
    if not reference.exists():
        shutil.rmtree(plain, ignore_errors=True)
        plain.mkdir(parents=True)
        seconds = [finished(kind.command(plain), plain, log)]
        if name == "convert":
            (plain / "imported").touch()
            seconds.append(finished(kind.command(plain), plain, log))
        reference.write_text(json.dumps({"seconds": seconds, "left": kind.left(plain)}))
    known = json.loads(reference.read_text())
    trial = folder / name / f"trial{int(time.time() * 1000)}"
    trial.mkdir()
    kills = []
    for stage, seconds in enumerate(known["seconds"]):
        while True:
            process = start(kind.command(trial), trial, log)
            last = len(kills) >= wanted
            try:
                code = process.wait(PATIENCE_S if last else draw.uniform(0.05, kind.latest) * seconds)
            except subprocess.TimeoutExpired:
                at = kind.at(trial) or ("import", "export")[stage]
                process.kill()
                process.wait()
                if last:
                    record({"kind": name, "kills": kills, "survived": False, "why": f"hangs ({at}), see {trial}"})
                    return len(kills)
                kills.append({"at": at})
                continue
            if code and not (kills and log.read_text().rstrip().splitlines()[-2].endswith(kind.done_before)):
                why = f"exit code {code}: {log.read_text()[-3000:]}"
                record({"kind": name, "kills": kills, "survived": False, "why": why})
                return len(kills)
            break
        if name == "convert" and not stage:
            (trial / "imported").touch()
    left = json.loads(json.dumps(kind.left(trial)))
    differ = sorted(key for key in known["left"].keys() | left.keys() if known["left"].get(key) != left.get(key))
    record({"kind": name, "kills": kills, "survived": not differ, "why": f"differs in {differ}" if differ else ""})
    if not differ:
        shutil.rmtree(trial)
    return len(kills)


@contextlib.contextmanager
def together(count, folder, log, workdir, *more):
    """A context with `count` processes of one run, each with its own log. None of them outlives it."""
    port = free_port()
    run = [*SMALL, *RANDOM, "--rules=dp8", f"--workdir={workdir}", "--set=train.checkpoint_every=20",
           "--set=train.steps=100000", *more]  # fmt: skip
    processes = [
        start([*run, f"--coordinator=127.0.0.1:{port}", f"--num_processes={count}", f"--process_id={index}"], folder,
              log.with_name(f"{log.stem}-{index}.txt"))
        for index in range(count)
    ]  # fmt: skip
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def wait_for(processes, limit_s):
    """The exit codes of processes; None for one that does not end in time."""
    began, codes = time.monotonic(), []
    for process in processes:
        try:
            codes.append(process.wait(max(0.1, limit_s - (time.monotonic() - began))))
        except subprocess.TimeoutExpired:
            codes.append(None)
    return codes


def rows_of(workdir):
    """How many rows the log of a run has."""
    path = workdir / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def reached(workdir, rows, processes):
    """Waits until the log of a run has some rows. Raises RuntimeError where a process ends before."""
    began = time.monotonic()
    while time.monotonic() - began < PATIENCE_S:
        if any(process.poll() is not None for process in processes):
            raise RuntimeError("a process ended before it was killed")
        if rows_of(workdir) >= rows:
            return time.monotonic() - began
        time.sleep(0.1)
    raise RuntimeError("the run does not come forward")


def lose_one(folder, record, draw, count, victim, how):
    """One of `count` processes is killed, or only stopped; then all are started again."""
    base = folder / "processes" / f"trial{int(time.time() * 1000)}"
    base.mkdir(parents=True)
    workdir = base / "run"
    facts = {"kind": "processes", "kills": [{"at": f"{how} of process {victim} of {count}"}]}
    with together(count, folder, base / "log.txt", workdir) as processes:
        reached(workdir, 30, processes)
        time.sleep(draw.uniform(0, 2))
        processes[victim].send_signal(signal.Signals[how])
        if how == "SIGSTOP":
            time.sleep(100)
            alive = all(process.poll() is None for process in processes)
            processes[victim].send_signal(signal.SIGCONT)
            try:
                reached(workdir, rows_of(workdir) + 20, processes)
                went_on = True
            except RuntimeError:
                went_on = False
            good, why = alive and went_on, f"alive {alive}"
        else:
            began = time.monotonic()
            codes = wait_for(processes, ENDS_S)
            took_s, rows, saved = time.monotonic() - began, rows_of(workdir), checkpoints(workdir)
            with together(count, folder, base / "again.txt", workdir) as again:
                restart_s = reached(workdir, rows + 5, again)
            restored = not saved or f"restored step {saved[-1]} of" in (base / "again-0.txt").read_text()
            good, why = None not in codes and all(codes) and restored, f"restored {restored}"
            facts |= {"others_ended_after_s": round(took_s, 1), "codes": codes, "back_after_s": round(restart_s, 1)}
    record(facts | {"survived": good, "why": "" if good else f"{why}, see {base}"})
    shutil.rmtree(workdir)


def signals(folder, record, count, victim, sent):
    """Signals to one process of a run: all must end, after one with a checkpoint of the step they stopped at."""
    base = folder / "signals" / f"trial{int(time.time() * 1000)}"
    base.mkdir(parents=True)
    workdir = base / "run"
    with together(count, folder, base / "log.txt", workdir) as processes:
        reached(workdir, 30, processes)
        for number in sent:
            processes[victim].send_signal(number)
            time.sleep(0.1)
        began = time.monotonic()
        codes = wait_for(processes, 60)
        took_s = time.monotonic() - began
    names = "+".join(signal.Signals(number).name for number in sent)
    saved = checkpoints(workdir)
    if len(sent) == 1:
        said = (base / "log-0.txt").read_text()
        good = all(code == STOPPED for code in codes) and f"stopped at step {saved[-1]} on request" in said
    else:  # the second one ends the run at once, so that what was saved last stays the newest
        good = None not in codes and bool(saved)
    record({"kind": "signals", "kills": [{"at": f"{names} to process {victim} of {count}"}], "codes": codes,
            "took_s": round(took_s, 1), "saved": saved[-1:], "survived": good,
            "why": "" if good else f"see {base}"})  # fmt: skip


def report(folder):
    """The table of what was done so far."""
    rows = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    print("| kind | kills | trials | survived | where they hit |\n| --- | --- | --- | --- | --- |")
    for kind in dict.fromkeys(row["kind"] for row in rows):
        mine = [row for row in rows if row["kind"] == kind]
        places = Counter(kill["at"] for row in mine for kill in row["kills"])
        where = ", ".join(f"{count} {place}" for place, count in places.most_common())
        kills = sum(len(row["kills"]) for row in mine)
        print(f"| {kind} | {kills} | {len(mine)} | {sum(row['survived'] for row in mine)} | {where} |")
    for row in rows:
        if not row["survived"]:
            print(json.dumps(row)[:2000])


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=[*KINDS, "processes", "signals", "slowed"])
    parser.add_argument("--kills", type=int, default=20, help="how many in all, earlier ones of this kind counted")
    parser.add_argument("--folder", type=Path, default=Path("runs/attacks"))
    parser.add_argument("--report", action="store_true")
    asked = parser.parse_args(argv)
    asked.folder.mkdir(parents=True, exist_ok=True)
    folder = asked.folder.absolute()
    results = folder / "results.jsonl"

    def record(row):
        with results.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(json.dumps(row)[:300], flush=True)

    rows = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    done = sum(len(row["kills"]) for row in rows if row["kind"] == asked.kind)
    draw = random.Random(f"{asked.kind}{done}")
    if asked.kind in KINDS:
        kind = KINDS[asked.kind](folder / asked.kind)
        kind.prepare()
        while done < asked.kills:
            done += chain(kind, asked.kind, folder, record, draw, asked.kills - done)
    elif asked.kind == "processes":
        while done < asked.kills:
            count = (2, 4)[done % 2]
            lose_one(folder, record, draw, count, draw.randrange(count), "SIGSTOP" if done % 5 == 4 else "SIGKILL")
            done += 1
    elif asked.kind == "signals":
        cases = [(1, 0, [2]), (1, 0, [2, 2]), (1, 0, [15]), (2, 0, [2]), (2, 1, [2]), (2, 0, [2, 2]), (2, 1, [2, 2]),
                 (2, 1, [15]), (4, 0, [15]), (4, 3, [15]), (4, 2, [2, 2])]  # fmt: skip
        for count, victim, sent in cases[done:]:
            signals(folder, record, count, victim, sent)
    elif asked.kind == "slowed":
        for number in range(done, asked.kills):
            slowed(folder, record, random.Random(f"slowed{number}"))
    if asked.report or asked.kind:
        report(folder)


if __name__ == "__main__":
    main()
