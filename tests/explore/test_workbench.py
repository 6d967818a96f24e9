"""What a workbench tells of a layout: the numbers of plan, of --dry_run and of explain; and what becomes of edits."""

import dataclasses
import itertools
import json
from pathlib import Path

import pytest

from gspmd_lm import api
from gspmd_lm.explore.display import Display
from gspmd_lm.explore.figures import Figures
from gspmd_lm.explore.inputs import Inputs
from gspmd_lm.explore.subject import Subject
from gspmd_lm.explore.workbench import Workbench
from gspmd_lm.foresight import explain, table
from gspmd_lm.hardware import target as targets
from gspmd_lm.plan.estimate import Estimator
from gspmd_lm.sharding import rules_file
from gspmd_lm.show import dry_run, terminal
from gspmd_lm.train import decoder, state
from tests.quick import QUICK

ROOT = Path(__file__).parents[2]
TP8 = """\
# Megatron.
mesh: {tensor: 8} # all of them
rules:
  vocab: tensor
  heads: tensor
  kv_heads: tensor
  mlp: tensor # the widest
"""


def value_of(shown, name):
    return next(one["value"] for one in shown["headline"]["figures"] if one["name"] == name)


@pytest.fixture(autouse=True)
def begun(tiny):
    tiny.edit(text=TP8, target="cpu:8", config="tiny", set=[], batch=None, seq=None)
    tiny.post("pin", clear=True)


@pytest.mark.parametrize(
    ("target", "sets"), [pytest.param("cpu:8", [], marks=pytest.mark.long), ("v5p:2x2x2", ["model.layers=3"])]
)
def test_an_estimate_is_that_of_plan(tiny, target, sets):
    shown = tiny.edit(target=target, set=sets)
    config, place = api.load_config("tiny", sets), targets.parse(target)
    rules = explain.settle_layout(decoder.task(config), api.load_rules("tp8"), place)
    estimate = Estimator(config, place).estimate(rules)
    assert value_of(shown, "sent_bytes") == estimate.sent_bytes
    memory = shown["headline"]["memory"]
    assert memory["peak_bytes"] == estimate.peak_bytes
    assert sum(part["bytes"] for part in memory["parts"]) == pytest.approx(estimate.peak_bytes, abs=5)
    waits = {one["axis"]: one["seconds"] for one in shown["headline"]["exposed"]}
    assert waits == pytest.approx(dict(estimate.exposed_by_axis))
    if place.chip:
        assert value_of(shown, "step_time_s") == estimate.step_time_s
        assert shown["not_known"] == []
    else:
        assert shown["not_known"][0].startswith("times, MFU and price: simulated devices have no speed")


def test_arrays_are_those_of_the_dry_run(tiny):
    listed = tiny.finished()["arrays"]
    config, rules = api.load_config("tiny"), api.load_rules("tp8")
    arrays = state.arrays(config)
    recorder = state.record_arrays(config, arrays, 1, rules)
    wanted = {
        one.path: (list(one.shape), one.at_rest and [*map(list, one.at_rest)], [*map(list, one.in_use)],
                   one.bytes_per_device)
        for one in table.rows(config, rules, arrays, recorder.arrays, recorder.used)
    }  # fmt: skip
    named = [one for one in listed if one["group"] != "optimizer"]
    keys = "shape", "at_rest", "in_use", "bytes_per_device"
    assert {one["path"]: tuple(one[key] for key in keys) for one in named} == wanted
    printed = terminal.text_of(lambda console: dry_run.show(dry_run.read(config, rules, arrays), console), 240)
    for group in ("weights", "optimizer"):
        size = sum(one["bytes_per_device"] for one in listed if one["group"] == group)
        assert f"  {group:10} {size:>20,}" in printed
    wq = next(one for one in listed if one["path"] == "layers.attention.wq")
    assert {"dim": 2, "line": 5, "row": "rules: heads: tensor", "table": "weights"} in wq["rows"]


