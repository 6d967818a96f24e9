"""The contents of a device's memory: weights, optimizer state, batch and temporaries, as the compiler counted them."""

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any

from gspmd_lm.errors import RunFailed
from gspmd_lm.foresight import hlo
from gspmd_lm.foresight.source_lines import source_line

# Instructions that make no new buffer: they name, take apart or hand on what others made.
_NO_BUFFER = {
    "parameter",
    "get-tuple-element",
    "tuple",
    "bitcast",
    "while",
    "conditional",
    "call",
    "constant",
    "optimization-barrier",
    "dynamic-update-slice",
    "after-all",
}
SHOWN = 3  # of the largest temporaries
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = r"([\d.]+)([KMGT]?)"


@dataclasses.dataclass(frozen=True)
class DeviceArray:
    """The shard of a named array that one device holds. A temporary of its shape is taken for it."""

    path: str
    axes: tuple[str, ...]
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Temporary:
    """One large temporary of the compiled program."""

    bytes: int
    shape: str  # as the program writes it: bf16[4,8192,14336]
    axes: tuple[str, ...]  # logical axes; () where the shape is that of no array that has a name
    source: str  # file:line
    op: str  # module path and primitive


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes per device. `limit_bytes` is None where the target has none (cpu)."""

    temporaries_bytes: int
    peak_bytes: int
    limit_bytes: int | None
    host_bytes: int
    fits: bool
    largest: tuple[Temporary, ...]
    refusal: str = ""  # what the compiler said when it refused for memory
    padding_bytes: int = 0  # of the temporaries: what tiles add to weights, optimizer state, batch and cache
    weights_bytes: int = 0
    optimizer_bytes: int = 0
    batch_bytes: int = 0
    cache_bytes: int = 0  # keys and values, in generation
    # Of a step of one's own: what it is given, of which nothing tells weights and batch apart, and the part of what it
    # gives that takes the place of no argument.
    arguments_bytes: int = 0
    results_bytes: int = 0

    @property
    def state_bytes(self) -> int:
        """Weights and optimizer state, which checkpoints hold."""
        return self.weights_bytes + self.optimizer_bytes


def measure(
    compiled: Mapping[str, int],
    state_bytes: Mapping[str, int],
    limit_bytes: int | None,
    module: hlo.Module,
    known: Iterable[DeviceArray],
    accepted: bool = False,
) -> Memory:
    """The memory of a compiled program.

    accepted: whether the compiler itself refuses a program that does not fit, as libtpu does. The temporaries that it
    reports hold more than is alive at once, such as buffers on the chip. Their sum may pass the limit, and the peak is
    then the limit.

    compiled: what `memory_analysis` says, `*_in_bytes`. state_bytes: weights, optimizer, batch and cache, counted from
    shapes; what tiling adds to them is among the temporaries. A donated argument is counted once, on the host as well;
    so is the code.
    """
    beside = compiled["output_size_in_bytes"] - compiled["alias_size_in_bytes"]
    counted = ("argument_size_in_bytes", "temp_size_in_bytes", "generated_code_size_in_bytes")
    total = beside + sum(compiled[name] for name in counted)
    if accepted and limit_bytes is not None:
        total = min(total, limit_bytes)
    results_bytes = beside if "arguments" in state_bytes else 0
    on_host = {name: size for name, size in compiled.items() if name.startswith("host_")}
    host = sum(-size if "alias" in name else size for name, size in on_host.items())
    return Memory(
        **_by_tree(state_bytes),
        temporaries_bytes=total - sum(state_bytes.values()) - results_bytes,
        results_bytes=results_bytes,
        peak_bytes=total,
        limit_bytes=limit_bytes,
        host_bytes=host,
        fits=limit_bytes is None or total <= limit_bytes,
        largest=_largest(module, list(known)),
        padding_bytes=max(0, compiled["argument_size_in_bytes"] - sum(state_bytes.values())),
    )


def refused_memory(message: str, state_bytes: Mapping[str, int], limit_bytes: int | None) -> Memory:
    """The memory of a program that the compiler refused, from its own numbers.

    Raises: RunFailed for a refusal without numbers.
    """
    total = re.search(rf"HLO temporaries \({_SIZE}\) exceeds available HBM \({_SIZE}\)", message)
    used = total or re.search(rf"Used {_SIZE} of {_SIZE} hbm", message)
    if not used:
        raise RunFailed(
            f"the compiler refused the program for memory, in words that are not known:\n  {message[:2000]}"
        )
    peak, available = _bytes(used[1], used[2]), _bytes(used[3], used[4])
    allocations = re.finditer(
        rf"Size: {_SIZE}\s+(?:Operator: (?:op_name=\"(?P<op>[^\"]*)\")?(?P<rest>[^\n]*)\s+)?Shape: (?P<shape>\S+)",
        message,
    )
    largest = tuple(
        Temporary(_bytes(match[1], match[2]), match["shape"], (), _source(match["rest"] or ""), _op(match["op"] or ""))
        for match in allocations
    )
    return Memory(
        **_by_tree(state_bytes),
        temporaries_bytes=max(0, peak - sum(state_bytes.values())),
        peak_bytes=peak,
        limit_bytes=limit_bytes or available,
        host_bytes=0,
        fits=False,
        largest=largest[:SHOWN],
        refusal=message.strip().splitlines()[0],
    )


def _by_tree(state_bytes: Mapping[str, int]) -> dict[str, Any]:
    return {f"{tree}_bytes": size for tree, size in state_bytes.items()}


def _bytes(number: str, unit: str) -> int:
    return int(float(number) * _UNITS[unit])


def _source(text: str) -> str:
    match = re.search(r'source_file="([^"]*)" source_line=(\d+)', text)
    return source_line(match[1], match[2]) if match else ""


def _op(op_name: str) -> str:
    return re.sub(r"^jit\(_\w+\)/", "", op_name)


def _largest(module: hlo.Module, known: list[DeviceArray]) -> tuple[Temporary, ...]:
    """The largest buffers that the program makes on the device, those alike told once."""
    largest: dict[tuple[str, str], Temporary] = {}
    for instruction in module.operations:
        arrays = instruction.shape.arrays
        if instruction.opcode in _NO_BUFFER or instruction.phase in ("-done", "-update") or len(arrays) != 1:
            continue
        array = arrays[0]
        if array.memory_space or _updates_in_place(instruction):
            continue
        shape = f"{array.dtype}[{','.join(map(str, array.dimensions))}]"
        op = _op(instruction.op_name)
        axes = _axes(array.dimensions, op, known)
        largest.setdefault((shape, op), Temporary(array.bytes, shape, axes, instruction.source, op))
    distinct: dict[tuple[str, str], Temporary] = {}
    for temporary in sorted(largest.values(), key=lambda temporary: (-temporary.bytes, not temporary.source)):
        distinct.setdefault((temporary.shape, temporary.source), temporary)
    return tuple(distinct.values())[:SHOWN]


def _updates_in_place(fusion: hlo.Instruction) -> bool:
    """Whether a fusion writes a slice of what it was given."""
    if fusion.opcode != "fusion":
        return False
    root = fusion.called_computations["calls"][0].root
    while root.opcode in ("bitcast", "copy"):
        root = root.operands[0]
    return root.opcode == "dynamic-update-slice"


def _axes(dimensions: tuple[int, ...], op: str, known: list[DeviceArray]) -> tuple[str, ...]:
    """The logical axis of each dimension of a buffer that has the shape of a named array, or of one per layer.

    Dimensions of size 1 that stand first have ''. () says that no array has the shape.
    """
    first = next((at for at, size in enumerate(dimensions) if size != 1), len(dimensions))
    wanted = dimensions[first:]
    layers = {size for named in known for axis, size in zip(named.axes, named.shape, strict=True) if axis == "layers"}
    fitting: list[tuple[DeviceArray, list[str]]] = []
    for named in known if wanted else ():
        if (axes := _align(wanted, named)) is not None:
            fitting.append((named, axes))
        elif wanted[0] in layers and "layers" not in named.axes and (axes := _align(wanted[1:], named)) is not None:
            fitting.append((named, ["layers", *axes]))
    if not fitting:
        return ()
    _, axes = min(fitting, key=lambda fit: fit[0].path.split(".")[-1] not in op)
    return ("",) * first + tuple(axes)


def _align(dimensions: tuple[int, ...], named: DeviceArray) -> list[str] | None:
    """The axes of an array that are the dimensions of a buffer. The buffer may lack those of size 1 alone."""
    axes: list[str] = []
    left = [*zip(named.axes, named.shape, strict=True)]
    for size in dimensions:
        while left and left[0][1] == 1 != size:
            left.pop(0)
        if not left or left[0][1] != size:
            return None
        axes.append(left.pop(0)[0])
    return axes if all(size == 1 for _, size in left) else None
