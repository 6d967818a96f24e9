"""The metrics of a run: metrics.jsonl, trackers, and the line that is printed."""

import importlib
import importlib.util
import json
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax
from etils import epath

from gspmd_lm import files
from gspmd_lm.config import Data, Model
from gspmd_lm.errors import InputError


def flops_per_token(model: Model, parameter_count: int, seq: int, trained_count: int | None = None) -> float:
    """Model FLOPs of one token, forward and backward, recomputation not counted: 6 P + 12 L N H T.

    P leaves out tables that are only looked up. Where only `trained_count` parameters are trained, the others have no
    gradient: 2 FLOPs less for each. Source: PaLM, arXiv 2204.02311, appendix B.
    """
    looked_up = 0 if model.tied_embeddings else model.vocab_rows * model.embed
    if model.positions == "learned":
        looked_up += model.context * model.embed
    multiplied = parameter_count - looked_up
    gradients = multiplied if trained_count is None or model.lora is None else trained_count
    return 4.0 * multiplied + 2.0 * gradients + 12.0 * model.layers * model.heads * model.head_dim * seq


class Meter:
    """Turns the results of steps and the clock into logged values and the line that is printed."""

    def __init__(self, data: Data, flops_per_token: float, peak_flops_per_s: float | None, start: int):
        """`peak_flops_per_s`: of all devices together; None where it is not known."""
        self.tokens = data.batch * data.seq
        self.flops, self.peak = flops_per_token, peak_flops_per_s
        self.wait_s = 0.0
        self.restart(start)

    def restart(self, step: int) -> None:
        """Begins a new interval, so that evaluation and saving are not counted as steps."""
        self.began, self.at, self.wait_s = time.perf_counter(), step, 0.0

    def waiting(self, batches: Any) -> Any:
        """The batches. The time spent waiting for them is recorded."""
        batches = iter(batches)
        while True:
            before = time.perf_counter()
            batch = next(batches, None)
            self.wait_s += time.perf_counter() - before
            if batch is None:
                return
            yield batch

    def read(self, step: int, values: Mapping[str, jax.Array]) -> dict[str, float]:
        """The values of the step just dispatched, and the speed since the last read. Waits for the step."""
        found = {name: float(value) for name, value in jax.device_get(values).items()}
        steps = step - self.at
        step_time_s = (time.perf_counter() - self.began) / steps
        found["perplexity"] = math.exp(min(found.pop("cross_entropy"), 700.0))
        found["step_time_s"] = step_time_s
        found["tokens_per_s"] = self.tokens / step_time_s
        found["data_wait_s"] = self.wait_s / steps
        if self.peak:
            found["mfu"] = found["tokens_per_s"] * self.flops / self.peak
        self.restart(step)
        return found

    @staticmethod
    def line(step: int, stop: int, values: Mapping[str, float]) -> str:
        """The line that is printed for a step."""
        mfu = f"  mfu {values['mfu']:.1%}" if "mfu" in values else ""
        skipped = f"  skipped {values['skipped_steps']:.0f}" if values["skipped_steps"] else ""
        return (
            f"step {step:>{len(str(stop))}}/{stop}  loss {values['loss']:.6f}  accuracy {values['accuracy']:.3f}  "
            f"|gradient| {values['gradient_norm']:.3f}  lr {values['learning_rate']:.2e}  "
            f"{values['step_time_s'] * 1e3:.0f} ms/step  {values['tokens_per_s']:,.0f} tokens/s{mfu}{skipped}"
        )


class Tracker(Protocol):
    """A destination for scalars."""

    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


_PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb", "trackio": "trackio"}


def check_trackers(trackers: Sequence[str]) -> None:
    """Raises InputError where the package of a tracker is not installed."""
    for tracker in trackers:
        package = _PACKAGES[tracker]
        if importlib.util.find_spec(package) is None:
            raise InputError(
                f"train.trackers: {tracker} needs the package {package}, which is not installed\n"
                f"  fix   pip install {package}, or leave {tracker} out of train.trackers"
            )


def import_tracker(tracker: str) -> Any:
    """The imported package of a tracker. Some imports take seconds.

    tensorboardX would import torch, if torch is installed, only to name one of its types. Here it does not find torch.
    """
    hidden = tracker == "tensorboard" and "torch" not in sys.modules
    if hidden:
        sys.modules["torch"] = None  # pyright: ignore[reportArgumentType]
    try:
        return importlib.import_module(_PACKAGES[tracker])
    finally:
        if hidden:
            del sys.modules["torch"]


class _TensorBoard:
    def __init__(self, directory: str):
        self.writer = import_tracker("tensorboard").SummaryWriter(directory)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        self.writer.close()


class _Wandb:
    """Weights & Biases, or trackio, which offers the same functions."""

    def __init__(self, tracker: str, name: str, config: dict[str, Any]):
        self.module = import_tracker(tracker)
        self.run = self.module.init(project="gspmd_lm", name=name, config=config)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.module.log(dict(values), step=step)

    def close(self) -> None:
        self.module.finish()


class Log:
    """metrics.jsonl and the trackers of a run. Only the first process makes one."""

    def __init__(
        self,
        workdir: epath.Path,
        start_step: int,
        trackers: Sequence[str],
        config: dict[str, Any],
        say: Callable[[str], None] = lambda _: None,
    ):
        """Opens the log of a run that is at `start_step`. Rows of later steps are dropped.

        Rows that cannot be read are left out, and `say` reports them. The last row is not reported, because a process
        that was killed may have cut it.
        """
        self.path = workdir / "metrics.jsonl"
        if self.path.is_dir():
            raise InputError(f"{self.path}: is a folder, but must be a file\n  fix   move it away")
        old = self.path.read_bytes() if self.path.exists() else b""
        rows = old.splitlines()
        steps = [_step_of(row) for row in rows]
        damaged = [number for number, step in enumerate(steps[:-1], 1) if step is None]
        if damaged:
            where = ", ".join(map(str, damaged[:5]))
            say(f"warning: {self.path}: line {where} cannot be read and is left out ({len(damaged)} in all)")
        kept = [row for row, step in zip(rows, steps, strict=True) if step is not None and step <= start_step]
        text = b"".join(row + b"\n" for row in kept)
        if old != text:
            files.replace(self.path, text)
        self.remote = text if files.is_remote(self.path) else None
        self.trackers: list[Tracker] = []
        for tracker in trackers:
            if tracker == "tensorboard":
                self.trackers.append(_TensorBoard(str(workdir / "tensorboard")))
            else:
                self.trackers.append(_Wandb(tracker, workdir.name, config))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Adds one row. Values that are not finite are written as null, which every JSON reader accepts."""
        plain = {key: value if math.isfinite(value) else None for key, value in values.items()}
        row = json.dumps({"step": step, **plain}) + "\n"
        if self.remote is not None:  # object stores do not append: the file is written whole
            self.remote += row.encode()
            files.replace(self.path, self.remote)
        else:
            with files.naming(Path(self.path)), self.path.open("a") as file:
                file.write(row)
        finite = {key: value for key, value in values.items() if math.isfinite(value)}
        for tracker in self.trackers:
            tracker.log(step, finite)

    def close(self) -> None:
        for tracker in self.trackers:
            tracker.close()


def _step_of(row: bytes) -> float | None:
    """The step of a row; None for one that is damaged."""
    try:
        return float(json.loads(row)["step"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
