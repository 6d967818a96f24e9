"""One layer, forward and backward: its collectives are those that the trace must send, each with its row."""

import collections
from pathlib import Path

import pytest

from gspmd_lm import api
from gspmd_lm.explore.figures import Figures
from gspmd_lm.explore.inputs import Inputs
from gspmd_lm.explore.layer import TRIFLE_BYTES
from gspmd_lm.explore.subject import Subject
from gspmd_lm.foresight.propagation import read_train

ROOT = Path(__file__).parents[2]

TEXT = """\
mesh: {fsdp: 2, tensor: 4}
rules:
  batch: fsdp
  vocab: tensor
  heads: tensor
  kv_heads: tensor
  mlp: tensor
weights:
  embed: fsdp
remat: block
"""


@pytest.fixture(scope="module")
def figures():
    return Figures(Subject("tiny", api.load_config))


def layer_of(figures, text, target="cpu:8"):
    return figures.trace(Inputs("tiny", (), target, None, None, text, "f.yaml"))["shown"]["layer"]


@pytest.mark.long
def test_collectives_are_those_of_the_trace(figures, built):
    config = api.load_config("tiny")
    shown = layer_of(figures, TEXT)["collectives"]
    reading = read_train(built(config, api.rules_file.from_text(TEXT, "f.yaml")))
    wanted = collections.Counter(
        (one.kind, one.mesh_axes, one.bytes)
        for one in reading.transfers
        if one.phase != "optimizer" and one.bytes >= TRIFLE_BYTES
    )
    assert collections.Counter((one["kind"], one["axis"], one["bytes"]) for one in shown) == wanted


@pytest.mark.long
def test_a_split_sequence_turns_two_sums_into_a_gather_and_a_scatter_each(figures):
    """What a student sees who types one line."""

    def kinds(text):
        layer = layer_of(figures, text)
        blocks = [one["name"] for one in layer["blocks"]]
        return [
            (one["kind"], blocks[one["after"]])
            for one in layer["collectives"]
            if one["phase"] == "forward" and one["axis"] == "tensor" and blocks[one["after"]].startswith("layers.")
        ]

    assert kinds(TEXT) == [("all-reduce", "layers.attention"), ("all-reduce", "layers.mlp")]
    split = TEXT.replace("weights:", "  residual.seq: tensor\nweights:")
    assert kinds(split) == [
        ("all-gather", "layers.attention_norm"),
        ("reduce-scatter", "layers.attention"),
        ("all-gather", "layers.mlp_norm"),
        ("reduce-scatter", "layers.mlp"),
    ]


@pytest.mark.long
def test_each_collective_has_its_row_its_line_and_a_sentence(figures):
    layer = layer_of(figures, TEXT, "v5p:2x2x2")
    gathered = [one for one in layer["collectives"] if one["phase"] == "forward" and one["array"]]
    named = {one["array"]: one for one in gathered if one["kind"] == "all-gather"}
    assert {f"layers.attention.{name}" for name in ("wq", "wk", "wv", "wo")} <= named.keys()
    wq = named["layers.attention.wq"]
    assert (wq["row"], wq["line"], wq["axis"]) == ("weights: embed: fsdp", 9, "fsdp")
    assert wq["because"] == "layers.attention.wq: gathered over fsdp because of `weights: embed: fsdp`"
    assert 0 <= wq["exposed_s"] <= wq["seconds"] and wq["text"]
    assert layer["blocks"][wq["after"] + 1] | {"ops": 0} == {"name": "layers.attention", "phase": "forward", "ops": 0}
    assert all(one["row"] for one in layer["collectives"])
    summed = next(one for one in layer["collectives"] if one["kind"] == "all-reduce" and one["phase"] == "forward"
                  and one["array"] == "layers.mlp.w_down")  # fmt: skip
    assert summed["row"] == "rules: mlp: tensor"
    # The line is that of the model which multiplies, not that of the package's functions which gather.
    file, line = wq["source"].split(":")
    assert file == "gspmd_lm/model/attention.py"
    assert "project(" in (ROOT / file).read_text().splitlines()[int(line) - 1]


@pytest.mark.long
def test_blocks_have_the_times_of_the_estimate(figures):
    layer = layer_of(figures, TEXT, "v5p:2x2x2")
    names = [one["name"] for one in layer["blocks"]]
    assert names == names[::-1] and layer["blocks"][0]["phase"] == "forward" and len(names) % 2 == 0
    ops = {op["name"]: op["seconds"] for one in layer["blocks"][: len(names) // 2] for op in one["ops"]}
    assert {"wq", "w_down", "attention"} <= ops.keys() and all(seconds > 0 for seconds in ops.values())
    assert layer_of(figures, TEXT)["blocks"][0]["ops"] == []  # simulated devices have no times
