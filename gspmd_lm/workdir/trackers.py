"""Trackers: programs that show the metrics of runs, such as TensorBoard and Weights & Biases."""

import importlib
import importlib.util
import json
import math
import secrets
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from etils import epath

from gspmd_lm import files
from gspmd_lm.config import Train
from gspmd_lm.errors import InputError
from gspmd_lm.files import json_object
from gspmd_lm.workdir.layout import METRICS

NAMES = "trackers.json"  # in the workdir: what a tracker calls the run, so that a resumed run goes on there
FLUSH_S = 120.0  # how long figures may wait for being written to TensorBoard's file
_PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb", "trackio": "trackio"}


def check_installed(trackers: Sequence[str]) -> None:
    """Raises InputError where the package of a tracker is not installed."""
    for tracker in trackers:
        package = _PACKAGES[tracker]
        if importlib.util.find_spec(package) is None:
            raise InputError(
                f"train.trackers: {tracker} needs the package {package}, which is not installed\n"
                f"  fix   pip install {package}, or leave {tracker} out of train.trackers"
            )


def import_tracker(tracker: str) -> Any:
    """The imported package of a tracker. Some imports take seconds. Raises InputError where an import fails.

    tensorboardX would import torch, if torch is installed, only to name one of its types. Here it does not find torch.
    """
    hidden = tracker == "tensorboard" and "torch" not in sys.modules
    if hidden:
        sys.modules["torch"] = None  # pyright: ignore[reportArgumentType]
    try:
        return importlib.import_module(_PACKAGES[tracker])
    except ImportError as error:  # it is installed, as `check_installed` has seen, but something that it needs is not
        raise InputError(
            f"train.trackers: {tracker} cannot be imported: {error}\n"
            f"  fix   install what is missing, or leave {tracker} out of train.trackers"
        ) from error
    finally:
        if hidden:
            del sys.modules["torch"]


def describe_failure(tracker: str, error: Exception) -> str:
    """The warning about a tracker that failed, without which the run goes on."""
    why = " ".join(str(error).split()) or type(error).__name__
    return f"warning: {tracker} failed ({why}) and gets no more figures; {METRICS} has them all"


def start(
    workdir: epath.Path,
    start_step: int,
    train: Train,
    config: dict[str, Any],
    say: Callable[[str], None] = lambda _: None,
) -> "list[_TensorBoard | _Online]":
    """The trackers of a run that is at `start_step`. A run that was tracked before goes on under its old name.

    TensorBoard then hides the points of later steps. The others keep the points that they have. A tracker that cannot
    start is left out, and `say` is told why. Raises InputError if the file of names is damaged.
    """
    path = workdir / NAMES
    fix = "remove it: online trackers then begin a new run"
    names: dict[str, str] = json_object(path.read_bytes(), path, fix) if path.exists() else {}
    if not all(isinstance(name, str) for name in names.values()):
        raise InputError(f"{path}: not an object of texts\n  fix   {fix}")
    known = dict(names)
    started: list[_TensorBoard | _Online] = []
    for tracker in train.trackers:
        try:
            if tracker == "tensorboard":
                started.append(_TensorBoard(str(workdir / "tensorboard"), start_step + 1))
            else:
                started.append(_start_online(tracker, workdir, train, config, names))
        except InputError:  # a package that cannot be imported
            raise
        except Exception as error:  # each tracker raises what it likes
            say(describe_failure(tracker, error))
    if names != known:
        try:
            files.replace(path, json.dumps(names) + "\n")
        except OSError as error:
            say(f"warning: {path}: {files.reason(error)}; a resumed run will be another one for online trackers")
    return started


def _start_online(
    tracker: str, workdir: epath.Path, train: Train, config: dict[str, Any], names: dict[str, str]
) -> "_Online":
    """A started tracker. names: of the run, to which one that was not known is added."""
    if tracker == "wandb":
        names.setdefault(tracker, secrets.token_hex(4))
        local = None if files.is_remote(workdir) else str(workdir)
        options = {"id": names[tracker], "name": workdir.name, "tags": train.tags, "resume": "allow", "dir": local}
        return _Online(tracker, train, config, options)
    known_as = names.get(tracker)  # trackio knows runs by their names
    options = {"name": known_as or workdir.name, "resume": "allow" if known_as else "never"}
    begun = _Online(tracker, train, config, options)
    names[tracker] = begun.run.name
    return begun


class _TensorBoard:
    """TensorBoard's files, which this thread writes.

    tensorboardX 2.6 writes them in a thread of its own. When that ends with an error, such as on a full disk, its queue
    gets full, and whoever adds to it waits without end.
    """

    name = "tensorboard"

    def __init__(self, directory: str, purge_step: int):
        self.writer = import_tracker("tensorboard").SummaryWriter(directory, purge_step=purge_step)
        events = self.writer.file_writer.event_writer
        events._worker.stop()  # when it has written from which step on earlier points are hidden
        vars(events)["add_event"] = events._ev_writer.write_event
        self.flushed = -math.inf

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)
        if time.monotonic() - self.flushed > FLUSH_S:
            self.writer.flush()
            self.flushed = time.monotonic()

    def text(self, step: int, name: str, text: str) -> None:
        self.writer.add_text(name, text, step)

    def close(self) -> None:
        self.writer.close()


class _Online:
    """A run of Weights & Biases, or of trackio, whose runs have the same functions."""

    def __init__(self, tracker: str, train: Train, config: dict[str, Any], options: dict[str, Any]):
        self.name, group = tracker, train.group or None
        self.run = import_tracker(tracker).init(project=train.project, group=group, config=config, **options)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.run.log(dict(values), step=step)

    def text(self, step: int, name: str, text: str) -> None:
        """Nothing: texts are in the workdir."""

    def close(self) -> None:
        self.run.finish()
