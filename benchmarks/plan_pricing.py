"""How long a plan takes to estimate every layout of a 405B model on 512 chips, and to ask what one of them sends.

`python -m benchmarks.plan pricing` prints it.
"""

import time
from collections.abc import Callable
from typing import Any

from gspmd_lm import config as configs
from gspmd_lm.config import Config
from gspmd_lm.foresight.propagation import read_train
from gspmd_lm.hardware import target as targets
from gspmd_lm.hardware.target import Target
from gspmd_lm.plan.model_transfers import ModelTransfers
from gspmd_lm.plan.space import Space
from gspmd_lm.plan.traces import TraceCache, parts
from gspmd_lm.sharding import rules_file
from gspmd_lm.train.step import build_step

CONFIG, TARGET = "llama3_405b", "v5p:8x8x8"


def pricing() -> dict[str, Any]:
    began = time.monotonic()
    config, target = configs.load(CONFIG, ("data.batch=512", "data.seq=8192")), targets.parse(TARGET)
    traces = TraceCache(config)
    space = Space(config, target, traces)
    count = sum(1 for _, rules in space.fill_layouts() if space.estimator.estimate(rules).step_time_s)
    seconds, cpu_s = time.monotonic() - began, time.process_time()
    asked = sum(len(part.transfers) for layout in space.estimator._layouts.values() for part in layout.parts)
    return {"config": CONFIG, "target": TARGET, "layouts": count, "seconds": round(seconds, 1),
            "cpu_s": round(cpu_s, 1), "transfers_asked": asked, **_reading_ms(config, target, traces)}  # fmt: skip


def _reading_ms(config: Config, target: Target, traces: TraceCache) -> dict[str, float]:
    """CPU milliseconds for what one layout sends: by the rules of `plan`, and read from a trace as in `explain`."""
    raw = {"mesh": {"fsdp": target.devices // 8, "tensor": 8}, "rules": {"batch": "fsdp", "heads": "tensor",
           "kv_heads": "tensor", "mlp": "tensor", "vocab": "tensor"}, "weights": {"embed": "fsdp"}}  # fmt: skip
    rules = rules_file.from_dict(raw, "fsdp_tensor").fill(target.devices)
    (whole,) = parts(rules, traces)
    step = build_step(config, rules, traces.arrays, targets.devices(target))
    took = {}

    def timed(name: str, function: Callable[[], Any], times: int = 10) -> Any:
        result = function()
        began = time.process_time()
        for _ in range(times):
            function()
        took[name] = round(1000 * (time.process_time() - began) / times, 1)
        return result

    timed("transfers_ms", lambda: ModelTransfers(whole, traces.arrays).all)
    traced = timed("trace_ms", step.trace_train, 1)
    timed("reading_ms", lambda: read_train(step, traced))
    return took
