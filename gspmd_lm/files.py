"""Files that are written whole or not at all, locks, folders that are sealed, and JSON that somebody else wrote."""

import contextlib
import errno
import hashlib
import json
import math
import os
import re
import secrets
import shutil
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TextIO, TypeVar

import filelock
from etils import epath

from gspmd_lm.errors import InputError, name_kind

Fields = TypeVar("Fields")  # a dataclass

# Levels of lists and objects: Python follows a deeper value neither when it writes it nor in templates.
DEEPEST_JSON = 500
PARTIAL = ".partial"  # the end of the name of what is being made
LEFT_S = 24 * 3600.0  # after which nobody is at work on it
# What a file system without locks answers: Lustre without its option flock, or NFS whose lock service is not there.
NO_LOCKS = {errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK}
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
MANIFEST = "sha256.json"  # in a sealed folder: the path of each file -> its size in bytes and its sha256


def replace(path: epath.PathLike, content: str | bytes) -> None:
    """Writes a file in one move. Readers find the old content or the new one, even if this process is killed.

    Several processes may write the same file at once, as those of a host do in a cache. The last one's content stays.
    """
    # Half of a character, which JSON can hold and UTF-8 cannot, is written as JSON writes it.
    content = content.encode(errors="backslashreplace") if isinstance(content, str) else content
    if is_remote(path):
        epath.Path(path).write_bytes(content)  # an object store shows an object only when it is complete
        return
    with replacing(Path(path), f".{secrets.token_hex(4)}") as new:
        new.write_bytes(content)


@contextlib.contextmanager
def replacing(path: Path, mark: str = "") -> Iterator[Path]:
    """A context with the path of a file to write. On leaving, the file replaces `path`, unless an error is raised.

    If `path` is a link, the file that it names is replaced. A device or a pipe is written itself. mark: in the name of
    the file to write, which no other process may write at the same time.
    """
    if not replaceable(path):
        with naming(path):
            yield path
        return
    place = path.resolve()
    new = place.with_name(f".{place.name}{mark}.new")
    try:
        with naming(path, new):
            yield new
            with new.open("rb+") as file:
                os.fsync(file.fileno())
            new.replace(place)
    except BaseException:
        new.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def growing(path: Path) -> Iterator[TextIO]:
    """A context with a file for lines that take hours to make. On leaving, it replaces `path`, as by `replacing`.

    Until then it is at `partial_of(path)`, where every line that was flushed stays, whatever ends this process. What an
    earlier process left there is kept too, with `.old` after its name.
    """
    if not replaceable(path):
        with naming(path), path.open("w", encoding="utf-8", errors="backslashreplace") as out:
            yield out
        return
    partial = partial_of(path)
    with naming(path, partial):
        if partial.exists():
            partial.replace(f"{partial}.old")
        with partial.open("w", encoding="utf-8", errors="backslashreplace") as out:
            yield out
            out.flush()
            os.fsync(out.fileno())
        partial.replace(path.resolve())


def partial_of(path: Path) -> Path:
    """Where the lines of `growing` are until it is left."""
    path = path.resolve()
    return path.with_name(f"{path.name}{PARTIAL}")


def replaceable(path: Path) -> bool:
    """Whether a path is a file, or nothing yet. A device, a pipe or a folder is not."""
    return path.is_file() or not path.exists()


@contextlib.contextmanager
def lock(path: epath.PathLike, timeout_s: float = -1) -> Iterator[None]:
    """A context that holds the lock file `path`, as one process at a time can. A process that dies gives it back.

    On a file system without locks the lock file is `path` with `.lease` after it, which its holder renews. The lease of
    a host that is lost is free half a minute later. timeout_s: how long to wait for another process, in seconds; -1
    waits for ever. Raises filelock.Timeout after it.
    """
    try:
        held = filelock.FileLock(path, fallback_to_soft=False).acquire(timeout_s)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        held = filelock.SoftFileLease(f"{os.fspath(path)}.lease").acquire(timeout_s)
    with held:
        yield


@contextlib.contextmanager
def naming(path: Path, partial: Path | None = None) -> Iterator[None]:
    """A context in which system errors name `path`, if they name no file or one in `partial`.

    The error of a full disk names no file.
    """
    try:
        yield
    except OSError as error:
        if error.filename is None or (partial and Path(error.filename).is_relative_to(partial)):
            error.filename = str(path)
        raise


@contextlib.contextmanager
def appearing(folder: Path) -> Iterator[Path]:
    """A context with a folder to fill. On leaving, it takes the place of `folder`, which must not hold anything.

    Whatever a killed process left in the folder to fill is deleted. System errors name `folder`.
    """
    partial = folder.absolute().with_name(f"{folder.name}{PARTIAL}")
    with naming(folder, partial):
        if partial.exists():
            shutil.rmtree(partial)
        partial.mkdir(parents=True)
        yield partial
        os.replace(partial, folder)


