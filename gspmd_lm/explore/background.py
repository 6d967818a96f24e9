"""What a workbench does in the background when it is asked to: one compilation, and one search."""

import asyncio
import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any

from gspmd_lm.errors import InputError
from gspmd_lm.explore.inputs import Inputs
from gspmd_lm.explore.jobs import Job
from gspmd_lm.plan.front import pareto_front

MOST_RESULTS = 20  # compiled layouts that are kept
FASTEST = 150  # points of a search that are shown, besides the front


class _Background:
    """One job that runs once, can be stopped, and tells of its progress."""

    kind = ""

    def __init__(self, subject: bytes, tell: Callable[[], None]):
        self._subject, self._tell = subject, tell
        self._job: Job | None = None
        self._runs = 0  # counts the runs, so that what comes late of an older one is dropped
        self.inputs: Inputs | None = None  # of the last run
        self.running = False
        self.progress = ""
        self.error: str | None = None
        self._began_s = self._ended_s = 0.0

    @property
    def seconds(self) -> float:
        """How long the last run took, or the present one has taken so far."""
        return (time.monotonic() if self.running else self._ended_s) - self._began_s

    def forget(self) -> None:
        """Forgets the answers of the last run."""

    def take(self, answer: Mapping[str, Any]) -> None:
        """Takes an answer of the job."""

    async def run(self, inputs: Inputs) -> None:
        """Runs the job until it has ended. If it still runs from an earlier call, that run is stopped first."""
        self.stop()
        self._runs += 1
        number, ended = self._runs, False
        self.inputs, self.running, self.error, self.progress = inputs, True, None, "starting"
        self._began_s = time.monotonic()
        self.forget()
        self._tell()
        job = await Job.start(self.kind, self._subject)
        if number != self._runs or not self.running:  # it was stopped meanwhile
            await job.close()
            return
        self._job = job
        await job.send({"inputs": dataclasses.asdict(inputs)})
        try:
            async for answer in job.answers():
                if number != self._runs:
                    return
                ended = ended or "done" in answer or "error" in answer
                self.progress = answer.get("progress") or self.progress
                self.error = answer.get("error")
                self.take(answer)
                self._tell()
            words = await job.last_words()
        finally:
            await asyncio.shield(job.close())
        if number == self._runs and self.running:
            self._end(None if ended else f"the process has ended: {words}")

    def stop(self) -> None:
        """Stops the job, if it runs."""
        if self._job:
            self._job.stop()
        if self.running:
            self.progress = "stopped"
            self._runs += 1
            self._end(None)

    def _end(self, error: str | None) -> None:
        self.running, self._job = False, None
        self.error = self.error or error
        self._ended_s = time.monotonic()
        self._tell()


class Compilation(_Background):
    """The compilation of one layout by `explain`, and the results of those before it."""

    kind = "compile"

    def __init__(self, subject: bytes, tell: Callable[[], None]):
        super().__init__(subject, tell)
        self.results: dict[Inputs | None, Mapping[str, Any]] = {}

    def take(self, answer: Mapping[str, Any]) -> None:
        if "done" in answer:
            self.results[self.inputs] = answer["done"]
            for old in [*self.results][:-MOST_RESULTS]:
                del self.results[old]

    def state(self, version: int | None) -> dict[str, Any]:
        """The state as a page reads it. version: of the edit that was compiled last."""
        return {
            "running": self.running,
            "progress": self.progress,
            "seconds": round(self.seconds, 1),
            "error": self.error,
            "for_version": version,
            "result": {
                key: value
                for key, value in self.results.get(self.inputs, {}).items()
                if key not in ("page", "timeline")
            },
        }


class Search(_Background):
    """The search for the best layouts of a config on a target, and the layouts that it has seen."""

    kind = "search"

    def __init__(self, subject: bytes, tell: Callable[[], None]):
        super().__init__(subject, tell)
        self.points: dict[int, Mapping[str, Any]] = {}
        self.best: int | None = None

    def forget(self) -> None:
        self.points, self.best = {}, None

    def take(self, answer: Mapping[str, Any]) -> None:
        for point in answer.get("points", ()):
            self.points[point["rank"]] = point
        if done := answer.get("done"):
            self.progress, self.best = done["text"], done["best"]

    def text(self, rank: Any) -> str:
        """The text of a layout. Raises InputError where there is none of that number."""
        if isinstance(rank, bool) or not isinstance(rank, int) or rank not in self.points:
            raise InputError(f"rank {rank}: the search has no such layout")
        return self.points[rank]["rules"]

    def state(self) -> dict[str, Any]:
        """The state as a page reads it: the front of time and memory, and the fastest layouts besides."""
        return {
            "running": self.running,
            "progress": {
                "text": self.progress,
                "done": sum(point["compiled"] for point in self.points.values()),
                "total": len(self.points),
                "seconds": round(self.seconds, 1),
            },
            "points": self._shown_points(),
            "best": self.best,
            "error": self.error,
        }

    def _shown_points(self) -> list[dict[str, Any]]:
        ordered = sorted(self.points.values(), key=lambda point: (not point["fits"], *_costs(point)))
        front = {point["rank"] for point in pareto_front((one for one in ordered if one["fits"]), _costs)}
        shown = [point for n, point in enumerate(ordered) if n < FASTEST or point["rank"] in front or point["compiled"]]
        return [
            {key: value for key, value in point.items() if key != "rules"} | {"front": point["rank"] in front}
            for point in shown
        ]


def _costs(point: Mapping[str, Any]) -> tuple[float, float]:
    """The time of a step, or where none is known the bytes that it sends; and its memory."""
    time_s = point["step_time_s"]
    return time_s if time_s is not None else point["sent_bytes"], point["peak_bytes"]
