"""The run's state: what continue-as-new carries from one execution to the next.

One model per module that writes it; other modules read it, or call that module. A worker that
can't read a state fails the run and says so: the run can be resumed from its folder.
"""

import re
from datetime import UTC, datetime
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from activities.messages import LeaseGrant
from everburn.config import RunConfig
from everburn.records.ids import (
    GroupKey,
    LeaseKey,
    RewardSum,
    RunRef,
)
from everburn.records.metrics import Record
from everburn.records.run_folder import Origin
from everburn.scheduling.admission import Admission
from everburn.scheduling.breaker import CircuitBreaker
from everburn.scheduling.cursor import Cursor
from everburn.scheduling.gauges import Gauges
from everburn.scheduling.queue import GroupQueue
from workflows.messages import LeaseEnded, Recovered, RolloutsFailed

STATE_SCHEMA = 1
"""Increased by every change after which an older state can't be read."""
MAX_NOTES = 10
MAX_SAVES = 10
_NUMBERED = re.compile(r"\w*\d\w*")
"""Words with a digit: the ids of sessions and requests, steps, lease epochs."""
NO_PROGRESS = 300.0
"""Seconds without progress after which the run counts as stalled."""


class Part(BaseModel):
    model_config = ConfigDict(extra="forbid")


class GroupOut(Part):
    """A group whose child workflow runs; `released` of its completions have ended."""

    attempt: int
    version: int
    released: int = 0


class RowHistory(Part):
    """A row that was issued more than once, until its outcome is final."""

    attempts: int
    """Attempts so far, and the number of the next one."""
    incomplete: int = 0
    """Attempts that ended below min_group_size."""


class Counters(Part):
    """Monotonic counters of the producer."""

    rows_submitted: int = 0
    rows_accepted: int = 0
    rows_rejected: int = 0
    completion_refill_attempts: int = 0
    completion_refill_rows_submitted: int = 0
    trajectory_drops: int = 0
    recoverable_errors: int = 0
    filter_drops: int = 0
    incomplete_group_retries: int = 0


class ProducerState(Part):
    """Rows in flight and accepted groups. Written by producer.py; step.py takes submissions out of
    the queue."""

    admission: Admission
    cursor: Cursor
    queue: GroupQueue
    breaker: CircuitBreaker = Field(default_factory=CircuitBreaker)
    gauges: Gauges
    counters: Counters = Field(default_factory=Counters)
    out: dict[int, GroupOut] = Field(default_factory=dict)
    """Groups in flight, by cursor."""
    retries: list[int] = Field(default_factory=list)
    """Rows with a reservation whose next attempt waits for free calls."""
    histories: dict[int, RowHistory] = Field(default_factory=dict)
    """By cursor, of rows that were issued more than once."""
    rejected: RewardSum = RewardSum()
    """Completions of rows rejected since the last commit."""
    reused_rollouts: int = 0
    """Completions that used what an earlier attempt had finished."""
    sampled_at: float = 0.0
    """When the last record of the producer stream was made."""

    @property
    def batch_sealed(self) -> bool:
        """Full, or as full as it will get: no row is left and none is in flight."""
        if self.queue.full:
            return True
        dry = self.cursor.exhausted and not self.out and not self.retries
        return dry and bool(self.queue.batch)

    @property
    def rows_done(self) -> bool:
        """Whether nothing is left to train."""
        idle = not self.out and not self.retries and not self.queue.groups
        return self.cursor.exhausted and idle


class Sent(Part):
    """Submissions of the next step that earlier executions have sent."""

    submissions: list[list[GroupKey]] = Field(default_factory=list)
    since: float | None = None
    """When the first was sent."""
    busy: float = 0.0
    """Seconds in which the trainer had any of them."""


class StepState(Part):
    """Committed steps, and the one being trained. Written by step.py."""

    committed: int = 0
    """The last committed optimizer step."""
    sent: Sent = Field(default_factory=Sent)
    attempts: int = 0
    """Leases under which the next step was begun."""
    attempted_under: int = 0
    """The last of them, by its lease epoch."""
    snapshot: str = ""
    """Of the current policy version."""
    published_at: float = 0.0
    seconds: float | None = None
    """Between the last two publications."""
    reward: float | None = None
    """Mean reward of the last committed step."""

    def publish(self, snapshot: str, now: float) -> None:
        self.snapshot, self.published_at = snapshot, now


