"""A check that all processes of a run reach each other, made before `jax.distributed.initialize`.

jax ends a process that waits in vain with a stack trace of C++, and one whose port is taken with a segmentation fault.
So the processes first meet at the same port by themselves. They say who is missing, and what is wrong with the address.
"""

import contextlib
import errno
import json
import os
import secrets
import select
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from gspmd_lm.errors import WRONG_INPUT, InputError, RunFailed, exit_code
from gspmd_lm.files import json_value

WAIT_S = 300.0  # for all processes
WRONG_S = 5.0  # until an address that does not work counts as wrong
GONE_S = 15.0  # for a process that has come and is gone, and may be started again by itself
NEW_NAME_S = 60.0  # the same for the name of a pod, which Kubernetes makes known some time after the pod has started
FIRST_REPORT_S = 4.0  # until the first line about those who are missing
REPORT_S = 30.0  # between two such lines
_ANSWER_S = 3.0  # how long one connection may keep the others waiting
_PAUSE_S = 0.5
_HELLO = {"process": int, "processes": int}  # what a process says to process 0
_ANSWER = {"error": str | None}  # what it answers: None at once, and later a message, or '' when all are there

Say = Callable[[str], None]


def resolve_s() -> float:
    """How long the name of a host may be unknown, in seconds."""
    return NEW_NAME_S if "KUBERNETES_SERVICE_HOST" in os.environ else WRONG_S


def meet(address: str, count: int, number: int, say: Say) -> None:
    """Returns when all `count` processes of a run are there. number: of this process; 0 listens at `address`.

    Raises InputError if the host is not known or is another machine than that of process 0, if the port is taken, or if
    two processes say that they are the same; RunFailed if one does not come within WAIT_S, if one ends before all have
    come, if another program answers at the address, or if names cannot be looked up now.
    """
    host, _, text = address.rpartition(":")
    host, port = host.strip("[]"), int(text)
    if not 0 < port < 2**16:
        raise InputError(f"coordinator {address}: {port} is no port\n  fix   one from 1 to 65535")
    _resolve(host, port, address, say)
    if number:
        _join(host, port, address, count, number, say)
    else:
        _gather(host, port, address, count, say)


