"""Where a value of a compiled program comes from, and what the names of its operations say.

Compilers merge, split and move collectives, and then one name stands for several tensors. So each tensor is followed
back to the computation or the parameter that it comes from, through copies, fusions, loops and other collectives.
"""

import dataclasses
import functools
import re
from collections.abc import Iterator

from gspmd_lm.foresight.collectives.exchanges import rendezvous
from gspmd_lm.foresight.hlo import COLLECTIVES, Instruction, Module
from gspmd_lm.rules import TABLES

Place = tuple[Instruction, tuple[int, ...]]  # an element of an instruction's value: the indices of nested tuples

_SAME = {
    "copy", "copy-start", "copy-done", "bitcast", "bitcast-convert", "convert", "reshape", "transpose", "slice",
    "dynamic-slice", "pad", "reduce-precision", "optimization-barrier", "all-gather-done", "all-reduce-done",
    "collective-permute-done", "reduce-scatter-done", "all-to-all-done", "recv-done", "send-done",
}  # fmt: skip
_EMPTY = {"constant", "broadcast", "iota", "custom-call"}  # what a loop's accumulator begins as
_KEYS = re.compile(r"\['(\w+)'\]")
_NOT_MODULES = {
    "while", "body", "cond", "closed_call", "eval_jaxpr", "checkpoint", "rematted_computation", "shard_map",
    "transpose", "jvp", "vmap", "custom_vjp_call", "custom_jvp_call", "pjit", "remat", "core_call", "branch_0_fun",
    "branch_1_fun",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Name:
    """What an operation's name says; see `placing.scope`."""

    phase: str  # forward, backward, recomputation, optimizer
    modules: tuple[str, ...]  # layers, attention_norm
    of: tuple[str, ...] = ()  # weights, or a part of the step that has none
    sums: tuple[str, ...] = ()  # layers.attention.wo.heads: the axes that are added over
    placed: tuple[str, str] | None = None  # the table, and the array where it puts it
    einsum: str = ""

    @property
    def known(self) -> bool:
        """Whether it says where in the model it stands."""
        return bool(self.of or self.sums or self.placed or self.modules)


@functools.lru_cache(maxsize=65536)
def read(op_name: str) -> Name:
    """'jit(_train)/jvp(Decoder)/while/body/layers/of.layers.mlp.w_down/sum.layers.mlp.w_down.mlp/...' in parts."""
    words = [word for word in re.split(r"[/()]+", re.sub(r"\bjit\([^()]*\)", "", op_name)) if word]
    scopes: dict[str, str] = {}
    placed: tuple[str, str] | None = None
    modules, einsum = [], ""
    for number, word in enumerate(words):
        role, dot, rest = word.partition(".")
        if dot and role in ("of", "sum"):
            scopes[role] = rest
        elif dot and role in TABLES:
            placed = role, rest
        elif "->" in word:
            einsum = word.replace("z", "").replace("r", "")  # pieces of weights and rows (products.py)
        elif word[0].islower() and word not in _NOT_MODULES and number < len(words) - 1:
            modules.append(word)
    of = tuple(filter(None, scopes.get("of", "").split("+")))
    in_loss = of == ("loss",)
    if "rematted_computation" in words:
        phase = "recomputation"
    elif "transpose" in words or (in_loss and "sum" in scopes):  # the loss works out its gradients on its way forward
        phase = "backward"
    else:
        generates = op_name.startswith(("jit(_prefill)", "jit(_decode)"))
        phase = "forward" if "jvp" in words or in_loss or generates else "optimizer"
    sums = tuple(filter(None, scopes.get("sum", "").split("+")))
    return Name(phase, tuple(modules), of, sums, placed, einsum)


def each(op_name: str, count: int) -> list[str]:
    """The names of the `count` tensors of an instruction: combiners write 'a/(b:c)' for a/b and a/c.

    [] where the name does not say it of each.
    """
    names = _expanded(op_name)
    return names if len(names) == count else []


def _expanded(op_name: str) -> list[str]:
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
                return [name for part in parts for name in _expanded(prefix + part + suffix)]
        if begin >= 0:
            if letter == ":" and depth == 1:
                parts.append("")
            else:
                parts[-1] += letter
    return [op_name]


def state(op_name: str) -> tuple[str, str]:
    """('params', 'layers.attention.wq') for an argument of the step or a result: which tree of the state, and where.

    ('', '') for another name.
    """
    tree = re.match(r"(?:state\.)?(params|optimizer|batch)\b", op_name)
    return (tree.group(1), ".".join(_KEYS.findall(op_name))) if tree else ("", "")


class Provenance:
    """Follows the values of one module."""

    def __init__(self, module: Module):
        self.module = module

    def operand(self, instruction: Instruction, number: int = 0) -> Place:
        return self.module.operand(instruction, number), ()

    def trail(self, place: Place) -> list[Instruction]:
        """The instructions through which a value came, the nearest first; the last one computed it or was given it."""
        found: list[Instruction] = []
        seen: set[tuple[int, tuple[int, ...]]] = set()
        current: Place | None = place
        while current and (id(current[0]), current[1]) not in seen:
            seen.add((id(current[0]), current[1]))
            found.append(current[0])
            current = self._before(*current)
        return found

    def ancestors(self, place: Place) -> Iterator[Instruction]:
        """Everything that a value is made of, the nearest first, where `trail` finds no name."""
        waiting, seen = [place], set()
        while waiting:
            trail = self.trail(waiting.pop(0))
            last = trail[-1]
            if id(last) in seen:
                continue
            seen.add(id(last))
            yield from trail
            if last.opcode != "parameter":
                waiting += [self.operand(last, number) for number in range(len(last.operands))]

    def pieces(self, place: Place) -> list[tuple[Place, int]]:
        """The values that lie side by side in one, each with its number of elements."""
        instruction, path = place
        while instruction.opcode in ("bitcast", "reshape", "copy", "fusion", "parameter", "get-tuple-element"):
            before = self._before(instruction, path)
            if before is None:
                break
            instruction, path = before
        if instruction.opcode != "concatenate":
            return [(place, place[0].shape.arrays[0].elements)]
        operands = [self.operand(instruction, number) for number in range(len(instruction.operands))]
        return [piece for operand in operands for piece in self.pieces(operand)]

    @functools.cached_property
    def results(self) -> dict[int, tuple[str, str]]:
        """What the step returns -> `state` of the argument that it replaces."""
        pairs = re.findall(r"\{(\d+)\}: \((\d+),", self.module.attributes.get("input_output_alias", ""))
        arguments = self.module.entry.parameters
        return {int(result): state(arguments[int(argument)].op_name) for result, argument in pairs}

    @functools.cached_property
    def returned(self) -> dict[tuple[str, str], tuple[str, str]]:
        """Collective and operand -> the array of the new state that it is, where nothing but copies lies between."""
        found = {}
        root = self.module.entry.root
        for number in range(len(root.operands)) if root.opcode == "tuple" else ():
            if number in self.results:
                for at in self.trail(self.operand(root, number)):
                    if at.opcode.endswith("-start") or at.opcode in COLLECTIVES:
                        found.setdefault((at.name, at.computation), self.results[number])
        return found

    @functools.cached_property
    def _called(self) -> dict[str, list[Instruction]]:
        found: dict[str, list[Instruction]] = {}
        for computation in self.module.computations.values():
            for instruction in computation.instructions.values():
                if instruction.op_name:
                    found.setdefault(instruction.op_name, []).append(instruction)
        return found

    def called(self, op_name: str) -> list[Instruction]:
        """The instructions of that name."""
        return self._called.get(op_name, [])

    def consumers(self, instruction: Instruction) -> Iterator[Instruction]:
        """Those who use a value, the nearest first, within the computation."""
        users = self._users(instruction.computation)
        waiting, seen = list(users.get(instruction.name, ())), {instruction.name}
        while waiting:
            user = waiting.pop(0)
            if user.name not in seen:
                seen.add(user.name)
                yield user
                waiting += users.get(user.name, ())

    def reads(self, user: Instruction, instruction: Instruction) -> bool:
        """Whether a value is an operand of one of its consumers, but for copies."""
        operands = (self.operand(user, number) for number in range(len(user.operands)))
        return any(instruction in self.trail(operand) for operand in operands)

    @functools.cache  # noqa: B019  # one for each module, and gone with it
    def _users(self, computation: str) -> dict[str, list[Instruction]]:
        found: dict[str, list[Instruction]] = {}
        for instruction in self.module.computations[computation].instructions.values():
            for name in instruction.operands:
                found.setdefault(name, []).append(instruction)
        return found

    def _before(self, instruction: Instruction, path: tuple[int, ...]) -> Place | None:
        """One step back."""
        opcode, operands = instruction.opcode, instruction.operands
        if opcode == "parameter":
            return self._argument(instruction, path)
        if opcode == "recv":  # the answer to what was sent to other slices
            beside = self.module.computations[instruction.computation].instructions.values()
            sends = (i for i in beside if i.opcode == "send" and rendezvous(i) == rendezvous(instruction))
            return next((self.operand(send) for send in sends), None)
        if not operands:
            return None
        if opcode == "get-tuple-element":
            return self.module.operand(instruction), (instruction.index, *path)
        if opcode == "tuple":
            return (self.module.operand(instruction, path[0]), path[1:]) if path else None
        if opcode in ("fusion", "call", "async-start", "call-start"):
            called = instruction.called.get("calls") or instruction.called.get("to_apply", ())
            return (self.module.computations[called[0]].root, path) if called else None
        if opcode in _SAME or opcode in ("async-done", "async-update", "call-done", "call-update"):
            return self.module.operand(instruction), path
        if opcode == "while":
            return self.module.computations[instruction.called["body"][0]].root, path
        if instruction.base in COLLECTIVES:
            return self.module.operand(instruction, path[-1] if path and path[-1] < len(operands) else 0), ()
        if opcode == "dynamic-update-slice":
            return self.module.operand(instruction, 1), ()
        if opcode == "concatenate":
            largest = max(range(len(operands)), key=lambda n: self.module.operand(instruction, n).shape.bytes)
            return self.module.operand(instruction, largest), ()
        return None

    def _argument(self, parameter: Instruction, path: tuple[int, ...]) -> Place | None:
        callers = self.module.callers.get(parameter.computation, ())
        if len(callers) != 1:
            return None
        caller, role = callers[0]
        if role not in ("body", "condition"):
            inlined = role == "calls" or caller.opcode == "call"
            return (self.module.operand(caller, parameter.index), path) if inlined else None
        first: Place = self.module.operand(caller), path
        body = self.module.computations[caller.called["body"][0]]
        return (body.root, path) if self.trail(first)[-1].opcode in _EMPTY else first
