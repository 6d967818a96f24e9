"""One instruction of a compiled program, and every fact about it that memory, collectives and timing read.

A fact is worked out when it is first asked for, and kept.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from gspmd_lm.errors import InputError
from gspmd_lm.foresight.hlo import values, work
from gspmd_lm.foresight.hlo.shape import Shape
from gspmd_lm.foresight.source_lines import source_line
from gspmd_lm.sharding import op_names

if TYPE_CHECKING:
    from gspmd_lm.foresight.hlo import Computation, Module
    from gspmd_lm.foresight.hlo.work import CollectiveOp

QUOTED = r'"(?:[^"\\]|\\.)*"'
COMMENT = re.compile(r"/\*.*?\*/")

_ROLES = (
    "calls",
    "to_apply",
    "condition",
    "body",
    "branch_computations",
    "true_computation",
    "false_computation",
    "called_computations",
)
_COPIES = ("dynamic-update-slice", "dynamic-slice", "slice", "copy")  # a fusion is the first of those that are in it
_PHASES = ("-start", "-update", "-done")
_BRACKET = re.compile(QUOTED + r"|[{}()\[\],]", re.S)
_ATTRIBUTE = re.compile(r"\s*([\w\-]+)=", re.S)
_METADATA = re.compile(rf"(\w+)=({QUOTED}|[^\s}}]+)", re.S)
_FIELD = re.compile(r"(\w+)=(\d+)")


@dataclasses.dataclass(frozen=True, eq=False)
class Instruction:
    """One line of the program."""

    name: str
    opcode: str
    shape: Shape
    operands: tuple[Instruction, ...] = dataclasses.field(repr=False)
    computation: Computation = dataclasses.field(repr=False)
    is_root: bool  # the text says so; the root may also be the last one
    arguments: str = dataclasses.field(repr=False)  # the text between the parentheses
    raw: str = dataclasses.field(repr=False)  # the text after them
    users: list[Instruction] = dataclasses.field(repr=False, default_factory=list)  # in their order, each once

    @property
    def module(self) -> Module:
        return self.computation.module

    @functools.cached_property
    def attributes(self) -> Mapping[str, str]:
        """The attributes after the operands, as texts."""
        return attributes_of(self.raw)

    @property
    def base(self) -> str:
        """The opcode without -start, -update, -done."""
        return self.opcode.removesuffix(self.phase)

    @functools.cached_property
    def phase(self) -> str:
        """'-start', '-update' or '-done' for a part of an asynchronous instruction; '' for other instructions."""
        return next((phase for phase in _PHASES if self.opcode.endswith(phase)), "")

    @functools.cached_property
    def config(self) -> Mapping:
        """The backend_config. A value that is not JSON has the key 'text'."""
        text = _unquote(self.attributes.get("backend_config", ""))
        try:
            config = json.loads(text or "{}")
        except json.JSONDecodeError:
            return {"text": text}
        return config if isinstance(config, dict) else {"text": text}

    @functools.cached_property
    def frontend(self) -> Mapping[str, str]:
        """The frontend_attributes. A value in braces keeps its braces and line ends."""
        text = self.attributes.get("frontend_attributes", "{}")
        return {key: _unquote(value) for key, value in attributes_of("," + text[1:-1]).items()}

    @functools.cached_property
    def estimated_cycles(self) -> int | None:
        """The compiler's estimate of the cycles of a TPU fusion; None for other instructions.

        libtpu says the largest number of 64 bits where it cannot tell (0.0.42.1).
        """
        cycles = self.config.get("window_config", {}).get("estimated_cycles", self.config.get("estimated_cycles"))
        return None if cycles is None or int(cycles) == 2**63 - 1 else int(cycles)

    @functools.cached_property
    def cost_estimate(self) -> tuple[float, float] | None:
        """The (FLOPs, bytes) that a custom call states, as Pallas and XLA's own kernels do on TPU; else None."""
        estimate = self.config.get("custom_call_config", {}).get("cost_estimate") or self.config.get(
            "cost_estimate", {}
        )
        flops_and_bytes = float(estimate.get("flops", 0)), float(estimate.get("bytes_accessed", 0))
        return flops_and_bytes if any(flops_and_bytes) else None

    @functools.cached_property
    def called_computations(self) -> Mapping[str, tuple[Computation, ...]]:
        """The called computations by their role, one of _ROLES."""
        if not any(f"{role}=" in self.raw for role in _ROLES):
            return {}
        texts = {role: self.attributes[role] for role in _ROLES if role in self.attributes}
        names = {role: [name.strip(" %") for name in text.strip("{}").split(",")] for role, text in texts.items()}
        return {role: tuple(map(self.module.computations.__getitem__, names[role])) for role in names}

    @functools.cached_property
    def bodies(self) -> tuple[Computation, ...]:
        """The computations that it runs as programs, unlike the computations of fusions and reductions."""
        if self.opcode not in ("while", "conditional", "call", "call-start", "async-start"):
            return ()
        return tuple(body for bodies in self.called_computations.values() for body in bodies)

    @functools.cached_property
    def copies(self) -> str:
        """The opcode, one of _COPIES, of the copy beside compute that it begins; '' if it begins none.

        XLA:GPU wraps such a copy into an asynchronous fusion. It may compute there, as scalars, where a slice begins.
        """
        if self.opcode != "fusion-start":
            return self.base if self.phase == "-start" and self.base in _COPIES else ""
        inside = {one.opcode for one in self.inside if any(array.dimensions for array in one.shape.arrays)}
        copies = [opcode for opcode in _COPIES if opcode in inside]
        return copies[0] if copies and inside <= {*_COPIES, "parameter", "constant", "bitcast"} else ""

    @functools.cached_property
    def inside(self) -> tuple[Instruction, ...]:
        """All instructions of the computations that a fusion calls, also of nested ones."""
        called = (inner for body in self.called_computations.get("calls", ()) for inner in body.instructions.values())
        return tuple(one for inner in called for one in (inner, *inner.inside))

    @property
    def executions(self) -> int:
        """How often it runs in one run of the program. A loop whose trip count is not known counts once."""
        return self.computation.executions

    @property
    def loops(self) -> tuple[Instruction, ...]:
        """The loops around it, the outermost first."""
        return self.computation.loops

    @functools.cached_property
    def trip_count(self) -> int | None:
        """The trip count of a while loop; None if neither the compiler nor the loop's condition nor its name tells."""
        known = self.config.get("known_trip_count", {}).get("n")
        count, assumed = int(known) if known is not None else values.trip_count(self), self.name_in_model.trip_count
        return int(assumed) if count is None and assumed else count

    @functools.cached_property
    def flops(self) -> float:
        """The FLOPs of one run, 2 x multiply-adds of all its matmuls; 0 if it has none."""
        return work.matmul_flops(self)

    @functools.cached_property
    def moved_bytes(self) -> collections.Counter[str]:
        """The bytes that one run reads and writes in "hbm", "chip" and "host": see `work.py`."""
        return work.moved_bytes(self)

    @functools.cached_property
    def collectives(self) -> tuple[CollectiveOp, ...]:
        """The exchanges between devices that begin with it."""
        return work.begun_by(self)

    @property
    def is_carried(self) -> bool:
        """Whether it is an asynchronous collective that several TPU fusions carry on, each with a part like it."""
        return "async_collective_fusion_config" in self.config

    @property
    def chain_id(self) -> str:
        """The id that the parts of such a collective share."""
        return self.frontend.get("chain_id", self.name)

    @functools.cached_property
    def carried_collectives(self) -> Mapping[str, tuple[Instruction, ...]]:
        """The parts of such collectives in a fusion that it begins with, by STARTED, and ends with, by ENDED."""
        return work.carried_by(self)

    @functools.cached_property
    def custom_call_target(self) -> str:
        return _unquote(self.attributes.get("custom_call_target", "")) if self.opcode == "custom-call" else ""

    @property
    def thread(self) -> str:
        """The thread of an asynchronous computation: sparsecore, host, ...; '' for the main thread."""
        return _unquote(self.attributes.get("async_execution_thread", ""))

    @functools.cached_property
    def metadata(self) -> Mapping[str, str]:
        """The metadata: op_name, stack_frame_id and so on."""
        text = self.attributes.get("metadata", "")
        return {key: _unquote(value) for key, value in _METADATA.findall(text)}

    @property
    def op_name(self) -> str:
        return self.metadata.get("op_name", "")

    @functools.cached_property
    def name_in_model(self) -> op_names.OpName:
        """What `op_name` says."""
        return op_names.parse(self.op_name)

    @functools.cached_property
    def frames(self) -> tuple[tuple[str, int], ...]:
        """The lines of Python that made the instruction, innermost first, each (file, line)."""
        frame = int(self.metadata.get("stack_frame_id", 0))
        if not frame and "source_file" in self.metadata:
            return ((self.metadata["source_file"], int(self.metadata.get("source_line", 0))),)
        return self.module.tables.frames(frame)

    @functools.cached_property
    def sources(self) -> tuple[str, ...]:
        """file:line of the frames of this package, from its root, and of models of one's own; innermost first."""
        return tuple(filter(None, (source_line(*frame) for frame in self.frames)))

    @property
    def source(self) -> str:
        """file:line of the innermost frame; '' where there is none."""
        return next(iter(self.sources), "")

    @property
    def index(self) -> int:
        """The index of a parameter or a get-tuple-element.

        Raises: ValueError for other instructions.
        """
        if self.opcode == "parameter":
            return int(self.arguments)
        if self.opcode == "get-tuple-element":
            return int(self.attributes["index"])
        raise ValueError(f"{self.name}: a {self.opcode} has no index")


