"""The meeting of the processes of a run: who is missing, addresses that are wrong, taken ports, strangers."""

import contextlib
import socket
import threading
import time

import pytest

from gspmd_lm.errors import InputError, RunFailed
from gspmd_lm.launch.local import free_port
from gspmd_lm.runtime import rendezvous

ALLOWED_S = {name: value for name, value in vars(rendezvous).items() if name.endswith("_S")}


@pytest.fixture(autouse=True)
def hurried(monkeypatch):
    for name, seconds in (
        ("WAIT_S", 1.0),
        ("WRONG_S", 0.6),
        ("NEW_NAME_S", 0.6),
        ("GONE_S", 0.6),
        ("FIRST_REPORT_S", 0.3),
        ("REPORT_S", 0.5),
        ("_ANSWER_S", 0.3),
        ("_PAUSE_S", 0.05),
    ):
        monkeypatch.setattr(rendezvous, name, seconds)


def met(port, *processes, host="127.0.0.1"):
    """What became of each process, which are pairs of a number and the count that it was told: '' or its error."""
    ends = {}

    def run(at, number, told):
        try:
            rendezvous.meet(f"{host}:{port}", told, number, lambda line: said.append(line))
            ends[at] = ""
        except (InputError, RunFailed) as error:
            ends[at] = f"{type(error).__name__} {error}"

    said = []
    threads = [threading.Thread(target=run, args=(at, *one)) for at, one in enumerate(processes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [ends[at] for at in range(len(processes))], said


def test_all_come_and_the_port_is_free_again():
    port = free_port()
    for _ in range(2):
        assert met(port, (2, 3), (0, 3), (1, 3))[0] == ["", "", ""]
    socket.create_server(("", port)).close()
    rendezvous.meet(f"localhost:{port}", 1, 0, print)


@pytest.mark.long
def test_one_line_says_who_is_missing():
    port = free_port()
    (first, second), said = met(port, (0, 4), (2, 4))
    missing = f"RunFailed process 0 waited 1 s at 127.0.0.1:{port} for processes 1, 3, in vain\n  fix   start all 4"
    assert first.startswith(missing) and second == first
    assert f"waiting for processes 1, 3 at 127.0.0.1:{port}" in said
    ((alone,), said) = met(port, (1, 2))
    assert alone.startswith(
        f"RunFailed process 1 waited 1 s for process 0 at 127.0.0.1:{port}, in vain (Connection refu"
    )
    assert said[0] == f"waiting for process 0 at 127.0.0.1:{port} (Connection refused)"


def test_one_that_ends_while_others_are_waited_for_ends_all_soon(monkeypatch):
    monkeypatch.setattr(rendezvous, "WAIT_S", 60.0)
    port, began = free_port(), time.monotonic()

    def come_and_go():
        with socket.create_connection(("127.0.0.1", port)) as one:
            one.sendall(b'{"process": 2, "processes": 4}\n')
            one.recv(100)

    def when_there(then):
        with contextlib.suppress(ConnectionRefusedError):
            return then()
        time.sleep(0.05)
        when_there(then)

    threading.Thread(target=when_there, args=(come_and_go,)).start()
    ends, _ = met(port, (0, 4), (1, 4))
    assert ends == ["RunFailed process 2 ended before all 4 had come\n  fix   start all of them again"] * 2
    with socket.create_server(("127.0.0.1", port)) as first:  # process 0, which ends

        def end():
            connection, _ = first.accept()
            connection.sendall(b'{"error": null}\n')
            time.sleep(0.2)
            connection.close()
            first.close()

        threading.Thread(target=end).start()
        ends, _ = met(port, (1, 4))
    assert ends == ["RunFailed process 0 ended before all 4 had come\n  fix   start all of them again"]
    assert time.monotonic() - began < 30


def test_one_that_comes_again_is_waited_for_anew(monkeypatch):
    monkeypatch.setattr(rendezvous, "WAIT_S", 60.0)
    monkeypatch.setattr(rendezvous, "GONE_S", 1.0)
    port = free_port()
    first = threading.Thread(target=rendezvous.meet, args=(f"127.0.0.1:{port}", 3, 0, print))
    first.start()
    time.sleep(0.2)
    for _ in range(5):
        with socket.create_connection(("127.0.0.1", port)) as one:
            one.sendall(b'{"process": 1, "processes": 3}\n')
            one.recv(100)
        time.sleep(0.25)
    assert met(port, (1, 3), (2, 3))[0] == ["", ""]
    first.join()


def test_a_person_waits_ten_seconds_at_most_for_the_first_word():
    """And the process needs some of these seconds to start."""
    for name in ("WRONG_S", "FIRST_REPORT_S"):
        assert ALLOWED_S["_ANSWER_S"] < ALLOWED_S[name] < 10 - ALLOWED_S["_ANSWER_S"]


def test_a_taken_port_and_no_port():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InputError, match=rf"listen at port {port} here \(Address already in use\)\n  fix   give"):
            rendezvous.meet(f"127.0.0.1:{port}", 2, 0, print)
        threading.Timer(0.2, taken.close).start()  # a run that is ending
        assert met(port, (0, 2), (1, 2))[0] == ["", ""]
    with pytest.raises(InputError, match="70000 is no port"):
        rendezvous.meet("127.0.0.1:70000", 2, 1, print)


@pytest.mark.parametrize(
    ("number", "kind", "end"),
    [
        (socket.EAI_NONAME, InputError, "the host head is not known here (as said)"),
        (socket.EAI_AGAIN, RunFailed, "the name head cannot be looked up now (as said)"),
    ],
)
def test_a_name_that_is_not_known(monkeypatch, number, kind, end):
    """Names that do not exist are wrong input; a name server that does not answer may answer later."""

    def unknown(*given, **named):
        raise socket.gaierror(number, "as said")

    said = []
    monkeypatch.setattr(rendezvous.socket, "getaddrinfo", unknown)
    with pytest.raises(kind) as error:
        rendezvous.meet("head:12377", 2, 1, said.append)
    assert str(error.value).startswith(f"coordinator head:12377: {end}\n  fix   ")
    assert said == ["waiting up to 1 s until the host head is known (as said)"]


def test_kubernetes_has_more_time_to_make_a_name_known(monkeypatch):
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    assert rendezvous.resolve_s() == rendezvous.WRONG_S
    monkeypatch.setattr(rendezvous, "NEW_NAME_S", 60.0)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    assert rendezvous.resolve_s() == 60


@pytest.mark.long
def test_the_address_of_another_machine_is_told_to_process_0(monkeypatch):
    port = free_port()
    (end,), _ = met(port, (0, 2), host="192.0.2.1")  # an address for documents, which no machine has
    assert end.startswith(f"InputError coordinator 192.0.2.1:{port}: 192.0.2.1 is another machine than ")
    assert end.endswith("where process 0 runs\n  fix   start the process with --process_id=0 there, or give an address "
                        "of this machine")  # fmt: skip
    # An address that is translated to this machine, as a service of Kubernetes has one, and one that others come by.
    monkeypatch.setattr(rendezvous, "_is_here", lambda host, port: False)
    first = threading.Thread(target=rendezvous.meet, args=(f"127.0.0.1:{port}", 2, 0, print))
    first.start()
    time.sleep(1)
    assert met(port, (1, 2))[0] == [""]
    first.join()


@pytest.mark.parametrize("answer", [b"", b"SSH-2.0-OpenSSH_9.2\r\n", b'{"error": 7}\n'])
def test_another_program_at_the_address_is_told_to_the_others(answer):
    with socket.create_server(("127.0.0.1", 0)) as other:

        def serve():
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = other.accept()
                    connection.recv(4096)
                    connection.sendall(answer)
                    connection.close()

        threading.Thread(target=serve, daemon=True).start()
        (end,), _ = met(other.getsockname()[1], (1, 2))
        other.shutdown(socket.SHUT_RDWR)
    assert "another program than process 0 of this run answers there\n  fix   give the address at which" in end


@pytest.mark.slow
def test_a_program_that_is_silent_is_waited_for():
    """It may be process 0 behind somebody who scans for open ports."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        (end,), said = met(silent.getsockname()[1], (1, 2))
    assert "in vain (timed out)" in end and "waiting for process 0" in said[0] and "(timed out)" in said[0]


def test_two_that_are_process_0():
    port = free_port()
    first = threading.Thread(target=lambda: ends.extend(met(port, (0, 2))[0]))
    ends = []
    first.start()
    with connected(port) as other:
        other.sendall(b'{"process": 0, "processes": 2, "mark": "of another host"}\n')
        first.join()
    assert ends[0].startswith("InputError two processes were told --process_id=0\n")


def test_numbers_that_two_have_are_said_by_all():
    other = "process 1 was told --num_processes=2, and process 0 --num_processes=3"
    port = free_port()
    first = threading.Thread(target=rendezvous.meet, args=(f"127.0.0.1:{port}", 3, 0, print))
    first.start()
    with connected(port) as dies:  # and is started again
        dies.sendall(b'{"process": 1, "processes": 3}\n')
        time.sleep(0.1)
    assert met(port, (1, 3), (2, 3))[0] == ["", ""]
    first.join()
    for others, said in (([(1, 3), (1, 3)], "two processes were told --process_id=1"), ([(1, 2)], other)):
        ends, _ = met(free_port(), (0, 3), *others)
        assert all(end.startswith(f"InputError {said}\n") for end in ends), ends


def test_strangers_change_nothing(monkeypatch):
    monkeypatch.setattr(rendezvous, "WAIT_S", 60.0)
    port = free_port()
    first = threading.Thread(target=rendezvous.meet, args=(f"127.0.0.1:{port}", 2, 0, print))
    first.start()
    with contextlib.ExitStack() as stack:
        for content in (b"", b"GET / HTTP/1.1\r\n\r\n", b'{"process": 1}\n', b"[1]\n", b"\xff" * 5000):
            stack.enter_context(connected(port)).sendall(content)
        assert first.is_alive()
        rendezvous.meet(f"127.0.0.1:{port}", 2, 1, print)
    first.join()


def connected(port):
    for _ in range(100):
        with contextlib.suppress(OSError):
            return socket.create_connection(("127.0.0.1", port), timeout=1)
        time.sleep(0.02)
    raise TimeoutError
