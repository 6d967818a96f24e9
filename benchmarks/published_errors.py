"""How far predictions are from published step times, and what was fitted to which of them.

A figure that something was fitted to tells little of the next prediction. So every constant of the prices is listed
with the published rows that were known when its value, or the rule that uses it, was chosen; the errors of the other
rows stand apart. Rows have the numbers of their places in published/step_times.yaml. Programs of other frameworks than
JAX are other programs: they are shown apart too, nothing was fitted to them, and no error is told from them.
"""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import step_times
from benchmarks.step_times import JAX_FRAMEWORKS, Row
from gspmd_lm.foresight.known_errors import Kind, is_several, kind_of
from gspmd_lm.foresight.timing import gathers, gpu_fusions, op_time
from gspmd_lm.hardware import network, target
from gspmd_lm.hardware.chips import CHIPS
from gspmd_lm.sharding.shapes import pairs
from gspmd_lm.train import state

ONE_CONSTANT = 0.55  # of peak: the baseline that any prediction must be seen beside
TIMES = {"number": "row", "row": "published run", "published_s": "published s", "predicted_s": "predicted s",
         "error": "error", "baseline_error": "FLOPs / 55% of peak", "exposed": "exposed", "fits": "fits",
         "compile_s": "compiled in s", "date": "on"}  # fmt: skip
FITTED_TIMES = TIMES | {"fitted": "fitted for"}
OTHER_TIMES = {"number": "row", "row": "published run", "framework": "framework", "published_s": "published s",
               "predicted_s": "predicted s", "error": "error", "exposed": "exposed", "date": "on"}  # fmt: skip
ERRORS = {"chip": "rows on", "rows": "rows", "mean": "mean error", "largest": "largest",
          "baseline": "FLOPs / 55% of peak, mean", "apart": "rows held out", "apart_mean": "their mean error",
          "seen": "rows fitted", "seen_mean": "their mean error "}  # fmt: skip
ORDERS = {"what": "what", "rows": "rows", "published": "published", "predicted": "predicted",
          "as_published": "in the published direction"}  # fmt: skip
REFITTED = {"rows": "fitted to rows", "slowdown": "slowdown, Hopper", "errors": "errors of rows 8 to 12"}
CONSTANTS = {"constant": "constant", "value": "value", "source": "from", "value_rows": "rows fitted for its value",
             "form_rows": "for its form"}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Constant:
    """A constant that is no published fact of a chip. It was fitted to `value_rows` and `form_rows`."""

    name: str
    value: str
    source: str
    value_rows: tuple[int, ...] = ()
    form_rows: tuple[int, ...] = ()


