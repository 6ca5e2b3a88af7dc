"""How domain errors cross into Temporal: as ApplicationErrors whose type a workflow can read.

Owns the type names that workflows decide by, and which errors are never retried. Doesn't own what
a rollout failure means (everburn/failures.py).
"""

from collections.abc import Iterator
from contextlib import contextmanager

from temporalio.exceptions import ApplicationError, CancelledError

from everburn.secrets import redacted

RECOVERABLE = "RecoverableRolloutError"
SNAPSHOT_GONE = "SnapshotGoneError"
WORKER_UNFIT = "EntrypointError"
"""This worker can't import the user's module; another may."""
TRAINER_STATE_LOST = "TrainerStateLost"
LEASE_CLOSED = frozenset({"QuotaExceededError", "KeyRefusedError"})
"""The lease has ended, and no other is to be had before a person has mended the cause."""
QUOTA = "QuotaExceededError"
CAPACITY = "TrainerCapacityError"
REJECTED = "TrainerRejectedError"
WORKER_SHUTDOWN = "WorkerShutdown"

MAX_MESSAGE = 1000
"""Characters of an error text that enter history; the worker's log has it whole."""


def application_error(
    error: BaseException, *, kind: str | None = None, where: str = "", retryable: bool = False
) -> ApplicationError:
    """A domain error as Temporal carries it. Its type is `kind`, else the exception's name;
    `where` is put in front of a text that doesn't name its place itself."""
    name = kind or type(error).__name__
    text = redacted(str(error) or type(error).__name__)
    if where and where not in text:
        text = f"{where}: {type(error).__name__}: {text}"
    return ApplicationError(text[:MAX_MESSAGE], type=name, non_retryable=not retryable)


@contextmanager
def final_errors(*retryable: type[Exception]) -> Iterator[None]:
    """Errors of the block aren't retried, except those of the given types."""
    try:
        yield
    except (ApplicationError, CancelledError):
        raise
    except Exception as error:
        raise application_error(error, retryable=isinstance(error, retryable)) from error
