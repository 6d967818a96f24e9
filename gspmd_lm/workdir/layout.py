"""The names of the files that a run leaves in its workdir."""

import importlib.util
from collections.abc import Collection
from pathlib import Path

from etils import epath

from gspmd_lm import files
from gspmd_lm.errors import InputError

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


def is_run(folder: Path | epath.Path) -> bool:
    """Whether a folder is the workdir of a run or of an import."""
    return (folder / CONFIG).is_file()


def are_of_run(names: Collection[str]) -> bool:
    """Whether a folder with these names in it is the workdir of a run, which may just have begun."""
    return any(pair <= {*names} for pair in ({LOCK, HOLDER}, {CONFIG, RULES}, {CONFIG, CHECKPOINTS}))


def check_store(workdir: str) -> None:
    """Raises InputError for a remote path that is not in Google's store, or if the package for that is missing."""
    scheme, is_url, _ = workdir.partition("://")
    if is_url and scheme != "gs":  # Orbax 0.12.8 turns s3:// into s3:/ and calls it a relative path
        raise InputError(
            f"{workdir}: Orbax writes checkpoints to local paths and to gs://, not to {scheme}://\n"
            "  fix   mount the bucket as a file system and give its path, or use gs://"
        )
    if is_url and not importlib.util.find_spec("gcsfs"):
        raise InputError(f"{workdir}: gs:// needs a package that is not installed\n  fix   pip install gcsfs")


def find_earlier(workdir: str | None, name: str) -> str | None:
    """The path of a file that an earlier run left in a workdir; None where there is none.

    Raises InputError as `check_store` does.
    """
    if not workdir:
        return None
    check_store(workdir)
    path = files.open_path(workdir) / name
    return str(path) if path.is_file() else None
