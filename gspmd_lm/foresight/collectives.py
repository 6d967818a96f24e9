"""Each collective of a compiled program: what it moves, how often, over which mesh axes, and which rules cause it."""

import dataclasses
from collections.abc import Iterable
from typing import Protocol

from gspmd_lm.foresight.causes import Causes
from gspmd_lm.foresight.hlo import Instruction, Module
from gspmd_lm.foresight.network import Network
from gspmd_lm.foresight.provenance import Name, Provenance, each, read, state
from gspmd_lm.foresight.tensors import GATHERS, REDUCTIONS, Tensor, overlaps, tensors
from gspmd_lm.rules import Rules

# Files whose lines say less than those that call them.
_GENERAL = ("axes.py", "placement.py", "projection.py")


@dataclasses.dataclass(frozen=True)
class Collective:
    """What one source of traffic moves in one step: instructions that agree in everything but size, added up."""

    kind: str  # all-gather, all-reduce, reduce-scatter, all-to-all, collective-permute, windowed all-gather, ...
    mesh_axes: tuple[str, ...]
    dtype: str
    times_per_step: int
    bytes_per_device_per_step: int  # what one device sends: rings for gathers and reductions
    phase: str  # forward, backward, recomputation, optimizer
    op: str  # layers.attention.wq, loss, gradient_norm, ...
    source: str  # file:line
    rules: tuple[str, ...]  # keys of rows: rules.heads, weights.embed
    overlapped: bool
    group_size: int
    elements: int  # of the largest tensor moved, whole
    instructions: tuple[str, ...]  # names in the compiled program
    einsum: str = ""  # the product that the tensor comes from or goes to, where the program still says so
    link: str = ""  # the slowest in use: ici, die, dcn, nvlink, network; "" on cpu
    in_loop: bool = False  # once for every layer, every chunk of the loss or every microbatch


class HasAxes(Protocol):
    """An array of the model: the path of a weight or the name of an activation, and its logical axes."""

    @property
    def path(self) -> str: ...

    @property
    def axes(self) -> tuple[str, ...]: ...


def find(module: Module, rules: Rules, arrays: Iterable[HasAxes], network: Network) -> tuple[Collective, ...]:
    """Every collective of a program, the largest traffic first. `rules` are filled for the devices of `network`."""
    origins, causes = Provenance(module), Causes(rules, {array.path: array.axes for array in arrays})
    overlapped: dict[str, bool] = {}
    found: dict[Collective, list[Collective]] = {}
    for tensor in tensors(module, origins, network.slices):
        exchange, times = tensor.exchange, tensor.step.times
        mesh_axes = network.axes(exchange.groups)
        if not mesh_axes:
            continue
        if exchange.runs.name not in overlapped:
            overlapped[exchange.runs.name] = overlaps(module, exchange)
        name, op, source, einsum, rows = _explained(tensor, origins, causes, mesh_axes)
        one = Collective(
            kind=tensor.kind,
            mesh_axes=mesh_axes,
            dtype=exchange.inputs[0].dtype,
            times_per_step=times,
            bytes_per_device_per_step=tensor.sent_bytes * times,
            phase=name.phase,
            op=op,
            source=source,
            rules=causes.ordered(rows),
            overlapped=overlapped[exchange.runs.name],
            group_size=exchange.group_size,
            elements=tensor.whole,
            instructions=(tensor.instruction.name,),
            einsum=einsum,
            link=network.link(exchange.groups),
            in_loop=bool(tensor.step.loops),
        )
        alike = dataclasses.replace(one, times_per_step=0, bytes_per_device_per_step=0, elements=0, instructions=())
        found.setdefault(alike, []).append(one)
    return tuple(sorted(map(_added_up, found.values()), key=lambda c: -c.bytes_per_device_per_step))


def _added_up(alike: list[Collective]) -> Collective:
    return dataclasses.replace(
        alike[0],
        times_per_step=sum(one.times_per_step for one in alike),
        bytes_per_device_per_step=sum(one.bytes_per_device_per_step for one in alike),
        elements=max(one.elements for one in alike),
        instructions=tuple(dict.fromkeys(name for one in alike for name in one.instructions)),
    )


