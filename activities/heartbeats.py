"""Heartbeats without the activity's help.

Every activity that has a heartbeat timeout is heartbeaten from the worker's own event loop for as
long as it runs. User code runs on another loop (everburn/usercode/loop.py), so it can block for
seconds without losing its activity. Heartbeats say that the process lives, nothing more: finished
work is in the store. Their answers bring cancellations, so that a call that nobody wants any more
ends within one beat.
"""

import asyncio
import contextlib
from datetime import timedelta
from typing import Any

from temporalio import activity
from temporalio.worker import (
    ActivityInboundInterceptor,
    ExecuteActivityInput,
    Interceptor,
)

THROTTLE = timedelta(seconds=1)
"""For all workers, `max_heartbeat_throttle_interval`. Left to itself the SDK passes on a heartbeat
per 0.8 timeouts: a worker that stands still for the rest of one is taken for dead, and a cancelled
call runs on for as long."""


class HeartbeatInterceptor(Interceptor):
    """Heartbeats three times per timeout."""

    def intercept_activity(self, next: ActivityInboundInterceptor) -> ActivityInboundInterceptor:
        return _Heartbeating(next)


class _Heartbeating(ActivityInboundInterceptor):
    async def execute_activity(self, input: ExecuteActivityInput) -> Any:
        timeout = activity.info().heartbeat_timeout
        if timeout is None:
            return await self.next.execute_activity(input)
        beating = asyncio.create_task(_beat(timeout / 3))
        try:
            return await self.next.execute_activity(input)
        finally:
            beating.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await beating


async def _beat(interval: timedelta) -> None:
    # The first one after an interval: most activities end before, and send none.
    while True:
        await asyncio.sleep(interval.total_seconds())
        activity.heartbeat()
