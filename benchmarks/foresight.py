"""Predicted step times beside published ones, the order of layouts, and what fits: benchmarks/known_runs.md.

    python -m benchmarks.foresight times [--rows 4 6 8] [--write]    # other rows: as they are kept in results/
    python -m benchmarks.foresight eight_bits [--rows 2] [--write]    # as plan estimates them; these rows compiled too
    python -m benchmarks.foresight priced --rows 49 50    # as plan estimates them, without a compiler
    python -m benchmarks.foresight refitted [--write]
    python -m benchmarks.foresight order [--rows 13] [--write]    # other pairs: as they are kept
    python -m benchmarks.foresight bytes [--write]
    python -m benchmarks.foresight compilation [--write]
    python -m benchmarks.foresight fits [--rows 0] [--write]

Nothing but compilers runs: programs are compiled for the published hardware on this machine and kept, so that only the
first run takes long (rows of a published table that offload to the host: many minutes each).
"""

import dataclasses
import datetime
import os
import resource
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any
from unittest import mock

from benchmarks import measure, step_times
from benchmarks import published_errors as errors
from benchmarks.layouts import PAIRS
from gspmd_lm import config
from gspmd_lm.foresight import compile, explain, hlo, memory
from gspmd_lm.foresight.report import Report
from gspmd_lm.foresight.timing.simulate import Simulation
from gspmd_lm.hardware import target
from gspmd_lm.hardware.chips import Chip
from gspmd_lm.hardware.network import Network
from gspmd_lm.plan.estimate import Estimator
from gspmd_lm.sharding import rules_file

SPARED = 0.98  # of the memory: what a configuration that was trained must do with
ORDER = {"pair": "pair", "target": "target", "good_ms": "good, ms", "bad_ms": "bad, ms", "ratio": "bad / good",
         "as_known": "in the known direction", "date": "on"}  # fmt: skip

PRICED = {"number": "row", "row": "published run", "published_s": "published s", "predicted_s": "estimated s",
          "error": "error", "baseline_error": "FLOPs / 55% of peak"}  # fmt: skip
BYTES = {"layout": "layout", "target": "target", "sent_gb": "sent, GB", "floor_gb": "floor, GB", "ratio": "ratio",
         "all_to_alls_in_layers": "all-to-alls in the layers", "exposed": "exposed, of its time",
         "of_the_step": "of the step"}  # fmt: skip
FITS = {"row": "trained row", "limit_gib": "limit, GiB", "needs_gib": "needs, GiB", "share": "of the limit",
        "fits": "in 98%", "date": "on"}  # fmt: skip
EIGHT_BITS = {"row": "published run", "published_s": "published s", "published_bf16_s": "published s, bfloat16",
              "published_ratio": "ratio", "estimated": "estimated s of s in bfloat16 (ratio), error",
              "compiled": "the same, compiled", "date": "on"}  # fmt: skip
COMPILATION = {"program": "program", "compile_s": "compiled in s", "most_gb": "most memory of the process, GB",
               "fits": "fits", "step_time_s": "predicted step, s"}  # fmt: skip


def predicted(row: step_times.Row) -> dict[str, Any]:
    """What is predicted for a published row, compiled now."""
    (found,) = explain.reports(row.config(), [row.rules()], target.parse(row.target), print)
    told = found.prediction
    return {
        "row": row.name,
        "predicted_s": told and round(told.step_time_s, 3),
        "exposed": told and f"{told.exposed_communication_s / told.step_time_s:.1%}",
        "fits": found.memory.fits,
        "peak_gb": round(found.memory.peak_bytes / 1e9, 1),
        "host_gb": round(found.memory.host_bytes / 1e9, 1),
        "compile_s": round(found.compile_s),
        "date": datetime.date.today().isoformat(),
        "parts_s": told
        and {name: round(getattr(told, name), 3) for name in
             ("matmul_s", "attention_s", "other_s", "exposed_communication_s", "exposed_host_copy_s")},
        "versions": dict(found.versions),
    }  # fmt: skip


