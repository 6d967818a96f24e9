"""Processes that are forked from one that has imported jax: to import it takes longer than what most of them do.

`run` stands in for `subprocess.run` where `foresight/compile.py` starts a compiler, and `start` for
`asyncio.create_subprocess_exec` where `explore/jobs.py` starts a worker. The fixture `another_process` has the compiler
that users have, and so has every process that is no fork.
"""

import asyncio
import contextlib
import functools
import gc
import json
import os
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gspmd_lm.explore import worker
from gspmd_lm.foresight import compile

ROOT = Path(__file__).parent.parent


def run(command: Sequence[str], env: Mapping[str, str], **how: Any) -> subprocess.CompletedProcess[str]:
    """What became of `python -m gspmd_lm.foresight.compile FOLDER`."""
    with open(os.devnull, "r+b") as nothing, tempfile.TemporaryFile() as errors:
        files = [nothing.fileno(), nothing.fileno(), errors.fileno()]
        with _fork("compile", command[-1], env, files) as (_, connection):
            code = connection.makefile().readline()
        errors.seek(0)
        return subprocess.CompletedProcess(command, int(code or -1), "", errors.read().decode(errors="replace"))


class Started(NamedTuple):
    """What `explore/jobs.py` uses of an asyncio.subprocess.Process."""

    pid: int
    stdin: asyncio.StreamWriter
    stdout: asyncio.StreamReader
    stderr: asyncio.StreamReader
    writers: Sequence[asyncio.StreamWriter]
    ended: asyncio.StreamReader

    async def wait(self) -> None:
        await self.ended.read()
        for writer in self.writers:
            writer.close()


async def start(*command: str, env: Mapping[str, str], limit: int, **how: Any) -> Started:
    """The process of `python -m gspmd_lm.explore.worker KIND`. It leads a group of its own."""
    pairs = [socket.socketpair() for _ in range(3)]  # one for stdin alone: of what nobody reads, it makes an error
    pid, connection = _fork("work", command[-1], env, [theirs.fileno() for _, theirs in pairs])
    for _, theirs in pairs:
        theirs.close()
    ours = [*(our for our, _ in pairs), connection]
    readers, writers = zip(*[await asyncio.open_connection(sock=one, limit=limit) for one in ours], strict=True)
    return Started(pid, writers[0], readers[1], readers[2], writers, readers[3])


class _Forked(NamedTuple):
    pid: int
    connection: socket.socket  # on which a compiler sends its exit code, and which ends with the process

    def __enter__(self):
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.close()


def _fork(kind: str, argument: str, env: Mapping[str, str], files: Sequence[int]) -> _Forked:
    """A new process that does one thing. files: its stdin, stdout and stderr."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(_server())
    asked = {"kind": kind, "argument": argument, "env": dict(env), "cwd": os.getcwd()}
    socket.send_fds(connection, [b"files"], files)
    connection.sendall(json.dumps(asked).encode() + b"\n")
    return _Forked(int(connection.recv(20)), connection)


@functools.cache
def _server() -> str:
    """The socket of a server that ends with this process."""
    address = str(Path(tempfile.mkdtemp()) / "socket")
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.forked", address],
        cwd=ROOT,
        env=compile._environment(()),
        stdin=subprocess.PIPE,  # which is closed when this process ends
        stdout=subprocess.PIPE,
    )
    assert server.stdout and server.stdout.readline() == b"ready\n"
    _servers.append(server)
    return address


_servers: list[subprocess.Popen[bytes]] = []  # whose stdin is open as long as they are held


def _serve(address: str) -> None:
    import gspmd_lm.explore.figures
    import gspmd_lm.foresight.any_step
    import gspmd_lm.foresight.target_answers
    import gspmd_lm.infer.programs
    import gspmd_lm.train.step  # noqa: F401

    path = [folder for folder in sys.path if folder not in ("", str(ROOT), *_folders(os.environ))]
    gc.collect()
    gc.freeze()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        print("ready", flush=True)
        while True:
            ready, _, _ = select.select([listener, sys.stdin], [], [])
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            if sys.stdin in ready:
                shutil.rmtree(Path(address).parent)
                return
            connection, _ = listener.accept()
            with connection:
                if not os.fork():
                    listener.close()
                    _do(connection, path)


def _folders(environment: Mapping[str, str]) -> list[str]:
    return [folder for folder in environment.get("PYTHONPATH", "").split(os.pathsep) if folder]


def _do(connection: socket.socket, path: Sequence[str]) -> None:
    """Does what is asked for, as a new process would, and ends this one."""
    import jax

    _, files, _, _ = socket.recv_fds(connection, len(b"files"), 3)
    asked, code = json.loads(connection.makefile().readline()), 1
    os.setsid()
    os.chdir(asked["cwd"])
    os.environ.clear()
    os.environ.update(asked["env"])
    jax.config.update("jax_enable_compilation_cache", os.environ.get("JAX_ENABLE_COMPILATION_CACHE") != "false")
    sys.path[:] = [asked["cwd"], *_folders(os.environ), *path]
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    connection.sendall(f"{os.getpid()}\n".encode())
    try:
        code = compile._main(Path(asked["argument"])) if asked["kind"] == "compile" else worker.main(asked["argument"])
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    with contextlib.suppress(OSError):
        connection.sendall(f"{code}\n".encode())
    os._exit(code or 0)


if __name__ == "__main__":
    from tests.forked import _serve as serve  # not __main__'s

    serve(sys.argv[1])
