"""The terminal page: golden texts, what fits a screen, and that nothing from a file is taken for markup."""

import dataclasses
import io
import re

import pytest
from recorded import same_as_recorded
from rich.console import Console

from gspmd_lm.hardware.capacity import Assumptions
from gspmd_lm.show import comparison
from gspmd_lm.show.report import first_lines
from tests.foresight import sample

REPORTS = {"fits": [sample.LLAMA], "refused": [sample.REFUSED], "cpu": [sample.CPU],
           "side by side": [sample.LLAMA, sample.REFUSED, sample.FSDP]}  # fmt: skip


def shown(reports, width=80, colours=None):
    out = io.StringIO()
    comparison.show(reports, Console(file=out, width=width, color_system=colours, force_terminal=colours is not None))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("title", REPORTS)
def test_pages(title, width):
    same_as_recorded("explain.txt", f"{title}, {width} columns", shown(REPORTS[title], width))


def test_a_step_of_decode_says_which_share_of_the_memory_bound_it_reaches():
    decode = dataclasses.replace(sample.LLAMA, phase="decode")
    assert decode.prediction
    share = decode.floor.memory_s / decode.prediction.step_time_s
    said = f"{share:.0%} of it is reached: weights and cache are read once in"
    assert re.search(rf"memory bound +{said} \d", shown([decode], 120))
    assert "memory bound" not in shown([sample.LLAMA], 120)


@pytest.mark.parametrize("title", REPORTS)
def test_the_first_lines_of_a_run(title):
    same_as_recorded("explain.txt", f"{title}, first lines", "\n".join(map(first_lines, REPORTS[title])))


@pytest.mark.parametrize("width", [80, 100, 120, 200])
@pytest.mark.parametrize("layout", [sample.LLAMA, sample.FSDP, sample.REFUSED, sample.CPU, sample.SLICES])
def test_a_layout_fits_a_screen(layout, width):
    """Where nothing is known of its interruptions."""
    job = layout.job and dataclasses.replace(layout.job, assumed=Assumptions(), on_spot=None)
    lines = shown([dataclasses.replace(layout, job=job)], width).splitlines()
    assert len(lines) < 50 and max(map(len, lines)) <= width


@pytest.mark.parametrize("layout", [sample.LLAMA, sample.CPU, sample.SLICES])
def test_no_column_is_cut_off(layout):
    page = shown([layout]).splitlines()
    first = next(i for i, line in enumerate(page) if line.endswith(" because of"))
    assert page[first].split() == ["kind", "axes", "times", "sent", "overlap", "phase", "op", "because", "of"]
    rows = [line for line in page[first + 1 :] if re.search(r" [kMG]?B ", line) and not line.startswith("  and ")]
    assert rows
    for line in rows:
        assert re.search(r" [kMG]?B (yes|no) +(fwd|bwd|remat|optim) +\S+", line), line


def test_a_narrow_console_is_not_overrun():
    assert max(map(len, shown([sample.LLAMA], 50).splitlines())) <= 50
    assert max(map(len, shown(REPORTS["side by side"], 50).splitlines())) <= 50


@pytest.mark.parametrize("width", [80, 160])
def test_collectives_that_are_not_shown_are_counted(width):
    """What the rows and the last line say adds up to all that is sent, within the rounding of each."""
    page = shown([sample.LLAMA], width)
    rows = re.findall(r"^  (?:windowed|all-|reduce-).*? ([\d.]+) ([GMk]?B) ", page, re.M)
    rest, unit = re.findall(r"and \d+ more, ([\d.]+) ([GMk]?B)", page)[0]
    scale = {"GB": 1e9, "MB": 1e6, "kB": 1e3, "B": 1}
    total = sum(float(size) * scale[unit] for size, unit in [*rows, (rest, unit)])
    assert len(rows) >= 3 and total == pytest.approx(sample.LLAMA.sent_bytes, abs=0.05e9 * (len(rows) + 1))


def test_several_are_ranked_and_the_best_marked():
    page = shown(REPORTS["side by side"])
    assert ["fsdp", "fsdp_tp", "tp8"] in [line.split() for line in page.splitlines()]
    assert "13.1 s*" in page and "14.9 s*" not in page


def test_more_layouts_than_columns():
    page = shown([sample.LLAMA, sample.FSDP] * 4, 80)
    heads = [line.split() for line in page.splitlines() if line.split() and set(line.split()) <= {"fsdp", "fsdp_tp"}]
    assert len(heads) > 1 and sum(map(len, heads)) == 8


def test_text_from_files_is_no_markup():
    page = re.sub(r"\s+", "", shown([sample.SLICES], 120))
    assert re.sub(r"\s+", "", sample.HOSTILE) in page


def test_colours_say_nothing_that_the_text_does_not():
    coloured = shown([sample.REFUSED], colours="truecolor")
    assert re.sub(r"\x1b\[[\d;]*m", "", coloured).count("does not fit") == shown([sample.REFUSED]).count("does not fit")
    assert "\x1b[" in coloured


@pytest.mark.parametrize("layout", [sample.LLAMA, sample.REFUSED])
def test_bars_are_as_long_in_colours_as_without(layout):
    """rich fills up a bar in a dark colour, so that on a white terminal each looked full."""
    coloured = re.sub(r"\x1b\[[\d;]*m", "", shown([layout], colours="truecolor"))
    plain = shown([layout])
    assert [line.rstrip() for line in coloured.splitlines()] == plain.splitlines() and "━" in plain


def test_first_lines_are_aligned():
    for found in (sample.LLAMA, sample.CPU, sample.REFUSED):
        lines = first_lines(found).splitlines()
        assert all(re.match(r"(memory|network|time|warnings| ) +\S", line) and len(line) <= 80 for line in lines)
        (column,) = {re.match(r"(\w*) +", line).end() for line in lines}
        assert column in (9, 10)  # of the longest name and two blanks
        assert [line.split()[0] for line in lines if line[0] != " "][:3] == ["memory", "network", "time"]
