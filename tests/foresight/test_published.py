"""Published rows are what ran, and results/, the documents and `explain` say the same of them."""

import dataclasses
import math
import statistics
from pathlib import Path

import pytest
from recorded import shapes_once  # noqa: F401  a fixture

from benchmarks import foresight, foresight_memory, measure, on_device, published_errors, published_experts, step_times
from gspmd_lm.foresight import known_errors
from gspmd_lm.foresight.known_errors import Kind
from gspmd_lm.hardware import target
from gspmd_lm.hardware.chips import CHIPS
from gspmd_lm.plan.estimate import Estimator
from gspmd_lm.runtime import compiler
from gspmd_lm.train import state

ROOT = Path(__file__).parents[2]
PAGES = "".join((ROOT / page).read_text() for page in ("docs/validation.md", "benchmarks/known_runs.md"))
ROWS = step_times.rows()
KEPT = measure.read("foresight_times")
pytestmark = pytest.mark.usefixtures("shapes_once")


@pytest.mark.parametrize("one_in", [16, pytest.param(1, marks=pytest.mark.slow)])
def test_what_is_kept_is_of_the_rows_as_they_stand(one_in):
    """Errors, fitted constants and the baseline follow from the rows and from the seconds that were predicted."""
    assert [row["row"] for row in KEPT] == [row.name for row in ROWS]
    for number, (row, kept) in list(enumerate(zip(ROWS, KEPT, strict=True)))[::one_in]:
        assert published_errors.compared(number, row, kept) == kept


@pytest.mark.parametrize(
    "table",
    foresight.tables(KEPT),
    ids=["constants", "fitted", "held out", "other frameworks", "errors", "orders", "doubts"],
)
def test_the_documents_have_what_was_predicted(table):
    assert table.count("\n") > 2 and table in PAGES


@pytest.mark.parametrize("name", ["order", "bytes", "compilation", "fits"])
def test_validation_has_the_other_tables_too(name):
    table = measure.markdown(measure.read(f"foresight_{name}"), getattr(foresight, name.upper()))
    assert table in PAGES
    assert foresight_memory.table(measure.read("foresight_memory")) in PAGES


@pytest.mark.slow
def test_validation_has_what_published_mixtures_did_otherwise():
    assert measure.markdown(published_experts.rows(), published_experts.COLUMNS) in PAGES


def test_runs_with_operands_of_8_bits_are_those_that_were_compared():
    """None of them was fitted to, and the only published order is the estimated one."""
    rows, kept = step_times.rows(step_times.EIGHT_BITS), measure.read("foresight_eight_bits")
    assert [row["row"] for row in kept] == [row.name for row in rows]
    assert measure.markdown(kept, foresight.EIGHT_BITS) in PAGES
    both = rows[0], dataclasses.replace(rows[0], matmul_dtype=None)
    where = target.parse(rows[0].target)
    narrow_s, wide_s = (
        Estimator(one.config(), where).estimate(one.rules().fill(where.devices)).step_time_s for one in both
    )
    assert kept[0]["estimated"] == foresight._beside([narrow_s, wide_s], rows[0].step_time_s)
    assert 0.9 < (narrow_s / wide_s) / (rows[0].step_time_s / rows[0].bf16_s) < 1.1


def test_sentences_give_the_figures_that_are_kept():
    pages = " ".join(PAGES.split())
    off = [abs(row["error"]) for row in measure.read("foresight_memory")]
    assert f"The mean error is {statistics.mean(off):.1%}." in pages
    last = measure.read("foresight_bytes")[-1]
    assert f"{last['exposed']} of the collectives' time of `{last['layout']}` on `{last['target']}`" in pages
    first, slower = KEPT[0], CHIPS["v6e"].offloading_slowdown
    share = first["parts_s"]["matmul_s"] * (1 - 1 / slower) / first["predicted_s"]
    assert (
        f"{slower - 1:.2f} of {slower} of the time of all matmuls of such a program is unexplained: {share:.0%}"
        in pages
    )
    said = {row["chip"]: row for row in published_errors.errors(KEPT)}["all GPUs"]
    assert pages.count(f"{said['mean']} in the mean of {said['rows']} published runs of JAX on GPUs") == 2


def test_the_slowdown_of_hopper_is_the_one_that_fits_its_rows():
    fitted, *alone = measure.read("foresight_refitted")
    assert fitted["rows"] == " and ".join(map(str, published_errors.HOPPER))
    assert CHIPS["h100"].matmul_slowdown == CHIPS["h200"].matmul_slowdown == fitted["slowdown"]
    assert [row["rows"] for row in alone] == list(map(str, published_errors.HOPPER))
    told = [float(error.rstrip("%")) for error in fitted["errors"].split(", ")]
    assert told == pytest.approx([float(KEPT[n]["error"].rstrip("%")) for n in (8, 9, 10, 11, 12)], abs=0.11)
    assert measure.markdown([fitted, *alone], published_errors.REFITTED) in PAGES


