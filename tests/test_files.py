"""Files that are replaced whole, and sealed folders in which nothing changes unseen."""

import contextlib
import errno
import json
import math
import os
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import filelock
import pytest

from gspmd_lm import files
from gspmd_lm.errors import InputError
from gspmd_lm.launch.loop import Record


def test_numbers_that_are_not_finite_are_null_in_a_line():
    value = {"é": [math.nan, {"most": -math.inf}], "n": 1}
    assert files.json_line(value) == '{"é": [null, {"most": null}], "n": 1}\n'


def test_a_file_is_replaced_or_left_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    files.replace(path, "old")
    files.replace(path, b"new")
    assert path.read_text() == "new"

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left") as error:
        files.replace(path, "newer")
    assert error.value.filename == str(path)  # writing itself names no file
    assert path.read_text() == "new" and [file.name for file in tmp_path.iterdir()] == ["a.json"]


def test_a_file_that_several_write_at_once_is_always_whole(tmp_path):
    path, text = tmp_path / "a.json", "a" * 100_000
    files.replace(path, text)
    with ThreadPoolExecutor(3) as pool:
        writing = [pool.submit(files.replace, path, text) for _ in range(60)]
        while not all(one.done() for one in writing):
            assert path.read_text() == text
    assert [one.result() for one in writing] == [None] * 60 and [*tmp_path.iterdir()] == [path]


def test_a_file_that_grows_is_beside_its_place_until_it_is_whole(tmp_path):
    path, partial = tmp_path / "out.jsonl", tmp_path / "out.jsonl.partial"
    path.write_text("yesterday's\n")
    for line in ("first\n", "second\n"):
        with pytest.raises(KeyboardInterrupt), files.growing(path) as out:
            out.write(line)
            raise KeyboardInterrupt
        assert (path.read_text(), partial.read_text()) == ("yesterday's\n", line)
    assert (tmp_path / "out.jsonl.partial.old").read_text() == "first\n"
    with files.growing(path) as out:
        out.write("whole\n")
    assert path.read_text() == "whole\n" and not partial.exists()


@pytest.mark.parametrize("code", [0, errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_one_at_a_time_has_a_lock_on_any_file_system(tmp_path, monkeypatch, code):
    if code:
        monkeypatch.setattr("fcntl.flock", Mock(side_effect=OSError(code, os.strerror(code))))
    for _ in range(2):  # it is free again afterwards
        with files.lock(tmp_path / "lock"):
            with pytest.raises(filelock.Timeout), files.lock(tmp_path / "lock", timeout_s=0):
                raise AssertionError("two at a time")
            assert (tmp_path / "lock.lease").exists() == bool(code)


def test_a_killed_process_keeps_no_lock_on_a_file_system_without_locks(tmp_path, monkeypatch):
    code = "import filelock, os, sys; held = filelock.SoftFileLease(sys.argv[1]).acquire(); os.kill(os.getpid(), 9)"
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "lock.lease")], check=False, timeout=60)
    assert (tmp_path / "lock.lease").exists()
    monkeypatch.setattr("fcntl.flock", Mock(side_effect=OSError(errno.ENOLCK, "No locks available")))
    with files.lock(tmp_path / "lock", timeout_s=5):
        pass


def test_half_of_a_character_is_written_as_json_has_it(tmp_path):
    for write in (grow, files.replace):
        write(tmp_path / "page.html", "before \ud83d after \U0001f600")
        assert (tmp_path / "page.html").read_bytes() == "before \\ud83d after \U0001f600".encode()


def grow(path, text):
    with files.growing(path) as out:
        out.write(text)


@pytest.mark.parametrize("write", [grow, files.replace])
def test_links_stay_and_devices_are_written_themselves(tmp_path, write):
    (tmp_path / "link").symlink_to(tmp_path / "file")
    write(tmp_path / "link", "text")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "file").read_text() == "text"
    write(Path("/dev/null"), "text")
    with pytest.raises(OSError) as error:
        write(Path("/dev/full"), "text")
    assert (error.value.filename, error.value.errno) == ("/dev/full", errno.ENOSPC)


