"""Who may import whom, read from the source; and that importing anything starts nothing."""

import ast
import collections
import functools
import graphlib
import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gspmd_lm.foresight import compile
from gspmd_lm.sharding import axes, rules

PACKAGE = Path(__file__).parent.parent / "gspmd_lm"
MODULES = sorted(
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
    for path in PACKAGE.rglob("*.py")
)
LONGEST = 500  # lines of a file

# The rooms of the package, the lowest floor first. A room is a folder, or a file beside the folders. A room uses itself
# and the rooms on the floors below its own.
FLOORS = (
    "errors units versions",
    "files",
    "config",
    "hardware",
    "runtime",
    "sharding workdir",
    "model data",
    "program",
    "train infer convert",
    "foresight",
    "plan",
    "show",
    "explore",
    "session",
    "api",
    "launch",
    "cli",
    "__main__",
)
# The same inside of foresight/.
IN_FORESIGHT = {
    "exported": "",
    "pickled": "",
    "table": "",
    "equations": "",
    "graph": "equations",
    "source_lines": "",
    "hlo": "equations source_lines",
    "known_errors": "",
    "memory": "hlo source_lines",
    "calibration": "",
    "collectives": "graph hlo source_lines",
    "propagation": "equations source_lines",
    "bounds": "graph propagation",
    "meshes": "",
    "any_step": "equations meshes propagation",
    "target_answers": "",
    "compile": "any_step exported pickled propagation target_answers",
    "timing": "hlo",
    "whole_job": "",
    "report": "table timing bounds collectives memory whole_job",
    "step_records": "report timing hlo",
    "advice": "table report timing bounds collectives memory hlo whole_job",
    "explain": "table advice report timing bounds collectives memory compile known_errors hlo graph exported any_step "
    "whole_job",
}
# Where a mesh must not be known, libraries that would tell of one must not be either.
NEVER = {
    "data": ("flax", "optax", "jax.sharding", "jax.experimental"),
    "config": ("jax", "flax", "numpy"),
    "hardware.chips": ("jax", "flax", "numpy"),
    "sharding.names": ("jax", "flax", "numpy"),
    "sharding.rules": ("jax", "flax", "numpy"),
    "sharding.rules_file": ("jax", "flax", "numpy"),
    "show.config_keys": ("jax", "flax", "numpy"),
}
# What answers before jax is there: when it is imported; the code of a verb comes when the verb runs.
QUICK_TO_START = ("gspmd_lm.cli", "gspmd_lm.api")
NOT_AT_START = ("jax", "flax", "numpy", "orbax", "grain")
# All that a model and its kernels may know of what is installed: nothing counts devices or says how arrays are split.
WITHOUT_DEVICES = (
    "collections.abc.", "dataclasses.", "einops.", "flax.linen.initializers.", "flax.traverse_util.", "functools.",
    "gspmd_lm.", "jax.nn.", "jax.numpy.", "jax.random.", "jax.scipy.special.", "jax.tree.", "math.", "numpy.",
    "typing.",
)  # fmt: skip
SINGLE_DEVICE = {
    "flax.linen": "Module PARTITION_NAME broadcast compact nowrap remat scan share_scope with_logical_partitioning",
    "jax": "Array ShapeDtypeStruct ad_checkpoint.checkpoint_name checkpoint custom_vjp default_matmul_precision "
        "eval_shape named_scope softmax_custom_jvp vjp vmap",
    "jax.tree_util": "register_dataclass",
    "jax.lax":
        "RaggedDotDimensionNumbers broadcasted_iota dot_general dynamic_index_in_dim dynamic_slice_in_dim "
        "dynamic_update_slice dynamic_update_slice_in_dim fori_loop optimization_barrier ragged_dot "
        "ragged_dot_general reduce_precision rsqrt scan stop_gradient top_k while_loop",
    "jax.experimental.pallas.ops.tpu.megablox.gmm": "gmm make_group_metadata tgmm",
    "jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_kernel":
        "BlockSizes SegmentIds make_splash_mha",
    "jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask": "CausalMask LocalMask MultiHeadMask",
    "jax.experimental.pallas": "BlockSpec ds pallas_call program_id when",
    "jax.experimental.pallas.tpu": "CompilerParams PrefetchScalarGridSpec VMEM",
    "jax.experimental.pallas.triton": "CompilerParams dot load store",
}  # fmt: skip
KNOWN = {f"{module}.{name}" for module, names in SINGLE_DEVICE.items() for name in names.split()}
# Attributes of arrays, and arguments of the functions above, that would tell.
TELLING = {
    "addressable_data", "addressable_shards", "axis_name", "device", "devices", "global_shards", "in_shardings", "mesh",
    "out_sharding", "out_shardings", "process_index", "sharding", "spmd_axis_name",
}  # fmt: skip


