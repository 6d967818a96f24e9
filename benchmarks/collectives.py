"""Counts the collectives of a compiled program from its text, as tensors moved per device and per run.

An instruction that a combiner made carries several tensors and counts as that many; one inside a loop counts once for
every turn.
"""

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator

KINDS = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)


@dataclasses.dataclass(frozen=True)
class Collective:
    """One tensor that one instruction moves."""

    kind: str
    dtype: str
    shape: tuple[int, ...]  # of the output on one device
    group_size: int  # devices that take part in one exchange; 2 for a permute
    times: int  # per run of the program
    in_loop: int  # depth: 0 outside every loop
    computation: str
    op_name: str

    @property
    def elements(self) -> int:
        """Of the output, once."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Of the output, once."""
        return math.ceil(self.elements * _bits(self.dtype) / 8)

    @property
    def output_bytes(self) -> int:
        """Of the outputs of all times."""
        return self.bytes * self.times

    @property
    def ring_bytes(self) -> float:
        """What one device sends, all times: rings for reductions and gathers, the direct way for the rest."""
        n = self.group_size
        if self.kind == "reduce-scatter":
            return self.output_bytes * (n - 1)
        if self.kind.startswith("collective-"):
            return float(self.output_bytes)
        return self.output_bytes * (n - 1) / n * (2 if self.kind == "all-reduce" else 1)


def output_bytes(collectives: Iterable[Collective]) -> int:
    """The size of all outputs on one device in one run."""
    return sum(c.output_bytes for c in collectives)


def ring_bytes(collectives: Iterable[Collective]) -> float:
    """What one device sends in one run (see Collective.ring_bytes)."""
    return sum(c.ring_bytes for c in collectives)


def count(text: str) -> list[Collective]:
    """Every collective of a program, in the order of its text; `text` is that of `compiled.as_text()`.

    A conditional counts with all its branches.

    Raises: ValueError for a loop with collectives whose turns cannot be told.
    """
    program, entry = _parse(text)
    devices = math.prod(int(n) for n in re.findall(r"(?:num_partitions|replica_count)=(\d+)", text.partition("\n")[0]))
    found: list[Collective] = []

    def walk(name: str, times: int, depth: int) -> None:
        instructions = program[name]
        for instruction in instructions.values():
            if instruction.opcode == "while":
                inside = len(found)
                turns = _turns(instruction, instructions, program)
                walk(instruction.attribute("body"), times * (turns or 1), depth + 1)
                walk(instruction.attribute("condition"), times * ((turns or 0) + 1), depth + 1)
                if turns is None and len(found) > inside:
                    raise ValueError(f"{name}: cannot tell how often the loop {instruction.name} turns")
            elif not instruction.opcode.endswith(("-done", "-update")):
                for called in instruction.called():
                    walk(called, times, depth)
            found.extend(_moved(instruction, instructions, name, devices, times, depth))

    walk(entry, times=1, depth=0)
    return found


def table(collectives: Iterable[Collective]) -> str:
    """Lines for people: the tensors moved, those alike added up, the largest traffic first."""
    rows: dict[tuple, list[float]] = {}
    for c in collectives:
        key = c.kind, f"{c.dtype}{list(c.shape)}", c.group_size, c.in_loop, c.op_name
        row = rows.setdefault(key, [0, 0, 0])
        row[:] = row[0] + c.times, row[1] + c.output_bytes, row[2] + c.ring_bytes
    lines = [f"{'kind':19}{'shape':28}{'group':>6}{'loop':>5}{'times':>6}{'output kB':>11}{'ring kB':>11}  op"]
    for (kind, shape, group, loop, op), (times, out, ring) in sorted(rows.items(), key=lambda row: -row[1][1]):
        lines.append(f"{kind:19}{shape:28}{group:6}{loop:5}{times:6.0f}{out / 1e3:11.1f}{ring / 1e3:11.1f}  {op}")
    return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class _Instruction:
    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    rest: str  # everything after the opcode: operands and attributes

    def attribute(self, name: str) -> str:
        match = re.search(rf"\b{name}=%?([\w.\-]+)", self.rest)
        return match.group(1) if match else ""

    def called(self) -> list[str]:
        """The computations that this instruction runs once; what a reduction adds with is none."""
        if self.opcode == "conditional":
            branches = re.search(r"branch_computations=\{([^}]*)\}", self.rest)
            names = branches.group(1) if branches else ""
            names += ",".join(("", self.attribute("true_computation"), self.attribute("false_computation")))
            return [name.strip(" %") for name in names.split(",") if name.strip()]
        one = self.attribute("calls") or (self.attribute("to_apply") if self.opcode == "call" else "")
        return [one] if one else []


