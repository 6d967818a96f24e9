"""Programs compiled for targets, each once for all tests of a run."""

import dataclasses
import subprocess

import pytest

from gspmd_lm import config as configs
from gspmd_lm.foresight import compile
from gspmd_lm.foresight.compile import CompileRequest
from gspmd_lm.hardware import target as targets
from gspmd_lm.sharding import rules_file
from gspmd_lm.train import choices
from tests.launched import compiled_here
from tests.quick import QUICK

RUN_COMPILER = compile._run_compiler


@pytest.fixture(scope="module", autouse=True)
def programs_of_simulated_devices_are_compiled_here(lines_of_python):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compile, "_run_compiler", compiled_here)
        yield


@pytest.fixture
def forked_process(monkeypatch):
    """Every program is compiled in a fork of a process that has imported jax: see tests/forked.py."""
    monkeypatch.setattr(compile, "_run_compiler", RUN_COMPILER)


@pytest.fixture
def another_process(forked_process, monkeypatch):
    """Every program is compiled in another process, as for users."""
    monkeypatch.setattr(compile, "subprocess", subprocess)


@pytest.fixture(scope="session")
def cache(caches):
    """The folder of compiled programs, shared by the processes of a test run."""
    return caches / "explain"


@pytest.fixture(scope="session")
def request_of():
    """A function that makes a Request of tiny, made smaller: request_of("tp8", "cpu:8", **changes of the rules).

    It is the one that `explain` makes of the same flags, so that both have one program.
    """
    config = configs.load("tiny", ["model.layers=2", "model.embed=64", "model.mlp=128", "data.seq=64"])

    def make(rules, target="cpu:8", config=config, **changes):
        found = targets.parse(target)
        layout = dataclasses.replace(rules_file.load(rules), **{"compiler_options": {"cpu": QUICK}} | changes)
        return CompileRequest(config, choices.settle_rules(config, layout.fill(found.devices), found.processor), found)

    return make


@pytest.fixture(scope="session")
def in_bfloat16(request_of):
    """A function that makes the Request of a target in bfloat16, whose program several tests look at.

    A device has a single row, as with long sequences or many microbatches.
    """

    def make(target):
        config = request_of("fsdp2_tp4").config
        model = dataclasses.replace(config.model, compute_dtype="bfloat16")
        data = dataclasses.replace(config.data, packing="stream", batch=2)
        return request_of("fsdp2_tp4", target, dataclasses.replace(config, model=model, data=data))

    return make