def times(numbers: Sequence[int] | None) -> list[dict[str, Any]]:
    """All published rows beside what is predicted: for those of `numbers` anew, for the others as it was kept."""
    published = step_times.rows()
    kept = {row["row"]: row for row in measure.read("foresight_times")}
    wanted = range(len(published)) if numbers is None else numbers
    kept |= {published[n].name: predicted(published[n]) for n in wanted}
    # A row that was never compiled has no prediction.
    return [errors.compared(number, row, kept.get(row.name, {})) for number, row in enumerate(published)]


def of_8_bits(row: step_times.Row, kept: Mapping[str, Any], compiles: bool) -> dict[str, Any]:
    """A published row with operands of 8 bits beside the same run in bfloat16, as plan's prices have both.

    compiles: both are compiled too. Otherwise what was predicted from compiled programs stays as it is kept.
    """
    both, where = (row, dataclasses.replace(row, matmul_dtype=None)), target.parse(row.target)
    prices = [Estimator(one.config(), where).estimate(one.rules().fill(where.devices)).step_time_s for one in both]
    compiled_s = [predicted(one)["predicted_s"] for one in both] if compiles else kept.get("compiled_s", [])
    return {
        "row": row.name,
        "published_s": row.step_time_s,
        "published_bf16_s": row.bf16_s or "",
        "estimated": _beside(prices, row.step_time_s),
        "compiled": _beside(compiled_s, row.step_time_s),
        "compiled_s": compiled_s,
        "published_ratio": f"{row.step_time_s / row.bf16_s:.2f}" if row.bf16_s else "",
        "date": datetime.date.today().isoformat(),
    }


def _beside(seconds: Sequence[float], published_s: float) -> str:
    """Seconds in 8 bits and in bfloat16, with their ratio, and how far the first are off."""
    if not seconds:
        return ""
    narrow_s, wide_s = seconds
    return f"{narrow_s:.2f} of {wide_s:.2f} ({narrow_s / wide_s:.2f}), {narrow_s / published_s - 1:+.1%}"


def estimated(numbers: Sequence[int]) -> list[dict[str, Any]]:
    """Published rows beside what plan's prices say of them."""
    found = []
    for number, row in ((n, step_times.rows()[n]) for n in numbers):
        where = target.parse(row.target)
        price = Estimator(row.config(), where).estimate(row.rules().fill(where.devices))
        kept = {"predicted_s": round(price.step_time_s, 3), "peak_gb": round(price.peak_bytes / 1e9, 1)}
        found.append(errors.compared(number, row, kept))
    return found


