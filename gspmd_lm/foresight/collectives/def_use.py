"""Where a value of a compiled program comes from.

Compilers merge, split and move collectives, and then one name stands for several tensors. So each tensor is followed
back to the computation or the parameter that it comes from, through copies, fusions, loops and other collectives.
"""

import collections
import functools
import re
from collections.abc import Iterator, Mapping

from gspmd_lm.foresight.hlo import Instruction, Module
from gspmd_lm.foresight.hlo.collective_op import COLLECTIVES, rendezvous
from gspmd_lm.foresight.hlo.values import Value, defined_by
from gspmd_lm.sharding.op_names import state_array

# What has the elements of its operand, or some of them, in another order: besides what `defined_by` passes.
_SAME = {
    "transpose", "slice", "dynamic-slice", "pad", "reduce-precision", "all-gather-done", "all-reduce-done",
    "collective-permute-done", "reduce-scatter-done", "all-to-all-done", "recv-done", "send-done", "async-done",
    "async-update", "call-done", "call-update",
}  # fmt: skip
_EMPTY = {"constant", "broadcast", "iota", "custom-call"}  # what a loop's accumulator begins as


class DefUse:
    """Follows the values of one module."""

    def __init__(self, module: Module):
        self.module = module
        self._open_loops: set[Value] = set()  # what loops carry whose beginning is being looked for

    def def_chain(self, place: Value) -> list[Instruction]:
        """The instructions through which a value came, the nearest first.

        The last one computed the value, or is the program's argument.
        """
        chain: list[Instruction] = []
        seen: set[Value] = set()
        current: Value | None = place
        while current and current not in seen:
            seen.add(current)
            chain.append(current[0])
            current = self._before(current)
        return chain

    def ancestors(self, place: Value) -> Iterator[Instruction]:
        """Everything that a value is made of, the nearest first, where `trail` finds no name."""
        waiting, seen = [place], set()
        while waiting:
            chain = self.def_chain(waiting.pop(0))
            last = chain[-1]
            if last not in seen:
                seen.add(last)
                yield from chain
                waiting += [(operand, ()) for operand in last.operands]

    def concatenated(self, place: Value) -> list[tuple[Value, int]]:
        """The values that lie side by side in one, each with its number of elements."""
        passed = ("bitcast", "reshape", "copy", "fusion", "parameter", "get-tuple-element")
        instruction = next((at for at in self.def_chain(place) if at.opcode not in passed), None)
        if instruction is None or instruction.opcode != "concatenate":
            return [(place, place[0].shape.arrays[0].elements)]
        return [piece for operand in instruction.operands for piece in self.concatenated((operand, ()))]

    @functools.cached_property
    def new_state(self) -> dict[Instruction, tuple[str, str]]:
        """Collective -> the array of the new state that it is, where nothing but copies lies between: see `state`.

        A result of the step has the name of the argument that it replaces.
        """
        state: dict[Instruction, tuple[str, str]] = {}
        arguments, root = self.module.entry.parameters, self.module.entry.root
        pairs = re.findall(r"\{(\d+)\}: \((\d+),", self.module.attributes.get("input_output_alias", ""))
        for result, argument in pairs if root.opcode == "tuple" else ():
            for at in self.def_chain((root.operands[int(result)], ())):
                if at.opcode.endswith("-start") or at.opcode in COLLECTIVES:
                    state.setdefault(at, state_array(arguments[int(argument)].op_name))
        return state

    @functools.cached_property
    def by_op_name(self) -> Mapping[str, list[Instruction]]:
        """The instructions of each op_name."""
        named: Mapping[str, list[Instruction]] = collections.defaultdict(list)
        for instruction in self.module.instructions:
            if instruction.op_name:
                named[instruction.op_name].append(instruction)
        return named

    def users_of(self, instruction: Instruction) -> Iterator[Instruction]:
        """Those who use a value, the nearest first, within the computation."""
        waiting, seen = [*instruction.users], {instruction}
        while waiting:
            user = waiting.pop(0)
            if user not in seen:
                seen.add(user)
                yield user
                waiting += user.users

    def is_operand_of(self, user: Instruction, instruction: Instruction) -> bool:
        """Whether a value is an operand of one of its consumers, but for copies."""
        return any(instruction in self.def_chain((operand, ())) for operand in user.operands)

    def _before(self, place: Value) -> Value | None:
        """One step back, also through collectives and into the loops that computed a value."""
        instruction, path = place
        opcode, operands = instruction.opcode, instruction.operands
        if (operands or opcode == "parameter") and (handed_on := defined_by(place)):
            return handed_on
        if opcode == "parameter":
            return self._argument(instruction, path)
        if opcode == "recv":  # the answer to what was sent to other slices
            beside = instruction.computation.instructions.values()
            sends = (i for i in beside if i.opcode == "send" and rendezvous(i) == rendezvous(instruction))
            return next(((send.operands[0], ()) for send in sends), None)
        if opcode in _SAME:
            return operands[0], path
        if opcode in ("async-start", "call-start"):
            return instruction.bodies[0].root, path
        if opcode == "while":
            return instruction.called["body"][0].root, path
        if instruction.base in COLLECTIVES:
            return operands[path[-1] if path and path[-1] < len(operands) else 0], ()
        if opcode == "dynamic-update-slice":
            return operands[1], ()
        if opcode == "concatenate":
            return max(operands, key=lambda operand: operand.shape.bytes), ()
        return None

    def _argument(self, parameter: Instruction, path: tuple[int, ...]) -> Value | None:
        """What a computation is given: of a loop that begins with nothing in it, what its iterations compute."""
        caller, role = parameter.computation.caller
        if not caller or role not in ("calls", "body", "condition"):
            return None
        if role == "calls":
            return caller.operands[parameter.index], path
        first: Value = caller.operands[0], path
        (body,), carried = caller.called["body"], (parameter, path)
        if carried in self._open_loops:  # of a loop in a loop, whose own iterations are the way back to it
            return None
        self._open_loops.add(carried)
        try:
            return (body.root, path) if self.def_chain(first)[-1].opcode in _EMPTY else first
        finally:
            self._open_loops.remove(carried)
