"""Running rollout functions: one runner per process and run.

Owns the setup of user code (tokenizer, sampler, rollout function), the call with its context and
deadline, validation and the written result. Doesn't own retries (the PromptGroup workflow), the
loop it runs on (usercode/loop.py) or what a group makes of it (learning/group.py).
"""

import copy
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, TypeVar

from everburn.config import RunConfig
from everburn.learning.rollout_file import CompletionRecord, write_rollout
from everburn.records.ids import GroupKey, RolloutOutcome, RolloutStatus, RunRef
from everburn.records.keys import (
    EVALUATION_ROWS_KEY,
    ROWS_KEY,
    call_log_key,
    completion_name,
    evaluation_log_key,
    evaluation_name,
    evaluation_row_key,
    rollout_key,
)
from everburn.records.run_folder import stored_config
from everburn.records.store import ArtifactStore, StoreError, through_outages, when_there_is_space
from everburn.rollouts.call_log import CallLog
from everburn.rollouts.contract import RolloutFn, RolloutRun, RolloutSetup
from everburn.rollouts.dataset import Position, Row, RowOrder, stored_rows
from everburn.rollouts.failures import needs_fresh_samples
from everburn.rollouts.reuse import EarlierAttempts, has_rollout, recorded_calls
from everburn.rollouts.sampling import CompletionScope, PolicySampler
from everburn.rollouts.sandboxes import Sandboxes, reap_at_end, reap_earlier, require_own
from everburn.rollouts.tokenizers import load_tokenizer, tokenizer_name
from everburn.rollouts.validation import (
    context_parameters,
    require_routing,
    validate_rollout,
    written_info,
)
from everburn.usercode.deadlines import shielded, user_timeout
from everburn.usercode.entrypoints import call, resolve
from everburn.usercode.threads import to_thread

T = TypeVar("T")

log = logging.getLogger(__name__)

STORE_PATIENCE = 30.0
"""Seconds that the store is waited for before a rollout, and beyond its deadline; its activity has
more, and counts where it hasn't given up by itself."""


@dataclass(frozen=True, slots=True)
class Finished:
    """What a rollout function returned, validated, and what was noted on the way. info: the
    rollout's, as files have it."""

    run: RolloutRun
    info: dict[str, Any]
    scope: CompletionScope
    seconds: float


