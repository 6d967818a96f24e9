"""A model and a step of one's own: what they have is shown, and what they have not is refused in a sentence."""

import pytest

from gspmd_lm import api
from gspmd_lm.explore import opening
from gspmd_lm.explore.figures import Figures
from gspmd_lm.explore.subject import Subject


@pytest.mark.long
def test_a_model_of_a_file_is_edited_as_a_config_is(open_bench):
    with open_bench("examples/rules/fsdp.yaml", "v5p:2x2x2", program="examples/mixer.py:TASK") as bench:
        shown = bench.finished()
        assert shown["problems"] == [] and shown["inputs"]["program"] == "examples/mixer.py:TASK"
        assert shown["headline"]["figures"][0]["value"] > 0 and shown["layer"]["collectives"]
        assert "pixel" in bench.http.get("/complete").json()["axes"]
        assert shown["inputs"]["batch"] > 0 and shown["command"].startswith("gspmd_lm.train(TASK, ")
        assert bench.post("edit", batch=8).status_code == bench.post("edit", config="tiny").status_code == 400
        wrong = bench.edit(text=shown["inputs"]["text"] + "context: rings\n")
        assert wrong["problems"][0]["line"] and wrong["headline"] == shown["headline"]


@pytest.mark.slow
def test_a_jitted_step_has_all_views_but_the_editor(open_bench):
    with open_bench(None, "cpu:8", program="examples/any_step.py:step") as bench:
        shown = bench.finished()
        assert shown["problems"] == [] and not shown["inputs"]["editable"] and shown["controls"] == []
        assert shown["not_known"] == [
            "times, MFU and price: nothing tells them of a step of one's own before it is compiled"
        ]
        assert shown["arrays"] and shown["mesh"]["axes"] and shown["layer"]["collectives"]
        for path in ("control", "search", "load", "save"):
            assert bench.post(path, name="remat", value="block", path="rules/a.yaml").status_code == 400
        assert bench.post("edit", text="").status_code == 400
        bench.post("compile")
        compiled = bench.until(lambda state: not state["compile"]["running"])
        assert compiled["compile"]["error"] is None
        assert compiled["headline"]["figures"][0]["compiled"]["value"] > 0


@pytest.mark.parametrize(
    ("rules", "program", "said"),
    [
        (None, "examples/mixer.py:TASK", "a model needs rules"),
        ("tp8", "examples/any_step.py:step", "a step of one's own brings its shardings"),
        ("tp8", "examples/nothing.py:TASK", "there is no file examples/nothing.py"),
        ("tp8", "examples/mixer.py:TASKS", "has no TASKS (did you mean TASK?)"),
    ],
)
def test_what_does_not_go_together_is_refused(rules, program, said):
    bench = opening.make_workbench(api.load_config, rules, "cpu:8", program=program)
    figures = Figures(Subject(program, api.load_config, program=program))
    (problem,) = figures.estimate(bench.inputs)["problems"]
    assert said in problem["message"] and problem["fix"]
