"""Automatic heartbeats for every activity that has a heartbeat timeout.

They are sent from the worker's own event loop. User code runs on another loop
(everburn/usercode/loop.py), so it can block for seconds without losing its activity. A heartbeat
only says that the process lives: finished work is in the store. Its response delivers
cancellations, so a cancelled activity ends within one interval.
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
"""`max_heartbeat_throttle_interval` of all workers. By default the SDK sends one heartbeat per 0.8
timeouts: a worker that pauses for the remaining 0.2 is presumed dead, and a cancelled call runs on
for up to 0.8."""


class HeartbeatInterceptor(Interceptor):
    """Sends three heartbeats per timeout."""

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
    # Sleep first: most activities end before the first heartbeat.
    while True:
        await asyncio.sleep(interval.total_seconds())
        activity.heartbeat()