def tables(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Tables of how far predictions were off: benchmarks/known_runs.md has them."""
    published, ours = step_times.rows(), errors.by_jax(rows)
    return [
        measure.markdown(errors.constants(), errors.CONSTANTS),
        measure.markdown([row for row in ours if row["fitted"]], errors.FITTED_TIMES),
        measure.markdown([row for row in ours if not row["fitted"]], errors.TIMES),
        measure.markdown([row for row in rows if row["error"] and row not in ours], errors.OTHER_TIMES),
        measure.markdown(errors.errors(rows), errors.ERRORS),
        measure.markdown(errors.orders(rows, published), errors.ORDERS),
        errors.doubts(published),
    ]


def refitted() -> list[dict[str, Any]]:
    """The slowdown of Hopper that each set of the rows it was fitted to asks for, and what it makes of other rows.

    The best slowdown has the least sum of squared errors, in steps of a hundredth.
    """
    published = step_times.rows()
    shown = {n: program(published[n]) for n in (8, 9, 10, 11, 12)}

    def off(number: int, slowdown: float) -> float:
        module, chip, network = shown[number]
        chip = dataclasses.replace(chip, matmul_slowdown=slowdown)
        simulation = Simulation(module, chip, dataclasses.replace(network, chip=chip))
        return simulation.clock_s / published[number].step_time_s - 1

    found = []
    for numbers in (errors.HOPPER, *((n,) for n in errors.HOPPER)):
        tried = {step / 100: sum(off(n, step / 100) ** 2 for n in numbers) for step in range(100, 150)}
        best = min(tried, key=lambda slowdown: tried[slowdown])
        found.append(
            {
                "rows": " and ".join(map(str, numbers)),
                "slowdown": best,
                "errors": ", ".join(f"{off(n, best):+.1%}" for n in shown),
            }
        )
    return found


def program(row: step_times.Row) -> tuple[hlo.Module, Chip, Network]:
    """The compiled program of a row, and the chips and links that it runs on."""
    where, rules = target.parse(row.target), row.rules()
    assert where.chip
    rules = rules.fill(where.devices)
    (done,) = compile.programs([compile.CompileRequest(row.config(), rules, where)], print)
    network = Network(where.chip, done.coords, done.slices, done.hosts, rules.mesh)
    return hlo.parse(done.text, done.slices), where.chip, network


def order(pair: Any) -> dict[str, Any]:
    """Two layouts of one config on one target of which one is known to be the faster per token."""
    reports: list[Report] = []
    for side in (pair.good, pair.bad):
        (found,) = explain.reports(side.config(), [side.rules()], target.parse(pair.target), print)
        reports.append(found)
    good_s, bad_s = (
        report.prediction.step_time_s / report.tokens if report.prediction and report.tokens else float("inf")
        for report in reports
    )
    tokens = reports[0].tokens
    assert tokens
    return {
        "pair": pair.name,
        "why": pair.why,
        "target": pair.target,
        "good_ms": round(good_s * tokens * 1e3, 1),
        "bad_ms": round(bad_s * tokens * 1e3, 1),
        "ratio": round(bad_s / good_s, 2),
        "as_known": "yes" if bad_s > good_s else "no",
        "date": datetime.date.today().isoformat(),
    }


def sent(layout: str, where: str, *sets: str) -> dict[str, Any]:
    """What the collectives of Llama-3-8B send under a layout, beside the floor, and what of their time is exposed."""
    rules = dataclasses.replace(rules_file.load(layout), attention={"cpu": "xla", "gpu": "xla", "tpu": "splash"})
    (found,) = explain.reports(config.load("llama3_8b", sets), [rules], target.parse(where), print)
    total = found.sent_bytes
    predicted, least = found.prediction, found.floor.communication_bytes
    assert predicted and least
    return {
        "layout": layout,
        "target": where,
        "sent_gb": round(total / 1e9, 2),
        "floor_gb": round(least / 1e9, 2),
        "ratio": round(total / least, 3),
        "all_to_alls_in_layers": sum(one.in_loop and "all-to-all" in one.kind for one in found.collectives),
        "exposed": f"{predicted.exposed_communication_s / predicted.communication_s:.0%}",
        "of_the_step": f"{predicted.exposed_communication_s / predicted.step_time_s:.1%}",
        "sets": list(sets),
    }


def compilation(layout: str, name: str, where: str, *sets: str) -> dict[str, Any]:
    """What it takes to compile a program, from tracing to its text, in a process of its own; nothing is kept."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch, mock.patch.dict(os.environ, GSPMD_LM_CACHE=scratch):
        (found,) = explain.reports(config.load(name, sets), [rules_file.load(layout)], target.parse(where), print)
    return {
        "program": f"{name} under {layout} for {where}",
        "compile_s": round(time.monotonic() - started),
        "most_gb": round(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e6, 1),  # of the largest so far
        "fits": found.memory.fits,
        "step_time_s": found.prediction and round(found.prediction.step_time_s, 3),
        "sets": list(sets),
    }


def fits(row: step_times.Row) -> dict[str, Any]:
    """What a configuration that was trained on its hardware needs there, beside SPARED of the memory."""
    where = target.parse(row.target)
    assert where.chip
    limit_bytes, needs_bytes = where.chip.usable_hbm_bytes, needed_bytes(row)
    return {
        "row": row.name,
        "limit_gib": round(limit_bytes / 2**30, 2),
        "needs_gib": round(needs_bytes / 2**30, 2),
        "share": f"{needs_bytes / limit_bytes:.1%}",
        "fits": needs_bytes <= SPARED * limit_bytes,
        "date": datetime.date.today().isoformat(),
    }


def needed_bytes(row: step_times.Row) -> int:
    """What libtpu says a row needs, which it does within seconds when it is given half of the memory."""
    where = target.parse(row.target)
    assert where.chip
    short = compiled(row, where.chip.usable_hbm_bytes // 2)
    return memory.refused_memory(short.refusal, short.state_bytes, None).peak_bytes


def compiled(row: step_times.Row, limit_bytes: int) -> compile.CompiledProgram:
    """The program of a row, or its refusal, where a program may use `limit_bytes` of the memory."""
    where, rules = target.parse(row.target), row.rules()
    limit = {"xla_tpu_max_hbm_size_mib": limit_bytes // 2**20}
    rules = dataclasses.replace(rules, compiler_options={"tpu": {**rules.compiler_options.get("tpu", {}), **limit}})
    (program,) = compile.programs([compile.CompileRequest(row.config(), rules.fill(where.devices), where)], print)
    return program


def main() -> None:
    parser = measure.flags(__doc__)
    parser.add_argument(
        "what", choices=("times", "eight_bits", "priced", "refitted", "order", "bytes", "compilation", "fits")
    )
    parser.add_argument("--rows", type=int, nargs="*", help="rows or pairs to compile, from 0; default: all")
    arguments = parser.parse_args()
    if arguments.what == "order":
        wanted = range(len(PAIRS)) if arguments.rows is None else arguments.rows
        kept = measure.read("foresight_order")
        rows = [order(pair) if number in wanted else kept[number] for number, pair in enumerate(PAIRS)]
        print(measure.markdown(rows, ORDER))
    elif arguments.what == "eight_bits":
        published = step_times.rows(step_times.EIGHT_BITS)
        kept = {row["row"]: row for row in measure.read("foresight_eight_bits")}
        wanted = arguments.rows or ()
        rows = [of_8_bits(row, kept.get(row.name, {}), n in wanted) for n, row in enumerate(published)]
        print(measure.markdown(rows, EIGHT_BITS))
    elif arguments.what == "bytes":
        rows = [sent(layout, "h100:8", "data.batch=16") for layout in ("tp8", "fsdp8", "fsdp2_tp4")]
        rows.append(sent("tp8", "v5p:2x2x2", "data.batch=2"))  # it splits no rows and keeps all activations
        rows += [sent(layout, "v5p:2x2x2", "data.batch=16") for layout in ("fsdp8", "fsdp2_tp4")]
        rows.append(sent("fsdp", "v5p:4x4x4"))
        print(measure.markdown(rows, BYTES))
    elif arguments.what == "compilation":
        rows = [compilation("fsdp_tp", "llama3_8b", "v5p:2x2x2", "data.batch=16"),
                compilation("fsdp_tp", "llama3_8b", "v5p:4x4x4"),
                compilation("fsdp_tp", "llama3_405b", "v5p:8x8x8", "data.batch=512")]  # fmt: skip
        print(measure.markdown(rows, COMPILATION))
    elif arguments.what == "priced":
        rows = estimated(arguments.rows or [])
        print(measure.markdown(rows, PRICED))
    elif arguments.what == "refitted":
        rows = refitted()
        print(measure.markdown(rows, errors.REFITTED))
    elif arguments.what == "fits":
        trained = step_times.rows(step_times.TRAINED)
        rows = [fits(row) for number, row in enumerate(trained) if arguments.rows is None or number in arguments.rows]
        print(measure.markdown(rows, FITS))
    else:
        rows = times(arguments.rows)
        print("\n\n".join(tables(rows)))
    if arguments.write and arguments.what == "fits":
        measure.keep("foresight_fits", rows, "row")
    elif arguments.write:
        measure.write(f"foresight_{arguments.what}", rows)


if __name__ == "__main__":
    main()
