"""Which checkpoints are good: those that a finite step followed. A verdict lies beside what it is about."""

import json
from collections.abc import Collection

import jax
from etils import epath

from gspmd_lm import files

VERDICT = "verdict.json"  # in the folder of a step


class Verdicts:
    """The verdicts on the steps in a directory: those on disk, those of this process that are not written yet, and the
    steps that nothing is known of.
    """

    def __init__(self, directory: epath.Path):
        self.directory = directory
        self.unknown: set[int] = set()  # steps saved or restored here, which no finite step has followed yet
        self.unwritten: dict[int, bool] = {}

    def ask(self, step: int) -> None:
        """From here on the steps that follow `step` decide about it."""
        self.unknown.add(step)

    def confirm(self, finite_step: int) -> None:
        """`finite_step` was finite: the steps before it are good."""
        good = {step for step in self.unknown if step < finite_step}
        self.unknown -= good
        self.unwritten |= dict.fromkeys(good, True)

    def reject(self) -> None:
        """No finite step followed what was saved or restored last."""
        self.unwritten |= dict.fromkeys(self.unknown, False)
        self.unknown.clear()

    def on(self, step: int) -> bool | None:
        """Whether a finite step followed `step`; None where that is not known, or the note of it is damaged."""
        if step in self.unwritten:
            return self.unwritten[step]
        try:
            return bool(json.loads((self.directory / str(step) / VERDICT).read_bytes())["good"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def write(self, committed: Collection[int]) -> None:
        """Writes down what is known of the steps that are there, which are `committed`."""
        for step, good in self.unwritten.items() if jax.process_index() == 0 else ():
            if step in committed:  # not rotated away
                files.replace(self.directory / str(step) / VERDICT, json.dumps({"good": good}))
        self.unwritten.clear()