def replace_json(path: Path | epath.Path, value: Any) -> None:
    """Writes a JSON value with its sha256 in one move. `read_json` reads it."""
    replace(path, with_sum(value))


def read_json(path: Path | epath.Path) -> Any:
    """The value that `replace_json` wrote. Raises InputError if the file is damaged or was written by other code."""
    return checked_value(path.read_bytes(), path)


def read_fields(kind: type[Fields], path: Path | epath.Path, fix: str) -> Fields:
    """An instance of the dataclass `kind`, whose fields `replace_json` wrote.

    Raises InputError, with `fix`, if the file has other fields, as another version writes them.
    """
    try:
        return kind(**read_json(path))
    except TypeError as error:
        raise InputError(f"{path}: has other fields than this version writes{_fix(fix)}") from error


def with_sum(value: Any) -> str:
    """A JSON value with its sha256, for `checked_value`."""
    text = json.dumps(value)
    return json.dumps({"sha256": hashlib.sha256(text.encode()).hexdigest(), "value": text})


def checked_value(content: bytes, place: object) -> Any:
    """The value that `with_sum` gave its content. Raises an InputError that begins with `place` if it is damaged."""
    raw = json_object(content, place)
    if not isinstance(raw.get("value"), str):
        raise InputError(f"{place}: not a file of this package, or damaged")
    if raw.get("sha256") != hashlib.sha256(raw["value"].encode(errors="replace")).hexdigest():
        raise InputError(f"{place}: its sha256 has changed")
    return json_value(raw["value"], place)


def seal(folder: epath.PathLike, names: Sequence[str], sealed: Sequence[str] = ()) -> None:
    """Records the checksums of `names`, files and folders in `folder`. `damage` compares them later.

    sealed: folders among them that are sealed themselves, each at a path within `folder`. What their own manifests
    record is not read again.
    """
    folder = epath.Path(folder)
    manifest: dict[str, Any] = {}
    for inner in sealed:
        theirs = json_object((folder / inner / MANIFEST).read_bytes(), folder / inner / MANIFEST)
        manifest |= {f"{inner}/{name}": its for name, its in theirs.items()}
    others = [name for name in list_files(folder, names) if name not in manifest]
    with ThreadPoolExecutor() as pool:
        sums = zip(others, pool.map(sum_of, (folder / name for name in others)), strict=True)
        manifest |= {name: {"bytes": size_bytes, "sha256": sha256} for name, (size_bytes, sha256) in sums}
    replace(folder / MANIFEST, json.dumps(manifest, indent=1, sort_keys=True))


def damage(folder: epath.PathLike, names: Sequence[str], share: tuple[int, int] = (0, 1)) -> str:
    """A change among `names` since `seal`: a file that differs, is missing or was added. '' if there is none.

    share: (i, n) reads the i-th of n shares of the files. The shares have about as many bytes each.
    """
    folder = epath.Path(folder)
    try:
        manifest = json_object((folder / MANIFEST).read_bytes(), MANIFEST).items()
        sums = {name: (int(entry["bytes"]), str(entry["sha256"])) for name, entry in manifest}
        sums = {name: its for name, its in sums.items() if name.partition("/")[0] in names}
        files = list_files(folder, names)
    except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:  # flipped bits can cause any of these
        return f"{MANIFEST} cannot be read: {error}"
    mine = sorted(sums, key=lambda name: sums[name], reverse=True)[share[0] :: share[1]]
    with ThreadPoolExecutor() as pool:
        changes = [*pool.map(lambda name: _damage_of_file(folder, name, *sums[name]), mine)]
    changes += [f"{name}: not in {MANIFEST}" for name in files if name not in sums]
    changes = list(filter(None, changes))
    return ", ".join(changes[:2]) + (f" and {len(changes) - 2} more" if len(changes) > 2 else "")


def sum_of(file: epath.PathLike) -> tuple[int, str]:
    """The size in bytes and the sha256 of a file."""
    sha256 = hashlib.sha256()
    size_bytes = 0
    with epath.Path(file).open("rb") as stream:
        while block := stream.read(1 << 20):
            sha256.update(block)
            size_bytes += len(block)
    return size_bytes, sha256.hexdigest()


def list_files(folder: epath.Path, names: Sequence[str]) -> list[str]:
    """The paths, within `folder`, of all files among `names`, sorted."""
    paths: list[str] = []
    for name in names:
        path = folder / name
        if path.is_dir():  # walk() of etils 1.15 returns paths of another type for an object store
            paths += list_files(folder, [f"{name}/{inner.name}" for inner in path.iterdir()])
        elif path.exists():
            paths.append(name)
    return sorted(paths)


