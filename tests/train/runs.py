"""Short runs of a small config, and what they left behind."""

import json

from gspmd_lm.runtime import startup

CPU = startup.Runtime("cpu", "cpu", 8, 0, 1)
TRAIN = {"steps": 12, "log_every": 1, "checkpoint_every": 4, "keep_checkpoints": 2, "eval_every": 6, "trackers": ()}


def rows_of(workdir):
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def losses_of(workdir):
    return {row["step"]: row["loss"] for row in rows_of(workdir) if "loss" in row}


def state_of(run):
    with run.checkpoints() as checkpoints:
        at, state, _ = checkpoints.restore(run.step.abstract_state)
    return at, state
