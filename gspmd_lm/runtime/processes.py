"""The processes of one run: they compare their inputs, and none of them waits for one that is gone.

Each process holds a connection to the first one. The system closes it when a process dies for any reason, but not when
the process is only slow or stopped. Without this, the others would wait in a collective until its timeout, or for ever.
"""

import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from gspmd_lm.errors import FAILED, STOPPED, InputError
from gspmd_lm.runtime import endings
from gspmd_lm.runtime.rendezvous import Say, read_line, send

CONNECT_S = 20  # to connect to the first process
LAST_S = 3  # how long the first process stays after it failed, so that the others can end
CAUSE_S = 2  # after a failure here, how long the end of another process may take to be noticed
GRACE_S = 10  # how long a process has to end by its own error after it heard that another one failed
HEARTBEAT_S = 3600  # until jax gives up a process, even one that is only stopped
SILENT_HOST_S = 30  # until the connection to a host that vanished counts as closed
POLL_MS = 1000
_HELLO = {"secret": str, "process": int, "host": str, "pid": int}  # what a process says when it connects
_NOTICE = {"code": int, "message": str, "process": int}  # what it says when it leaves

# Files with a line "oom_kill N": the processes that Linux has killed for want of memory, here or in this container.
OUT_OF_MEMORY_COUNTERS = "/proc/vmstat", "/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control"
_LAST_WORDS = """
trap "" INT TERM HUP
killed() { grep -hs "^oom_kill " $counters; }
before=$(killed)
read -r word && exit
if [ "$(killed)" = "$before" ]; then what=$ended fix=$again; else what=$full fix=$smaller; fi
if ls "$checkpoints" 2>/dev/null | grep -qx "[0-9]*"; then outcome=$saved; else outcome=$anew; fi
printf "%s\\n  fix   %s: %s\\n" "$what" "$fix" "$outcome" >&2
"""

_calls = 0  # keys that were asked for, which every process does in the same order
_watch: "_Watch | None" = None


def several() -> bool:
    """Whether this process is one of several. Starts nothing, and imports no further part of jax."""
    return "jax" in sys.modules and jax.distributed.is_initialized() and jax.process_count() > 1


def count() -> int:
    """How many processes the run has, once they are joined. Starts nothing, and imports no further part of jax."""
    if "jax" not in sys.modules or not jax.distributed.is_initialized():
        return 1
    from jax._src import distributed  # jax.process_count starts its devices

    return int(distributed.global_state.num_processes or 1)


def from_first(value: Any, say: Say = lambda _: None) -> Any:
    """The JSON value that the first process passed, on every process. The values of the others are ignored.

    It waits without a limit, where a collective on the CPU would give up after 30 seconds. `say` is told so.
    """
    if not several():
        return value
    key = next_key("first")
    if jax.process_index():
        return json.loads(_value(key, 0, say))
    client().key_value_set(key, json.dumps(value))
    return value


def gather(value: Any, say: Say = lambda _: None) -> list[Any]:
    """The JSON values that all processes passed, on the first process; [] on the others, which do not wait.

    `say` is told for which process the first one waits.
    """
    if not several():
        return [value]
    name = next_key("gathered")
    if jax.process_index():
        client().key_value_set(f"{name}/{jax.process_index()}", json.dumps(value))
        return []
    return [value, *(json.loads(_value(f"{name}/{other}", other, say)) for other in range(1, jax.process_count()))]


def compare(facts: Mapping[str, Any], say: Say = lambda _: None) -> None:
    """Returns when all processes have passed equal facts (mappings of plain values, which may be empty).

    `say` is told for which processes this one waits. Raises an InputError on all of them that lists every difference.
    """
    mine = dict(_flat(facts))
    differences = [
        f"  {field}: {_show_facts(mine, field)} in process 0, {_show_facts(theirs, field)} in process {other}"
        for other, theirs in enumerate(gather(mine, say))
        for field in sorted(mine.keys() | theirs.keys())
        if _show_facts(mine, field) != _show_facts(theirs, field)
    ]
    if differences := from_first(differences, say):
        raise InputError(
            "\n".join(["the processes of this run were given different inputs", *differences[:20]])
            + "\n  fix   start all of them with the same command, files and versions"
        )


