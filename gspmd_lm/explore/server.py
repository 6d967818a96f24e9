"""The server of a workbench: on this machine alone, behind a token, for requests that come from its own page."""

import asyncio
import contextlib
import hmac
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import (
    FileResponse,
    HTMLResponse,
    PlainTextResponse,
    RedirectResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Receive, Scope, Send

from gspmd_lm import files
from gspmd_lm.errors import InputError
from gspmd_lm.explore import controls
from gspmd_lm.explore.inputs import MOST_TEXT
from gspmd_lm.explore.share import share_page
from gspmd_lm.explore.workbench import FileExists, Workbench

HOST = "127.0.0.1"
PAGE = Path(__file__).parent / "page"
COOKIE = "gspmd_lm_token"
HEARTBEAT_S = 15.0
MOST_BODY = 4 * MOST_TEXT + 10_000  # bytes of a request
NOT_STORED = {"Cache-Control": "no-store"}
# What a page may load: the workbench its own files, a page that stands alone nothing but what is in it.
POLICY = "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:"
STANDS_ALONE = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
SCRIPTS_OF_ITS_OWN = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


class Guard:
    """Refuses what does not come from the page of this server: by its token, its Host and its Origin."""

    def __init__(self, app: ASGIApp, token: str, hosts: frozenset[str]):
        self.app, self.token, self.hosts = app, token, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (refusal := self._refusal(Request(scope))):
            await refusal(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def _refusal(self, request: Request) -> Response | None:
        host, origin = request.headers.get("host", ""), request.headers.get("origin")
        if host not in self.hosts:
            return PlainTextResponse("this server answers to 127.0.0.1 and localhost alone", 421)
        if origin is not None and origin.partition("://")[2] not in self.hosts:
            return PlainTextResponse("requests of other pages are refused", 403)
        if request.url.path.startswith("/static/"):
            return None  # the files of the page, which tell nothing
        given = request.headers.get("x-token") or request.cookies.get(self.cookie(host))
        if request.method == "GET":  # in a frame of a notebook, a browser keeps no cookie
            given = request.query_params.get("token") or given
        if not hmac.compare_digest((given or "").encode(), self.token.encode()):
            return PlainTextResponse("the token is missing: open the address that the command has printed", 403)
        return None

    @staticmethod
    def cookie(host: str) -> str:
        """The name of the cookie, which differs by port: cookies do not."""
        return f"{COOKIE}_{host.rpartition(':')[2]}"


def make_app(workbench: Workbench, token: str, port: int) -> Starlette:
    """The application that serves a workbench at a port."""

    async def index(request: Request) -> Response:
        if "token" not in request.query_params or "frame" in request.query_params:
            return FileResponse(PAGE / "index.html", headers={"Content-Security-Policy": POLICY, **NOT_STORED})
        response = RedirectResponse("/", 303)
        response.set_cookie(Guard.cookie(request.headers["host"]), token, httponly=True, samesite="strict")
        return response

    async def state(_: Request) -> Response:
        return _json(workbench.state())

    async def events(_: Request) -> Response:
        return StreamingResponse(_events(workbench), media_type="text/event-stream", headers=NOT_STORED)

    async def complete(_: Request) -> Response:
        return _json(controls.completion(workbench.display.shown.get("names")))

    async def share(_: Request) -> Response:
        named = {"Content-Disposition": 'attachment; filename="layout.html"', "Content-Security-Policy": STANDS_ALONE}
        return HTMLResponse(share_page(workbench.state()), headers=named)

    def show_compiled(page: str) -> Response:
        inputs = workbench.display.inputs
        found = workbench.compilation.results.get(inputs) if inputs else None
        if not (found and found[page]):
            return PlainTextResponse("this layout is not compiled", 404)
        return HTMLResponse(found[page], headers={"Content-Security-Policy": SCRIPTS_OF_ITS_OWN})

    async def report(_: Request) -> Response:
        return show_compiled("page")

    async def timeline(_: Request) -> Response:
        return show_compiled("timeline")

    async def edit(asked: dict[str, Any]) -> Any:
        return {"version": await workbench.edit(asked)}

    async def control(asked: dict[str, Any]) -> Any:
        return {"text": workbench.control(asked.get("name"), asked.get("value"))}

    async def fix(asked: dict[str, Any]) -> Any:
        return {"text": workbench.fix(asked.get("problem"))}

    async def pin(asked: dict[str, Any]) -> Any:
        await workbench.pin(asked.get("clear") is True)
        return {}

    async def search(asked: dict[str, Any]) -> Any:
        workbench.find(asked.get("stop") is True)
        return {}

    async def compile(asked: dict[str, Any]) -> Any:
        workbench.compile(asked.get("stop") is True)
        return {}

    async def load(asked: dict[str, Any]) -> Any:
        return {"text": workbench.load(asked.get("rank"))}

    async def save(asked: dict[str, Any]) -> Any:
        return {"path": workbench.save(asked.get("path"), asked.get("overwrite") is True)}

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        await workbench.start()
        yield
        await workbench.stop()

    named = "" if port == 80 else f":{port}"  # a browser leaves out the port that is usual
    gets = (state, events, complete, share, report, timeline)
    posts = (edit, control, fix, pin, search, compile, load, save)
    return Starlette(
        routes=[
            Route("/", index),
            *(Route(f"/{function.__name__}", function) for function in gets),
            *(Route(f"/{function.__name__}", _post(function), methods=["POST"]) for function in posts),
            Mount("/static", StaticFiles(directory=PAGE)),
        ],
        middleware=[Middleware(Guard, token=token, hosts=frozenset({f"{HOST}{named}", f"localhost{named}"}))],
        lifespan=lifespan,
    )


def _post(function: Callable[[dict[str, Any]], Awaitable[Any]]) -> Callable[[Request], Awaitable[Response]]:
    """The endpoint of a function from the JSON object of a request to that of its answer."""

    async def endpoint(request: Request) -> Response:
        body = b""
        async for chunk in request.stream():
            body += chunk
            if len(body) > MOST_BODY:
                return _json({"error": f"the request has more than {MOST_BODY:,} bytes"}, 413)
        try:
            asked = files.json_object(body or b"{}", "the request")
            if files.has_half_characters(body.decode(), asked):
                raise InputError("the request: it has half of a character")
            return _json(await function(asked))
        except InputError as error:
            return _json({"error": str(error)}, 409 if isinstance(error, FileExists) else 400)

    return endpoint


def _json(value: Any, status: int = 200) -> Response:
    """The answer with a value. What a text calls a number, such as .inf, need not be one of JSON."""
    return Response(files.json_line(value), status, media_type="application/json")


async def _events(workbench: Workbench) -> AsyncIterator[str]:
    """The state each time that it changes, as server-sent events."""
    sent = -1
    while True:
        if sent != workbench.revision:
            sent = workbench.revision
            yield f"event: state\ndata: {files.json_line(workbench.state())}\n"
        else:
            yield ": still here\n\n"
        if sent == workbench.revision:
            await workbench.wait(HEARTBEAT_S)


class Server:
    """A workbench that is served at an address of this machine.

    Raises InputError where the port is taken. port 0: any that is free.
    """

    def __init__(self, workbench: Workbench, port: int = 0):
        if not 0 <= port < 2**16:
            raise InputError(f"--port={port}: is no port\n  fix   give one below {2**16}, or none")
        self.workbench = workbench
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((HOST, port))
        except OSError as error:
            self._socket.close()
            raise InputError(f"--port={port}: {error.strerror}\n  fix   give another port, or none") from error
        self._socket.listen()  # who comes before the server runs is answered once it does
        self.port = self._socket.getsockname()[1]
        self.token = secrets.token_urlsafe(24)
        app = make_app(workbench, self.token, self.port)
        config = uvicorn.Config(app, log_level="warning", lifespan="on", timeout_graceful_shutdown=1)
        self._server = uvicorn.Server(config)

    @property
    def url(self) -> str:
        """The address of the page, with the token."""
        return f"http://{HOST}:{self.port}/?token={self.token}"

    def run(self) -> None:
        """Serves until it is interrupted or closed."""
        asyncio.run(self._server.serve(sockets=[self._socket]))

    def close(self) -> None:
        """Has `run` end."""
        self._server.should_exit = True
