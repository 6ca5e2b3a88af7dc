"""An HTTP server on 127.0.0.1 for the rollouts of this process.

One server per event loop, on a free port, while it has users. Owns its lifetime and the dispatch by
the first part of the path. Doesn't own the handlers (endpoint.py).
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

Handler = Callable[[Request, str], Awaitable[Response]]
"""The second argument is the path without its first part."""

_servers: "WeakKeyDictionary[asyncio.AbstractEventLoop, LocalServer]" = WeakKeyDictionary()


@asynccontextmanager
async def local_server() -> AsyncIterator["LocalServer"]:
    """The server of this event loop; it runs while at least one such block is open."""
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
    """Listens from construction until `close`."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self.users = 0
        self._handlers: dict[str, Handler] = {}
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
        # A fresh context: the server outlives the completion that started it.
        serving = self._server.serve(sockets=[listener])
        self._task = loop.create_task(serving, context=Context())

    @contextmanager
    def mounted(self, name: str, handler: Handler) -> Iterator[None]:
        """Send requests for `/<name>/...` to `handler` inside the block."""
        self._handlers[name] = handler
        try:
            yield
        finally:
            del self._handlers[name]

    async def close(self) -> None:
        self._server.should_exit = True
        await self._task

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        request = Request(scope, receive)
        name, _, rest = request.url.path.lstrip("/").partition("/")
        handler = self._handlers.get(name)
        if handler is None:
            error = {"error": {"message": "no running completion has this address"}}
            response: Response = JSONResponse(error, 404)
        else:
            response = await handler(request, rest)
        await response(scope, receive, send)


class _Server(uvicorn.Server):
    """Leaves signals to its process."""

    @contextmanager
    def capture_signals(self) -> Iterator[Any]:
        yield
