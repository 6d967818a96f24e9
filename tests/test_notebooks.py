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