class RolloutRunner:
    """The user's rollout function for one run in this process."""

    def __init__(self, run: RunRef) -> None:
        self.run = run
        self.store = ArtifactStore.of(run)
        self.config = stored_config(run)
        self._tokenizer = load_tokenizer(self.config)
        self._vocab_size = len(self._tokenizer)
        self._earlier = EarlierAttempts(self.store)
        self._sampler = PolicySampler(self.store, self.config, self._tokenizer)
        self._rollout_fn = make_rollout_fn(
            self.config, self._tokenizer, self._sampler, Sandboxes(self.store)
        )
        self._wanted = context_parameters(self._rollout_fn)

    async def complete(
        self, group: GroupKey, completion: int, version: int, tries: int = 0
    ) -> RolloutOutcome:
        """Run one completion of a row to its terminal record; finds an earlier attempt's.

        Its status is "succeeded", or "dropped" where the function returned None. tries: earlier
        attempts at it.

        Raises:
            InvalidRolloutError, TimeoutError, StoreError, and whatever the function raises.
        """
        earlier = await to_thread(self._earlier.unused, group)
        known = partial(has_rollout, self.store, group, completion, version, earlier)
        if await when_there_is_space(known, patience=STORE_PATIENCE):
            return RolloutOutcome(completion=completion, status="succeeded", reused=True)
        begun = time.monotonic()
        position = self.order.position(group.cursor)
        where = f"run {self.run.id} · row {group.cursor} · completion {completion}"
        context = {
            "cursor_index": group.cursor,
            "row_index": position.row_index,
            "epoch": position.epoch,
            "rollout_idx": completion,
            "sample_index": group.cursor * self.config.completions_per_prompt + completion,
            "end_of_epoch": position.end_of_epoch,
            "evaluation": False,
        }
        scope = CompletionScope(
            where,
            version,
            log=await to_thread(self._log_of, group, completion, earlier),
            run=self.run.id,
            name=completion_name(group, completion),
            tries=tries,
        )

        async def keep(finished: Finished | None) -> RolloutOutcome:
            if finished is None:
                return await _outcome(completion, "dropped", scope)
            record = self._record(finished, group, position, completion, version)
            key, left = rollout_key(group, completion), self._patience(begun)
            # Off the loop: compressing and writing would hold up other rollouts.
            await through_outages(
                write_rollout, self.store, key, record, finished.run, patience=left
            )
            return await _outcome(completion, "succeeded", scope)

        return await self._call(self._rows[position.row_index], context, scope, keep)

    async def evaluate(self, index: int, version: int, tries: int = 0) -> dict[str, Any]:
        """Evaluate one held-out row under a policy version; returns its sample, which is kept, and
        found by the next attempt.

        Raises:
            InvalidRolloutError, TimeoutError, StoreError, and whatever the function raises.
        """
        key = evaluation_row_key(version, index)
        known: dict[str, Any] | None = await to_thread(self.store.find_json, key)
        if known is not None:
            return known
        row = self._evaluation_rows[index]
        where = self.held_out(index)
        scope = self._evaluation_scope(where, version, f"row-{index}", tries)

        async def keep(finished: Finished | None) -> dict[str, Any]:
            if finished is None:
                raise ValueError(f"{where}: the rollout function returned None")
            sample = {
                "prompt": self._prompt(finished.run),
                "reward": float(finished.run.segments[0].reward),
                "info": finished.info,
                "answer": self._answer(finished.run),
                "output_tokens": finished.scope.output_tokens,
                "at_token_limit": finished.scope.at_token_limit,
            }
            await through_outages(partial(self.store.put_json, once=True), key, sample)
            if scope.log is not None:
                await scope.log.forget()
            return sample

        return await self._call(row, evaluation_context(index), scope, keep)

    def held_out(self, index: int) -> str:
        """The name of a held-out row in messages."""
        return f"run {self.run.id} · evaluation row {index}"

    def evaluation_rollout_fn(self, version: int, tries: int = 0) -> RolloutFn:
        """The rollout function as an evaluation function calls it: pinned to a version.

        Called with a row, and any of the context parameters in place of those that it gets
        otherwise: calls are numbered as held-out rows are. tries: earlier attempts at the
        evaluation, whose recorded sampling calls are used again.
        """
        numbers = itertools.count()

        async def rollout_fn(sample_prompt: Row, **context: Any) -> RolloutRun | None:
            number = next(numbers)
            where = f"run {self.run.id} · evaluation call {number}"
            scope = self._evaluation_scope(where, version, f"call-{number}", tries)
            given = evaluation_context(number) | context
            return await self._call(sample_prompt, given, scope, _run_of)

        return rollout_fn

    def _log_of(
        self, group: GroupKey, completion: int, earlier: Sequence[GroupKey]
    ) -> CallLog | None:
        recorded = recorded_calls(self.store, completion, earlier)
        return self._log(call_log_key(group, completion), recorded)

    def _evaluation_scope(self, where: str, version: int, part: str, tries: int) -> CompletionScope:
        return CompletionScope(
            where,
            version,
            self.config.evaluation_temperature,
            log=self._log(evaluation_log_key(version, part)),
            run=self.run.id,
            name=evaluation_name(version, part),
            tries=tries,
        )

    def _log(self, key: str, earlier: Sequence[str] = ()) -> CallLog | None:
        return CallLog(self.store, key, earlier) if self.config.record_sampling_calls else None

    @property
    def order(self) -> RowOrder:
        return RowOrder(len(self._rows), self.config.shuffle, self.config.seed)

    def row(self, cursor: int) -> Row:
        """The dataset row that a cursor points at."""
        return self._rows[self.order.position(cursor).row_index]

    def close(self) -> None:
        """Close the sampler's connections."""
        self._sampler.close()

    @cached_property
    def _rows(self) -> list[Row]:
        return stored_rows(self.run, ROWS_KEY)

    @cached_property
    def _evaluation_rows(self) -> list[Row]:
        return stored_rows(self.run, EVALUATION_ROWS_KEY)

    async def _call(
        self,
        row: Row,
        context: dict[str, Any],
        scope: CompletionScope,
        keep: Callable[[Finished | None], Awaitable[T]],
    ) -> T:
        """Call the rollout function, within its deadline, leave nothing of it behind, and keep what
        it came to.

        Whoever is cancelled once it has returned is so when that is kept: a server that was gone
        for a while gives up attempts which have ended, and nobody is to do it again.
        """
        try:
            return await self._within_sandboxes(row, context, scope, keep)
        except Exception as error:
            if needs_fresh_samples(error) and scope.log is not None:
                await scope.log.forget()
            raise

    async def _within_sandboxes(
        self,
        row: Row,
        context: dict[str, Any],
        scope: CompletionScope,
        keep: Callable[[Finished | None], Awaitable[T]],
    ) -> T:
        await reap_earlier(self.store, scope)
        started = time.monotonic()
        wanted = {name: value for name, value in context.items() if name in self._wanted}
        try:
            with self._sampler.serving(scope):
                # A copy: user code may change its row, and the next completion gets the same one.
                given = copy.deepcopy(row)
                async with user_timeout(self.config.rollout_timeout, "rollout_timeout"):
                    result = await self._rollout_fn(given, **wanted)
        except BaseException:
            # Also what is cancelled, perhaps twice, leaves nothing behind.
            await shielded(self._reap(scope))
            raise

        async def finish() -> T:
            try:
                await require_own(self.store, scope, self._patience(started))
            finally:
                await self._reap(scope)
            return await keep(self._finished(result, scope, time.monotonic() - started))

        return await shielded(finish())

    def _finished(self, result: Any, scope: CompletionScope, seconds: float) -> Finished | None:
        """What a rollout function returned, where that is valid; None for a draw that it drops."""
        if result is None:
            return None
        run = validate_rollout(result, scope.where, self._vocab_size)
        if self.config.router_replay:
            require_routing(run, scope.where)
        return Finished(run, written_info(run, scope.where), scope, seconds)

    def _patience(self, begun: float) -> float:
        """Seconds that are left to keep what a completion came to: a store that is full, or fails,
        says nothing about it."""
        return self.config.rollout_timeout + STORE_PATIENCE - (time.monotonic() - begun)

    async def _reap(self, scope: CompletionScope) -> None:
        """Reap what the attempt has made. A store that can't say what that is mustn't cost what the
        completion came to: the end of its group looks again."""
        try:
            await reap_at_end(self.store, scope.attempt)
        except StoreError as error:
            log.warning("%s: not looked for what it has left: %s", scope.where, error)

    def _record(
        self,
        finished: Finished,
        group: GroupKey,
        position: Position,
        completion: int,
        version: int,
    ) -> CompletionRecord:
        return CompletionRecord(
            run=self.run.id,
            cursor=group.cursor,
            row_index=position.row_index,
            epoch=position.epoch,
            attempt=group.attempt,
            completion=completion,
            version=version,
            versions=[sample.version for sample in finished.scope.calls],
            at_token_limit=finished.scope.at_token_limit,
            output_tokens=finished.scope.output_tokens,
            prompt=self._prompt(finished.run),
            answer=self._answer(finished.run),
            info=finished.info,
            seconds=finished.seconds,
        )

    def _prompt(self, run: RolloutRun) -> str:
        first = run.segments[0]
        mask = list(first.loss_mask)
        return str(self._tokenizer.decode(list(first.tokens[: mask.index(1)])))

    def _answer(self, run: RolloutRun) -> str:
        if run.answer is not None:
            return run.answer
        trained = [
            token
            for segment in run.segments
            for token, flag in zip(segment.tokens, segment.loss_mask, strict=True)
            if flag
        ]
        return str(self._tokenizer.decode(trained, skip_special_tokens=True))


