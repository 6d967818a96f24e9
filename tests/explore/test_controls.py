"""The controls beside the editor, what they write, what may be completed, and the fixes that a button applies."""

import pytest

from gspmd_lm import config as configs
from gspmd_lm.config import core_yaml
from gspmd_lm.config.paths import find_file
from gspmd_lm.errors import InputError
from gspmd_lm.explore import controls, fixes, rows
from gspmd_lm.hardware import target as targets
from gspmd_lm.program.supported import Pass, layer_problems, pipeline_problems
from gspmd_lm.sharding import rules_file
from gspmd_lm.sharding.problems import Problem
from gspmd_lm.sharding.rules import MESH_AXES

V5P = targets.parse("v5p:4x4x4")


@pytest.fixture
def text():
    return find_file("fsdp_tp", "rules").read_text()


def test_each_control_has_a_value_and_a_meaning(text):
    listed = {one["name"]: one for one in controls.list_controls(text, V5P)}
    assert listed["mesh.tensor"]["value"] == 4 and 64 in listed["mesh.tensor"]["choices"]
    assert listed["remat"]["value"] == "block" and listed["attention.tpu"]["value"] == "automatic"
    assert all(one["meaning"] for one in listed.values())
    assert controls.list_controls("mesh: [", V5P) == controls.list_controls("- 8", V5P) == []


def test_a_size_that_changes_takes_another_one_along_where_sizes_filled_the_devices(text):
    assert "mesh: {fsdp: -1, tensor: 8}" in controls.set_control(text, V5P, "mesh.tensor", 8)
    filled = text.replace("fsdp: -1", "fsdp: 16")
    assert "mesh: {fsdp: 8, tensor: 8}" in controls.set_control(filled, V5P, "mesh.tensor", 8)
    wrong = text.replace("fsdp: -1", "fsdp: 5")  # it did not fill them, so nothing else is changed
    assert "mesh: {fsdp: 5, tensor: 8}" in controls.set_control(wrong, V5P, "mesh.tensor", 8)
    assert "mesh: {fsdp: 8, tensor: 4, context: 2}" in controls.set_control(filled, V5P, "mesh.context", 2)
    assert controls.set_control("# empty\n", V5P, "mesh.data", 2) == "# empty\nmesh: {data: 2}\n"


def test_a_kernel_is_chosen_and_left_to_the_platform_again(text):
    chosen = controls.set_control(text, V5P, "attention.tpu", "xla")
    assert chosen == text + "attention: {tpu: xla}\n"
    assert controls.set_control(text, V5P, "attention.tpu", "automatic") == text
    assert "xla" not in controls.set_control(chosen, V5P, "attention.tpu", "automatic")


@pytest.mark.parametrize(
    ("name", "value"),
    [("mesh.tensr", 8), ("remat", "all"), ("mesh.tensor", "8"), ("mesh.tensor", True), ("rules", {}), (None, 1)],
)
def test_a_control_or_value_that_there_is_none_of_is_refused(text, name, value):
    with pytest.raises(InputError):
        controls.set_control(text, V5P, name, value)


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("rules.rules.residual.seq=tensor", {"rules": {"residual.seq": "tensor"}}),
        ("rules.remat=dots", {"remat": "dots"}),
        ("rules.compiler_options.gpu.xla_a=true", {"compiler_options": {"gpu": {"xla_a": True}}}),
    ],
)
def test_what_a_flag_sets_is_written_where_a_rules_file_reads_it(flag, value):
    changed = rows.set_value("mesh: {tensor: 4}\n", *rules_file.read_setting(flag))
    assert core_yaml.load(changed) == {"mesh": {"tensor": 4}} | value


def test_what_is_completed():
    known = controls.completion()
    assert set(known["mesh_axes"]) == {*MESH_AXES}
    assert known["axes"]["embed"] == "model width" and "wq" in known["arrays"]
    assert known["values"]["pipeline.schedule"] == ["gpipe", "1f1b"] and all(known["keys"].values())


TEXT = """\
mesh: {stage: 2, data: 2}
rules:
  batch: data
  seq: null
weights: {layers: stage}
pipeline: {microbatches: 4}
"""


def find_problems(text):
    """The problems of a rules file for the tiny config with experts, as far as nothing has to be traced."""
    weights, activations = {"layers.attention.wq": ("embed", "heads")}, {"q": ("batch", "seq", "heads")}
    found = rules_file.from_text(text, "f")
    if found.problems:
        return found.problems
    config, found = configs.load("tiny", ["model.experts.count=4", "model.experts.per_token=2"]), found.fill(4)
    problems = [*found.problems, *found.unused_rows(weights, activations)]
    return [*problems, *pipeline_problems(config, found), *layer_problems(config, found, "cpu", Pass(config.data.seq))]


@pytest.mark.parametrize(
    ("row", "wrong", "fixed"),
    [
        ("batch: data", "batch: dat", None),
        ("batch: data", "batch: [stage, dat]", "batch: [stage, data]"),
        ("seq: null", "seqq: null", None),
        ("seq: null", "seqq: seqq", "seq: seqq"),  # the word of the key, though the value has it, too
        ("seq: null", "qq.seq: null", "q.seq: null"),
        ("rules:", "ruels:", None),
        ("mesh: {stage", "mesh: {stag", None),
        ("{microbatches", "{microbatch", None),
        ("batch: data", "batch: 'stage, data'", "batch: [stage, data]"),
        ("stage: 2", "stage: 4", None),
        ("  seq: null\n", "  seq: null\n  channels: data\n", None),
        ("batch: data", "batch: data", "batch: [stage, data]"),
        ("seq: null", "expert: [stage, data]", "expert: data"),
        ("microbatches: 4", "microbatches: 3", "microbatches: 2"),
    ],
)
def test_the_first_fix_of_a_problem_is_applied(row, wrong, fixed):
    assert row in TEXT
    text = TEXT.replace(row, wrong)
    edits = [fixes.find_edits(problem, "f") for problem in find_problems(text)]
    wanted = TEXT.replace(row, fixed or row)
    assert core_yaml.load(wanted) in [core_yaml.load(fixes.apply_edits(text, one)) for one in edits if one]


def test_a_fix_does_not_name_a_key_twice():
    with pytest.raises(InputError, match="the key 'batch' appears twice"):
        fixes.apply_edits("rules: {batch: data, batc: data}", [["replace", ["rules", "batc"], "batc", "batch"]])


def test_what_leaves_a_choice_is_not_applied():
    of_no_rules = "--set model.heads=8", "--mesh=my axis=8,data=1", "--set"
    for fix in ("use a or b", "map an axis to data, or drop it", "make data.batch a multiple", *of_no_rules):
        assert fixes.find_edits(Problem("x", "f: rules.mlp: tensor", fix), "f") == []
    both = Problem("x", "f: mesh: {}", "--set rules.pipeline=null --set rules.weights.layers=null, or less")
    assert fixes.find_edits(both, "f") == [["set", ["pipeline"], "null"], ["set", ["weights", "layers"], "null"]]
