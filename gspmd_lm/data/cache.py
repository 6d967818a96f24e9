"""The tokens of a source, computed once and kept in a folder of the cache.

A folder whose shards do not agree with its manifest is made anew. See data/making.py for one that is not complete.
"""

import dataclasses
import hashlib
import json
import logging
import os
import shutil
from pathlib import Path

from gspmd_lm.config.paths import cache_entry, cache_folder, unwritable
from gspmd_lm.data import making, tokens
from gspmd_lm.data.folders import MAKING, Folder
from gspmd_lm.data.sources import DocumentSource, Progress
from gspmd_lm.errors import InputError

_log = logging.getLogger(__name__)


def open_cache(
    source: DocumentSource, encoder: tokens.Encoder, held_out: float, progress: Progress | None = None
) -> tokens.Tokens:
    """The tokens of the source, from its cache folder or tokenized now, as `making.make_tokens` does.

    Raises InputError if the source cannot be read or split, or the folder cannot be written.
    """
    opened = _open_or_make(source, encoder, held_out, progress)
    parts = [  # names and weights are not kept with tokens
        dataclasses.replace(split, name=part.name, weight=part.weight)
        for split, part in zip(opened.train, source.parts, strict=True)
    ]
    return dataclasses.replace(opened, train=tuple(parts), description=source.description, notes=source.notes)


def _open_or_make(
    source: DocumentSource, encoder: tokens.Encoder, held_out: float, progress: Progress | None
) -> tokens.Tokens:
    settings = json.dumps([tokens.FORMAT, source.fingerprint, encoder.fingerprint, held_out])
    path = cache_folder("data") / hashlib.sha256(settings.encode()).hexdigest()[:24]
    try:
        if opened := _open(path):
            return opened
        path = cache_entry(path, path / MAKING)
        for _ in range(2):  # a process that was killed may have left damaged shards
            if opened := _open(path):
                return opened
            making.make_tokens(Folder(str(path)), source, encoder, held_out, progress)
        if opened := _open(path):
            return opened
    except OSError as error:
        raise unwritable(path, str(error), "the tokens ") from error
    raise InputError(f"{path}: the tokens are damaged as soon as they are made\n  fix   check the disk")


def _open(path: Path) -> tokens.Tokens | None:
    """The tokens in a folder of the cache; None if they are not there. If they are damaged, they are deleted.

    The damage is said. What another user keeps is not deleted.
    """
    folder = Folder(str(path))
    try:
        manifest = tokens.read_manifest(folder)
        if manifest is None:
            return None
        damage = tokens.damage(folder, manifest)
        if not damage:
            return tokens.open_folder(folder, manifest)
    except PermissionError:  # another user keeps it
        return None
    except InputError as error:
        damage = str(error).partition("\n")[0].removeprefix(f"{path}/")
    if os.access(path, os.W_OK, effective_ids=True):
        _log.warning("%s: damaged (%s), the tokens are made anew", path, damage)
        shutil.rmtree(path)
    return None
