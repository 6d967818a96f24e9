"""The server of a workbench: on this machine alone, behind a token, for requests that come from its own page."""

import asyncio
import contextlib
import hmac
import json
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
    JSONResponse,
    PlainTextResponse,
    RedirectResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Receive, Scope, Send

from gspmd_lm.errors import InputError
from gspmd_lm.explore.inputs import MOST_TEXT
from gspmd_lm.explore.workbench import Workbench

HOST = "127.0.0.1"
PAGE = Path(__file__).parent / "page"
COOKIE = "gspmd_lm_token"
HEARTBEAT_S = 15.0
MOST_BODY = 4 * MOST_TEXT + 10_000  # bytes of a request
POLICY = "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; frame-ancestors *"


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
        given = request.headers.get("x-token") or request.cookies.get(self.cookie(host))
        if request.url.path == "/" and request.method == "GET":
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
        if "token" not in request.query_params:
            return FileResponse(PAGE / "index.html", headers={"Content-Security-Policy": POLICY})
        response = RedirectResponse("/", 303)
        response.set_cookie(Guard.cookie(request.headers["host"]), token, httponly=True, samesite="strict")
        return response

    async def state(_: Request) -> Response:
        return JSONResponse(workbench.state())

    async def events(_: Request) -> Response:
        return StreamingResponse(
            _events(workbench), media_type="text/event-stream", headers={"Cache-Control": "no-store"}
        )

    async def edit(asked: dict[str, Any]) -> Any:
        return {"version": await workbench.edit(asked)}

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        await workbench.start()
        yield
        workbench.stop()

    posts = {"edit": edit}
    return Starlette(
        routes=[
            Route("/", index),
            Route("/state", state),
            Route("/events", events),
            *(Route(f"/{name}", _post(function), methods=["POST"]) for name, function in posts.items()),
            Mount("/static", StaticFiles(directory=PAGE)),
        ],
        middleware=[Middleware(Guard, token=token, hosts=frozenset({f"{HOST}:{port}", f"localhost:{port}"}))],
        lifespan=lifespan,
    )


def _post(function: Callable[[dict[str, Any]], Awaitable[Any]]) -> Callable[[Request], Awaitable[Response]]:
    """The endpoint of a function from the JSON object of a request to that of its answer."""

    async def endpoint(request: Request) -> Response:
        body = b""
        async for chunk in request.stream():
            body += chunk
            if len(body) > MOST_BODY:
                return JSONResponse({"error": f"the request has more than {MOST_BODY:,} bytes"}, 413)
        try:
            asked = json.loads(body or b"{}")
        except (ValueError, RecursionError):
            return JSONResponse({"error": "the request is not JSON"}, 400)
        if not isinstance(asked, dict):
            return JSONResponse({"error": "the request is not a JSON object"}, 400)
        try:
            return JSONResponse(await function(asked))
        except InputError as error:
            return JSONResponse({"error": str(error)}, 400)

    return endpoint


async def _events(workbench: Workbench) -> AsyncIterator[str]:
    """The state each time that it changes, as server-sent events."""
    told = -1
    while True:
        if told != workbench.revision:
            told = workbench.revision
            yield f"event: state\ndata: {json.dumps(workbench.state())}\n\n"
        else:
            yield ": still here\n\n"
        if told == workbench.revision:
            await workbench.wait(HEARTBEAT_S)


class Server:
    """A workbench that is served at an address of this machine."""

    def __init__(self, workbench: Workbench, port: int = 0):
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind((HOST, port))
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
