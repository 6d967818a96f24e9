"""Compilations in processes that are forked from one that has imported jax, which takes longer than a small program.

`run` stands in for `subprocess.run` where `foresight/compile.py` starts its compiler. The fixture `another_process` has
the compiler that users have, and so has every process that tests start.
"""

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
from typing import Any

from gspmd_lm.foresight import compile

ROOT = Path(__file__).parent.parent


def run(command: Sequence[str], env: Mapping[str, str], **how: Any) -> subprocess.CompletedProcess[str]:
    """What became of `python -m gspmd_lm.foresight.compile FOLDER`."""
    with socket.socket(socket.AF_UNIX) as connection, tempfile.NamedTemporaryFile("r", errors="replace") as stderr:
        connection.connect(_server())
        asked = {"folder": command[-1], "env": dict(env), "cwd": os.getcwd(), "stderr": stderr.name}
        connection.sendall(json.dumps(asked).encode() + b"\n")
        answer = connection.makefile().readline()
        return subprocess.CompletedProcess(command, int(answer or -1), "", stderr.read())


@functools.cache
def _server() -> str:
    """The socket of a server that ends with this process, and so does what it has started."""
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
                    _answer(connection, path)


def _folders(environment: Mapping[str, str]) -> list[str]:
    return [folder for folder in environment.get("PYTHONPATH", "").split(os.pathsep) if folder]


def _answer(connection: socket.socket, path: Sequence[str]) -> None:
    """Compiles what is asked for, as a new process would, and ends this one."""
    asked, code = json.loads(connection.makefile().readline()), 1
    os.chdir(asked["cwd"])
    os.environ.clear()
    os.environ.update(asked["env"])
    sys.path[:] = [asked["cwd"], *_folders(os.environ), *path]
    for number, name in enumerate((os.devnull, os.devnull, asked["stderr"])):
        os.dup2(os.open(name, os.O_RDWR), number)
    try:
        code = compile._main(Path(asked["folder"]))
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    connection.sendall(f"{code}\n".encode())
    os._exit(code)


if __name__ == "__main__":
    from tests.forked import _serve as serve  # not __main__'s

    serve(sys.argv[1])
