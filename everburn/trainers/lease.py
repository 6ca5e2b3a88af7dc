"""A lease: one trainer session that at-least-once activities can drive safely.

Owns the single execution of each operation, the order of submissions, and the refusal of superseded
lease epochs. Lives in one process, as the session does. Doesn't own the session (Trainer) or the
acquisition of the next lease (the TrainerLease workflow).
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from everburn.records.ids import LeaseKey
from everburn.records.publications import StaleLeaseError
from everburn.records.store import CorruptArtifactError, StoreError
from everburn.trainers.protocol import Trainer, TrainerClosedError, TrainerStateLostError

T = TypeVar("T")

STEP_OPERATIONS = frozenset({"forward_backward", "optim_step", "replay_step"})
"""Operations that must not run after their step."""


class OperationKey(NamedTuple):
    """Identifies an operation across retries."""

    step: int
    operation: str
    part: int | str = 0
    """Which of several of the step: a submission's number, a checkpoint's name."""


@dataclass
class Lease:
    """The session held under one lease."""

    key: LeaseKey
    trainer: Trainer
    _operations: dict[OperationKey, "asyncio.Task[Any]"] = field(default_factory=dict)
    _next: tuple[int, int] = (0, 0)
    """Step and number of the next submission to send."""
    _turns: asyncio.Condition = field(default_factory=asyncio.Condition)
    _last_step: int = 0
    """The last step whose update was requested."""
    _end: asyncio.Event = field(default_factory=asyncio.Event)
    _ended: TrainerStateLostError | None = None
    released: bool = False
    """Whether it ended by the run's release."""
    closed: TrainerClosedError | None = None
    """The error of the account that ended it, if any."""

    async def once(
        self, lease: LeaseKey, key: OperationKey, operation: Callable[[], Awaitable[T]]
    ) -> T:
        """Run an operation, or join the one with the same key, and return its result.

        The operation outlives its callers: cancelling an activity doesn't cancel it.

        Raises:
            StaleLeaseError: the caller has a superseded lease.
            TrainerStateLostError: the lease has ended, or the operation's step is over (after a
                reset of the run, the server may dispatch old activities again).
            TrainerClosedError: the account may not train; ends the lease.
            CorruptArtifactError: a file of the run is unusable, for any lease.
        """
        if lease != self.key:
            raise StaleLeaseError(f"{key} is for lease {lease.text}; this is lease {self.key.text}")
        if self._ended is not None:
            raise self._ended
        task = self._operations.get(key)
        if task is None:
            self._check_order(key)
            task = asyncio.ensure_future(self._run(operation))
            self._operations[key] = task
            self._forget_before(key.step)
        return await asyncio.shield(task)

    @contextlib.asynccontextmanager
    async def turn(self, step: int, submission: int) -> AsyncIterator[None]:
        """The block sends a submission, after the earlier ones of its step, and doesn't await the
        result: results may be pending concurrently.

        Gradients are summed in the order of sending, so that a replay of the ledger reproduces
        them bit for bit.
        """
        async with self._turns:
            if self._next[0] != step:
                self._next = (step, 0)
            await self._turns.wait_for(lambda: self._ended or self._next == (step, submission))
            if self._ended is not None:
                raise self._ended
            yield
            self._next = (step, submission + 1)
            self._turns.notify_all()

    async def release(self) -> None:
        """End the lease for the run, and close the session."""
        self.released = self._ended is None
        await self.end(TrainerStateLostError(f"lease {self.key.text} was released"))
        await self.trainer.close()

    async def wait_ended(self, timeout: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._end.wait(), timeout)

    async def end(self, reason: TrainerStateLostError) -> None:
        """Refuse all further operations with `reason`."""
        self._ended = self._ended or reason
        self._end.set()
        async with self._turns:
            self._turns.notify_all()

    async def close_for(self, reason: TrainerClosedError) -> None:
        """End the lease because the account may not train."""
        self.closed = reason
        await self.end(TrainerStateLostError(str(reason)))

    @property
    def ended(self) -> TrainerStateLostError | None:
        return self._ended

    async def _run(self, operation: Callable[[], Awaitable[T]]) -> T:
        try:
            return await operation()
        except TrainerStateLostError as error:
            await self.end(error)
            raise
        except TrainerClosedError as error:
            await self.close_for(error)
            raise
        except CorruptArtifactError:
            raise
        except StoreError as error:
            # The session may have applied operations that the run's folder doesn't record.
            reason = TrainerStateLostError(str(error))
            await self.end(reason)
            raise reason from error

    def _check_order(self, key: OperationKey) -> None:
        if key.operation not in STEP_OPERATIONS:
            return
        if key.step <= self._last_step:
            raise TrainerStateLostError(f"{key} comes too late: step {self._last_step} was taken")
        if key.operation != "forward_backward":
            self._last_step = key.step

    def _forget_before(self, step: int) -> None:
        """Drop results of earlier steps, which are committed."""
        for key in [key for key in self._operations if key.step < step - 1]:
            del self._operations[key]