@dataclasses.dataclass(frozen=True, eq=False)
class Tables:
    """The stack frames at the head of the text."""

    rows: dict[str, dict[int, str]] = dataclasses.field(default_factory=dict)  # name of a table -> number -> text

    @functools.cached_property
    def _frames(self) -> Mapping[int, tuple[int, int]]:
        """The number of a frame -> its location, and the number of the frame that called it."""
        rows = {n: _fields(row) for n, row in self.rows.get("StackFrames", {}).items()}
        parents = {n: row.get("parent_frame_id", 0) for n, row in rows.items()}
        # XLA's printer adds 1 to the parents (hlo_module.cc, 2025). Before, the outermost frame had parent 0.
        shift = int(all(parents.values()))
        return {n: (row["file_location_id"], parents[n] - shift) for n, row in rows.items()}

    def frames(self, number: int) -> tuple[tuple[str, int], ...]:
        frames = []
        while number in self._frames:
            location, parent = self._frames[number]
            row = _fields(self.rows["FileLocations"][location])
            frames.append((self.rows["FileNames"][row["file_name_id"]], row["line"]))
            if parent >= number:
                raise InputError(
                    f"the compiled program's stack frame {number} has the later frame {parent} as its caller"
                )
            number = parent
        return tuple(frames)


def _fields(row: str) -> dict[str, int]:
    return {name: int(value) for name, value in _FIELD.findall(row)}


