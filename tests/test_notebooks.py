"""The notebooks of examples/ run from their first cell to their last, and show what they promise.

They are stored with what they print. After a change to one of them, `python -m tests.test_notebooks` runs them again.
"""

import hashlib
import os
import re
import tempfile
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")

EXAMPLES = Path(__file__).parent.parent / "examples"
SHOWN = {  # notebook -> how many cells show a page, what cells print, and what else they show
    "layouts": (3, ("MB at the peak", "found by: gspmd_lm.plan('tiny', 'v5p:2x2x2')"), ()),
    "train_and_generate": (
        2,
        ("bytes per device", "step 40", "tensor=8 on 8", "step 60"),
        ("<i>def </i>", "<i>class </i>"),
    ),
}


def sources(notebook):
    """The sha256 of all cells, by which stored outputs are known to be theirs."""
    return hashlib.sha256("\0".join(cell.source for cell in notebook.cells).encode()).hexdigest()


def execute(notebook, folder):
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    nbclient.NotebookClient(notebook, timeout=900, resources={"metadata": {"path": str(folder)}}).execute()


def tidy(cell, places):
    """Leaves the texts that a cell shows, without the places of this machine: other pages show no frames."""
    cell.metadata.pop("execution", None)
    shown = []
    for output in cell.get("outputs", ()):
        texts = output.get("data", output)
        if "<iframe" in texts.get("text/html", ""):
            del texts["text/html"]
        for key in {"text", "text/plain", "text/html"} & texts.keys():
            for place, short in places.items():
                texts[key] = texts[key].replace(place, short)
            texts[key] = re.sub(rf"{tempfile.gettempdir()}/\w+", "run", texts[key])
        if output.get("name") == "stdout" and shown and shown[-1].get("name") == "stdout":
            shown[-1].text += output.text
        elif output.get("name") != "stderr":
            shown.append(output)
    if cell.cell_type == "code":
        cell.outputs = shown


def store():
    """Runs each notebook and writes it with its outputs."""
    os.environ["PYTHONPATH"] = str(EXAMPLES.parent)
    os.environ.pop("JAX_PLATFORMS", None)
    for name in SHOWN:
        notebook = nbformat.read(EXAMPLES / f"{name}.ipynb", as_version=4)
        with tempfile.TemporaryDirectory() as folder:
            execute(notebook, folder)
            places = {f"{folder}/": "", f"{EXAMPLES.parent}/": "", str(Path.home()): "~"}
        for cell in notebook.cells:
            tidy(cell, places)
        notebook.metadata = {"kernelspec": notebook.metadata["kernelspec"], "sources": sources(notebook)}
        nbformat.write(notebook, EXAMPLES / f"{name}.ipynb")


def test_every_notebook_is_run():
    assert {path.stem for path in EXAMPLES.glob("*.ipynb")} == {*SHOWN}


@pytest.mark.parametrize("name", SHOWN)
def test_a_notebook_is_stored_with_its_outputs(name):
    path = EXAMPLES / f"{name}.ipynb"
    notebook = nbformat.read(path, as_version=4)
    assert notebook.metadata.get("sources") == sources(notebook), "python -m tests.test_notebooks"
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in cells) and sum(bool(cell.outputs) for cell in cells) >= 3
    assert path.stat().st_size < 100_000
    assert not re.search(r"(?<![\w~.:/])/(home|root|tmp|work)/", path.read_text()), "a place of one machine"


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of the client, not of what it runs
@pytest.mark.parametrize("name", SHOWN)
def test_a_notebook(name, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLES.parent))
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)  # as a reader's shell, which has none
    notebook = nbformat.read(EXAMPLES / f"{name}.ipynb", as_version=4)
    execute(notebook, tmp_path)
    cells = [cell.get("outputs", []) for cell in notebook.cells]
    printed = "".join(output.get("text", "") for outputs in cells for output in outputs)
    shown = [[output["data"] for output in outputs if "data" in output] for outputs in cells]
    pages, in_print, in_data = SHOWN[name]
    assert all(len(displays) <= 1 for displays in shown), "a cell shows one thing, once"
    data = [one for displays in shown for one in displays]
    assert sum("<iframe srcdoc=" in one.get("text/html", "") for one in data) == pages
    assert all(len(one["text/plain"]) > 0 for one in data), "the text beside a page is that of str()"
    assert all(word in printed for word in in_print), printed
    assert all(any(word in one.get("text/html", "") for one in data) for word in in_data), data


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of the client, not of what it runs
def test_texts_within_a_kernel(tmp_path, monkeypatch):
    """A cell prints text once and displays nothing, though a kernel has rich display what it is given."""
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLES.parent))
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    source = """
import gspmd_lm as g
config = g.load_config("tiny", ["model.layers=1"])
found = g.explain(config, "fsdp2_tp4", "cpu:8")
print([len(text) > 500 for text in (str(found), repr(found), g.show(found), g.dry_run(config, "tp8"))])
print(g.dry_run(config, "fsdp2_tp4"))"""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source)])
    nbclient.NotebookClient(notebook, timeout=900, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [one for one in notebook.cells[0].outputs if one.get("name") != "stderr"]
    assert [one.output_type for one in outputs] == ["stream"], outputs
    assert outputs[0].text.startswith("[True, True, True, True]\nweights ")
    assert max(map(len, outputs[0].text.splitlines())) <= 240 and outputs[0].text.count("bytes per device") == 3


CELLS = (
    "import jax, jax.numpy as jnp, optax\n"
    "import flax.linen as nn\n"
    "import gspmd_lm\n"
    "SCALE = jnp.ones(8)\n"
    "class Model(nn.Module):\n"
    "    @nn.compact\n"
    "    def __call__(self, x):\n"
    "        return nn.Dense(8)(x) * SCALE",
    "def init(key):\n    return Model().init(key, jnp.zeros((1, 16)))['params']\n"
    "x = gspmd_lm.Input((8, 16), 'float32', 'x: batch width')\n"
    "task = gspmd_lm.Task(name='mine', inputs={'x': x}, init=init, optimizer=lambda named: optax.sgd(0.1),\n"
    "                     sums=lambda params, batch, key: Model().apply({'params': params}, batch['x']).sum(1))\n"
    "rules = gspmd_lm.load_rules('none', task)\n"
    "print('parameters:', gspmd_lm.explain(task, rules, 'cpu:1').parameters)",
    "import functools\n@functools.partial(jax.jit, static_argnums=1, donate_argnums=0)\n"
    "def update(x, times):\n    return times * x * SCALE.sum()\n"
    "def step(devices):\n"
    "    mesh = jax.sharding.Mesh(devices, ('data',))\n"
    "    place = jax.NamedSharding(mesh, jax.P('data'))\n"
    "    return update.trace(jax.ShapeDtypeStruct((8,), 'float32', sharding=place), 2)\n"
    "print('step:', gspmd_lm.explain(step, target='cpu:2').config)",
)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_a_task_and_a_step_of_cells_are_explained(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLES.parent))
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python", "language": "python"}
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    said = "".join(output.get("text", "") for cell in notebook.cells for output in cell.outputs)
    assert "parameters: 136\n" in said and "step: step\n" in said


if __name__ == "__main__":
    store()
