"""An HTTP server on 127.0.0.1 for the rollouts of this process.

One per event loop, for as long as somebody uses it, on a port that was free. Owns its life and the
way from a path's first part to who answers it. Doesn't own what is answered (endpoint.py).
"""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import Context
from typing import Any
from weakref import WeakKeyDictionary

import uvicorn
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

Answer = Callable[[Request, str], Awaitable[Response]]
"""Answers a request; the second argument is the path without its first part."""

_servers: "WeakKeyDictionary[asyncio.AbstractEventLoop, LocalServer]" = WeakKeyDictionary()


@asynccontextmanager
async def local_server() -> AsyncIterator["LocalServer"]:
    """The server of this event loop; it runs while anybody is inside of such a block."""
    loop = asyncio.get_running_loop()
    server = _servers.get(loop)
    if server is None:
        server = _servers[loop] = LocalServer(loop)
    server.users += 1
    try:
        yield server
    finally:
        server.users -= 1
        if server.users == 0:
            del _servers[loop]
            await server.close()


class LocalServer:
    """Listens from its construction on."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self.users = 0
        self._answers: dict[str, Answer] = {}
        self._server = _Server(
            uvicorn.Config(
                self._app,
                interface="asgi3",
                lifespan="off",
                log_level="warning",
                access_log=False,
                timeout_keep_alive=120,
                timeout_graceful_shutdown=1,
            )
        )
        # It outlives the completion that needed it first, and isn't part of it.
        serving = self._server.serve(sockets=[listener])
        self._task = loop.create_task(serving, context=Context())

    @contextmanager
    def mounted(self, name: str, answer: Answer) -> Iterator[None]:
        """Let requests to `/<name>/...` be answered while the block runs."""
        self._answers[name] = answer
        try:
            yield
        finally:
            del self._answers[name]

    async def close(self) -> None:
        self._server.should_exit = True
        await self._task

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        request = Request(scope, receive)
        name, _, rest = request.url.path.lstrip("/").partition("/")
        answer = self._answers.get(name)
        if answer is None:
            gone = {"error": {"message": "no completion that runs has this address"}}
            response: Response = JSONResponse(gone, 404)
        else:
            response = await answer(request, rest)
        await response(scope, receive, send)


class _Server(uvicorn.Server):
    """Leaves signals to the process it is in."""

    @contextmanager
    def capture_signals(self) -> Iterator[Any]:
        yield