def text(module):
    path = PACKAGE.parent.joinpath(*module.split("."))
    return (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text(encoding="utf-8")


@functools.cache
def tree(module):
    return ast.parse(text(module))


def imports(nodes):
    """Full names of what is imported: 'gspmd_lm.sharding.rules.Rules', 'jax.numpy'."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def executed(tree, functions=True):
    """The nodes that run, which those below `if TYPE_CHECKING` never do. functions: whether theirs are among them."""
    for node in ast.iter_child_nodes(tree):
        deferred = not functions and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        if not deferred and not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            yield node
            yield from executed(node, functions)


at_import = functools.partial(executed, functions=False)  # the nodes that run when a module is imported


def room(module):
    return module.split(".")[1] if "." in module else ""


def test_every_room_is_on_one_floor():
    assert sorted({room(module) for module in MODULES} - {""}) == sorted(" ".join(FLOORS).split())


def below(module):
    """The room of a module, and those on the floors below it."""
    number = next(number for number, floor in enumerate(FLOORS) if room(module) in floor.split())
    return {room(module), *" ".join(FLOORS[:number]).split()}


def upward(modules, allowed, level, within):
    """'module imports name' for each import of `within` whose part at `level` is not allowed(the module's own part)."""
    for module in modules:
        parts = {name: name.split(".")[level] for name in imports(ast.walk(tree(module))) if name.startswith(within)}
        yield from (f"{module} imports {name}" for name, part in parts.items() if part not in allowed(module))


def test_imports_go_downward():
    modules = [module for module in MODULES if room(module)]
    assert len(modules) > 100
    assert list(upward(modules, below, 1, "gspmd_lm.")) == []


def named_module(name):
    """The module that an imported name is, or stands in."""
    while name not in MODULES:
        name = name.rpartition(".")[0]
    return name


def test_no_files_import_each_other_in_a_circle():
    """Not within a room either, nor by an import within a function.

    What only a type checker reads may. So may a file of a folder read the folder's own __init__.py.
    """
    graph = {
        module: {named_module(name) for name in imports(executed(tree(module))) if name.startswith("gspmd_lm.")}
        - {module, module.rpartition(".")[0]}
        for module in MODULES
    }
    assert sum(map(len, graph.values())) > 1000
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the files


def test_the_rules_of_foresight_go_downward_only():
    order = list(IN_FORESIGHT)
    for upper, lower in IN_FORESIGHT.items():
        assert all(order.index(name) < order.index(upper) for name in lower.split()), upper


def test_imports_inside_of_foresight_go_downward():
    modules = [module for module in MODULES if module.startswith("gspmd_lm.foresight.")]
    assert len(modules) > 20

    def allowed(module):
        return {module.split(".")[2], *IN_FORESIGHT[module.split(".")[2]].split()}

    assert list(upward(modules, allowed, 2, "gspmd_lm.foresight.")) == []


def test_libraries_that_a_room_must_not_know():
    known = []
    for place, never in NEVER.items():
        modules = [module for module in MODULES if f"{module}.".startswith(f"gspmd_lm.{place}.")]
        assert modules, place
        known += foreign(modules, never, ast.walk)
    assert known + foreign(QUICK_TO_START, NOT_AT_START, at_import) == []


def foreign(modules, libraries, nodes):
    """'module imports name' for each import of one of the libraries, among the `nodes` of each module's tree."""
    begins = tuple(f"{library}." for library in libraries)
    names = ((module, name) for module in modules for name in imports(nodes(tree(module))))
    return [f"{module} imports {name}" for module, name in names if f"{name}.".startswith(begins)]


def dotted(node):
    """'jax.lax.scan' for that chain of attributes; '' for one that does not begin with a name."""
    if isinstance(node, ast.Attribute):
        return (before := dotted(node.value)) and f"{before}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def told_of_devices(nodes):
    """Where a program can learn that there are several devices: each word of it that is not known not to tell."""
    nodes = list(ast.walk(nodes))
    modules = {}  # as the program calls them -> their names
    for node in nodes:
        if isinstance(node, ast.Import):
            modules |= {alias.asname or alias.name: alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    documents = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    inner = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}  # the beginning of a longer chain

    def harmless(name):
        private = "._" in name or name.startswith("gspmd_lm.sharding.annotate.placement")
        return not private and (name in KNOWN or name.startswith(WITHOUT_DEVICES))

    for name in modules.values():
        if not harmless(name) and not any(known.startswith(f"{name}.") for known in (*KNOWN, *WITHOUT_DEVICES)):
            yield name
    for node in nodes:
        if isinstance(node, ast.Attribute | ast.Name) and id(node) not in inner:
            first, _, rest = dotted(node).partition(".")
            name = f"{modules[first]}.{rest}".rstrip(".") if first in modules else ""
            if name and not harmless(name):
                yield name
        if isinstance(node, ast.Attribute) and node.attr in TELLING:
            yield node.attr
        if isinstance(node, ast.keyword) and node.arg in TELLING:
            yield f"{node.arg}="
        if isinstance(node, ast.Name) and node.id in ("__import__", "eval", "exec", "globals"):
            yield node.id
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documents:
            words = set(re.split(r"[\s,:()+]+", node.value))
            yield from sorted(words & {*rules.MESH_AXES} - {*axes.AXES})


# What stands in model/ and knows of several devices: attention over a split sequence, where devices send keys to each
# other; and tokens that go to the devices of their experts.
APART = tuple(f"gspmd_lm.model.kernels.{name}" for name in ("context", "ring", "splash", "cudnn"))
ON_DEVICES = (*APART, "gspmd_lm.model.moe_dispatch", "gspmd_lm.model.moe_routing")


def test_no_model_knows_rules_or_a_mesh():
    """Without exemptions: what knows the rules of a model's arrays stands in program/."""
    apart = tuple(f"gspmd_lm.sharding.{name}" for name in ("rules", "rules_file", "mesh", "placement", "shapes"))
    found = [
        (module, name) for module in MODULES if room(module) == "model" for name in imports(ast.walk(tree(module)))
    ]
    assert len(found) > 100
    assert [(module, name) for module, name in found if name.startswith(apart)] == []


def test_models_see_five_words_of_attention_over_a_split_sequence():
    modules = [module for module in MODULES if room(module) == "model" and module not in ON_DEVICES]
    layers = [module for module in modules if not module.startswith("gspmd_lm.model.kernels.")]
    seen = {name for module in layers for name in imports(ast.walk(tree(module))) if name.startswith(APART)}
    words = ("attend", "attend_to_memory", "gathered_early", "keys_spec", "zigzag_sharded")
    assert seen <= {f"gspmd_lm.model.kernels.context.{word}" for word in words}


def test_the_model_reads_as_if_there_were_one_device():
    modules = [module for module in MODULES if room(module) == "model" and module not in ON_DEVICES]
    assert len(modules) > 8
    assert [(module, word) for module in modules for word in told_of_devices(tree(module))] == []


@pytest.mark.parametrize(
    "line",
    [
        "jax.local_devices()", "jax.device_count()", 'jax.lax.psum(x, "tensor")', 'jax.lax.pmean(x, axis)',
        'jax.lax.axis_size(axis)', "nn.with_partitioning(init, names)", 'getattr(jax, "devices")()', "here = jax",
        "lax = jax.lax", "from jax import lax; lax.psum(x, axis)", "from jax.lax import psum as total; total(x, axis)",
        "from jax.sharding import PartitionSpec; PartitionSpec()", "import jax.sharding; jax.sharding.Mesh",
        "import importlib; importlib.import_module(name)", '__import__("jax")', "x.sharding", "x.devices()",
        "jnp.zeros(3, device=d)", "jax.vmap(f, spmd_axis_name=n)", 'names = ("data", "fsdp")',
        'annotate.shard(x, "residual: fsdp seq embed")', "annotate._current.get()",
        "from gspmd_lm.sharding.annotate import _current", "annotate.placement()",
        "from gspmd_lm.sharding.annotate import placement",
        "jax.experimental.multihost_utils.process_allgather(x)", "jax.jit(f)", "jax.make_mesh((8,), n)",
    ],
)  # fmt: skip
def test_what_tells_of_devices_is_found(line):
    begin = "import flax.linen as nn\nimport jax\nimport jax.numpy as jnp\nfrom gspmd_lm.sharding import annotate\n"
    harmless = 'y = jnp.exp(annotate.shard(jax.nn.relu(x), "residual: batch seq embed"))\n'
    assert list(told_of_devices(ast.parse(begin + harmless))) == []
    assert list(told_of_devices(ast.parse(begin + harmless + line)))


def test_a_file_has_one_job():
    assert [module for module in MODULES if len(text(module).splitlines()) > LONGEST] == []


# How often the package does what CONTRIBUTING.md (Style) asks to be rare. A change that lowers a count writes it here.
# No change raises one.
RATCHET = {"bare participles": 7, "of_...": 7, "fmt: skip": 80, "conditions on the config in model/": 106}
PARTICIPLES = "begun chosen drawn found given heard held kept known laid left made seen sent shown taken told written"
NO_PARTICIPLES = ("embed", "feed", "seed", "speed")


def rare_things(module):
    """What of RATCHET a file has: (what, how often)."""
    nodes = list(ast.walk(tree(module)))
    names = [node.name.strip("_") for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    past = [name in PARTICIPLES.split() or (name.endswith("ed") and name not in NO_PARTICIPLES) for name in names]
    yield "bare participles", sum(is_past for name, is_past in zip(names, past, strict=True) if "_" not in name)
    yield "of_...", sum(name == "of" or name.startswith("of_") for name in names)
    yield "fmt: skip", text(module).count("fmt: skip")
    if room(module) == "model":
        tests = [node.test for node in nodes if isinstance(node, ast.If | ast.IfExp | ast.While)]
        tests += [test for node in nodes if isinstance(node, ast.comprehension) for test in node.ifs]
        asked = sum(bool(re.search(r"\b(cfg|config)\b", ast.unparse(test))) for test in tests)
        yield "conditions on the config in model/", asked


def test_what_is_to_be_rare_does_not_grow():
    counts = collections.Counter()
    for module in MODULES:
        counts.update(dict(rare_things(module)))
    assert {what: count for what, count in counts.items() if count > RATCHET[what]} == {}


def test_tests_stand_in_a_folder_of_the_name_of_their_room():
    """Those of files beside the rooms, and of several rooms together, stand beside the folders."""
    tests = {path.name for path in PACKAGE.parent.glob("tests/*/") if any(path.glob("test_*.py"))}
    rooms = {path.name for path in PACKAGE.glob("*/") if (path / "__init__.py").exists() or any(path.glob("*.py"))}
    assert tests - {"attacks"} == rooms


def test_contributing_shows_the_floors():
    shown = (PACKAGE.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert "```\n" + "\n".join(", ".join(floor.split()) for floor in reversed(FLOORS)) + "\n```" in shown


def test_the_first_line_of_a_file_says_what_it_is_for():
    assert [module for module in MODULES if text(module) and not ast.get_docstring(tree(module))] == []


# These alone write files themselves: into a folder or file that files.py puts in place when it is whole, or, the log,
# line by line.
WRITERS = ("convert.export", "data.folders", "data.remote", "files", "foresight.compile", "launch.logs", "workdir.log")


def writes(nodes):
    """The lines where a program writes a file itself, where it should use files.replace or files.growing."""
    for node in ast.walk(nodes):
        if isinstance(node, ast.Call):
            name, given = ast.unparse(node.func).rpartition(".")[2], [*node.args, *(one.value for one in node.keywords)]
            modes = {one.value for one in given if isinstance(one, ast.Constant)}
            if name in ("write_text", "write_bytes") or (name == "open" and modes & {"w", "wb", "a", "ab", "x"}):
                yield node.lineno


def test_one_file_makes_consoles():
    """Elsewhere it is forgotten that rich displays what it prints in a notebook, and writes nothing into a file."""
    makers = {
        module for module in MODULES for node in ast.walk(tree(module))
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "Console"
    }  # fmt: skip
    assert makers == {"gspmd_lm.show.terminal"}


def test_plurals_are_made_in_one_place():
    """By hand it is forgotten, and a page says "1 simulated devices"."""
    makers = [module for module in MODULES if re.search(r"""["']s["'] (\* \(|if len)""", text(module))]
    assert makers == ["gspmd_lm.units"]


def test_one_file_expands_home_folders():
    """Path.expanduser raises RuntimeError for a name such as ~draft, which is no user's."""
    assert [module for module in MODULES if "expanduser(" in text(module)] == ["gspmd_lm.files"]


def test_files_are_written_whole():
    modules = [module for module in MODULES if module.partition(".")[2] not in WRITERS]
    assert [f"{module}, line {line}" for module in modules for line in writes(tree(module))] == []
    assert list(writes(tree("gspmd_lm.files"))), "what writes is found"


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
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [False, [], [], 0]


@pytest.mark.parametrize("folder", ["tests/attacks", "benchmarks"])
def test_programs_that_only_a_person_starts_can_be_imported(folder):
    for path in sorted((PACKAGE.parent / folder).glob("*.py")):
        importlib.import_module(f"{folder.replace('/', '.')}.{path.stem}")


def test_the_key_of_compiled_programs_covers_the_code_that_decides_them():
    """What the steps import, wherever it is imported, is among the files that explain's key is made of."""
    covered = [f"gspmd_lm/{name}" for name in compile._SOURCES]
    left, found = ["gspmd_lm.train.step", "gspmd_lm.infer.programs"], set()
    while left:
        if (module := left.pop()) not in found:
            found.add(module)
            names = (name.split(".") for name in imports(ast.walk(tree(module))))
            # The module itself, and what it is asked for by name.
            candidates = {".".join(parts[:size]) for parts in names for size in (len(parts), len(parts) - 1)}
            left += candidates & set(MODULES) - {"gspmd_lm"}
    assert "gspmd_lm.model.loss" in found
    files = {str(path.relative_to(PACKAGE.parent)) for path in (PACKAGE.parent / f"{name.replace('.', '/')}.py"
             for name in found) if path.exists()}  # fmt: skip
    outside = {file for file in files if not any(file == name or file.startswith(f"{name}/") for name in covered)}
    # They find and tell, and compute nothing.
    assert outside == {f"gspmd_lm/{name}.py" for name in ("errors", "files", "units", "versions")}
