"""Processes that compute for a workbench, so that its page never waits: they have jax, and the server has not.

A job is sent lines of JSON and answers with lines of JSON. Whatever it prints besides goes to stderr.
"""

import asyncio
import base64
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

MOST_LINE = 2**27  # bytes of an answer
MOST_KEPT = 4_000  # bytes of what a process says last, should it end


class Job:
    """One process that computes. It leads a group of its own, so that what it has started ends with it."""

    def __init__(self, process: asyncio.subprocess.Process):
        self._process = process
        self._said = b""
        self._listening = asyncio.create_task(self._listen())

    @classmethod
    async def start(cls, kind: str, subject: bytes) -> "Job":
        """The process of a kind of job: layouts, search or compile. subject: the pickled `Subject`."""
        folders = [str(Path(__file__).parents[2]), *sys.path]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(dict.fromkeys(filter(None, folders))),
            "JAX_PLATFORMS": "cpu",
            "TPU_SKIP_MDS_QUERY": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "gspmd_lm.explore.worker", kind),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=environment,
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

    async def answers(self) -> AsyncIterator[dict[str, Any]]:
        """The answers as they come, until the process ends."""
        assert self._process.stdout
        while line := await self._process.stdout.readline():
            yield json.loads(line)

    async def last_words(self) -> str:
        """The end of what the process has said on stderr, once it has ended."""
        await self._process.wait()
        await self._listening
        return self._said.decode(errors="replace").strip()

    def stop(self) -> None:
        """Ends the process and all that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def _listen(self) -> None:
        assert self._process.stderr
        while chunk := await self._process.stderr.read(4096):
            self._said = (self._said + chunk)[-MOST_KEPT:]
