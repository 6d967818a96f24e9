"""Files from elsewhere, such as gs:// and hf://, copied to this machine once."""

import functools
import hashlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import filelock
import fsspec.core

from gspmd_lm import files
from gspmd_lm.config.paths import cache_entry, cache_folder, unwritable
from gspmd_lm.data import formats
from gspmd_lm.errors import InputError

Progress = Callable[[str, int, int], None]  # the current task, bytes done, bytes in all; 0 and 0 for a wait

# The package that reads addresses of a kind, where fsspec itself does not.
_PACKAGES = {
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "s3": "s3fs",
    "hf": "huggingface_hub",
    "http": "aiohttp",
    "https": "aiohttp",
    "az": "adlfs",
    "abfs": "adlfs",
}
_BLOCK_BYTES = 1 << 20


def copies(
    address: str, place: str, skip: Callable[[str, Path], None] = lambda *_: None, progress: Progress | None = None
) -> list[Path]:
    """Local copies of the files of known formats at an address: a file, a folder or a glob.

    A file is copied once, and again when the store says that it has changed. Raises an InputError that begins with
    `place` if a package is missing, the address matches nothing, or a file cannot be read.
    """
    kind = address.partition("://")[0]
    try:
        store, path = fsspec.core.url_to_fs(address)
    except ImportError as error:
        package = _PACKAGES.get(kind)
        fix = f"pip install {package}" if package else str(error)
        raise InputError(f"{place}: {address}: a package is missing\n  fix   {fix}") from error
    except ValueError as error:
        raise InputError(f"{place}: {address}: {error}\n  fix   give gs://, s3://, hf:// or a local path") from error
    except Exception as error:  # of any of these packages; they have no common class
        raise _refusal(f"{place}: {address}", error) from error
    try:
        names = _sorted_names(store, str(path))
        facts = {name: store.info(name) for name in names if formats.format_of(Path(name))}
    except Exception as error:
        raise _refusal(f"{place}: {address}", error) from error
    for name in names:
        if name not in facts:
            skip("unknown ending", Path(f"{kind}://{name}"))
    if not names:
        raise InputError(f"{place}: {address} matches no file\n  fix   correct the address")
    local_copies, done, total = [], 0, sum(about.get("size") or 0 for about in facts.values())

    def report(before_bytes: int, copied_bytes: int) -> None:
        now_bytes = before_bytes + copied_bytes
        if progress:
            progress("copying files", now_bytes, max(total, now_bytes))

    for name, about in facts.items():
        version = hashlib.sha256(f"{kind} {name} {sorted(about.items(), key=str)}".encode()).hexdigest()[:16]
        copy = cache_folder("copies") / version / Path(name).name
        if not _is_copied(copy):
            copy = cache_entry(copy.parent, copy.parent.with_suffix(".lock")) / copy.name
            _copy(store, name, copy, f"{place}: {kind}://{name}", functools.partial(report, done))
        done += about.get("size") or 0
        local_copies.append(copy)
    return local_copies


def beside(address: str, names: Sequence[str], place: str) -> dict[str, bytes]:
    """The small files beside the one at an address, name -> content: those of `names` that there are.

    A name may end in a pattern, such as folder/*.jinja. Raises InputError as `copies` does.
    """
    store, path = fsspec.core.url_to_fs(address)
    folder = str(path).rpartition("/")[0]
    try:
        found = [f"{folder}/{name}" for name in names if "*" not in name and store.exists(f"{folder}/{name}")]
        for name in names:
            if "*" in name and store.isdir(f"{folder}/{name.rpartition('/')[0]}"):
                found += store.glob(f"{folder}/{name}")
        return {one.removeprefix(folder).lstrip("/"): store.cat_file(one) for one in sorted(found)}
    except Exception as error:  # stores have no common class of errors
        raise _refusal(f"{place}: {address}", error) from error


def _copy(store: Any, name: str, copy: Path, place: str, copied: Callable[[int], None]) -> None:
    """Copies one file; of several processes on a machine, one does, and the others wait for it."""
    try:
        copy.parent.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(f"{copy.parent}.lock")
        lock.acquire()
    except OSError as error:
        raise unwritable(copy.parent, error.strerror) from error
    try:
        if _is_copied(copy):
            return
        with files.replacing(copy) as new, new.open("wb") as out:
            for block in _blocks(store, name, place):
                out.write(block)
                copied(out.tell())
        files.seal(copy.parent, (copy.name,))
    finally:
        lock.release()


def _is_copied(copy: Path) -> bool:
    return copy.is_file() and not files.damage(copy.parent, (copy.name,))


def _blocks(store: Any, name: str, place: str) -> Iterator[bytes]:
    try:
        with store.open(name, "rb") as source:
            while block := source.read(_BLOCK_BYTES):
                yield block
    except Exception as error:  # stores have no common class of errors
        raise _refusal(place, error) from error


def _sorted_names(store: Any, path: str) -> list[str]:
    if any(character in path for character in "*?[") and not store.exists(path):
        return sorted(name for name in store.glob(path) if not store.isdir(name))
    return sorted(store.find(path))  # of a file, the file itself


def _refusal(place: str, error: Exception) -> InputError:
    message = " ".join(str(error).split())
    return InputError(
        f"{place}: cannot be read ({type(error).__name__}{f': {message}' if message else ''})\n"
        "  fix   correct the address, or log in to the store"
    )
