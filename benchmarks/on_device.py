"""Predicted beside measured, on the first accelerator of this machine: step time and memory of several models.

    python -m benchmarks.on_device [--write] [--layout='{"compiler_options": {"gpu": {...}}}']
    python -m benchmarks.on_device --kernels

Each case runs in a process of its own, since peaks of memory are a process's. The predictions are those of `explain`
for the very program that then runs. On a CPU no time is predicted and no memory measured (`--cases gpt2_124m --rows 1`
keeps that short). A case that is predicted not to fit is not run. On a GPU, the profiler's times of matmuls, attention
and the rest stand beside the predicted ones, with the clock and power of the card.

With `--kernels`, results and gradients of the fused attention kernel are compared with those of XLA's attention, for
all that the kernel can do. Both are compared with float32. The exit status is 1 if the kernel is more than three times
as far from it as XLA.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import layouts, measure, op_times
from gspmd_lm import config
from gspmd_lm.config import Config, from_values
from gspmd_lm.foresight import hlo, known_errors
from gspmd_lm.foresight.report import Report
from gspmd_lm.hardware import target
from gspmd_lm.model.kernels import attention, common
from gspmd_lm.model.kernels.blocks import Blocks
from gspmd_lm.runtime import startup
from gspmd_lm.sharding import rules_file
from gspmd_lm.sharding.rules import KERNELS, Rules
from gspmd_lm.train import state, step


class Case(NamedTuple):
    """What is computed: a config and what it changes there, rows per batch, and what is kept for the backward pass."""

    config: str
    sets: tuple[str, ...] = ()
    rows: tuple[int, ...] = (2,)
    remats: tuple[Any, ...] = ("block",)

    def load(self, rows: int) -> Config:
        """The config with so many rows in a batch."""
        return config.load(self.config, [*self.sets, f"data.batch={rows}"])


_FOUR_LAYERS = ("model.layers=4",)
DEEPSEEK = ("model.layers=2", "model.experts.dense_layers=1", "model.experts.count=16", "model.experts.groups=4",
            "model.experts.groups_per_token=2", "model.vocab=32768")  # fmt: skip
LINEAR = ("model.layer_pattern=[linear, linear, linear, full]",
          "model.attention.linear={key_heads: 16, value_heads: 32, head_dim: 128}")  # fmt: skip
MIXTRAL = ("model.layers=2", "data.seq=4096", "model.context=4096")
WINDOWS = ("model.layer_pattern=[sliding, full]", "model.attention.window=1024", "model.attention.sinks=true")


def _model(name: str) -> str:
    """The path of a config of benchmarks/models/."""
    return str(measure.ROOT / "benchmarks" / "models" / f"{name}.yaml")


CASES = {
    "gpt2_124m": Case("gpt2_124m", rows=(8, 16, 32), remats=("none", "block")),
    "llama_1b": Case("llama3_8b", layouts.LLAMA_1B, (4, 8, 16), ("none", "block")),
    "llama_8b, 4 layers": Case("llama3_8b", _FOUR_LAYERS),
    "the same in fp8": Case("llama3_8b", (*_FOUR_LAYERS, "model.matmul_dtype=fp8")),
    "the same, inputs on the host": Case("llama3_8b", _FOUR_LAYERS, remats=({"offload": ["residual"]},)),
    "llama_8b, 2 layers, 32k": Case("llama3_8b", ("model.layers=2", "data.seq=32768", "model.context=32768"), (1,)),
    "mixtral_8x7b, 2 layers": Case("mixtral_8x7b", MIXTRAL, (4,)),
    "qwen3_235b_a22b, 1 layer": Case(
        "qwen3_235b_a22b", ("model.layers=1", "data.seq=4096", "model.context=4096"), (4,)
    ),
    "deepseek_v3, 16 experts, 2 layers": Case("deepseek_v3", DEEPSEEK),
    "llama_8b, 3 of 4 layers linear": Case("llama3_8b", (*_FOUR_LAYERS, *LINEAR)),
    "llama_8b, 4 layers, windows and sinks": Case("llama3_8b", (*_FOUR_LAYERS, *WINDOWS)),
    "vit_22b, 2 layers": Case("vit_22b", ("model.layers=2", "model.classes.count=1000"), (64,)),
    "t5_11b, 2 + 2 layers": Case("t5_11b", ("model.layers=2",), (16,)),
    "bert_large": Case(_model("bert_large"), rows=(64,)),
    "deberta_v3_large": Case(_model("deberta_v3_large"), rows=(16,)),
    "gpt_oss_20b, 2 layers": Case(_model("gpt_oss_20b"), ("model.layers=2",)),
    "whisper_large_v3": Case(_model("whisper_large_v3"), rows=(16,)),
    "swin_large": Case(_model("swin_large"), rows=(16,)),
    "sam_huge": Case(_model("sam_huge")),
    "mixtral_8x7b, 2 layers, in fp8": Case("mixtral_8x7b", (*MIXTRAL, "model.matmul_dtype=fp8"), (4,)),
    "mixtral_8x7b, 2 layers, in int8": Case("mixtral_8x7b", (*MIXTRAL, "model.matmul_dtype=int8"), (4,)),
    "llama_8b, 4 layers, in int8": Case("llama3_8b", (*_FOUR_LAYERS, "model.matmul_dtype=int8")),
}
STEPS = 10
KINDS = ("matmul", "attention", "other", "host copy")
COLUMNS = {"device": "on", "case": "model", "rows": "rows", "remat": "remat", "predicted_ms": "predicted, ms",
           "measured_ms": "measured, ms", "error": "error", **{kind: f"{kind}, ms" for kind in KINDS},
           "mhz": "MHz", "watts": "W", "compiled_gb": "memory compiled, GB", "measured_gb": "measured, GB",
           "memory_error": "error of memory"}  # fmt: skip


ATTENTION: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"attention.window": 300},
    "sinks": {"attention.sinks": True},
    "sinks and a window": {"attention.sinks": True, "attention.window": 300},
    "heads of 64": {"head_dim": 64},
    "heads of 256": {"head_dim": 256},
    "heads of 256 with a window": {"head_dim": 256, "attention.window": 300},
    "soft-cap": {"attention.softcap": 30.0},
    "full mask": {"attention.mask": "full"},
}
PARTS = ("result", "dq", "dk", "dv", "dsinks")
KERNEL_COLUMNS = {"case": "attention", "packed": "documents", "kernel": "kernel", "worst": "worst part",
                  "error": "error", "xla_error": "error of XLA", "right": "right"}  # fmt: skip


def kernel_cases(
    kernel: str, capability: tuple[int, ...], T: int = 2048, only: str | None = None
) -> list[dict[str, Any]]:
    """How far a kernel and XLA are from float32, in all that the kernel can do, or in `only` one case of ATTENTION.

    Attention runs on one device.
    """
    sizes: dict[str, Any] = {
        "layers": 1,
        "embed": 8,
        "heads": 8,
        "kv_heads": 2,
        "head_dim": 128,
        "mlp": 8,
        "vocab": 8,
        "context": T,
    }
    found = []
    for name, changes in ATTENTION.items():
        if only not in (None, name):
            continue
        cfg = from_values(config.ModelConfig, sizes | changes)
        for packed in (False, True):
            if not common.unsupported_setting(kernel, cfg, seq=T, segments=packed, capability=capability):
                segments = _documents(T) if packed else None
                fused = functools.partial(attention.fused, segments_BT=segments, kernel=kernel, cfg=cfg)
                found.append({"case": name, "packed": packed} | _compared(kernel, fused, cfg, segments, T))
        if name == "plain" and found[-1]["packed"]:
            found.append({"case": "keys of another stack", "packed": True} | _memory(kernel, cfg, T))
            if kernel == "cudnn":
                found.append({"case": "keys before queries", "packed": True} | _ring(cfg, T))
    return found


def _documents(T: int) -> jax.Array:
    """Segments of two rows: one of documents of a few tokens, and one of long ones with padding at its end."""
    short = np.cumsum(np.random.default_rng(0).random(T) < 0.05) + 1
    long = np.repeat([1, 2, 3, 0], [T // 3, 1, T - T // 3 - T // 8 - 1, T // 8])
    return jnp.asarray([short, long], jnp.int32)


def _compared(kernel: str, fused: Any, cfg: config.ModelConfig, segments: Any, T: int) -> dict[str, Any]:
    def xla(q: Any, k: Any, v: Any, sinks: Any) -> Any:
        return attention.attend(q, k, v, segments, cfg, own_RN=sinks)

    return _judged_by_float32(kernel, fused, xla, cfg, T)


def _judged_by_float32(kernel: str, fused: Any, xla: Any, cfg: config.ModelConfig, T: int) -> dict[str, Any]:
    exact, rounded = _inputs(cfg, T), _inputs(cfg, T, jnp.bfloat16)
    with jax.default_matmul_precision("highest"):
        want = _results(xla, exact)
    return {"kernel": kernel} | _judged(_results(fused, rounded), _results(xla, rounded), want)


def _memory(kernel: str, cfg: config.ModelConfig, T: int) -> dict[str, Any]:
    """What a decoder reads of an encoder: segments in another order, of other lengths, of which some are missing."""
    of_memory, queries = dataclasses.replace(cfg, memory_width=cfg.embed).memory_config, _documents(T)
    keys = queries[:, : T // 4 - 1 : -1]

    def fused(q: Any, k: Any, v: Any, sinks: Any) -> Any:
        k, v = (x[:, : keys.shape[1]] for x in (k, v))
        return attention.fused(q, k, v, sinks, queries, keys, kernel=kernel, cfg=of_memory)

    def xla(q: Any, k: Any, v: Any, sinks: Any) -> Any:
        of_q, of_k = (attention.TokenPlaces(jnp.arange(of.shape[1])[None], of, None) for of in (queries, keys))
        k, v = (x[:, : keys.shape[1]] for x in (k, v))
        return attention.attend_masked(q, k, v, of_q, of_k, attention.head_numbers(of_memory, sinks), of_memory)

    return _judged_by_float32(kernel, fused, xla, cfg, T)


def _ring(cfg: config.ModelConfig, T: int) -> dict[str, Any]:
    """What a ring computes: the late half of a row sees the early one."""
    segments = _documents(2 * T)
    ids = segments[:, T:], segments[:, :T]

    def passes(kernel: str, inputs: Any) -> Any:
        q, k, v, _ = inputs
        blocks, dout = Blocks(kernel, cfg), jnp.cos(jnp.arange(q.size, dtype=q.dtype)).reshape(q.shape)
        out, lse = blocks.forward(q, k, v, ids, causal=False)
        total = jnp.logaddexp(lse, 0.0)  # with that of other keys: some queries see none of these
        out, lse = out * jnp.exp(lse - total)[..., None], total
        return out, *blocks.backward(q, k, v, ids, out, lse, dout, causal=False)

    exact, rounded = _inputs(cfg, T), _inputs(cfg, T, jnp.bfloat16)
    with jax.default_matmul_precision("highest"):
        want = jax.jit(functools.partial(passes, "xla"))(exact)
    found, xla = (jax.jit(functools.partial(passes, kernel))(rounded) for kernel in ("cudnn", "xla"))
    return {"kernel": "cudnn"} | _judged(found, xla, want)


def _inputs(cfg: config.ModelConfig, T: int, dtype: Any = jnp.float32) -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = [(2, T, heads, cfg.head_dim) for heads in (cfg.heads, cfg.kv_heads, cfg.kv_heads)] + [(1, cfg.heads)]
    made = (jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True))
    return [x.astype(jnp.bfloat16).astype(dtype) for x in made]


def _results(function: Any, inputs: Any) -> Any:
    @jax.jit
    def both(*inputs: Any) -> Any:
        out, pull = jax.vjp(function, *inputs)
        return out, *pull(jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape).astype(out.dtype))

    return both(*inputs)


def _judged(ours: Any, xla: Any, want: Any) -> dict[str, Any]:
    """The part in which a kernel is worst beside XLA, and whether it is right there."""
    scales = [float(jnp.abs(x).max()) or 1.0 for x in want]

    def errors(results: Any) -> list[float]:
        return [
            float(jnp.abs(x.astype(jnp.float32) - y).max()) / scale
            for x, y, scale in zip(results, want, scales, strict=True)
        ]

    pairs = list(zip(errors(ours), errors(xla), PARTS, strict=False))
    error, least, part = max(pairs, key=lambda pair: pair[0] / (pair[1] + 1e-3) if np.isfinite(pair[0]) else np.inf)
    return {"worst": part, "error": f"{error:.1e}", "xla_error": f"{least:.1e}", "right": error <= 3 * least + 1e-3}


def one(case: str, rows: int, remat: Any, more: dict[str, Any]) -> dict[str, Any]:
    """One model at one batch size, on the first device of this process. `more` is what its rules file has besides."""
    layout = rules_file.from_dict({"mesh": {"data": 1}, "remat": remat, **more}, "single")
    startup.start(simulated_devices=1)  # as a run starts: on a GPU it takes the share of memory that is compared with
    remat_text = remat if isinstance(remat, str) else json.dumps(remat)
    return {"case": case, "rows": rows, "remat": remat_text} | run(CASES[case].load(rows), layout, jax.devices()[0])


def run(cfg: config.Config, layout: Rules, device: Any, steps: int = STEPS) -> dict[str, Any]:
    """The predicted step of a config under a layout, and the measured one if it is predicted to fit."""
    arrays, problems = state.arrays_and_warnings(cfg, layout, device.platform)
    built = step.build_step(cfg, layout, arrays, [device])
    compiled, found, text = measure.explained(built, built.trace_train(), cfg, built.rules, arrays, problems)
    predicted, here = found.prediction, target.from_devices([device])
    predicted_ms = predicted and predicted.step_time_s * 1e3
    row = {
        "device": device.device_kind,
        "kind": str(known_errors.kind_of(here, built.rules, cfg.model.num_experts)) if here.chip else "",
        "predicted_ms": predicted_ms and round(predicted_ms, 2),
        "compiled_gb": round(found.memory.peak_bytes / 1e9, 2),
        "limit_gb": found.memory.limit_bytes and round(found.memory.limit_bytes / 1e9, 2),
        "versions": dict(found.versions),
        **dict.fromkeys(("measured_ms", "error", *KINDS, "mhz", "watts", "measured_gb", "memory_error"), ""),
    }
    if not found.memory.fits:
        return row
    return row | _measured(measure.Ours(built, compiled, 0.0), device, found, predicted, text, steps)


def _measured(ready: measure.Ours, device: Any, found: Report, predicted: Any, text: str, steps: int) -> dict[str, Any]:
    """What the device did, beside what was predicted."""
    batch = ready.place(measure.random_batch(ready.step, jax.random.key(0)))
    now, _ = jax.block_until_ready(ready.train(ready.start(), batch))

    def run() -> Any:
        nonlocal now
        now, metrics = ready.train(now, batch)
        return metrics["loss"]

    with op_times.watched() as seen:
        began = time.perf_counter()
        jax.block_until_ready([run() for _ in range(steps)])
        measured_ms = (time.perf_counter() - began) / steps * 1e3
    used = (device.memory_stats() or {}).get("peak_bytes_in_use")
    row = {
        **seen,
        "measured_ms": round(measured_ms, 2),
        "error": predicted and f"{predicted.step_time_s * 1e3 / measured_ms - 1:+.1%}",
        "measured_gb": used and round(used / 1e9, 2),
        "memory_error": used and f"{found.memory.peak_bytes / used - 1:+.1%}",
    }
    if device.platform != "gpu" or not predicted:
        return row
    kernels = op_times.traced(run)
    taken_ms = op_times.by_kind(kernels)
    row["grouped_ms"] = taken_ms.pop("grouped", 0.0)
    taken_ms["matmul"] = round(taken_ms.get("matmul", 0.0) + row["grouped_ms"], 2)
    parts_s = predicted.matmul_s, predicted.attention_s, predicted.other_s, predicted.exposed_host_copy_s
    shown = {
        kind: f"{1e3 * seconds:.1f} : {taken_ms.get(kind, 0.0):.1f}"
        for kind, seconds in zip(KINDS, parts_s, strict=True)
    }
    try:
        return row | shown | {"matmuls": op_times.matmuls(hlo.parse(text), kernels)}
    except ValueError as error:  # cuBLAS may compute one matmul in two kernels, as it does for DeepSeek's
        print(f"the times of single matmuls are left out: {error}", file=sys.stderr)
        return row | shown


def _kernels() -> int:
    device = jax.devices()[0]
    capability = (
        tuple(map(int, getattr(device, "compute_capability", "").split("."))) if device.platform == "gpu" else ()
    )
    kernels = [kernel for kernel in KERNELS[device.platform] if kernel != "xla"]
    with ThreadPoolExecutor() as pool:  # what takes long is compiling
        jobs = [pool.submit(kernel_cases, kernel, capability, only=name) for kernel in kernels for name in ATTENTION]
        found = [row for job in jobs for row in job.result()]
    print(f"{device.device_kind}, jax {jax.__version__}" if found else f"{device.device_kind}: XLA's attention alone")
    print(measure.markdown(found, KERNEL_COLUMNS) if found else "")
    return int(not all(row["right"] for row in found))


def main() -> None:
    parser = measure.flags(__doc__)
    parser.add_argument("--cases", nargs="*", choices=tuple(CASES), default=tuple(CASES))
    parser.add_argument("--rows", type=int, nargs="*", help="per batch; default: those of each case")
    parser.add_argument("--kernels", action="store_true", help="compare the fused attention kernel with XLA's")
    parser.add_argument("--layout", type=json.loads, default={}, help="more of a rules file, as JSON")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        case, rows, remat = arguments.one
        print(json.dumps(one(case, int(rows), json.loads(remat), arguments.layout)))
        return
    if arguments.kernels:
        sys.exit(_kernels())
    found = []
    for case in arguments.cases:
        for rows, remat in itertools.product(arguments.rows or CASES[case].rows, CASES[case].remats):
            command = [sys.executable, "-m", "benchmarks.on_device", "--one", case, str(rows), json.dumps(remat)]
            command += ["--layout", json.dumps(arguments.layout)]
            answer = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            found.append(json.loads(answer.splitlines()[-1]))
            print({key: value for key, value in found[-1].items() if key != "matmuls"}, flush=True)
            if arguments.write:
                measure.keep("on_device", found, "device", "case", "rows", "remat")
    print(found[0]["device"])
    print(measure.markdown(found, COLUMNS))


if __name__ == "__main__":
    main()
