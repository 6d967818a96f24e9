"""Eight simulated devices for every test in this process, and small configs, steps, batches and runs to test with.

SIMULATED_DEVICES=16 gives sixteen, which some slow tests ask for.
"""

import asyncio
import dataclasses
import gc
import itertools
import os
import subprocess
import types
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from gspmd_lm import config as configs
from gspmd_lm.config import with_values
from gspmd_lm.explore import jobs
from gspmd_lm.foresight import compile
from gspmd_lm.foresight.propagation import read_train
from gspmd_lm.runtime import startup
from gspmd_lm.sharding import rules_file
from gspmd_lm.train import state, step
from tests import courses, forked

startup.prepare_cpu(int(os.environ.get("SIMULATED_DEVICES", "8")))
jax.devices()  # now, since the first run would set how many there are
# With the lines of Python that made each operation, XLA takes a tenth longer for a program. Few tests ask for them.
FRAMES = jax.config.jax_traceback_in_locations_limit
jax.config.update("jax_traceback_in_locations_limit", 0)

# Linux gives a process 65,530 memory maps, of which a program for eight devices takes 200 to 300. A process that has no
# more is ended by XLA (SIGSEGV). Programs that no test needs any more hold theirs until garbage is collected, which
# conftest.py has made rare.
MAPS, MOST_MAPS = Path("/proc/self/maps"), 40_000
compiled = itertools.count(1)


def free_memory_maps(event: str, *_: float, **__: str) -> None:
    if not event.endswith("backend_compile_duration") or next(compiled) % 50 or not MAPS.exists():
        return
    for generation in (0, 2):  # first what is new: to look through all takes seconds
        if MAPS.read_bytes().count(b"\n") > MOST_MAPS:
            gc.collect(generation)


jax.monitoring.register_event_duration_secs_listener(free_memory_maps)


@pytest.fixture(scope="session", autouse=True)
def caches(tmp_path_factory):
    """The folder of all caches, shared by the processes of a test run and by no other run.

    A program that jax finds in the user's cache may be of older code: it names other files and lines.
    """
    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GSPMD_LM_CACHE", str(folder / "caches"))
        patch.setenv("GSPMD_LM_RUNS", str(folder / "runs"))
        yield folder / "caches"


