"""A transport that sends each mutation at most once.

The SDK repeats a request after a broken connection, a timeout or a 5xx. It is unknown whether the
service deduplicates repetitions, and a backward pass that is applied twice is invisible. So a
request that may have been applied is answered here with an error that the SDK doesn't retry, the
lease ends (errors.py), and later mutations of the session are refused. A request that was refused
before any work, or had no connection, may be repeated.
"""

import hashlib

import httpx

from everburn.trainers.errors import NOT_REPEATED

CHANGING = frozenset(
    {
        "forward_backward",
        "optim_step",
        "load_weights",
        "load_adapter",
        # Repeated, a save could mix two states, and a delta would build on the wrong base.
        "save_weights",
        "save_weights_for_sampler",
    }
)
"""Last part of the paths of mutations."""


def send_once_client() -> httpx.AsyncClient:
    """The SDK's HTTP client over a `SendOnceTransport`, for one session."""
    from fireworks.training.sdk._core._base_client import (
        AsyncHttpxClientWrapper,
        _default_pyqwest_transport,
    )
    from fireworks.training.sdk._core._constants import DEFAULT_TIMEOUT

    transport = SendOnceTransport(_default_pyqwest_transport())
    client: httpx.AsyncClient = AsyncHttpxClientWrapper(
        timeout=DEFAULT_TIMEOUT, transport=transport
    )
    return client


class SendOnceTransport(httpx.AsyncBaseTransport):
    """Refuses to repeat a request that may have been applied."""

    def __init__(self, network: httpx.AsyncBaseTransport) -> None:
        self._network = network
        self._refusal: str | None = None
        self._doubts: dict[bytes, str] = {}
        """Outcomes of requests that may have been applied, by fingerprint. Bodies contain model and
        sequence number, so that fingerprints are unique."""

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
        self._doubts[key] = "was cancelled"
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
            # The body is small, but the connection may break before its end.
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
    """Whether a request with this answer may have been applied. 4xx and 503 (no server) refuse it;
    408 and the other 5xx may come from a proxy that waited for a server in vain."""
    return status == 408 or (status >= 500 and status != 503)
