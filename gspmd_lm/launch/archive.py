"""The archive of the code that stands here, with the files that the flags of train name, for hosts that lack them."""

from pathlib import Path

from gspmd_lm import files, versions
from gspmd_lm.errors import InputError
from gspmd_lm.launch import place
from gspmd_lm.launch.job import Job

NAME = "gspmd_lm.tar.gz"
_NAMING_FILES = ("config", "rules", "chip", "executable", "data.tokenizer")  # flags and settings
_OF_CHECKOUT = ("main.py", "pyproject.toml", "README.md", "LICENSE", "gspmd_lm", "rules", "configs")


def own_files(job: Job) -> list[str]:
    """The files in this folder that the flags of train name, and that are not sent with the checkout anyway.

    Raises InputError for one that lies outside of this folder, since hosts would look for it there.
    """
    found, words = [], job.arguments
    for word, following in zip(words, [*words, ""][1:], strict=True):
        name, equals, value = word.lstrip("-").removeprefix("set=").partition("=")
        value = value if equals else following  # --config=NAME, or --config NAME
        if name in _NAMING_FILES and value and files.expand_user(value).exists():
            path = Path(value)
            if path.is_absolute() or ".." in path.parts or value.startswith("~"):
                raise InputError(f"train: {value}: lies outside of this folder\n  fix   copy it here")
            if not path.parts:
                raise InputError(f"train: {value}: is all of this folder\n  fix   name a folder in it, and its path")
            sent = versions.PACKAGE.parent / path
            if path.parts[0] not in _OF_CHECKOUT or not sent.exists() or not sent.samefile(path):
                found.append(value)
    return found


def command(job: Job, file: str) -> list[str]:
    """The command that makes the archive in `file`. Raises InputError if there is no checkout."""
    checkout = versions.PACKAGE.parent
    if not (checkout / "main.py").exists():
        raise InputError(
            "the code is sent from a checkout, and this package was installed without one\n"
            "  fix   git clone the repository, and start launch with its main.py"
        )
    here = [] if checkout == Path.cwd() else ["-C", str(checkout)]
    own = own_files(job)
    back = ["-C", str(Path.cwd()), *own] if own else []
    return ["tar", "-czf", file, "--exclude=__pycache__", *here, *_OF_CHECKOUT, *back]


def make(job: Job) -> Path:
    """The archive, in the folder of the logs."""
    path = files.expand_user(job.logs).absolute() / NAME
    path.parent.mkdir(parents=True, exist_ok=True)
    place.call(command(job, str(path)))
    return path
