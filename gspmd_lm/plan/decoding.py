"""The layouts that a plan for decoding chooses from, and the estimated time of a step that makes a token of each row.

Such a step reads all weights and the whole cache, and computes little. So weights are split and never gathered, as many
ways as there are devices that hold no copies of them. What a layout has a choice about is where the cache lies:

  heads    its heads where their matrices are; on each device where they are too few to be split
  rows     its rows: queries move there and results back, which are two small all-to-alls (arXiv 2211.05102, 3.3)
  slots    its slots: all of them get the queries, and their shares of the result are summed up
  both     its heads over tensor, and its rows or its slots over context

An estimate is the time in which a device reads what it holds, and that of what the traced step must send. Nothing hides
behind compute, since each operation waits for the one before it.
"""

import collections
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax

from gspmd_lm.config import Config
from gspmd_lm.errors import InputError
from gspmd_lm.foresight import bounds, explain
from gspmd_lm.foresight.graph import DataflowGraph
from gspmd_lm.foresight.propagation import Transfer, read_step
from gspmd_lm.foresight.timing import few_rows, op_time
from gspmd_lm.hardware.target import Target
from gspmd_lm.infer import programs as generation
from gspmd_lm.plan.estimate import Estimate
from gspmd_lm.plan.overlap import Overlap
from gspmd_lm.plan.space import LayoutSpace
from gspmd_lm.program.task import Task
from gspmd_lm.sharding import rules_file
from gspmd_lm.sharding.problems import ShardingError
from gspmd_lm.sharding.quantised import EIGHT_BITS
from gspmd_lm.sharding.rules import Rules, divisors
from gspmd_lm.sharding.shapes import bytes_per_device
from gspmd_lm.train import decoder


