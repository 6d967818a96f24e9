"""The environment of every process of a test run, how it starts and ends, the order of files, and who has fixtures."""

import atexit
import gc
import os
import sys
from pathlib import Path

from gspmd_lm.runtime.quiet import collect_seldom
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
    "convert/test_families.py", "foresight/test_bounds.py", "runtime/test_processes.py", "train/test_promise.py",
    "train/test_pipeline.py", "test_trained_tasks.py", "foresight/test_explain.py", "train/test_context_layouts.py",
    "train/test_loop.py", "plan/test_sent.py", "test_other_models.py", "foresight/test_said_once.py",
    "cli/test_verbs.py", "train/test_matmul_dtype.py", "train/test_collectives.py", "plan/test_space.py",
    "test_api.py", "train/test_mask_layouts.py", "foresight/test_step_flops.py", "foresight/test_generation.py",
    "train/test_seq2seq.py", "model/test_transformer.py", "train/test_towers.py", "sharding/test_rules.py",
    "infer/test_generate.py", "model/kernels/test_context.py", "test_layouts.py", "model/test_experts.py",
    "foresight/test_attribution.py", "plan/test_search.py", "train/test_lora.py", "plan/test_pipelines.py",
    "model/kernels/test_attention.py", "workdir/test_failures.py", "test_your_own_model.py",
    "model/kernels/test_cudnn.py", "train/test_state.py", "infer/test_eight_bits.py", "train/test_objectives.py",
    "train/test_optimizer.py", "plan/test_estimate.py", "foresight/test_any_step.py", "infer/test_encoder_decoders.py",
    "train/test_interleave.py", "foresight/test_published.py", "train/test_expert_layouts.py",
    "workdir/test_checkpoint.py", "model/test_adapters.py", "model/test_altup.py", "convert/test_reading_families.py",
    "train/test_image_layouts.py", "train/test_divergence.py", "convert/test_hosts.py",
    "convert/test_image_families.py",
)  # fmt: skip


def pytest_configure(config):
    """Fixtures import jax, for which the process that only hands out files would take seconds."""
    if "PYTEST_XDIST_WORKER" in os.environ or not config.getoption("numprocesses", None):
        config.pluginmanager.import_plugin("tests.fixtures")


def pytest_collection_modifyitems(items):
    order = {Path(__file__).parent / name: at for at, name in enumerate(LONGEST)}
    assert all(path.exists() for path in order)
    items.sort(key=lambda item: order.get(item.path, len(order)))


def pytest_collection_finish():
    """Tracing makes many objects that live: looking through all of them for garbage took a tenth of its time.

    A fifth of them is garbage, which a worker can hold until it ends: fixtures.py frees memory maps.
    """
    gc.collect()
    gc.freeze()
    if hypothesis := sys.modules.get("hypothesis"):
        # Before its first example, hypothesis collects garbage: now, since later it took six seconds of each worker.
        once = hypothesis.settings(max_examples=1, database=None)
        once(hypothesis.given(hypothesis.strategies.none())(lambda _: None))()
    collect_seldom(20_000_000)
    gc.enable()


def pytest_sessionfinish():
    """A worker has told what it found. To look through all that it holds, and to free it, took seconds of each run."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        gc.freeze()
        atexit.register(os._exit, 0)
