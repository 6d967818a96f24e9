"""Problems of a rules file, and the message that joins them: it tells each cause once."""

import collections
import dataclasses
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from gspmd_lm import versions
from gspmd_lm.config import core_yaml
from gspmd_lm.errors import InputError, either
from gspmd_lm.units import human_bytes, plural

UNUSED = "rule-matched-nothing"  # the code of the warning about a row that has no effect


class ShardingError(InputError):
    """A rules file contradicts itself, or does not fit the model or the devices. The message lists every problem.

    causes: the message of each cause with the first of its problems, where a check of the rules has found them.
    """

    def __init__(self, message: str, causes: "Sequence[tuple[str, Problem]]" = ()):
        super().__init__(message)
        self.causes = tuple(causes)


class ClashingRow(NamedTuple):
    """One of two rows that would split an array over one mesh axis."""

    key: str  # rules.batch
    axis: str
    place: str
    mesh: str  # in which its axis has a mesh axis for itself; "" where that is not said


class Clash(NamedTuple):
    """Two rows that would split one array over the same mesh axis."""

    mesh_axis: str
    first: ClashingRow
    second: ClashingRow

    def other(self, key: str) -> ClashingRow:
        """The row that has another key than `key`."""
        return self.second if self.first.key == key else self.first


@dataclasses.dataclass(frozen=True)
class Problem:
    """One problem: a message, the row that causes it, and a fix."""

    message: str
    row: str
    fix: str
    instead: str = ""  # a second fix
    replicated_bytes: int = 0  # the cost of the first fix
    warning: bool = False
    code: str = "rules-check"  # of a warning, for scripts: see docs/foresight.md
    clash: Clash | None = None
    sizes: tuple[tuple[str, int], ...] = ()  # mesh axes, and with which size each of them fills the devices
    axes: tuple[str, ...] = ()  # that a row may have in place of an unknown one, in all models
    misspelt: tuple[str, str] = ("", "")  # a word of the row, and the known word that it resembles, if it does

    def within(self, axes: Collection[str]) -> "Problem":
        """The same problem with a fix that names those of `self.axes` that a model has."""
        own = [axis for axis in self.axes if axis in axes]
        if not own:
            return self
        others = len(self.axes) - len(own)
        more = f"; other models have {others} more (docs/rules_reference.md)" if others else ""
        return dataclasses.replace(self, fix=versions.with_documents(f"use {either(own)}{more}"))

    @property
    def place(self) -> str:
        """The array, row or section with which the message begins."""
        return self.message.partition(": ")[0]

    def __str__(self) -> str:
        cost = f" (replicates {human_bytes(self.replicated_bytes)} per device)" if self.replicated_bytes else ""
        instead = f", or {self.instead}" if self.instead else ""
        return f"{self.message}\n  rule  {self.row}\n  fix   {self.fix}{cost}{instead}"


def check(problems: Iterable[Problem]) -> list[Problem]:
    """The warnings among `problems`. Raises ShardingError with all the others; equal findings share one message, and so
    do clashes of one row with several."""
    problems = list(problems)
    errors = [problem for problem in problems if not problem.warning]
    blamed = _find_causes([problem.clash for problem in errors if problem.clash])
    groups: dict[Hashable, dict[str, Problem]] = {}  # cause -> place -> problem
    for problem in errors:
        cause = problem.row, problem.message.removeprefix(problem.place)
        if problem.clash:
            cause = blamed[problem.clash]
        groups.setdefault(cause, {}).setdefault(problem.place, problem)
    if groups:
        causes = [
            (_join_messages(cause, [*alike.values()]), next(iter(alike.values()))) for cause, alike in groups.items()
        ]
        raise ShardingError("\n".join(message for message, _ in causes), causes)
    return [problem for problem in problems if problem.warning]


def _find_causes(clashes: Sequence[Clash]) -> dict[Clash, Hashable]:
    """The cause of each clash: the key of a row that clashes with most others, or the two rows of a single clash.

    A row with a key is blamed if it clashes with at least two others.
    """
    blamed: dict[Clash, Hashable] = {clash: frozenset((clash.first.key, clash.second.key)) for clash in clashes}
    left = [*blamed]
    while left:
        others = collections.defaultdict[str, set[str]](set)
        for clash in left:
            others[clash.first.key].add(clash.second.key)
            others[clash.second.key].add(clash.first.key)
        most = max(others, key=lambda key: len(others[key]))
        if len(others[most]) < 2:
            break
        of_it = [clash for clash in left if most in (clash.first.key, clash.second.key)]
        blamed |= dict.fromkeys(of_it, most)
        left = [clash for clash in left if clash not in of_it]
    return blamed


def _join_messages(cause: Hashable, alike: Sequence[Problem]) -> str:
    """The message of problems that have one cause."""
    first, *others = alike
    if isinstance(cause, str):
        return _clash_of_one_row(cause, {problem.place: problem.clash for problem in alike if problem.clash})
    total_bytes = sum(problem.replicated_bytes for problem in alike)
    instead = " ".join(dict.fromkeys(filter(None, (problem.instead for problem in alike))))
    also = f"\n  also  {', '.join(problem.place for problem in others)}" if others else ""
    return f"{dataclasses.replace(first, replicated_bytes=total_bytes, instead=instead)}{also}"


def _clash_of_one_row(key: str, clashes: Mapping[str, Clash]) -> str:
    """The message of a row that clashes with several: they stand below it, each with its arrays.

    clashes: array -> the clash in it.
    """
    arrays: dict[str, list[str]] = {}
    for array, clash in clashes.items():
        arrays.setdefault(clash.other(key).place, []).append(array)
    mesh_axis, *rows = next(iter(clashes.values()))
    row = next(one for one in rows if one.key == key)
    own = f", as in mesh: {row.mesh}" if row.mesh else ""
    return str(
        Problem(
            f"{key}: {mesh_axis} would split {row.axis} and another dimension of {plural(len(clashes), 'array')}",
            "\n        ".join([row.place, *(f"{place}, in {', '.join(names)}" for place, names in arrays.items())]),
            f"give {row.axis} a mesh axis of its own{own}",
            f"--set rules.{key}=null",
        )
    )


def place(path: str, flags: Mapping[str, str], key: str, value: Any) -> str:
    """The flag that set the value of a key, or of a key above it, else the row of the file.

    Flags that set only parts of the value follow the row.
    """
    above = [flag for known, flag in flags.items() if f"{key}.".startswith(f"{known}.")]
    parts = dict.fromkeys(flag for known, flag in flags.items() if known.startswith(f"{key}."))
    if above:
        return above[-1]
    return f"{path}: {key}: {flow(value)}" + (f" with {' '.join(parts)}" if parts else "")


def flow(value: Any) -> str:
    """A value as one line of YAML."""
    return core_yaml.dump([value], flow=True).strip()[1:-1]
