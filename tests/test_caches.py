"""Caches that several users share: what one of them may not read, replace or delete does not stop the other ones."""

import contextlib
import ctypes
import os
import shutil
import stat
import time
from pathlib import Path

import numpy as np
import pytest

from gspmd_lm import files
from gspmd_lm.config import Data
from gspmd_lm.config.paths import cache_folder
from gspmd_lm.data import cache, sources
from gspmd_lm.data.tokenizer import load_tokenizer
from gspmd_lm.data.trained import tokenizer_of_source
from gspmd_lm.errors import InputError
from gspmd_lm.foresight import compile, exported
from gspmd_lm.runtime import compile_cache
from tests.foresight.conftest import request_of as request_of
from tests.launched import compiled_here

OTHER_USER = 65534
VERSION = 0x20080522  # of capset's header
OVER_PERMISSIONS = ~(0b1111)  # without CAP_CHOWN, CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH and CAP_FOWNER


@contextlib.contextmanager
def without_rights_of_root():
    """A context in which permissions hold for this thread, and those that it starts, as for other users."""
    libc, header = ctypes.CDLL(None, use_errno=True), (ctypes.c_uint32 * 2)(VERSION, 0)
    before = (ctypes.c_uint32 * 6)()  # effective, permitted and inheritable rights, twice
    assert libc.capget(header, before) == 0
    fewer = (ctypes.c_uint32 * 6)(*before)
    fewer[0] &= OVER_PERMISSIONS
    assert libc.capset(header, fewer) == 0
    try:
        yield
    finally:
        assert libc.capset(header, before) == 0


@pytest.fixture
def shared(tmp_path, monkeypatch):
    """A function that gives a file or folder of the cache to another user: shared(path, mode of files, of folders).

    The folders around it are for all users, as /tmp is.
    """
    if os.geteuid():
        pytest.skip("only root can give files away")
    monkeypatch.setenv("GSPMD_LM_CACHE", str(tmp_path / "caches"))

    def give(path: Path, mode: int):
        for inner in (path, *path.rglob("*")):
            inner.chmod(mode | 0o111 if inner.is_dir() and mode & 0o444 else mode)
            os.chown(inner, OTHER_USER, OTHER_USER)
        for folder in path.parents:
            if not folder.is_relative_to(tmp_path / "caches"):
                break
            folder.chmod(0o1777)
            os.chown(folder, OTHER_USER, OTHER_USER)

    return give


@pytest.mark.parametrize("mode", [0o644, 0o600], ids=["readable", "private"])
def test_programs(request_of, caches, shared, monkeypatch, mode):
    """Those of others are used where they may be read. Where not, this user has an entry beside."""
    wanted, made = request_of("fsdp8", attention={"cpu": "xla"}), []
    monkeypatch.setattr(compile, "_run_compiler", compiled_here)
    (first,) = compile.programs([wanted], cache=str(caches / "explain"))  # which other tests compile, too

    def run_compiler(request, folder):
        made.append(request)
        for file in (caches / "explain" / wanted.key()).iterdir():
            shutil.copyfile(file, folder / file.name)

    monkeypatch.setattr(compile, "_run_compiler", run_compiler)
    compile.programs([wanted])
    entry = cache_folder("explain") / wanted.key()
    assert stat.S_IMODE(entry.stat().st_mode) == 0o777 & ~_umask()
    shared(entry, mode)
    monkeypatch.setattr(compile, "CACHE_LIMIT_BYTES", 0)  # all entries are to go, and those of others cannot
    with without_rights_of_root():
        for _ in range(2):
            assert compile.programs([wanted])[0].text == first.text
    beside = [] if mode == 0o644 else [f"{wanted.key()}.0"]
    assert sorted(found.name for found in cache_folder("explain").iterdir()) == [entry.name, *beside]
    assert len(made) == 1 + len(beside)


def _umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask


@pytest.mark.parametrize("mode", [0o644, 0o600], ids=["readable", "private"])
def test_tokens_and_tokenizers(shared, tmp_path, mode):
    (tmp_path / "a.txt").write_text("Some words, some more words, and words again.\n" * 20)
    source = sources.open_source(Data(source=str(tmp_path / "a.txt")))

    def both():
        tokenizer = load_tokenizer(str(tokenizer_of_source(source, 300)))
        return np.asarray(cache.open_cache(source, tokenizer, 0.0).train[0].stream).tolist()

    first = both()
    for name in ("data", "tokenizers"):
        for entry in cache_folder(name).iterdir():
            shared(entry, mode)
    with without_rights_of_root():
        assert both() == both() == first
    private = [path for name in ("data", "tokenizers") for path in cache_folder(name).glob("*.0")]
    assert len(private) == (0 if mode == 0o644 else 2)


def test_a_build_of_another_user_is_not_gone_on_with(shared, tmp_path):
    """Nor are its damaged tokens replaced."""
    (tmp_path / "a.txt").write_text("words\n" * 20)
    source, tokenizer = sources.open_source(Data(source=str(tmp_path / "a.txt"))), load_tokenizer("bytes")
    first = cache.open_cache(source, tokenizer, 0.0)
    wanted = np.asarray(first.train[0].stream).tolist()
    (folder,) = cache_folder("data").iterdir()
    (folder / "train-00000.npy").write_bytes(b"")
    for entry in cache_folder("data").iterdir():
        shared(entry, 0o644)
    with without_rights_of_root():
        found = cache.open_cache(source, tokenizer, 0.0)
    assert np.asarray(found.train[0].stream).tolist() == wanted
    assert {path.name for path in cache_folder("data").iterdir()} == {folder.name, f"{folder.name}.0"}
    assert (folder / "train-00000.npy").read_bytes() == b""


def test_compiled_steps_of_a_run(shared, monkeypatch):
    """A full folder whose entries are another user's."""
    entries = [cache_folder("compile") / f"{name}-cache" for name in "ab"]
    entries[0].parent.mkdir(parents=True)
    for entry in entries:
        entry.write_bytes(bytes(100))
        shared(entry, 0o600)
    (cache_folder("compile") / "mine-cache").write_bytes(bytes(100))
    monkeypatch.setattr(compile_cache, "LIMIT_BYTES", 250)
    with without_rights_of_root():
        compile_cache.enable()
    assert sorted(path.name for path in cache_folder("compile").iterdir()) == ["a-cache", "b-cache"]


def test_nobody_else_says_what_this_user_exported(shared):
    record = cache_folder("exported") / "0123"
    record.parent.mkdir(parents=True)
    record.touch()
    assert exported._is_recorded("0123")
    shared(record, 0o644)
    with without_rights_of_root():
        assert not exported._is_recorded("0123")


def test_what_a_killed_process_left_is_deleted_a_day_later(tmp_path):
    for hours, name in ((1, "a.partial"), (25, "b.partial"), (30, "old"), (0, "new")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "program").write_bytes(bytes(100))
        os.utime(tmp_path / name, (time.time() - 3600 * hours,) * 2)
    files.trim(tmp_path.iterdir(), 250)  # what is left of a counts
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.partial", "new"]


def test_a_bucket_is_no_cache(monkeypatch):
    monkeypatch.setenv("GSPMD_LM_CACHE", "gs://bucket/cache")
    with pytest.raises(InputError, match=r"(?s)GSPMD_LM_CACHE=gs://bucket/cache: .*\n  fix   .*--compile_cache"):
        cache_folder("rows")
