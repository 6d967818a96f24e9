"""Predicted beside measured, on the first accelerator of this machine: a token of many rows, and their prompts.

    python -m benchmarks.device_generation [--config=llama3_8b] [--dtypes bfloat16 int8] [--rows=8] [--slots=2048]
        [--layout='{"compiler_options": {"gpu": {...}}}']

All weights have one value, which decides no time. A token is the mean of 16, prompts are the mean of 2.
"""

import itertools
import json
import time
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import measure
from gspmd_lm import config
from gspmd_lm.hardware import target
from gspmd_lm.infer import programs
from gspmd_lm.program.supported import settled
from gspmd_lm.runtime import startup
from gspmd_lm.sharding import rules_file

RUNS = {"decode": 16, "prefill": 2}
COLUMNS = {"dtype": "weights", "phase": "phase", "predicted_ms": "predicted, ms", "measured_ms": "measured, ms",
           "peak_gb": "memory compiled, GB"}  # fmt: skip


def generation(cfg: config.Config, phase: str, device: Any, more: dict[str, Any]) -> dict[str, Any]:
    """One program, decode or prefill, on one device. `more` is what its rules file has besides the mesh."""
    whole = programs.whole_context(cfg)
    rules = rules_file.from_dict({"mesh": {"data": 1}, **more}, "single").fill(1, "{known}")
    rules = settled(rules, cfg, target.from_devices([device]).processor, programs.attention_pass(whole))
    arrays, problems = programs.arrays_and_warnings(cfg, rules, device.platform, whole)
    built = programs.build_programs(cfg, rules, arrays, [device], whole)
    traced = built.trace_decode() if phase == "decode" else built.trace_prefill()
    compiled, found, _ = measure.explained(built, traced, cfg, rules, arrays, problems, phase)
    inputs = built.abstract_decode_state if phase == "decode" else built.abstract_prompts
    params, given, settings = (jax.tree.map(_ones, tree) for tree in (
        built.abstract_unstacked, inputs, built.abstract_settings))  # fmt: skip
    return {
        "phase": phase,
        "predicted_ms": found.prediction and round(found.prediction.step_time_s * 1e3, 2),
        "measured_ms": round(_seconds(compiled, params, given, settings, phase) * 1e3, 2),
        "peak_gb": round(found.memory.peak_bytes / 1e9, 2),
    }


def _ones(like: Any) -> jax.Array:
    """An array like that, of numbers that are no zeros."""
    value = 0.01 if jnp.issubdtype(like.dtype, jnp.floating) else 1
    made = jax.jit(lambda: jnp.full(like.shape, value, like.dtype), out_shardings=programs.format_or_sharding(like))
    return made()


def _seconds(compiled: Any, params: Any, given: Any, settings: Any, phase: str) -> float:
    """The mean time of a run after the first. Decode takes back the state that it gives."""
    state, _ = jax.block_until_ready(compiled(params, given, settings))
    began = time.perf_counter()
    for _ in range(RUNS[phase]):
        state, _ = compiled(params, state if phase == "decode" else given, settings)
    jax.block_until_ready(state)
    return (time.perf_counter() - began) / RUNS[phase]


def main() -> None:
    parser = measure.flags(__doc__, writes=False)
    parser.add_argument("--config", default="llama3_8b")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "int8"], help="of weights at rest")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--slots", type=int, default=2048)
    parser.add_argument("--layout", type=json.loads, default={}, help="more of a rules file, as JSON")
    arguments = parser.parse_args()
    startup.start(simulated_devices=1)
    device = jax.devices()[0]
    rows = []
    for dtype, phase in itertools.product(arguments.dtypes, RUNS):
        sizes = f"data.batch={arguments.rows}", f"data.seq={arguments.slots}"
        cfg = config.load(arguments.config, [f"model.weight_dtype={dtype}", *sizes])
        rows.append({"dtype": dtype} | generation(cfg, phase, device, arguments.layout))
    print(f"{device.device_kind}, jax {jax.__version__}\n{measure.markdown(rows, COLUMNS)}")


if __name__ == "__main__":
    main()
