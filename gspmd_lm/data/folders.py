"""A folder of files that are written whole: on this machine, or in a bucket."""

import contextlib
import dataclasses
import functools
import logging
import os
import secrets
import shutil
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from gspmd_lm import files
from gspmd_lm.data import remote
from gspmd_lm.errors import InputError, StoreFailed
from gspmd_lm.units import human_duration

MAKING = "making"  # the subfolder of files that are removed when a folder of tokens is complete
_MOST_OPEN = 128  # files of one folder, because parts of them are read
_TRIES = 100  # to write a file; each of the other processes may be in the way once or twice
PATIENCE_S, PAUSE_S = 300.0, 2.0  # how long, and after what pauses, a store that has answered before is asked again
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, eq=False)
class Folder:
    """A folder, or the place of one that is made by writing to it. Two processes may write to it at once."""

    address: str
    place: str = "data.source"  # what named it, for errors

    @property
    def is_local(self) -> bool:
        return not files.is_remote(self.address)

    @functools.cached_property
    def _store(self) -> tuple[Any, str]:
        store, path = remote.open_store(self.address, self.place, use_listings_cache=False)
        return store, path.rstrip("/")

    @functools.cached_property
    def _patience(self) -> "_Patience":
        return _Patience()

    @functools.cached_property
    def _open(self) -> "Callable[[str], _OpenFile]":
        """Opens a file, or finds it open. The least recently read one is closed first."""
        return functools.lru_cache(_MOST_OPEN)(_OpenFile)

    def path(self, name: str) -> str:
        """The path or the address of a file, for the user."""
        return f"{self.address.rstrip('/')}/{name}"

    def sizes(self, subfolder: str = "") -> dict[str, int]:
        """The names and the sizes in bytes of the files of the folder, or of a folder in it. No such folder: {}."""
        if self.is_local:
            folder = Path(self.address, subfolder)
            with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
                return {entry.name: entry.stat().st_size for entry in entries if entry.is_file()}
            return {}
        store, path = self._store
        with self._naming(subfolder), contextlib.suppress(FileNotFoundError):
            found = store.ls(f"{path}/{subfolder}".rstrip("/"), detail=True)
            return {one["name"].rpartition("/")[2]: int(one["size"] or 0) for one in found if one["type"] == "file"}
        return {}

    def read(self, name: str) -> bytes | None:
        """The content of a file; None if there is none."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            if self.is_local:
                return Path(self.address, name).read_bytes()
            store, path = self._store
            with self._naming(name):
                return store.cat_file(f"{path}/{name}")
        return None

    def read_all(self, names: Sequence[str]) -> list[bytes]:
        """The contents of files, which are read from a bucket at the same time."""
        if self.is_local:
            return [Path(self.address, name).read_bytes() for name in names]
        store, path = self._store
        with self._naming(f"{names[0]}, ..." if names else ""):
            found = store.cat([f"{path}/{name}" for name in names]) if names else {}
            by_name = {full.partition(f"{path}/")[2]: content for full, content in found.items()}
            return [by_name[name] for name in names]

    def read_spans(self, spans: Sequence[tuple[str, int, int]]) -> list[bytes]:
        """The bytes from `start` to before `stop` of each (name, start, stop), or fewer if the file ends earlier.

        Raises StoreFailed if a bucket does not answer for PATIENCE_S.
        """
        if self.is_local:
            return [self._open(self.path(name)).read(start, stop) for name, start, stop in spans]
        if not spans:
            return []
        store, path = self._store
        names, starts, stops = zip(*spans, strict=True)

        def read() -> list[bytes]:
            with self._naming(f"{names[0]}, ..."):
                return store.cat_ranges([f"{path}/{name}" for name in names], [*starts], [*stops], on_error="raise")

        return self._patience.ask(read)

    def write(self, name: str, content: bytes) -> None:
        """Writes a file in one move, in the place of one that may be there."""
        if self.is_local:
            Path(self.address, name).parent.mkdir(parents=True, exist_ok=True)
            self._put(content, name, os.replace)
            return
        store, path = self._store
        with self._naming(name):
            store.pipe_file(f"{path}/{name}", content)

    def create(self, name: str, content: bytes) -> bool:
        """Writes a file if there is none of this name. Of several processes that do so at once, one is told True."""
        try:
            if self.is_local:
                self._put(content, name, _link)
            else:
                store, path = self._store
                with self._naming(name):
                    store.pipe_file(f"{path}/{name}", content, mode="create")
        except FileExistsError:
            return False
        return True

    def _put(self, content: bytes, name: str, put: Callable[[Path, Path], None]) -> None:
        """Writes a file that no other process writes to, and puts it in its place.

        If a process is killed meanwhile, the new file stays in MAKING. Another process may delete MAKING at any time.
        """
        new = Path(self.address, MAKING, f"{secrets.token_hex(8)}.new")
        for left in reversed(range(_TRIES)):
            new.parent.mkdir(parents=True, exist_ok=True)
            try:
                with new.open("wb") as file:
                    file.write(content)
                    file.flush()
                    os.fsync(file.fileno())
                return put(new, Path(self.address, name))
            except FileNotFoundError:
                if not left:
                    raise
            finally:
                new.unlink(missing_ok=True)
                with contextlib.suppress(OSError):  # there are other files
                    new.parent.rmdir()

    def remove(self, name: str) -> None:
        """Deletes a file, or a folder in this one, if it is there."""
        if self.is_local:
            path = Path(self.address, name)
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)  # other processes may do so at the same time
            else:
                path.unlink(missing_ok=True)
            return
        store, path = self._store
        with self._naming(name), contextlib.suppress(FileNotFoundError):
            store.rm(f"{path}/{name}", recursive=True)

    @contextlib.contextmanager
    def _naming(self, name: str) -> Iterator[None]:
        """A context whose errors, once the store has given up trying again, name the file."""
        try:
            yield
        except (FileNotFoundError, FileExistsError, InputError):
            raise
        except Exception as error:  # stores have no common class of errors
            why = " ".join(str(error).split())
            raise StoreFailed(
                f"{self.path(name)}: the store does not answer ({type(error).__name__}: {why})\n"
                "  fix   log in, or see that the store can be reached, then start the same command: it goes on"
            ) from error


def _link(new: Path, place: Path) -> None:
    """Puts a new file in a place where there is none, or raises FileExistsError."""
    try:
        os.link(new, place)
    except (FileExistsError, FileNotFoundError):
        raise
    except OSError:  # a file system without links to files, such as a mounted bucket
        with place.open("xb") as file:
            file.write(new.read_bytes())


class _Patience:
    """Asks a store again that has answered before and does not answer now. Several threads may ask at once."""

    def __init__(self) -> None:
        self._has_answered, self._failing_since = False, 0.0  # 0.0: it answers
        self._lock = threading.Lock()

    def ask(self, read: Callable[[], list[bytes]]) -> list[bytes]:
        """What `read` gives. Raises StoreFailed if the store has never answered, or not for PATIENCE_S."""
        while True:
            try:
                found = read()
            except StoreFailed as error:
                if not self._has_answered or self._count_failure(error) > PATIENCE_S:
                    raise
                time.sleep(PAUSE_S)
            else:
                self._has_answered, self._failing_since = True, 0.0
                return found

    def _count_failure(self, error: StoreFailed) -> float:
        """For how many seconds the store has not answered. It is said when that begins."""
        now = time.monotonic()
        with self._lock:
            is_first, since = not self._failing_since, self._failing_since or now
            self._failing_since = since
        if is_first:
            what = str(error).partition("\n")[0]
            _log.warning("%s; it is asked again for up to %s", what, human_duration(PATIENCE_S))
        return now - since


class _OpenFile:
    """A file of which several threads read parts. It is closed once nothing refers to it."""

    def __init__(self, path: str) -> None:
        self._number = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._number)

    def read(self, start: int, stop: int) -> bytes:
        return os.pread(self._number, stop - start, start)
