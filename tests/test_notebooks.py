"""The notebooks of examples/ run from their first cell to their last, and show what they promise."""

from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")

EXAMPLES = Path(__file__).parent.parent / "examples"
SHOWN = {  # notebook -> how many cells show a page, and what stands in the others
    "layouts": (3, ("MB at the peak", "found by: gspmd_lm.plan('tiny', 'v5p:2x2x2')")),
    "train_and_generate": (
        2,
        ("bytes per device", "step 40", "tensor=8 on 8", "step 60", "<i>def </i>", "<i>class </i>"),
    ),
}


def test_every_notebook_is_run():
    assert {path.stem for path in EXAMPLES.glob("*.ipynb")} == {*SHOWN}


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of the client, not of what it runs
@pytest.mark.parametrize("name", SHOWN)
def test_a_notebook(name, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLES.parent))
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)  # as a reader's shell, which has none
    notebook = nbformat.read(EXAMPLES / f"{name}.ipynb", as_version=4)
    assert all(not cell.get("outputs") for cell in notebook.cells), "it is kept without outputs"
    nbclient.NotebookClient(notebook, timeout=900, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    said = "".join(output.get("text", "") + "".join(output.get("data", {}).values()) for output in outputs)
    pages, words = SHOWN[name]
    assert said.count("<iframe srcdoc=") == pages
    for word in words:
        assert word in said, word
