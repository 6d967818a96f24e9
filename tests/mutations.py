"""Forty small mistakes, put into a copy of the tree one after the other: tests must fail with each.

python -m tests.mutations tries all of them, and python -m tests.mutations 3 17 those of these numbers. A mutation that
survives needs a test, and one whose line has changed needs a new text here.
"""

import importlib
import multiprocessing
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
LONGEST_S = 900.0  # that the tests of one mutation may take
FAILED = 1  # pytest's exit code


class Mutation(NamedTuple):
    """A change of one line, and the tests that must fail with it."""

    file: str  # in gspmd_lm/
    before: str
    after: str
    tests: str  # in tests/, with options of pytest


MUTATIONS = tuple(
    Mutation(*one)
    for one in (
        # config
        (
            "config/core_yaml.py",
            "if not -_MOST <= number < _MOST:",
            "if not -_MOST <= number <= _MOST:",
            "config/test_core_yaml.py",
        ),
        (
            "config/windows.py",
            "self.shift >= self.size,",
            "self.shift > self.size,",
            "train/test_image_layouts.py::test_settings_that_contradict_each_other_are_refused",
        ),
        (
            "config/stacks.py",
            "self.heads, self.kv_heads\n",
            "self.heads, self.heads\n",
            "train/test_seq2seq.py::test_settings_that_contradict_each_other_are_refused",
        ),
        # sharding
        (
            "sharding/rules.py",
            'lambda row: (row.array != "" and row.mentions(path), len(row.array))',
            "lambda row: len(row.array)",
            "sharding/test_rules.py::test_a_row_of_a_weight_places_its_adapter_too",
        ),
        (
            "sharding/rules.py",
            'busy + others * (2 if self.pipeline.schedule == "1f1b" else 1)',
            "busy + others",
            "sharding/test_rules.py::test_a_stage_waits_for_those_around_it",
        ),
        (
            "sharding/rules.py",
            "if elsewhere & {*whole.mesh_axes} and not self.stages:",
            "if elsewhere & {*whole.mesh_axes}:",
            "sharding/test_rules.py::test_replicas_differ_in_the_batch_alone",
        ),
        (
            "sharding/quantised.py",
            "across = (*devices, *([replicas()] if over_tokens and replicas() else []))",
            "across = devices",
            "sharding/test_quantised.py::test_replicas_share_the_scales_of_what_they_add_to_the_gradient_of_a_weight",
        ),
        (
            "sharding/placement.py",
            'for table in ("rules", "weights", "optimizer")]',
            'for table in ("rules", "weights")]',
            "sharding/test_placement.py::test_gradients_are_placed_as_the_optimizer_also_where_it_has_no_state",
        ),
        # model
        (
            "model/loss.py",
            "correct = (has_target_BT & (target_BT >= highest_BT))",
            "correct = (target_BT >= highest_BT)",
            "model/test_loss.py::test_sums_and_gradients_are_those_of_the_formula",
        ),
        (
            "model/cache.py",
            "max(j for j in makers if kinds[j] == kinds[i])",
            "max(makers)",
            "model/test_altup.py::test_tokens_one_by_one_give_what_whole_rows_do",
        ),
        (
            "model/parts/windows.py",
            "region_yx = 2 * from_other_side[:, None].astype(jnp.int32) + from_other_side",
            "region_yx = from_other_side[:, None].astype(jnp.int32) + from_other_side",
            "model/test_windows.py",
        ),
        (
            "model/moe_routing.py",
            "rounds = jnp.maximum(-(-fullest // rows), 1).reshape(1)",
            "rounds = jnp.maximum(fullest // rows, 1).reshape(1)",
            "train/test_expert_layouts.py::test_tokens_travel_in_as_many_rounds_as_the_fullest_device_needs",
        ),
        (
            "model/parts/latent.py",
            "for turn in (*self.parts.query_turns, *self.parts.turns):",
            "for turn in self.parts.turns:",
            "model/test_latent_attention.py::test_results_and_gradients_are_those_of_the_equations",
        ),
        # program
        (
            "program/operands.py",
            "if dtype and chip and not chip.peak_of_operands(dtype):",
            "if dtype and chip and chip.peak_of_operands(dtype) is None:",
            "program/test_operands.py",
        ),
        # train
        (
            "train/optimizer.py",
            "decay = _decay_steps(cfg, steps)\n        stable = max(steps - warmup - decay, 0)",
            "decay = _decay_steps(cfg, steps)\n        stable = max(steps - decay, 0)",
            "train/test_optimizer.py::test_schedules",
        ),
        (
            "train/saving.py",
            "return dataclasses.replace(self, since=self.since + 1, evaluated=step)",
            "return dataclasses.replace(self, since=self.since + 1)",
            "train/test_saving.py",
        ),
        (
            "train/step.py",
            "skipped_in_a_row=(state.skipped_in_a_row + 1) * skipped,",
            "skipped_in_a_row=state.skipped_in_a_row + skipped,",
            "train/test_step.py::test_a_step_that_is_not_finite_changes_nothing",
        ),
        (
            "train/loop.py",
            "if self.best.step == done:\n                self.best = best_before",
            "if self.best.step != done:\n                self.best = best_before",
            "train/test_loop.py::test_the_best_evaluation_is_of_a_step_that_was_saved",
        ),
        # data
        (
            "data/packing.py",
            "ends &= windows[:, 1:] == self.end",
            "pass",
            "data/test_packing.py",
        ),
        (
            "data/making.py",
            "is_left_out = unit.split != HELD_OUT and contains(apart, hashed)",
            "is_left_out = contains(apart, hashed)",
            "data/test_mixtures.py::test_documents_that_are_held_out_are_left_out_of_training",
        ),
        (
            "data/pairs.py",
            "firsts.append(max(held, first + 1))",
            "firsts.append(first + 1)",
            "data/test_pairs.py",
        ),
        (
            "data/loader.py",
            "sorted(range(len(parts)), key=lambda i: shares[i] - exact[i])",
            "sorted(range(len(parts)), key=lambda i: exact[i] - shares[i])",
            "data/test_mixtures.py",
        ),
        # workdir
        (
            "workdir/health.py",
            "healthy = {step for step in self.unknown if step < finite_step}",
            "healthy = {step for step in self.unknown if step <= finite_step}",
            "workdir/test_checkpoint.py",
        ),
        (
            "workdir/log.py",
            'if row and row["step"] <= start_step]',
            'if row and row["step"] < start_step]',
            "workdir/test_log.py",
        ),
        (
            "workdir/checkpoint.py",
            "left = [old for old in manager.all_steps() if old >= step]",
            "left = [old for old in manager.all_steps() if old > step]",
            "workdir/test_failures.py::test_saving_after_a_damaged_step_replaces_it",
        ),
        # infer
        (
            "infer/sampling.py",
            "better_BV = jnp.cumsum(share_BV, axis=-1) - share_BV",
            "better_BV = jnp.cumsum(share_BV, axis=-1)",
            "infer/test_sampling.py",
        ),
        (
            "infer/generate.py",
            'reason = "stop" if stopped else reason',
            "reason = reason",
            "infer/test_detokenizer.py",
        ),
        # convert
        (
            "convert/families/t5.py",
            'reader.number("relative_attention_max_distance", 128)',
            'reader.number("relative_attention_max_distance", 64)',
            "convert/test_defaults.py",
        ),
        (
            "convert/dequantise.py",
            "- np.repeat(zero, group, 0)) * np.repeat(scale, group, 0)",
            "- np.repeat(zero, group, 0)) * np.tile(scale, (group, 1))",
            "convert/test_dequantise.py",
        ),
        (
            "convert/rope.py",
            "return 0.0 if strength == 1 else float(head_dim**-0.5 * strength * strength)",
            "return 0.0 if strength == 1 else float(head_dim**-0.5 * strength)",
            "convert/test_families.py::test_logits_are_those_of_transformers[deepseek-v3]",
        ),
        # foresight
        (
            "foresight/timing/simulate.py",
            "if free_s != self._free_at_s.get(link):",
            "if free_s == self._free_at_s.get(link):",
            "foresight/test_simulate.py",
        ),
        (
            "foresight/timing/op_time.py",
            "best = max(best, waves / math.ceil(waves) / (1 + GPU_TILE_BYTES * splits / depth_bytes))",
            "best = max(best, waves / math.ceil(waves) / (1 + GPU_TILE_BYTES / depth_bytes))",
            "foresight/test_gpu_op_time.py",
        ),
        (
            "foresight/memory.py",
            'beside = compiled["output_size_in_bytes"] - compiled["alias_size_in_bytes"]',
            'beside = compiled["output_size_in_bytes"]',
            "foresight/test_memory.py",
        ),
        (
            "hardware/network.py",
            "across = min(steps, passes * (outer - 1))",
            "across = min(steps, outer - 1)",
            "hardware/test_network.py",
        ),
        # plan
        (
            "plan/model_transfers.py",
            "for _ in range(2 * passes + recomputed):",
            "for _ in range(2 * passes):",
            "plan/test_sent.py",
        ),
        (
            "plan/overlap.py",
            'passes = 2 if kind == "weights" and in_loop else 1',
            'passes = 2 if kind == "weights" else 1',
            "plan/test_overlap.py",
        ),
        # launch
        (
            "launch/loop.py",
            "self._failures = self._failures + 1 if step <= self._last_step else 1",
            "self._failures = self._failures + 1 if step < self._last_step else 1",
            "launch/test_tpu.py::test_a_step_that_fails_three_times_ends_the_loop",
        ),
        (
            "launch/place.py",
            "return next((code for code in codes if code not in (0, STOPPED)), max(code or 0 for code in codes))",
            "return max(code or 0 for code in codes)",
            "launch/test_place.py",
        ),
        # explore
        (
            "explore/rows.py",
            "while key and key not in known:",
            "while key and key in known:",
            "explore/test_splices.py",
        ),
        (
            "explore/display.py",
            'if answer["version"] >= self.layer_version:',
            'if answer["version"] > self.layer_version:',
            "explore/test_workbench.py::test_a_layer_that_is_traced_again_is_taken",
        ),
    )
)


