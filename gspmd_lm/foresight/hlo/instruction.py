"""One instruction of a compiled program: its shape, operands and attributes, and the Python lines that made it."""

import dataclasses
import functools
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path

from gspmd_lm.errors import InputError
from gspmd_lm.units import bits

QUOTED = r'"(?:[^"\\]|\\.)*"'
COMMENT = re.compile(r"/\*.*?\*/")
ARRAY = re.compile(r"([a-z]\w*)\[([^\]]*)\](?:\{((?:[^{}]|\{[^{}]*\})*)\})?")

_ROLES = ("calls", "to_apply", "condition", "body", "branch_computations", "true_computation", "false_computation",
          "called_computations")  # fmt: skip
_PHASES = ("-start", "-update", "-done")
_BRACKET = re.compile(QUOTED + r"|[{}()\[\],]", re.S)
_MEMORY_SPACE = re.compile(r"S\((\d+)\)")
_TILED = re.compile(r"([\d,]*):.*?T\((\d+(?:,\d+)*)\)")
_ATTRIBUTE = re.compile(r"\s*([\w\-]+)=", re.S)
_METADATA = re.compile(rf"(\w+)=({QUOTED}|[^\s}}]+)", re.S)
_FIELD = re.compile(r"(\w+)=(\d+)")
# Paths whose lines tell little: libraries of layers and optimizers, Python's own, and what calls a step to compile it.
_TELL_LITTLE = re.compile(
    r"-packages/(jax|jaxlib|flax|optax|chex|einops|equinox|haiku|numpy)/|/lib/python[\d.]*/(?!(site|dist)-packages/)"
    r"|gspmd_lm/(foresight/|sharding/of_flax\.)|<frozen"
)
_PACKAGE = frozenset(entry.name for entry in Path(__file__).parents[2].iterdir())  # its folders and files
HOST_SPACE = 5  # the memory space of the host in layouts of TPU programs


def in_package(file: str) -> str:
    """The path of a file of this package, from its root; '' for other files, such as an example in a clone.

    The folder of a clone may have the package's name too.
    """
    rest = file.rpartition("gspmd_lm/")[2]
    return f"gspmd_lm/{rest}" if rest != file and rest.split("/")[0] in _PACKAGE else ""


def source_line(file: str, line: int | str) -> str:
    """file:line of this package, from its root, or of other code, from its folder; '' for what tells little."""
    if _TELL_LITTLE.search(file):
        return ""
    return f"{in_package(file) or '/'.join(file.split('/')[-2:])}:{line}"


