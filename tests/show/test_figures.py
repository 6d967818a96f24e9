"""The words and numbers that the terminal and the page share."""

import dataclasses

import pytest
import sample

from gspmd_lm.foresight.table import split
from gspmd_lm.show import figures
from gspmd_lm.units import human_bytes, human_count, human_seconds


@pytest.mark.parametrize(
    ("value", "said"),
    [(0, "0 s"), (14.92, "14.9 s"), (123.4, "123 s"), (0.2104, "210 ms"), (0.00142, "1.42 ms"), (3.1e-4, "310 us")],
)
def test_seconds(value, said):
    assert human_seconds(value) == said


def test_counts():
    assert [human_count(x) for x in (2048, 4_194_304, 8_030_261_248)] == ["2,048", "4.19 M", "8.03 B"]


def test_fit():
    assert figures.fit(sample.LLAMA.memory) == "fits, 58.9 GB (57.7%) free"
    assert figures.fit(sample.REFUSED.memory) == "does not fit, 213.5 GB over (13.63x the limit)"
    assert figures.fit(sample.CPU.memory) == "no limit on this target"
    below = dataclasses.replace(sample.LLAMA.memory, fits=False)
    assert figures.fit(below) == "does not fit: the compiler refused it"


def test_where_the_time_goes_adds_up():
    found = figures.breakdown(sample.PREDICTION)
    assert sum(seconds for _, _, seconds in found) == pytest.approx(sample.PREDICTION.step_time_s)
    assert [label for kind, label, _ in found if kind == "wait"] == ["exposed, tensor", "exposed, fsdp"]


def test_communication_above_the_floor():
    assert sample.LLAMA.above_floor == pytest.approx(sample.LLAMA.sent_bytes / 420e9)
    assert sample.REFUSED.above_floor is None
    alone = dataclasses.replace(sample.LLAMA.floor, communication_bytes=0)
    assert dataclasses.replace(sample.LLAMA, floor=alone).above_floor is None


def narrowed(report, dtype, floor_dtype):
    """`report` with half of what it sends in `dtype`, and a floor that counts `floor_dtype`."""
    first, second = (dataclasses.replace(sample.COLLECTIVES[0], dtype=one) for one in (dtype, "f32"))
    least = 10**11 if floor_dtype == "float32" else 5 * 10**10
    floor = dataclasses.replace(report.floor, dtype=floor_dtype, communication_bytes=least, float32_bytes=10**11)
    return dataclasses.replace(report, collectives=(first, second), floor=floor)


def test_what_is_sent_in_another_width_than_the_floor_counts_is_told():
    assert figures.of_floor(sample.LLAMA) == "1.12x the floor" and sample.LLAMA.other_width == ""
    narrow = narrowed(sample.LLAMA, "bf16", "float32")
    said = figures.of_floor(narrow)
    assert said == "3.09x the floor, both as float32: 50% in bf16"
    assert figures.communication(narrow).endswith(said)
    assert narrowed(sample.LLAMA, "bf16", "bfloat16").other_width == ""  # tables and norms are float32
    widened = narrowed(sample.CPU, "f32", "bfloat16")
    assert widened.other_width == "100% in f32" and "both as float32" in figures.of_floor(widened)
    assert widened.above_floor == pytest.approx(widened.sent_bytes / 10**11)
    assert narrowed(sample.CPU, "f32", "float32").other_width == ""
    assert figures.of_floor(sample.REFUSED) == ""


def test_floors_are_compared_in_one_width():
    found = rows(sample.FSDP, narrowed(sample.LLAMA, "bf16", "float32"))["sent / floor"]
    assert found.cells[1] == "3.09x, 50% in bf16" and "bf16" not in found.cells[0] and found.best == {0}


def test_the_errors_of_predictions_are_told_once():
    other = dataclasses.replace(sample.FSDP, prediction=dataclasses.replace(sample.PREDICTION, error="another"))
    assert figures.errors([sample.LLAMA, sample.REFUSED, sample.FSDP, other]) == [sample.PREDICTION.error, "another"]


