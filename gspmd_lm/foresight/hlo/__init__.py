"""Parses the text of a compiled program into computations in the order in which they run, instructions and loops.

The text is `compiled.as_text()` of any backend. Attributes are parsed only when they are used, so that a text of 10 MB
takes a second or two.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType

from gspmd_lm.errors import InputError
from gspmd_lm.foresight.hlo.instruction import (
    ARRAY,
    COMMENT,
    HOST_SPACE,
    QUOTED,
    Instruction,
    Shape,
    Tables,
    Value,
    attributes_of,
    comma_separated,
)
from gspmd_lm.foresight.hlo.instruction import Array as Array
from gspmd_lm.foresight.hlo.instruction import source_line as source_line
from gspmd_lm.foresight.hlo.loops import Loops

COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)

# What hands on a value: copies, casts and changes of form; and what runs a computation in its place.
_COPIES = {"copy", "copy-start", "copy-done", "bitcast", "bitcast-convert", "convert", "reshape",
           "optimization-barrier"}  # fmt: skip
_INLINED = {"fusion", "call"}

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
    instructions: Mapping[str, Instruction]
    root: Instruction

    @functools.cached_property
    def parameters(self) -> Mapping[int, Instruction]:
        return {i.index: i for i in self.instructions.values() if i.opcode == "parameter"}


@dataclasses.dataclass(frozen=True)
class Executed:
    """An instruction that runs `times` in one run of the program, inside `loops` (the outermost first)."""

    instruction: Instruction
    computation: Computation
    executions: int
    loops: tuple[Instruction, ...]
    trip_counts_known: bool  # False if one of a loop around it is unknown, which then counts as 1


@dataclasses.dataclass(frozen=True, eq=False)
class Module:
    """A compiled program."""

    name: str
    entry: Computation
    computations: Mapping[str, Computation]
    devices: int
    attributes: Mapping[str, str]

    @functools.cached_property
    def instructions(self) -> tuple[Instruction, ...]:
        """The instructions of all computations."""
        return tuple(i for computation in self.computations.values() for i in computation.instructions.values())

    @functools.cached_property
    def callers(self) -> Mapping[str, tuple[tuple[Instruction, str], ...]]:
        """The callers of each computation: its name -> instructions, each with the role of the computation."""
        callers: dict[str, list[tuple[Instruction, str]]] = {}
        for instruction in self.instructions:
            for role, names in instruction.called.items():
                for name in names:
                    callers.setdefault(name, []).append((instruction, role))
        return {name: tuple(calls) for name, calls in callers.items()}

    def caller(self, instruction: Instruction) -> tuple[Instruction | None, str]:
        """What runs the computation of an instruction, and the role of this computation; None if there are several."""
        callers = self.callers.get(instruction.computation, ())
        return callers[0] if len(callers) == 1 else (None, "")

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
        """The rows of a ragged all-to-all's buffer for the worst case -> the share that balanced routing fills.

        The rows that are sent lie closely in the operand or in the result, whichever has fewer.
        """
        filled_share: dict[int, float] = {}
        for instruction in self.instructions:
            if instruction.base == "ragged-all-to-all" and instruction.phase != "-done":
                few, many = sorted(self.operand(instruction, n).shape.arrays[0].dimensions[0] for n in (0, 1))
                filled_share[many] = few / many
        return filled_share

    def siblings(self, instruction: Instruction) -> Mapping[str, Instruction]:
        """The instructions of the computation that an instruction belongs to."""
        return self.computations[instruction.computation].instructions

    def operand(self, instruction: Instruction, number: int = 0) -> Instruction:
        return self.siblings(instruction)[instruction.operands[number]]

    def operands(self, instruction: Instruction) -> list[Instruction]:
        siblings = self.siblings(instruction)
        return [siblings[name] for name in instruction.operands]

    def defined_by(self, place: Value) -> Value | None:
        """Where a value stood one step before: it was copied or cast, put into a tuple, or handed to a computation.

        None if the value is computed here, or a loop carries it.
        """
        instruction, path = place
        opcode = instruction.opcode
        if opcode in _COPIES:
            return self.operand(instruction), path
        if opcode == "get-tuple-element":
            return self.operand(instruction), (instruction.index, *path)
        if opcode == "tuple" and path:
            return self.operand(instruction, path[0]), path[1:]
        if opcode in _INLINED:
            called = instruction.called.get("calls") or instruction.called["to_apply"]
            return self.computations[called[0]].root, path
        caller, _ = self.caller(instruction)
        if opcode == "parameter" and caller and caller.opcode in _INLINED:
            return self.operand(caller, instruction.index), path
        return None

    def bodies(self, instruction: Instruction) -> tuple[Computation, ...]:
        """The computations that an instruction runs as programs, unlike the computations of fusions and reductions."""
        if instruction.opcode not in ("while", "conditional", "call", "call-start", "async-start"):
            return ()
        return tuple(self.computations[name] for names in instruction.called.values() for name in names)

    def trip_count(self, loop: Instruction) -> int | None:
        """The trip count of a while loop; None if neither the compiler nor the loop's condition tells."""
        known = loop.config.get("known_trip_count", {}).get("n")
        return int(known) if known is not None else Loops(self).trip_count(loop)

    def steps(
        self, computation: Computation | None = None, branches: Mapping[str, int] = MappingProxyType({})
    ) -> Iterator[Executed]:
        """All instructions that run in a computation, by default the whole program, in order.

        Loops, calls and asynchronous computations are entered. Of a conditional that `branches` names, so is the branch
        with this number, and of others all branches.
        """
        return self._steps(computation or self.entry, 1, (), True, branches)

    def _steps(
        self,
        computation: Computation,
        executions: int,
        loops: tuple[Instruction, ...],
        trip_counts_known: bool,
        branches: Mapping[str, int],
    ) -> Iterator[Executed]:
        for instruction in computation.instructions.values():
            yield Executed(instruction, computation, executions, loops, trip_counts_known)
            inside = (executions, loops, trip_counts_known)
            if instruction.opcode == "while":
                trip_count = self.trip_count(instruction)
                inside = (
                    executions * (1 if trip_count is None else trip_count),
                    (*loops, instruction),
                    trip_counts_known and trip_count is not None,
                )
            bodies = self.bodies(instruction)
            if instruction.name in branches:
                bodies = (bodies[branches[instruction.name]],)
            for body in bodies:
                yield from self._steps(body, *inside, branches)

    def inside(self, instruction: Instruction) -> Iterator[Instruction]:
        """All instructions of the computations that a fusion calls, also of nested ones."""
        for name in instruction.called.get("calls", ()):
            for inner in self.computations[name].instructions.values():
                yield inner
                yield from self.inside(inner)

    def collectives(self, instruction: Instruction) -> tuple[Instruction, ...]:
        """The collectives that begin with this instruction: the instruction itself, or those that a fusion hides.

        Each collective is found once. A pair is found at its -start, whose shape may hold more than the result. An
        asynchronous collective that several fusions carry on is found in the fusion that starts it. Computations that
        `bodies` returns are not searched.
        """
        if instruction.base in COLLECTIVES:
            return (instruction,) if instruction.phase in ("", "-start") else ()
        if instruction.opcode != "fusion":
            return ()
        inside = list(self.inside(instruction))
        started = {name for i in inside if i.custom_call_target == "AsyncCollectiveStart" for name in i.operands}
        begin = [i for i in inside if i.base in COLLECTIVES and i.phase in ("", "-start")]
        return tuple(i for i in begin if "async_collective_fusion_config" not in i.config or i.name in started)

    def chain_ids(self, fusion: Instruction, target: str) -> tuple[str, ...]:
        """The chain_ids of the asynchronous collectives that a TPU fusion starts or ends.

        `target` is AsyncCollectiveStart or AsyncCollectiveDone.
        """
        inside = list(self.inside(fusion))
        kept = {name for i in inside if i.custom_call_target == target for name in i.operands}
        collectives = (i for i in inside if i.name in kept and "async_collective_fusion_config" in i.config)
        return tuple(i.frontend.get("chain_id", i.name) for i in collectives)


