"""The definition of a value of a compiled program, and what follows from it: the trip count of a loop."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gspmd_lm.foresight.equations import SWAPPED, count_turns

if TYPE_CHECKING:
    from gspmd_lm.foresight.hlo.instruction import Instruction

Value = tuple["Instruction", tuple[int, ...]]  # an element of an instruction's value: the indices of nested tuples

# What hands on a value: copies, casts and changes of form; and what runs a computation in its place.
_COPIES = {
    "copy",
    "copy-start",
    "copy-done",
    "bitcast",
    "bitcast-convert",
    "convert",
    "reshape",
    "optimization-barrier",
}
_INLINED = {"fusion", "call"}


def defined_by(value: Value) -> Value | None:
    """The value that this one was copied, cast or passed from, one step before.

    None if the value is computed here, or a loop carries it.
    """
    instruction, path = value
    opcode = instruction.opcode
    if opcode in _COPIES:
        return instruction.operands[0], path
    if opcode == "get-tuple-element":
        return instruction.operands[0], (instruction.index, *path)
    if opcode == "tuple" and path:
        return instruction.operands[path[0]], path[1:]
    if opcode in _INLINED:
        called = instruction.called_computations.get("calls") or instruction.called_computations["to_apply"]
        return called[0].root, path
    caller, _ = instruction.computation.caller
    if opcode == "parameter" and caller and caller.opcode in _INLINED:
        return caller.operands[instruction.index], path
    return None


def origin(value: Value) -> Value:
    """The origin of a value, followed through copies, tuples, fusions, calls and loops that keep it."""
    while True:
        instruction, path = value
        kept = instruction.opcode == "while" and path and _invariant(instruction, path)
        before = (instruction.operands[0], path) if kept else defined_by(value)
        if before is None:
            return value
        value = before


def trip_count(loop: Instruction) -> int | None:
    """The trip count of a while loop, from `counter < limit`; None if it cannot be told."""
    (condition,) = loop.called_computations["condition"]
    compare, _ = origin((condition.root, ()))
    if compare.opcode != "compare":
        return None
    direction = compare.attributes.get("direction", "").lower()
    sides = [origin((operand, ())) for operand in compare.operands]
    for (counter, path), limit in (tuple(sides), tuple(reversed(sides))):
        if counter.opcode == "parameter" and counter.computation is condition and path:
            count = _count(loop, path, _constant(limit), direction)
            if count is not None:
                return count
        direction = SWAPPED.get(direction, "")
    return None


def _count(loop: Instruction, path: tuple[int, ...], limit: int | None, direction: str) -> int | None:
    start = _constant((loop.operands[0], path))
    (body,) = loop.called_computations["body"]
    step = _offset((body.root, path), (body.parameters[0], path))
    if start is None or step is None or limit is None:
        return None
    return count_turns(start, limit, step, direction)


def _offset(value: Value, counter: Value) -> int | None:
    """The constant that is added to the counter to get `value`; None if it is not such a sum."""
    instruction, path = origin(value)
    if (instruction, path) == counter:
        return 0
    if instruction.opcode not in ("add", "subtract"):
        return None
    left, right = ((operand, ()) for operand in instruction.operands)
    for one, other in ((left, right), (right, left)):
        base, added = _offset(one, counter), _constant(other)
        if base is not None and added is not None:
            if instruction.opcode == "add":
                return base + added
            return base - added if one is left else None
    return None


def _constant(value: Value) -> int | None:
    """The integer that a value is, if it is the same in every iteration; else None."""
    instruction, path = origin(value)
    if instruction.opcode == "constant":
        text = instruction.arguments.strip()
        return int(text) if text.lstrip("-").isdigit() else None
    if instruction.opcode == "parameter":
        return _before_loop(instruction, path)
    if instruction.opcode in ("add", "subtract", "multiply") and not path:
        left, right = (_constant((operand, ())) for operand in instruction.operands)
        if left is None or right is None:
            return None
        return {"add": left + right, "subtract": left - right, "multiply": left * right}[instruction.opcode]
    return None


def _before_loop(parameter: Instruction, path: tuple[int, ...]) -> int | None:
    """The integer in a place of a loop's parameter, if the loop does not change it; else None."""
    loop, role = parameter.computation.caller
    if not loop or role not in ("body", "condition") or not _invariant(loop, path):
        return None
    return _constant((loop.operands[0], path))


def _invariant(loop: Instruction, path: tuple[int, ...]) -> bool:
    (body,) = loop.called_computations["body"]
    return origin((body.root, path)) == (body.parameters[0], path)
