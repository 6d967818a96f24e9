"""The meeting of processes that flags name: who is missing, taken ports, unknown hosts, strangers."""

import contextlib
import socket
import threading
import time

import pytest

from gspmd_lm.errors import InputError, RunFailed
from gspmd_lm.runtime import rendezvous
from tests.launched import free_port


@pytest.fixture(autouse=True)
def hurried(monkeypatch):
    for name, seconds in (
        ("WAIT_S", 2.0),
        ("RESOLVE_S", 0.1),
        ("REPORT_S", 0.5),
        ("_ANSWER_S", 0.3),
        ("_PAUSE_S", 0.05),
    ):
        monkeypatch.setattr(rendezvous, name, seconds)


def met(port, *processes):
    """What became of each process, which are pairs of a number and the count that it was told: '' or its error."""
    ends = {}

    def run(at, number, told):
        try:
            rendezvous.meet(f"127.0.0.1:{port}", told, number, lambda line: said.append(line))
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


def test_one_line_says_who_is_missing():
    port = free_port()
    (first, second), said = met(port, (0, 4), (2, 4))
    missing = f"RunFailed process 0 waited 2 s at 127.0.0.1:{port} for processes 1, 3, in vain\n  fix   start all 4"
    assert first.startswith(missing) and second == first
    assert f"waiting for processes 1, 3 at 127.0.0.1:{port}" in said
    ((alone,), said) = met(port, (1, 2))
    assert alone.startswith(
        f"RunFailed process 1 waited 2 s for process 0 at 127.0.0.1:{port}, in vain (Connection refu"
    )
    assert said[0] == f"waiting for process 0 at 127.0.0.1:{port} (Connection refused)"


def test_a_taken_port_an_unknown_host_and_no_port():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InputError, match=rf"listen at port {port} here \(Address already in use\)\n  fix   give"):
            rendezvous.meet(f"127.0.0.1:{port}", 2, 0, print)
    with pytest.raises(InputError, match=r"the host no-such-host\.invalid is not known here"):
        rendezvous.meet("no-such-host.invalid:12377", 2, 1, print)
    with pytest.raises(InputError, match="70000 is no port"):
        rendezvous.meet("127.0.0.1:70000", 2, 1, print)


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


def test_strangers_change_nothing():
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