def test_an_error_names_the_file_that_it_is_of(tmp_path):
    with pytest.raises(FileNotFoundError) as error, files.appearing(tmp_path / "out") as partial:
        (partial / "copy").write_bytes((tmp_path / "missing").read_bytes())
    assert error.value.filename == str(tmp_path / "missing")
    with pytest.raises(IsADirectoryError) as error, files.appearing(tmp_path / "out2") as partial:
        (partial / "x").mkdir()
        (partial / "x").write_bytes(b"")
    assert error.value.filename == str(tmp_path / "out2")
    with pytest.raises(OSError) as error, files.naming(tmp_path / "full"):
        raise OSError(28, "No space left on device")
    assert error.value.filename == str(tmp_path / "full")


@pytest.fixture
def sealed(tmp_path):
    folder = tmp_path / "entry"
    (folder / "state").mkdir(parents=True)
    for name, size in (("state/a", 1000), ("state/b", 0), ("facts", 50), ("loose", 10)):
        (folder / name).write_bytes(random.Random(name).randbytes(size))
    files.seal(folder, ("state", "facts"))
    return folder


NAMES = ("state", "facts")


def test_what_is_sealed_is_undamaged(sealed):
    assert files.damage(sealed, NAMES) == ""
    (sealed / "loose").write_text("not sealed")
    assert files.damage(sealed, NAMES) == ""


def test_every_flipped_bit_is_seen(sealed):
    draw = random.Random(0)
    paths = [path for path in sealed.rglob("*") if path.is_file() and path.stat().st_size and path.name != "loose"]
    for _ in range(200):
        path = draw.choice(paths)
        whole = path.read_bytes()
        bit = draw.randrange(8 * len(whole))
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        if not (path.name == files.MANIFEST and damaged[bit // 8] in b" \n\t\r"):  # between the values of the manifest
            assert files.damage(sealed, NAMES), (path.name, bit)
        path.write_bytes(whole)
    assert files.damage(sealed, NAMES) == ""


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda folder: (folder / "state/a").unlink(), "state/a: missing"),
        (lambda folder: (folder / "state/c").touch(), "state/c: not in sha256.json"),
        (lambda folder: (folder / "facts").write_bytes(b""), "facts: 0 bytes instead of 50"),
        (lambda folder: (folder / "sha256.json").unlink(), "sha256.json cannot be read"),
        (lambda folder: (folder / "sha256.json").write_text("{}"), "facts: not in sha256.json, state/a: not in"),
        (lambda folder: (folder / "sha256.json").write_text("[1]"), "sha256.json cannot be read"),
    ],
)
def test_what_is_damaged_is_named(sealed, harm, message):
    harm(sealed)
    assert message in files.damage(sealed, NAMES)


def test_one_of_several_that_read_a_share_each_sees_a_damage(sealed):
    whole = [path for path in sealed.rglob("*") if path.is_file() and path.name not in (files.MANIFEST, "loose")]
    for path in whole:
        content = path.read_bytes()
        path.write_bytes(content + b"more")
        found = [files.damage(sealed, NAMES, (i, 3)) for i in range(3)]
        assert sum(map(bool, found)) == 1, found
        path.write_bytes(content)
    assert len(whole) > 2 and not any(files.damage(sealed, NAMES, (i, 3)) for i in range(3))


def test_what_a_sealed_folder_within_another_one_records_is_not_read_again(sealed, monkeypatch):
    files.seal(sealed.parent, (sealed.name,))
    expected = (sealed.parent / files.MANIFEST).read_text()
    read = []
    monkeypatch.setattr(files, "sum_of", lambda path, sum_of=files.sum_of: read.append(path.name) or sum_of(path))
    files.seal(sealed.parent, (sealed.name,), (sealed.name,))
    assert (sealed.parent / files.MANIFEST).read_text() == expected
    assert files.MANIFEST in read and len(read) < len(json.loads(expected))


def test_json_that_shows_its_damage(tmp_path):
    path = tmp_path / "progress.json"
    value = {"tokens": {"train": 12345}, "dtype": "<u2"}
    files.replace_json(path, value)
    assert files.read_json(path) == value
    whole = path.read_bytes()
    for bit in range(8 * len(whole)):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        with contextlib.suppress(ValueError):
            assert files.read_json(path) == value  # a space became a line break


def test_fields_of_another_version_are_named(tmp_path):
    path = tmp_path / "launch.json"
    files.replace_json(path, {"token": "ab", "attempt": 2})
    assert files.read_fields(Record, path, "") == Record("ab", 2)
    for fields in ({"token": "ab", "newer": 1}, {"attempt": 2}):
        files.replace_json(path, fields)
        with pytest.raises(InputError, match=r"launch.json: has other fields .*\n  fix   give another"):
            files.read_fields(Record, path, "give another")
