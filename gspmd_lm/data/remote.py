"""Files from elsewhere, such as gs:// and hf://, copied to this machine once."""

import contextlib
import dataclasses
import functools
import hashlib
import logging
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import fsspec.core

from gspmd_lm import files
from gspmd_lm.config.paths import cache_entry, cache_folder, unwritable
from gspmd_lm.data import formats, readers
from gspmd_lm.errors import InputError


class Progress(Protocol):
    """Is told the current task, the bytes that are done and those in all (0 and 0 for a wait), and perhaps a rate."""

    def __call__(self, what: str, done: int, total: int, rate: str = "", /) -> None: ...


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


@dataclasses.dataclass(frozen=True)
class RemoteFile:
    """A file in a store."""

    store: Any
    name: str  # its path in the store
    address: str
    place: str  # what named it, for errors
    size_bytes: int
    version: str  # another one when the store says that the file has changed

    @property
    def copy(self) -> Path:
        """Where its copy stands, or would."""
        return cache_folder("copies") / self.version / Path(self.name).name

    @contextlib.contextmanager
    def part(self, span: formats.Span | None) -> Iterator[Path]:
        """A context with a copy of the file, or of a span of it, which ends with the context."""
        folder = cache_folder("copies")
        folder.mkdir(parents=True, exist_ok=True)
        files.trim(folder.glob(f"*{files.PARTIAL}"), sys.maxsize)  # what killed processes left
        with tempfile.TemporaryDirectory(suffix=files.PARTIAL, dir=folder) as made:
            path = Path(made, Path(self.name).name)
            with _naming(f"{self.place}: {self.address}"):
                if span is None:
                    self.store.get_file(self.name, str(path))
                else:
                    path.write_bytes(self.store.cat_file(self.name, *span))
            yield path

    def read_start(self, size: int) -> bytes:
        """The first bytes of the file."""
        with _naming(f"{self.place}: {self.address}"):
            return self.store.cat_file(self.name, 0, size)

    def whole_lines(self, span: formats.Span) -> formats.Span:
        """From the first of the lines that begin in a span of the file to behind the last of them."""
        with (
            _naming(f"{self.place}: {self.address}"),
            self.store.open(self.name, "rb", cache_type="readahead") as file,
        ):
            return readers.lines_between(file, *span)


def open_store(address: str, place: str, **options: Any) -> tuple[Any, str]:
    """The file system of fsspec for an address, and the path in it.

    Raises an InputError that begins with `place` if a package is missing or the address has no meaning.
    """
    try:
        store, path = fsspec.core.url_to_fs(address, **options)
    except ImportError as error:
        package = _PACKAGES.get(address.partition("://")[0])
        fix = f"pip install {package}" if package else str(error)
        raise InputError(f"{place}: {address}: a package is missing\n  fix   {fix}") from error
    except ValueError as error:
        raise InputError(f"{place}: {address}: {error}\n  fix   give gs://, s3://, hf:// or a local path") from error
    except Exception as error:  # of any of these packages; they have no common class
        raise _refusal(f"{place}: {address}", error) from error
    logging.getLogger(type(store).__module__.partition(".")[0]).setLevel(logging.CRITICAL)  # it logs what it raises
    return store, str(path)


def listing(address: str, place: str, skip: Callable[[str, str], None] = lambda *_: None) -> list[RemoteFile]:
    """The files of known formats at an address: a file, a folder or a glob. None of them is copied.

    Raises an InputError that begins with `place` if a package is missing, or if the address matches nothing.
    """
    kind, names = address.partition("://")[0], list_names(address, place)
    store, _ = open_store(address, place)
    with _naming(f"{place}: {address}"):
        facts = {name: store.info(name) for name in names if formats.format_of(Path(name))}
    for name in names:
        if name not in facts:
            skip("unknown ending", f"{kind}://{name}")
    found = []
    for name, about in facts.items():
        version = hashlib.sha256(f"{kind} {name} {sorted(about.items(), key=str)}".encode()).hexdigest()[:16]
        found.append(RemoteFile(store, name, f"{kind}://{name}", place, about.get("size") or 0, version))
    return found


