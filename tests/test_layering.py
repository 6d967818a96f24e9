"""Who may import whom, read from the source; and that importing anything starts nothing."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "gspmd_lm"
MODULES = sorted(
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
    for path in PACKAGE.rglob("*.py")
)
LONGEST = 430  # lines of a file

# Room -> the rooms it may import from, itself aside. A room is a folder or a file of gspmd_lm/. Downward only.
MAY_IMPORT = {
    "core_yaml": "",
    "versions": "",
    "config": "core_yaml",
    "files": "config",
    "trees": "config",
    "lock": "files config",
    "processes": "config",
    "runtime": "processes config",
    "compile_cache": "config",
    "axes": "config",
    "rules": "axes core_yaml config",
    "mesh": "rules config",
    "placement": "mesh rules axes config",
    "kernels": "axes config",
    "model": "kernels axes config",
    "data": "files config",
    "verdicts": "files",
    "checkpoint": "verdicts processes files trees config",
    "train": "model kernels placement mesh rules axes checkpoint data runtime compile_cache processes files versions "
    "core_yaml config",
    "infer": "train model kernels placement mesh rules axes data runtime config",
    "convert": "model placement checkpoint rules axes data files config",
    "foresight": "train infer placement mesh rules axes data runtime files versions config",
    "verbs": "foresight train infer convert model placement mesh rules axes checkpoint data runtime compile_cache "
    "processes lock files versions core_yaml config",
    "cli": "verbs processes config",
}
# Where a mesh must not be known, libraries that would tell of one must not be either.
NEVER = {
    "model": ("jax.sharding", "jax.experimental.shard_map", "jax.experimental.mesh_utils", "jax.lax.with_sharding"),
    "kernels": ("jax.sharding", "jax.experimental.shard_map"),
    "data": ("flax", "optax", "jax.sharding", "jax.experimental"),
    "config": ("jax", "flax", "numpy"),
    "rules": ("jax", "flax", "numpy"),
    "cli": ("jax", "flax", "numpy", "orbax", "grain"),  # when it is imported; a verb's code comes when the verb runs
}
# Words of jax that say how arrays are split, or count devices: the model has none of them.
MESH_WORDS = {
    "PartitionSpec", "NamedSharding", "Mesh", "with_sharding_constraint", "shard_map", "psum", "psum_scatter",
    "all_gather", "all_to_all", "ppermute", "axis_index", "devices", "device_count", "local_device_count",
    "process_index", "process_count", "set_mesh", "make_mesh",
}  # fmt: skip


def tree(module):
    path = PACKAGE.parent.joinpath(*module.split("."))
    return ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text(encoding="utf-8"))


def imports(nodes):
    """Full names of what is imported: 'gspmd_lm.rules.Rules', 'jax.numpy'."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def at_import(tree):
    """The nodes that run when a module is imported: what stands outside functions and `if TYPE_CHECKING`."""
    for node in ast.iter_child_nodes(tree):
        deferred = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        if not deferred and not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            yield node
            yield from at_import(node)


def room(module):
    return module.split(".")[1] if "." in module else ""


def test_every_room_is_known():
    assert {room(module) for module in MODULES} - {""} <= set(MAY_IMPORT)


def test_the_rules_above_go_downward_only():
    order = list(MAY_IMPORT)
    for upper, lower in MAY_IMPORT.items():
        assert all(order.index(name) < order.index(upper) for name in lower.split()), upper


@pytest.mark.parametrize("module", [module for module in MODULES if room(module)])
def test_imports_go_downward(module):
    allowed = {*MAY_IMPORT[room(module)].split(), room(module)}
    for name in imports(ast.walk(tree(module))):
        if name.startswith("gspmd_lm"):
            assert room(name) in allowed, f"{module} imports {name}"


@pytest.mark.parametrize("module", [module for module in MODULES if room(module) in NEVER])
def test_libraries_that_a_room_must_not_know(module):
    nodes = tree(module)
    for name in imports(at_import(nodes) if room(module) == "cli" else ast.walk(nodes)):
        for never in NEVER[room(module)]:
            assert f"{name}.".replace("gspmd_lm.", "") != f"{never}." and not f"{name}.".startswith(f"{never}."), name


@pytest.mark.parametrize("module", [module for module in MODULES if room(module) in ("model", "kernels")])
def test_the_model_reads_as_if_there_were_one_device(module):
    for node in ast.walk(tree(module)):
        word = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
        assert word not in MESH_WORDS, f"{module}, line {node.lineno}: {word}"


@pytest.mark.parametrize("module", MODULES)
def test_a_file_has_one_job(module):
    path = PACKAGE.parent.joinpath(*module.split("."))
    text = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text(encoding="utf-8")
    assert len(text.splitlines()) <= LONGEST
    assert not text or ast.get_docstring(ast.parse(text)), "the first line says what the file is for"


def test_importing_everything_starts_nothing():
    """No device is touched, no environment variable set, no argument read, no file or thread left behind."""
    program = """
import importlib, json, os, sys, threading
import absl.flags, etils.epath, flax.linen, grain, jax, optax.contrib, orbax.checkpoint, rich, tokenizers
from jax._src import xla_bridge
before, threads, options = dict(os.environ), threading.active_count(), dict(jax.config.values)
sys.argv = ["nobody", "--looks"]
for name in json.loads(sys.stdin.read()):
    importlib.import_module(name)
changed = [key for key in {*before, *os.environ} if before.get(key) != os.environ.get(key)]
settings = [key for key, value in jax.config.values.items() if key in options and options[key] != value]
left = threading.active_count() - threads
print(json.dumps([xla_bridge.backends_are_initialized(), changed, settings, left]))
"""
    environment = {key: value for key, value in os.environ.items() if key not in ("PJRT_NPROC", "NPROC")}
    done = subprocess.run(
        [sys.executable, "-c", program],
        input=json.dumps(MODULES),
        capture_output=True,
        text=True,
        cwd=PACKAGE.parent,
        env=environment,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [False, [], [], 0]
