"""Programs compiled for targets, each once for all tests of a run."""

import dataclasses

import pytest

from gspmd_lm import config as configs
from gspmd_lm import rules_file
from gspmd_lm.foresight.compile import CompileRequest
from gspmd_lm.foresight.machine import target as targets


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    """The folder of compiled programs, shared by the processes of a test run."""
    return tmp_path_factory.getbasetemp().parent / "explain"


@pytest.fixture(scope="session")
def request_of():
    """A function that makes a Request of tiny, made smaller: request_of("tp8", "cpu:8", **changes of the rules)."""
    config = configs.load("tiny", ["model.layers=2", "model.embed=64", "model.mlp=128", "data.seq=64"])

    def make(rules, target="cpu:8", config=config, **changes):
        found = targets.parse(target)
        return CompileRequest(config, dataclasses.replace(rules_file.load(rules), **changes).fill(found.devices), found)

    return make
