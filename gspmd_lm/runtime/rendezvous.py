"""The meeting of the processes that three flags name, before jax is asked to join them.

jax ends a process that waits in vain with a stack trace of C++, and one whose port is taken with a segmentation fault.
So the processes first meet at the same port by themselves, and say who is missing.
"""

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable
from typing import Any

from gspmd_lm.errors import InputError, RunFailed
from gspmd_lm.files import json_value

WAIT_S = 300.0  # for all processes
RESOLVE_S = 60.0  # until the name of a host that was just started is known
REPORT_S = 30.0  # between two lines about those who are missing
_ANSWER_S = 5.0  # how long one connection may keep the others waiting
_PAUSE_S = 0.5

Say = Callable[[str], None]


def meet(address: str, count: int, number: int, say: Say) -> None:
    """Returns when all `count` processes of a run are there. number: of this process; 0 listens at `address`.

    Raises InputError if the host is not known, if the port is taken, or if two processes say that they are the same;
    RunFailed if one does not come within WAIT_S.
    """
    host, _, text = address.rpartition(":")
    port = int(text)
    if not 0 < port < 2**16:
        raise InputError(f"--coordinator={address}: {port} is no port\n  fix   one from 1 to 65535")
    _resolve(host.strip("[]"), port, address, say)
    if count == 1:
        _listener(port, address).close()
    elif number:
        _join(host.strip("[]"), port, address, count, number, say)
    else:
        _gather(port, address, count, say)


def _resolve(host: str, port: int, address: str, say: Say) -> None:
    until, said = time.monotonic() + RESOLVE_S, False
    while True:
        try:
            socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            return
        except (OSError, UnicodeError) as error:
            if time.monotonic() > until:
                raise InputError(
                    f"--coordinator={address}: the host {host} is not known here ({error})\n"
                    "  fix   give the name or the number of the host of process 0, as this host knows it"
                ) from error
            if not said:
                say(f"waiting until the host {host} is known")
                said = True
            time.sleep(_PAUSE_S)


def _listener(port: int, address: str) -> socket.socket:
    """A socket that listens where jax will."""
    both = socket.has_dualstack_ipv6()
    try:
        return socket.create_server(
            ("", port), family=socket.AF_INET6 if both else socket.AF_INET, dualstack_ipv6=both, backlog=4096
        )
    except OSError as error:
        raise InputError(
            f"--coordinator={address}: process 0 cannot listen at port {port} here "
            f"({os.strerror(error.errno or 0)})\n"
            "  fix   give all processes another port, which is free on the host of process 0"
        ) from error


def _gather(port: int, address: str, count: int, say: Say) -> None:
    """Process 0: returns when all others have come, and has told them so."""
    there: dict[int, socket.socket] = {}
    told: list[socket.socket] = []  # of all that ever came
    until = time.monotonic() + WAIT_S
    report_at = time.monotonic() + REPORT_S
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(_listener(port, address))
        listener.settimeout(_PAUSE_S)
        try:
            while missing := [number for number in range(1, count) if not _is_open(there.get(number))]:
                if time.monotonic() > until:
                    raise RunFailed(
                        f"process 0 waited {WAIT_S:.0f} s at {address} for {_name_processes(missing)}, in vain\n"
                        f"  fix   start all {count} processes with the same command, and see that their hosts reach "
                        f"port {port} of this one (firewall)"
                    )
                if time.monotonic() > report_at:
                    say(f"waiting for {_name_processes(missing)} at {address}")
                    report_at += REPORT_S
                with contextlib.suppress(TimeoutError):
                    connection = stack.enter_context(listener.accept()[0])
                    connection.settimeout(_ANSWER_S)
                    if (hello := _line(connection)) is not None:
                        number, before = hello["process"], there.get(hello["process"])
                        there[number] = connection
                        told.append(connection)
                        _check(number, hello["processes"], count, _is_open(before))
        except (InputError, RunFailed) as error:
            for connection in told:
                _send(connection, {"error": str(error), "code": isinstance(error, RunFailed)})
            raise
        for connection in there.values():
            _send(connection, {"error": ""})


def _check(number: int, theirs: int, count: int, is_there: bool) -> None:
    """Raises InputError about what a process was told. theirs: its count. is_there: whether another has its number."""
    wrong = ""
    if theirs != count:
        wrong = f"process {number} was told --num_processes={theirs}, and process 0 --num_processes={count}"
    elif is_there:
        wrong = f"two processes were told --process_id={number}"
    if wrong:
        raise InputError(f"{wrong}\n  fix   give each of the {count} processes a number of its own, from 0 on")


def _is_open(connection: socket.socket | None) -> bool:
    """Whether the process at the other end still waits."""
    if connection is None:
        return False
    connection.settimeout(0)
    try:
        return connection.recv(1, socket.MSG_PEEK) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False


def _join(host: str, port: int, address: str, count: int, number: int, say: Say) -> None:
    """Another process: returns when process 0 says that all are there."""
    until = time.monotonic() + WAIT_S + 2 * _ANSWER_S  # process 0, which knows who is missing, ends first
    report_at, failure = time.monotonic() + REPORT_S, "no answer"
    while time.monotonic() < until:
        try:
            with socket.create_connection((host, port), timeout=_ANSWER_S) as connection:
                _send(connection, {"process": number, "processes": count})
                connection.settimeout(max(_PAUSE_S, until - time.monotonic()))
                if (answer := _line(connection)) is not None:
                    if answer["error"]:
                        raise (RunFailed if answer["code"] else InputError)(answer["error"])
                    return
                failure = "the connection was closed"
        except OSError as error:
            failure = error.strerror or str(error)
        if time.monotonic() > report_at:
            say(f"waiting for process 0 at {address} ({failure})")
            report_at += REPORT_S
        time.sleep(_PAUSE_S)
    raise RunFailed(
        f"process {number} waited {WAIT_S:.0f} s for process 0 at {address}, in vain ({failure})\n"
        f"  fix   start process 0 on that host, and see that this one reaches its port {port} (firewall)"
    )


def _name_processes(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:20])) + ", ..." * (len(numbers) > 20)
    return f"process{'es' * (len(numbers) > 1)} {shown}"


def _line(connection: socket.socket) -> dict[str, Any] | None:
    """The line of another process; None if there is none, or if it is a stranger's, who scans for open ports."""
    try:
        with connection.makefile("r", encoding="utf-8") as lines:
            found = json_value(lines.readline(4096), "the line of a process")
    except (OSError, ValueError):
        return None
    is_ours = isinstance(found, dict) and (
        isinstance(found.get("error"), str) or all(type(found.get(name)) is int for name in ("process", "processes"))
    )
    return found if is_ours else None


def _send(connection: socket.socket, line: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # the other process may be gone
        connection.sendall((json.dumps(line) + "\n").encode())
