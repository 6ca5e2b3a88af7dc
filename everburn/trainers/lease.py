"""A lease: one trainer session, made safe to drive by activities that run at least once.

Owns single flight per operation, the order of submissions, and the refusal of superseded epochs.
Lives and dies with its process, as the session does. Doesn't own how a session works (Trainer)
or who gets the next lease (the TrainerLease workflow).
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from everburn.records.publications import StaleEpochError
from everburn.records.store import CorruptArtifactError, StoreError
from everburn.trainers.protocol import Trainer, TrainerClosedError, TrainerStateLostError

T = TypeVar("T")

STEPPING = frozenset({"forward_backward", "optim_step", "replay"})
"""Operations that belong to one step, and must not come after it."""


class OperationKey(NamedTuple):
    """What an operation is, whoever asks for it and however often."""

    step: int
    operation: str
    part: int = 0


@dataclass
class Lease:
    """The session held under `epoch`; epochs of a run only grow."""

    epoch: int
    trainer: Trainer
    _flights: dict[OperationKey, "asyncio.Task[Any]"] = field(default_factory=dict)
    _turn: tuple[int, int] = (0, 0)
    _turns: asyncio.Condition = field(default_factory=asyncio.Condition)
    _over: int = 0
    """The last step whose update was asked for."""
    _end: asyncio.Event = field(default_factory=asyncio.Event)
    _ended: TrainerStateLostError | None = None
    released: bool = False
    """Whether it ended because the run gave it back."""
    closed: TrainerClosedError | None = None
    """Why no other is to be had before a person has mended that, where it ended with this."""

    async def once(self, epoch: int, key: OperationKey, operation: Callable[[], Awaitable[T]]) -> T:
        """Run an operation unless it has run or is running; then join it and share its outcome.

        The operation outlives its callers: a cancelled activity doesn't undo what was sent.

        Raises:
            StaleEpochError: the caller acts for a superseded lease.
            TrainerStateLostError: the lease has ended, or the operation comes after its step: the
                server sends activities again that a reset run was waiting for.
            TrainerClosedError: it ends with this: the account may not train.
            CorruptArtifactError: a file of the run is unusable, for any lease.
        """
        if epoch != self.epoch:
            raise StaleEpochError(f"{key} is for epoch {epoch}; this lease is epoch {self.epoch}")
        if self._ended is not None:
            raise self._ended
        flight = self._flights.get(key)
        if flight is None:
            self._check_order(key)
            flight = asyncio.ensure_future(self._fly(operation))
            self._flights[key] = flight
            self._forget_before(key.step)
        return await asyncio.shield(flight)

    async def in_turn(self, step: int, index: int, send: Callable[[], Awaitable[T]]) -> T:
        """Send submission `index` of `step` after those before it, and wait for its outcome.

        Gradients are added up in the order of sending, so that a replay of the ledger adds them
        in the same order, bit for bit. Outcomes may be pending together.
        """
        async with self._turns:
            if self._turn[0] != step:
                self._turn = (step, 0)
            await self._turns.wait_for(lambda: self._ended or self._turn == (step, index))
            if self._ended is not None:
                raise self._ended
            outcome = send()
            self._turn = (step, index + 1)
            self._turns.notify_all()
        return await outcome

    async def release(self) -> None:
        """The run doesn't need the lease any more: end it, and close the session."""
        self.released = self._ended is None
        await self.end(TrainerStateLostError(f"lease {self.epoch} was released"))
        await self.trainer.close()

    async def wait_ended(self, timeout: float) -> None:
        """Return when the lease has ended, or after `timeout` seconds."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._end.wait(), timeout)

    async def end(self, reason: TrainerStateLostError) -> None:
        """Refuse everything from now on, with `reason`."""
        self._ended = self._ended or reason
        self._end.set()
        async with self._turns:
            self._turns.notify_all()

    async def close_for(self, reason: TrainerClosedError) -> None:
        """End it, and tell the run that no other is to be had."""
        self.closed = reason
        await self.end(TrainerStateLostError(str(reason)))

    @property
    def ended(self) -> TrainerStateLostError | None:
        return self._ended

    async def _fly(self, operation: Callable[[], Awaitable[T]]) -> T:
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
            # Whatever the session has done by now, the run's folder doesn't know.
            lost = TrainerStateLostError(str(error))
            await self.end(lost)
            raise lost from error

    def _check_order(self, key: OperationKey) -> None:
        if key.operation not in STEPPING:
            return
        if key.step <= self._over:
            raise TrainerStateLostError(f"{key} comes too late: step {self._over} was taken")
        if key.operation != "forward_backward":
            self._over = key.step

    def _forget_before(self, step: int) -> None:
        """Results of earlier steps are committed: nobody asks for them again."""
        for key in [key for key in self._flights if key.step < step - 1]:
            del self._flights[key]
