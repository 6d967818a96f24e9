"""What a launch may use: hours, and the price of the slice while it is held."""

import time

from gspmd_lm.launch.job import Job
from gspmd_lm.units import human_clock


class Budget:
    """The hours since a launch began, and the hours and USD for which it has held a slice."""

    def __init__(self, job: Job, usd_per_hour: float):
        """usd_per_hour: of the whole slice; 0 where no price is known."""
        self.job, self.usd_per_hour = job, usd_per_hour
        self._began_s = time.monotonic()
        self._held_since_s: float | None = None
        self._held_before_s = 0.0

    @property
    def is_held(self) -> bool:
        """Whether a slice is there, and costs money."""
        return self._held_since_s is not None

    def hold(self) -> None:
        """Counts from now on, if it does not yet."""
        if self._held_since_s is None:
            self._held_since_s = time.monotonic()

    def release(self) -> None:
        """Counts no further."""
        self._held_before_s, self._held_since_s = self._held_s, None

    @property
    def _held_s(self) -> float:
        since_s = self._held_since_s
        return self._held_before_s + (0.0 if since_s is None else time.monotonic() - since_s)

    @property
    def usd(self) -> float:
        return self._held_s / 3600 * self.usd_per_hour

    @property
    def spent(self) -> str:
        """The time for which the slice was held, and its cost."""
        return human_clock(self._held_s) + (f", {self.usd:.2f} USD" if self.usd_per_hour else "")

    @property
    def over(self) -> str:
        """A line about the budget that is spent; '' if none is."""
        hours, most_hours, most_usd = (time.monotonic() - self._began_s) / 3600, self.job.max_hours, self.job.max_usd
        if most_hours is not None and hours >= most_hours:
            return f"max_hours: {most_hours:g} h are over"
        if most_usd is not None and self.usd >= most_usd:
            return f"max_usd: {self.usd:.2f} USD are spent"
        return ""
