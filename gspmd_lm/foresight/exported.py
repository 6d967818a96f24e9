"""A compiled step in a file: what it was made for, checked for damage before anything of it is unpickled or run.

Loading such a file runs what is in it. So a file is taken only if this user's own `explain --export` wrote it, which
leaves a note of its sha256 in the cache folder, or with an explicit word of trust.
"""

import hashlib
import json
import os
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gspmd_lm import files
from gspmd_lm.config.paths import cache_entry, cache_folder
from gspmd_lm.errors import InputError
from gspmd_lm.files import json_object

FORMAT = "gspmd_lm executable 1"


def pack(compiled: Any, key: str, name: str, versions: dict[str, str]) -> bytes:
    """The bytes of a file that holds a compiled step: a line of JSON that says what it is, then the step."""
    from jax.experimental import serialize_executable

    payload = pickle.dumps(serialize_executable.serialize(compiled))
    sha256 = hashlib.sha256(payload).hexdigest()
    header = {
        "format": FORMAT,
        "request": key,
        "name": name,
        "versions": versions,
        "bytes": len(payload),
        "sha256": sha256,
    }
    return json.dumps(header).encode() + b"\n" + payload


def record(path: Path) -> None:
    """Notes that this user wrote the file, so that `load` takes it."""
    folder = cache_folder("exported")
    folder.mkdir(parents=True, exist_ok=True)
    sha256 = files.sum_of(path)[1]
    files.replace(cache_entry(folder / sha256), json.dumps({"path": str(path.absolute())}) + "\n")


def _is_recorded(sha256: str) -> bool:
    """Whether this user wrote a file with this checksum. Records by other users of the cache do not count."""
    found = cache_folder("exported").glob(f"{sha256}*")
    return any(record.stat().st_uid == os.getuid() for record in found)


def load(
    path: Path, key: str, name: str, versions: dict[str, str], trust: bool = False, devices: Sequence[Any] | None = None
) -> Any:
    """The step in a file, ready to run on `devices`: by default all that are here.

    key, name, versions: of what is wanted. trust: take a file that this user did not export.
    Raises InputError for a file that is damaged, none of ours, made for something else, or not to be trusted.
    """
    place, anew = f"--executable={path}", "make it anew with explain --export"
    try:
        content = path.read_bytes()
        line, _, payload = content.partition(b"\n")
        header = json_object(line, "its first line")
        if header["format"] != FORMAT:
            raise ValueError(f"its format is {header['format']!r}")
        if len(payload) != header["bytes"] or hashlib.sha256(payload).hexdigest() != header["sha256"]:
            raise ValueError("its sha256 is not the one it was written with")
        made_for = header["request"], str(header["name"]), dict(header["versions"])
    except OSError as error:
        raise InputError(f"{place}: cannot be read ({files.reason(error)})\n  fix   {anew}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{place}: damaged, or no exported step ({error})\n  fix   {anew}") from error
    if made_for[0] != key:
        differ = [
            f"{package} {made_for[2].get(package)} there, {version} here"
            for package, version in versions.items()
            if made_for[2].get(package) != version
        ]
        why = "; ".join(differ) or "another config, layout or code of this package"
        raise InputError(
            f"{place}: was made for {made_for[1]}, not for {name} here ({why})\n"
            f"  fix   {anew}, with the same config, rules and packages"
        )
    if not trust and not _is_recorded(hashlib.sha256(content).hexdigest()):
        raise InputError(
            f"{place}: was not exported by this user here, and to load it is to run the code in it\n"
            "  fix   --trust if you know where it comes from, or explain --export here"
        )
    from jax.experimental import serialize_executable

    return serialize_executable.deserialize_and_load(*pickle.loads(payload), execution_devices=devices)
