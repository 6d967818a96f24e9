"""The best evaluation of a run so far: it decides which checkpoint is kept, and when the run ends early."""

import dataclasses
import math
from typing import Any


@dataclasses.dataclass(frozen=True)
class Best:
    """The evaluation with the lowest held-out loss. Each checkpoint holds it, so that a resumed run goes on from it."""

    step: int | None = None
    loss: float | None = None
    since: int = 0  # how many evaluations later were not better
    evaluated: int | None = None  # the step of the last evaluation that counted

    @classmethod
    def of(cls, extra: dict[str, Any]) -> "Best":
        """What a checkpoint holds; nothing is best yet if it holds nothing."""
        return cls(**extra.get("best", {}))

    def after(self, step: int, loss: float) -> "Best":
        """The best after an evaluation of `step`. A loss that is not finite is not better."""
        if math.isfinite(loss) and (self.loss is None or loss < self.loss):
            return Best(step, loss, 0, step)
        return dataclasses.replace(self, since=self.since + 1, evaluated=step)

    def ends(self, patience: int) -> bool:
        """Whether a run with this patience ends here; 0 never ends it."""
        return 0 < patience <= self.since
