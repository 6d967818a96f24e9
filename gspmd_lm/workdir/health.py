"""Which checkpoints of a run are healthy: a later step was finite, which shows that their weights were."""

import json
from collections.abc import Collection

import jax
from etils import epath

from gspmd_lm import files
from gspmd_lm.errors import InputError
from gspmd_lm.files import json_object

VERDICT = "verdict.json"  # in the folder of a step: whether it is healthy


class Health:
    """Which steps in a directory are healthy: as written on disk, not written yet, or still to be seen here."""

    def __init__(self, directory: epath.Path):
        self.directory = directory
        self.unknown: set[int] = set()  # steps saved or restored here that no finite step has followed yet
        self.unwritten: dict[int, bool] = {}

    def confirm(self, finite_step: int) -> None:
        """Notes that `finite_step` was finite, so that the steps before it are healthy."""
        healthy = {step for step in self.unknown if step < finite_step}
        self.unknown -= healthy
        self.unwritten |= dict.fromkeys(healthy, True)

    def reject(self) -> None:
        """Notes that no finite step followed the step that was saved or restored last."""
        self.unwritten |= dict.fromkeys(self.unknown, False)
        self.unknown.clear()

    def is_healthy(self, step: int) -> bool | None:
        """Whether a finite step followed `step`; None if that is not known or the verdict is damaged."""
        if step in self.unwritten:
            return self.unwritten[step]
        try:
            return bool(json_object((self.directory / str(step) / VERDICT).read_bytes(), VERDICT)["good"])
        except (OSError, InputError, KeyError):
            return None

    def write(self, committed: Collection[int]) -> None:
        """Writes the verdicts on `committed` steps, the ones whose folders exist."""
        for step, healthy in self.unwritten.items() if jax.process_index() == 0 else ():
            if step in committed:  # its folder was not rotated away
                files.replace(self.directory / str(step) / VERDICT, json.dumps({"good": healthy}))
        self.unwritten.clear()
