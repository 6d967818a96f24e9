"""The environment of every process of a test run, the order of the files, and which processes have the fixtures."""

import gc
import os
import sys
from pathlib import Path

from tests.quick import XLA_FLAGS

gc.disable()  # until the tests begin: a third of the time to import and to collect them was spent on it
os.environ["JAX_PLATFORMS"] = "cpu"
# Each of the forty processes that tests start would compile the package from its source again, and workers the tests.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# The last bits of results are other ones with these flags: both sides of a comparison have them. What is recorded is
# compiled by processes that do not inherit them.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {XLA_FLAGS}"

# The files that take longest, the longest first: workers take whole files in this order, and end together.
LONGEST = (
    "convert/test_families.py",
    "runtime/test_processes.py",
    "foresight/test_bounds.py",
    "foresight/test_attribution.py",
    "foresight/test_said_once.py",
    "test_trained_tasks.py",
    "train/test_promise.py",
    "train/test_pipeline.py",
    "foresight/test_explain.py",
    "train/test_seq2seq.py",
    "test_other_models.py",
    "test_api.py",
    "cli/test_verbs.py",
    "train/test_loop.py",
    "plan/test_space.py",
    "train/test_collectives.py",
    "train/test_objectives.py",
    "train/test_context_layouts.py",
    "plan/test_sent.py",
    "plan/test_search.py",
    "model/test_transformer.py",
    "infer/test_generate.py",
    "train/test_lora.py",
    "train/test_matmul_dtype.py",
    "train/test_optimizer.py",
    "model/kernels/test_context.py",
    "test_layouts.py",
    "sharding/test_rules.py",
    "model/test_latent_attention.py",
)


def pytest_configure(config):
    """Fixtures import jax, for which the process that only hands out files would take seconds."""
    if "PYTEST_XDIST_WORKER" in os.environ or not config.getoption("numprocesses", None):
        config.pluginmanager.import_plugin("tests.fixtures")


def pytest_collection_modifyitems(items):
    order = {Path(__file__).parent / name: at for at, name in enumerate(LONGEST)}
    assert all(path.exists() for path in order)
    items.sort(key=lambda item: order.get(item.path, len(order)))


def pytest_collection_finish():
    """Tracing makes many objects that live: looking through all of them for garbage took a tenth of its time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(200_000, 20, 50)
    gc.enable()
