"""The dry run of a layout: pictures in a terminal and on a page, and what rules files change in it."""

import re

import pytest

from gspmd_lm import config as configs
from gspmd_lm.errors import InputError
from gspmd_lm.sharding import rules_file
from gspmd_lm.show import dry_run, notebook, terminal
from gspmd_lm.train import state
from tests.reader import Reader

TINY = configs.load("tiny")


@pytest.fixture(scope="module")
def read():
    """A function that makes the dry run of tiny under a rules file."""

    def make(name, *overrides):
        rules = rules_file.load(name, overrides=overrides).fill(8)
        return dry_run.read(TINY, rules, state.arrays_and_warnings(TINY, rules, "cpu")[0])

    return make


def draw(found, *names):
    return terminal.text_of(lambda console: dry_run.draw(found, names, console), 160)


def test_arrays_are_drawn_at_rest_and_in_use(read):
    page = draw(read("fsdp2_tp4"), "wq", "residual")
    assert "mesh: fsdp 2 down, tensor 4 across" in page
    assert "layers.attention.wq  layers 4, embed 128, heads 8, head_dim 16; float32, 32.8 kB a device" in page
    assert "at rest and optimizer state: embed/fsdp heads/tensor, 8 blocks of 4 x 64 x 2 x 16" in page
    assert "in use: heads/tensor, 4 blocks of 4 x 128 x 2 x 16, 2 copies of each" in page
    assert "│  0 4  │  1 5  │  2 6  │  3 7  │" in page
    assert "in use: batch/fsdp seq/tensor, 8 blocks" in page


def test_the_split_of_the_optimizer_is_drawn_and_listed(read):
    """ZeRO-1 differs from data parallelism in it alone."""
    found = read("zero1_8")
    page = draw(found, "w_up")
    assert "at rest and in use: replicated, whole, 8 copies" in page and "optimizer state: embed/data, 8 blocks" in page
    listed = terminal.text_of(lambda console: dry_run.show(found, console), 200)
    (row,) = re.findall(r"^layers.mlp.w_up .*$", listed, re.M)
    assert "optimizer state" in listed and row.split()[-3:] == ["replicated", "embed/data", "786,432"]
    assert "optimizer state" not in terminal.text_of(lambda console: dry_run.show(read("dp8"), console), 200)


def test_a_name_may_be_a_path_or_its_end(read):
    found = read("tp8")
    assert [array.path for array in dry_run.find_arrays(found, ["scale"])] == [
        "final_norm.scale", "layers.attention_norm.scale", "layers.mlp_norm.scale"
    ]  # fmt: skip
    both = dry_run.find_arrays(found, ["layers.attention.wq", "wq"])
    assert [array.path for array in both] == ["layers.attention.wq"]
    with pytest.raises(
        InputError, match=r"--show=residul: no array is named residul \(did you mean residual\?\)\n  fix   one of "
    ):
        dry_run.find_arrays(found, ["q", "residul"])


def test_a_page_has_a_picture_of_each_placement(read):
    found = read("pp2_fsdp2_tp2")
    html = dry_run.page(found, "--dry_run <b>", ["a row does <nothing>"])
    page = Reader(html)
    assert not page.unclosed and "&lt;nothing&gt;" in html and "--dry_run &lt;b&gt;" in html
    drawn = [one["aria-label"] for one in page.elements if one["tag"] == "svg" and one.get("class") == "blocks"]
    wanted = [f"{array.path} {when}: " for array in found.arrays for when, _ in dry_run.placements(array)]
    assert len(drawn) == len(wanted) + 1 and all(any(label.startswith(one) for label in drawn) for one in wanted)
    assert "pipeline: 2 stages" in html and "remat block" in html
    for size in found.bytes_per_device.values():
        assert size > 0
    assert '"optimizer":{"split":' in html


KEYS = {
    "remat": "rules.remat=dots",
    "microbatches": "rules.microbatches=2",
    "interleave": "rules.interleave=2",
    "unroll": "rules.unroll=2",
    "attention": "rules.attention={gpu: xla}",
    "context": "rules.context=ring",
    "compiler_options": "rules.compiler_options={tpu: {a: 1}}",
    "expert_buffer": "rules.expert_buffer=3",
    "dcn": "rules.dcn={data: 2}",
}


@pytest.mark.parametrize("key", KEYS)
def test_what_a_key_changes_is_visible(read, key):
    """In the tables, on the page and in the notebook; a layout that differs in one key reads otherwise."""
    before, after = read("dp8"), read("dp8", KEYS[key])
    for shown in (
        lambda one: terminal.text_of(lambda console: dry_run.show(one, console), 200),
        dry_run.page,
        lambda one: notebook.ShownDryRun(one, []),
        lambda one: draw(one, "wq"),
    ):
        assert shown(before) != shown(after), key


def test_in_a_notebook_it_is_a_text_and_a_page(read):
    found = notebook.ShownDryRun(read("tp8"), ["beware"])
    assert found.startswith("warning: beware\n") and "mesh tensor=8" in found
    assert "aria-label=&amp;quot;" in found._repr_html_() or "layers.attention.wq at rest" in found._repr_html_()
    assert "│  0  │  1  │" in found.draw("wq")
