"""The words and numbers of reports, one or several, wherever they are shown."""

import dataclasses
import io
import itertools
import re

import pytest
from rich.console import Console

from gspmd_lm.foresight.bounds import checked_bounds
from gspmd_lm.show import comparison, report, terminal
from gspmd_lm.show.document import Findings, Notes, Pair, Table, Text
from gspmd_lm.units import human_bytes, human_count, human_seconds, plural
from tests.foresight import sample
from tests.reader import Reader

SEVERAL = [sample.LLAMA, sample.REFUSED, sample.FSDP]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 s"), (14.92, "14.9 s"), (123.4, "123 s"), (0.2104, "210 ms"), (0.00142, "1.42 ms"), (3.1e-4, "310 us")],
)
def test_seconds(value, text):
    assert human_seconds(value) == text


def test_counts():
    assert [human_count(x) for x in (2048, 4_194_304, 8_030_261_248)] == ["2,048", "4.19 M", "8.03 B"]


def test_fit():
    assert report.fit(sample.LLAMA.memory) == "fits, 58.9 GB (57.7%) free"
    assert report.fit(sample.REFUSED.memory) == "does not fit, 213.5 GB over (13.63x the limit)"
    assert report.fit(sample.CPU.memory) == "no limit on this target"
    below = dataclasses.replace(sample.LLAMA.memory, fits=False)
    assert report.fit(below) == "does not fit: the compiler refused it"


def test_where_the_time_goes_adds_up():
    found = report.time_parts(sample.LLAMA)
    assert sum(part.amount for part in found) == pytest.approx(sample.PREDICTION.step_time_s)
    assert [part.label for part in found if part.kind == "wait"] == ["waiting for tensor", "waiting for fsdp"]
    assert report.time_parts(sample.CPU) == []


