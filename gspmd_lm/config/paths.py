"""Paths of configs, rules files and caches, and the text of a file."""

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

import platformdirs

from gspmd_lm import files
from gspmd_lm.errors import InputError, did_you_mean

if TYPE_CHECKING:
    from etils import epath


def read_text(path: "Path | epath.Path") -> str:
    """The text of a file, without the mark that Windows writes before it.

    Raises InputError if the file cannot be read or is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from error
    except Exception as error:  # the packages that read addresses have no common class of errors
        if not isinstance(error, OSError) and not files.is_remote(path):
            raise
        raise InputError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from error


def cache_folder(name: str) -> Path:
    """The folder `name` in $GSPMD_LM_CACHE, or in the user's cache directory. It need not exist.

    Raises InputError if the variable names a place in an object store.
    """
    chosen = os.environ.get("GSPMD_LM_CACHE")
    if chosen and files.is_remote(chosen):
        raise InputError(
            f"GSPMD_LM_CACHE={chosen}: the cache must be a folder, because its files are mapped into memory\n"
            "  fix   give a folder of this machine; --compile_cache takes a bucket for compiled programs"
        )
    return (Path(chosen) if chosen else Path(platformdirs.user_cache_dir("gspmd_lm", appauthor=False))) / name


def records_folder() -> str:
    """The folder of the records of all runs, which may be remote: $GSPMD_LM_RUNS, or in the user's data directory."""
    chosen = os.environ.get("GSPMD_LM_RUNS")
    return chosen or str(Path(platformdirs.user_data_dir("gspmd_lm", appauthor=False)) / "runs")


def cache_entry(path: Path, *beside: Path) -> Path:
    """The path to which a user writes an entry of a cache: `path`, or where another user keeps it, one of their own.

    The latter has the user's number behind its name. It is taken if `path`, or a file `beside` it that writing needs,
    is there and may not be written to.
    """
    theirs = any(one.exists() and not os.access(one, os.W_OK, effective_ids=True) for one in (path, *beside))
    return path.with_name(f"{path.name}.{os.getuid()}") if theirs else path


def readable_entry(path: Path) -> Path:
    """The path from which a user reads a file of a cache: `path`, or `cache_entry` of it where it may not be read."""
    return cache_entry(path) if path.exists() and not os.access(path, os.R_OK, effective_ids=True) else path


def unwritable(path: Path, why: str | None, what: str = "") -> InputError:
    """The error that `what` cannot be written to a path in the cache."""
    return InputError(
        f"{path}: {what}cannot be written ({why})\n"
        "  fix   set GSPMD_LM_CACHE to a folder with free space that you may write to"
    )


def download(name: str, instead: str, then: str = "give FOLDER in its place", repo_type: str = "model") -> str:
    """The fix for a path that does not exist: how to get it where it is the name of a hub, such as Qwen/Qwen3-8B, since
    nothing is fetched here. For another path it is `instead`."""
    of_hub = re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", name) and not Path(name).parent.exists()
    if not of_hub or name.endswith((".yaml", ".yml", ".json")):
        return instead
    kind = "" if repo_type == "model" else f" --repo-type={repo_type}"
    return f"nothing is fetched: hf download {name}{kind} --local-dir=FOLDER, then {then}"


def _roots(folder: str) -> list[Path]:
    package = Path(__file__).parents[1]
    return [Path(), Path(folder), package.parent / folder, package / "shipped" / folder]


def known_names(folder: str) -> list[str]:
    """The names under which `find_file` finds a file, besides paths."""
    return sorted({file.stem for root in _roots(folder)[1:] for file in root.glob("*.yaml")})


def short_name(path: str, folder: str) -> str:
    """The short name of a file, such as tp8, if `find_file` finds it in `folder` by that name; else `path` itself."""
    name = Path(path).stem
    found = found_file(name, folder) if Path(path).parent.name == folder else None
    return name if found and found.resolve() == Path(path).resolve() else path


def found_file(name: str, folder: str) -> Path | None:
    """The path of the file `name`, as `find_file` looks for it; None if there is none."""
    name = str(files.expand_user(name))
    candidates = (root / one for root in _roots(folder) for one in (name, f"{name}.yaml"))
    # os.path, since a name that is too long for a file is no file, and Path.is_file raises OSError for it.
    return next((path for path in candidates if os.path.isfile(path)), None)


def find_file(name: str, folder: str) -> "Path | epath.Path":
    """The path of the file `name`, which may leave out .yaml, or may be an address such as gs://bucket/config.yaml.

    It is looked up as given, then in `folder` of the working directory, of the checkout and of the wheel. Raises
    InputError with the nearest known name. An address is not looked up.
    """
    if files.is_remote(name):
        return files.open_path(name)
    if found := found_file(name, folder):
        return found
    shipped = known_names(folder)
    fix = f"give a path, or one of {', '.join(shipped)}"
    raise InputError(
        f"{name}: no such file, here or in {folder}/{did_you_mean(Path(name).stem, shipped)}\n"
        f"  fix   {download(name, fix) if folder == 'configs' else fix}"
    )