def _resolve(host: str, port: int, address: str, say: Say) -> None:
    limit_s = resolve_s()
    until, said = time.monotonic() + limit_s, False
    while True:
        try:
            socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            return
        except (OSError, UnicodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            if time.monotonic() > until:
                if isinstance(error, socket.gaierror) and error.errno == socket.EAI_AGAIN:
                    raise RunFailed(
                        f"coordinator {address}: the name {host} cannot be looked up now ({reason})\n"
                        "  fix   see that this host reaches its name server, or give the number of that host"
                    ) from error
                raise InputError(
                    f"coordinator {address}: the host {host} is not known here ({reason})\n"
                    "  fix   give the name or the number of the host of process 0, as this host knows it"
                ) from error
            if not said:
                say(f"waiting up to {limit_s:.0f} s until the host {host} is known ({reason})")
                said = True
            time.sleep(_PAUSE_S)


def _listener(port: int, address: str) -> socket.socket:
    """A socket that listens where jax will. A run that is just ending may keep the port for a moment."""
    both, until = socket.has_dualstack_ipv6(), time.monotonic() + WRONG_S
    family = socket.AF_INET6 if both else socket.AF_INET
    while True:
        try:
            return socket.create_server(("", port), family=family, dualstack_ipv6=both, backlog=4096)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() > until:
                raise InputError(
                    f"coordinator {address}: process 0 cannot listen at port {port} here "
                    f"({os.strerror(error.errno or 0)})\n"
                    "  fix   give all processes another port that is free there, with --coordinator, or with "
                    "JAX_COORDINATOR_PORT where a launcher names the host"
                ) from error
        time.sleep(_PAUSE_S)


def _is_here(host: str, port: int) -> bool:
    """Whether an address that the name of a host stands for is one of this machine."""
    for family, kind, protocol, _, place in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.bind((place[0], 0, *place[2:]))
            return True
    return False


def _gather(host: str, port: int, address: str, count: int, say: Say) -> None:
    """Process 0: returns when all others have come, and has told them so."""
    there: dict[int, socket.socket] = {}
    gone: dict[int, float] = {}  # process that has come and is gone -> since when
    told: list[socket.socket] = []  # of all that ever came
    began = time.monotonic()
    until, report_at = began + WAIT_S, began + FIRST_REPORT_S
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(_listener(port, address))
        listener.settimeout(_PAUSE_S)
        # A call to itself shows whether an address that this machine does not have is translated to one that it has.
        mark, is_right = secrets.token_hex(8), _is_here(host, port)
        if not is_right:
            with contextlib.suppress(OSError):
                call = stack.enter_context(socket.create_connection((host, port), timeout=_ANSWER_S))
                send(call, {"process": 0, "processes": count, "mark": mark})
        try:
            while missing := [number for number in range(1, count) if not _is_open(there.get(number))]:
                now = time.monotonic()
                gone = {number: gone.get(number, now) for number in missing if number in there}
                if lost := [number for number, since in gone.items() if now > since + GONE_S]:
                    raise RunFailed(
                        f"{_name_processes(lost)} ended before all {count} had come\n  fix   start all of them again"
                    )
                if now > until:
                    raise RunFailed(
                        f"process 0 waited {WAIT_S:.0f} s at {address} for {_name_processes(missing)}, in vain\n"
                        f"  fix   start all {count} processes with the same command, and see that their hosts reach "
                        f"port {port} of this one (firewall)"
                    )
                if not is_right and now > began + WRONG_S:
                    raise InputError(
                        f"coordinator {address}: {host} is another machine than {socket.gethostname()}, where "
                        "process 0 runs\n"
                        "  fix   start the process with --process_id=0 there, or give an address of this machine"
                    )
                if now > report_at:
                    say(f"waiting for {_name_processes(missing)} at {address}")
                    report_at += REPORT_S
                with contextlib.suppress(TimeoutError):
                    connection = stack.enter_context(listener.accept()[0])
                    connection.settimeout(_ANSWER_S)
                    if (hello := read_line(connection.makefile("r", encoding="utf-8"), _HELLO)) is None:
                        continue
                    is_right = True
                    if hello.get("mark") == mark:
                        continue
                    number, before = hello["process"], there.get(hello["process"])
                    there[number] = connection
                    gone.pop(number, None)
                    told.append(connection)
                    send(connection, {"error": None})
                    _check(number, hello["processes"], count, number == 0 or _is_open(before))
        except (InputError, RunFailed) as error:
            for connection in told:
                send(connection, {"error": str(error), "code": exit_code(error)})
            raise
        for connection in there.values():
            send(connection, {"error": ""})


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
    began = time.monotonic()
    until = began + WAIT_S + 2 * _ANSWER_S  # process 0, which knows who is missing, ends first
    report_at, failure, strange_since, gone_since = began + FIRST_REPORT_S, "no answer", None, None

    def report() -> None:
        nonlocal report_at
        if time.monotonic() > report_at:
            say(f"waiting for process 0 at {address} ({failure})")
            report_at += REPORT_S

    while (now := time.monotonic()) < until:
        strange = False
        try:
            with (
                socket.create_connection((host, port), timeout=_ANSWER_S) as connection,
                connection.makefile("r", encoding="utf-8") as lines,
            ):
                send(connection, {"process": number, "processes": count})
                # Who hangs up here may be taken to have come: process 0 may just be busy with a stranger.
                while not select.select([connection], [], [], _ANSWER_S)[0] and time.monotonic() < until:
                    failure = "timed out"
                    report()
                if read_line(lines, _ANSWER) is None:
                    failure, strange = "another program answers there", True
                else:
                    connection.settimeout(max(_PAUSE_S, until - now))
                    if (answer := read_line(lines, _ANSWER)) is not None:
                        if answer["error"]:
                            raise (InputError if answer["code"] == WRONG_INPUT else RunFailed)(answer["error"])
                        return
                    failure, gone_since = "the connection was closed", time.monotonic()
        except OSError as error:
            failure = error.strerror or str(error)
        strange_since = (strange_since or now) if strange else None
        if strange_since and time.monotonic() > strange_since + WRONG_S:
            raise RunFailed(
                f"coordinator {address}: another program than process 0 of this run answers there\n"
                "  fix   give the address at which process 0 listens; if this process alone was started again, "
                "start all processes again"
            )
        if gone_since and now > gone_since + GONE_S:
            raise RunFailed(f"process 0 ended before all {count} had come\n  fix   start all of them again")
        report()
        time.sleep(_PAUSE_S)
    raise RunFailed(
        f"process {number} waited {WAIT_S:.0f} s for process 0 at {address}, in vain ({failure})\n"
        f"  fix   start process 0 on that host, and see that this one reaches its port {port} (firewall)"
    )


def _name_processes(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:20])) + ", ..." * (len(numbers) > 20)
    return f"process{'es' * (len(numbers) > 1)} {shown}"


def read_line(lines: TextIO, wanted: Mapping[str, Any], most: int = 4096) -> dict[str, Any] | None:
    """The next line of another process. None if the connection is closed, or if a stranger has sent the line.

    Strangers are programs that scan for open ports, say. wanted: the names of the line's values, with their types.
    most: characters of a line; -1 for any number. Raises TimeoutError if no line comes.
    """
    try:
        found = json_value(lines.readline(most), "the line of a process")
    except TimeoutError:
        raise
    except (OSError, ValueError):
        return None
    is_ours = isinstance(found, dict) and all(isinstance(found.get(name, lines), wanted[name]) for name in wanted)
    return found if is_ours else None


def send(connection: socket.socket, line: Mapping[str, Any]) -> None:
    """Sends a line for `read_line`, unless the other process is gone."""
    with contextlib.suppress(OSError):
        connection.sendall((json.dumps(line) + "\n").encode())
