"""Who is served: the page of this machine with its token, and nobody else; and what no request can do."""

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import types
import urllib.request
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from gspmd_lm import api
from gspmd_lm.errors import InputError
from gspmd_lm.explore import jobs, opening, server

ROOT = Path(__file__).parents[2]
GETS = "state", "events", "complete", "share", "report"
POSTS = "edit", "control", "fix", "pin", "search", "compile", "load", "save"


@pytest.fixture
def refused(tiny):
    """The status of a request with other headers, of a client without the token or a cookie."""

    def ask(method, path, **headers):
        http = TestClient(tiny.http.app, base_url="http://127.0.0.1:8000", follow_redirects=False)
        return http.request(method, path, headers=headers, content=b"{}" if method == "POST" else None).status_code

    return ask


def test_each_address_needs_the_token(refused):
    for path in GETS:
        assert refused("GET", f"/{path}") == refused("GET", f"/{path}", **{"X-Token": "another"}) == 403
    for path in POSTS:
        assert refused("POST", f"/{path}") == 403
        assert refused("POST", f"/{path}?token=the-token") == 403  # as a form of another page might send it
    assert refused("GET", "/") == 403 and refused("GET", "/?token=wrong") == 403
    assert refused("GET", "/state", **{"X-Token": "the-token"}) == 200


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1", "127.0.0.1:80", "localhost:8001", "", "[::1]:8000"])
def test_other_hosts_are_refused(refused, host):
    assert refused("GET", "/state", **{"X-Token": "the-token", "Host": host}) == 421


def test_the_usual_port_is_left_out_by_browsers_and_none_is_above_65535(tiny):
    http = TestClient(server.make_app(tiny.workbench, "the-token", 80), base_url="http://127.0.0.1")
    assert http.get("/state", headers={"X-Token": "the-token", "Host": "127.0.0.1"}).status_code == 200
    for port in (-1, 2**16):
        with pytest.raises(InputError, match=f"--port={port}: is no port"):
            server.Server(tiny.workbench, port)


def test_requests_of_other_pages_are_refused(refused):
    token = {"X-Token": "the-token"}
    for origin in ("http://evil.example", "null", "http://127.0.0.1:8001", "https://127.0.0.1.evil.example:8000"):
        assert refused("POST", "/edit", **token, Origin=origin) == 403
    assert refused("POST", "/edit", **token, Origin="http://localhost:8000") == 200


def test_the_token_becomes_a_cookie_that_no_script_reads(tiny):
    http = TestClient(tiny.http.app, base_url="http://127.0.0.1:8000", follow_redirects=False)
    answer = http.get("/?token=the-token")
    assert answer.status_code == 303 and answer.headers["location"] == "/"
    cookie = answer.headers["set-cookie"].lower()
    assert "httponly" in cookie and "samesite=strict" in cookie
    assert http.get("/state").status_code == 200  # the client sends the cookie


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 200), (b"[]", 400), (b"null", 400), (b"{", 400), (b"\xff", 400), (b'{"text": 8}', 400),
        (b'{"txt": ""}', 400), (b"[" * 100_000, 400), (b'{"a": ' * 5_000 + b"1" + b"}" * 5_000, 400),
        (b'{"text": "' + b"a" * 100_001 + b'"}', 400), (b'{"text": "' + b"a" * 500_000 + b'"}', 413),
        (b'{"batch": 0}', 400), (b'{"batch": 1e99}', 400), (b'{"batch": true}', 400), (b'{"set": ["rules.a=1"]}', 400),
        (b'{"set": "a=b"}', 400), (b'{"config": null}', 400), (b'{"text": "\\ud800"}', 400), (b'{"seq": NaN}', 400),
    ],
)  # fmt: skip
def test_what_is_no_edit_is_refused(tiny, body, status):
    answer = tiny.http.post("/edit", content=body)
    assert answer.status_code == status, answer.text
    assert status == 200 or answer.json()["error"]


def test_files_outside_of_the_page_are_not_served(tiny):
    for path in ("../server.py", "..%2fserver.py", "%2e%2e/server.py", "/etc/passwd", "nothing.js"):
        assert tiny.http.get(f"/static/{path}").status_code == 404, path


