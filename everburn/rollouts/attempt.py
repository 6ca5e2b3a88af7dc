"""One attempt at a completion: one call of the user's rollout function, and everything around it.

Owns the attempt's call log, deadline, sandboxes, validation and the write of its result:

| when the rollout function | the attempt |
| --- | --- |
| returns | reaps its sandboxes, validates the result and writes it to its destination |
| returns, and the caller is cancelled | does the same, then lets the cancellation through |
| raises | reaps its sandboxes and raises the same; an error with `sample_afresh` deletes the log |
| exceeds `rollout_timeout` | cancels it, as if it had raised TimeoutError |
| cancels itself | continues as if it had raised SelfCancelledError |
| is cancelled by the caller | reaps its sandboxes, even if cancelled again, then is cancelled |
| blocks, or its worker dies | is lost; the next attempt reaps its sandboxes and uses its log |

Doesn't own retries (the PromptGroup workflow), the thread and how a blocked one is noticed
(usercode/loop.py), or what is written (destinations.py).
"""

import logging
import time
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from everburn.records.store import StoreError, through_outages
from everburn.rollouts.call_log import CallLog
from everburn.rollouts.contract import RolloutRun
from everburn.rollouts.dataset import Row
from everburn.rollouts.failures import needs_fresh_samples
from everburn.rollouts.function import RolloutFunction
from everburn.rollouts.sampling import CompletionScope
from everburn.rollouts.sandboxes import reap_at_end, reap_earlier, require_own
from everburn.rollouts.validation import require_routing, validate_rollout, written_info
from everburn.usercode.deadlines import shielded, user_timeout
from everburn.usercode.threads import to_thread

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

log = logging.getLogger(__name__)

STORE_PATIENCE = 30.0
"""Seconds to wait for a failing or full store before the function is called, and beyond its
deadline. The activity's timeout is longer: an attempt that gives up by itself isn't counted as a
failure, one that is timed out is."""


@dataclass(frozen=True, slots=True)
class FinishedRollout:
    """A valid result of a rollout function. info: as files hold it. seconds: of the call."""

    run: RolloutRun
    prompt: str
    answer: str
    info: dict[str, Any]
    seconds: float


class Destination(Protocol[T_co]):
    """Where a completion's result is written. Its methods block."""

    def log_keys(self) -> list[str]:
        """The key of the attempt's call log, then those of earlier attempts' logs."""
        ...

    def find(self) -> T_co | None:
        """The result that an earlier attempt wrote."""
        ...

    def write(self, scope: CompletionScope, rollout: FinishedRollout | None) -> T_co:
        """Write a result, None if the function dropped the completion; returns `run`'s result."""
        ...


class RolloutAttempt(Generic[T]):
    """Runs a completion once; see the table above."""

    def __init__(
        self, function: RolloutFunction, scope: CompletionScope, destination: Destination[T]
    ) -> None:
        self._function = function
        self._store, self._config = function.store, function.config
        self._scope = scope
        self._destination = destination
        self._store_deadline = time.monotonic() + self._config.rollout_timeout + STORE_PATIENCE

    async def run(self, row: Row, context: dict[str, Any]) -> T:
        """The result, which an earlier attempt may have written.

        Raises:
            InvalidRolloutError, TimeoutError, SelfCancelledError, SupersededError, StoreError, and
            whatever the function raises.
        """
        found = await through_outages(self._destination.find, patience=STORE_PATIENCE)
        if found is not None:
            return found
        if self._config.record_sampling_calls:
            self._scope.log = await to_thread(self._open_log)
        await reap_earlier(self._store, self._scope)
        started = time.monotonic()
        try:
            result = await self._call(row, context)
        except BaseException as error:
            await shielded(self._clean_up(error))
            raise
        return await shielded(self._keep(result, time.monotonic() - started))

    async def _call(self, row: Row, context: dict[str, Any]) -> Any:
        with self._function.sampler.serving(self._scope):
            async with user_timeout(self._config.rollout_timeout, "rollout_timeout"):
                return await self._function(row, context)

    async def _clean_up(self, error: BaseException) -> None:
        await self._reap()
        if needs_fresh_samples(error):
            await to_thread(self._scope.delete_log)

    async def _keep(self, result: Any, seconds: float) -> T:
        try:
            await require_own(self._store, self._scope, self._patience)
        finally:
            await self._reap()
        rollout = self._validated(result, seconds)
        write = self._destination.write
        return await through_outages(write, self._scope, rollout, patience=self._patience)

    async def _reap(self) -> None:
        """Reap, unless the store fails, which must not cost the result: the end of the group reaps
        again."""
        try:
            await reap_at_end(self._store, self._scope.attempt)
        except StoreError as error:
            log.warning("%s: sandboxes not reaped: %s", self._scope.where, error)

    def _validated(self, result: Any, seconds: float) -> FinishedRollout | None:
        if result is None:
            return None
        where, function = self._scope.where, self._function
        run = validate_rollout(result, where, function.vocab_size)
        if self._config.router_replay:
            require_routing(run, where)
        info = written_info(run, where)
        prompt, answer = function.prompt_text(run), function.answer_text(run)
        return FinishedRollout(run, prompt, answer, info, seconds)

    @property
    def _patience(self) -> float:
        """Seconds left to wait for the store."""
        return self._store_deadline - time.monotonic()

    def _open_log(self) -> CallLog:
        own, *earlier = self._destination.log_keys()
        return CallLog(self._store, own, earlier)
