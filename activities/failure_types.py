"""Failures as workflows read them: one enum of what they decide by.

Owns the kinds, what a failed activity said, and that no secret crosses with a failure, its causes
or their tracebacks. Doesn't own which exception becomes which kind (errors.py) or what a rollout
failure means (everburn/rollouts/failures.py).
"""

from enum import StrEnum

from temporalio.api.failure.v1 import Failure
from temporalio.converter import DefaultFailureConverter, PayloadConverter
from temporalio.exceptions import ActivityError, ApplicationError

from everburn.secrets import redacted


class FailureKind(StrEnum):
    """The `type` of a failure that workflows decide by. Any other type is an exception's name."""

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
    """The lease has ended because the service answered an operation with a failure."""
    QUOTA = "QuotaExceededError"
    KEY_REFUSED = "KeyRefusedError"
    CAPACITY = "TrainerCapacityError"
    UNAVAILABLE = "TrainerUnavailableError"
    REJECTED = "TrainerRejectedError"
    UNFIT = "TrainerUnfitError"
    NOT_PROVISIONED = "NotProvisioned"
    """Trainer job and deployment weren't available in the time that the configuration allows."""
    PROMOTION_REFUSED = "PromotionRefusedError"
    """No model was made; after other errors of a promotion there may be one."""
    MODEL_ID_TAKEN = "ModelIdTakenError"


_KINDS = frozenset(FailureKind)
LEASE_CLOSED = frozenset({FailureKind.QUOTA, FailureKind.KEY_REFUSED})
"""The lease has ended, and no other is available before a person has fixed the cause."""
WAITS_FOR = {
    FailureKind.SNAPSHOT_GONE: "its policy version to be served again",
    FailureKind.WORKER_UNFIT: "a worker that can import its code",
    FailureKind.WORKER_SHUTDOWN: "another worker",
    FailureKind.STORE: "the store",
    FailureKind.STORE_FULL: "space in the store",
    FailureKind.CAPACITY: "capacity",
    FailureKind.UNAVAILABLE: "the training service",
}
"""What another attempt waits for after a failure that says nothing about the task."""
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
    text = redacted(str(error) or type(error).__name__)
    if where and where not in text:
        text = f"{where}: {type(error).__name__}: {text}"
    return ApplicationError(
        text[:MAX_MESSAGE], *details, type=kind or _name_of(error), non_retryable=not retryable
    )


def _name_of(error: BaseException) -> str:
    """The exception's name; with its module where user code gave it the name of a kind."""
    name, module = type(error).__name__, type(error).__module__
    is_foreign = name in _KINDS and not module.startswith("everburn.")
    return f"{module}.{name}" if is_foreign else name


def message_of(error: ActivityError) -> str:
    """What the failed activity said."""
    return getattr(error.cause, "message", None) or str(error.cause)


def kind_of(cause: BaseException | None) -> FailureKind | None:
    """The kind of an activity's failure, by its cause; None if workflows don't decide by it."""
    kind = cause.type if isinstance(cause, ApplicationError) else None
    return FailureKind(kind) if kind in _KINDS else None


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
