"""Workbenches that are served to a test: their jobs run in processes of their own, as for a user."""

import contextlib
import time

import pytest

pytest.importorskip("starlette")
from starlette.testclient import TestClient

from gspmd_lm import api
from gspmd_lm.explore import opening, server

TOKEN, PORT = "the-token", 8000
LONGEST_S = 240


class Client:
    """What a page does with a workbench."""

    def __init__(self, http, workbench):
        self.http, self.workbench = http, workbench

    def state(self):
        return self.http.get("/state").json()

    def post(self, path, /, **values):
        return self.http.post(f"/{path}", json=values)

    def until(self, holds):
        """The first state in which something holds. Nobody is asked before something has changed."""
        ends = time.monotonic() + LONGEST_S
        while True:
            revision = self.workbench.revision
            if holds(state := self.state()):
                return state
            assert time.monotonic() < ends, {
                key: state[key] for key in ("busy", "version", "shown_version", "problems")
            }
            self.http.portal.call(self._changed_since, revision)

    async def _changed_since(self, revision):
        if self.workbench.revision == revision:
            await self.workbench.wait(1.0)

    def edit(self, **values):
        """The state once all of an edit is worked out."""
        answer = self.post("edit", **values)
        assert answer.status_code == 200, answer.json()
        return self.finished()

    def finished(self):
        return self.until(lambda state: state["busy"] is None)


@contextlib.contextmanager
def serve(*args, **kwargs):
    workbench = opening.make_workbench(api.load_config, *args, **kwargs)
    app = server.make_app(workbench, TOKEN, PORT)
    with TestClient(app, base_url=f"http://127.0.0.1:{PORT}", headers={"X-Token": TOKEN}) as http:
        yield Client(http, workbench)


@pytest.fixture(scope="session")
def open_bench():
    return serve


@pytest.fixture(scope="session")
def tiny():
    """A workbench of the tiny config under tp8 on cpu:8. Tests leave other texts in it: each sets its own."""
    with serve("tp8", "cpu:8", "tiny") as client:
        client.finished()
        yield client
