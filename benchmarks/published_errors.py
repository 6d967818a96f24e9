"""How far predictions are from published step times, and what was fitted to which of them.

A figure that something was fitted to tells little of the next prediction. So every constant of the prices is listed
with the published rows that were in view when its value, or the rule that uses it, was chosen; the errors of the other
rows stand apart. Rows have the numbers of their places in published/step_times.yaml.
"""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.step_times import Row
from gspmd_lm.foresight.cost import prices
from gspmd_lm.foresight.machine import network
from gspmd_lm.foresight.machine.hardware import CHIPS
from gspmd_lm.train import state
from gspmd_lm.train.metrics import flops_per_token

ONE_CONSTANT = 0.55  # of peak: the baseline that any prediction must be seen beside
TIMES = {"number": "row", "row": "published", "published_s": "published s", "predicted_s": "predicted s",
         "error": "error", "baseline_error": "FLOPs / 55% of peak", "exposed": "exposed", "fits": "fits",
         "compile_s": "compiled in s", "date": "on"}  # fmt: skip
FITTED_TIMES = TIMES | {"fitted": "in view for"}
ERRORS = {"chip": "chip", "rows": "rows that nothing was fitted to", "mean": "their mean error", "largest": "largest",
          "baseline": "FLOPs / 55% of peak, mean", "fitted_rows": "other rows",
          "fitted_mean": "their mean error"}  # fmt: skip
CONSTANTS = {"constant": "constant", "value": "value", "source": "from", "value_rows": "rows in view for its value",
             "form_rows": "for its form"}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Constant:
    """A figure of the prices that is no published fact of a chip. `value_rows` and `form_rows` were in view."""

    name: str
    value: str
    source: str
    value_rows: tuple[int, ...] = ()
    form_rows: tuple[int, ...] = ()


FITTED = (
    Constant("HBM share, TPU", f"{prices.HBM_SHARE['tpu']:g}", "fitted, with programs of another trainer",
             (0, 2, 4), (0, 2, 4)),
    Constant("host link, v6e", f"{CHIPS['v6e'].host_link_bytes_per_s / 1e9:g} GB/s",
             "fitted, likewise (scaling book: 32); tpu7x takes it too", (0, 2)),
    Constant("slowdown, v6e", f"{CHIPS['v6e'].matmul_slowdown:g}", "fitted", (0,), (0, 1, 2, 3)),
    Constant("share of peak, TPU", f"{prices.MATMUL_SHARE['tpu']:g}", "what the compiler estimates for large matmuls",
             (), (0, 1, 2, 3)),
    Constant("share of peak, GPU", f"{prices.MATMUL_SHARE['gpu']:g}", "matmuls on one H200"),
    Constant("HBM share, GPU", f"{prices.HBM_SHARE['gpu']:g}", "a copy on one H200"),
    Constant("time between kernels, GPU", f"{prices.LAUNCH_S['gpu'] * 1e6:g} us", "a guess"),
    Constant("on-chip memory over HBM, TPU", f"{prices.ON_CHIP_SPEED}", "scaling book"),
    Constant("cuDNN attention, of peak", "a table by length", "arXiv 2407.08608"),
    Constant("splash attention", "cycles", "libtpu's schedules"),
    Constant("FLOPs per cycle, v6e and tpu7x", f"{CHIPS['v6e'].peak_bf16_flops_per_s / CHIPS['v6e'].clock_hz:,.0f}",
             "the compiler's cycles of matmuls"),
    Constant("NVLink share", f"{network.NVLINK_SHARE:g}", "scaling book"),
    Constant("protocols of NCCL", "a table", "NCCL's tuning.cc"),
    Constant("hop over ICI", f"{network.ICI_HOP_S * 1e6:g} us", "scaling book"),
)  # fmt: skip


def constants() -> list[dict[str, str]]:
    """The rows of the table of constants."""
    return [
        {
            "constant": one.name,
            "value": one.value,
            "source": one.source,
            "value_rows": ", ".join(map(str, one.value_rows)) or "none",
            "form_rows": ", ".join(map(str, one.form_rows)) or "none",
        }
        for one in FITTED
    ]


def compared(number: int, row: Row, kept: Mapping[str, Any]) -> dict[str, Any]:
    """What is predicted for a published row, as `kept` says, beside what was published."""
    config, chip = row.config(), CHIPS[row.chip]
    per_token = flops_per_token(config.model, state.arrays(config).parameter_count, row.seq)
    flops = per_token * row.per_device_batch * row.seq
    baseline_s = flops / (ONE_CONSTANT * chip.peak_bf16_flops_per_s)
    predicted_s = kept["predicted_s"]
    found = {
        "number": number,
        "row": row.name,
        "source": row.source,
        "published_s": row.step_time_s,
        "predicted_s": predicted_s,
        "error": predicted_s and f"{predicted_s / row.step_time_s - 1:+.1%}",
        "fitted": "; ".join(one.name for one in FITTED if number in (*one.value_rows, *one.form_rows)),
        "baseline_error": f"{baseline_s / row.step_time_s - 1:+.1%}",
    }
    return found | {name: value for name, value in kept.items() if name not in found}


def errors(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Mean absolute errors per chip, of all TPUs and of all: of rows that nothing was fitted to, and of the others."""
    chips = [row["row"].rpartition(" on ")[2].partition(":")[0] for row in rows]
    groups = {chip: (chip,) for chip in chips}
    groups |= {"all TPUs": tuple(chip for chip in groups if CHIPS[chip].platform == "tpu"), "all": tuple(groups)}
    found = []
    for name, members in groups.items():
        told = [row for row, chip in zip(rows, chips, strict=True) if chip in members and row["error"]]
        apart = [row for row in told if not row["fitted"]]
        missed, baseline = ([abs(float(row[key].rstrip("%"))) for row in apart] for key in ("error", "baseline_error"))
        fitted = [abs(float(row["error"].rstrip("%"))) for row in told if row["fitted"]]
        found.append(
            {
                "chip": name,
                "rows": len(apart),
                "mean": _mean(missed),
                "largest": _mean(sorted(missed)[-1:]),
                "baseline": _mean(baseline),
                "fitted_rows": len(fitted),
                "fitted_mean": _mean(fitted),
            }
        )
    return found


def _mean(values: Sequence[float]) -> str:
    return f"{statistics.mean(values):.1f}%" if values else "-"


def doubts(rows: Sequence[Row]) -> str:
    """What is not known of the runs, or done otherwise here, as a list in Markdown."""
    found = []
    for row in rows:
        found += [f"- {row.name}, {what}: {'; '.join(said)}." for what, said in
                  (("assumed", row.doubtful), ("otherwise here", row.differs)) if said]  # fmt: skip
    return "\n".join(found)
