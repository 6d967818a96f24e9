"""Which code is running, and where: versions, source, commit, command, host, and where its documents are."""

import functools
import hashlib
import importlib.metadata
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

__version__ = "0.1.0"
PACKAGE = Path(__file__).parent


def installed_versions(names: Iterable[str]) -> dict[str, str | None]:
    """The version of Python and of each package, without importing any; None for one that is not installed."""
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for name in names:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def cuda_plugin() -> str:
    """The package that holds XLA's compiler for NVIDIA GPUs: of CUDA 13 where it is installed, otherwise of CUDA 12."""
    newer, older = "jax-cuda13-plugin", "jax-cuda12-plugin"
    return newer if installed_versions([newer])[newer] else older


@functools.cache
def source(*names: str) -> str:
    """A hash of this package's code: of the files and folders `names` in it, or of all of it."""
    total = hashlib.sha256()
    for name in names or (".",):
        path = PACKAGE / name
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            total.update(file.read_bytes())
    return total.hexdigest()


def command() -> str:
    """The command that started this process."""
    return shlex.join(["python", *sys.argv])


def program() -> str:
    """The words before a verb on the command line: gspmd-lm, python -m gspmd_lm, or python main.py in a checkout."""
    started = Path(sys.argv[0])
    if started.name == "__main__.py" and started.parent.name == PACKAGE.name:
        return f"python -m {PACKAGE.name}"
    return "python main.py" if _is_checkout() and started.stem != "gspmd-lm" else "gspmd-lm"


def with_documents(text: str) -> str:
    """A text in which each document, such as docs/plan.md, is one that its reader can open.

    In a checkout it is the file. Where the package was installed without one, it is the address of the page.
    """
    if _is_checkout():
        return text
    try:
        urls = importlib.metadata.metadata("gspmd_lm").get_all("Project-URL") or []
    except importlib.metadata.PackageNotFoundError:
        return text
    named = dict(line.split(", ", 1) for line in urls)
    home = named.get("Homepage")
    return re.sub(r"\bdocs/\w+\.md", rf"{home.rstrip('/')}/blob/main/\g<0>", text) if home else text


def _is_checkout() -> bool:
    return (PACKAGE.parent / "main.py").exists() and (PACKAGE.parent / "docs").is_dir()


def host() -> str:
    """The name of this machine."""
    return platform.node()


def commit(folder: Path = PACKAGE.parent) -> str | None:
    """The commit of the git checkout that this package was imported from, and whether files differ from it.

    None if the package was installed without a checkout, or if there is no git.
    """
    if not (folder / ".git").exists():  # a checkout around it is not of this package
        return None
    git = ["git", "-C", str(folder)]
    try:
        result = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
        changed = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return result.stdout.strip() + (", with changes" if changed.stdout.strip() else "")
