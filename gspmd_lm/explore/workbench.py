"""The state of a workbench: its inputs, what is shown of them, and the jobs that work it out."""

import asyncio
import dataclasses
import shlex
from collections.abc import Mapping
from typing import Any

from gspmd_lm import versions
from gspmd_lm.errors import InputError
from gspmd_lm.explore.inputs import Inputs
from gspmd_lm.explore.jobs import Job

LONGEST_S = 120.0  # that one layout may take to be estimated


class Workbench:
    """One layout that is edited, and what its server tells of it. Everything happens in one event loop."""

    def __init__(self, inputs: Inputs, subject: bytes):
        self.inputs, self._subject = inputs, subject
        self.version = 1
        self.shown_version = 0
        self.shown: dict[str, Any] = {}  # the figures of the last layout that could be estimated
        self.problems: list[dict[str, Any]] = []
        self.busy: str | None = "estimating"
        self.revision = 0  # counts the changes of the state
        self._changed = asyncio.Event()
        self._job: Job | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    # What is told

    def state(self) -> dict[str, Any]:
        """The state as a page reads it."""
        shown, inputs = self.shown, dataclasses.asdict(self.inputs)
        inputs["batch"] = self.inputs.batch or shown.get("batch")
        inputs["seq"] = self.inputs.seq or shown.get("seq")
        return {
            "version": self.version,
            "shown_version": self.shown_version,
            "busy": self.busy,
            "inputs": inputs,
            "controls": [],
            "problems": self.problems,
            "not_known": shown.get("not_known", []),
            "headline": shown.get("headline"),
            "mesh": shown.get("mesh"),
            "arrays": shown.get("arrays", []),
            "layer": shown.get("layer"),
            "timeline": None,
            "search": {"running": False, "progress": None, "points": [], "error": None},
            "compile": {"running": False, "progress": "", "seconds": 0.0, "error": None, "for_version": None},
            "changes": None,
            "command": self.command,
        }

    @property
    def command(self) -> str:
        """The command that trains what stands in the editor, once it is saved."""
        inputs = self.inputs
        words = [f"--config={inputs.config}", *(f"--set={one}" for one in inputs.overrides), f"--rules={inputs.path}"]
        return f"{versions.program()} {shlex.join(words)}"

    def tell(self) -> None:
        """Wakes up those who wait for a change."""
        self.revision += 1
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait(self, seconds: float) -> None:
        """Waits until something changes, or for so long."""
        await asyncio.wait([asyncio.ensure_future(self._changed.wait())], timeout=seconds)

    # What is done

    async def start(self) -> None:
        """Begins to work out the figures."""
        self._spawn(self._run_layouts())

    def stop(self) -> None:
        """Ends all jobs."""
        for task in self._tasks:
            task.cancel()
        if self._job:
            self._job.stop()

    async def edit(self, asked: Mapping[str, Any]) -> int:
        """Takes new inputs. Returns their version; figures follow. Raises InputError for those that may not be."""
        self.inputs = self.inputs.changed(asked)
        self.version += 1
        self.busy = "estimating"
        self.tell()
        await self._ask()
        return self.version

    async def _ask(self) -> None:
        if self._job:
            await self._job.send({"version": self.version, "inputs": dataclasses.asdict(self.inputs)})

    async def _run_layouts(self) -> None:
        """Has a process work out the figures of each edit. One that has ended is followed by another."""
        while True:
            self._job = await Job.start("layouts", self._subject)
            await self._ask()
            async for answer in self._job.answers():
                self._take(answer)
            words = await self._job.last_words()
            why = words.rpartition("\n")[2] or "it was ended"
            self.problems = [_problem(f"the process that estimates layouts has ended: {why}")]
            self.busy = None
            self.tell()
            await asyncio.sleep(1.0)

    def _take(self, answer: Mapping[str, Any]) -> None:
        """Takes an answer about an edit."""
        version = answer.get("version", 0)
        if "problems" in answer and version == self.version:
            self.problems = answer["problems"]
        if answer.get("shown") and version >= self.shown_version:
            self.shown, self.shown_version = {**self.shown, **answer["shown"]}, version
        if version == self.version:
            self.busy = answer.get("busy")
        self.tell()

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _problem(message: str) -> dict[str, Any]:
    return {"line": None, "message": message, "fix": None, "fix_text": False, "warning": False}


__all__ = ["InputError", "Workbench"]