@dataclasses.dataclass(frozen=True)
class Array:
    """One array of a shape. `memory_space` is S(n) of its layout. On TPU, 1 is on the chip and 5 is the host."""

    dtype: str
    dimensions: tuple[int, ...]
    memory_space: int = 0
    layout: str = ""

    @property
    def elements(self) -> int:
        return math.prod(self.dimensions)

    @property
    def bytes(self) -> int:
        """The bytes of the array, without the padding of tiles."""
        return math.ceil(self.elements * bits(self.dtype) / 8)

    @property
    def padded_bytes(self) -> int:
        """The bytes of the array in memory. A tiled TPU layout, such as T(8,128), is filled up to whole tiles."""
        tiled = _TILED.match(self.layout)
        if not tiled or not self.dimensions:
            return self.bytes
        order = [int(n) for n in tiled.group(1).split(",") if n] or list(reversed(range(len(self.dimensions))))
        tile = [int(n) for n in tiled.group(2).split(",")]
        sizes = [self.dimensions[n] for n in order]  # the fastest dimension first
        for n, size in enumerate(reversed(tile[-len(sizes) :])):
            sizes[n] = -(-sizes[n] // size) * size
        return math.ceil(math.prod(sizes) * bits(self.dtype) / 8)


@dataclasses.dataclass(frozen=True)
class Shape:
    """A shape as the program writes it."""

    text: str

    @functools.cached_property
    def arrays(self) -> tuple[Array, ...]:
        """All arrays of the shape, with tuples flattened."""
        return tuple(_array(match) for match in ARRAY.finditer(self.text))

    @property
    def bytes(self) -> int:
        return sum(array.bytes for array in self.arrays)


@dataclasses.dataclass(frozen=True, eq=False)
class Instruction:
    """One line of the program. `called` and other properties name computations of its module."""

    name: str
    opcode: str
    shape: Shape
    operands: tuple[str, ...]
    computation: str
    is_root: bool
    arguments: str = dataclasses.field(repr=False)  # the text between the parentheses
    raw: str = dataclasses.field(repr=False)  # the text after them
    tables: "Tables" = dataclasses.field(repr=False)

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
        text = _unquoted(self.attributes.get("backend_config", ""))
        try:
            config = json.loads(text or "{}")
        except json.JSONDecodeError:
            return {"text": text}
        return config if isinstance(config, dict) else {"text": text}

    @functools.cached_property
    def frontend(self) -> Mapping[str, str]:
        """The frontend_attributes. A value in braces keeps its braces and line ends."""
        text = self.attributes.get("frontend_attributes", "{}")
        return {key: _unquoted(value) for key, value in attributes_of("," + text[1:-1]).items()}

    @functools.cached_property
    def estimated_cycles(self) -> int | None:
        """The compiler's estimate of the cycles of a TPU fusion; None for other instructions."""
        cycles = self.config.get("window_config", {}).get("estimated_cycles", self.config.get("estimated_cycles"))
        return None if cycles is None else int(cycles)

    @functools.cached_property
    def cost_estimate(self) -> tuple[float, float] | None:
        """The (FLOPs, bytes) that a custom call states, as Pallas and XLA's own kernels do on TPU; else None."""
        estimate = self.config.get("custom_call_config", {}).get("cost_estimate") or self.config.get(
            "cost_estimate", {}
        )
        flops_and_bytes = float(estimate.get("flops", 0)), float(estimate.get("bytes_accessed", 0))
        return flops_and_bytes if any(flops_and_bytes) else None

    @functools.cached_property
    def called(self) -> Mapping[str, tuple[str, ...]]:
        """The called computations: their role, one of _ROLES -> names."""
        computations = {role: self.attributes[role] for role in _ROLES if role in self.attributes}
        return {role: tuple(n.strip(" %") for n in text.strip("{}").split(",")) for role, text in computations.items()}

    @property
    def custom_call_target(self) -> str:
        return _unquoted(self.attributes.get("custom_call_target", ""))

    @property
    def thread(self) -> str:
        """The thread of an asynchronous computation: sparsecore, host, ...; '' for the main thread."""
        return _unquoted(self.attributes.get("async_execution_thread", ""))

    @functools.cached_property
    def metadata(self) -> Mapping[str, str]:
        """The metadata: op_name, stack_frame_id and so on."""
        text = self.attributes.get("metadata", "")
        return {key: _unquoted(value) for key, value in _METADATA.findall(text)}

    @property
    def op_name(self) -> str:
        return self.metadata.get("op_name", "")

    @functools.cached_property
    def frames(self) -> tuple[tuple[str, int], ...]:
        """The lines of Python that made the instruction, innermost first, each (file, line)."""
        frame = int(self.metadata.get("stack_frame_id", 0))
        if not frame and "source_file" in self.metadata:
            return ((self.metadata["source_file"], int(self.metadata.get("source_line", 0))),)
        return self.tables.frames(frame)

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


Value = tuple[Instruction, tuple[int, ...]]  # an element of an instruction's value: the indices of nested tuples


class Tables:
    """The stack frames at the head of the text."""

    def __init__(self, tables: Mapping[str, Mapping[int, str]]):
        self._tables = tables  # filled later

    @functools.cached_property
    def _frames(self) -> Mapping[int, tuple[int, int]]:
        """The number of a frame -> its location, and the number of the frame that called it."""
        rows = {n: _fields(row) for n, row in self._tables.get("StackFrames", {}).items()}
        parents = {n: row.get("parent_frame_id", 0) for n, row in rows.items()}
        # XLA's printer adds 1 to the parents (hlo_module.cc, 2025). Before, the outermost frame had parent 0.
        shift = int(all(parents.values()))
        return {n: (row["file_location_id"], parents[n] - shift) for n, row in rows.items()}

    def frames(self, number: int) -> tuple[tuple[str, int], ...]:
        frames = []
        while number in self._frames:
            location, parent = self._frames[number]
            row = _fields(self._tables["FileLocations"][location])
            frames.append((self._tables["FileNames"][row["file_name_id"]], row["line"]))
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


def _array(match: re.Match) -> Array:
    dtype, sizes, layout = match.groups(default="")
    space = _MEMORY_SPACE.search(layout)
    dimensions = tuple(int(size.strip(" <=")) for size in sizes.split(",") if size.strip())
    return Array(dtype, dimensions, int(space.group(1)) if space else 0, layout)


def _unquoted(text: str) -> str:
    if not text.startswith('"'):
        return text
    return re.sub(r"\\(.)", lambda m: {"n": "\n", "t": "\t"}.get(m.group(1), m.group(1)), text[1:-1], flags=re.S)