def test_the_last_good_layout_stays_shown_and_its_problem_is_told_as_explain_does(tiny):
    before = tiny.finished()
    after = tiny.edit(text=TP8.replace("mlp: tensor", "mlp: tenser"))
    assert after["shown_version"] == before["version"] < after["version"]
    assert after["headline"] == before["headline"] and after["arrays"] == before["arrays"]
    (problem,) = after["problems"]
    assert problem["line"] == 7 and problem["message"].startswith("rules.mlp: the mesh has no axis tenser")
    with pytest.raises(api.InputError) as refused:
        api.compare("tiny", api.rules_file.from_text(after["inputs"]["text"], "rules/tp8.yaml"), "cpu:8")
    assert str(refused.value) == f"{problem['message']}\n  fix   {problem['fix']}"
    assert tiny.post("fix", problem=0).json() == {"text": TP8}
    assert tiny.post("fix", problem=7).status_code == tiny.post("fix", problem="0").status_code == 400


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"target": "v5p:9x9"}, "v5p has no topology 9x9"),
        ({"config": "tiiny"}, "tiiny: no such file"),
        ({"set": ["model.layers=zero"]}, "model.layers"),
        ({"text": ""}, "this one is empty"),
        ({"text": "dcn: {tensor: 2}\n"}, "a rules file needs a mesh"),
        ({"text": "mesh: {data: 10000000000}\n"}, "its sizes multiply to more than 262,144 devices"),
        ({"text": "a: &a [1]\nb: *a\n"}, "anchors and aliases are not supported"),
        ({"text": "[" * 50_000}, "levels"),
        ({"text": TP8 + "microbatches: 7\n"}, "does not divide into microbatches=7"),
    ],
)
def test_what_is_wrong_is_told_and_nothing_else_changes(tiny, values, said):
    before = tiny.finished()
    after = tiny.edit(**values)
    assert said in after["problems"][0]["message"]
    assert after["headline"] == before["headline"]


def test_a_control_writes_into_the_text_and_a_pin_compares(tiny):
    shown = tiny.edit(text=TP8.replace("{tensor: 8}", "{data: 1, tensor: 8}") + "optimizer:\n  batch: data\n")
    tiny.edit(text=TP8.replace("{tensor: 8}", "{data: 1, tensor: 8}"))
    assert tiny.post("pin").status_code == 200
    text = tiny.post("control", name="mesh.tensor", value=4).json()["text"]
    assert text == TP8.replace("{tensor: 8}", "{data: 2, tensor: 4}")
    shown = tiny.edit(text=text)
    figure = next(one for one in shown["headline"]["figures"] if one["name"] == "sent_bytes")
    assert figure["pinned"]["change"] == figure["value"] / figure["pinned"]["value"] - 1 < 0
    assert shown["pinned"]["text"] != text and shown["headline"]["memory"]["pinned"]["change"]
    tiny.post("pin", clear=True)
    assert tiny.state()["headline"]["figures"][0]["pinned"] is None


@pytest.mark.long
def test_compiled_figures_are_those_of_explain_and_an_edit_stops_a_compilation(tiny):
    assert tiny.post("compile").status_code == 200
    assert tiny.state()["compile"]["running"]
    shown = tiny.edit(text=TP8 + "remat: block\n")
    assert not shown["compile"]["running"] and shown["compile"]["progress"] == "stopped"
    quick = TP8 + f"compiler_options: {{cpu: {json.dumps(QUICK)}}}\n"
    tiny.edit(text=quick)
    tiny.post("compile")
    shown = tiny.until(lambda state: not state["compile"]["running"])
    assert shown["compile"]["error"] is None and shown["compile"]["for_version"] == shown["version"]
    report = api.explain("tiny", api.rules_file.from_text(quick, "rules/tp8.yaml"), "cpu:8")
    sent = next(one for one in shown["headline"]["figures"] if one["name"] == "sent_bytes")
    assert sent["compiled"]["value"] == report.sent_bytes
    assert shown["headline"]["memory"]["compiled"]["peak_bytes"] == report.memory.peak_bytes
    assert {one["path"]: one["bytes_per_device"] for one in shown["compile"]["result"]["arrays"]} == {
        one.path: one.bytes_per_device for one in report.arrays
    }
    assert "tiny under tp8" in tiny.http.get("/report").text
    assert tiny.edit(text=quick + "remat: block\n")["headline"]["memory"]["compiled"] is None


@pytest.mark.long
def test_a_search_gives_points_as_they_come_and_any_of_them_is_loaded(tiny):
    tiny.post("search")
    shown = tiny.until(lambda state: state["search"]["points"] and not state["search"]["running"])
    points = shown["search"]["points"]
    assert shown["search"]["error"] is None and shown["search"]["best"] in {one["rank"] for one in points}
    front = [one for one in points if one["front"]]
    assert front and all(b["peak_bytes"] < a["peak_bytes"] for a, b in itertools.pairwise(front))
    point = front[0]
    shown = tiny.edit(text=tiny.post("load", rank=point["rank"]).json()["text"])
    assert shown["shown_version"] == shown["version"]
    assert value_of(shown, "sent_bytes") == point["sent_bytes"]
    assert shown["headline"]["memory"]["peak_bytes"] == point["peak_bytes"]
    assert tiny.post("load", rank=-1).status_code == 400


