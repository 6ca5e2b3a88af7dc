"""How domain errors cross into Temporal: as ApplicationErrors whose type a workflow can read.

Owns the type names that workflows decide by, what they read of a failed activity, which errors are
never retried, and that no secret crosses with an error, its causes or their tracebacks. Doesn't own
what a rollout failure means (everburn/rollouts/failures.py).
"""

from collections.abc import Iterator
from contextlib import contextmanager

from temporalio.api.failure.v1 import Failure
from temporalio.converter import DefaultFailureConverter, PayloadConverter
from temporalio.exceptions import ActivityError, ApplicationError, CancelledError

from everburn.records.store import CorruptArtifactError
from everburn.secrets import redacted

RECOVERABLE = "RecoverableRolloutError"
SNAPSHOT_GONE = "SnapshotGoneError"
WORKER_UNFIT = "EntrypointError"
"""This worker can't import the user's module; another may."""
STORE = "StoreError"
STORE_FAILED = "StoreFailed"
"""Of what ran beside user code: its own errors may well be called StoreError."""
STORE_FULL = "StoreFullError"
TRAINER_STATE_LOST = "TrainerStateLost"
TRAINER_FAILED = "TrainerFailed"
"""The lease has ended because the service answered an operation with a failure."""
LEASE_CLOSED = frozenset({"QuotaExceededError", "KeyRefusedError"})
"""The lease has ended, and no other is to be had before a person has mended the cause."""
QUOTA = "QuotaExceededError"
CAPACITY = "TrainerCapacityError"
UNAVAILABLE = "TrainerUnavailableError"
REJECTED = "TrainerRejectedError"
UNFIT = "TrainerUnfitError"
NOT_PROVISIONED = "NotProvisioned"
"""Trainer job and deployment aren't to be had in the time that the configuration gives them."""
PROMOTION_REFUSED = "PromotionRefusedError"
"""No model was made, which of other errors of a promotion isn't known."""
MODEL_ID_TAKEN = "ModelIdTakenError"
WORKER_SHUTDOWN = "WorkerShutdown"

MAX_MESSAGE = 1000
"""Characters of an error text that enter history; the worker's log has it whole."""


def application_error(
    error: BaseException,
    *details: object,
    kind: str | None = None,
    where: str = "",
    retryable: bool = False,
) -> ApplicationError:
    """A domain error as Temporal carries it. Its type is `kind`, else the exception's name;
    `where` is put in front of a text that doesn't name its place itself."""
    name = kind or type(error).__name__
    text = redacted(str(error) or type(error).__name__)
    if where and where not in text:
        text = f"{where}: {type(error).__name__}: {text}"
    return ApplicationError(text[:MAX_MESSAGE], *details, type=name, non_retryable=not retryable)


@contextmanager
def final_errors(*retryable: type[Exception]) -> Iterator[None]:
    """Errors of the block aren't retried, except those of the given types; a file that is corrupt
    stays so, whatever else of the store is worth another attempt."""
    try:
        yield
    except (ApplicationError, CancelledError):
        raise
    except Exception as error:
        worth_it = isinstance(error, retryable) and not isinstance(error, CorruptArtifactError)
        raise application_error(error, retryable=worth_it) from error


def message_of(error: ActivityError) -> str:
    """What the activity said that failed."""
    return getattr(error.cause, "message", None) or str(error.cause)


class RedactingFailureConverter(DefaultFailureConverter):
    """Failures as Temporal keeps them, without the secrets of the process where they happened: a
    library's error, which travels along as a cause, may repeat a request's headers."""

    def to_failure(
        self, exception: BaseException, payload_converter: PayloadConverter, failure: Failure
    ) -> None:
        super().to_failure(exception, payload_converter, failure)
        each: Failure | None = failure
        while each is not None:
            each.message = redacted(each.message)
            each.stack_trace = redacted(each.stack_trace)
            each = each.cause if each.HasField("cause") else None
