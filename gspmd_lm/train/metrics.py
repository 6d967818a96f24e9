"""What a run writes down: metrics.jsonl, trackers, and the line that people watch."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from etils import epath

from gspmd_lm.config import InputError, Model


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


class Tracker(Protocol):
    """Somewhere that scalars go."""

    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class _TensorBoard:
    def __init__(self, directory: str):
        try:
            from tensorboardX import SummaryWriter
        except ImportError as error:
            raise InputError(_missing("tensorboard", "tensorboardX")) from error
        self.writer = SummaryWriter(directory)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        self.writer.close()


class _Wandb:
    """Weights & Biases, or trackio, which offers the same functions."""

    def __init__(self, package: str, name: str, config: dict[str, Any]):
        import importlib

        try:
            self.module = importlib.import_module(package)
        except ImportError as error:
            raise InputError(_missing(package, package)) from error
        self.run = self.module.init(project="gspmd_lm", name=name, config=config)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.module.log(dict(values), step=step)

    def close(self) -> None:
        self.module.finish()


def _missing(tracker: str, package: str) -> str:
    return (
        f"train.trackers: {tracker} needs the package {package}, which is not installed\n"
        f"  fix   pip install {package}, or leave {tracker} out of train.trackers"
    )


class Log:
    """metrics.jsonl and the trackers of a run. Only the first process makes one."""

    def __init__(
        self, workdir: epath.Path, start_step: int, trackers: Sequence[str], name: str, config: dict[str, Any]
    ):
        """Opens the log of a run that stands at `start_step`; rows of later steps belong to a course that was left."""
        self.path = workdir / "metrics.jsonl"
        self.remote = "://" in str(workdir)  # object stores do not append: the file is written whole
        old = self.path.read_text().splitlines() if self.path.exists() else []
        self.lines = [line for line in old if _step_of(line) <= start_step]
        if self.lines != old:
            self.path.write_text("".join(f"{line}\n" for line in self.lines))
        self.trackers: list[Tracker] = []
        for tracker in trackers:
            if tracker == "tensorboard":
                self.trackers.append(_TensorBoard(str(workdir / "tensorboard")))
            else:
                self.trackers.append(_Wandb(tracker, name, config))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Adds one row. Values that are not finite are written as null, which every JSON reader accepts."""
        plain = {key: value if math.isfinite(value) else None for key, value in values.items()}
        self.lines.append(json.dumps({"step": step, **plain}))
        if self.remote:
            self.path.write_text("".join(f"{line}\n" for line in self.lines))
        else:
            with self.path.open("a") as file:
                file.write(self.lines[-1] + "\n")
        finite = {key: value for key, value in values.items() if math.isfinite(value)}
        for tracker in self.trackers:
            tracker.log(step, finite)

    def close(self) -> None:
        for tracker in self.trackers:
            tracker.close()


def _step_of(line: str) -> float:
    """The step of a row; infinite, so that it goes, for a row that a kill cut short."""
    try:
        return json.loads(line)["step"]
    except (json.JSONDecodeError, KeyError, TypeError):
        return math.inf