class LeaseState(Part):
    """The current lease. Written by session.py."""

    lease_epoch: int = 0
    """Of the last lease that was requested; never reused."""
    grant: LeaseGrant | None = None
    end: LeaseEnded | None = None
    """How the current lease ended, once it has."""
    sessions: int = 0
    """Leases that were granted since the run's start or resumption."""


class LeaseFailures(Part):
    """Consecutive lease failures since step `since` was committed, or since a person resumed the
    run. A lease that fails while the run only collects, pauses or evaluates doesn't count."""

    since: int = 0
    in_a_row: int = 0
    """With an operation in flight, or during a recovery: determines the pause before the next."""
    interrupted: int = 0
    """With an operation of the step in flight."""
    answered: int = 0
    """In a row, with the same error of the service."""
    answer: str = ""
    """That error, without what differs between leases."""

    def count(self, answer: str | None, *, in_flight: bool) -> None:
        """answer: the error of the service, if it answered."""
        self.in_a_row += 1
        self.interrupted += in_flight
        if answer is not None:
            answer = _NUMBERED.sub("#", answer)
            self.answered = self.answered + 1 if answer == self.answer else 1
            self.answer = answer
        elif in_flight:
            self.answered, self.answer = 0, ""


class RecoveryState(Part):
    """Written by recovery.py."""

    failures: LeaseFailures = Field(default_factory=LeaseFailures)
    redone_steps: int = 0
    reused_rollouts: int = 0
    """Completions of interrupted batches, which are trained without sampling again."""
    seconds: float = 0.0


class CheckpointAt(Part):
    """An eligible checkpoint: trainer state and run state of the same step."""

    step: int
    path: str


class SaveAttempts(Part):
    """How often a step's state was saved under one lease."""

    step: int
    lease_epoch: int
    count: int = 0


class CheckpointState(Part):
    """Written by checkpoints.py."""

    last: str | None = None
    """The path that was saved last, eligible or not."""
    saved: list[str] = Field(default_factory=list)
    """The last paths, each with its step, for people."""
    eligible: list[CheckpointAt] = Field(default_factory=list)
    """Where recovery may start from, oldest first: state-0 and the last few."""
    attempts: SaveAttempts | None = None
    seconds: dict[int, float] = Field(default_factory=dict)
    """By step, of saves after the step was committed; not yet recorded."""
    requested: bool = False
    """Whether a person waits for a checkpoint."""
    error: str | None = None
    """Why the last requested checkpoint couldn't be saved."""

    def note_saved(self, step: int, path: str) -> None:
        self.last = path
        self.saved = [*self.saved, f"step {step}: {path}"][-MAX_SAVES:]

    def remember(self, step: int, path: str) -> None:
        """The checkpoint is eligible; keep the first and the last few."""
        self.eligible = [
            *self.eligible[:1],
            *self.eligible[1:][-2:],
            CheckpointAt(step=step, path=path),
        ]

    def answer(self, error: str | None) -> None:
        """End the wait for a requested checkpoint, if there is one."""
        if self.requested:
            self.requested, self.error = False, error

    def has(self, step: int) -> bool:
        return bool(self.eligible) and self.eligible[-1].step == step


class EvaluationState(Part):
    """Written by evaluations.py."""

    running: int | None = None
    """The version whose evaluation runs."""
    last: int | None = None
    """The last version whose evaluation was started."""
    metrics: dict[int, dict[str, float]] = Field(default_factory=dict)
    """Of the first and the last evaluation, by version."""


class RecorderState(Part):
    """Written by recorder.py."""

    next_command: int = 0
    """Commands with lower numbers are written, except possibly one whose write was cancelled."""
    committed_commands: int = 0
    """Commands with lower numbers are in the ledger."""
    producer_records: list[Record] = Field(default_factory=list)
    """Not yet written."""
    producer_index: int = 0
    """Of the next one."""


class CommandState(Part):
    """What a person wants of the run. Written by train_run.py."""

    paused: bool = False
    stop: bool = False
    drain: bool = False


class Fatal(Part):
    """What ends or holds the run; `group` if a rollout was the cause."""

    error: str
    error_type: str
    group: GroupKey | None = None
    rollouts: RolloutsFailed | None = None
    """If failed rollouts, or those of an evaluation, are the cause."""
    infrastructure: bool = False
    """Whether the service is the cause: only `on_fatal = "fail"` lets it end the run."""
    holds: bool = False
    """Whether it holds the run whatever on_fatal says: nothing is wrong with the run itself."""

    @property
    def held(self) -> str:
        """The answer to a request that a held run can't fulfil."""
        return f"the run is held: {self.error}; resume, skip_row or stop it first"


