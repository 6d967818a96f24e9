"""Each collective of a compiled program: what it moves, how often, over which mesh axes, and which rules cause it."""

import dataclasses
import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from gspmd_lm.foresight.collectives.def_use import ancestors, def_chain, is_operand_of, new_state, users_of
from gspmd_lm.foresight.collectives.tensors import GATHERS, REDUCTIONS, MovedTensor, moved_tensors
from gspmd_lm.foresight.graph import DataflowGraph
from gspmd_lm.foresight.hlo import Instruction, Module
from gspmd_lm.foresight.source_lines import choose_line
from gspmd_lm.hardware.network import Network
from gspmd_lm.sharding.op_names import OpName, parse, state_array, tensor_names
from gspmd_lm.sharding.rules import TABLES, Rules

NEAR = 30  # how many users and ancestors are looked at for the name of a tensor that has none
SUM, SCATTERED_SUM, GATHER, OTHER = "sum", "scattered sum", "gather", "other"  # what a movement does


@dataclasses.dataclass(frozen=True)
class Collective:
    """The traffic of one source in one step: instructions that agree in everything but size, added up."""

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
    """Every collective that a program is taken to run, the largest traffic first.

    `rules` are filled for the devices of `network`.

    `axes` are the logical axes of the model's arrays, by the path of a weight or the name of an activation.
    """
    results, attribution = new_state(module), Attribution(rules, axes, graph)
    parts: dict[Collective, list[Collective]] = {}
    for tensor in moved_tensors(module):
        groups, executions = tensor.op.groups, tensor.op.scheduled.executions
        mesh_axes = network.axes(groups)
        if not mesh_axes or not executions:
            continue
        origin = _origin(tensor, results.get(tensor.instruction, ("", "")), attribution)
        path, rows = _name_and_causes(tensor, origin, attribution, mesh_axes)
        part = Collective(
            kind=tensor.kind,
            mesh_axes=mesh_axes,
            dtype=tensor.op.inputs[0].dtype,
            times_per_step=executions,
            bytes_per_device_per_step=tensor.sent_bytes * executions,
            phase=origin.name.phase,
            op=path,
            source=next(filter(None, (choose_line(one.sources) for one in origin.instructions)), ""),
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
    """The source of a moved tensor in the model, from the op_name metadata of the program."""

    name: OpName
    instructions: Sequence[Instruction]  # those that may have its source line, the best first
    einsum: str  # the matmul that the tensor comes from, or the nearest that reads it
    weight: str  # the weight that the tensor is, among the step's arguments
    new_weight: str  # the updated weight that the tensor is, among the step's results


def _origin(tensor: MovedTensor, result: tuple[str, str], attribution: "Attribution") -> _Origin:
    """The array, the line and the matmul of a moved tensor. `result`: the array of the new state that it is.

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
    named += [(one.op_name, one) for one in chain if len(tensor_names(one.op_name, 1)) == 1]
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


def _with_readers(name: OpName, readers: Sequence[tuple[OpName, bool]], attribution: "Attribution") -> OpName:
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


def _name_and_causes(
    tensor: MovedTensor, origin: _Origin, attribution: "Attribution", mesh_axes: tuple[str, ...]
) -> tuple[str, tuple[str, ...]]:
    """The name of a moved tensor, and the rows that cause its movement."""
    name, weight, new_weight = origin.name, origin.weight, ""
    if tensor.kind == "collective-permute" and {*mesh_axes} <= {*attribution.rules.stages}:
        return name.path or "step", attribution.stage_rows
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


class Attribution:
    """The rows of `rules` behind a movement, by one rule.

    A movement takes an array from one way of splitting to another. Its rows are those that split, over the mesh axes of
    the movement, what stands on its two sides, as far as names say it:

                   before                                after
    sum            the axes that are summed              the array, where each device keeps a piece of it
    gather         the array                             nothing: there it is whole
    other          the activations                       the weight, or its gradient

    For mesh axes to which no row of the side before maps, they are also the rows of the nearest activations that the
    axis splits. A look-up in a table has the rows that split the rows of the table besides.

    `arrays` are the model's: path of a weight or name of an activation, and its logical axes. `graph` knows which
    activations an operation stands between.
    """

    def __init__(self, rules: Rules, arrays: Mapping[str, Sequence[str]], graph: DataflowGraph):
        self.rules = rules
        self.arrays = arrays
        self.graph = graph
        self.weights = [path for path in arrays if path in graph.weights]

    def rows(self, does: str, name: OpName, over: Sequence[str], weight: str, new_weight: str) -> tuple[str, ...]:
        """Keys of the rows behind a movement over the mesh axes `over`, as they stand in the file.

        weight, new_weight: the weight that is moved, before or after the optimizer's step; '' for others.
        """
        if does in (SUM, SCATTERED_SUM):
            before, after = self._summed_rows(name, over), set()
            if does == SCATTERED_SUM and name.array:
                after = self._splitting(name.table, [name.array], over)
            elif does == SCATTERED_SUM:
                after = self._splitting("optimizer", name.owners, over)
        elif does == GATHER and new_weight:
            at_rest = self._splitting("weights", [new_weight], over)
            before, after = self._splitting("optimizer", [new_weight], over) - at_rest, set()
        elif does == GATHER:
            before, after = self._splitting("weights", [weight] if weight else [], over), set()
        else:
            table = "optimizer" if name.phase == "backward" else "weights"
            before, after = set(), self._splitting(table, [weight] if weight else name.owners, over)
            if name.phase == "optimizer":
                before = after or self._mapped_to(over)
        mapped = {mesh_axis for row in self.rules.rows if row.key in before for mesh_axis in row.mesh_axes}
        around = self._activations(name, [mesh_axis for mesh_axis in over if mesh_axis not in mapped])
        keys = before | around | after | self._looked_up(name)
        return tuple(row.key for table in TABLES for row in self.rules.rows if row.table == table and row.key in keys)

    @property
    def stage_rows(self) -> tuple[str, ...]:
        """Keys of the rows behind what stages of a pipeline send to each other."""
        return tuple(row.key for row in self.rules.rows if row.axis == self.rules.vocabulary.stages)

    def is_activation(self, array: str) -> bool:
        """Whether an array of the model is an activation."""
        return array in self.arrays and array not in self.graph.weights

    def looks_up(self, name: OpName) -> bool:
        """Whether a name speaks of a look-up in a table, or of its gradient, and says nothing more."""
        return not (name.array or name.summed_axes) and any(path in self.graph.looked_up for path in name.owners)

    def _splitting(
        self, table: str, arrays: Iterable[str], over: Collection[str], axes: Iterable[str] | None = None
    ) -> set[str]:
        """Keys of the rows by which `table` splits arrays, or some axes of them, over some of the mesh axes `over`."""
        axes_of_arrays = [
            (array, axis) for array in arrays for axis in (self.arrays.get(array, ()) if axes is None else axes)
        ]
        rows = [self.rules.row(table, *one) for one in axes_of_arrays if set(over) & set(self.rules.split(table, *one))]
        return {row.key for row in rows if row}

    def _mapped_to(self, over: Sequence[str]) -> set[str]:
        """Every row that maps to one of the mesh axes."""
        return {row.key for row in self.rules.rows if set(over) & set(row.mesh_axes)}

    def _summed_rows(self, name: OpName, over: Sequence[str]) -> set[str]:
        """Rows that split what a sum adds up: the axes that its name says, the weights whose statistics are summed, or
        the batch of a gradient."""
        if name.summed_axes:
            # Of sums that were added up, the name may say one. It then places nothing.
            rows = set() if name.array else self._splitting("rules", name.owners, over)
            for path in name.summed_axes:
                array, _, axis = path.rpartition(".")
                rows |= self._splitting("rules", [array], over, [axis])
            return rows
        if name.phase == "optimizer":
            split = {
                path: {name for axis in self.arrays[path] for name in self.rules.split("optimizer", path, axis)}
                for path in self.weights
            }
            paths = [path for path in self.weights if set(over) <= split[path]]
            return self._splitting("optimizer", paths, over) or self._mapped_to(over)
        # Where `over` splits the gradients that a weight's gradient is made from, though not the activation that they
        # are of, the compiler could gather them instead. It sums because the matmul is cut along the rows of the batch.
        rows = set()
        for matmul in self.graph.matmuls if name.phase == "backward" and name.array else ():
            x, y = matmul.input.placed, matmul.output and matmul.output.placed
            if matmul.path == name.array and x and y and not self._splitting("rules", [y.array], over):
                rows |= self._splitting("rules", [x.array], self.rules.mesh, x.axes[:1])
        return rows

    def _looked_up(self, name: OpName) -> set[str]:
        """Rows that split the rows of a table in which something is looked up: they decide the form of the look-up."""
        tables = [path for path in name.owners if path in self.graph.looked_up]
        rows = [self._splitting("rules", [path], self.rules.mesh, self.arrays[path][:1]) for path in tables]
        return set().union(*rows)

    def _activations(self, name: OpName, over: Sequence[str]) -> set[str]:
        """Rows that split activations over `over`: for each mesh axis, those of the nearest that it splits.

        What no trace knows a place of is on its way to groups, as tokens to their experts: those are split too.
        """
        rows = {key for mesh_axis in over for key in self._nearest(name, mesh_axis)}
        for matmul in self.graph.matmuls if name.array and name.array not in self.arrays else ():
            rows |= self._splitting("rules", [matmul.path], over, [matmul.group_axis] if matmul.group_axis else [])
        return rows

    def _nearest(self, name: OpName, mesh_axis: str) -> set[str]:
        for arrays in self._outward(name):
            if rows := self._splitting("rules", arrays, [mesh_axis]):
                return rows
        return self._mapped_to([mesh_axis])

    def _outward(self, name: OpName) -> Iterator[Iterable[str]]:
        """Groups of activations, the nearest first.

        First comes what the placed activation is made from, then itself, then what stands around the operation, and
        then what those are made from.
        """
        around, backward = self.graph.activations_around, name.phase == "backward"
        if self.is_activation(name.array):
            yield self.graph.made_from(name.array, backward)
            yield [name.array]
        near = {array for path in filter(None, (*name.owners, name.array)) for array in around(path)}
        yield near
        for depth in range(len(name.modules), 0, -1):
            activations = around(modules=name.modules[:depth])
            yield activations
            near |= activations
        while further := {array for one in near for array in self.graph.made_from(one, backward)} - near:
            yield further
            near |= further
        yield filter(self.is_activation, self.arrays)
