"""Each collective of a compiled program: what it moves, how often, over which mesh axes, and which rules cause it."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gspmd_lm.foresight.collectives.attribution import GATHER, OTHER, SCATTERED_SUM, SUM, Attribution
from gspmd_lm.foresight.collectives.def_use import ancestors, def_chain, is_operand_of, new_state, users_of
from gspmd_lm.foresight.collectives.tensors import GATHERS, REDUCTIONS, MovedTensor, moved_tensors
from gspmd_lm.foresight.graph import DataflowGraph
from gspmd_lm.foresight.hlo import Instruction, Module
from gspmd_lm.hardware.network import Network
from gspmd_lm.sharding.op_names import OpName, of_each_tensor, parse, state_array
from gspmd_lm.sharding.rules import Rules

NEAR = 30  # how many users and ancestors are looked at for the name of a tensor that has none
# Files whose lines say less than those that call them.
_GENERAL = ("gspmd_lm/sharding/", "gspmd_lm/model/weights.py")


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
    einsum: str = ""  # the matmul that the tensor comes from or goes to, where the program still says so
    link: str = ""  # the slowest in use: ici, die, dcn, nvlink, network; "" on cpu
    in_loop: bool = False  # once for every layer, every chunk of the loss or every microbatch


def find(
    module: Module, rules: Rules, axes: Mapping[str, Sequence[str]], network: Network, graph: DataflowGraph
) -> tuple[Collective, ...]:
    """Every collective of a program, the largest traffic first. `rules` are filled for the devices of `network`.

    `axes` are the logical axes of the model's arrays, by the path of a weight or the name of an activation.
    """
    results, attribution = new_state(module), Attribution(rules, axes, graph)
    parts: dict[Collective, list[Collective]] = {}
    for tensor in moved_tensors(module):
        groups, executions = tensor.op.groups, tensor.op.scheduled.executions
        mesh_axes = network.axes(groups)
        if not mesh_axes:
            continue
        origin = _origin(tensor, results.get(tensor.instruction, ("", "")), attribution)
        path, rows = _caused(tensor, origin, attribution, mesh_axes)
        part = Collective(
            kind=tensor.kind,
            mesh_axes=mesh_axes,
            dtype=tensor.op.inputs[0].dtype,
            times_per_step=executions,
            bytes_per_device_per_step=tensor.sent_bytes * executions,
            phase=origin.name.phase,
            op=path,
            source=next(filter(None, map(_source, origin.instructions)), ""),
            rules=rows,
            overlapped=tensor.overlapped,
            group_size=tensor.op.group_size,
            elements=tensor.op.elements,
            instructions=(tensor.instruction.name,),
            einsum=origin.einsum,
            link=network.link(groups),
            in_loop=bool(tensor.op.scheduled.loops),
        )
        sizeless = dataclasses.replace(part, times_per_step=0, bytes_per_device_per_step=0, elements=0, instructions=())
        parts.setdefault(sizeless, []).append(part)
    return tuple(sorted(map(_total, parts.values()), key=lambda c: -c.bytes_per_device_per_step))


def _total(parts: list[Collective]) -> Collective:
    return dataclasses.replace(
        parts[0],
        times_per_step=sum(part.times_per_step for part in parts),
        bytes_per_device_per_step=sum(part.bytes_per_device_per_step for part in parts),
        elements=max(part.elements for part in parts),
        instructions=tuple(dict.fromkeys(name for part in parts for name in part.instructions)),
    )


class _Candidate(NamedTuple):
    """A name that a moved tensor may have, and the instruction that bears it."""

    name: OpName
    instruction: Instruction


@dataclasses.dataclass(frozen=True)
class _Origin:
    """What a moved tensor is, as the op_name metadata of the program says."""

    name: OpName
    instructions: Sequence[Instruction]  # those that may have its source line, the best first
    einsum: str  # the matmul that the tensor comes from, or the nearest that reads it
    weight: str  # the weight that the tensor is, among the step's arguments
    new_weight: str  # the updated weight that the tensor is, among the step's results


def _origin(tensor: MovedTensor, result: tuple[str, str], attribution: Attribution) -> _Origin:
    """What a moved tensor is; `result` says which array of the new state.

    A tensor has the name of the op that makes it. Where that op has no name, or the name of another weight, the tensor
    has the name of one of its users. Where no user has a name, the tensor has that of one of its ancestors.
    """
    chain = def_chain(tensor.operand)
    tree, path = state_array(chain[-1].op_name) if chain[-1].opcode == "parameter" else ("", "")
    weight = path if tree == "params" else ""
    users = list(itertools.islice(users_of(tensor.instruction), NEAR))
    candidates = _names_of_op(tensor, chain)
    einsum = _einsum(tensor, candidates, users, weight)
    if not any(_is_about(weight, candidate.name) for candidate in candidates):
        neighbours = itertools.islice(itertools.chain(users, ancestors(tensor.operand)), NEAR)
        candidates += [_Candidate(one.name_in_model, one) for one in neighbours if not state_array(one.op_name)[0]]
    name, instruction = _best(candidates, weight) or _Candidate(tensor.instruction.name_in_model, tensor.instruction)
    if tensor.kind in GATHERS:
        readers = [
            (user.name_in_model, is_operand_of(user, tensor.instruction))
            for user in users
            if user.op_name != instruction.op_name
        ]
        name = _with_readers(name, readers, attribution)
    instructions = [instruction, *chain, tensor.instruction]
    if instruction is tensor.instruction and tensor.merged:  # it has the line of the first of its tensors
        instructions = [*tensor.instruction.module.by_op_name.get(tensor.name, ()), *chain]
    result_tree, result_path = result
    return _Origin(
        name=name,
        instructions=instructions,
        einsum=einsum,
        weight=weight,
        new_weight=result_path if result_tree == "params" and name.phase == "optimizer" else "",
    )


def _names_of_op(tensor: MovedTensor, chain: Sequence[Instruction]) -> list[_Candidate]:
    """The names of the op that makes a tensor, the best first; those of the step's arguments are left out."""
    named = [(tensor.name, tensor.instruction)] if tensor.name else []
    named += [(one.op_name, one) for one in chain if len(of_each_tensor(one.op_name, 1)) == 1]
    if not tensor.name:  # the name of one of several tensors is better than none
        named.append((tensor.instruction.op_name, tensor.instruction))
    return [_Candidate(parse(text), one) for text, one in named if text and not state_array(text)[0]]


