"""The trip count of a loop of a compiled program, if its counter starts, steps and stops at constants."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gspmd_lm.foresight.hlo import Module
    from gspmd_lm.foresight.hlo.instruction import Instruction, Value

_SWAPPED = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE", "NE": "NE"}


class Loops:
    """The loops of one module. It follows values to their origins."""

    def __init__(self, module: Module):
        self.module = module

    def trip_count(self, loop: Instruction) -> int | None:
        """The trip count of a while loop, from `counter < limit`; None if it cannot be told."""
        condition = self.module.computations[loop.called["condition"][0]]
        compare, _ = self.origin((condition.root, ()))
        if compare.opcode != "compare":
            return None
        direction = compare.attributes.get("direction", "")
        sides = [self.origin((self.module.operand(compare, n), ())) for n in (0, 1)]
        for (counter, path), limit_place in (tuple(sides), tuple(reversed(sides))):
            if counter.opcode == "parameter" and counter.computation == condition.name and path:
                trip_count = self._count(loop, path, self.value(limit_place), direction)
                if trip_count is not None:
                    return trip_count
            direction = _SWAPPED.get(direction, "")
        return None

    def _count(self, loop: Instruction, path: tuple[int, ...], limit: int | None, direction: str) -> int | None:
        start = self.value((self.module.operand(loop), path))
        body = self.module.computations[loop.called["body"][0]]
        step = self._offset((body.root, path), (body.parameters[0], path))
        if start is None or step is None or limit is None or step == 0:
            return None
        if direction in ("LE", "GE"):  # these include the limit itself
            limit += 1 if direction == "LE" else -1
        if {"LT": 1, "LE": 1, "GT": -1, "GE": -1, "NE": step}.get(direction, 0) * step <= 0:
            return None  # the counter runs away from its limit, or the direction is not known
        if direction == "NE" and (limit - start) % step:
            return None
        return max(0, math.ceil((limit - start) / step))

    def _offset(self, place: Value, counter: Value) -> int | None:
        """The constant that is added to the counter to get `place`; None if it is not such a sum."""
        instruction, path = self.origin(place)
        if (instruction, path) == counter:
            return 0
        if instruction.opcode not in ("add", "subtract"):
            return None
        left, right = ((self.module.operand(instruction, n), ()) for n in (0, 1))
        for one, other in ((left, right), (right, left)):
            base, added = self._offset(one, counter), self.value(other)
            if base is not None and added is not None:
                if instruction.opcode == "add":
                    return base + added
                return base - added if one is left else None
        return None

    def value(self, place: Value) -> int | None:
        """The integer at a place, if it is the same in every iteration; else None."""
        instruction, path = self.origin(place)
        if instruction.opcode == "constant":
            text = instruction.arguments.strip()
            return int(text) if text.lstrip("-").isdigit() else None
        if instruction.opcode == "parameter":
            return self._before(instruction, path)
        if instruction.opcode in ("add", "subtract", "multiply") and not path:
            left, right = (self.value((self.module.operand(instruction, n), ())) for n in (0, 1))
            if left is None or right is None:
                return None
            return {"add": left + right, "subtract": left - right, "multiply": left * right}[instruction.opcode]
        return None

    def _before(self, parameter: Instruction, path: tuple[int, ...]) -> int | None:
        """The integer at a place of a loop's parameter, if the loop does not change it; else None."""
        caller, role = self.module.caller(parameter)
        if not caller or role not in ("body", "condition") or not self._invariant(caller, path):
            return None
        return self.value((self.module.operand(caller), path))

    def _invariant(self, loop: Instruction, path: tuple[int, ...]) -> bool:
        body = self.module.computations[loop.called["body"][0]]
        return self.origin((body.root, path)) == (body.parameters[0], path)

    def origin(self, place: Value) -> Value:
        """The origin of a value, followed through copies, tuples, fusions, calls and loops that keep it."""
        while True:
            instruction, path = place
            kept = instruction.opcode == "while" and path and self._invariant(instruction, path)
            before = (self.module.operand(instruction), path) if kept else self.module.defined_by(place)
            if before is None:
                return place
            place = before
