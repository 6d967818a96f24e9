"""Memory as a plan estimates it beside the memory of the compiled step, over 60 layouts of the project's own.

    python -m benchmarks.plan_memory [--targets h100:8] [--kinds offload long] [--again]    # compiles what is not kept
    python -m benchmarks.plan_memory show    # the table, with the estimates of today

Fifteen kinds of layouts on four targets: what is computed again, offloading, long rows, experts, latent attention,
products of 8 bits, stages. results/plan_memory.json keeps what the compilers said, at once. A step takes about 15
seconds of CPU to compile for GPUs, and two minutes for TPUs. Nothing runs on an accelerator.
"""

import collections
import datetime
from typing import Any, NamedTuple

import numpy as np

from benchmarks import measure
from benchmarks.layouts import LLAMA_1B
from gspmd_lm import config as configs
from gspmd_lm.errors import RunFailed
from gspmd_lm.foresight import explain
from gspmd_lm.hardware import target as targets
from gspmd_lm.plan.estimate import Estimator
from gspmd_lm.sharding import rules_file
from gspmd_lm.train import choices

TARGETS = ("h100:8", "v5p:2x2x2", "v5e:2x4", "v6e:2x4")
FSDP = {"mesh": {"fsdp": 8}, "rules": {"batch": "fsdp"}, "weights": {"embed": "fsdp"}, "remat": "block"}
TENSOR = {"heads": "tensor", "kv_heads": "tensor", "mlp": "tensor", "vocab": "tensor"}
STAGES = {
    "mesh": {"stage": 2, "fsdp": 4},
    "rules": {"batch": ["stage", "fsdp"]},
    "weights": {"layers": "stage", "embed": "fsdp"},
    "pipeline": {"microbatches": 8},
    "remat": "block",
}
EXPERTS = ("model.experts.count=8", "model.experts.per_token=2", "model.experts.mlp=2048")
LATENT = ("model.head_dim=192", "model.kv_heads=16", "model.attention.latent={kv_rank: 512, v_head_dim: 128}",
          "model.attention.rope.dim=64")  # fmt: skip
LONG = ("data.seq=32768", "data.batch=8", "model.context=32768")


class Kind(NamedTuple):
    """A kind of layout: rules, and what it changes in the config."""

    rules: dict[str, Any]
    sets: tuple[str, ...] = ()


KINDS = {
    "none": Kind({**FSDP, "remat": "none"}),
    "block": Kind(FSDP),
    "save": Kind({**FSDP, "remat": {"save": ["attention_out", "q", "k", "v"]}}),
    "offload": Kind({**FSDP, "remat": {"offload": ["layer_input", "attention_out"]}}),
    "long": Kind(FSDP, LONG),
    "long, ring": Kind(
        {**FSDP, "mesh": {"fsdp": 2, "context": 4}, "context": "ring", "rules": {"batch": "fsdp", "seq": "context"},
         "weights": {"embed": ["fsdp", "context"]}}, LONG,
    ),
    "microbatches": Kind({**FSDP, "microbatches": 4}),
    "tensor": Kind({**FSDP, "mesh": {"fsdp": 2, "tensor": 4}, "rules": {"batch": "fsdp", **TENSOR}}),
    "tensor, split rows": Kind(
        {**FSDP, "mesh": {"fsdp": 2, "tensor": 4}, "rules": {"batch": "fsdp", **TENSOR, "residual.seq": "tensor"}}
    ),
    "experts": Kind(FSDP, EXPERTS),
    "experts, travelling": Kind(
        {**FSDP, "mesh": {"fsdp": 2, "expert": 4}, "rules": {"batch": ["fsdp", "expert"], "expert": "expert"}}, EXPERTS
    ),
    "latent": Kind(FSDP, LATENT),
    "8 bits": Kind(FSDP, ("model.matmul_dtype=int8",)),
    "stages": Kind(STAGES),
    "stages, 1f1b": Kind({**STAGES, "pipeline": {"microbatches": 8, "schedule": "1f1b"}}),
}  # fmt: skip


class Layout(NamedTuple):
    """A kind of layout on a target."""

    target: str
    kind: str

    def load(self) -> tuple[Any, Any, Any]:
        """The config, the target and the filled rules."""
        kind, where = KINDS[self.kind], targets.parse(self.target)
        config = configs.load(
            "llama3_8b", [*LLAMA_1B, "data.batch=32", "data.seq=4096", "model.context=4096", *kind.sets]
        )
        rules = rules_file.from_dict(kind.rules, self.kind).fill(where.devices)
        return config, where, choices.settle_rules(config, rules, where.processor)

    def compile(self) -> dict[str, Any]:
        """What the compiler says of it."""
        config, where, rules = self.load()
        row: dict[str, Any] = {**self._asdict(), "date": datetime.date.today().isoformat()}
        try:
            (report,) = explain.reports(config, [rules], where, print)
        except RunFailed as error:
            return row | {"failure": str(error).splitlines()[-1][:200]}
        return row | {"peak_bytes": report.memory.peak_bytes, "fits": report.memory.fits}

    def estimate(self) -> tuple[float, dict[str, float]]:
        """The estimated peak, and its parts in bytes."""
        config, where, rules = self.load()
        estimator = Estimator(config, where)
        return estimator.estimate(rules).peak_bytes, estimator.memory_parts(rules)


def show() -> None:
    """The kept layouts beside their estimates of today."""
    errors, rows = collections.defaultdict(list), []
    for row in measure.read("plan_memory"):
        if "peak_bytes" in row:
            estimate, parts = Layout(row["target"], row["kind"]).estimate()
            error = estimate / row["peak_bytes"] - 1
            errors[row["target"]].append(error)
            in_gb = {name: f"{size_bytes / 1e9:.2f}" for name, size_bytes in parts.items()}
            rows.append({"target": row["target"], "kind": row["kind"], "compiled": f"{row['peak_bytes'] / 1e9:.2f}",
                         "estimated": f"{estimate / 1e9:.2f}", "error": f"{error:+.1%}", **in_gb})  # fmt: skip
    print(measure.markdown(rows, {name: name for name in rows[0]}))
    for target, found in errors.items():
        print(f"{target}: {len(found)} layouts, mean error {np.abs(found).mean():.1%}, from {min(found):+.1%} to "
              f"{max(found):+.1%}")  # fmt: skip


def main() -> None:
    parser = measure.flags(__doc__, writes=False)
    parser.add_argument("what", nargs="?", choices=("make", "show"), default="make")
    parser.add_argument("--targets", nargs="*", default=TARGETS)
    parser.add_argument("--kinds", nargs="*", default=[*KINDS], choices=[*KINDS])
    parser.add_argument("--again", action="store_true", help="also what is kept")
    options = parser.parse_args()
    kept = measure.kept("plan_memory")
    for target in options.targets if options.what == "make" else ():
        for kind in options.kinds:
            others = [row for row in kept if (row["target"], row["kind"]) != (target, kind)]
            if options.again or len(others) == len(kept):
                kept = [*others, Layout(target, kind).compile()]
                measure.write("plan_memory", kept)
    show()


if __name__ == "__main__":
    main()
