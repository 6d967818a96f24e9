"""compare --rows: what each row changes, in a second and without a compiler."""

import json

import pytest

from gspmd_lm.foresight import compile

TARGET = "--target=v5p:2x2x2"


@pytest.mark.parametrize("verb", ["compare", "explain"])
def test_rows_are_compared_without_a_compiler(run, tmp_path, monkeypatch, verb):
    monkeypatch.setattr(compile, "programs", None)
    html, values = tmp_path / "rows.html", tmp_path / "rows.json"
    code, out, _ = run(verb, "dp8", "zero1_8", "--rows", TARGET, f"--html={html}", f"--json={values}")
    assert code == 0 and "tiny on v5p:2x2x2: from dp8 to zero1_8" in out
    assert "28 all-reduces (6.0 MB) become 28 reduce-scatters (3.0 MB)" in out
    assert "28 reduce-scatters (3.0 MB)" in html.read_text()
    assert [row["key"] for row in json.loads(values.read_text())["changes"][0]["rows"]] == ["optimizer.embed"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("compare", "dp8"), "--rows: dp8: the rows of two layouts are compared\n  fix   compare --rows dp8 fsdp8 "),
        (("compare", "dp8", "tp8", "fsdp8"), "--rows: dp8, tp8, fsdp8: the rows of two layouts"),
        (("explain", "dp8", "tp8", "--phase=decode"), "--rows: --phase=decode: the rows of two layouts of a train"),
        (("compare", "dp8", "tp8", "--phase=decode"), "fix   drop --phase=decode\n"),
        (("explain", "dp8", "tp8", "--phase=train", "--export=x"), "fix   drop --export=x\n"),
        (("compare", "dp8", "tp8", "--price=v5p=3"), "--price: no job is predicted here\n  fix   drop --price"),
        (("explain", "--program=train.py:step"), "--rows: --program=train.py:step: "),
        (("compare", "dp8", "fsdp8", "--set=rules.mesh.data=3"), "mesh: "),
    ],
)
def test_what_has_no_rows_to_compare_is_refused(run, arguments, message):
    code, out, err = run(*arguments, "--rows", TARGET)
    assert (code, out) == (2, "") and message in err and "fix" in err