def test_events_tell_the_state_when_it_changes(tiny):
    async def read():
        told = server._events(tiny.workbench)
        first = await anext(told)
        tiny.workbench.revision += 1
        return first, await anext(told)

    for text in asyncio.run(read()):
        name, data = text.split("\n", 1)
        assert name == "event: state" and json.loads(data.removeprefix("data: ")).keys() == tiny.state().keys()


@pytest.mark.long
def test_processes_that_end_or_take_too_long_are_started_anew(tiny, monkeypatch):
    good = tiny.edit(
        text="mesh: {tensor: 8}\nrules: {heads: tensor, kv_heads: tensor}\n", target="cpu:8", config="tiny"
    )
    os.killpg(tiny.workbench._layouts._job._process.pid, signal.SIGSTOP)  # it answers no more
    layers = tiny.workbench._layers._job
    os.killpg(layers._process.pid, signal.SIGKILL)
    monkeypatch.setattr(jobs, "LOOK_S", 0.1)
    monkeypatch.setattr(jobs, "LONGEST_S", 0.1)
    tiny.post("edit", text=good["inputs"]["text"] + "remat: block\n")
    late = tiny.until(lambda state: state["busy"] is None)
    assert "takes longer than" in late["problems"][0]["message"] and late["shown_version"] == good["version"]
    tiny.until(lambda _: tiny.workbench._layers._job is not layers)
    monkeypatch.setattr(jobs, "LONGEST_S", 120.0)
    again = tiny.edit(text=good["inputs"]["text"] + "remat: dots\n")
    assert again["problems"] == [] and again["shown_version"] == again["version"] == again["layer"]["version"]
    tiny.workbench._fail_layer(again["version"], "it was ended")
    told = tiny.state()
    assert told["layer"] is None and "the layer: it was ended" in told["not_known"] and told["headline"]


@pytest.mark.parametrize("error", [ProcessLookupError, PermissionError])
def test_a_job_that_has_ended_is_stopped_again(monkeypatch, error):
    def refuse(group, number):
        raise error

    monkeypatch.setattr(os, "killpg", refuse)
    jobs.Job.stop(types.SimpleNamespace(_process=types.SimpleNamespace(pid=0)))  # type: ignore[arg-type]


def test_what_is_missing_is_said(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "uvicorn" else object())
    with pytest.raises(InputError, match=r"explore needs uvicorn, .*\n  fix   pip install 'gspmd_lm\[explore\]'"):
        opening.check_installed()


def test_nothing_that_serves_imports_jax():
    """The page is there before jax is."""
    program = (
        "import sys; from gspmd_lm.explore import opening, server; print('jax' in sys.modules, 'numpy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.split() == ["False", "False"], done.stderr


# A shell has the processes that it starts in the background ignore SIGINT, and tests may be one of them.
INTERRUPTIBLE = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from gspmd_lm import cli
cli.main(["main.py", "explore", *sys.argv[1:]])
"""


def test_the_command_serves_until_it_is_interrupted(tmp_path):
    command = [sys.executable, "-c", INTERRUPTIBLE, "--config=tiny", "--rules=tp8", "--target=cpu:8"]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    assert process.stderr
    with process.stderr, contextlib.ExitStack() as ends:
        ends.callback(process.wait, 30)
        ends.callback(process.send_signal, signal.SIGINT)
        url = ""
        while not url:
            line = process.stderr.readline()
            assert line, "it has ended"
            url = "".join(re.findall(r"http://\S+", line))
        base, token = url.split("?token=")
        asked = urllib.request.Request(f"{base}state", headers={"X-Token": token})
        with urllib.request.urlopen(asked) as answer:
            assert json.load(answer)["inputs"]["path"] == "rules/tp8.yaml"
        listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(process.pid)], capture_output=True, text=True)
    assert process.returncode == 130 and len(listed.stdout.split()) >= 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in listed.stdout.split())


def test_a_notebook_shows_it_in_a_frame():
    with api.explore("tiny", "tp8", "cpu:8") as explorer:
        assert explorer.url.startswith("http://127.0.0.1:") and explorer.url in repr(explorer)
        assert f'<iframe src="{explorer.url}&amp;frame=1"' in explorer._repr_html_()
        with urllib.request.urlopen(explorer.url.replace("/?", "/state?")) as answer:
            assert json.load(answer)["inputs"]["config"] == "tiny"
    with pytest.raises(OSError):
        urllib.request.urlopen(explorer.url)