def _explained(
    tensor: Tensor, origins: Provenance, causes: Causes, mesh_axes: tuple[str, ...]
) -> tuple[Name, str, str, str, set[str]]:
    """Where a tensor comes from: its name, op, source line, einsum and the rows that cause its movement."""
    trail = origins.trail(tensor.place)
    named = [(tensor.name, tensor.instruction)] if tensor.name else []
    named += [(at.op_name, at) for at in trail if at.op_name and len(each(at.op_name, 1)) == 1]
    if not tensor.name:  # of a merged instruction at least the phase is right
        named.append((tensor.instruction.op_name, tensor.instruction))
    read_ = [(read(text), at) for text, at in named if text and not state(text)[0]]
    name, at = next(((n, at) for n, at in read_ if n.known), read_[0] if read_ else (read(""), tensor.instruction))
    tree, given = state(trail[-1].op_name) if trail[-1].opcode == "parameter" else ("", "")
    weight = given if tree == "params" else ""
    placed = name.placed[1] if name.placed and name.placed[1] in causes.weights else ""
    returned = origins.returned.get((tensor.instruction.name, tensor.instruction.computation), ("", ""))
    updated = returned[1] if returned[0] == "params" and name.phase == "optimizer" else ""
    # An all-reduce of what is given adds zeros to a piece: so TPU gathers small arrays.
    gathers = tensor.kind in GATHERS or (tensor.kind == "all-reduce" and bool(weight) and not name.sums)
    if tensor.kind in REDUCTIONS and not gathers:
        weight = placed or next((path for path in name.of if path in causes.weights), "")
        rows = causes.reduction(name, mesh_axes, tensor.kind != "all-reduce", weight)
        op = _op(name, weight=placed)
    elif gathers and not causes.looks_up(name):
        weight = weight or placed
        rows = causes.gather(name, mesh_axes, weight, updated)
        op = _op(name, weight=updated or weight)
    else:
        rows = causes.resharding(name, mesh_axes, weight)
        op = _op(name, weight=weight)
    rows |= causes.look_up(name)
    einsum = name.einsum or next((n.einsum for n, _ in read_ if n.einsum), "")
    if not einsum and tensor.kind not in REDUCTIONS:
        einsum = _einsum_after(origins, tensor, weight)
    lines = [at, *trail, tensor.instruction]
    if at is tensor.instruction and tensor.merged:  # it has the line of the first of its tensors
        lines = [*origins.called(tensor.name), *trail]
    source = next(filter(None, map(_source, lines)), "")
    return name, op, source, einsum, rows


def _op(name: Name, weight: str) -> str:
    """'layers.attention.wq', 'layers.attention.wq+wk+wv', 'layers.attention_norm', 'loss', 'gradient_norm'."""
    if weight:
        return weight
    if name.of:
        parts = [name.of[0]]
        for before, path in zip(name.of, name.of[1:], strict=False):
            same = before.rpartition(".")[0] == path.rpartition(".")[0]
            parts.append(path.rpartition(".")[2] if same else path)
        return "+".join(parts)
    if name.modules:
        return ".".join(name.modules)
    return name.placed[1] if name.placed else "step"


def _source(instruction: Instruction) -> str:
    """The innermost line of the package that is not one of its general functions."""
    inside = [(file.rpartition("gspmd_lm/")[2], line) for file, _, line in instruction.frames if "gspmd_lm/" in file]
    special = [(file, line) for file, line in inside if not file.endswith(_GENERAL)]
    return next((f"gspmd_lm/{file}:{line}" for file, line in special or inside), "")


def _einsum_after(origins: Provenance, tensor: Tensor, weight: str) -> str:
    """The nearest product with a weight that uses what was moved."""
    for number, user in enumerate(origins.consumers(tensor.instruction)):
        name = read(user.op_name)
        if name.einsum and name.of and (not weight or weight in name.of):
            return name.einsum
        if number > 30:
            break
    return ""