def copies(
    address: str, place: str, skip: Callable[[str, str], None] = lambda *_: None, progress: Progress | None = None
) -> list[Path]:
    """Local copies of the files of known formats at an address: a file, a folder or a glob.

    A file is copied once, and again when the store says that it has changed. Raises an InputError that begins with
    `place` as `listing` does, or if a file cannot be read.
    """
    found = listing(address, place, skip)
    local_copies, done, total = [], 0, sum(file.size_bytes for file in found)

    def report(before_bytes: int, copied_bytes: int) -> None:
        now_bytes = before_bytes + copied_bytes
        if progress:
            progress("copying files", now_bytes, max(total, now_bytes))

    for file in found:
        copy = file.copy
        if not _is_copied(copy):
            copy = cache_entry(copy.parent, copy.parent.with_suffix(".lock")) / copy.name
            _copy(file, copy, functools.partial(report, done))
        done += file.size_bytes
        local_copies.append(copy)
    return local_copies


def beside(address: str, names: Sequence[str], place: str) -> dict[str, bytes]:
    """The small files beside the one at an address, name -> content: those of `names` that there are.

    A name may end in a pattern, such as folder/*.jinja. Raises InputError as `open_store` does, or if a file cannot be
    read.
    """
    store, path = open_store(address, place)
    folder = path.rpartition("/")[0]
    with _naming(f"{place}: {address}"):
        found = [f"{folder}/{name}" for name in names if "*" not in name and store.exists(f"{folder}/{name}")]
        for name in names:
            if "*" in name and store.isdir(f"{folder}/{name.rpartition('/')[0]}"):
                found += store.glob(f"{folder}/{name}")
        return {one.removeprefix(folder).lstrip("/"): store.cat_file(one) for one in sorted(found)}


def _copy(file: RemoteFile, copy: Path, copied: Callable[[int], None]) -> None:
    """Copies one file; of several processes on a machine, one does, and the others wait for it."""
    try:
        copy.parent.mkdir(parents=True, exist_ok=True)
        with files.lock(f"{copy.parent}.lock"):
            if _is_copied(copy):
                return
            with files.replacing(copy) as new, new.open("wb") as out:
                for block in _blocks(file):
                    out.write(block)
                    copied(out.tell())
            files.seal(copy.parent, (copy.name,))
    except OSError as error:
        raise unwritable(copy.parent, error.strerror) from error


def _is_copied(copy: Path) -> bool:
    return copy.is_file() and not files.damage(copy.parent, (copy.name,))


def _blocks(file: RemoteFile) -> Iterator[bytes]:
    with _naming(f"{file.place}: {file.address}"), file.store.open(file.name, "rb") as source:
        while block := source.read(_BLOCK_BYTES):
            yield block


def list_names(address: str, place: str) -> list[str]:
    """The paths in the store of all files at an address: a file, a folder or a glob.

    Raises an InputError that begins with `place` as `open_store` does, or if the address matches nothing.
    """
    store, path = open_store(address, place)
    with _naming(f"{place}: {address}"):
        if any(character in path for character in "*?[") and not store.exists(path):
            names = sorted(name for name in store.glob(path) if not store.isdir(name))
        else:
            names = sorted(store.find(path))  # of a file, the file itself
    if not names:
        raise InputError(f"{place}: {address} matches no file\n  fix   correct the address")
    return names


@contextlib.contextmanager
def _naming(place: str) -> Iterator[None]:
    """A context in which the errors of a store become InputErrors that begin with `place`."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:  # stores have no common class of errors
        raise _refusal(place, error) from error


def _refusal(place: str, error: Exception) -> InputError:
    message = " ".join(str(error).split())
    return InputError(
        f"{place}: cannot be read ({type(error).__name__}{f': {message}' if message else ''})\n"
        "  fix   correct the address, or log in to the store"
    )
