"""The documents as a site, which builds without warnings, and the pages about Python, which name what there is."""

import ast
import html
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import gspmd_lm
from gspmd_lm.infer.loaded import Model
from gspmd_lm.sharding import axes

ROOT = Path(__file__).parent.parent
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "docs/python.md").read_text(), re.DOTALL)
TYPES = {
    *("Explanation", "Comparison", "ComparedRows", "ShownDryRun"),
    *("FoundPlan", "Trained", "Model", "TaskModel"),
}  # what functions give back


def test_the_reference_has_every_name_once():
    listed = re.findall(r"^::: gspmd_lm\.(?:[a-z_]+\.)*(\w+)$", (ROOT / "docs/api.md").read_text(), re.M)
    assert sorted(listed) == sorted({*gspmd_lm.__all__} | TYPES)


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.splitlines()[0][:30])
def test_the_examples_are_short_and_call_what_there_is(block):
    """tests/test_api.py and the notebooks run these functions; here each call fits the function's arguments."""
    assert len(block.splitlines()) <= 10
    for node in ast.walk(ast.parse(block)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = ast.unparse(node.func.value)
            if owner not in ("g", "model"):
                continue
            called = getattr({"g": gspmd_lm, "model": Model}[owner], node.func.attr)
            given = [None] * (len(node.args) + (owner == "model"))
            inspect.signature(called).bind(*given, **{word.arg: None for word in node.keywords})


@pytest.mark.long
def test_the_site_builds_without_a_warning(tmp_path):
    pytest.importorskip("mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "WARNING -" not in done.stderr, done.stderr
    reference = (tmp_path / "api/index.html").read_text()
    assert 'id="gspmd_lm.explain"' in reference and "hardware that need not be here" in reference
    page = (tmp_path / "rules_reference/index.html").read_text()
    rows = re.findall(r"<td><code>(\w+)</code></td>\n<td>([^<]*)</td>\n</tr>", page)
    assert {name: html.unescape(meaning) for name, meaning in rows}.items() >= axes.ARRAYS.items()
    pages = {"config"} | {page.stem for page in (ROOT / "docs").glob("*.md")}
    assert pages <= {page.parent.name for page in tmp_path.glob("*/index.html")}
    assert "What a layout costs, before there is a chip" in (tmp_path / "index.html").read_text()
    assert (tmp_path / "repository/jobs/tpu_vm.sh").read_text() == (ROOT / "jobs/tpu_vm.sh").read_text()
