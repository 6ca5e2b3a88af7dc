"""Submitted operations: order, de-duplication and results.

The SDK submits an operation, gets a request id and polls for the result. It may submit the parts of
one call in parallel and repeat a submission whose response it lost. Hence a model's operations run
one at a time in the order of their seq_id, and a repeated seq_id is the same operation.

Used on the event loop only. Doesn't own the work of an operation.
"""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from everburn.emulator.compute import Work
from everburn.emulator.errors import InvalidInput, SequenceBroken

Result = Mapping[str, Any]
"""JSON of a finished operation; may hold numpy arrays."""


class Promise:
    """The result of one operation: set once, readable any number of times."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self._payload: bytes | None = None
        self._settled = asyncio.Event()

    def resolve(self, payload: bytes) -> None:
        self._payload = payload
        self._settled.set()

    def abandon(self) -> None:
        """Wake the waiters without a result."""
        self._settled.set()

    async def wait(self, seconds: float) -> bytes | None:
        """The encoded result; None after `seconds`."""
        if not self._settled.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._settled.wait(), seconds)
        return self._payload


@dataclass(frozen=True, slots=True)
class Operation:
    name: str
    seq_id: int
    fingerprint: bytes
    """Digest of the request: distinguishes a repetition from a reused seq_id."""
    promise: Promise
    start: Callable[[], Work[Result]]


@dataclass(frozen=True, slots=True)
class _Submission:
    """The record of an operation without its request, which may be large."""

    name: str
    fingerprint: bytes
    promise: Promise


class OperationQueue:
    """The operations of one model. Calls `start` for one at a time, in order."""

    def __init__(self, model_id: str, start: Callable[[Operation], None]) -> None:
        self._model_id = model_id
        self._start = start
        self._submissions: dict[int, _Submission] = {}
        self._waiting: dict[int, Operation] = {}
        self._next = 1
        self._running = False
        self._repeated: deque[Operation] = deque()
        self._repeating = False
        self._closed = False
        self._stalled_since: float | None = None
        self._broken: SequenceBroken | None = None

    def find(self, seq_id: int, fingerprint: bytes) -> Promise | None:
        """The promise of an earlier submission of the operation, if any."""
        earlier = self._submissions.get(seq_id)
        if earlier is None:
            return None
        if earlier.fingerprint != fingerprint:
            raise InvalidInput(
                f"seq_id {seq_id} of {self._model_id} was already used by a different "
                f"{earlier.name} request"
            )
        return earlier.promise

    def put(self, operation: Operation) -> None:
        """Add a new operation. Raises SequenceBroken if it can never run."""
        if self._broken is not None:
            raise self._broken
        if operation.seq_id < self._next:
            raise InvalidInput(
                f"seq_id {operation.seq_id} is below {self._next}, the next in order"
            )
        self._submissions[operation.seq_id] = _Submission(
            operation.name, operation.fingerprint, operation.promise
        )
        self._waiting[operation.seq_id] = operation
        self._advance()

    def repeat(self, operation: Operation) -> None:
        """Run a repeated operation again, after the first: the behavior of a server that doesn't
        de-duplicate."""
        self._repeated.append(operation)
        self._advance()

    @property
    def repeating(self) -> bool:
        return self._repeating

    def finished(self) -> None:
        self._running = False
        self._next += not self._repeating
        self._repeating = False
        self._advance()

    def close(self) -> None:
        """Start no more operations."""
        self._closed = True

    def break_if_stalled(self, seconds: float) -> list[tuple[Promise, SequenceBroken]]:
        """If the next operation has been missing for `seconds`, give up; returns the waiting
        promises and their error."""
        if self._stalled_since is None or time.monotonic() - self._stalled_since < seconds:
            return []
        self._stalled_since = None
        self._broken = SequenceBroken(
            f"operation seq_id {self._next} of {self._model_id} never arrived, and later ones have "
            f"waited {seconds:.0f} s for it; unload this model and reconnect"
        )
        promises = [operation.promise for operation in self._waiting.values()]
        self._waiting.clear()
        return [(promise, self._broken) for promise in promises]

    def _advance(self) -> None:
        if self._running or self._closed:
            return
        if self._repeated and self._repeated[0].seq_id < self._next:
            self._running = self._repeating = True
            self._start(self._repeated.popleft())
            return
        operation = self._waiting.pop(self._next, None)
        if operation is not None:
            self._running = True
            self._stalled_since = None
            self._start(operation)
        elif self._waiting and self._stalled_since is None:
            self._stalled_since = time.monotonic()
