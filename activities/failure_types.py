"""Failures as workflows read them: one enum of kinds.

Owns the kinds, the message of a failed activity, and the redaction of secrets from failures, their
causes and tracebacks. Doesn't own the mapping from exceptions to kinds (errors.py) or the
classification of rollout failures (everburn/rollouts/failures.py).
"""

from enum import StrEnum

from temporalio.api.failure.v1 import Failure
from temporalio.converter import DefaultFailureConverter, PayloadConverter
from temporalio.exceptions import ActivityError, ApplicationError

from everburn.secrets import redacted


class FailureKind(StrEnum):
    """The failure types that workflows act on. Any other type is an exception's name."""

    RECOVERABLE = "RecoverableRolloutError"
    SNAPSHOT_GONE = "SnapshotGoneError"
    WORKER_UNFIT = "EntrypointError"
    """This worker can't import the user's module; another may."""
    WORKER_SHUTDOWN = "WorkerShutdown"
    WORKER_FAILED = "WorkerFailed"
    STORE = "StoreError"
    STORE_FULL = "StoreFullError"
    TRAINER_STATE_LOST = "TrainerStateLost"
    TRAINER_FAILED = "TrainerFailed"
    """The lease ended because an operation failed at the service."""
    QUOTA = "QuotaExceededError"
    KEY_REFUSED = "KeyRefusedError"
    CAPACITY = "TrainerCapacityError"
    UNAVAILABLE = "TrainerUnavailableError"
    REJECTED = "TrainerRejectedError"
    UNFIT = "TrainerUnfitError"
    NOT_PROVISIONED = "NotProvisioned"
    """Trainer job and deployment weren't ready within the configured time."""
    PROMOTION_REFUSED = "PromotionRefusedError"
    """No model was created; other promotion errors leave that open."""
    MODEL_ID_TAKEN = "ModelIdTakenError"


_KINDS = frozenset(FailureKind)
LEASE_CLOSED = frozenset({FailureKind.QUOTA, FailureKind.KEY_REFUSED})
"""The lease has ended, and none is available until a person has fixed the cause."""
WAITS_FOR = {
    FailureKind.SNAPSHOT_GONE: "its policy version to be served again",
    FailureKind.WORKER_UNFIT: "a worker that can import its code",
    FailureKind.WORKER_SHUTDOWN: "another worker",
    FailureKind.STORE: "the store",
    FailureKind.STORE_FULL: "space in the store",
    FailureKind.CAPACITY: "capacity",
    FailureKind.UNAVAILABLE: "the training service",
}
"""What a retry waits for, after a failure that isn't caused by the task."""
MAX_MESSAGE = 1000
"""Maximum characters of an error text in history; the worker's log has the full text."""


def application_error(
    error: BaseException,
    *details: object,
    kind: str | None = None,
    where: str = "",
    retryable: bool = False,
) -> ApplicationError:
    """Convert a domain error for Temporal. Its type is `kind`, or else the exception's name;
    `where` is prepended if the text doesn't contain it."""
    text = redacted(str(error) or type(error).__name__)
    if where and where not in text:
        text = f"{where}: {type(error).__name__}: {text}"
    return ApplicationError(
        text[:MAX_MESSAGE], *details, type=kind or _name_of(error), non_retryable=not retryable
    )


def _name_of(error: BaseException) -> str:
    """The exception's name, qualified by its module if a foreign exception has a kind's name."""
    name, module = type(error).__name__, type(error).__module__
    is_foreign = name in _KINDS and not module.startswith("everburn.")
    return f"{module}.{name}" if is_foreign else name


def message_of(error: ActivityError) -> str:
    """The error text of a failed activity."""
    return getattr(error.cause, "message", None) or str(error.cause)


def kind_of(cause: BaseException | None) -> FailureKind | None:
    """The kind of an activity's failure, from its cause; None for a type that isn't a kind."""
    kind = cause.type if isinstance(cause, ApplicationError) else None
    return FailureKind(kind) if kind in _KINDS else None


class RedactingFailureConverter(DefaultFailureConverter):
    """Removes the process's secrets from failures: a cause raised by a library may quote a
    request's headers."""

    def to_failure(
        self, exception: BaseException, payload_converter: PayloadConverter, failure: Failure
    ) -> None:
        super().to_failure(exception, payload_converter, failure)
        each: Failure | None = failure
        while each is not None:
            each.message = redacted(each.message)
            each.stack_trace = redacted(each.stack_trace)
            each = each.cause if each.HasField("cause") else None