def trim(entries: Iterable[Path], limit_bytes: int, keep: Collection[str] = ()) -> None:
    """Deletes the entries of a cache that were not used for the longest time until the others fit in `limit_bytes`.

    entries: files and folders. keep: names, without endings, of entries that stay. An entry that is being made has
    PARTIAL at the end of its name. It stays too, but what a killed process left of it is deleted a day later. What
    another process deletes meanwhile is passed over, and so is what this user may not read or delete.
    """
    found = []
    for entry in entries:
        with contextlib.suppress(OSError):
            about = entry.stat()
            if entry.is_dir():
                found.append((about.st_mtime, sum(file.stat().st_size for file in entry.iterdir()), entry))
            else:
                found.append((max(about.st_atime, about.st_mtime), about.st_size, entry))
    total_bytes, now = sum(size_bytes for _, size_bytes, _ in found), time.time()
    for used_at, size_bytes, entry in sorted(found):
        too_much = total_bytes > limit_bytes and entry.stem not in keep
        if now - used_at > LEFT_S if entry.suffix == PARTIAL else too_much:
            with contextlib.suppress(OSError):
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink(missing_ok=True)
                total_bytes -= size_bytes


def check_folder(name: str, folder: Path) -> None:
    """Raises InputError if a folder cannot be made or written in. The message begins with `name`, such as --to=."""
    at = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not at.is_dir() or not os.access(at, os.W_OK):
        raise InputError(f"{name}{folder}: {at} cannot be written in\n  fix   give another folder")


def expand_user(path: str | Path) -> Path:
    """A path with the home folder in the place of ~. A name such as ~draft, which is no user's, stays as it is."""
    return Path(os.path.expanduser(path))  # Path.expanduser raises RuntimeError for such a name


def open_path(name: str) -> epath.Path:
    """A local path, in which ~ may stand for the home folder, or an address such as gs://bucket/name.

    Raises InputError for an address of an unknown kind.
    """
    try:
        return epath.Path(name if is_remote(name) else expand_user(name))
    except KeyError as error:
        kind = name.partition("://")[0]
        raise InputError(
            f"{name}: nothing reads addresses that begin with {kind}://\n  fix   give a local path, or gs://"
        ) from error


def is_remote(path: epath.PathLike) -> bool:
    """Whether a path belongs to an object store, as gs://bucket/name does."""
    return "://" in os.fspath(path)


def reason(error: OSError) -> str:
    """The system's message about a failure, without Python's error number."""
    return error.strerror or str(error)


def json_value(text: str | bytes, place: object, fix: str = "", deepest: int = DEEPEST_JSON, **hooks: Any) -> Any:
    """The value of a JSON text, which need not be an object.

    text: bytes are UTF-8. fix: what to do about a text that is none. deepest: how many levels of lists and objects may
    be within each other. hooks: as json.loads has them; they raise ValueError.
    Raises an InputError that begins with `place` and ends with `fix`.
    """
    try:
        text = text.decode() if isinstance(text, bytes) else text
        value = json.loads(text, **hooks)
        if _is_deeper(value, text, deepest):
            raise RecursionError
    except RecursionError as error:
        what = f"lists or objects within each other, over {deepest} levels deep"
        raise InputError(f"{place}: {what}{_fix(fix)}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{place}: not UTF-8 text ({error.reason} at byte {error.start}){_fix(fix)}") from error
    except ValueError as error:
        raise InputError(f"{place}: not valid JSON: {error}{_fix(fix)}") from error
    return value


def json_object(text: str | bytes, place: object, fix: str = "") -> dict[str, Any]:
    """The fields of a JSON text that must be one object. Raises InputError as `json_value` does."""
    value = json_value(text, place, fix)
    if not isinstance(value, dict):
        raise InputError(f"{place}: {name_kind(value)}, not a JSON object{_fix(fix)}")
    return value


def json_line(value: Any) -> str:
    """A value as one line of JSON. Numbers that are not finite are null, which every JSON reader accepts."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False) + "\n"
    except ValueError:
        return json.dumps(_finite(value), ensure_ascii=False) + "\n"


def has_half_characters(text: str, value: Any) -> bool:
    """Whether a text of JSON has half of a character, as \\ud800 is. `value` is what it says."""
    if not _SURROGATE.search(text):
        return False
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    return False


def _damage_of_file(folder: epath.Path, name: str, expected_bytes: int, expected_sha256: str) -> str:
    try:
        size_bytes, sha256 = sum_of(folder / name)
    except FileNotFoundError:
        return f"{name}: missing"
    except OSError as error:
        return f"{name}: {reason(error)}"
    if size_bytes != expected_bytes:
        return f"{name}: {size_bytes} bytes instead of {expected_bytes}"
    return "" if sha256 == expected_sha256 else f"{name}: its sha256 has changed"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _fix(fix: str) -> str:
    return f"\n  fix   {fix}" if fix else ""


def _is_deeper(value: Any, text: str, deepest: int) -> bool:
    if text.count("[") + text.count("{") <= deepest:
        return False
    level = [value]
    for _ in range(deepest):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return False
    return True
