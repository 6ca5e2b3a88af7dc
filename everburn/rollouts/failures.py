"""What an exception from a rollout function means for the run.

Owns the classification of scheduling.md's failure policy. Doesn't own retries or the breaker.
"""

import asyncio
from typing import Literal

from everburn.records.store import CorruptArtifactError, StoreError, StoreFullError
from everburn.rollouts.contract import RecoverableRolloutError
from everburn.trainers.errors import status_of
from everburn.usercode.entrypoints import EntrypointError

Failure = Literal["recoverable", "snapshot_gone", "store_failed", "store_full", "fatal"]
WORST_FIRST: tuple[Failure, ...] = (
    "fatal",
    "recoverable",
    "snapshot_gone",
    "store_failed",
    "store_full",
)

_TRANSIENT_STATUS = frozenset({408, 429, *range(500, 600)})
_TRANSPORT_ERRORS = frozenset(
    {
        # Client libraries of the field name these alike; naming them spares importing them.
        "TransportError",
        "TimeoutException",
        "APIConnectionError",
        "APITimeoutError",
        "ClientConnectionError",
        "ServerDisconnectedError",
        "RemoteProtocolError",
        "IncompleteRead",
        "ProtocolError",
        "DeploymentSamplerTimeoutError",
    }
)


class SnapshotGoneError(RuntimeError):
    """The sampler weights of a version died with their session. Says nothing about the task: the
    call is repeated once the version is published again, and counts for nothing."""


class RowsFailedError(RuntimeError):
    """Held-out rows failed. failed: how many, without those whose failure says nothing about them.
    first: why one did; what that means for the run is what this does. where: names that one."""

    def __init__(self, failed: int, first: Exception, where: str) -> None:
        super().__init__(f"{failed} rows failed, one for: {where}: {first}")
        self.failed = failed
        self.first = first
        self.where = where


def classify(error: BaseException) -> Failure:
    """Recoverable (retried, then dropped), for want of its snapshot, of the store or of space there
    (retried), or fatal.

    The cause chain counts: a library's own error around a timeout is still a timeout. A group, as
    an asyncio.TaskGroup raises it, is what the worst of its errors is.
    """
    return _classified(error, frozenset())


def _classified(error: BaseException, around: frozenset[int]) -> Failure:
    """around: ids of the errors whose causes or members lead here; they may do so in a circle."""
    current: BaseException | None = error
    while current is not None and id(current) not in around:
        around |= {id(current)}
        if isinstance(current, BaseExceptionGroup):
            members = [_classified(member, around) for member in current.exceptions]
            return min(members, key=WORST_FIRST.index)
        if isinstance(current, SnapshotGoneError):
            return "snapshot_gone"
        if isinstance(current, StoreFullError):
            return "store_full"
        if isinstance(current, CorruptArtifactError):
            return "fatal"
        if isinstance(current, StoreError):
            return "store_failed"
        if isinstance(current, EntrypointError):
            # Its cause is whatever the user's module raised as it was imported.
            return "fatal"
        if _is_recoverable(current):
            return "recoverable"
        current = current.__cause__
    return "fatal"


def telling(error: Exception) -> Exception:
    """Of a group, the error that makes it what it is to the run, the first if there are several;
    any other error itself."""
    while isinstance(error, ExceptionGroup):
        error = min(error.exceptions, key=lambda each: WORST_FIRST.index(classify(each)))
    return error


def needs_fresh_samples(error: Exception) -> bool:
    """Whether the error, or one of a group, says that the completion's samples won't do."""
    if isinstance(error, ExceptionGroup):
        return any(map(needs_fresh_samples, error.exceptions))
    return isinstance(error, RecoverableRolloutError) and error.sample_afresh


def _is_recoverable(error: BaseException) -> bool:
    if isinstance(
        error,
        RecoverableRolloutError | TimeoutError | asyncio.TimeoutError | ConnectionError,
    ):
        return True
    status = status_of(error)
    if status is not None:
        return status in _TRANSIENT_STATUS
    return any(base.__name__ in _TRANSPORT_ERRORS for base in type(error).__mro__)
