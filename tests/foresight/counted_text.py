"""The bytes that one device sends in a compiled program, from its text alone: a second count, which shares no code.

`sent_bytes(text)` reads the text with a few patterns, and knows none of the package's modules. It counts each
collective as rings do, in fusions too, as often as the loops around it run. Of the branches of a conditional it takes
the one that sends most. A loop that sends something must have a counter that begins and ends at constants.
"""

import math
import re

KINDS = {"all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute", "ragged-all-to-all"}
_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_LINE = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*)$")
_ARRAY = re.compile(r"\b(pred|[a-z]+\d+(?:e\dm\d\w*)?)\[([\d,]*)\]")
_OPCODE = re.compile(r"(?:^|[\s)\]}])([a-z][a-z\-]*)\(")


class Line:
    """One instruction: its name, what it does, its operands' names, and the rest of the text."""

    def __init__(self, root, name, text):
        self.root, self.name = bool(root), name
        shape = text[: _closing(text, 0) + 1] if text.startswith("(") else text.split(" ", 1)[0]
        found = _OPCODE.search(text, len(shape) - 1)
        self.shape, self.opcode = shape, found.group(1)
        close = _closing(text, found.end() - 1)
        self.arguments, self.rest = text[found.end() : close], text[close + 1 :]
        self.operands = re.findall(r"%([\w.\-]+)", self.arguments) or _bare_names(self.arguments)
        self.base = re.sub(r"-(start|done|update)$", "", self.opcode)

    def called(self, role):
        found = re.search(rf"\b{role}=%?([\w.\-]+)", self.rest)
        return found and found.group(1)


def _bare_names(arguments):
    """The operands of a text that is printed without percent signs: after the shape of each, where it is there."""
    flat = re.sub(r"/\*.*?\*/|\{[^{}]*\}|\[[^\]]*\]", "", arguments)
    return [part.split()[-1] for part in flat.split(",") if part.split()]


def _closing(text, begin):
    depth, quoted = 0, False
    for at in range(begin, len(text)):
        letter = text[at]
        if letter == '"' and text[at - 1] != "\\":
            quoted = not quoted
        elif not quoted and letter in "()":
            depth += 1 if letter == "(" else -1
            if depth == 0:
                return at
    raise ValueError(text[begin : begin + 80])


def _bytes(shape):
    return sum(
        math.ceil(math.prod(int(n) for n in sizes.split(",") if n) * (8 if dtype == "pred" else _bits(dtype)) / 8)
        for dtype, sizes in _ARRAY.findall(shape)
        if dtype != "token"
    )


def _bits(dtype):
    return int(re.search(r"\d+", dtype).group())