HOPPER = (9, 11)  # what the slowdown of H100 and H200 was fitted to
_GPUS = (8, 9, 10, 11, 12, 13, 14)
FITTED = (
    Constant("HBM share, TPU", f"{op_time.HBM_SHARE['tpu']:g}", "fitted, with programs of another trainer",
             (0, 2, 4), (0, 2, 4)),
    Constant("host link, v6e", f"{CHIPS['v6e'].host_link_bytes_per_s / 1e9:g} GB/s",
             "fitted, likewise (scaling book: 32); tpu7x takes it too", (0, 2)),
    Constant("slowdown, v6e, of programs that offload", f"{CHIPS['v6e'].offloading_slowdown:g}", "fitted", (0,),
             (0, 1, 2, 3, 15)),
    Constant("slowdown, v5p", f"{CHIPS['v5p'].matmul_slowdown:g}", "fitted", (4,), (4, 5, 26, 27)),
    Constant("slowdown, tpu7x", f"{CHIPS['tpu7x'].matmul_slowdown:g}", "fitted", (7,), (7,)),
    Constant("slowdown, Hopper", f"{CHIPS['h100'].matmul_slowdown:g}",
             "fitted: several H100 or H200 beside one alone, under a power limit", HOPPER, _GPUS),
    Constant("share of peak, TPU", f"{op_time.MATMUL_SHARE['tpu']:g}", "what the compiler estimates for large matmuls",
             (), (0, 1, 2, 3)),
    Constant("share of peak, GPU", f"{op_time.MATMUL_SHARE['gpu']:g}",
             "measured: matmuls of train steps on one H100 or H200"),
    Constant("tiles, GPU", f"{len(op_time.GPU_TILES)} sizes, {op_time.GPU_TILE_BYTES} bytes", "measured, likewise"),
    Constant("share of peak of grouped matmuls, GPU",
             f"{op_time.GROUPED_SHARE:g}; int8 {op_time.GROUPED_SHARE_OF_INT8:g}",
             "measured, likewise: two mixtures, one of them in int8 too"),
    Constant("kernels that convert weights of 8 bits, Hopper", f"{op_time.CONVERTING_SLOWDOWN:g} times",
             "measured, likewise: one mixture"),
    Constant("share of peak of int8, Hopper", f"{CHIPS['h100'].int8_share:g}", "measured, likewise: two models"),
    Constant("transpositions of 8 bits, GPU", f"{gpu_fusions.NARROW_TRANSPOSE_SLOWDOWN:g} times", "measured, likewise"),
    Constant("host link, H100 and H200", f"{CHIPS['h100'].host_link_bytes_per_s / 1e9:g} GB/s", "measured, likewise"),
    Constant("HBM share, GPU", f"{op_time.HBM_SHARE['gpu']:g}; H200 {CHIPS['h200'].hbm_share:g}",
             "measured, likewise"),
    Constant("a kernel beside its bytes, GPU", f"{op_time.LAUNCH_S['gpu'] * 1e6:g} us", "measured, likewise"),
    Constant("a loop that the host decides on, GPU", f"{op_time.HOST_DECISION_S * 1e6:g} us each time",
             "measured, likewise: two models"),
    Constant("scatters that add up, GPU", f"{gpu_fusions.ADDED_SECTORS_PER_S / 1e9:.1f} G sectors/s",
             "measured, likewise: one model"),
    Constant("stores of wide results, GPU", f"{op_time.WIDE_STORE_SLOWDOWN:g} times", "measured, likewise"),
    Constant("rows of a tile that lie apart, GPU", f"{gpu_fusions.NUMBER_OF_ROWS_APART_S * 1e12:.0f} ps of a core",
             "measured, likewise: two models"),
    Constant("operations of fusions, GPU", f"{gpu_fusions.OPERATIONS_PER_CYCLE} a cycle of a core",
             "measured, likewise: four models"),
    Constant("on-chip memory over HBM, TPU", f"{op_time.ON_CHIP_SPEED}", "scaling book"),
    Constant("cuDNN attention", "shares of peak by length", "arXiv 2407.08608; heads of 192 measured, likewise",
             (), _GPUS),
    Constant("splash attention", "cycles", "libtpu's schedules"),
    Constant("gathers, sorts and sums of few rows, TPU", "cycles", "libtpu's schedules"),
    Constant("gathers on SparseCores", f"{gathers.SPARSECORE_PIECES_PER_S / 1e9:.2f} G pieces/s",
             "a gather in jax's documentation"),
    Constant("FLOPs per cycle, v6e and tpu7x", f"{CHIPS['v6e'].peak_bf16_flops_per_s / CHIPS['v6e'].clock_hz:,.0f}",
             "the compiler's cycles of matmuls"),
    Constant("NVLink share", f"{network.NVLINK_SHARE:g}", "scaling book"),
    Constant("network share", f"{network.NETWORK_SHARE:g}", "NVIDIA/nccl, issue 1218", (), _GPUS),
    Constant("cores of collectives", f"{network.NCCL_CORES}", "the same issue", (), _GPUS),
    Constant("protocols of NCCL", "a table", "NCCL's tuning.cc", (), _GPUS),
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
    # As PaLM counts them (arXiv 2204.02311): every token sees the whole row.
    model, arrays = config.model, state.arrays(config)
    looked_up = ("position_embedding", *(() if model.embedding.tied else ("embedding",)))
    sizes = {leaf.path: like.size for leaf, like in pairs(arrays.named_params, arrays.params)}
    multiplied = arrays.active_count(model) - sum(sizes.get(path, 0) for path in looked_up)
    per_token = 6 * multiplied + 12 * model.layers * model.heads * model.head_dim * row.seq
    flops = per_token * row.per_device_batch * row.seq
    baseline_s = flops / (ONE_CONSTANT * chip.peak_bf16_flops_per_s)
    predicted_s = kept.get("predicted_s")
    constants = [one.name for one in FITTED if number in (*one.value_rows, *one.form_rows)]
    found = {
        "number": number,
        "row": row.name,
        "framework": row.framework,
        "source": row.source,
        "published_s": row.step_time_s,
        "predicted_s": predicted_s,
        "error": predicted_s and f"{predicted_s / row.step_time_s - 1:+.1%}",
        "fitted": "; ".join(constants) if row.jax else "",
        "baseline_error": f"{baseline_s / row.step_time_s - 1:+.1%}",
    }
    return found | {name: value for name, value in kept.items() if name not in found}


def by_jax(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The predicted rows whose programs were of JAX and XLA: what errors are told from."""
    return [row for row in rows if row["error"] and row["framework"] in JAX_FRAMEWORKS]


def _share(text: str) -> float:
    return float(text.rstrip("%")) / 100


def errors(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Mean absolute errors of rows of JAX: by chip, TPUs, GPUs, several slices or hosts, mixtures of experts, all."""
    told = by_jax(rows)
    targets = [row["row"].rpartition(" on ")[2].partition(",")[0] for row in told]
    chips = [CHIPS[where.rpartition("@")[2].partition(":")[0]] for where in targets]
    far = [is_several(target.parse(where)) for where in targets]
    groups = {chip.name: [one is chip for one in chips] for chip in chips}
    groups |= {f"all {kind.upper()}s": [chip.platform == kind for chip in chips] for kind in ("tpu", "gpu")}
    for name, kind in (("several slices", "tpu"), ("several hosts of GPUs", "gpu")):
        groups[name] = [several and chip.platform == kind for several, chip in zip(far, chips, strict=True)]
    mixtures = {row.name for row in step_times.rows() if row.experts}
    groups["mixtures of experts"] = [row["row"] in mixtures for row in told]
    groups["all"] = [True] * len(told)
    found = []
    for name, members in groups.items():
        of = [row for row, member in zip(told, members, strict=True) if member]
        apart, seen = ([row for row in of if bool(row["fitted"]) == fitted] for fitted in (False, True))
        missed, apart_missed, seen_missed = ([abs(_share(row["error"])) for row in some] for some in (of, apart, seen))
        found.append(
            {
                "chip": name,
                "rows": len(of),
                "mean": _mean(missed),
                "largest": _mean(sorted(missed)[-1:]),
                "baseline": _mean([abs(_share(row["baseline_error"])) for row in of]),
                "apart": len(apart),
                "apart_mean": _mean(apart_missed),
                "seen": len(seen),
                "seen_mean": _mean(seen_missed),
            }
        )
    return found


def by_kind(rows: Sequence[dict[str, Any]], published: Sequence[Row]) -> dict[Kind, tuple[tuple[float, bool], ...]]:
    """What known_errors.ERRORS must hold: the error of each row of JAX, and whether a constant was fitted to it."""
    found: dict[Kind, tuple[tuple[float, bool], ...]] = {}
    named = {row.name: row for row in published}
    for row in by_jax(rows):
        one = named[row["row"]]
        kind = kind_of(target.parse(one.target), one.rules(), one.experts)
        found[kind] = (*found.get(kind, ()), (round(_share(row["error"]), 3), bool(row["fitted"])))
    return found


# Published rows whose order is known: what is compared are seconds per token.
_ORDERED = {
    "longer sequences, FSDP on one host": (39, 40, 41, 42, 43),
    "nothing recomputed at 6 rows, all recomputed at 32": (31, 40),
    "recomputed, or q, k and v offloaded": (15, 3),
    "one slice, two slices, sequences of 32,768": (16, 28),
    "one slice, two slices, v5p": (4, 26),
    "one host, two, eight": (8, 9, 10),
}


def orders(rows: Sequence[Mapping[str, Any]], published: Sequence[Row]) -> list[dict[str, Any]]:
    """The published and the predicted seconds per million tokens of a device, in the published order."""
    found = []
    for what, numbers in _ORDERED.items():
        if not all(rows[n]["predicted_s"] for n in numbers):
            continue
        tokens = [published[n].tokens_per_device / 1e6 for n in numbers]
        told = {
            name: [rows[n][f"{name}_s"] / each for n, each in zip(numbers, tokens, strict=True)]
            for name in ("published", "predicted")
        }
        found.append(
            {"what": what, "rows": ", ".join(map(str, numbers))}
            | {name: ", ".join(f"{value:.1f}" for value in values) for name, values in told.items()}
            | {"as_published": "yes" if told["predicted"] == sorted(told["predicted"]) else "no"}
        )
    return found


def _mean(values: Sequence[float]) -> str:
    return f"{statistics.mean(values):.1%}" if values else "-"


def doubts(rows: Sequence[Row]) -> str:
    """What is not known of the runs, or done otherwise here, each with the numbers of its rows: a list in Markdown."""
    found: dict[str, list[int]] = {}
    for number, row in enumerate(rows):
        for what, said in (("assumed", row.doubtful), ("otherwise here", row.differs)):
            for one in said:
                found.setdefault(f"{what}: {one}.", []).append(number)
    return "\n".join(f"- row{'s' * (len(of) > 1)} {', '.join(map(str, of))}, {said}" for said, of in found.items())
