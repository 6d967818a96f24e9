"""The origin of a value of a compiled program: definitions and uses, across computations.

Compilers merge, split and move collectives, and then one name stands for several tensors. So each tensor is followed
back to the computation or the parameter that it comes from, through copies, fusions, loops and other collectives.
"""

import re
from collections.abc import Iterator

from gspmd_lm.foresight.graph import breadth_first
from gspmd_lm.foresight.hlo import Instruction, Module
from gspmd_lm.foresight.hlo.values import Value, defined_by
from gspmd_lm.foresight.hlo.work import COLLECTIVES, rendezvous
from gspmd_lm.sharding.op_names import state_array

# What has the elements of its operand, or some of them, in another order: besides what `defined_by` passes.
_SAME = {
    "transpose",
    "slice",
    "dynamic-slice",
    "pad",
    "reduce-precision",
    "all-gather-done",
    "all-reduce-done",
    "collective-permute-done",
    "reduce-scatter-done",
    "all-to-all-done",
    "recv-done",
    "send-done",
    "async-done",
    "async-update",
    "call-done",
    "call-update",
}
_EMPTY = {"constant", "broadcast", "iota", "custom-call"}  # what a loop's accumulator begins as


def def_chain(value: Value, open_loops: frozenset[Value] = frozenset()) -> list[Instruction]:
    """The instructions through which a value came, the nearest first.

    The last one computed the value, or is the program's argument.
    open_loops: what loops carry whose beginning is being looked for.
    """
    chain: list[Instruction] = []
    seen: set[Value] = set()
    current: Value | None = value
    while current and current not in seen:
        seen.add(current)
        chain.append(current[0])
        current = _before(current, open_loops)
    return chain


def ancestors(value: Value) -> Iterator[Instruction]:
    """Everything that a value is made of, the nearest first, where `def_chain` finds no name."""
    waiting, seen = [value], set()
    while waiting:
        chain = def_chain(waiting.pop(0))
        last = chain[-1]
        if last not in seen:
            seen.add(last)
            yield from chain
            waiting += [(operand, ()) for operand in last.operands]


def concatenated_values(value: Value) -> list[tuple[Value, int]]:
    """The values that lie side by side in one, each with its number of elements."""
    passed = ("bitcast", "reshape", "copy", "fusion", "parameter", "get-tuple-element")
    instruction = next((at for at in def_chain(value) if at.opcode not in passed), None)
    if instruction is None or instruction.opcode != "concatenate":
        return [(value, value[0].shape.arrays[0].elements)]
    return [piece for operand in instruction.operands for piece in concatenated_values((operand, ()))]


def new_state(module: Module) -> dict[Instruction, tuple[str, str]]:
    """Collective -> the array of the new state that it is, where nothing but copies lies between: see `state_array`.

    A result of the step has the name of the argument that it replaces.
    """
    state: dict[Instruction, tuple[str, str]] = {}
    arguments, root = module.entry.parameters, module.entry.root
    pairs = re.findall(r"\{(\d+)\}: \((\d+),", module.attributes.get("input_output_alias", ""))
    for result, argument in pairs if root.opcode == "tuple" else ():
        for at in def_chain((root.operands[int(result)], ())):
            if at.opcode.endswith("-start") or at.opcode in COLLECTIVES:
                state.setdefault(at, state_array(arguments[int(argument)].op_name))
    return state


def users_of(instruction: Instruction) -> Iterator[Instruction]:
    """The instructions of the same computation that use a value, directly or not, the nearest first."""
    return breadth_first([instruction], lambda one: one.users, lambda _: True)


def is_operand_of(user: Instruction, instruction: Instruction) -> bool:
    """Whether a value is an operand of one of its consumers, but for copies."""
    return any(instruction in def_chain((operand, ())) for operand in user.operands)


def _before(value: Value, open_loops: frozenset[Value]) -> Value | None:
    """One step back, also through collectives and into the loops that computed a value."""
    instruction, path = value
    opcode, operands = instruction.opcode, instruction.operands
    if (operands or opcode == "parameter") and (handed_on := defined_by(value)):
        return handed_on
    if opcode == "parameter":
        return _argument(value, open_loops)
    if opcode == "recv":  # the answer to what was sent to other slices
        beside = instruction.computation.instructions.values()
        sends = (i for i in beside if i.opcode == "send" and rendezvous(i) == rendezvous(instruction))
        return next(((send.operands[0], ()) for send in sends), None)
    if opcode in _SAME:
        return operands[0], path
    if opcode in ("async-start", "call-start"):
        return instruction.bodies[0].root, path
    if opcode == "while":
        return instruction.called_computations["body"][0].root, path
    if instruction.base in COLLECTIVES:
        return operands[path[-1] if path and path[-1] < len(operands) else 0], ()
    if opcode == "dynamic-update-slice":
        return operands[1], ()
    if opcode == "concatenate":
        return max(operands, key=lambda operand: operand.shape.bytes), ()
    return None


def _argument(value: Value, open_loops: frozenset[Value]) -> Value | None:
    """What a computation is given: of a loop that begins with nothing in it, what its iterations compute."""
    parameter, path = value
    caller, role = parameter.computation.caller
    if not caller or role not in ("calls", "body", "condition"):
        return None
    if role == "calls":
        return caller.operands[parameter.index], path
    if value in open_loops:  # of a loop in a loop, whose own iterations are the way back to it
        return None
    first: Value = caller.operands[0], path
    begins_empty = def_chain(first, open_loops | {value})[-1].opcode in _EMPTY
    return (caller.called_computations["body"][0].root, path) if begins_empty else first
