"""Each collective of a compiled program: what it moves, how often, over which mesh axes, and which rules cause it."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

from gspmd_lm.foresight.collectives.attribution import Attribution
from gspmd_lm.foresight.collectives.def_use import DefUse
from gspmd_lm.foresight.collectives.tensors import GATHERS, REDUCTIONS, MovedTensor, moved_tensors
from gspmd_lm.foresight.graph import DataflowGraph
from gspmd_lm.foresight.hlo import Instruction, Module
from gspmd_lm.foresight.op_names import OpName, of_each_tensor, parse, state_array
from gspmd_lm.hardware.network import Network
from gspmd_lm.sharding.rules import Rules

NEAR = 30  # instructions within which a tensor without a name of its own is explained
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
    einsum: str = ""  # the product that the tensor comes from or goes to, where the program still says so
    link: str = ""  # the slowest in use: ici, die, dcn, nvlink, network; "" on cpu
    in_loop: bool = False  # once for every layer, every chunk of the loss or every microbatch


def find(
    module: Module, rules: Rules, axes: Mapping[str, Sequence[str]], network: Network, traced: DataflowGraph
) -> tuple[Collective, ...]:
    """Every collective of a program, the largest traffic first. `rules` are filled for the devices of `network`.

    `axes` are the logical axes of the model's arrays, by the path of a weight or the name of an activation.
    """
    origins, causes = DefUse(module), Attribution(rules, axes, traced)
    found: dict[Collective, list[Collective]] = {}
    for tensor in moved_tensors(module, origins, network.slices):
        exchange, times = tensor.op, tensor.step.executions
        mesh_axes = network.axes(exchange.groups)
        if not mesh_axes:
            continue
        origin = _origin(tensor, origins, causes)
        op, rows = _caused(tensor, origin, causes, mesh_axes)
        one = Collective(
            kind=tensor.kind,
            mesh_axes=mesh_axes,
            dtype=exchange.inputs[0].dtype,
            times_per_step=times,
            bytes_per_device_per_step=tensor.sent_bytes * times,
            phase=origin.name.phase,
            op=op,
            source=next(filter(None, map(_source, origin.at)), ""),
            rules=causes.ordered(rows),
            overlapped=tensor.overlapped,
            group_size=exchange.group_size,
            elements=exchange.elements,
            instructions=(tensor.instruction.name,),
            einsum=origin.einsum,
            link=network.link(exchange.groups),
            in_loop=bool(tensor.step.loops),
        )
        alike = dataclasses.replace(one, times_per_step=0, bytes_per_device_per_step=0, elements=0, instructions=())
        found.setdefault(alike, []).append(one)
    return tuple(sorted(map(_total, found.values()), key=lambda c: -c.bytes_per_device_per_step))


def _total(alike: list[Collective]) -> Collective:
    return dataclasses.replace(
        alike[0],
        times_per_step=sum(one.times_per_step for one in alike),
        bytes_per_device_per_step=sum(one.bytes_per_device_per_step for one in alike),
        elements=max(one.elements for one in alike),
        instructions=tuple(dict.fromkeys(name for one in alike for name in one.instructions)),
    )


@dataclasses.dataclass(frozen=True)
class _Origin:
    """What a program says of where a tensor comes from."""

    name: OpName
    at: Sequence[Instruction]  # those that may know the source line, the best first
    einsum: str  # the product that it comes from, or the nearest that uses it
    given: str  # the weight that it is, from the step's arguments
    updated: str  # the new weight that it is, among the step's results


def _origin(tensor: MovedTensor, origins: DefUse, causes: Attribution) -> _Origin:
    trail = origins.def_chain(tensor.operand)
    tree, path = state_array(trail[-1].op_name) if trail[-1].opcode == "parameter" else ("", "")
    given = path if tree == "params" else ""
    told = [(tensor.name, tensor.instruction)] if tensor.name else []
    told += [(at.op_name, at) for at in trail if len(of_each_tensor(at.op_name, 1)) == 1]
    if not tensor.name:  # the name of one of several tensors is better than none
        told.append((tensor.instruction.op_name, tensor.instruction))
    names = [(parse(text), at) for text, at in told if text and not state_array(text)[0]]
    users = list(itertools.islice(origins.users_of(tensor.instruction), NEAR))
    after = [parse(user.op_name) for user in users] if tensor.kind not in REDUCTIONS else []
    products = [name for name in after if name.owners and (not given or given in name.owners)]
    einsum = next((name.einsum for name in (*(name for name, _ in names), *products) if name.einsum), "")
    if not any(_speaks_of(given, name) for name, _ in names):
        around = itertools.chain(users, origins.ancestors(tensor.operand))
        names += [(parse(at.op_name), at) for at in itertools.islice(around, NEAR) if not state_array(at.op_name)[0]]
    # A parameter that is gathered is read before the optimizer runs. The optimizer's name on a merged operation is
    # that of another tensor.
    known = [pair for pair in names if pair[0].is_located and not (given and pair[0].phase == "optimizer")]
    nothing = next(iter(names), (parse(tensor.instruction.op_name), tensor.instruction))
    name, at = next((pair for pair in known if _speaks_of(given, pair[0])), next(iter(known), nothing))
    if tensor.kind in GATHERS:
        others = [user for user in users if user.op_name != at.op_name]
        readers = [(parse(user.op_name), origins.is_operand_of(user, tensor.instruction)) for user in others]
        name = _as_read(name, readers, causes)
    lines = [at, *trail, tensor.instruction]
    if at is tensor.instruction and tensor.merged:  # it has the line of the first of its tensors
        lines = [*origins.by_op_name[tensor.name], *trail]
    result, new = origins.new_state.get(tensor.instruction, ("", ""))
    return _Origin(
        name=name,
        at=lines,
        einsum=einsum,
        given=given,
        updated=new if result == "params" and name.phase == "optimizer" else "",
    )


def _as_read(name: OpName, users: Sequence[tuple[OpName, bool]], causes: Attribution) -> OpName:
    """`name`, completed by the names of the operations that read the gathered tensor.

    `name` says where the tensor is placed. The products that read it whole say which weights they belong to.
    """
    if not name.owners and causes.is_activation(name.array):
        alike = [(reader, itself) for reader, itself in users if reader.owners and reader.phase == name.phase]
        direct = {path for reader, itself in alike if itself for path in reader.owners}
        nearest = alike[0][0].owners if alike else ()
        order = {weight: number for number, weight in enumerate(causes.rules.vocabulary.weights)}
        ordered = sorted(direct, key=lambda path: order.get(path.rpartition(".")[2], len(order)))
        name = dataclasses.replace(name, of=tuple(ordered) or nearest)
    phases = [reader.phase for reader, _ in users if reader.owners == name.owners != ()]
    if name.phase == "forward" and phases and "forward" not in phases:
        name = dataclasses.replace(name, phase=phases[0])
    return name


def _speaks_of(weight: str, name: OpName) -> bool:
    """Whether a name says where it stands, and if a weight is given, that it stands for that."""
    named = weight in (*name.owners, name.array) or weight.rpartition(".")[0] == ".".join(name.modules)
    return name.is_located and (not weight or named)


def _caused(
    tensor: MovedTensor, origin: _Origin, causes: Attribution, mesh_axes: tuple[str, ...]
) -> tuple[str, set[str]]:
    """What a tensor is called, and the rows that cause its movement."""
    name, weight = origin.name, origin.given
    placed = name.array if name.array in causes.weights else ""
    # An all-reduce of what is given adds zeros to a piece: so TPU gathers small arrays.
    gathers = tensor.kind in GATHERS or (tensor.kind == "all-reduce" and bool(weight) and not name.summed_axes)
    if tensor.kind in REDUCTIONS and not gathers:
        weight = placed
        rows = causes.reduction(name, mesh_axes, scattered=tensor.kind != "all-reduce")
    elif gathers and not causes.looks_up(name):
        weight = origin.updated or weight or placed
        rows = causes.gather(name, mesh_axes, weight, new=bool(origin.updated))
    else:
        rows = causes.resharding(name, mesh_axes, weight)
    return _path_of(name, weight), causes.complete(rows | causes.look_up(name), name, mesh_axes)


def _path_of(name: OpName, weight: str) -> str:
    """'layers.attention.wq', 'layers.attention.wq+wk+wv', 'layers.attention_norm', 'loss', 'gradient_norm'."""
    if weight:
        return weight
    if name.owners:
        parts = [name.owners[0]]
        for before, path in zip(name.owners, name.owners[1:], strict=False):
            same = before.rpartition(".")[0] == path.rpartition(".")[0]
            parts.append(path.rpartition(".")[2] if same else path)
        return "+".join(parts)
    if name.modules:
        return ".".join(name.modules)
    return name.array or "step"


def _source(instruction: Instruction) -> str:
    """The innermost line that is not one of the package's general functions."""
    special = [source for source in instruction.sources if not source.startswith(_GENERAL)]
    return next(iter(special), instruction.source)
