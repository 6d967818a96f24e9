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
    "convert/test_families.py", "train/test_promise.py", "foresight/test_bounds.py", "train/test_pipeline.py",
    "test_trained_tasks.py", "runtime/test_processes.py", "plan/test_sent.py", "train/test_loop.py",
    "cli/test_commands.py", "foresight/test_explain.py", "cli/test_verbs.py",
    "foresight/test_said_once.py", "program/test_operands.py", "launch/test_tpu.py", "plan/test_elastic.py",
    "test_other_models.py", "train/test_context_layouts.py", "foresight/test_step_flops.py", "convert/test_kinds.py",
    "infer/test_generate.py", "test_api.py", "test_layouts.py", "explore/test_own_programs.py",
    "explore/test_workbench.py", "explore/test_server.py", "explore/test_explore_fuzz.py", "workdir/test_failures.py",
    "train/test_seq2seq.py",
    "model/kernels/test_context.py", "sharding/test_rules.py", "train/test_collectives.py",
    "model/test_transformer.py", "runtime/test_startup.py", "train/test_towers.py", "model/kernels/test_cudnn.py",
    "train/test_lora.py", "train/test_mask_layouts.py", "train/test_objectives.py", "test_your_own_model.py",
    "plan/test_space.py", "plan/test_pipelines.py", "infer/test_eight_bits.py", "foresight/test_any_step.py",
    "workdir/test_checkpoint.py", "model/kernels/test_attention.py", "train/test_divergence.py",
    "sharding/test_partial_sums.py", "train/test_state.py",
    "plan/test_estimate.py", "plan/test_search.py", "train/test_expert_layouts.py", "foresight/test_published.py",
    "model/test_adapters.py", "model/test_experts.py", "train/test_step.py",
    "cli/test_cli.py", "train/test_constraints.py", "runtime/test_compile_cache.py", "train/test_optimizer.py",
    "convert/test_verb.py", "foresight/test_narrow_matmuls.py", "convert/test_hosts.py",
    "sharding/test_placement.py", "foresight/test_attribution.py", "data/test_command.py",
    "train/test_interleave.py", "test_site.py", "model/test_altup.py", "infer/test_encoder_decoders.py",
    "foresight/test_propagation.py", "foresight/test_compile.py", "test_layering.py", "infer/test_references.py",
    "plan/test_ranks.py", "train/test_unroll.py",
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
