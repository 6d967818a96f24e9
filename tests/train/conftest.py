"""A run of a small config, whose programs are compiled once for all tests that a process runs."""

import dataclasses
import functools
import io
import json

import pytest
from etils import epath
from rich.console import Console

from gspmd_lm.data import loader
from gspmd_lm.sharding import rules_file
from gspmd_lm.train import decoder
from gspmd_lm.train.loop import Run
from gspmd_lm.train.programs import TrainPrograms
from tests.courses import begun
from tests.quick import QUICK
from tests.train.runs import CPU, TRAIN


@pytest.fixture(scope="session")
def run(small, built):
    """A function that makes a Run; programs are compiled once per layout and what they compute.

    Saving takes longer the more devices there are, so most runs have two.
    The initial state is drawn, which compiles nothing.
    """
    programs = {}

    def make(workdir, layout="fsdp2", config=None, profile=None):
        config = config or small(layers=1, data={"batch": 8, "source": "random:60"}, train=dict(TRAIN))
        key = json.dumps(
            [layout, repr((config.model, config.data, config.optimizer, config.train.steps, config.train.init_from))]
        )
        if key not in programs:
            rules = rules_file.load("fsdp8", "fsdp=2") if layout == "fsdp2" else layout
            step = built(config, rules, compiler_options={"cpu": QUICK})
            drawn = {} if config.train.init_from else {"initial state": functools.partial(begun, step)}
            programs[key] = step, drawn
        step, compiled = programs[key]
        step = dataclasses.replace(step, task=decoder.task(config))
        console = Console(file=io.StringIO(), width=1000)
        return Run(
            TrainPrograms(step, CPU, functools.partial(console.print, soft_wrap=True, markup=False), compiled=compiled),
            open_rows=lambda: loader.open_loaders(config),
            workdir=epath.Path(workdir),
            console=console,
            profile=profile,
        )

    return make
