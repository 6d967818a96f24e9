"""Predicted steps of decode beside their memory bound, of layouts that differ in where the cache lies.

    python -m benchmarks.decoding [--only=540b] [--write]

Prints the table of benchmarks/layouts.md. The memory bound is the time in which a device reads its weights and its
cache once, at the data sheet's bandwidth. The 540B model is that of arXiv 2204.02311, in which 64 heads are padding of
48, and a published step of it (arXiv 2211.05102) took 29 ms. Nothing was fitted to that step.
"""

from typing import Any

from benchmarks import measure
from gspmd_lm import config as configs
from gspmd_lm.foresight import explain
from gspmd_lm.hardware import target as targets
from gspmd_lm.sharding import rules_file
from gspmd_lm.units import human_bytes, human_seconds

PALM = {
    "layers": 118, "embed": 18432, "heads": 48, "padded_heads": 64, "kv_heads": 1, "head_dim": 256, "mlp": 73728,
    "vocab": 256000, "context": 2048, "block": "parallel", "weight_dtype": "int8",
}  # fmt: skip
LLAMA_70B = {
    "layers": 80, "embed": 8192, "heads": 64, "kv_heads": 8, "head_dim": 128, "mlp": 28672, "vocab": 128256,
    "context": 8192, "weight_dtype": "int8",
}  # fmt: skip
LLAMA_8B = {
    "layers": 32, "embed": 4096, "heads": 32, "kv_heads": 8, "head_dim": 128, "mlp": 14336, "vocab": 128256,
    "context": 8192,
}  # fmt: skip


def by_rows(axes: str | list[str], heads: str | None = None) -> dict[str, Any]:
    """Rows of a rules file that give each device some rows of the cache, and moves queries to them and results back."""
    rows: dict[str, Any] = dict.fromkeys(("cache.batch", "decode_q.batch", "decode_out.batch"), axes)
    return rows | dict.fromkeys(("decode_q.heads", "decode_out.heads"), heads)


WEIGHTS = dict.fromkeys(("vocab", "heads", "mlp"), "tensor")
# Weights in two dimensions, as the publication has them: the features of x are over context, the others over tensor.
SQUARES = WEIGHTS | {"vocab": ["tensor", "context"], "embed": "context"}
SQUARES |= {"embedding.embed": None, "unembedding.embed": None} | by_rows(["tensor", "context"])
BOTH = {name: ["tensor", "context"] for name in ("vocab", "heads", "mlp")} | {"kv_heads": "tensor"}
BOTH |= by_rows("context", heads="tensor")
BY_HEADS: dict[str, Any] = WEIGHTS | {"kv_heads": "tensor"}
# model, its sizes, target, rows of a batch, mesh, rows of the rules file, where the cache lies, milliseconds published
CASES = [
    ("540B, int8", PALM, "v4:4x4x4", 64, {"tensor": 64}, WEIGHTS, "in one piece", None),
    ("540B, int8", PALM, "v4:4x4x4", 64, {"tensor": 64}, WEIGHTS | by_rows("tensor"), "by rows", 29.0),
    ("540B, int8", PALM, "v4:4x4x4", 64, {"tensor": 16, "context": 4}, SQUARES, "by rows", 29.0),
    ("70B, int8", LLAMA_70B, "v5e:4x4", 8, {"data": 2, "tensor": 8}, BY_HEADS | {"batch": "data"}, "by heads", None),
    ("70B, int8", LLAMA_70B, "v5e:4x4", 8, {"tensor": 8, "context": 2}, BOTH, "by heads and rows", None),
    ("8B, bfloat16", LLAMA_8B, "v5e:2x4", 8, {"tensor": 8}, BY_HEADS, "by heads", None),
    ("8B, int8", LLAMA_8B | {"weight_dtype": "int8"}, "v5e:2x4", 8, {"tensor": 8}, BY_HEADS, "by heads", None),
]
SLOTS = 2048


def explained(sizes: dict[str, Any], target: str, batch: int, mesh: dict[str, int], rows: dict[str, Any]) -> Any:
    """The report of a step of decode."""
    plain = {"name": "benchmark", "model": sizes, "data": {"batch": batch, "seq": SLOTS}, "train": {"steps": 1}}
    layout = rules_file.from_dict({"mesh": mesh, "rules": rows}, "benchmark.yaml")
    config = configs.from_dict(plain, "benchmark")
    return explain.reports(config, [layout], targets.parse(target), print, phase="decode")[0]


def main() -> None:
    parser = measure.flags(__doc__)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    found = []
    print("| model | target, mesh | cache | step | memory bound | its share | matmuls | sent by a device | published |")
    print("|---|---|---|---:|---:|---:|---:|---:|---:|")
    for name, sizes, target, batch, mesh, rows, where, published_ms in CASES:
        if options.only.lower() not in name.lower():
            continue
        report = explained(sizes, target, batch, mesh, rows)
        step_s, bound_s = report.prediction.step_time_s, report.floor.memory_s
        axes = " x ".join(f"{axis} {size}" for axis, size in mesh.items())
        published = f"{published_ms:.0f} ms ({1e3 * step_s / published_ms - 1:+.0%})" if published_ms else ""
        cells = name, f"`{target}`, {axes}", where, human_seconds(step_s), human_seconds(bound_s)
        matmuls, sent = human_seconds(report.prediction.matmul_s), human_bytes(report.sent_bytes)
        more = f"{report.memory_bound_share:.0%}", matmuls, sent
        print(f"| {' | '.join((*cells, *more, published))} |", flush=True)
        found.append({"model": name, "target": target, "mesh": axes, "cache": where, "batch": batch, "slots": SLOTS,
                      "step_ms": round(1e3 * step_s, 3), "memory_bound_ms": round(1e3 * bound_s, 3),
                      "matmul_ms": round(1e3 * report.prediction.matmul_s, 3), "sent_bytes": report.sent_bytes,
                      "published_ms": published_ms})  # fmt: skip
    if options.write:
        measure.keep("decoding", found, "model", "target", "mesh", "cache")


if __name__ == "__main__":
    main()
