"""The names of the files that a run leaves in its workdir."""

from collections.abc import Collection
from pathlib import Path

from etils import epath

from gspmd_lm import files

CONFIG, RULES = "config.yaml", "rules.yaml"  # as resolved
BEGINNING = "beginning.json"  # of a run with --elastic: the rules and devices from which it derives other ones
ABOUT = "versions.json"  # the command, the versions and the machine
STEP = "step.json"  # the predicted step and the measured one, by part
METRICS, SAMPLES = "metrics.jsonl", "samples.jsonl"
CHECKPOINTS = "checkpoints"
TOKENIZER = "tokenizer.json"  # of the run, with the files about it beside it
CLASSES = "classes.json"  # the labels of its data; the place of one is its number
PAGE = "plot.html"  # of a single run
LOCK, HOLDER = "lock", "lock.json"  # the file that the system locks, and the name of its holder
IMPORTED = "hugging_face"  # a folder: the files that came with imported weights
IGNORED = "ignored.json"  # in it: the fields of config.json that --ignore named


def workdir_path(name: str) -> epath.Path:
    """A local path, in which ~ may stand for the home folder, or a remote one."""
    return epath.Path(name if files.is_remote(name) else files.expand_user(name))


def is_run(folder: Path | epath.Path) -> bool:
    """Whether a folder is the workdir of a run or of an import."""
    return (folder / CONFIG).is_file()


def are_of_run(names: Collection[str]) -> bool:
    """Whether a folder with these names in it is the workdir of a run, which may just have begun."""
    return any(pair <= {*names} for pair in ({LOCK, HOLDER}, {CONFIG, RULES}, {CONFIG, CHECKPOINTS}))


def find_earlier(workdir: str | None, name: str) -> str | None:
    """The path of a file that an earlier run left in a local workdir; None where there is none."""
    path = files.expand_user(workdir) / name if workdir else None
    return str(path) if path and path.is_file() else None
