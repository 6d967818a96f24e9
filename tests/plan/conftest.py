"""What the tests of plan share: Llama 3 8B on 8 GPUs, which is priced and never compiled here, and the mixer."""

import sys
from pathlib import Path

import pytest

from gspmd_lm import config as configs
from gspmd_lm.hardware import target as targets
from gspmd_lm.plan.estimate import Estimator
from gspmd_lm.plan.space import Space
from gspmd_lm.plan.traces import TraceCache

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))


@pytest.fixture(scope="session")
def mixer():
    """The task of examples/mixer.py."""
    import mixer

    return mixer.TASK


@pytest.fixture(scope="session")
def llama():
    """Llama 3 8B with 8 rows of 8192 tokens."""
    return configs.load("llama3_8b", ["data.batch=8"])


@pytest.fixture(scope="session")
def traces_of():
    """A function that gives the traces of a config or task, which all tests share."""
    known = {}

    def make(config):
        if repr(config) not in known:
            known[repr(config)] = TraceCache(config)
        return known[repr(config)]

    return make


class ListedSpace(Space):
    """A space over whose rules files, as plain values, a test may go."""

    def __iter__(self):
        return (raw for raw, _ in self.fill_layouts())


@pytest.fixture(scope="session")
def space_of(traces_of):
    """A function that gives the space of a config or task on a target."""

    def make(config, target):
        return ListedSpace(config, targets.parse(target), traces_of(config))

    return make


@pytest.fixture(scope="session")
def estimated(llama, traces_of):
    """A function that prices Llama 3 8B under the plain values of a rules file: priced(raw, "h100:8")."""
    traces, estimators = traces_of(llama), {}

    def make(raw, target="h100:8"):
        if target not in estimators:
            where = targets.parse(target)
            estimators[target] = Estimator(llama, where, traces), Space(llama, where, traces)
        estimator, space = estimators[target]
        return estimator.estimate(space.rules(raw))

    return make
