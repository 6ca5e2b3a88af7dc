"""Executes activities without a worker, with the interceptor that translates their errors."""

from collections.abc import Callable
from typing import Any

from temporalio.testing import ActivityEnvironment
from temporalio.worker import ActivityInboundInterceptor, ExecuteActivityInput

from activities.errors import ErrorInterceptor
from activities.trainer_operations import LeaseOperations
from everburn.records.ids import (
    LeaseKey,
    RunRef,
)
from everburn.trainers.lease import Lease
from everburn.trainers.protocol import Trainer
from everburn.usercode.limits import LimitedLoop


class _Call(ActivityInboundInterceptor):
    """The last interceptor of the chain."""

    def __init__(self) -> None:
        """Without a next interceptor."""

    async def execute_activity(self, input: ExecuteActivityInput) -> Any:
        return await input.fn(*input.args)


async def execute(
    activity: Callable[..., Any], *args: Any, environment: ActivityEnvironment | None = None
) -> Any:
    """Execute an activity; returns or raises what a worker would report."""
    chain = ErrorInterceptor().intercept_activity(_Call())
    call = ExecuteActivityInput(activity, args, executor=None, headers={})
    return await (environment or ActivityEnvironment()).run(chain.execute_activity, call)


def lease_operations(trainer: Trainer, run: RunRef) -> LeaseOperations:
    """The operations of the run's first lease."""
    return LeaseOperations(Lease(LeaseKey(0, 1), trainer), run, lambda: LimitedLoop("batches"))
