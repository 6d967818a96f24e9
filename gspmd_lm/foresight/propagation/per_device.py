"""The rule of `shard_map`: a program of one device, which says itself what devices send each other."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jax.extend import core

from gspmd_lm.foresight import equations
from gspmd_lm.foresight.equations import called_jaxprs, same_rank
from gspmd_lm.foresight.propagation.control import least_of
from gspmd_lm.foresight.propagation.matmuls import kernel_flops
from gspmd_lm.foresight.propagation.reader import Operation, Reader, Rule
from gspmd_lm.foresight.propagation.record import Record
from gspmd_lm.foresight.propagation.sharding import ArraySharding, array_bytes, rank_of, replicated_sharding, without
from gspmd_lm.foresight.propagation.wanted import ADDITIVE

_COLLECTIVES = {
    "psum": "all-reduce",
    "psum_invariant": "all-reduce",
    "pmax": "all-reduce",
    "pmin": "all-reduce",
    "reduce_scatter": "reduce-scatter",
    "all_gather": "all-gather",
    "all_gather_invariant": "all-gather",
    "all_to_all": "all-to-all",
    "ppermute": "collective-permute",
    "ragged_all_to_all": "ragged-all-to-all",
}
_NO_COLLECTIVES = ("axis_index", "pvary", "pcast", "pbroadcast")  # they name mesh axes, and send nothing
_SUMS = ADDITIVE | {"psum", "psum_invariant", *_NO_COLLECTIVES}


def shard_map(reader: Reader, operation: Operation) -> list[ArraySharding]:
    """A function of what one device has: its operands are brought to where it says, and its collectives are read.

    Mesh axes that it leaves to the compiler are noted as unknown: all that it does is taken to be shared out over them.
    """
    body = getattr(operation.params["jaxpr"], "jaxpr", operation.params["jaxpr"])
    manual = reader.mesh.parts(operation.params["newly_manual_axes"])
    left: set[str] = set()  # to the compiler
    for number, spec in enumerate(operation.params["in_specs"]):
        kept = without(operation.operands[number].dims, manual)
        left.update(*kept)
        asked = reader.mesh.dims(spec, operation.inputs[number].ndim)
        target = tuple((*names, *others) for names, others in zip(asked, kept, strict=True))
        reader.move_operand(operation, number, target, chosen=False)
    if left:
        reader.add_unknown("a shard_map that leaves mesh axes to the compiler")
    only_sums = all(equation.primitive.name in _SUMS for equation in body.eqns)
    is_late = only_sums and len(operation.terms) == len(operation.equation.outvars)
    # On TPUs and GPUs, XLA makes a sum over devices that a loop adds to what it carries once, after the loop.
    depth = len(reader.loops) - is_late
    operands = [one._replace(loop_depth=min(one.loop_depth, depth)) for one in operation.operands]
    results = PerDevice(reader, operation.stack, 1 / reader.mesh.shards(left)).read(body, operands)
    return [
        ArraySharding(reader.mesh.dims(spec, var.aval.ndim), loop_depth=result.loop_depth + is_late)
        for var, spec, result in zip(operation.equation.outvars, operation.params["out_specs"], results, strict=True)
    ]


@dataclasses.dataclass
class PerDevice:
    """Reads the program of one device. Of each array it follows which loops change it, and which array it is."""

    reader: Reader
    stack: str
    share: float = 1.0  # of what the program does, that one device does; less where the compiler shares it out further

    def read(self, jaxpr: Any, arguments: Sequence[ArraySharding]) -> list[ArraySharding]:
        """The known facts about the results of a jaxpr, from those about its arguments."""
        known = {
            var: replicated_sharding(rank_of(var.aval))._replace(loop_depth=one.loop_depth, identity=one.identity)
            for var, one in zip(jaxpr.invars, arguments, strict=True)
        }

        def array(atom: Any) -> ArraySharding:
            if isinstance(atom, core.Literal):
                return replicated_sharding(rank_of(atom.aval))._replace(identity=str(atom.val))
            return known.get(atom, replicated_sharding(rank_of(atom.aval)))

        for equation in jaxpr.eqns:
            names = "/".join(filter(None, (self.stack, str(equation.source_info.name_stack))))
            results = self._results(Operation(equation, names, [array(atom) for atom in equation.invars], {}))
            known.update(zip(equation.outvars, results, strict=True))
        return [array(atom) for atom in jaxpr.outvars]

    def _results(self, operation: Operation) -> list[ArraySharding]:
        primitive, params, operands = operation.primitive, operation.params, operation.operands
        if primitive in _COLLECTIVES:
            return self._collective(operation)
        if primitive == "scan":
            return self._scan(operation)
        if primitive == "while" and operation.name.trip_count == "0":
            return self._results_that_change_with(operation, operands)
        if primitive == "while":
            self.reader.add_unknown("the trip count of a while loop")
            of_condition, of_body = operands[: params["cond_nconsts"]], operands[params["cond_nconsts"] :]
            self._inside(params["cond_jaxpr"].jaxpr, operation, [*of_condition, *of_body[params["body_nconsts"] :]])
            return self._inside(params["body_jaxpr"].jaxpr, operation, of_body)
        if primitive == "pallas_call":
            self.reader.add_flops(operation, kernel_flops(params) * self.share * self._filled_part(operation))
        elif primitive == "cond":
            self._branches(operation)
        elif inner := next(iter(called_jaxprs(params)), None):
            return self._inside(inner, operation, operands)
        elif "axis_name" in params and primitive not in _NO_COLLECTIVES:
            self.reader.add_unknown(primitive)
        if primitive == "optimization_barrier":
            return self._results_that_change_with(operation, operands, object())  # other arrays for collectives
        part = self._filled_part(operation) if primitive == equations.GROUPED else 1.0
        self.reader.add_flops(operation, equations.flops(operation.equation) * self.share * part)
        return self._results_that_change_with(operation, operands, self.reader.value(operation))

    def _results_that_change_with(
        self, operation: Operation, operands: Sequence[ArraySharding], identity: Any = None
    ) -> list[ArraySharding]:
        depth = max((one.loop_depth for one in operands), default=0)
        return [
            replicated_sharding(rank_of(var.aval))._replace(loop_depth=depth, identity=identity and (identity, n))
            for n, var in enumerate(operation.equation.outvars)
        ]

    def _inside(self, jaxpr: Any, operation: Operation, arguments: Sequence[ArraySharding]) -> list[ArraySharding]:
        if len(jaxpr.invars) != len(arguments):  # such as a function with a derivative written by hand
            depth = max((one.loop_depth for one in arguments), default=0)
            arguments = [ArraySharding(loop_depth=depth)] * len(jaxpr.invars)
        return dataclasses.replace(self, stack=operation.stack).read(jaxpr, arguments)

    def _scan(self, operation: Operation) -> list[ArraySharding]:
        body, changed = called_jaxprs(operation.params)[0], len(self.reader.loops) + 1
        carried = same_rank(body.outvars, operation.equation.outvars)
        constants = same_rank(body.invars, operation.equation.invars) - carried
        inside = [
            one if number < constants else ArraySharding(loop_depth=changed)
            for number, one in enumerate(operation.operands)
        ]
        self.reader.loops.append(operation.params["length"])
        self._inside(body, operation, inside)
        self.reader.loops.pop()
        return self._results_that_change_with(operation, operation.operands)

    def _branches(self, operation: Operation) -> None:
        """Adds what the branch sends that sends least, and what the one computes that computes most."""
        records: list[Record] = []
        for branch in operation.params["branches"]:
            with self.reader.trial() as record:
                self._inside(branch.jaxpr, operation, operation.operands[1:])
            records.append(record)
        self.reader.record.add(least_of(records))

    def _collective(self, operation: Operation) -> list[ArraySharding]:
        """XLA does the same collective of the same arrays once, in a loop and after what it takes out of loops."""
        names = operation.params.get("axes") or operation.params["axis_name"]
        named = (names,) if isinstance(names, str) else names
        over = self.reader.mesh.parts(name for name in named if isinstance(name, str))
        inputs, operands = operation.inputs, operation.operands
        kind, groups = _COLLECTIVES[operation.primitive], operation.params.get("axis_index_groups")
        if kind == "ragged-all-to-all":
            # One of operand and result is a buffer with more room than even loads fill: the fewer rows travel.
            few, many = sorted(inputs[:2], key=lambda aval: aval.shape[0])
            self.reader.filled[many.shape[0]] = few.shape[0] / many.shape[0]
            inputs, operands = [few], operands[:1]
        identity = self.reader.value(operation)
        if identity is None or identity not in self.reader.record.copies:
            for aval, operand in zip(inputs, operands, strict=True):
                sent_bytes, group = array_bytes(aval) * self.share, len(groups[0]) if groups else 0
                costs = self.reader.mesh.cost(kind, over, sent_bytes, group)
                self.reader.add_transfers(operation, aval, operand, costs)
            if identity is not None:
                self.reader.record.copies[identity] = ()
        return self._results_that_change_with(operation, operation.operands, identity)

    def _filled_part(self, operation: Operation) -> float:
        rows = (aval.shape[0] for aval in operation.inputs if aval.shape)
        return next((self.reader.filled[n] for n in rows if n in self.reader.filled), 1.0)


RULES: dict[str, Rule] = {"shard_map": shard_map}