@pytest.fixture(scope="session", autouse=True)
def compilers_and_workers_are_forked():
    """Other processes compile programs and estimate layouts, as for users, but these begin with jax imported."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compile, "subprocess", types.SimpleNamespace(**vars(subprocess) | {"run": forked.run}))
        started = {"create_subprocess_exec": forked.start}
        patch.setattr(jobs, "asyncio", types.SimpleNamespace(**vars(asyncio) | started))
        yield


@pytest.fixture(autouse=True)
def no_cache_of_programs():
    """What the programs of other tests need not be written to: a run leaves its compile cache switched on."""
    yield
    if jax.config.jax_compilation_cache_dir:
        jax.config.update("jax_compilation_cache_dir", None)
        compilation_cache.reset_cache()


@pytest.fixture(scope="module")
def lines_of_python():
    """Programs name the lines of Python that made their operations, as for users.

    None of them is taken from the compile cache, where other tests leave the same program without lines.
    """
    jax.config.update("jax_traceback_in_locations_limit", FRAMES)
    jax.config.update("jax_compilation_cache_include_metadata_in_key", True)
    yield
    jax.config.update("jax_traceback_in_locations_limit", 0)
    jax.config.update("jax_compilation_cache_include_metadata_in_key", False)


@pytest.fixture(scope="session")
def small():
    """A function that makes a float32 config small enough to compile in a second or two: small(block="parallel")."""
    base = configs.from_dict(
        {
            "name": "small",
            "model": {
                "layers": 2, "embed": 32, "heads": 8, "kv_heads": 8, "head_dim": 4, "mlp": 64, "vocab": 61,
                "padded_vocab": 64, "context": 32, "compute_dtype": "float32", "matmul_precision": "highest",
            },
            "data": {"source": "random:64", "packing": "documents", "batch": 32, "seq": 16},
            "optimizer": {"learning_rate": 1.0e-2, "warmup_steps": 5},
            "train": {"steps": 20},
        },
        "tests",
    )  # fmt: skip

    def make(*, optimizer=None, data=None, train=None, objective=None, **model):
        changed = {
            "objective": objective,
            "model": with_values(base.model, model),
            "optimizer": dataclasses.replace(base.optimizer, **(optimizer or {})),
            "data": dataclasses.replace(base.data, **(data or {})),
            "train": dataclasses.replace(base.train, **(train or {})),
        }
        return dataclasses.replace(base, **changed)

    return make


@pytest.fixture(scope="session")
def built():
    """A function that builds the step of a config under a rules file (or Rules), which may be changed on the way.

    Whether the rules fit the config is not asked here: that would trace the model once more for each step.
    """

    def make(config, rules, **changes):
        rules = rules_file.load(rules) if isinstance(rules, str) else rules
        rules = dataclasses.replace(rules, **changes)
        if rules.devices > jax.device_count():
            pytest.skip(f"needs SIMULATED_DEVICES={rules.devices}")
        devices = jax.devices()[: rules.devices if rules.devices > 0 else 8]
        return step.build_step(config, rules.fill(len(devices)), state.arrays(config), devices)

    return make


@pytest.fixture(scope="session")
def read():
    """A function that reads what a step sends and computes from its trace."""
    return read_train


@pytest.fixture(scope="session")
def batch_of():
    """A function that draws the batch of a step: random tokens in two documents per row, placed for a Step."""

    def make(built_step, at=0):
        data, model, rng = built_step.config.data, built_step.config.model, np.random.default_rng(at)
        tokens = rng.integers(0, max(model.vocab, 1), (data.batch, data.seq + 1), dtype=np.int32)
        cut = rng.integers(1, data.seq, (data.batch, 1))
        place = np.arange(data.seq)[None]
        shapes = {name: like.shape for name, like in built_step.task.batch(data.batch).items()}
        arrays = {
            "tokens": tokens[:, :-1],
            "targets": np.where(place == cut - 1, -1, tokens[:, 1:]).astype(np.int32),
            "segment_ids": np.where(place < cut, 1, 2).astype(np.int32),
            "positions": np.where(place < cut, place, place - cut).astype(np.int32),
            "token_types": ((place - cut) % 3 == 0).astype(np.int32),
            "labels": (np.arange(data.batch, dtype=np.int32) % 4) - 1,
            "row": np.arange(data.batch, dtype=np.int32),
        }
        if model.classes and model.classes.of == "tokens":
            arrays["targets"] = np.minimum(arrays["targets"], 1)
        if model.encoder and (sources := built_step.config.source_seq):
            cut, place = rng.integers(1, sources, (data.batch, 1)), np.arange(sources)[None]
            arrays |= {
                "source_tokens": rng.integers(0, built_step.config.model.vocab, (data.batch, sources), dtype=np.int32),
                "source_segment_ids": np.where(place < cut, 1, 2).astype(np.int32),
                "source_positions": np.where(place < cut, place, place - cut).astype(np.int32),
            }
        if model.frames:
            arrays["source_frames"] = rng.standard_normal(shapes["source_frames"], np.float32)
        if model.vision:  # a row has one text, and the last row none
            cut[-1] = 0
            positions = np.broadcast_to(place, (data.batch, data.seq)).astype(np.int32)
            arrays |= {"segment_ids": (place < cut).astype(np.int32), "positions": positions}
            arrays["patches"] = rng.standard_normal(shapes["patches"], np.float32)
            rows = model.vision.queries.rows if model.vision.queries else 0
            arrays["targets"] = np.where((place >= rows) & (place < cut), arrays["targets"], -1).astype(np.int32)
        if model.patches:
            arrays["patches"] = rng.standard_normal((data.batch, data.seq, model.patches.pixels), np.float32)
        if model.masks:  # a box around an object, or a point of it; the last row is padding
            is_box = rng.integers(0, 2, (data.batch, 1))
            arrays["points"] = rng.random(shapes["points"], np.float32)
            arrays["point_kinds"] = np.where(is_box, [[2, 3]], [[1, -1]]).astype(np.int32)
            arrays["object"] = rng.integers(0, 2, shapes["object"]).astype(np.float32)
            arrays["object"][:, model.patches.side**2 - 2 :] = -1
            arrays["object"][-1] = -1
        for name, x in arrays.items():  # padded as by a loader
            fill, more = -1 if name in ("targets", "labels", "object") else 0, data.rows - len(x)
            arrays[name] = np.pad(x, [(0, more), *[(0, 0)] * (x.ndim - 1)], constant_values=fill)
        wanted = built_step.abstract_batch
        return {name: jax.device_put(arrays[name], like.sharding) for name, like in wanted.items()}

    return make


@pytest.fixture(scope="session")
def course(built, batch_of):
    """A function that trains a config under rules, each once: course(config, "tp8", steps=2, microbatches=4)."""
    return courses.once(built, batch_of)