class DecodeSpace(LayoutSpace):
    """The candidates for decoding with one config on one target, and their estimates."""

    phase, counted = "decode", "layouts"

    def __init__(self, computed: Config | Task, target: Target):
        """Raises InputError for a model that does not generate, and for simulated devices."""
        super().__init__(decoder.task(computed), target)
        config = explain.generating_config(self.task)
        if target.chip is None:
            raise InputError(f"--target={target.text}: {explain.NOT_ON_CPU}\n  fix   a target such as v5e:4x4")
        self.config = config
        self.estimator = self  # of its own layouts
        self._whole, self._arrays = generation.whole_context(config), generation.parameters(config.model)
        self._overlap = Overlap(target)

    @property
    def batch_size(self) -> tuple[int, str]:
        """A step makes one token for each row."""
        return self.config.data.batch, "tokens"

    def fill_layouts(self, until_s: float = math.inf) -> Iterator[tuple[dict[str, Any], Rules]]:
        """The plain values of each rules file that fits the model, and its rules. until_s: see `in_time`."""
        for raw in self.in_time(self._layouts(), until_s):
            rules = self.rules(raw)
            try:
                generation.arrays_and_warnings(self.config, rules, self.target.platform, self._whole)
            except ShardingError:
                self.refused += 1
                continue
            yield raw, rules

    def rules(self, raw: Mapping[str, Any]) -> Rules:
        """The rules of plain values, filled."""
        rules = rules_file.from_dict(raw, _describe(raw), vocabulary=self.task.names)
        return explain.settle_layout(self.task, rules, self.target, "decode")

    def _layouts(self) -> Iterator[dict[str, Any]]:
        model, asked, devices = self.config.model, self.config.data, self.target.devices
        sizes = {"vocab": model.vocab_rows, "heads": model.head_rows, "mlp": model.mlp}
        for data, across in itertools.product(divisors(devices), divisors(devices)):
            by_heads, rest = divmod(devices, data * across)
            if rest or asked.batch % data or (across > 1 and by_heads > 1 and model.kv_head_rows % by_heads):
                continue
            # The mesh axis that splits the cache by rows or slots is called tensor if it is the only one for weights.
            name = "context" if by_heads > 1 else "tensor"
            mesh = {"data": data, "tensor": by_heads} | ({name: across} if across > 1 else {})
            mesh = {axis: size for axis, size in mesh.items() if size > 1}
            over = _one_or_several(axis for axis in mesh if axis != "data")
            hidden = {axis: over for axis, size in sizes.items() if over and size % (by_heads * across) == 0}
            if over and not hidden:
                continue
            own = by_heads > 1 and model.kv_head_rows % by_heads == 0
            rules = ({"batch": "data"} if data > 1 else {}) | hidden | ({"kv_heads": "tensor"} if own else {})
            heads, rows = "tensor" if own else None, _one_or_several(axis for axis in ("data", name) if axis in mesh)
            places: list[dict[str, Any]] = [{}] if across == 1 else []
            if across > 1 and asked.batch % (data * across) == 0:
                moved = {f"{array}.heads": heads for array in ("decode_q", "decode_out")}
                places.append({f"{array}.batch": rows for array in ("cache", "decode_q", "decode_out")} | moved)
            if across > 1 and asked.seq % across == 0:
                places.append({"cache.kv_seq": name, "decode_q.heads": heads})
            yield from ({"mesh": mesh or {"data": 1}, "rules": rules | place} for place in places)

    # Estimates

    def estimate(self, rules: Rules) -> Estimate:
        """The estimate for a step of decode under filled and checked rules."""
        chip = self.target.chip
        assert chip
        recorded = generation.record_arrays(self.config, self._arrays, self._whole, rules)["decode"]
        built = generation.build_programs(self.config, rules, self._arrays, self._overlap.devices, self._whole)
        traced = built.trace_decode()
        given = built.abstract_unstacked, built.abstract_decode_state, built.abstract_settings
        reading = read_step(traced.jaxpr, given, traced.out_info)
        graph, cache_bytes = DataflowGraph.from_recorder(recorded, self._arrays), built.cache_bytes_per_device
        weights = bounds.generation_bounds(self.config, rules, self._arrays, chip, graph, reading, 0)
        assert weights.memory_s is not None and weights.compute_s is not None
        share = chip.hbm_bytes_per_s / op_time.hbm_bytes_per_s(chip)
        matmul_s = max(weights.memory_s * share, weights.compute_s)
        if self.config.model.weight_dtype in EIGHT_BITS:
            weight_bytes = weights.memory_s * chip.hbm_bytes_per_s
            rows = self.config.data.batch / rules.mesh.get("data", 1)
            matmul_s = max(matmul_s, few_rows.widening_s(weight_bytes, rows, chip))
        attention_s = cache_bytes / op_time.hbm_bytes_per_s(chip)
        exposed = self._communication_s(rules, reading.transfers)
        held_bytes = sum(map(bytes_per_device, jax.tree.leaves(built.arrays_between_steps)))
        return Estimate(
            step_time_s=matmul_s + attention_s + sum(exposed.values()),
            matmul_s=matmul_s,
            attention_s=attention_s,
            other_s=0.0,
            exposed_by_axis=exposed,
            exposed_host_copy_s=0.0,
            peak_bytes=held_bytes,
            sent_by_axis={axes: round(size) for axes, size in reading.bytes_by_axes.items()},
            communication_s=sum(exposed.values()),
        )

    def _communication_s(self, rules: Rules, transfers: Iterable[Transfer]) -> dict[str, float]:
        """Mesh axes -> the seconds of all that is sent over them."""
        seconds = collections.defaultdict[str, float](float)
        for one in transfers:
            seconds[one.mesh_axes] += one.times_per_step * self._overlap.transfer_s(rules, one)
        return dict(seconds)


def _one_or_several(axes: Iterable[str]) -> str | list[str]:
    """Mesh axes as a row of a rules file has them."""
    several = [*axes]
    return several[0] if len(several) == 1 else several


def _describe(raw: Mapping[str, Any]) -> str:
    """A layout in one line: data 2 x tensor 8, cache by heads."""
    mesh, rows = " x ".join(f"{name} {size}" for name, size in raw["mesh"].items()), raw["rules"]
    places = {"cache.batch": "rows", "cache.kv_seq": "slots", "kv_heads": "heads"}
    split = [place for row, place in places.items() if row in rows]
    return f"{mesh}, cache by {' and '.join(split)}" if split else f"{mesh}, cache in one piece"
