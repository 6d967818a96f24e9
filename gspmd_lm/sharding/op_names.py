"""The names of operations: each tells where in the model its operation stands, and which array it moves.

A step is traced with these names (`scope`, `einsum_equation`), compilers keep them, and `foresight` reads them from the
compiled program (`parse`).
"""

import contextlib
import dataclasses
import functools
import re
from typing import Any

import jax

from gspmd_lm.sharding.rules import TABLES

LOSS = "loss"  # the owner of operations of the loss
SAMPLING = "sampling"  # of those that choose the next token
SHARDS = "zrt"  # letters beside those of axes, in equations of `matmuls`: shards of a weight, of rows, of sequences

# What a scope names, for `OpName`, besides an array that a table places.
_ROLES = ("of", "sum", "sees", "turns", "kind")
# An einsum of attention without a kernel: in models of one's own, jax.nn.dot_product_attention has it.
_SCORES = re.compile(r"BN?K?G?TS\b")
_KEYS = re.compile(r"\['(\w+)'\]")
_NOT_MODULES = {
    "while",
    "body",
    "cond",
    "closed_call",
    "eval_jaxpr",
    "checkpoint",
    "rematted_computation",
    "shard_map",
    "transpose",
    "jvp",
    "vmap",
    "custom_vjp_call",
    "custom_jvp_call",
    "pjit",
    "remat",
    "core_call",
    "branch_0_fun",
    "branch_1_fun",
}
_MODULE = re.compile(r"[a-z][\w.\-]*$|[A-Z]\w*_\d+$")  # layers; Dense_0, as flax names what has no name
# The functions of train/step.py and infer/programs.py, which are told by their names, and how those of their operations
# begin. A step of one's own that has such a name is given another one: see foresight/any_step.py.
PROGRAMS = ("_train", "_prefill", "_decode")
_OF_TRAINING, *_OF_GENERATION = (f"jit({name})" for name in PROGRAMS)
TRAINING_MODULE = f"jit_{PROGRAMS[0]}"  # the name of its compiled program


@dataclasses.dataclass(frozen=True)
class OpName:
    """The parts of an operation's name."""

    phase: str  # forward, backward, recomputation, optimizer; other: outside of the derivative in a step of one's own
    modules: tuple[str, ...]  # layers, attention_norm
    owners: tuple[str, ...] = ()  # weights, or a part of the step that has none
    summed_axes: tuple[str, ...] = ()  # layers.attention.wo.heads: the axes that are added over
    table: str = ""  # rules, weights or optimizer: the operation puts `array` where this table says
    array: str = ""
    einsum: str = ""
    mask_window: str = ""  # the keys that a query sees: so many of the last ones, or all; "": all before it
    mask_chunk: int = 0  # the size of the chunks of a row outside of which a query sees no key; 0: it has one chunk
    trip_count: str = ""  # that is assumed of a loop that its data stop; "" if nothing is
    kind: str = ""  # of compute: attention

    @property
    def is_located(self) -> bool:
        """Whether it says where in the model it stands."""
        return bool(self.owners or self.summed_axes or self.array or self.modules)

    @property
    def path(self) -> str:
        """What it belongs to: layers.attention.wq, layers.attention.wq+wk+wv, layers.attention_norm, loss; or ''."""
        paths = list(self.owners[:1])
        for before, path in zip(self.owners, self.owners[1:], strict=False):
            same_module = before.rpartition(".")[0] == path.rpartition(".")[0]
            paths.append(path.rpartition(".")[2] if same_module else path)
        return "+".join(paths) or ".".join(self.modules) or self.array


def scope(role: str, *names: str) -> Any:
    """A context that writes `names` into the names of its operations.

    The role says what is named: the array that a table places ("rules", "weights", "optimizer"), the axes that are
    summed over ("sum"), the weights that operations belong to ("of"), which keys a query sees ("sees": so many of the
    last ones, or all, and the size of the chunks of a row as in chunk8192), how many turns are counted of a loop whose
    data decide ("turns"), or what compute they are ("kind": attention). Without names nothing is written.
    """
    assert role in _ROLES or role in TABLES, role
    return contextlib.nullcontext() if not names else jax.named_scope(f"{role}.{'+'.join(dict.fromkeys(names))}")


def einsum_equation(equation: str) -> str:
    """An equation in the letters of the model's axes, as `jnp.einsum` gets it, which writes it into the name.

    H is h, since jnp.einsum sums over axes in alphabetical order, and CPUs transpose arrays in which they stand in
    another, as heads do before H.
    """
    return equation.replace("H", "h")


