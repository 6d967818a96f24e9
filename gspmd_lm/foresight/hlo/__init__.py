"""Reads the text of a compiled program, once, into the list of operations that memory, collectives and timing read.

`parse(text).operations` are the instructions that run, in their order. Each knows its operands and users, and what it
moves, computes and exchanges, where in the model it stands and how often it runs (`instruction.py`).

The text is `compiled.as_text()` of any backend. Attributes are parsed only when they are used, so that a text of 10 MB
takes a second or two.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping, Sequence

from gspmd_lm.errors import InputError
from gspmd_lm.foresight.hlo.instruction import COMMENT, QUOTED, Instruction, Tables, attributes_of, comma_separated
from gspmd_lm.foresight.hlo.shape import ARRAY, HOST_SPACE, Shape
from gspmd_lm.foresight.hlo.shape import MEMORIES as MEMORIES
from gspmd_lm.foresight.hlo.shape import Array as Array
from gspmd_lm.sharding.op_names import TRAINING_MODULE

_STRING = re.compile(QUOTED, re.S)
_PARENTHESIS = re.compile(QUOTED + r"|[()]", re.S)
_HEAD = re.compile(r"(ENTRY )?%?([\w.\-]+) [(].*\{\s*$", re.S)
_NAMED = re.compile(r"\s*(ROOT )?%?([\w.\-]+) = ")
_OPCODE = re.compile(r" ?([a-z][\w\-]*)\(")
_OPERAND = re.compile(r"%([\w.\-]+)")
_NUMBERED = re.compile(r"""(\d+) ["{](.*)["}]$""")


@dataclasses.dataclass(frozen=True, eq=False)
class Computation:
    """One computation. The order of its instructions is the compiled schedule."""

    name: str
    module: "Module" = dataclasses.field(repr=False)
    instructions: dict[str, Instruction] = dataclasses.field(repr=False, default_factory=dict)

    @functools.cached_property
    def root(self) -> Instruction:
        marked = (instruction for instruction in self.instructions.values() if instruction.is_root)
        return next(marked, None) or next(reversed(self.instructions.values()))

    @functools.cached_property
    def parameters(self) -> Mapping[int, Instruction]:
        return {i.index: i for i in self.instructions.values() if i.opcode == "parameter"}

    @functools.cached_property
    def operations(self) -> tuple[Instruction, ...]:
        """All instructions that run in it, in order. Loops, calls, all branches and asynchronous computations are
        entered."""
        run: dict[Instruction, None] = {}
        for instruction in self.instructions.values():
            run[instruction] = None
            for body in instruction.bodies:
                run |= dict.fromkeys(body.operations)
        return tuple(run)

    @property
    def callers(self) -> Sequence[tuple[Instruction, str]]:
        """The instructions that call the computation, each with the role that it has for them."""
        return self.module.callers.get(self, ())

    @property
    def caller(self) -> tuple[Instruction | None, str]:
        """The only caller, and the role of the computation; None if there are several or none."""
        return self.callers[0] if len(self.callers) == 1 else (None, "")

    @functools.cached_property
    def executions(self) -> int:
        """How often the computation runs in one run of the program: see `Instruction.executions`."""
        if not self.callers:
            return 1
        trip_counts = [(caller, caller.trip_count if caller.opcode == "while" else 1) for caller, _ in self.callers]
        return sum(caller.executions * (1 if count is None else count) for caller, count in trip_counts)

    @functools.cached_property
    def loops(self) -> tuple[Instruction, ...]:
        """The loops around the computation, the outermost first; where it has several callers, around the first."""
        if not self.callers:
            return ()
        caller, _ = self.callers[0]
        return (*caller.loops, caller) if caller.opcode == "while" else caller.loops


@dataclasses.dataclass(eq=False)
class Module:
    """A compiled program. Memory, collectives and timing read its `operations`."""

    name: str
    devices: int
    attributes: Mapping[str, str]
    slices: Sequence[int]  # of each partition of the whole program; () where that does not matter
    computations: dict[str, Computation] = dataclasses.field(repr=False, default_factory=dict)
    entry_name: str = ""
    tables: Tables = dataclasses.field(repr=False, default_factory=Tables)

    @property
    def entry(self) -> Computation:
        return self.computations[self.entry_name]

    @property
    def operations(self) -> tuple[Instruction, ...]:
        """All instructions that run, in order: see `Computation.operations`."""
        return self.entry.operations

    @property
    def trains(self) -> bool:
        """Whether it is a train step of this project."""
        return self.name == TRAINING_MODULE

    @functools.cached_property
    def instructions(self) -> tuple[Instruction, ...]:
        """The instructions of all computations, also of those in fusions and reductions."""
        return tuple(i for computation in self.computations.values() for i in computation.instructions.values())

    @functools.cached_property
    def by_op_name(self) -> Mapping[str, Sequence[Instruction]]:
        """The instructions of each op_name."""
        named: dict[str, list[Instruction]] = {}
        for instruction in self.instructions:
            if instruction.op_name:
                named.setdefault(instruction.op_name, []).append(instruction)
        return named

    @functools.cached_property
    def callers(self) -> Mapping[Computation, Sequence[tuple[Instruction, str]]]:
        """See `Computation.callers`."""
        callers: dict[Computation, list[tuple[Instruction, str]]] = {}
        for instruction in self.instructions:
            for role, computations in instruction.called_computations.items():
                for computation in computations:
                    callers.setdefault(computation, []).append((instruction, role))
        return callers

    @functools.cached_property
    def kernels(self) -> tuple[Instruction, ...]:
        """All custom calls."""
        return tuple(i for i in self.instructions if i.custom_call_target)

    @functools.cached_property
    def offloads(self) -> bool:
        """Whether the program keeps an array in the memory of the host."""
        return any(array.memory_space == HOST_SPACE for i in self.instructions for array in i.shape.arrays)

    @functools.cached_property
    def buffers(self) -> Mapping[int, float]:
        """The rows of a ragged all-to-all's buffer -> the share that balanced routing fills.

        The rows that are sent lie closely in the operand or in the result, whichever has fewer.
        """
        filled_share: dict[int, float] = {}
        for instruction in self.instructions:
            if instruction.base == "ragged-all-to-all" and instruction.phase != "-done":
                few, many = sorted(operand.shape.arrays[0].dimensions[0] for operand in instruction.operands[:2])
                filled_share[many] = few / many
        return filled_share


def parse(text: str, slices: Sequence[int] = ()) -> Module:
    """The module that `text` describes. `slices` are those of all partitions, where there are several.

    Raises: InputError for a text that is not a compiled program.
    """
    lines = _lines(text)
    head = next(lines, "")
    match = re.match(r"HloModule ([^\s,]+)", head)
    if not match:
        raise InputError(
            f"the compiled program's text begins with {text[:40]!r}, not with HloModule\n"
            "  fix  pass the text of compiled.as_text()"
        )
    attributes = attributes_of(head[match.end() :])
    sizes = (int(attributes.get(name, 1)) for name in ("num_partitions", "replica_count"))
    module = Module(match.group(1), math.prod(sizes), attributes, slices)
    shapes: dict[str, Shape] = {}
    computation, table = None, None
    for line in lines:
        if computation is not None:
            if line.startswith("}"):
                computation = None
            elif line.strip():
                _add_instruction(line, computation, shapes)
        elif line in ("FileNames", "FunctionNames", "FileLocations", "StackFrames"):
            table = module.tables.rows.setdefault(line, {})
        elif table is not None and (row := _NUMBERED.match(line)):
            table[int(row.group(1))] = row.group(2)
        elif header := _HEAD.match(line):
            computation = module.computations[header.group(2)] = Computation(header.group(2), module)
            module.entry_name = computation.name if header.group(1) else module.entry_name
        elif line.strip():
            raise InputError(f"the compiled program has a line that cannot be read: {line[:120]!r}")
    if computation is not None or not module.entry_name:
        raise InputError(f"the compiled program {match.group(1)} has no ENTRY: its text is cut off")
    return module


def _lines(text: str) -> Iterator[str]:
    """The logical lines of a text: a line that ends inside quotes or brackets goes on in the next one."""
    lines = iter(text.split("\n"))
    for line in lines:
        opens = line.endswith("{") and not line[0].isspace() and not line.startswith("HloModule")
        while not opens and not _is_closed(line) and (more := next(lines, None)) is not None:
            line += f"\n{more}"
        yield line


def _is_closed(line: str) -> bool:
    if '"' in line:
        line = _STRING.sub("", line)
        if '"' in line:
            return False
    return line.count("{") <= line.count("}") and line.count("(") <= line.count(")")


def _add_instruction(line: str, computation: Computation, shapes: dict[str, Shape]) -> None:
    named = _NAMED.match(line)
    end = _shape_end(line, named.end()) if named else -1
    opcode = _OPCODE.match(line, end) if end > 0 else None
    if not named or not opcode:
        raise InputError(f"the compiled program has an instruction that cannot be read: {line.strip()[:120]!r}")
    text = line[named.end() : end]
    shape = shapes.setdefault(text, Shape(text))
    close = _closing(line, opcode.end() - 1)
    arguments = line[opcode.end() : close]
    if "%" in arguments:
        names = _OPERAND.findall(arguments)
    elif opcode.group(1) in ("constant", "parameter", "iota"):
        names = []
    else:  # the text is printed without percent signs
        names = [part.split()[-1] for part in comma_separated(COMMENT.sub("", arguments))]
    operands = tuple(map(computation.instructions.__getitem__, names))
    root, name = named.groups()
    instruction = Instruction(
        name, opcode.group(1), shape, operands, computation, bool(root), arguments, line[close + 1 :]
    )
    computation.instructions[name] = instruction
    for operand in dict.fromkeys(operands):
        operand.users.append(instruction)


def _shape_end(line: str, begin: int) -> int:
    """The end of the shape that begins at `begin`."""
    if line[begin] == "(":
        return _closing(line, begin) + 1
    match = ARRAY.match(line, begin)
    return match.end() if match else -1


def _closing(line: str, begin: int) -> int:
    """The place of the parenthesis that closes the one at `begin`."""
    close = line.find(")", begin)
    if close >= 0 and line.find("(", begin + 1, close) < 0 and line.find('"', begin + 1, close) < 0:
        return close
    depth = 0
    for token in _PARENTHESIS.finditer(line, begin):
        depth += {"(": 1, ")": -1}.get(token.group(), 0)
        if depth == 0:
            return token.start()
    raise InputError(f"the compiled program has a parenthesis that is never closed: {line.strip()[:120]!r}")