def next_key(what: str) -> str:
    """A key that was not used yet. Every process asks for keys in the same order."""
    global _calls
    _calls += 1
    return f"gspmd_lm/{what}/{_calls}"


def _value(key: str, process: int, say: Say = lambda _: None) -> str:
    """The value that another process stores under `key`, as soon as it is there. Ctrl-C ends the waiting."""
    next_report_s = time.monotonic() + 30
    while (value := read_stored(key)) is None:
        if time.monotonic() > next_report_s:
            say(f"waiting for process {process}")
            next_report_s += 300
    return value


def read_stored(key: str, wait_ms: int = POLL_MS) -> str | None:
    """The value that is stored under `key` within `wait_ms`; None if there is none."""
    try:
        return client().blocking_key_value_get(key, wait_ms)
    except jax.errors.JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" not in str(error):
            raise
        return None


def client() -> Any:
    """The key-value store that all processes share. A key is set once."""
    from jax._src import distributed  # jax has no public name for its key-value store

    return distributed.global_state.client


def _flat(facts: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in facts.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _show_facts(facts: Mapping[str, Any], field: str) -> str:
    return json.dumps(facts[field]) if field in facts else "absent"


# How the end of another process is noticed


def watch(say: Say = lambda _: None) -> None:
    """Watches the other processes: if one dies, this one ends with FAILED, and if one fails, with that one's code.

    The others hear it when this one ends.

    If the first process cannot be reached at a port of its own, `say` is told so. A death is then noticed by jax's
    heartbeat, after HEARTBEAT_S.
    """
    global _watch
    if several() and _watch is None:
        try:
            _watch = _Watch()
            endings.add_last_act(_watch.leave)
        except OSError as error:
            say(
                f"warning: other processes are not watched ({error}): it takes jax up to {HEARTBEAT_S // 60} minutes "
                "to notice that one has died"
            )


class _Watch:
    """Connections between the first process and the others. A process that leaves sends a line to all the others."""

    def __init__(self) -> None:
        self.index, self.count = jax.process_index(), jax.process_count()  # at its end, jax no longer knows them
        self.leaving = False
        self.cause: dict[str, Any] | None = None  # the line of a process that failed, or a line about one that is gone
        self.connections: dict[int, socket.socket] = {}
        self.present: set[int] = set()  # the processes that are connected and have not ended
        me = {"process": self.index, "host": socket.gethostname(), "pid": os.getpid()}
        if self.index == 0:
            try:
                listener = socket.create_server(("", 0))
            except OSError:
                client().key_value_set("gspmd_lm/watch", "null")
                raise
            secret = secrets.token_hex(16)
            client().key_value_set("gspmd_lm/watch", json.dumps([listener.getsockname()[1], secret, me]))
            threading.Thread(target=self._accept, args=(listener, secret), daemon=True).start()
            return
        listening = json.loads(_value("gspmd_lm/watch", 0))
        if listening is None:
            raise OSError("process 0 cannot listen at a port")
        port, secret, first = listening
        from jax._src import distributed

        host = str(distributed.global_state.coordinator_address).rpartition(":")[0].strip("[]")
        connection = socket.create_connection((host, port), timeout=CONNECT_S)
        connection.settimeout(None)
        send(connection, {"secret": secret, **me})
        self._begin(connection, connection.makefile("r", encoding="utf-8"), first)

    def leave(self, code: int, message: str) -> None:
        """Tells the other processes that this one ends by itself."""
        self.leaving = True
        notice: dict[str, Any] = {"code": code, "message": message, "process": self.index}
        if code == STOPPED:  # it did not fail, so that the others have no errors of their own to wait for
            notice |= {"message": f"process {self.index} was stopped", "grace_s": 0}
        for connection in list(self.connections.values()):
            send(connection, notice)
        # When the first process is gone, jax ends the others, which may still have something to say.
        deadline = time.monotonic() + LAST_S
        while code and self.index == 0 and self.present and time.monotonic() < deadline:
            time.sleep(0.1)

    def _accept(self, listener: socket.socket, secret: str) -> None:
        with listener:
            while len(self.connections) < self.count - 1:
                connection, _ = listener.accept()
                threading.Thread(target=self._greet, args=(connection, secret), daemon=True).start()

    def _greet(self, connection: socket.socket, secret: str) -> None:
        lines = connection.makefile("r", encoding="utf-8")
        hello = read_line(lines, _HELLO)
        if hello and hello["secret"] == secret:
            self._begin(connection, lines, hello)
        else:
            connection.close()  # a stranger who scans for open ports

    def _begin(self, connection: socket.socket, lines: Any, other: Mapping[str, Any]) -> None:
        _notice_a_vanished_host(connection)
        self.connections[other["process"]] = connection
        self.present.add(other["process"])
        threading.Thread(target=self._listen, args=(lines, other), daemon=True).start()

    def _listen(self, lines: Any, other: Mapping[str, Any]) -> None:
        """Returns when another process has said that it leaves, or is gone; ends this one if the other one failed."""
        notice = read_line(lines, _NOTICE, most=-1)
        self.present.discard(other["process"])
        if notice is None:
            gone = f"process {other['process']} (pid {other['pid']} on {other['host']}) is gone without a word"
            notice = {"code": FAILED, "message": gone, "process": other["process"], "grace_s": 0}
        if not notice["code"] or self.leaving:
            return  # it has finished, and waits for the others when jax ends
        self.cause = notice
        for process, connection in list(self.connections.items()):  # others may connect meanwhile
            if self.index == 0 and process != other["process"]:
                send(connection, notice)
        deadline = time.monotonic() + notice.get("grace_s", GRACE_S)
        while not self.leaving and time.monotonic() < deadline:
            time.sleep(0.1)
        if not self.leaving:
            self.leaving = True
            endings.end(notice["code"], failure_message(notice))


def cause() -> str:
    """The message about another process that failed or is gone; '' if none is known.

    Waits a moment, because a failure that follows from a lost process may be noticed before the loss is.
    """
    deadline = time.monotonic() + CAUSE_S
    while _watch and not _watch.cause and time.monotonic() < deadline:
        time.sleep(0.05)
    return failure_message(_watch.cause) if _watch and _watch.cause else ""


def failure_message(notice: Mapping[str, Any]) -> str:
    """The message about the end of another process."""
    if "grace_s" in notice:
        what = notice["message"]
    else:
        what = f"process {notice['process']} ended with exit code {notice['code']}. {notice['message']}".rstrip()
    return what if "\n  fix   " in what else f"{what}\n  fix   start all processes again; they resume by themselves"


def _notice_a_vanished_host(connection: socket.socket) -> None:
    """Lets the system ask the other host, rather than its process, whether it is still there."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", (SILENT_HOST_S - 10) // 5)):
        if hasattr(socket, name):  # some systems lack these options
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def last_words(workdir: str, checkpoints: str) -> None:
    """Lets it be said how to go on if this process ends without a word: killed, out of memory, or aborted by XLA.

    A process that is killed cannot print. So a shell waits for the end of a pipe that only this process holds. It looks
    whether the system counts one more process that it killed for want of memory, and whether anything was saved.
    """
    anew = "nothing was saved, so it begins anew"
    if "://" in workdir:  # a shell cannot look there
        anew = f"it goes on from the newest checkpoint in {workdir}, if there is one"
    texts = {
        "ended": "this process was ended from outside, or by a fault in a library; its last lines are above",
        "full": "out of memory: the system ended this process, which is exit code 137",
        "again": "give the same command again",
        "smaller": "a smaller data.batch, remat: block, a smaller model or more memory; then the same command",
        "saved": f"it goes on from the newest checkpoint in {workdir}",
        "anew": anew,
        "checkpoints": checkpoints,
        "counters": " ".join(OUT_OF_MEMORY_COUNTERS),
    }
    shell = subprocess.Popen(
        ["/bin/sh", "-c", _LAST_WORDS], env=os.environ | texts, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
    )

    def tell_shell(code: int, message: str) -> None:
        with contextlib.suppress(OSError):
            shell.communicate(b"ended\n")

    endings.add_last_act(tell_shell)