class Text:
    def __init__(self, text):
        self.computations, self.entry, current = {}, "", None
        self.devices = int((re.search(r"num_partitions=(\d+)", text) or re.search(r"()1", "1")).group(1) or 1)
        for line in re.sub(r",\n\s+", ", ", text).splitlines():
            if head := _HEAD.match(line):
                current = self.computations.setdefault(head.group(2), {})
                self.entry = head.group(2) if head.group(1) else self.entry
            elif line.startswith("}"):
                current = None
            elif current is not None and (found := _LINE.match(line)):
                current[found.group(2)] = Line(*found.groups())

    def sent_bytes(self, computation=""):
        total, block = 0.0, self.computations[computation or self.entry]
        for line in block.values():
            if line.base in KINDS and not line.opcode.endswith(("-done", "-update")):
                total += self._sent(line, block) if self._begins(line, block) else 0.0
            elif line.opcode == "while":
                each, asked = (self.sent_bytes(line.called(role)) for role in ("body", "condition"))
                trips = self.trips(line, block) if each + asked else 0
                total += trips * each + (trips + 1) * asked - self._spared_bytes(line.called("body"))
            elif line.opcode == "conditional":
                names = re.search(r"branch_computations=\{([^}]*)\}", line.rest)
                branches = (
                    re.findall(r"[\w.\-]+", names.group(1))
                    if names
                    else [line.called("true_computation"), line.called("false_computation")]
                )
                total += max(self.sent_bytes(name) for name in branches)
            elif line.opcode in ("fusion", "call", "async-start", "call-start"):
                total += self.sent_bytes(line.called("calls") or line.called("to_apply"))
        return total

    def _spared_bytes(self, body):
        """What a loop on TPUs does not send in its last iteration, where a branch does nothing then."""
        conditionals = [line for line in self.computations[body].values() if line.opcode == "conditional"]
        spared = [line for line in conditionals if "last_iteration_noop" in line.rest]
        return sum(self.sent_bytes(line.called("true_computation")) for line in spared)

    def _sent(self, line, block):
        group = self._group_size(line)
        # The operands are found by their names: the text of a collective's own shape may have more than the result.
        held = sum(_bytes(block[name].shape) for name in line.operands)
        if line.base == "collective-permute":
            pairs = re.findall(r"\{(\d+),(\d+)\}", re.search(r"source_target_pairs=(\{.*?\}\})", line.rest).group(1))
            return held if any(a != b for a, b in pairs) else 0
        if group <= 1:
            return 0
        ring = held * (group - 1) / group
        if line.base == "all-gather":
            return held * (group - 1)
        if line.base == "all-reduce":
            return ring if self._only_sliced(line, block) else 2 * ring
        return ring

    def _begins(self, line, block):
        """Whether a collective begins here: those that several fusions of a TPU carry on stand in each of them."""
        handed = [one for one in block.values() if line.name in one.operands and one.opcode == "custom-call"]
        carried = "async_collective_fusion_config" in line.rest
        return not carried or any('"AsyncCollectiveStart"' in one.rest for one in handed)

    def _only_sliced(self, line, block):
        """Whether a device keeps no more than its slice of each array, in the fusion that a reduction stands in."""
        users = [one for one in block.values() if line.name in one.operands]
        if line.shape.startswith("("):
            users = [one for part in users for one in block.values() if part.name in one.operands]
        return bool(users) and all(one.opcode == "dynamic-slice" for one in users) and self._is_fused(block)

    def _is_fused(self, block):
        name = next(name for name, lines in self.computations.items() if lines is block)
        lines = (line for lines in self.computations.values() for line in lines.values())
        return any(line.opcode == "fusion" and line.called("calls") == name for line in lines)

    def _group_size(self, line):
        if mesh := re.search(r"replica_groups=mesh\[([^\]]*)\].*? \{([^}]*)\}", line.rest):
            sizes = dict(re.findall(r"'?(\w+)'?=(\d+)", mesh.group(1)))
            named = re.findall(r"'?([a-z_]\w*)'?(?::\(\d+\)(\d+))?", mesh.group(2))
            return math.prod(int(part or sizes[name]) for name, part in named)
        if listed := re.search(r"replica_groups=\{\{([\d,]+)\}", line.rest):
            return len(listed.group(1).split(","))
        if iota := re.search(r"replica_groups=\[\d+,(\d+)\]<=", line.rest):
            return int(iota.group(1))
        return self.devices

    def trips(self, loop, block):
        """How often a loop runs, which the compiler says, or a counter that begins and ends at constants."""
        if known := re.search(r'known_trip_count[\\"]*:\s*\{[\\"]*n[\\"]*:\s*[\\"]*(\d+)', loop.rest):
            return int(known.group(1))
        condition = self.computations[loop.called("condition")]
        (compare,) = (line for line in condition.values() if line.root)
        given = {}
        if compare.opcode == "fusion":
            inner = self.computations[compare.called("calls")]
            given = {name: condition[compare.operands[int(x.arguments)]] for name, x in inner.items()
                     if x.opcode == "parameter"}  # fmt: skip
            (compare,) = (line for line in inner.values() if line.root)
            condition = condition | inner
        sides = [given.get(name, condition[name]) for name in compare.operands]
        counter = next(side for side in sides if side.opcode == "get-tuple-element")
        limit = next(side for side in sides if side is not counter)
        if limit.opcode == "get-tuple-element":  # it is handed round
            limit = self._begin(block, loop.operands[0], _index(limit))
        start = self._begin(block, loop.operands[0], _index(counter))
        body = self.computations[loop.called("body")]
        (root,) = (line for line in body.values() if line.root)
        step = self._increment(body, root.operands[_index(counter)], {})
        return math.ceil((int(limit.arguments) - int(start.arguments)) / step)

    def _begin(self, block, name, index):
        """The constant with which an element of what a loop is given begins."""
        line = block[name]
        while line.opcode != "tuple":
            line = block[line.operands[0]]
        line = block[line.operands[index]]
        while line.opcode in ("copy", "bitcast", "get-tuple-element"):
            line = block[line.operands[0]]
        assert line.opcode == "constant", f"{name}, {index}: begins with {line.opcode}"
        return line

    def _increment(self, block, name, given):
        """What a counter's new value adds to the old one."""
        line = block[name]
        if line.opcode == "parameter":
            outer = given[int(line.arguments)]
            return self._increment(*outer)
        if line.opcode == "fusion":
            inner = self.computations[line.called("calls")]
            (root,) = (one for one in inner.values() if one.root)
            return self._increment(inner, root.name, {n: (block, one, given) for n, one in enumerate(line.operands)})
        if line.opcode == "constant":
            return int(line.arguments)
        if line.opcode == "add":
            return sum(self._increment(block, one, given) for one in line.operands)
        if line.opcode in ("copy", "bitcast"):
            return self._increment(block, line.operands[0], given)
        assert line.opcode == "get-tuple-element", f"a counter is made by {line.opcode}"
        return 0


def _index(line):
    return int(re.search(r"index=(\d+)", line.rest).group(1))


def sent_bytes(text):
    """The bytes that one device sends in one run of the program that `compiled.as_text()` has written."""
    return Text(text).sent_bytes()
