"""Published rows are what ran, and results/, the documents and `explain` say the same of them."""

import collections
import dataclasses
import re
import statistics
from pathlib import Path

import pytest
from recorded import shapes_once  # noqa: F401  a fixture

from benchmarks import foresight, foresight_memory, measure, published_errors, step_times
from gspmd_lm import runtime
from gspmd_lm.foresight import explain
from gspmd_lm.foresight.machine.hardware import CHIPS
from gspmd_lm.train import state

ROOT = Path(__file__).parents[2]
PREDICTIONS = (ROOT / "docs/predictions.md").read_text()
VALIDATION = (ROOT / "docs/validation.md").read_text()
ROWS = step_times.rows()
KEPT = measure.read("foresight_times")
pytestmark = pytest.mark.usefixtures("shapes_once")


def test_what_is_kept_is_of_the_rows_as_they_stand():
    """Errors, fitted constants and the baseline follow from the rows and from the seconds that were predicted."""
    assert [row["row"] for row in KEPT] == [row.name for row in ROWS]
    for number, (row, kept) in enumerate(zip(ROWS, KEPT, strict=True)):
        assert published_errors.compared(number, row, kept) == kept


@pytest.mark.parametrize("table", foresight.tables(KEPT), ids=["constants", "fitted", "others", "errors", "doubts"])
def test_the_documents_have_what_was_predicted(table):
    page = PREDICTIONS if table.startswith("| constant |") else VALIDATION
    assert table.count("\n") > 2 and table in page


@pytest.mark.parametrize("name", ["order", "bytes", "compilation", "fits"])
def test_validation_has_the_other_tables_too(name):
    table = measure.markdown(measure.read(f"foresight_{name}"), getattr(foresight, name.upper()))
    assert table in VALIDATION
    assert foresight_memory.table(measure.read("foresight_memory")) in VALIDATION


def test_sentences_give_the_figures_that_are_kept():
    predictions, validation = (" ".join(page.split()) for page in (PREDICTIONS, VALIDATION))
    off = [abs(row["error"]) for row in measure.read("foresight_memory")]
    assert f"The mean error is {statistics.mean(off):.1%}." in validation
    last = measure.read("foresight_bytes")[-1]
    assert f"{last['exposed']} of the collectives' time of `{last['layout']}` on `{last['target']}`" in validation
    first, slower = KEPT[0], CHIPS["v6e"].matmul_slowdown
    share = first["parts_s"]["matmul_s"] * (1 - 1 / slower) / first["predicted_s"]
    assert f"{slower - 1:.2f} of {slower} of the time of all matmuls on v6e is unexplained: {share:.0%}" in predictions
    assert f"(row 8) | {KEPT[8]['error']} |" in validation


@pytest.mark.parametrize("page", ["README.md", "CHANGELOG.md"])
def test_other_pages_give_the_same_errors(page):
    text = " ".join((ROOT / page).read_text().split())
    tpus = next(row for row in published_errors.errors(KEPT) if row["chip"] == "all TPUs")
    assert re.findall(r"([\d.]+%)(?: off)? in the mean", text) == [tpus["mean"]]
    assert re.search(rf"\b{['one', 'two', 'three', 'four'][tpus['rows'] - 1]} (published )?TPU runs", text)
    assert "24% too short in the mean of four" in text and "by 24% in the mean of 4" in explain.GPU_ERROR


def test_the_readme_counts_the_pairs_in_the_known_order():
    pairs = measure.read("foresight_order")
    assert all(pair["as_known"] == "yes" for pair in pairs) and len(pairs) == 15
    assert "fifteen of fifteen pairs came out in the known order" in (ROOT / "README.md").read_text()


def test_the_known_errors_are_those_of_the_benchmark():
    told = {False: collections.defaultdict(list), True: collections.defaultdict(list)}
    for row, published in zip(KEPT, ROWS, strict=True):
        told[bool(row["fitted"])][published.chip].append(float(row["error"].rstrip("%")) / 100)
    for name, chip in CHIPS.items():
        assert chip.step_errors == pytest.approx(told[False][name]), name
        assert chip.fitted_step_errors == pytest.approx(told[True][name]), name