@pytest.mark.parametrize("page", ["README.md", "CHANGELOG.md"])
def test_other_pages_give_the_same_errors(page):
    text = " ".join((ROOT / page).read_text().split())
    said = {row["chip"]: row for row in published_errors.errors(KEPT)}
    for name in ("all TPUs", "all GPUs"):
        assert f"{said[name]['mean']} in the mean of {said[name]['rows']} published runs" in text


def test_a_document_counts_the_pairs_in_the_known_order():
    pairs = measure.read("foresight_order")
    assert all(pair["as_known"] == "yes" for pair in pairs) and len(pairs) == 17
    assert "All seventeen pairs are predicted in the known order." in PAGES


def test_the_known_errors_are_those_of_the_benchmark():
    assert dict(known_errors.ERRORS) == published_errors.by_kind(KEPT, ROWS)


def test_the_errors_on_one_gpu_are_those_that_were_measured_there():
    """Not those of 8-bit matmuls, whose predictions are told to be compared with nothing."""
    measured = {}
    for row in measure.read("on_device"):
        if not row["case"].endswith(("fp8", "int8")):
            measured.setdefault(row["kind"], []).append(round(float(row["error"].rstrip("%")) / 100, 4))
    told = {str(kind): [error for error, _ in runs] for kind, runs in known_errors.MEASURED.items()}
    assert told == measured


def test_the_documents_have_what_was_measured_on_one_gpu():
    rows = measure.read("on_device")
    assert measure.markdown(rows, on_device.COLUMNS) in PAGES
    mean = statistics.mean(abs(float(row["error"].rstrip("%"))) for row in rows)
    assert {row["memory_error"] for row in rows} == {"-0.0%"}
    missed = f"predictions of {len(rows)} steps missed by {mean:.1f}% in the mean, and those of their memory by"
    assert f"{missed} less than 0.05%" in " ".join(PAGES.split())


def test_an_error_is_told_of_runs_of_the_same_kind(monkeypatch):
    one, many = Kind("h100", False, "cudnn"), Kind("h100", True, "cudnn")
    two, alone = Kind("v5p", True, "splash"), Kind("v5e", False, "xla")
    sparse = Kind("v5p", True, "splash", experts=True)
    told = {sparse: ((-0.2, False),), one: ((-0.02, True), (0.04, True)),
            many: ((0.05, False), (-0.01, True)), alone: ((0.19, False),),
            two: ((0.03, False), (-0.01, False))}  # fmt: skip
    monkeypatch.setattr(known_errors, "ERRORS", told)
    assert [
        known_errors.known_error(kind) for kind in (*told, Kind("h100", True, "xla"), Kind("b200", False, "xla"))
    ] == [
        "not known: -20.0% for one published step time on v5p, several slices, splash attention, experts",
        "3.0% in the mean of 2 published step times on h100, one host, cudnn attention; constants were "
        "fitted to all of them",
        "3.0% in the mean of 2 published step times on h100, several hosts, cudnn attention; constants were "
        "fitted to 1 of them",
        "not known: +19.0% for one published step time on v5e, one slice, xla attention",
        "2.0% in the mean of 2 published step times on v5p, several slices, splash attention",
        "not known for h100, several hosts, xla attention: 3.0% in the mean of 4 other published step times on h100; "
        "constants were fitted to 3 of them",
        "not compared with any measurement",
    ]
    measured = Kind("h100", False, "cudnn", alone=True)
    monkeypatch.setattr(known_errors, "MEASURED", {measured: ((0.01, False), (-0.03, True))})
    assert known_errors.known_error(measured) == (
        "2.0% in the mean of 2 measured step times on h100, one GPU, cudnn attention; constants were "
        "fitted to 1 of them"
    )
    assert known_errors.known_error(measured._replace(attention="xla")).startswith("not known for h100, one GPU, xla")
    assert "4 other published" in known_errors.known_error(Kind("h100", True, "xla"))  # those alone are another thing
    for kind, mean in ((one, 0.03), (Kind("h100", True, "xla"), 0.03), (alone, 0.19), (two, 0.02)):
        assert known_errors.mean_error(kind) == pytest.approx(mean)
    assert known_errors.mean_error(Kind("b200", False, "xla")) is None


@pytest.mark.parametrize(
    ("text", "several"),
    [("h100:8", False), ("h100:1", False), ("h100:2x8/800", True), ("v5p:4x4x4", False), ("2@v6e:2x4", True)],
)
def test_the_kind_of_a_step_is_its_chip_its_hosts_its_kernel_and_whether_it_has_experts(text, several):
    where = target.parse(text)
    rules = dataclasses.replace(ROWS[0].rules(), attention={"tpu": "splash", "gpu": "xla"})
    kernel, alone = "splash" if where.platform == "tpu" else "xla", text == "h100:1"
    assert known_errors.kind_of(where, rules, 0) == Kind(where.chip.name, several, kernel, alone=alone)
    assert known_errors.kind_of(where, rules, 8) == Kind(where.chip.name, several, kernel, True, alone)