class RunState(Part):
    schema_version: int = STATE_SCHEMA
    run: RunRef
    incarnation: int = 0
    """How often the run, or the past that a fork took over, was resumed or forked."""
    origin: Origin | None = None
    """Where a fork comes from."""
    started_at: float
    search_attributes: bool = False
    evaluation_rows: int = 0
    """Held-out rows; 0 for an evaluation function."""
    phase: str = "starting"
    waiting_for: str = ""
    notes: list[str] = Field(default_factory=list)
    progress_at: float
    """When anything moved last."""
    checked_at: float
    """The watchdog's last check; at first, the run's start."""
    fatal: Fatal | None = None
    model: str | None = None
    """The model that the final policy was promoted to."""

    producer: ProducerState
    step: StepState
    lease: LeaseState = Field(default_factory=LeaseState)
    recovery: RecoveryState = Field(default_factory=RecoveryState)
    checkpoints: CheckpointState = Field(default_factory=CheckpointState)
    evaluation: EvaluationState = Field(default_factory=EvaluationState)
    recorder: RecorderState = Field(default_factory=RecorderState)
    commands: CommandState = Field(default_factory=CommandState)

    @classmethod
    def initial(cls, run: RunRef, config: RunConfig, now: float) -> "RunState":
        """A run before its rows are counted."""
        return cls(
            run=run,
            started_at=now,
            progress_at=now,
            checked_at=now,
            producer=ProducerState(
                admission=Admission(
                    group=config.completions_per_prompt,
                    batch=config.batch_samples,
                    max_head_offpolicy_versions=config.max_head_offpolicy_versions,
                    concurrency=config.max_concurrency_rollout_sample,
                ),
                cursor=Cursor(total=0),
                queue=GroupQueue(batch_size=config.prompt_groups_per_step),
                gauges=Gauges.starting(now),
            ),
            step=StepState(published_at=now),
        )

    @model_validator(mode="before")
    @classmethod
    def _check_schema(cls, values: Any) -> Any:
        schema = values.get("schema_version", STATE_SCHEMA) if isinstance(values, dict) else None
        if schema not in (None, STATE_SCHEMA):
            raise ValueError(
                f"the run's state has schema {schema}, and this worker reads {STATE_SCHEMA}. "
                "Nothing is lost: continue with `everburn resume`"
            )
        return values

    def enter(self, phase: str, waiting_for: str = "") -> None:
        """Set the run's phase, and what it waits for."""
        self.phase, self.waiting_for = phase, waiting_for

    def wait_for(self, what: str) -> None:
        """Set what the run waits for within its phase."""
        self.enter(self.phase, what)

    def progressed(self, now: float) -> None:
        self.progress_at = now

    def stall(self, now: float) -> str:
        """What the run waits for, and since when, if nothing has moved for long; else empty."""
        if not self.waiting_for or now - self.progress_at < NO_PROGRESS:
            return ""
        since = datetime.fromtimestamp(self.progress_at, UTC)
        return (
            f"nothing has moved since {since:%Y-%m-%d %H:%M:%S} UTC; waiting for {self.waiting_for}"
        )

    def note(self, text: str) -> None:
        """Add what a person should know; the last few notes are kept."""
        self.notes = [*self.notes, text][-MAX_NOTES:]

    def fail(self, fatal: Fatal) -> None:
        """Set the run's fatal error; the first one stays."""
        self.fatal = self.fatal or fatal

    def restart_step(self) -> None:
        """The next step starts again: nothing of its batch has been sent."""
        self.producer.queue.restart()
        self.step.sent = Sent()

    @property
    def lease_key(self) -> LeaseKey:
        """The last lease that was requested."""
        return LeaseKey(self.incarnation, self.lease.lease_epoch)

    @property
    def version(self) -> int:
        """The policy version that is served."""
        return self.producer.admission.version

    @property
    def stopping(self) -> bool:
        """Whether a stop takes effect now; with `drain` it waits for rollouts in flight."""
        commands, producer = self.commands, self.producer
        awaited = producer.out or (producer.retries and not commands.paused)
        return commands.stop and not (commands.drain and awaited)

    @property
    def recovered(self) -> Recovered | None:
        """What was lost and recovered so far; None if nothing was."""
        reused = self.producer.reused_rollouts + self.recovery.reused_rollouts
        if self.lease.sessions <= 1 and not reused:
            return None
        return Recovered(
            leases=self.lease.sessions,
            redone_steps=self.recovery.redone_steps,
            reused_rollouts=reused,
            seconds=self.recovery.seconds,
        )