def test_split():
    spec = (), ("data", "fsdp"), ("tensor",)
    assert split(("layers", "embed", "mlp"), spec) == "embed/data+fsdp mlp/tensor"
    assert split(("embed",), ((),)) == "replicated"


def test_ranked():
    given = [sample.REFUSED, sample.CPU, sample.LLAMA, sample.FSDP]
    assert figures.ranked(given) == [sample.FSDP, sample.LLAMA, sample.CPU, sample.REFUSED]
    quick = dataclasses.replace(sample.LLAMA, memory=dataclasses.replace(sample.LLAMA.memory, fits=False))
    assert figures.ranked([quick, sample.CPU]) == [sample.CPU, quick]  # what does not fit takes no time at all


def rows(*reports):
    return {row.label: row for row in figures.compared(reports)}


def test_best_of_the_comparison():
    found = rows(sample.FSDP, sample.LLAMA)
    best = {label: sorted(row.best) for label, row in found.items()}
    assert best["step time"] == best["tokens/s/device"] == best["MFU"] == best["sent"] == best["warnings"] == [0]
    assert best["peak memory"] == best["sent / floor"] == [1]
    assert not best["mesh"] and not best["fits"]
    assert "target" not in found and "config" not in found  # the same for both


def test_what_does_not_fit_is_never_best():
    over = dataclasses.replace(sample.FSDP, memory=dataclasses.replace(sample.FSDP.memory, fits=False))
    slower = dataclasses.replace(sample.PREDICTION, step_time_s=20.0)
    found = rows(over, sample.LLAMA, dataclasses.replace(sample.LLAMA, prediction=slower))
    assert found["step time"].best == {1} and found["fits"].cells == ("NO", "yes", "yes")
    assert not found["MFU"].best  # equal


def test_the_comparison_says_how_it_knows():
    known = {label: row.known for label, row in rows(sample.FSDP, sample.REFUSED).items()}
    assert known["peak memory"] == known["sent"] == "compiled" and known["sent / floor"] == "counted"
    assert known["step time"] == known["tokens/s/device"] == known["MFU"] == known["exposed comm."] == "predicted"
    assert known["target"] == ""


def test_a_verdict_says_fit_time_and_traffic():
    said = figures.verdict(sample.LLAMA)
    told = sample.PREDICTION
    assert said.startswith("fsdp_tp fits, ")
    assert f"A step takes {human_seconds(told.step_time_s)}: matmuls take " in said
    assert f"waits {told.exposed_communication_s / told.step_time_s:.1%} of it" in said
    assert said.endswith(f"Each device sends {figures.communication(sample.LLAMA)}.")
    assert "does not fit" in figures.verdict(sample.REFUSED) and "sends" not in figures.verdict(sample.REFUSED)
    assert figures.verdict(sample.CPU).startswith(
        f"fsdp2_tp4 needs {human_bytes(sample.CPU.memory.peak_bytes)} per device."
    )


def test_the_winner_and_why():
    def slower(share, **parts):
        told = dataclasses.replace(sample.PREDICTION, step_time_s=sample.PREDICTION.step_time_s * (1 + share), **parts)
        return dataclasses.replace(sample.LLAMA, rules="rules/other.yaml", prediction=told)

    more_s = sample.PREDICTION.matmul_s + 0.1 * sample.PREDICTION.step_time_s
    other = slower(0.1, matmul_s=more_s)
    assert figures.winner([sample.LLAMA, other]) == (
        "fsdp_tp wins: a step of other, the next, takes 10.0% longer "
        f"(matmuls +{human_seconds(0.1 * sample.PREDICTION.step_time_s)})."
    )
    assert "same time" in figures.winner([sample.LLAMA, slower(0.005)])
    assert figures.winner([sample.LLAMA, sample.REFUSED]) == "fsdp_tp wins: no other layout fits."
    assert figures.winner([sample.REFUSED, sample.REFUSED]).startswith("None of the 2 layouts fits; ")
    untimed = dataclasses.replace(sample.CPU, rules="rules/more.yaml", collectives=sample.CPU.collectives * 2)
    assert figures.winner([sample.CPU, untimed]).startswith("No times are predicted here. fsdp2_tp4 sends least")