async def start_nothing(workbench):
    """Begins to work out no figures: for what is written, none are needed."""


def test_only_the_given_file_and_those_of_the_folder_of_rules_are_written(open_bench, tmp_path, monkeypatch):
    monkeypatch.setattr(Workbench, "start", start_nothing)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rules").mkdir()
    (tmp_path / "mine.yaml").write_text(TP8)
    (tmp_path / "rules/other.yaml").write_text("mesh: {data: 1}\n")
    (tmp_path / "rules/link.yaml").symlink_to(tmp_path / "elsewhere.yaml")
    with open_bench("mine.yaml", "cpu:8", "tiny") as bench:
        bench.post("edit", text=TP8 + "remat: block\n")
        assert bench.post("save", path="mine.yaml").json() == {"path": "mine.yaml"}
        assert (tmp_path / "mine.yaml").read_text() == TP8 + "remat: block\n"
        assert bench.post("save", path="rules/new.yaml").status_code == 200
        assert bench.state()["inputs"]["path"] == "rules/new.yaml"
        assert bench.post("save", path="rules/other.yaml").status_code == 409
        assert bench.post("save", path="rules/other.yaml", overwrite=True).status_code == 200
        outside = "elsewhere.yaml", "../x.yaml", "rules/../y.yaml", "rules/a/b.yaml", "/tmp/x.yaml", "rules/link.yaml"
        for path in (*outside, "rules/new.txt", "", 7, "rules/" + "x" * 300 + ".yaml", "rules/\0.yaml"):
            assert bench.post("save", path=path).status_code == 400, path
        (tmp_path / "rules/new.yaml").write_text("# of somebody else\n")
        assert bench.post("save", path="rules/new.yaml").status_code == 409
        assert bench.post("save", path="mine.yaml").status_code == 200  # though others were written since
    (tmp_path / "mine.yml").write_text(TP8)
    with open_bench("mine.yml", "cpu:8", "tiny") as bench:
        assert bench.post("save", path="mine.yml").status_code == 200
    with open_bench(rules_file.from_text(TP8, "tensor 8"), "cpu:8", "tiny") as bench:  # of a program, and in no file
        assert bench.post("save", path="tensor 8").status_code == 400
    written = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.yaml") if not path.is_symlink()}
    assert written == {"mine.yaml", "rules/new.yaml", "rules/other.yaml"}


def test_a_shared_page_stands_alone(tiny):
    page = tiny.http.get("/share").text.replace("<wbr>", "")
    assert "layers.attention.wq" in page and "# Megatron." in page and "tiny under tp8 for cpu:8" in page
    assert "https://" not in page and " src=" not in page


def test_a_layer_that_is_traced_again_is_taken():
    display = Display()
    for version, told in ((3, None), (3, ["- rules.heads: tensor"]), (2, None)):
        display.take_layer({"version": version, "shown": {"layer": {"collectives": []}, "changes": told}})
    assert display.changes == ["- rules.heads: tensor"] and display.layer_version == 3


def test_a_row_that_differs_from_the_pinned_layout_says_what_it_changes():
    figures = Figures(Subject("tiny", api.load_config))
    pinned = Inputs("tiny", (), "cpu:8", None, None, TP8, "rules/tp8.yaml")
    now = dataclasses.replace(pinned, text=f"{TP8}  residual.seq: tensor\n")
    (change,) = figures.trace(now, pinned)["shown"]["changes"]
    assert change["row"] == "+ rules.residual.seq: tensor"
    assert any("all-reduces" in line and "reduce-scatters" in line for line in change["lines"])
    assert figures.trace(now)["shown"]["changes"] is None  # nothing is pinned
    elsewhere = dataclasses.replace(pinned, target="v5p:2x2x2")
    assert figures.trace(now, elsewhere)["shown"]["changes"] is None


def test_the_figures_of_the_benchmark_are_those_that_it_kept():
    (row,) = json.loads((ROOT / "benchmarks/results/explore.json").read_text())["rows"]
    page = (ROOT / "benchmarks/README.md").read_text()
    for key in ("edits_within", "edits_within_cpu_s"):
        assert f"| {row[key]} of {row['edits']} |" in page
    assert all(f"| {row[key]} s |" in page for key in ("first_page_s", "first_figures_s"))
    assert f"| {row['median_cpu_s']} |" in page
