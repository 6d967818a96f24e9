"""What a terminal and a page say of the rows in which two layouts differ."""

import dataclasses

import pytest

from gspmd_lm import config as configs
from gspmd_lm.hardware import target as targets
from gspmd_lm.plan.row_changes import CollectiveChange, compare_rows
from gspmd_lm.sharding import rules_file
from gspmd_lm.show import comparison, row_changes, terminal
from tests.foresight import sample
from tests.reader import Reader


def compare(before, after, *overrides, target="v5p:2x2x2"):
    rules = [rules_file.load(before), rules_file.load(after, overrides=overrides)]
    return compare_rows(configs.load("tiny"), *rules, targets.parse(target))


@pytest.fixture(scope="module")
def split_stream():
    return compare("tp8", "tp8", "rules.rules.residual.seq=tensor")


def lines(compared, width=200):
    printed = terminal.text_of(lambda console: row_changes.show(compared, console), width)
    return [line.strip() for line in printed.splitlines()]


def test_a_terminal_says_what_a_row_changes(split_stream):
    printed = lines(split_stream)
    at = printed.index("+ rules.residual.seq: tensor")
    assert printed[at + 1] == (
        "sends   the layers' activations over tensor: 16 all-reduces (29.4 MB) become 16 reduce-scatters (14.7 MB) and "
        "16 all-gathers (14.7 MB)"
    )
    assert "arrays  residual: replicated -> seq/tensor (1.0 MB -> 131.1 kB)" in printed
    before, after = split_stream.estimates
    share = after.peak_bytes / before.peak_bytes - 1
    assert any(line.startswith("memory  33.2 MB") and f"({share:+.1%})" in line for line in printed)
    assert any(line.startswith("time ") and " less than before (-" in line for line in printed)


def test_simulated_devices_have_no_times():
    printed = lines(compare("dp8", "zero1_8", target="cpu:8"))
    assert not any(line.startswith("time ") or "step time" in line for line in printed)


def test_arrays_that_change_alike_stand_together():
    (words,) = [line for line in lines(compare("dp8", "zero1_8")) if line.startswith("arrays")]
    assert "in optimizer state, replicated -> embed/data" in words and " wq, wv," in words
    assert "layers.mlp_norm.scale" in words, "where last names are not unique, the path stands there"


@pytest.mark.parametrize(
    ("counts", "words"),
    [
        ((0, 8, 0, 1000), "the layers' keys and values"),
        ((8, 0, 1000, 0), "without 8 all-gathers (1.0 kB)"),
        ((8, 6, 1000, 750), "without 2 of 8 all-gathers (250 B)"),
        ((6, 8, 750, 1000), "2 all-gathers (250 B) more"),
        ((8, 8, 500, 1000), "over fsdp: 8 all-gathers of 1.0 kB in place of 500 B"),
        ((0, 1, 0, 1000), "1 all-gather (1.0 kB) more"),
    ],
)
def test_collectives_in_words(split_stream, counts, words):
    purpose = "keys" if "keys" in words else "weights"
    change = CollectiveChange("all-gather", "fsdp", purpose, True, *counts)
    changed = dataclasses.replace(split_stream.changes[0], collectives=(change,))
    said = " ".join(lines(dataclasses.replace(split_stream, changes=(changed,))))
    assert words.replace("the layers' keys", "keys") in said


def test_equal_layouts_are_said_to_be_equal(split_stream):
    assert "Both layouts have the same rows." in lines(dataclasses.replace(split_stream, changes=()))


def test_a_page_has_each_change_as_a_section(split_stream):
    html = row_changes.page(split_stream, "compare --rows a <b>")
    reader = Reader(html)
    assert "compare --rows a &lt;b&gt;" in html
    assert "become 16 reduce-scatters" in html and not reader.unclosed and not reader.open
    titles = [one["text"].strip() for one in reader.elements if one["tag"] == "h2"]
    assert titles[0].startswith("Row by row") and "+ rules.residual.seq: tensor" in titles


def test_a_comparison_of_two_layouts_ends_with_their_rows(split_stream):
    """With more rows than a reader takes in at once, a terminal names the flag that lists them."""
    reports = [sample.LLAMA, sample.FSDP]
    printed = terminal.text_of(lambda console: comparison.show(reports, console, split_stream), 120)
    assert "Side by side" in printed and "16 all-reduces (29.4 MB) become" in printed
    assert f"Compiled: {sample.LLAMA.layout} needs" in printed
    many = dataclasses.replace(split_stream, changes=split_stream.changes * (comparison.FEW + 1))
    short = terminal.text_of(lambda console: comparison.show(reports, console, many), 120)
    assert "16 all-reduces" not in short and "compare --rows" in short
    assert comparison.page(reports, "", many).count("16 reduce-scatters (14.7 MB)") == comparison.FEW + 1