def test_a_program_that_sends_less_than_its_floor_has_none():
    def checked(least):
        report_of = dataclasses.replace(
            sample.LLAMA, floor=dataclasses.replace(sample.LLAMA.floor, communication_bytes=least)
        )
        return checked_bounds(report_of.floor, report_of.above_floor)

    sent = sample.LLAMA.sent_bytes
    assert not checked(sent).estimated_because and not checked(sent // 2).estimated_because
    assert checked(2 * sent).estimated_because == "the compiled program sends 0.50 times as much"


def test_what_has_no_price_stands_in_the_headline():
    (words,) = [words for name, words in report.summary(sample.LLAMA) if name == "time"]
    assert words.startswith("at least 14.9 s a step (nothing is known of how long this takes: custom-call Mystery at")
    known = dataclasses.replace(sample.LLAMA.prediction, unpriced={}, unpriced_share=0.0)
    (words,) = [
        words for name, words in report.summary(dataclasses.replace(sample.LLAMA, prediction=known)) if name == "time"
    ]
    assert words.startswith("14.9 s a step, MFU 52.2%")


def test_communication_above_the_floor():
    assert sample.LLAMA.above_floor == pytest.approx(sample.LLAMA.sent_bytes / 420e9)
    assert sample.REFUSED.above_floor is None
    alone = dataclasses.replace(sample.LLAMA.floor, communication_bytes=0)
    assert dataclasses.replace(sample.LLAMA, floor=alone).above_floor is None


def narrowed(one, dtype, floor_dtype):
    """`one` with half of what it sends in `dtype`, and a floor that counts `floor_dtype`."""
    first, second = (dataclasses.replace(sample.COLLECTIVES[0], dtype=each) for each in (dtype, "f32"))
    least = 10**11 if floor_dtype == "float32" else 5 * 10**10
    floor = dataclasses.replace(one.floor, dtype=floor_dtype, communication_bytes=least, float32_bytes=10**11)
    return dataclasses.replace(one, collectives=(first, second), floor=floor)


def test_what_is_sent_in_another_width_than_the_floor_counts_is_told():
    assert report.above_least(sample.LLAMA) == "1.12 times the least that this layout can send"
    assert sample.LLAMA.other_width == ""
    floor = dataclasses.replace(sample.LLAMA.floor, communication_bytes=sample.LLAMA.sent_bytes)
    assert report.above_least(dataclasses.replace(sample.LLAMA, floor=floor)) == "the least that this layout can send"
    narrow = narrowed(sample.LLAMA, "bf16", "float32")
    words = report.above_least(narrow)
    assert words == ("3.09 times the least that this layout can send, both as float32, since 50% travels as bf16")
    assert dict(report.summary(narrow))["network"].endswith(words)
    assert narrowed(sample.LLAMA, "bf16", "bfloat16").other_width == ""  # tables and norms are float32
    widened = narrowed(sample.CPU, "f32", "bfloat16")
    assert widened.other_width == "100% in f32" and "both as float32" in report.above_least(widened)
    assert widened.above_floor == pytest.approx(widened.sent_bytes / 10**11)
    assert narrowed(sample.CPU, "f32", "float32").other_width == ""
    assert report.above_least(sample.REFUSED) == ""


def test_floors_are_compared_in_one_width():
    found = rows(sample.FSDP, narrowed(sample.LLAMA, "bf16", "float32"))
    assert texts(found["times the least"])[1] == "3.09x" and best(found["times the least"]) == [0]
    assert texts(found["of it narrower or wider"]) == ["", "50% in bf16"]
    assert "of it narrower or wider" not in rows(sample.FSDP, sample.LLAMA)


def test_the_errors_of_predictions_are_told_once():
    other = dataclasses.replace(sample.FSDP, prediction=dataclasses.replace(sample.PREDICTION, error="another"))
    found = comparison.comparison([sample.LLAMA, sample.REFUSED, sample.FSDP, other])
    told = [block.text for block in found.blocks if isinstance(block, Text) and block.text.startswith("error")]
    assert told == [f"error of predicted times: {error}" for error in (sample.PREDICTION.error, "another")]


def test_ranked():
    given = [sample.REFUSED, sample.CPU, sample.LLAMA, sample.FSDP]
    assert comparison.rank(given) == [sample.FSDP, sample.LLAMA, sample.CPU, sample.REFUSED]
    quick = dataclasses.replace(sample.LLAMA, memory=dataclasses.replace(sample.LLAMA.memory, fits=False))
    assert comparison.rank([quick, sample.CPU]) == [sample.CPU, quick]  # what does not fit takes no time at all


def rows(*reports):
    """Label -> how it is known, and the cells of the reports, for each row of the comparison."""
    return {label: (known, cells) for label, known, *cells in comparison.figures(reports).rows}


def texts(row):
    return [cell.text for cell in row[1]]


def best(row):
    """The numbers of the reports whose cells are marked."""
    marked = [i for i, cell in enumerate(row[1]) if cell.style == "best"]
    assert marked == [i for i, text in enumerate(texts(row)) if text.endswith("*")]
    return marked


def test_best_of_the_comparison():
    found = rows(sample.FSDP, sample.LLAMA)
    for label in ("step time", "tokens/s per device", "MFU", "sent", "warnings"):
        assert best(found[label]) == [0], label
    assert best(found["peak memory"]) == best(found["times the least"]) == [1]
    assert not best(found["mesh"]) and not best(found["fits"])
    assert "target" not in found and "config" not in found  # the same for both


def test_what_does_not_fit_is_never_best():
    over = dataclasses.replace(sample.FSDP, memory=dataclasses.replace(sample.FSDP.memory, fits=False))
    slower = dataclasses.replace(sample.PREDICTION, step_time_s=20.0)
    found = rows(over, sample.LLAMA, dataclasses.replace(sample.LLAMA, prediction=slower))
    assert best(found["step time"]) == [1] and texts(found["fits"]) == ["NO", "yes", "yes"]
    assert not best(found["MFU"])  # equal


def test_the_comparison_says_how_it_knows():
    known = {label: known for label, (known, _) in rows(sample.FSDP, sample.REFUSED).items()}
    assert known["peak memory"] == known["sent"] == "compiled" and known["times the least"] == "counted"
    assert known["step time"] == known["MFU"] == known["exposed communication"] == "predicted"
    assert known["target"] == ""


def test_a_summary_says_memory_network_and_time():
    said, told = dict(report.summary(sample.LLAMA)), sample.PREDICTION
    assert [*said] == ["memory", "network", "time"]
    memory = sample.LLAMA.memory
    assert said["memory"].startswith(f"{human_bytes(memory.peak_bytes)} of {human_bytes(memory.limit_bytes)} a device")
    assert ", fits, " in said["memory"]
    assert said["network"] == f"472.2 GB a device, {report.above_least(sample.LLAMA)}"
    exposed_s = told.exposed_communication_s
    assert said["time"].startswith(f"at least {human_seconds(told.step_time_s)} a step (nothing is known of how long")
    assert f"; waits {human_seconds(exposed_s)} ({exposed_s / told.step_time_s:.1%}) for communication" in said["time"]
    refused = dict(report.summary(sample.REFUSED))
    assert ", does not fit" in refused["memory"] and refused["network"].startswith("not known")
    assert dict(report.summary(sample.CPU))["time"] == f"not predicted: {sample.CPU.no_prediction}"
    alone = dataclasses.replace(sample.CPU, collectives=())
    assert dict(report.summary(alone))["network"] == "nothing is sent between devices"


def test_how_layouts_differ():
    def slower(share, **parts):
        told = dataclasses.replace(sample.PREDICTION, step_time_s=sample.PREDICTION.step_time_s * (1 + share), **parts)
        return dataclasses.replace(sample.LLAMA, rules="rules/other.yaml", prediction=told)

    def said(*reports):
        return dict(comparison.summary(reports))

    step_s, peak = sample.PREDICTION.step_time_s, human_bytes(sample.LLAMA.memory.peak_bytes)
    other = slower(0.1, matmul_s=sample.PREDICTION.matmul_s + 0.1 * step_s)
    assert said(sample.LLAMA, other) == {
        "memory": f"fsdp_tp needs as little as other, {peak} a device",
        "network": "fsdp_tp sends as little as other, 472.2 GB a device",
        "time": f"fsdp_tp is the fastest, {human_seconds(step_s)} a step; other, the next, takes 10.0% longer "
        f"(matmuls +{human_seconds(0.1 * step_s)})",
    }
    assert "take the same" in said(sample.LLAMA, slower(0.005))["time"]
    fits = said(sample.LLAMA, sample.REFUSED)
    assert fits["memory"] == f"fsdp_tp needs {peak} a device; 1 of 2 layouts do not fit"
    assert said(sample.REFUSED, sample.REFUSED)["memory"].startswith("none of the layouts fits; ")
    untimed = dataclasses.replace(sample.CPU, rules="rules/more.yaml", collectives=sample.CPU.collectives * 2)
    assert said(sample.CPU, untimed)["time"] == f"not predicted: {sample.CPU.no_prediction}"
    assert said(sample.CPU, untimed)["network"].startswith("fsdp2_tp4 sends the least, ")


def all_texts(section):
    """All that a section says wherever it is shown, but for the rows of collectives, which a page shows in groups.

    A page shows facts in large, which are figures of the summary.
    """
    left = list(section.blocks)
    while left:
        block = left.pop()
        if isinstance(block, Text):
            yield block.text
        elif isinstance(block, Notes):
            yield from itertools.chain(*block.notes)
        elif isinstance(block, Findings):
            yield from itertools.chain(*block.findings)
        elif isinstance(block, Pair):
            left += block.blocks
        elif isinstance(block, Table) and not block.groups:
            for column, *cells in zip(block.columns, *block.rows, strict=True):
                yield from (column.name, *(getattr(cell, "text", cell) for cell in cells if column.on_terminal))


@pytest.mark.parametrize("reports", [[sample.LLAMA], [sample.CPU], [sample.REFUSED], [sample.SLICES], SEVERAL])
def test_the_terminal_and_the_page_say_the_same(reports):
    console = Console(file=io.StringIO(), width=400, highlight=False)
    sections = [comparison.comparison(comparison.rank(reports))] if len(reports) > 1 else report.sections(*reports)
    terminal.show(console, sections)
    printed = re.sub(r"\s+", " ", console.file.getvalue())
    page = Reader(comparison.page(reports)).find("main")[0]["text"]
    found = [text for section in sections for text in (section.title, section.known, *all_texts(section))]
    assert len(found) > 20
    for text in found:
        assert text in page or text == "Step time", text  # without a time it is the name of a fact alone
        assert text in printed or text == "step time", text  # which a heading does not say twice


def test_without_times_layouts_are_ranked_by_what_they_send():
    """Rows of dashes, a star for the best of figures that read alike, and a ranking by times that are not there."""
    first, *rest = sample.CPU.collectives
    more = dataclasses.replace(first, bytes_per_device_per_step=first.bytes_per_device_per_step + 1)
    other = dataclasses.replace(sample.CPU, rules="rules/other.yaml", collectives=(more, *rest))
    page = terminal.text_of(lambda console: comparison.show([other, sample.CPU], console), 120)
    assert comparison.rank([other, sample.CPU]) == [sample.CPU, other]
    assert "ranked by bytes sent, then memory" in page and "step time" not in page and "MFU" not in page
    assert page.count(sample.CPU.no_prediction) == 1
    table = comparison.figures([sample.CPU, other])
    assert not any(cell.text.endswith("*") for row in table.rows for cell in row if not isinstance(cell, str))


def test_counts_have_a_plural():
    assert [plural(count, "device") for count in (0, 1, 2, 2048)] == [
        "0 devices",
        "1 device",
        "2 devices",
        "2,048 devices",
    ]
    assert report.hardware(1, "") == "1 simulated device" and report.hardware(8, "") == "8 simulated devices"


@pytest.mark.parametrize(("step_s", "said"), [(14.9, "1.91x the larger"), (77.9, "10 times the larger, so the")])
def test_a_step_far_above_its_floor_says_why(step_s, said):
    predicted = dataclasses.replace(sample.LLAMA.prediction, step_time_s=step_s)
    page = terminal.text_of(
        lambda console: comparison.show([dataclasses.replace(sample.LLAMA, prediction=predicted)], console), 160
    )
    assert f": the step takes {said}" in page
