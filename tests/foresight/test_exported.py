"""Exported steps: nothing of a file is unpickled before it is known to be whole, wanted and trusted."""

import json
import os
import pickle
import random
import secrets

import jax
import jax.numpy as jnp
import pytest

from gspmd_lm.errors import InputError
from gspmd_lm.foresight import exported

MESH = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
WHOLE = jax.sharding.NamedSharding(MESH, jax.sharding.PartitionSpec())  # on all the devices that are here
KEY, NAME, VERSIONS = "abc", "tiny under tp8 for cpu:1", {"jax": "0.10.2", "libtpu": "1"}


def ones():
    return jax.device_put(jnp.ones(3), WHOLE)


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setenv("GSPMD_LM_CACHE", str(tmp_path / "cache"))
    # Another program each time: XLA cannot write out what came from a compile cache, which other tests enable.
    offset = secrets.randbelow(2**20)
    compiled = (
        jax.jit(lambda x: 2 * x + offset - offset)
        .lower(jax.ShapeDtypeStruct((3,), jnp.float32, sharding=WHOLE))
        .compile()
    )
    path = tmp_path / "step"
    path.write_bytes(exported.pack(compiled, KEY, NAME, VERSIONS))
    exported.record(path)
    return path


@pytest.fixture
def unpickled(monkeypatch):
    """Fails where anything is unpickled."""
    monkeypatch.setattr(exported.pickle, "loads", lambda payload: pytest.fail("it was unpickled"))


def test_what_this_user_exported_runs(file):
    assert exported.load(file, KEY, NAME, VERSIONS)(ones()).tolist() == [2, 2, 2]


@pytest.mark.long
def test_every_flipped_bit_is_seen_before_anything_is_unpickled(file, unpickled):
    whole, draw = file.read_bytes(), random.Random(0)
    header = whole.index(b"\n") + 1
    for bit in [*range(8 * header), *(draw.randrange(8 * len(whole)) for _ in range(200))]:
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        file.write_bytes(damaged)
        with pytest.raises(InputError, match=r"--executable=.*(?s:.*)\n  fix   "):
            exported.load(file, KEY, NAME, VERSIONS)


def test_a_file_from_elsewhere_needs_a_word_of_trust(file, monkeypatch, tmp_path):
    monkeypatch.setenv("GSPMD_LM_CACHE", str(tmp_path / "another user's"))
    with pytest.raises(InputError, match=r"was not exported by this user here.*\n  fix   --trust"):
        exported.load(file, KEY, NAME, VERSIONS)
    assert exported.load(file, KEY, NAME, VERSIONS, trust=True)(ones()).tolist() == [2, 2, 2]


class Evil:
    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_code_in_a_file_does_not_run_unasked(tmp_path, monkeypatch):
    monkeypatch.setenv("GSPMD_LM_CACHE", str(tmp_path / "cache"))
    evil, path = Evil(), tmp_path / "evil.exe"
    evil.path = tmp_path / "was run"
    payload = pickle.dumps(evil)
    path.write_bytes(payload)
    with pytest.raises(InputError, match="damaged, or no exported step"):
        exported.load(path, KEY, NAME, VERSIONS, trust=True)
    sha256 = exported.hashlib.sha256(payload).hexdigest()
    header = {"format": exported.FORMAT, "request": KEY, "name": NAME, "versions": VERSIONS}
    path.write_bytes(json.dumps(header | {"bytes": len(payload), "sha256": sha256}).encode() + b"\n" + payload)
    with pytest.raises(InputError, match="not exported by this user"):
        exported.load(path, KEY, NAME, VERSIONS)
    assert not evil.path.exists()


@pytest.mark.parametrize(
    ("key", "versions", "message"),
    [
        ("other", VERSIONS, "another config, layout or code of this package"),
        ("other", VERSIONS | {"libtpu": "2"}, "libtpu 1 there, 2 here"),
    ],
)
def test_a_step_of_something_else_is_refused(file, unpickled, key, versions, message):
    with pytest.raises(InputError) as error:
        exported.load(file, key, "another", versions)
    assert f"was made for {NAME}, not for another here ({message})" in str(error.value)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(InputError, match=r"cannot be read \(No such file or directory\)\n  fix   make it anew"):
        exported.load(tmp_path / "gone", KEY, NAME, VERSIONS)
