"""The layouts that a plan for decoding chooses from, and the estimated time of a step that makes a token of each row.

Such a step reads all weights and the whole cache, and computes little. So weights are split and never gathered, as many
ways as there are devices that hold no copies of them. What a layout has a choice about is where the cache lies:

  heads    where the matrices of its heads are, over tensor; whole on each device where its heads are too few
  rows     its rows over context: queries move there and results back, which are two small all-to-alls
           (arXiv 2211.05102, 3.3)
  slots    its slots over context: all of them get the queries, and their shares of the result are summed up

An estimate is the time in which a device reads what it holds, and that of what the traced step must send. Nothing hides
behind compute, since each operation waits for the one before it.
"""

import collections
import functools
import itertools
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax

from gspmd_lm.config import Config
from gspmd_lm.errors import InputError
from gspmd_lm.foresight import bounds, explain
from gspmd_lm.foresight.graph import DataflowGraph
from gspmd_lm.foresight.propagation import Transfer, read_step
from gspmd_lm.foresight.timing import op_time
from gspmd_lm.hardware.network import sent_bytes
from gspmd_lm.hardware.target import Target
from gspmd_lm.infer import programs as generation
from gspmd_lm.plan.estimate import Estimate
from gspmd_lm.plan.overlap import Overlap, neighbours
from gspmd_lm.program.task import Task
from gspmd_lm.sharding import rules_file
from gspmd_lm.sharding.problems import ShardingError
from gspmd_lm.sharding.rules import Rules, divisors
from gspmd_lm.sharding.shapes import bytes_per_device
from gspmd_lm.train import decoder


class DecodeSpace:
    """The candidates for decoding with one config on one target, and their estimates: compare `space.Space`."""

    def __init__(self, computed: Config | Task, target: Target):
        """Raises InputError for a model that does not generate, and for simulated devices."""
        self.task, self.target = decoder.task(computed), target
        config = explain.generating_config(self.task)
        if target.chip is None:
            raise InputError(f"--target={target.text}: {explain.NOT_ON_CPU}\n  fix   a target such as v5e:4x4 or h100:8")
        self.config = config
        self.refused = self.tables = self.left_out = 0
        self.notes: list[str] = []
        self.estimator = self  # of its own layouts
        self._whole, self._arrays = generation.whole_context(config), generation.parameters(config.model)
        self._overlap = Overlap(target)

    @property
    def batch_size(self) -> tuple[int, str]:
        """A step makes one token for each row."""
        return self.config.data.batch, "tokens"

    @property
    def not_estimated(self) -> str:
        """How many layouts there was no time for; '' if there was time for all."""
        said = f"{self.left_out:,} of {self.tables:,} layouts were not estimated for want of time"
        return said if self.left_out else ""

    def fill_layouts(self, until_s: float = math.inf) -> Iterator[tuple[dict[str, Any], Rules]]:
        """The plain values of each rules file that fits the model, and its rules: see `space.Space`."""
        layouts = sorted(self._layouts(), key=lambda layout: len(layout["mesh"]))
        self.tables = len(layouts)
        for number, raw in enumerate(layouts):
            if number and time.monotonic() > until_s:
                self.left_out = len(layouts) - number
                return
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

    def interleave_rows(self, raw: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Nothing: a step of decode has no rows that could be computed beside others."""
        return iter(())

    def with_options(self, raw: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Nothing: no option of a compiler is known that makes decoding faster."""
        return iter(())

    def _layouts(self) -> Iterator[dict[str, Any]]:
        model, data_config, devices = self.config.model, self.config.data, self.target.devices
        sizes = {"vocab": model.vocab_rows, "heads": model.head_rows, "mlp": model.mlp}
        for data, context in itertools.product(divisors(devices), divisors(devices)):
            tensor, rest = divmod(devices, data * context)
            if rest or data_config.batch % data:
                continue
            mesh = {name: n for name, n in (("data", data), ("tensor", tensor), ("context", context)) if n > 1}
            over = [name for name in ("tensor", "context") if name in mesh]
            hidden = {axis: over for axis, size in sizes.items() if size % (tensor * context) == 0}
            by_heads = tensor > 1 and model.kv_head_rows % tensor == 0
            if (over and not hidden) or (tensor > 1 and context > 1 and not by_heads):
                continue
            rules = {"batch": "data"} if data > 1 else {}
            rules |= hidden | ({"kv_heads": "tensor"} if by_heads else {})
            heads = "tensor" if by_heads else None
            places: list[dict[str, Any]] = [{}]
            if context > 1:
                rows = [name for name in ("data", "context") if name in mesh]
                by_rows = {f"{name}.batch": rows for name in ("cache", "decode_q", "decode_out")}
                by_rows |= {"decode_q.heads": heads, "decode_out.heads": heads}
                by_slots = {"cache.kv_seq": "context", "decode_q.heads": heads}
                places = [by_rows] * (data_config.batch % (data * context) == 0)
                places += [by_slots] * (data_config.seq % context == 0)
            for place in places:
                yield {"mesh": mesh or {"data": 1}, "rules": rules | place}

    # Estimates

    @functools.lru_cache(maxsize=None)  # noqa: B019  (a space lives as long as its plan)
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
        attention_s = cache_bytes / op_time.hbm_bytes_per_s(chip)
        exposed = self._communication_s(rules, reading.transfers)
        held_bytes = sum(map(bytes_per_device, jax.tree.leaves(built.held)))
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
        network, groups = self._overlap.network(rules)
        seconds = collections.defaultdict[str, float](float)
        for one in transfers:
            devices = groups[one.mesh_axes]
            if one.kind == "collective-permute":
                devices = neighbours(devices)
            size_bytes = one.bytes / sent_bytes(one.kind, 1.0, len(devices[0]))
            seconds[one.mesh_axes] += one.times_per_step * network.time_s(one.kind, size_bytes, devices)
        return dict(seconds)


def _describe(raw: Mapping[str, Any]) -> str:
    """A layout in one line: data 2 x tensor 8, cache by heads."""
    mesh, rows = " x ".join(f"{name} {size}" for name, size in raw["mesh"].items()), raw["rules"]
    places = {"cache.batch": "rows", "cache.kv_seq": "slots", "kv_heads": "heads"}
    split = [place for row, place in places.items() if row in rows]
    return f"{mesh}, cache by {' and '.join(split)}" if split else f"{mesh}, cache in one piece"
