"""Requests that aren't sent twice.

The SDK sends a request again whose answer it hasn't got: after a broken connection, a timeout, a
5xx. Whether the service takes the second for what it is, for how long, and for which operations
isn't known; a backward pass that is applied twice shows nowhere. So between the SDK and its network
stands a transport that lets nothing through a second time that may have been applied: it answers
itself, in a way that the SDK doesn't repeat, and the lease ends. From then on nothing gets through
that changes the model. A request that was refused before any work, or for which there was no
connection, may be sent again.

Owns which requests these are and which ends of them are doubtful. Doesn't own what follows from the
answer (errors.py: the lease ends).
"""

import hashlib

import httpx

CHANGING = frozenset(
    {
        "forward_backward",
        "optim_step",
        "load_weights",
        "load_adapter",
        # Twice at once, or each a difference to the one before, they are no snapshot of one moment.
        "save_weights",
        "save_weights_for_sampler",
    }
)
"""Last part of the paths that do something to a model or to what is saved of it."""
NOT_REPEATED = 412
"""A status that the SDK raises at once, and that no service sends for a training request."""


def watched_client() -> httpx.AsyncClient:
    """The SDK's own HTTP client, with a `SentOnce` between it and the network. For one session."""
    from fireworks.training.sdk._core._base_client import (
        AsyncHttpxClientWrapper,
        _default_pyqwest_transport,
    )
    from fireworks.training.sdk._core._constants import DEFAULT_TIMEOUT

    network = SentOnce(_default_pyqwest_transport())
    client: httpx.AsyncClient = AsyncHttpxClientWrapper(timeout=DEFAULT_TIMEOUT, transport=network)
    return client


class SentOnce(httpx.AsyncBaseTransport):
    """A transport that refuses to send what may have been applied already."""

    def __init__(self, network: httpx.AsyncBaseTransport) -> None:
        self._network = network
        self._refusal: str | None = None
        self._doubts: dict[bytes, str] = {}
        """What became of a request that was sent and not answered, by its fingerprint: its body
        holds model and sequence number, so that no two are alike."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        operation = request.url.path.rpartition("/")[2]
        if operation not in CHANGING:
            return await self._network.handle_async_request(request)
        fingerprint = hashlib.blake2b(request.content, digest_size=16, key=operation.encode())
        key = fingerprint.digest()
        if key in self._doubts and self._refusal is None:
            self._refusal = (
                f"{operation} {self._doubts[key]} after it had been sent: it may have been "
                "applied, and isn't sent again"
            )
        if self._refusal is not None:
            answer = {"error": {"message": self._refusal}}
            return httpx.Response(NOT_REPEATED, json=answer, request=request)
        self._doubts[key] = "was given up"
        return await self._send(request, key)

    async def aclose(self) -> None:
        await self._network.aclose()

    async def _send(self, request: httpx.Request, key: bytes) -> httpx.Response:
        try:
            response = await self._network.handle_async_request(request)
        except (httpx.ConnectError, httpx.ConnectTimeout):
            del self._doubts[key]  # nothing was sent
            raise
        except Exception as error:
            self._doubts[key] = f"ended in {type(error).__name__}"
            raise
        try:
            # Small: the id by which the result is asked for. A connection may break before its end.
            await response.aread()
        except Exception as error:
            self._doubts[key] = f"ended in {type(error).__name__}"
            raise
        if _doubtful(response.status_code):
            self._doubts[key] = f"was answered by HTTP {response.status_code}"
        else:
            del self._doubts[key]
        return response


def _doubtful(status: int) -> bool:
    """Whether a request that was answered so may have been applied. 4xx refuse it, and 503 does for
    want of a server; 408 and the other 5xx come from those who have waited for one in vain."""
    return status == 408 or (status >= 500 and status != 503)