def comma_separated(text: str) -> list[str]:
    """The parts of a text between commas that are outside of brackets and quotes."""
    parts, depth, begin = [], 0, 0
    for token in _BRACKET.finditer(text):
        letter = token.group()
        if letter in "{([":
            depth += 1
        elif letter in "})]":
            depth -= 1
        elif letter == "," and depth == 0:
            parts.append(text[begin : token.start()].strip())
            begin = token.end()
    last = text[begin:].strip()
    return [*parts, last] if last else parts


def attributes_of(text: str) -> dict[str, str]:
    """The attributes in ', key=value, ...': key -> value. A mesh's `, device_ids=(...)` belongs to its value."""
    attributes: dict[str, str] = {}
    last = ""
    for part in comma_separated(text):
        key = _ATTRIBUTE.match(part)
        if key and not (key.group(1) == "device_ids" and attributes.get(last, "").startswith("mesh[")):
            last = key.group(1)
            attributes[last] = part[key.end() :]
        elif key and last:
            attributes[last] += f", {part}"
        elif part:
            attributes[part] = ""
    return attributes


def _unquote(text: str) -> str:
    if not text.startswith('"'):
        return text
    return re.sub(r"\\(.)", lambda m: {"n": "\n", "t": "\t"}.get(m.group(1), m.group(1)), text[1:-1], flags=re.S)
