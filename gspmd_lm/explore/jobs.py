"""Processes that compute for a workbench, so that its page never waits: they have jax, and the server has not.

A job is sent lines of JSON and answers with lines of JSON. Whatever it prints besides goes to stderr.
"""

import asyncio
import base64
import contextlib
import json
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from gspmd_lm.runtime import endings
from gspmd_lm.runtime.quiet import environment_without_accelerators

MOST_LINE = 2**27  # bytes of an answer
MOST_KEPT = 4_000  # bytes of what a process says last, should it end
LONGEST_S = 120.0  # that one layout may take
LOOK_S = 1.0  # how often it is looked whether one takes too long


class Job:
    """One process that computes. It leads a group of its own, so that what it has started ends with it."""

    def __init__(self, process: asyncio.subprocess.Process):
        self._process = process
        self._said = b""
        self._listening = asyncio.create_task(self._listen())

    @classmethod
    async def start(cls, kind: str, subject: bytes) -> "Job":
        """The process of a kind of job: layouts, layers, search or compile. subject: the pickled `Subject`."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "gspmd_lm.explore.worker", kind),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=environment_without_accelerators(sys.path),
            limit=MOST_LINE,
            start_new_session=True,
        )
        job = cls(process)
        await job.send(base64.b64encode(subject).decode())
        return job

    async def send(self, message: Any) -> None:
        """Sends one message. A process that has ended is not an error: its answers end as well."""
        assert self._process.stdin
        with contextlib.suppress(ConnectionError):
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            await self._process.stdin.drain()

    async def answer(self) -> dict[str, Any] | None:
        """The next answer; None where the process has ended."""
        assert self._process.stdout
        line = await self._process.stdout.readline()
        return json.loads(line) if line.endswith(b"\n") else None

    async def answers(self) -> AsyncIterator[dict[str, Any]]:
        """The answers as they come, until the process ends."""
        while (answer := await self.answer()) is not None:
            yield answer

    async def last_words(self) -> str:
        """The last line that the process has said on stderr, once it has ended."""
        await self._process.wait()
        await self._listening
        return self._said.decode(errors="replace").strip().rpartition("\n")[2] or "it was ended"

    def stop(self) -> None:
        """Ends the process and all that it has started."""
        endings.kill_group(self._process.pid)

    async def close(self) -> None:
        """Ends the process, and waits until it has ended."""
        self.stop()
        assert self._process.stdout and self._process.stdin
        self._process.stdin.close()
        await self._process.stdout.read()
        await self.last_words()

    async def _listen(self) -> None:
        assert self._process.stderr
        while chunk := await self._process.stderr.read(4096):
            self._said = (self._said + chunk)[-MOST_KEPT:]


class Follower:
    """A process that answers the newest request, and is started anew should it end or take too long.

    take: is called with each answer. fail: is called with the version of a request that gets no answer, and the reason.
    """

    def __init__(
        self,
        kind: str,
        subject: bytes,
        take: Callable[[Mapping[str, Any]], None],
        fail: Callable[[int, str], None],
    ):
        self._kind, self._subject, self._take, self._fail = kind, subject, take, fail
        self._job: Job | None = None
        self._request: dict[str, Any] | None = None  # that waits for an answer
        self._asked_s = 0.0
        self._late = False
        self._asked = asyncio.Event()  # since the process has ended

    @property
    def busy(self) -> bool:
        """Whether a request waits for its answer."""
        return self._request is not None

    async def ask(self, request: dict[str, Any]) -> None:
        """Asks for an answer to a request, which has a version. Those before it need not be answered."""
        self._request, self._asked_s = request, time.monotonic()
        self._asked.set()
        if self._job:
            await self._job.send(request)

    async def run(self) -> None:
        """Answers requests until it is cancelled."""
        while True:
            self._job, self._late = await Job.start(self._kind, self._subject), False
            watching = asyncio.create_task(self._watch(self._job))
            if self._request:
                self._asked_s = time.monotonic()
                await self._job.send(self._request)
            try:
                async for answer in self._job.answers():
                    if self._request and answer["version"] == self._request["version"]:
                        self._request = None
                    self._take(answer)
                failed, words = self._request, await self._job.last_words()
            finally:
                watching.cancel()
                await asyncio.shield(self._job.close())
            self._job = None
            if failed and self._request is failed:
                self._request = None
                self._fail(failed["version"], f"it takes longer than {LONGEST_S:.0f} s" if self._late else words)
            if not self._request:  # what has failed is not tried again by itself
                self._asked.clear()
                await self._asked.wait()

    async def _watch(self, job: Job) -> None:
        """Ends the process where a request takes too long."""
        while True:
            await asyncio.sleep(LOOK_S)
            if self._request and time.monotonic() - self._asked_s > LONGEST_S:
                self._late = True
                job.stop()
                return
