"""Changes of a rules file's text: what is asked, and nothing else; and the lines of keys."""

import difflib

import hypothesis
import pytest
from hypothesis import strategies

from gspmd_lm.config import core_yaml
from gspmd_lm.errors import InputError
from gspmd_lm.explore import rows

TEXT = """\
# The idea.
mesh: {fsdp: -1, tensor: 4} # inline
rules:
  batch: fsdp   # rows
  # a comment of its own
  residual.seq: tensor # why
weights: # none yet
remat:
  save: [q, k]
  # last
"""


def changed_lines(before, after):
    lines = difflib.ndiff(before.splitlines(), after.splitlines())
    return sorted(line for line in lines if line[0] in "+-")


@pytest.mark.parametrize(
    ("path", "value", "lines"),
    [
        (("mesh", "tensor"), 8, ["- mesh: {fsdp: -1, tensor: 4} # inline", "+ mesh: {fsdp: -1, tensor: 8} # inline"]),
        (("mesh", "data"), 2, ["- mesh: {fsdp: -1, tensor: 4} # inline",
                               "+ mesh: {fsdp: -1, tensor: 4, data: 2} # inline"]),
        (("rules", "batch"), ["data", "fsdp"], ["-   batch: fsdp   # rows", "+   batch: [data, fsdp]   # rows"]),
        (("rules", "residual.seq"), None, ["-   residual.seq: tensor # why", "+   residual.seq: null # why"]),
        (("rules", "mlp"), "tensor", ["+   mlp: tensor"]),
        (("weights", "embed"), "fsdp", ["+   embed: fsdp"]),
        (("optimizer", "embed"), "fsdp", ["+ optimizer:", "+   embed: fsdp"]),
        (("microbatches",), 2, ["+ microbatches: 2"]),
        (("attention", "tpu"), "xla", ["+ attention: {tpu: xla}"]),
        (("remat",), "block", ["- remat:", "-   save: [q, k]", "+ remat: block"]),
        (("remat", "offload"), ["residual"], ["+   offload: [residual]"]),
    ],
)  # fmt: skip
def test_a_value_is_set_and_every_other_byte_stays(path, value, lines):
    changed = rows.set_value(TEXT, path, value)
    assert changed_lines(TEXT, changed) == sorted(lines)
    within = core_yaml.load(changed)
    for part in path:
        within = within[part]
    assert within == value


@pytest.mark.parametrize(
    ("path", "lines"),
    [
        (("mesh", "fsdp"), ["- mesh: {fsdp: -1, tensor: 4} # inline", "+ mesh: {tensor: 4} # inline"]),
        (("mesh", "tensor"), ["- mesh: {fsdp: -1, tensor: 4} # inline", "+ mesh: {fsdp: -1} # inline"]),
        (("rules", "residual.seq"), ["-   residual.seq: tensor # why"]),
        (("remat",), ["- remat:", "-   save: [q, k]"]),
    ],
)
def test_a_key_is_removed_with_its_line(path, lines):
    assert changed_lines(TEXT, rows.remove(TEXT, path)) == sorted(lines)


@pytest.mark.parametrize(
    "text", ["", "# nothing\n", "mesh: {}\n", "mesh:\n", "remat: block", "mesh: {data}", "mesh: {data }\nremat: x"]
)
def test_a_mesh_axis_is_added_to_any_text(text):
    assert core_yaml.load(rows.set_value(text, ("mesh", "data"), 2))["mesh"] == {"data": 2}


def test_what_has_no_room_for_a_key_is_refused():
    with pytest.raises(InputError, match=r"mesh.data: cannot be changed where it stands"):
        rows.set_value("mesh: 8\n", ("mesh", "data"), 2)
    with pytest.raises(InputError, match=r"mesh.data: cannot be changed where it stands"):
        rows.set_value("{mesh}\n", ("mesh", "data"), 2)
    with pytest.raises(InputError, match="no such key"):
        rows.remove(TEXT, ("rules", "mlp"))


def test_lines_of_keys_and_of_the_rows_that_problems_name():
    known = rows.lines(TEXT)
    assert known["mesh.tensor"] == 2 and known["rules.residual.seq"] == 6 and known["remat.save"] == 9
    assert rows.line_of("rules/a.yaml: rules.residual.seq: tensor", "rules/a.yaml", known) == 6
    assert rows.line_of("rules/a.yaml: remat.offload: [q]", "rules/a.yaml", known) == 8
    assert rows.line_of("rules/a.yaml: dcn: {}", "rules/a.yaml", known) is None


words = strategies.sampled_from(["data", "fsdp", "tensor", "a b", "x: y", "'", "#", "null", "8", "[a]"])
values = strategies.one_of(words, strategies.integers(-1, 512), strategies.none(), strategies.lists(words, max_size=3))


@pytest.mark.long
@hypothesis.settings(max_examples=150, deadline=None)
@hypothesis.given(
    values,
    strategies.sampled_from([("mesh", "tensor"), ("rules", "batch"), ("rules", "heads"), ("remat",), ("unroll",)]),
)
def test_any_value_comes_back_and_is_undone_by_the_one_before(value, path):
    changed = rows.set_value(TEXT, path, value)
    within = core_yaml.load(changed)
    for part in path:
        within = within[part]
    assert within == value
    if path in rows.places(TEXT) and path != ("remat",):
        before = core_yaml.load(TEXT)[path[0]][path[1]]
        assert rows.set_value(changed, path, before) == TEXT