@pytest.mark.parametrize("row", [row for row in ROWS if row.derived], ids=lambda row: row.name)
def test_a_derived_time_follows_from_the_published_rate(row):
    """Tokens or sequences per second, or TFLOP/s as the framework counts them."""
    if row.sequences_per_s:
        found = row.per_device_batch * row.devices / row.sequences_per_s
    elif row.tokens_per_s_per_device:
        found = row.tokens_per_device / row.tokens_per_s_per_device
    elif row.counted:  # 4 passes with recomputation and 3 without, of 24 B s L D^2 and what belongs to it
        passes = 4 if row.counted == "megatron recomputed" else 3
        head = row.V / (12 if passes == 3 else 16) / row.L / row.D
        flops = 24 * passes * row.tokens_per_device * row.L * row.D**2 * (1 + row.seq / 6 / row.D + head)
        found = flops / (row.tflops_per_device * 1e12)
    else:  # 6 for each parameter and token, and attention over the square of the sequence, or half of it
        square = 12 * row.L * row.N * row.H * row.seq * (0.5 if row.causal_attention_flops else 1.0)
        flops = (6 * state.arrays(row.config()).parameter_count + square) * row.tokens_per_device
        found = flops / (row.tflops_per_device * 1e12)
    assert found == pytest.approx(row.step_time_s, rel=1e-3)


def test_rows_are_built_as_they_ran():
    kernels = {"unfused": "xla", "flash": "splash", "splash": "splash", "cudnn": "cudnn"}
    for row in ROWS:
        model, rules = row.config().model, row.rules()
        where = target.parse(row.target)
        assert where.devices == row.devices == rules.devices
        if where.platform == "gpu":  # several hosts say their network
            assert ("/" in row.target) == (where.topology[0] > 1)
            assert math.prod(row.dcn.values()) in (1, where.topology[0])
        else:
            assert math.prod(row.dcn.values()) == where.slices
        assert (model.block == "parallel" and model.norm.shared) == row.model.endswith("2023")
        assert rules.attention[CHIPS[row.chip].platform] == kernels[row.attention]
    old, new = ROWS[4], dataclasses.replace(ROWS[4], options="")
    three = compiler.DEFAULT_OPTIONS["tpu 3d"]
    assert old.chip == "v5p" and not set(three) & set(options(old)) and set(three) <= set(options(new))
    assert options(ROWS[7])["xla_tpu_scoped_vmem_limit_kib"] == "65536"
    assert options(ROWS[0])["xla_tpu_scoped_vmem_limit_kib"] == "98304"


def options(row):
    """What the compiler is told for a row."""
    kind = CHIPS[row.chip].kinds[0]
    return compiler.options("tpu", row.rules().compiler_options, "", kind)


def test_a_row_that_is_compiled_anew_replaces_its_own_alone(monkeypatch):
    monkeypatch.setattr(foresight, "predicted", lambda row: {"row": row.name, "predicted_s": 2 * row.step_time_s})
    monkeypatch.setattr(step_times, "rows", lambda: ROWS[:3])
    found = foresight.times([1])
    assert found[1]["error"] == "+100.0%" and found[::2] == KEPT[:3:2]
    assert foresight.times([]) == KEPT[:3]
    assert {row["error"] for row in foresight.times(None)} == {"+100.0%"}


def test_means_are_of_rows_of_jax_and_tell_those_held_out_apart():
    rows = [
        {"row": f"a on {where}, 1", "framework": framework, "error": error, "baseline_error": "-10.0%", "fitted": seen}
        for where, framework, error, seen in (
            ("v6e:2x4", "MaxText", "-1.0%", "share"), ("2@v6e:2x4", "MaxText", "+3.0%", ""),
            ("v5p:2x2x2", "MaxText", "-5.0%", ""), ("h100:2x8/800", "Pax", "-9.0%", ""),
            ("h100:8", "torchtitan", "-50.0%", ""), ("v5p:2x2x2", "MaxText", None, ""),
        )
    ]  # fmt: skip
    found = {row["chip"]: row for row in published_errors.errors(rows)}
    v6e = found["v6e"]
    assert (v6e["rows"], v6e["mean"], v6e["apart_mean"], v6e["seen_mean"]) == (2, "2.0%", "3.0%", "1.0%")
    assert (found["all TPUs"]["rows"], found["all TPUs"]["mean"], found["all TPUs"]["largest"]) == (3, "3.0%", "5.0%")
    assert (found["several slices"]["mean"], found["several hosts of GPUs"]["mean"]) == ("3.0%", "9.0%")
    assert (found["all"]["rows"], found["all"]["mean"], found["all"]["baseline"]) == (4, "4.5%", "10.0%")


def test_predictions_are_in_the_published_order():
    orders = published_errors.orders(KEPT, ROWS)
    assert len(orders) >= 4 and {row["as_published"] for row in orders} == {"yes"}
    swapped = [*KEPT]
    swapped[9] = {**KEPT[9], "predicted_s": KEPT[8]["predicted_s"] / 2}
    assert "no" in {row["as_published"] for row in published_errors.orders(swapped, ROWS)}