def _einsum(tensor: MovedTensor, candidates: Sequence[_Candidate], users: Sequence[Instruction], weight: str) -> str:
    """The einsum that a tensor comes from; else, unless the tensor is a sum, the nearest einsum that reads it."""
    names = [candidate.name for candidate in candidates]
    if tensor.kind not in REDUCTIONS:
        readers = (user.name_in_model for user in users)
        names += [name for name in readers if name.owners and (not weight or weight in name.owners)]
    return next((name.einsum for name in names if name.einsum), "")


def _best(candidates: Sequence[_Candidate], weight: str) -> _Candidate | None:
    """The first name that is about the weight, else the first that is located at all, else the first.

    A parameter that is gathered is read before the optimizer runs. The optimizer's name on a merged operation is that
    of another tensor.
    """
    located = [one for one in candidates if one.name.is_located and not (weight and one.name.phase == "optimizer")]
    about = (one for one in located if _is_about(weight, one.name))
    return next(itertools.chain(about, located, candidates), None)


def _is_about(weight: str, name: OpName) -> bool:
    """Whether a name is located in the model, and if a weight is given, is that of this weight or its module."""
    names_weight = weight in (*name.owners, name.array) or weight.rpartition(".")[0] == ".".join(name.modules)
    return name.is_located and (not weight or names_weight)


def _with_readers(name: OpName, readers: Sequence[tuple[OpName, bool]], attribution: Attribution) -> OpName:
    """The name of a gathered tensor, completed by its readers' names, each with whether it reads it directly.

    The name says which array is gathered. The matmuls that read it whole say which weights they belong to.
    """
    if not name.owners and attribution.is_activation(name.array):
        matmuls = [(reader, direct) for reader, direct in readers if reader.owners and reader.phase == name.phase]
        nearest = matmuls[0][0].owners if matmuls else ()
        weights = {path for reader, direct in matmuls if direct for path in reader.owners}
        order = {weight: number for number, weight in enumerate(attribution.rules.vocabulary.weights)}
        ordered = sorted(weights, key=lambda path: order.get(path.rpartition(".")[2], len(order)))
        name = dataclasses.replace(name, owners=tuple(ordered) or nearest)
    phases = [reader.phase for reader, _ in readers if reader.owners == name.owners != ()]
    if name.phase == "forward" and phases and "forward" not in phases:
        name = dataclasses.replace(name, phase=phases[0])
    return name


def _caused(
    tensor: MovedTensor, origin: _Origin, attribution: Attribution, mesh_axes: tuple[str, ...]
) -> tuple[str, tuple[str, ...]]:
    """What a tensor is called, and the rows that cause its movement."""
    name, weight, new_weight = origin.name, origin.weight, ""
    if tensor.kind == "collective-permute" and {*mesh_axes} <= {*attribution.rules.stages}:
        return name.path or "step", attribution.of_stages
    placed = name.array if name.array in attribution.weights else ""
    # TPU gathers a small weight by an all-reduce, which adds zeros to each device's shard.
    gathers = tensor.kind in GATHERS or (tensor.kind == "all-reduce" and bool(weight) and not name.summed_axes)
    if tensor.kind in REDUCTIONS and not gathers:
        does, weight = (SUM if tensor.kind == "all-reduce" else SCATTERED_SUM), placed
    elif gathers and not attribution.looks_up(name):
        does, new_weight = GATHER, origin.new_weight
        weight = new_weight or weight or placed
    else:
        does = OTHER
    return weight or name.path or "step", attribution.rows(does, name, mesh_axes, weight, new_weight)


def _source(instruction: Instruction) -> str:
    """The innermost line that is not one of the package's general functions."""
    of_callers = (source for source in instruction.sources if not source.startswith(_GENERAL))
    return next(of_callers, instruction.source)