def parse(text: str) -> Module:
    """The module that `text` describes.

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
    tables: dict[str, dict[int, str]] = {}
    computations: dict[str, Computation] = {}
    shapes: dict[str, Shape] = {}
    where, entry, table = "", "", None
    inside: dict[str, Instruction] | None = None
    built = Tables(tables)
    for line in lines:
        if inside is not None:
            if line.startswith("}"):
                root = next((i for i in inside.values() if i.is_root), None) or next(reversed(inside.values()))
                computations[where] = Computation(where, inside, root)
                inside = None
            elif line.strip():
                instruction = _instruction(line, where, shapes, built)
                inside[instruction.name] = instruction
        elif line in ("FileNames", "FunctionNames", "FileLocations", "StackFrames"):
            table = tables.setdefault(line, {})
        elif table is not None and (row := _NUMBERED.match(line)):
            table[int(row.group(1))] = row.group(2)
        elif header := _HEAD.match(line):
            where, inside = header.group(2), {}
            entry = where if header.group(1) else entry
        elif line.strip():
            raise InputError(f"the compiled program has a line that cannot be read: {line[:120]!r}")
    if entry not in computations:
        raise InputError(f"the compiled program {match.group(1)} has no ENTRY: its text is cut off")
    sizes = (int(attributes.get(name, 1)) for name in ("num_partitions", "replica_count"))
    return Module(match.group(1), computations[entry], computations, math.prod(sizes), attributes)


def _lines(text: str) -> Iterator[str]:
    """The logical lines of a text: a line that ends inside quotes or brackets goes on in the next one."""
    lines = iter(text.split("\n"))
    for line in lines:
        opens = line.endswith("{") and not line[0].isspace() and not line.startswith("HloModule")
        while not opens and not _closed(line) and (more := next(lines, None)) is not None:
            line += f"\n{more}"
        yield line


def _closed(line: str) -> bool:
    if '"' in line:
        line = _STRING.sub("", line)
        if '"' in line:
            return False
    return line.count("{") <= line.count("}") and line.count("(") <= line.count(")")


def _instruction(line: str, computation: str, shapes: dict[str, Shape], tables: Tables) -> Instruction:
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
        operands = tuple(_OPERAND.findall(arguments))
    elif opcode.group(1) in ("constant", "parameter", "iota"):
        operands = ()
    else:  # the text is printed without percent signs
        operands = tuple(part.split()[-1] for part in comma_separated(COMMENT.sub("", arguments)))
    return Instruction(
        named.group(2),
        opcode.group(1),
        shape,
        operands,
        computation,
        bool(named.group(1)),
        arguments,
        line[close + 1 :],
        tables,
    )


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