def test_an_error_is_told_with_what_it_rests_on():
    told = {"v4": ((), ()), "v5p": ((0.02, -0.04), (0.5,)), "v5e": ((-0.002,), (0.5,)), "v6e": ((), (0.01, -0.01)),
            "h100": ((-0.1,), ()), "a100": ((), ())}  # fmt: skip
    assert {
        name: explain.known_error(dataclasses.replace(CHIPS[name], step_errors=errors, fitted_step_errors=fitted))
        for name, (errors, fitted) in told.items()
    } == {
        "v4": "not compared with any measurement",
        "v5e": "not known: one published step time was predicted that nothing was fitted to, -0.2% off",
        "v5p": "3.0% in the mean of 2 published step times",
        "v6e": "not known: constants were fitted to all 2 published step times that were predicted",
        "h100": explain.GPU_ERROR,
        "a100": explain.GPU_ERROR,
    }
    assert "24%" in explain.GPU_ERROR and re.search(r"24% too short in the mean", VALIDATION)


@pytest.mark.parametrize("row", [row for row in ROWS if row.derived], ids=lambda row: row.name)
def test_a_derived_time_follows_from_the_published_rate(row):
    """6 FLOPs for each parameter and token, and attention over the square of the sequence, or half of it."""
    square = 12 * row.L * row.N * row.H * row.seq * (0.5 if row.causal_attention_flops else 1.0)
    flops = (6 * state.arrays(row.config()).parameter_count + square) * row.per_device_batch * row.seq
    assert flops / (row.tflops_per_device * 1e12) == pytest.approx(row.step_time_s, rel=1e-3)


def test_rows_are_built_as_they_ran():
    kernels = {"unfused": "xla", "flash": "splash", "splash": "splash", "cudnn": "cudnn"}
    for row in ROWS:
        model, rules = row.config().model, row.rules()
        assert (model.block == "parallel" and model.shared_norm) == row.model.endswith("2023")
        assert rules.attention[CHIPS[row.chip].platform] == kernels[row.attention]
    old, new = ROWS[4], dataclasses.replace(ROWS[4], options="")
    three = runtime.DEFAULT_OPTIONS["tpu 3d"]
    assert old.chip == "v5p" and not set(three) & set(options(old)) and set(three) <= set(options(new))
    assert options(ROWS[7])["xla_tpu_scoped_vmem_limit_kib"] == "65536"
    assert options(ROWS[0])["xla_tpu_scoped_vmem_limit_kib"] == "98304"


def options(row):
    """What the compiler is told for a row."""
    kind = CHIPS[row.chip].kinds[0]
    return runtime.compiler_options("tpu", row.rules().compiler_options, "", kind)


def test_a_row_that_is_compiled_anew_replaces_its_own_alone(monkeypatch):
    monkeypatch.setattr(foresight, "predicted", lambda row: {"row": row.name, "predicted_s": 2 * row.step_time_s})
    found = foresight.times([5])
    assert found[5]["error"] == "+100.0%" and found[:5] == KEPT[:5] and found[6:] == KEPT[6:]
    assert foresight.times([]) == KEPT
    assert {row["error"] for row in foresight.times(None)} == {"+100.0%"}


def test_means_are_of_rows_that_nothing_was_fitted_to():
    rows = [
        {"row": f"a on {where}", "error": error, "baseline_error": "-10.0%", "fitted": fitted}
        for where, error, fitted in (
            ("v6e:2x4", "-1.0%", "share"), ("v6e:2x4", "+3.0%", ""), ("v5p:2x2x2", "-5.0%", ""), ("h100:8", "-9.0%", "")
        )
    ]  # fmt: skip
    found = {row["chip"]: row for row in published_errors.errors(rows)}
    assert (found["v6e"]["rows"], found["v6e"]["mean"], found["v6e"]["fitted_mean"]) == (1, "3.0%", "1.0%")
    assert (found["all TPUs"]["rows"], found["all TPUs"]["mean"], found["all TPUs"]["largest"]) == (2, "4.0%", "5.0%")
    assert (found["all"]["mean"], found["all"]["fitted_rows"]) == ("5.7%", 1)
