"""The compile cache: found again, kept small, repaired; no flipped bit in it is ever run."""

import os

import pytest

from gspmd_lm import files
from gspmd_lm.errors import InputError
from gspmd_lm.launch.local import free_port
from gspmd_lm.runtime import compile_cache
from tests.launched import launch, output


def test_the_cache_is_found_again_and_repairs_itself(tmp_path):
    code = """
import jax, jax.numpy as jnp
from gspmd_lm.runtime import compile_cache, startup
startup.start(platform="cpu", simulated_devices=2)
cache = compile_cache.enable()
def double(x): return x * 2
def square(x): return x @ x
for _ in range(PASSES):
    jax.clear_caches()
    hits, misses = cache.hits, cache.misses
    for size in (2, 3):
        for function in (double, square):
            jax.jit(function).lower(jax.ShapeDtypeStruct((size, size), jnp.float32)).compile()
    print(cache.hits - hits, cache.misses - misses, cache.saved_s >= 0)
"""
    once, thrice = (code.replace("PASSES", str(passes)) for passes in (1, 3))
    env = {"GSPMD_LM_CACHE": str(tmp_path)}
    assert output(launch(once, **env))[0] == "0 4 True\n"
    entries = sorted((tmp_path / "compile").glob("*-cache"))
    assert len(entries) == 4
    for entry in entries:
        data = bytearray(entry.read_bytes())
        if "double" in entry.name:  # both sizes
            entry.write_bytes(data[: len(data) // 2])
        elif entry == entries[-1]:  # one of the two sizes, and the other goes with it
            data[len(data) // 2] ^= 0xFF
            entry.write_bytes(data)
    out, err = output(launch(thrice, PYTHONWARNINGS="ignore", **env))
    first, _, last = out.splitlines()
    hits, misses, _ = first.split()
    assert int(hits) + int(misses) == 4
    assert int(misses) >= 3
    assert err.count("entries of jit_square could not be read and are made anew") == 1
    assert "Error reading" not in err
    # An entry that went with a damaged one, after it had been read, is made again.
    assert last == "4 0 True"


@pytest.mark.long
def test_a_process_finds_what_another_one_of_its_run_has_compiled(tmp_path):
    code = """
import time
from pathlib import Path
import jax, jax.numpy as jnp
from gspmd_lm.runtime import compile_cache, startup
startup.start(platform="cpu", simulated_devices=1, coordinator="127.0.0.1:PORT", num_processes=2, process_id=INDEX)
cache = compile_cache.enable()
while INDEX and not [*Path(cache.directory).glob("jit_double-*-cache")]:
    time.sleep(0.05)
sharding = jax.NamedSharding(jax.make_mesh((2,), ("data",)), jax.P("data"))
def double(x): return x * 2
jax.jit(double).lower(jax.ShapeDtypeStruct((2,), jnp.float32, sharding=sharding)).compile()
print("hits", cache.hits, "misses", cache.misses)
"""
    code = code.replace("PORT", str(free_port()))
    both = [launch(code.replace("INDEX", str(index)), GSPMD_LM_CACHE=str(tmp_path)) for index in range(2)]
    assert [output(process)[0].splitlines()[-1] for process in both] == ["hits 0 misses 1", "hits 1 misses 0"]


def test_the_cache_keeps_the_entries_used_last(tmp_path):
    for age, name in enumerate(["new-cache", "middle-cache", "old-cache"]):
        (tmp_path / name).write_bytes(bytes(100))
        os.utime(tmp_path / name, (1000 - age, 1000 - age))
    os.utime(tmp_path / "old-cache", (2000, 100))  # read since
    files.trim(tmp_path.glob("*-cache"), 250)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["new-cache", "old-cache"]
    files.trim(tmp_path.glob("*-cache"), 250)
    assert len(list(tmp_path.iterdir())) == 2


def test_a_cache_folder_that_cannot_be(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("GSPMD_LM_CACHE", str(tmp_path / "file"))
    with pytest.raises(InputError, match=r"file.compile: the compile cache cannot be written(.|\n)*GSPMD_LM_CACHE"):
        compile_cache.enable()


FLIPS = """
import logging, os, random, sys
from pathlib import Path
import jax, jax.numpy as jnp
from gspmd_lm.runtime import compile_cache
jax.config.update("jax_platforms", "cpu")
logging.disable(logging.CRITICAL)
cache = compile_cache.enable()
x = jnp.arange(64.0).reshape(8, 8) / 10
def computed():
    jax.clear_caches()
    def program(x):
        return jnp.sin(x @ x).sum() + jnp.exp(-x).mean()
    return float(jax.jit(program)(x))
expected = computed()
(entry,) = Path(cache.directory).glob("jit_program-*-cache")
whole, draw, rebuilt = entry.read_bytes(), random.Random({seed}), 0
for _ in range({count}):
    damaged, bit = bytearray(whole), draw.randrange(8 * len(whole))
    damaged[bit // 8] ^= 1 << bit % 8
    entry.write_bytes(damaged)
    assert computed() == expected, bit
    rebuilt += entry.read_bytes() != damaged
    entry.write_bytes(whole)
print("zstandard" in sys.modules, rebuilt)
"""


@pytest.mark.long
@pytest.mark.parametrize("count", [20, pytest.param(300, marks=pytest.mark.slow)])
def test_no_flipped_bit_in_an_entry_is_run(tmp_path, count):
    """With zstandard installed, with which jax would compress entries without a checksum."""
    out, _ = output(launch(FLIPS.format(seed=count, count=count), GSPMD_LM_CACHE=str(tmp_path)), 900)
    installed, rebuilt = out.split()
    assert installed == "True" and int(rebuilt) >= 0.95 * count
