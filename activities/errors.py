"""How errors leave activities: one table from exception types to failures, applied in one place.

An error becomes an ApplicationError, either retryable or final, with a type that workflows act on
(failure_types.py). An error without a rule is final. User code may raise anything, so the domain
classifies its errors (everburn/rollouts/failures.py). Doesn't own a workflow's reaction to a
failure.
"""

import asyncio
from dataclasses import dataclass
from typing import Any

from temporalio import activity
from temporalio.exceptions import ApplicationError, CancelledError
from temporalio.service import RPCError
from temporalio.worker import ActivityInboundInterceptor, ExecuteActivityInput, Interceptor

from activities.failure_types import FailureKind, application_error
from activities.messages import RowsFailed, UserCodeOrder
from everburn.records.publications import StaleLeaseError
from everburn.records.store import CorruptArtifactError, StoreError, StoreFullError
from everburn.rollouts.failures import Failure, RowsFailedError, classify, decisive_error
from everburn.trainers.protocol import (
    KeyRefusedError,
    ModelIdTakenError,
    PromotionRefusedError,
    QuotaExceededError,
    TrainerCapacityError,
    TrainerFailedError,
    TrainerRejectedError,
    TrainerStateLostError,
    TrainerUnavailableError,
    TrainerUnfitError,
)
from everburn.usercode.entrypoints import EntrypointError
from everburn.usercode.loop import LoopBlockedError


@dataclass(frozen=True)
class Rule:
    """kind: the failure's type; None means the exception's name. retryable: Temporal retries, as
    far as the activity's retry policy allows."""

    kind: FailureKind | None
    retryable: bool = False


FINAL = Rule(None)
RULES: dict[type[BaseException], Rule] = {
    # The first matching entry applies.
    CorruptArtifactError: FINAL,
    StoreFullError: Rule(FailureKind.STORE_FULL, retryable=True),
    StoreError: Rule(FailureKind.STORE, retryable=True),
    RPCError: Rule(None, retryable=True),
    LoopBlockedError: Rule(FailureKind.WORKER_SHUTDOWN, retryable=True),
    EntrypointError: Rule(FailureKind.WORKER_UNFIT, retryable=True),
    StaleLeaseError: Rule(FailureKind.TRAINER_STATE_LOST),
    TrainerFailedError: Rule(FailureKind.TRAINER_FAILED),
    TrainerStateLostError: Rule(FailureKind.TRAINER_STATE_LOST),
    TrainerCapacityError: Rule(FailureKind.CAPACITY, retryable=True),
    TrainerUnavailableError: Rule(FailureKind.UNAVAILABLE, retryable=True),
    TrainerRejectedError: Rule(FailureKind.REJECTED),
    TrainerUnfitError: Rule(FailureKind.UNFIT),
    QuotaExceededError: Rule(FailureKind.QUOTA),
    KeyRefusedError: Rule(FailureKind.KEY_REFUSED),
    PromotionRefusedError: Rule(FailureKind.PROMOTION_REFUSED),
    ModelIdTakenError: Rule(FailureKind.MODEL_ID_TAKEN),
}
CLASSIFIED: dict[Failure, Rule] = {
    "recoverable": Rule(FailureKind.RECOVERABLE, retryable=True),
    "snapshot_gone": Rule(FailureKind.SNAPSHOT_GONE, retryable=True),
    "store_failed": RULES[StoreError],
    "store_full": RULES[StoreFullError],
}
"""For errors of user code, classified by their cause chain; RULES applies to the fatal ones."""


class ErrorInterceptor(Interceptor):
    def intercept_activity(self, next: ActivityInboundInterceptor) -> ActivityInboundInterceptor:
        return _Translating(next)


class _Translating(ActivityInboundInterceptor):
    async def execute_activity(self, input: ExecuteActivityInput) -> Any:
        order = input.args[0] if input.args else None
        try:
            return await self.next.execute_activity(input)
        except (ApplicationError, CancelledError):
            raise
        except asyncio.CancelledError as error:
            if isinstance(order, UserCodeOrder) and activity.is_worker_shutdown():
                kind = FailureKind.WORKER_SHUTDOWN
                raise application_error(error, kind=kind, retryable=True) from error
            raise
        except Exception as error:
            failure = failure_of(error, order)
            raise failure from failure.__cause__


def failure_of(error: Exception, order: object) -> ApplicationError:
    """Translate an activity's error into a failure. order: the activity's argument."""
    details: list[RowsFailed] = []
    where, cause, rule = "", error, None
    if isinstance(order, UserCodeOrder):
        where = order.where
        if isinstance(error, RowsFailedError):
            details, where, error = [RowsFailed(failed=error.failed)], error.where, error.first
        cause = decisive_error(error)
        rule = CLASSIFIED.get(classify(cause))
    rule = rule or _rule(cause)
    failure = application_error(
        cause, *details, kind=rule.kind, where=where, retryable=rule.retryable
    )
    failure.__cause__ = cause
    return failure


def _rule(error: Exception) -> Rule:
    return next((rule for kind, rule in RULES.items() if isinstance(error, kind)), FINAL)
