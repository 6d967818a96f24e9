"""Processes of the command line that attacks start, and what they leave."""

import hashlib
import json
import os
import subprocess
import sys
import time

from tests.launched import ROOT

SMALL = [
    "--config=bench_4m", "--compile_cache=none",
    *(f"--set={setting}" for setting in (
        "model.layers=1", "model.embed=32", "model.mlp=64", "model.heads=4", "model.kv_heads=4", "model.head_dim=8",
        "data.batch=8", "data.seq=16", "train.log_every=1", "train.trackers=[]", "train.eval_every=0",
    )),
]  # fmt: skip
RANDOM = ["--set=data.source=random:64", "--set=model.vocab=128"]
ENDS_S = 15.0  # for the other processes, once one is gone
PATIENCE_S = 600


def start(arguments, folder, log, before=(), **environment):
    """A process of the command line whose caches lie in `folder`. before: a command that starts it."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_", "PJRT_", "NPROC"))}
    env |= {"GSPMD_LM_CACHE": str(folder / "cache"), "PYTHONUNBUFFERED": "1", **environment}
    with log.open("ab") as out:
        return subprocess.Popen(
            [*before, sys.executable, "main.py", *arguments], cwd=ROOT, env=env, stdout=out, stderr=out
        )


def finished(arguments, folder, log):
    """Runs the command to its end. Returns its seconds. Raises RuntimeError where it fails."""
    began = time.monotonic()
    code = start(arguments, folder, log).wait(PATIENCE_S)
    if code:
        raise RuntimeError(f"exit code {code}; see {log}\n{log.read_text()[-2000:]}")
    return time.monotonic() - began


def checkpoints(workdir):
    """The numbers of the checkpoints, the newest last."""
    return sorted(int(path.name) for path in (workdir / "checkpoints").iterdir() if path.name.isdigit())


def losses(metrics):
    """The steps of the text of a metrics.jsonl, each with its loss."""
    return [(row["step"], row["loss"]) for row in map(json.loads, metrics.splitlines()) if "loss" in row]


def arrays(folder):
    """One hash of the values of all arrays of a checkpoint."""
    import jax
    import numpy as np
    import orbax.checkpoint as ocp

    jax.config.update("jax_platforms", "cpu")
    handler = ocp.PyTreeCheckpointHandler()
    tree = handler.metadata(folder).tree
    as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
    restored = handler.restore(folder, args=ocp.args.PyTreeRestore(restore_args=as_numpy))
    total = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_flatten_with_path(restored)[0]:
        total.update(jax.tree_util.keystr(path).encode() + np.asarray(leaf).tobytes())
    return total.hexdigest()
