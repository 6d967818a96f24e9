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
    "launch/test_tpu.py", "convert/test_families.py", "plan/test_sent.py", "convert/test_kinds.py",
    "train/test_loop.py", "foresight/test_bounds.py", "train/test_promise.py", "convert/test_verb.py",
    "model/kernels/test_cudnn.py", "test_trained_tasks.py", "train/test_pipeline.py", "train/test_expert_layouts.py",
    "plan/test_estimate.py", "test_layering.py", "runtime/test_compile_cache.py", "foresight/test_step_flops.py",
    "convert/test_architecture.py", "train/test_context_layouts.py", "sharding/test_partial_sums.py",
    "test_other_models.py", "workdir/test_failures.py", "train/test_optimizer.py", "explore/test_workbench.py",
    "runtime/test_rendezvous.py", "test_api.py", "workdir/test_checkpoint.py", "test_your_own_model.py",
    "runtime/test_processes.py", "plan/test_pipelines.py", "foresight/test_propagation.py", "plan/test_search.py",
    "infer/test_references.py", "plan/test_space.py", "model/test_altup.py", "cli/test_keys.py",
    "model/kernels/test_attention.py", "runtime/test_watchdog.py", "model/test_transformer.py",
    "convert/test_encoder_families.py", "launch/test_gke.py", "cli/test_cli.py", "train/test_collectives.py",
    "model/test_experts.py", "foresight/test_any_step.py", "foresight/test_compile.py", "train/test_divergence.py",
    "model/kernels/test_context.py", "plan/test_elastic.py", "convert/test_peft.py", "foresight/test_said_once.py",
    "sharding/test_rules.py", "cli/test_dry_run.py", "foresight/test_explain.py", "infer/test_generate.py",
    "show/test_terminal.py", "foresight/test_calibration.py", "test_layouts.py", "train/test_constraints.py",
    "program/test_operands.py", "foresight/test_generation.py", "launch/test_job.py", "data/test_tokens.py",
    "cli/test_verbs.py", "show/test_page.py", "train/test_seq2seq.py", "plan/test_ranks.py",
    "foresight/test_published.py", "explore/test_server.py",
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