async def _run_of(finished: Finished | None) -> RolloutRun | None:
    return None if finished is None else finished.run


async def _outcome(
    completion: int, status: RolloutStatus, scope: CompletionScope
) -> RolloutOutcome:
    """The terminal record of a completion, whose log has done its work."""
    if scope.log is None:
        return RolloutOutcome(completion=completion, status=status)
    await scope.log.forget()
    return RolloutOutcome(completion=completion, status=status, reused=scope.log.reused > 0)


def evaluation_context(index: int) -> dict[str, Any]:
    """The context parameters of the index-th held-out row: each is drawn once."""
    return {
        "cursor_index": index,
        "row_index": index,
        "epoch": 0,
        "rollout_idx": 0,
        "sample_index": index,
        "end_of_epoch": False,
        "evaluation": True,
    }


def make_rollout_fn(
    config: RunConfig, tokenizer: Any, sampler: PolicySampler, sandboxes: Sandboxes
) -> RolloutFn:
    """Call the user's factory.

    Raises:
        EntrypointError, and whatever the factory raises.
    """
    setup = RolloutSetup(
        tokenizer=tokenizer,
        tokenizer_id=tokenizer_name(config),
        sampling_kwargs={
            "max_tokens": config.max_completion_tokens,
            "temperature": config.temperature,
        },
        sampler=sampler,
        model=config.base_model,
        completions_per_prompt=config.completions_per_prompt,
        extras=dict(config.extras),
        sandboxes=sandboxes,
    )
    return call(config.rollout, setup)  # type: ignore[no-any-return]


def resolve_names(config: RunConfig) -> None:
    """Import everything that a config names. Raises EntrypointError for the first that fails."""
    for entrypoint in (*config.rollout_entrypoints, *config.trainer_entrypoints):
        resolve(entrypoint)