def _equation_of_axes(word: str) -> str:
    """The equation that `einsum_equation` was given, without shards. One in small letters is not from `matmuls`."""
    return word if word.islower() else re.sub(f"[{SHARDS}]", "", word).replace("h", "H")


@functools.lru_cache(maxsize=65536)
def parse(op_name: str) -> OpName:
    """'jit(_train)/jvp(Decoder)/while/body/layers/of.layers.mlp.w_down/sum.layers.mlp.w_down.mlp/...' in parts."""
    words = [word for word in re.split(r"[/()]+", re.sub(r"\bjit\([^()]*\)", "", op_name)) if word]
    scopes: dict[str, str] = {}
    modules, table, array, einsum = [], "", "", ""
    for number, word in enumerate(words):
        role, dot, rest = word.partition(".")
        if dot and role in _ROLES:
            scopes[role] = rest
        elif dot and role in TABLES:
            table, array = role, rest
        elif "->" in word:
            einsum = _equation_of_axes(word)
        elif modules and dot and role == modules[-1]:
            pass  # mlp.route: a method of the module, as flax names what it traces there
        elif _MODULE.match(word) and word not in _NOT_MODULES and number < len(words) - 1:
            modules.append(word)
    owners = tuple(filter(None, scopes.get("of", "").split("+")))
    in_loss = owners == (LOSS,)
    if "rematted_computation" in words:
        phase = "recomputation"
    elif "transpose" in words or (in_loss and "sum" in scopes):  # the loss works out its gradients on its way forward
        phase = "backward"
    else:
        generates = op_name.startswith(tuple(_OF_GENERATION))
        rest = "other" if op_name.startswith("jit(") and not op_name.startswith(_OF_TRAINING) else "optimizer"
        # Operations that depend on nothing trained have no jvp. Those of the update have an owner: see train/step.py.
        of_model = rest == "optimizer" and (table == "rules" or (modules and not owners))
        phase = "forward" if "jvp" in words or in_loss or generates or of_model else rest
    summed_axes = tuple(filter(None, scopes.get("sum", "").split("+")))
    keys_seen, trip_count, kind = (scopes.get(role, "") for role in ("sees", "turns", "kind"))
    window, _, chunk = keys_seen.partition("chunk")
    kind = kind or ("attention" if _SCORES.search(op_name) else "")
    return OpName(
        phase,
        _once(modules),
        owners,
        summed_axes,
        table,
        array,
        einsum,
        window.rstrip("+"),
        int(chunk or 0),
        trip_count,
        kind,
    )


def _once(modules: list[str]) -> tuple[str, ...]:
    """A path of modules. Where jax has differentiated a `jax.checkpoint`, it writes the path to it twice.

    One module twice is such a path if it is all there is. With more below it, a module may have the name of its parent.
    """
    for length in range(len(modules) // 2, 0, -1):
        twice = modules[:length] == modules[length : 2 * length]
        if twice and (length > 1 or len(modules) == 2):
            return _once(modules[length:])
    return tuple(modules)


def tensor_names(op_name: str, count: int) -> list[str]:
    """The names of the `count` tensors of an instruction: combiners write 'a/(b:c)' for a/b and a/c.

    [] where the name does not say it of each.
    """
    names = _expand(op_name)
    return names if len(names) == count else []


def _expand(op_name: str) -> list[str]:
    depth, begin = 0, -1
    parts: list[str] = []
    for at, letter in enumerate(op_name):
        if letter == "(":
            depth += 1
            if depth == 1 and (at == 0 or op_name[at - 1] == "/"):
                begin, parts = at, [""]
                continue
        elif letter == ")":
            depth -= 1
            if depth == 0 and begin >= 0:
                prefix, suffix = op_name[:begin], op_name[at + 1 :]
                return [name for part in parts for name in _expand(prefix + part + suffix)]
        if begin >= 0:
            if letter == ":" and depth == 1:
                parts.append("")
            else:
                parts[-1] += letter
    return [op_name]


def state_array(op_name: str) -> tuple[str, str]:
    """('params', 'layers.attention.wq') for an argument of the step or a result: which tree of the state, and where.

    ('', '') for another name.
    """
    tree = re.match(r"(?:state\.)?(params|optimizer|batch)\b", op_name)
    return (tree.group(1), ".".join(_KEYS.findall(op_name))) if tree else ("", "")
