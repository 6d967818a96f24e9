"""The table of a dry run: as wide as its terminal, and with every key of the rules file."""

import io
import re

import pytest
from rich.console import Console

from gspmd_lm import config as configs
from gspmd_lm.sharding import rules_file
from gspmd_lm.sharding.rules import MESH_AXES
from gspmd_lm.show import arrays as shown
from gspmd_lm.show import dry_run, terminal
from gspmd_lm.train import state

TINY = configs.load("tiny")


@pytest.fixture(scope="module")
def printed():
    """A function that prints the arrays of tiny under rules; its weights are traced once."""
    kept = []

    def show(rules, console):
        if not kept:
            kept.append(state.arrays_and_warnings(TINY, rules, "cpu")[0])
        dry_run.show(dry_run.read(TINY, rules, kept[0]), console)

    return show


def words(page):
    """The words of a page, with shapes as a narrow one writes them, and without the module of all layers."""
    return {*re.sub(r"(\d) x (?=\d)", r"\1x", page).replace("layers.", "").split()}


@pytest.mark.parametrize("width", [80, 100, 120, 160])
@pytest.mark.parametrize("layout", ["fsdp2_tp4", "tp8"])
def test_no_word_is_broken_and_no_array_is_missing(printed, layout, width):
    rules = rules_file.load(layout)
    wide, page = (terminal.text_of(lambda console: printed(rules, console), columns) for columns in (200, width))
    assert max(map(len, page.splitlines())) <= width
    assert words(page.replace(shown.AXES_LEFT_OUT, "")) <= words(wide)
    assert {word for word in words(wide) if re.search(r"[/.,\d]", word)} <= words(page)
    assert all(("in use" in one) == (layout == "fsdp2_tp4") for one in (wide, page))
    headed = re.findall(r"^(weights|activations) +logical axes ", page, re.M)
    assert (shown.AXES_LEFT_OUT in page) == (len(headed) < 2)


def test_a_mesh_axis_has_one_colour_and_what_is_whole_is_dim(printed):
    out = io.StringIO()
    printed(rules_file.load("fsdp2_tp4"), Console(file=out, width=80, color_system="standard", force_terminal=True))
    colours = {"tensor": "\x1b[35m", "fsdp": "\x1b[36m"}
    for axis, colour in colours.items():
        assert {before for before in re.findall(rf"(\x1b\[[\d;]*m)\w+[/=]{axis}", out.getvalue())} == {colour}
    assert "\x1b[2mreplicated" in out.getvalue()
    assert len(set(shown.COLOURS.values())) == len(MESH_AXES)


KEYS = {
    "remat": ({"save": ["q", "k"]}, "remat {save: [q, k], offload: []}"),
    "microbatches": (4, "4 microbatches of 4 rows"),
    "pipeline": ({"microbatches": 4}, "pipeline: 2 stages, each of which computes in 4 of 5 turns; {microbatches: 4}"),
    "interleave": (2, "interleave 2"),
    "expert_buffer": (3, "expert_buffer 3.0"),
    "unroll": ("all", "unroll all"),
    "attention": ({"tpu": "splash"}, "attention {tpu: splash}"),
    "context": ("ring", "context ring"),
    "compiler_options": ({"tpu": {"a": True}}, "compiler_options {tpu: {a: true}}"),
    "dcn": ({"stage": 2}, "dcn {stage: 2}"),
}


@pytest.mark.parametrize("key", sorted({*rules_file.SECTIONS} - {"mesh", *rules_file.TABLES}))
def test_every_key_of_a_rules_file_is_named(printed, key):
    value, said = KEYS[key]
    plain = {"mesh": {"stage": 2}, "weights": {"layers": "stage"}}
    rules = rules_file.from_dict({**plain, key: value}, "here")
    lines = list(shown.keys(rules, 16))
    assert not rules.problems and lines == [said]
    assert list(shown.keys(rules_file.from_dict(plain, "here"), 16)) == []
