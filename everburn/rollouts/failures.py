"""Classification of exceptions from rollout functions.

Owns the failure policy's kinds. Doesn't own retries (workflows/children/) or the breaker
(scheduling/breaker.py).
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
    """The sampler weights of a version died with their session. The call is repeated once the
    version is published again; it doesn't count as a failure of the task."""


class RowsFailedError(RuntimeError):
    """Held-out rows failed. failed: how many failed by their own fault. first: the worst row's
    error, which classifies this one. where: that row's name."""

    def __init__(self, failed: int, first: Exception, where: str) -> None:
        super().__init__(f"{failed} rows failed, one for: {where}: {first}")
        self.failed = failed
        self.first = first
        self.where = where


def classify(error: BaseException) -> Failure:
    """The kind of an error: recoverable (retried, then dropped), a missing snapshot, a failing or
    full store (retried), or fatal.

    The cause chain counts: a library's own error around a timeout is still a timeout. An
    ExceptionGroup is classified by its worst member.
    """
    return _classified(error, frozenset())


def _classified(error: BaseException, around: frozenset[int]) -> Failure:
    """around: ids of the errors whose causes or members lead here; the chain may be circular."""
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
            # Its cause is what the user's module raised during its import.
            return "fatal"
        if _is_recoverable(current):
            return "recoverable"
        current = current.__cause__
    return "fatal"


def decisive_error(error: Exception) -> Exception:
    """For an ExceptionGroup, the first member of its kind; any other error itself."""
    while isinstance(error, ExceptionGroup):
        error = min(error.exceptions, key=lambda each: WORST_FIRST.index(classify(each)))
    return error


def needs_fresh_samples(error: BaseException) -> bool:
    """Whether the error, or a member of a group, rejects the completion's samples."""
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