def _parse(text: str) -> tuple[dict[str, dict[str, _Instruction]], str]:
    """Computation -> name -> instruction, and the name of the computation where the program begins."""
    program: dict[str, dict[str, _Instruction]] = {}
    entry = ""
    inside: dict[str, _Instruction] = {}
    for line in re.sub(r"/\*.*?\*/", "", text).splitlines():
        if line.startswith("HloModule"):
            continue
        if head := re.match(r"(?:ENTRY )?%?([\w.\-]+) .*\{$", line):
            inside = program.setdefault(head.group(1), {})
            entry = head.group(1) if line.startswith("ENTRY") else entry
        elif body := re.match(r"\s+(?:ROOT )?%?([\w.\-]+) = (.*)$", line):
            shape, rest = _split_shape(body.group(2))
            opcode, _, rest = rest.partition("(")
            operands = re.findall(r"%([\w.\-]+)", rest[: rest.find(")")])
            inside[body.group(1)] = _Instruction(body.group(1), shape, opcode, tuple(operands), rest)
    return program, entry


def _split_shape(text: str) -> tuple[str, str]:
    """The shape at the beginning of `text`, and what follows it. Layouts may hold parentheses: {1,0:T(8,128)}."""
    depth = 0
    for at, letter in enumerate(text):
        depth += (letter in "([{") - (letter in ")]}")
        if letter == " " and depth == 0:
            return text[:at], text[at + 1 :]
    return text, ""


def _tensors(shape: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The (dtype, dimensions) of the arrays in a shape, tuples flattened."""
    for dtype, dimensions in re.findall(r"([a-z]\w*)\[([\d,<=]*)\]", re.sub(r"\{[^{}]*\}", "", shape)):
        yield dtype, tuple(int(size.strip("<=")) for size in dimensions.split(",") if size)


def _bits(dtype: str) -> int:
    if dtype == "pred":
        return 8
    width = re.match(r"[a-z]+(\d+)", dtype)  # f32, bf16, s4, f8e4m3fn
    return int(width.group(1)) if width else 0


def _moved(
    instruction: _Instruction,
    siblings: dict[str, _Instruction],
    computation: str,
    devices: int,
    times: int,
    depth: int,
) -> Iterator[Collective]:
    """What one instruction moves. Of an asynchronous pair, `-done` has the shape and `-start` everything else."""
    kind = instruction.opcode.removesuffix("-done")
    if kind not in KINDS:
        return
    start = siblings[instruction.operands[0]] if instruction.opcode.endswith("-done") else instruction
    group = 2 if kind == "collective-permute" else _group_size(start.rest, devices)
    op_name = re.search(r'op_name="([^"]*)"', start.rest)
    tensors = list(_tensors(instruction.shape))
    if kind == "all-to-all" and instruction.shape.startswith("("):  # one array, handed out as a tuple of its pieces
        tensors = [(dtype, (group, *shape)) for dtype, shape in tensors[::group]]
    for dtype, shape in tensors:
        yield Collective(kind, dtype, shape, group, times, depth, computation, op_name.group(1) if op_name else "")


def _group_size(attributes: str, devices: int) -> int:
    """How many devices take part in one exchange, from each of the ways to write replica_groups."""
    if mesh := re.search(r"replica_groups=\S*?mesh\[([^\]]*)\][^{]*\{([^}]*)\}", attributes):
        sizes = dict(re.findall(r"'([^']+)'=(\d+)", mesh.group(1)))
        parts = re.findall(r"'([^']+)'(?::\(\d+\)(\d+))?", mesh.group(2))  # 'a':(2)4 is a part of axis a of size 4
        return math.prod(int(part or sizes[name]) for name, part in parts)
    if iota := re.search(r"replica_groups=\[\d+,(\d+)\]<=", attributes):
        return int(iota.group(1))
    if groups := re.search(r"replica_groups=\{\{([\d,]*)\}", attributes):
        return len(groups.group(1).split(","))
    return devices  # replica_groups={} means everyone


def _turns(loop: _Instruction, siblings: dict[str, _Instruction], program: dict) -> int | None:
    """How often a loop turns; None where neither the compiler says so nor its condition is `counter < constant`."""
    if known := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.rest):
        return int(known.group(1))
    condition = program[loop.attribute("condition")]
    reachable = dict(condition)
    for instruction in condition.values():
        for called in instruction.called():
            reachable |= program[called]
    compared = [i for i in reachable.values() if i.opcode == "compare"]
    limits = [i for i in reachable.values() if i.opcode == "constant" and re.match(r"[su]\d+\[\]", i.shape)]
    counters = [i for i in condition.values() if i.opcode == "get-tuple-element"]
    if len(compared) != 1 or len(limits) != 1 or len(counters) != 1 or "direction=LT" not in compared[0].rest:
        return None
    state = siblings.get(loop.operands[0])
    first = state and state.opcode == "tuple" and siblings.get(state.operands[int(counters[0].attribute("index"))])
    while first and first.opcode in ("copy", "bitcast"):
        first = siblings.get(first.operands[0])
    if not first or first.opcode != "constant":
        return None
    return max(0, _constant(limits[0]) - _constant(first))


def _constant(instruction: _Instruction) -> int:
    return int(instruction.rest.partition(")")[0])
