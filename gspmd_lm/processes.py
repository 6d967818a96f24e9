"""The processes of one run: they compare what they were given, and none waits for one that is gone.

Each process holds a connection to the first one. The system closes it when a process dies, for whatever reason, but not
when it is only slow or stopped; a collective would be waited for until its own timeout, or for ever.
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
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from gspmd_lm.config import InputError

CONNECT_S = 20  # for connecting to the first process
LAST_S = 5  # that the first process stays when it failed, for the others to end
GRACE_S = 10  # for a process to end by its own error, once it has heard that another one failed
SILENT_HOST_S = 30  # until the connection to a host that vanished counts as closed
_POLL_MS = 1000

_calls = 0  # of compare, which every process makes in the same order
_watch: "_Watch | None" = None
_last_words: "subprocess.Popen[bytes] | None" = None


def several() -> bool:
    """Whether this process is one of several. Starts nothing, and imports nothing of jax that is not there yet."""
    return "jax" in sys.modules and jax.distributed.is_initialized() and jax.process_count() > 1


def compare(facts: Mapping[str, Any], say: Callable[[str], None] = lambda _: None) -> None:
    """Returns when every process has passed facts (plain values, in mappings) that are equal.

    `say` hears of the processes that are waited for. Raises InputError, on all of them, that lists every difference.
    """
    global _calls
    if not several():
        return
    _calls += 1
    name, client = f"gspmd_lm/facts/{_calls}", _client()
    mine = dict(_flat(facts))
    if jax.process_index():
        client.key_value_set(f"{name}/{jax.process_index()}", json.dumps(mine))
        found = json.loads(_value(f"{name}/differences", 0, say))
    else:
        found = []
        for other in range(1, jax.process_count()):
            theirs = json.loads(_value(f"{name}/{other}", other, say))
            found += [
                f"  {field}: {_shown(mine, field)} in process 0, {_shown(theirs, field)} in process {other}"
                for field in sorted(mine.keys() | theirs.keys())
                if _shown(mine, field) != _shown(theirs, field)
            ]
        client.key_value_set(f"{name}/differences", json.dumps(found))
    if found:
        raise InputError(
            "\n".join(["the processes of this run were not given the same", *found[:20]])
            + "\n  fix   start all of them with the same command, files and versions"
        )


def _value(key: str, process: int, say: Callable[[str], None]) -> str:
    """What another process said under `key`, once it has. Between polls, Ctrl-C is heard."""
    said = time.monotonic() + 30
    while True:
        try:
            return _client().blocking_key_value_get(key, _POLL_MS)
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
        if time.monotonic() > said:
            say(f"waiting for process {process}")
            said += 300


def _client() -> Any:
    from jax._src import distributed  # jax has no public name for its key-value store

    return distributed.global_state.client


def _flat(facts: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in facts.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _shown(facts: Mapping[str, Any], field: str) -> str:
    return json.dumps(facts[field]) if field in facts else "absent"


# Noticing that another process is gone


def watch(say: Callable[[str], None] = lambda _: None) -> None:
    """From here on this process ends, with exit code 1, when another one dies, and with its code when it fails.

    Where the first process cannot be reached at a port of its own, that is said, and jax's heartbeat is all there is.
    """
    global _watch
    if several() and _watch is None:
        try:
            _watch = _Watch()
        except OSError as error:
            say(f"warning: other processes are not watched ({error}): that one has died is noticed by its heartbeat")


def leave(code: int, message: str = "") -> None:
    """Tells the other processes, and whoever waits to have the last word, that this one ends by itself."""
    global _last_words
    if _watch:
        _watch.leave(code, message)
    if _last_words:
        assert _last_words.stdin
        with contextlib.suppress(OSError):
            _last_words.stdin.write(b"ended\n")
            _last_words.stdin.close()
        _last_words.wait()
        _last_words = None


class _Watch:
    """The first process listens, the others connect; a line is said on leaving, and passed on by the first process."""

    def __init__(self) -> None:
        self.leaving = False
        self.others: dict[int, socket.socket] = {}
        me = {"process": jax.process_index(), "host": socket.gethostname(), "pid": os.getpid()}
        if not jax.process_index():
            listener = socket.create_server(("", 0))
            secret = secrets.token_hex(16)
            _client().key_value_set("gspmd_lm/watch", json.dumps([listener.getsockname()[1], secret, me]))
            threading.Thread(target=self._accept, args=(listener, secret), daemon=True).start()
            return
        port, secret, first = json.loads(_value("gspmd_lm/watch", 0, lambda _: None))
        from jax._src import distributed

        host = str(distributed.global_state.coordinator_address).rpartition(":")[0].strip("[]")
        connection = socket.create_connection((host, port), timeout=CONNECT_S)
        connection.settimeout(None)
        _notice_a_vanished_host(connection)
        _send(connection, {"secret": secret, **me})
        self.others[0] = connection
        threading.Thread(target=self._listen, args=(connection, first), daemon=True).start()

    def leave(self, code: int, message: str) -> None:
        self.leaving = True
        for connection in [*self.others.values()]:
            _send(connection, {"code": code, "message": message, "process": jax.process_index()})
        # jax ends the others where the first process is gone: they may have something to say before.
        deadline = time.monotonic() + LAST_S
        while code and not jax.process_index() and self.others and time.monotonic() < deadline:
            time.sleep(0.1)

    def _accept(self, listener: socket.socket, secret: str) -> None:
        while len(self.others) < jax.process_count() - 1:
            connection, _ = listener.accept()
            _notice_a_vanished_host(connection)
            threading.Thread(target=self._greet, args=(connection, secret), daemon=True).start()

    def _greet(self, connection: socket.socket, secret: str) -> None:
        hello = _line(connection.makefile("r", encoding="utf-8"))
        if not hello or hello.get("secret") != secret:
            connection.close()  # somebody who looks for open ports
            return
        self.others[hello["process"]] = connection
        self._listen(connection, hello)

    def _listen(self, connection: socket.socket, other: Mapping[str, Any]) -> None:
        """Waits until another process says that it leaves, or is gone."""
        gone = f"process {other['process']} (pid {other['pid']} on {other['host']}) is gone without a word"
        said = _line(connection.makefile("r", encoding="utf-8"))
        if said is None:
            said = {"code": 1, "message": gone, "process": other["process"], "grace_s": 0}
        del self.others[other["process"]]
        if not said["code"]:
            return  # done; it waits for the others where jax ends
        for another in [*self.others.values()] if not jax.process_index() else ():
            _send(another, said)
        self._end(**{"grace_s": GRACE_S, **said})

    def _end(self, code: int, message: str, process: int, grace_s: float) -> None:
        """Ends this process because `process` ended, unless it ends by itself within `grace_s`."""
        deadline = time.monotonic() + grace_s
        while not self.leaving and time.monotonic() < deadline:
            time.sleep(0.1)
        if self.leaving:
            return
        sys.stdout.flush()
        what = message if not grace_s else f"process {process} ended with exit code {code}. {message}".rstrip()
        fix = "" if code == 2 else "\n  fix   start all processes again: they go on from the newest checkpoint"
        print(f"{what}{fix}", file=sys.stderr, flush=True)
        leave(code, message)
        os._exit(code)


def _line(lines: Any) -> dict[str, Any] | None:
    """The next line, None where the connection is closed or broken."""
    try:
        text = lines.readline()
        return json.loads(text) if text else None
    except (OSError, ValueError):
        return None


def _send(connection: socket.socket, said: Mapping[str, Any]) -> None:
    with contextlib.suppress(OSError):  # who is gone does not hear it
        connection.sendall((json.dumps(said) + "\n").encode())


def _notice_a_vanished_host(connection: socket.socket) -> None:
    """Has the system ask the other host, not its process, whether it is still there."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", (SILENT_HOST_S - 10) // 5)):
        if hasattr(socket, name):  # not everywhere
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def last_words(message: str) -> None:
    """Has `message` said last if this process ends without saying so itself: killed, out of memory, or aborted by XLA.

    A shell waits for the end of a pipe that only this process holds; nothing in a process that is killed can speak.
    """
    global _last_words
    script = 'trap "" INT TERM HUP; read -r word || printf "%s\\n" "$1" >&2'
    _last_words = subprocess.Popen(
        ["/bin/sh", "-c", script, "sh", message], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
    )
