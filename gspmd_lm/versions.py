"""Which code is running: the versions of packages, and a hash of this one's own source."""

import functools
import hashlib
import importlib.metadata
import platform
from collections.abc import Iterable
from pathlib import Path

PACKAGE = Path(__file__).parent


def installed(names: Iterable[str]) -> dict[str, str | None]:
    """The version of Python and of each package, without importing any; None for one that is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


@functools.cache
def source(*names: str) -> str:
    """A hash of this package's code: of the files and folders `names` in it, or of all of it."""
    total = hashlib.sha256()
    for name in names or (".",):
        path = PACKAGE / name
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            total.update(file.read_bytes())
    return total.hexdigest()