def try_mutation(mutation: Mutation, copy: Path) -> str:
    """What becomes of a mutation in a copy of the tree: found, survived, or why its tests say nothing."""
    path = copy / "gspmd_lm" / mutation.file
    text = path.read_text()
    path.write_text(text.replace(mutation.before, mutation.after))
    process = multiprocessing.get_context("fork").Process(target=_run_tests, args=(mutation.tests, copy))
    process.start()
    process.join(LONGEST_S)
    hangs = process.is_alive()
    process.kill()
    process.join()
    path.write_text(text)
    if hangs:
        return f"no answer in {LONGEST_S:.0f} s"
    if process.exitcode == FAILED:
        return "found"
    return "survived" if process.exitcode == 0 else f"no answer, exit code {process.exitcode}"


def _run_tests(tests: str, copy: Path) -> None:
    """Ends this process with the exit code of tests of a copy, which import the copy's modules."""
    os.chdir(copy)
    os.environ["PYTHONPATH"] = sys.path[0] = str(copy)
    with (copy / "output.txt").open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        paths = [f"tests/{test}" for test in tests.split()]
        os._exit(pytest.main(["-n", "0", "-q", "-x", "-p", "no:cacheprovider", *paths]))


def main(numbers: list[int]) -> int:
    """The number of mutations that survive, of all or of those with the given numbers."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    for name in ("jax", "flax.linen", "optax"):  # once, and not for each mutation
        importlib.import_module(name)

    for name in [name for name in sys.modules if name.partition(".")[0] in ("tests", "gspmd_lm")]:
        del sys.modules[name]
    survivors = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", "site"))
        for number in numbers or range(1, 1 + len(MUTATIONS)):
            mutation = MUTATIONS[number - 1]
            outcome = try_mutation(mutation, copy)
            survivors += outcome != "found"
            change = " ".join(mutation.after.split())
            print(f"{number:2} {outcome:8} {mutation.file}: {change}", flush=True)
            if outcome not in ("found", "survived"):
                print((copy / "output.txt").read_text()[-2000:])
    return survivors


if __name__ == "__main__":
    sys.exit(main([*map(int, sys.argv[1:])]) > 0)
