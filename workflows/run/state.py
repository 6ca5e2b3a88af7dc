"""The run's whole state: what continue-as-new carries from one execution to the next.

One pydantic object over the scheduler's state machines. Versioned by its schema: a worker brings an
older state up to date, and where it can't read one the run fails and says so: it can be resumed
from its folder.
"""

import re
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from activities.messages import LeaseGrant, ProducerSample
from everburn.config import RunConfig
from everburn.records.ids import GroupKey, RewardSum, RunRef
from everburn.records.run_folder import Origin
from everburn.scheduling.admission import Admission
from everburn.scheduling.breaker import CircuitBreaker
from everburn.scheduling.cursor import Cursor
from everburn.scheduling.gauges import Gauges
from everburn.scheduling.queue import GroupQueue
from workflows.messages import LeaseEnded, Recovered, RolloutsFailed

STATE_SCHEMA = 4
"""Grows with every change after which an older state can't be read as it is."""
MAX_NOTES = 10
MAX_NOTE = 300
MAX_SAVES = 10
_NUMBERED = re.compile(r"\w*\d\w*")
"""Words with a digit: the ids of sessions and requests, steps, lease epochs."""
NO_PROGRESS = 300.0
"""Seconds without any progress after which the run says so."""


def _from_1(state: dict[str, Any]) -> dict[str, Any]:
    """What the run was told waited in the state for the next commit, and is kept in files now. The
    breaker counted all failures, too."""
    state["breaker"] = {k: v for k, v in state["breaker"].items() if k != "failures_total"}
    told = state.pop("changes", {}), [control["what"] for control in state.pop("controls", [])]
    if any(told):
        notes = state.get("notes", [])
        state["notes"] = [*notes, f"told before an upgrade, and not recorded: {told}"[:MAX_NOTE]]
    return state


def _from_2(state: dict[str, Any]) -> dict[str, Any]:
    """The text of a standstill was kept; it follows from when anything moved last."""
    state.pop("standstill", None)
    return state


def _from_3(state: dict[str, Any]) -> dict[str, Any]:
    """Every lease failure counted against the step, whatever caused it."""
    state.pop("losses", None)
    return state


MIGRATIONS: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {
    1: _from_1,
    2: _from_2,
    3: _from_3,
}
"""From each older schema to the one after it."""


class GroupOut(BaseModel):
    """A group whose child workflow runs; `released` of its completions have ended."""

    attempt: int
    version: int
    released: int = 0


class CheckpointAt(BaseModel):
    """An eligible checkpoint: trainer state and run state of the same step."""

    step: int
    path: str


class SaveTries(BaseModel):
    """How often a step's state was tried to be saved under one lease."""

    step: int
    epoch: int
    count: int = 0


class Sent(BaseModel):
    """What earlier executions have sent of the next step's batch, where it was collected for longer
    than one."""

    parts: list[str] = Field(default_factory=list)
    """The groups of each submission."""
    since: float | None = None
    """When the first was sent."""
    busy: float = 0.0
    """Seconds in which the trainer had any of them."""


class RowHistory(BaseModel):
    """A row that was begun more than once, until its fate is final."""

    attempts: int
    """Begun so far; the next attempt takes this number. Never reused."""
    incomplete: int = 0
    """How many of them ended below min_group_size."""


class Counters(BaseModel):
    """Monotone counters of the producer."""

    rows_submitted: int = 0
    rows_accepted: int = 0
    rows_rejected: int = 0
    completion_refill_attempts: int = 0
    completion_refill_rows_submitted: int = 0
    trajectory_drops: int = 0
    recoverable_errors: int = 0
    filter_drops: int = 0
    incomplete_group_retries: int = 0


class LeaseFailures(BaseModel):
    """Leases that failed one after the other since the last committed step, or since a person
    resumed the run. Leases that failed while the run only collected, paused or evaluated don't
    count."""

    in_a_row: int = 0
    """With an operation in flight, or during a recovery: recoveries back off by it."""
    interrupted: int = 0
    """With an operation of the step in flight."""
    answered: int = 0
    """In a row, because the service answered with the same failure."""
    answer: str = ""
    """That failure, without what differs between leases."""

    def count(self, answer: str | None, *, in_flight: bool) -> None:
        """Count a failed lease. answer: the failure that the service answered with, if it did."""
        self.in_a_row += 1
        self.interrupted += in_flight
        if answer is not None:
            answer = _NUMBERED.sub("#", answer)
            self.answered = self.answered + 1 if answer == self.answer else 1
            self.answer = answer
        elif in_flight:
            self.answered, self.answer = 0, ""


class Fatal(BaseModel):
    """What ends the run; `group` if a rollout was the cause."""

    error: str
    error_type: str
    group: GroupKey | None = None
    rollouts: RolloutsFailed | None = None
    """Where the cause is one of them, or an evaluation's."""
    infrastructure: bool = False
    """Whether the service is the cause: only `on_fatal = "fail"` lets it end the run."""
    holds: bool = False
    """Whether it holds the run whatever on_fatal says: nothing is wrong with the run itself."""

    @property
    def held(self) -> str:
        """What is answered to who wants something of a run that it holds."""
        return f"the run is held: {self.error}; resume, skip_row or stop it first"


class RunState(BaseModel):
    model_config = ConfigDict(extra="forbid")

    schema_version: int = STATE_SCHEMA
    run: RunRef
    life: int = 0
    """How often the run, or the past that a fork took over, was resumed or forked."""
    origin: Origin | None = None
    """Where a fork comes from."""
    phase: str = "starting"
    waiting_for: str = ""
    started_at: float
    search_attributes: bool = False
    notes: list[str] = Field(default_factory=list)

    # Producer
    admission: Admission
    cursor: Cursor
    queue: GroupQueue
    breaker: CircuitBreaker = Field(default_factory=CircuitBreaker)
    gauges: Gauges
    counters: Counters = Field(default_factory=Counters)
    out: dict[int, GroupOut] = Field(default_factory=dict)
    """By cursor."""
    first_attempt: int = 0
    """The number of a row's first attempt in this life."""
    retries: list[int] = Field(default_factory=list)
    """Rows with a reservation whose next attempt waits for free calls."""
    again: dict[int, RowHistory] = Field(default_factory=dict)
    """By cursor; rows begun once and never again aren't in it."""
    rejected: RewardSum = RewardSum()
    """Completions of rows rejected since the last commit."""
    producer_samples: list[ProducerSample] = Field(default_factory=list)
    """Not yet written."""
    producer_index: int = 0
    producer_sample_at: float = 0.0

    # Steps
    step: int = 0
    """The last committed optimizer step."""
    sent: Sent = Field(default_factory=Sent)
    published_at: float = 0.0
    snapshot: str = ""
    reward: float | None = None
    step_seconds: float | None = None
    checkpoint: str | None = None
    """What was saved last, eligible or not."""
    saves: list[str] = Field(default_factory=list)
    """The last checkpoints, as people are told of them."""
    tries: SaveTries | None = None
    """Of the last step that was tried to be saved."""
    save_seconds: dict[int, float] = Field(default_factory=dict)
    """What it took to save committed steps that were asked for, or the last; not yet written."""
    model: str | None = None
    """What the final policy was promoted to."""
    checkpoints: list[CheckpointAt] = Field(default_factory=list)
    """Those that recovery may start from, oldest first: state-0 and the last few."""

    # Lease
    epoch: int = 0
    """Of the last lease that was asked for; never reused."""
    leases: int = 0
    """Sessions had, since the run's start or resumption."""
    grant: LeaseGrant | None = None
    lease_end: LeaseEnded | None = None
    """How the current lease ended, once it has."""
    lease_failures: LeaseFailures = Field(default_factory=LeaseFailures)
    attempts: int = 0
    """Leases under which the next step was begun."""
    attempted_under: int = 0
    """The last of them, by its epoch."""
    redone_steps: int = 0
    reused_rollouts: int = 0
    recovery_seconds: float = 0.0

    # Evaluation
    evaluation_rows: int = 0
    evaluating: int | None = None
    """The version whose evaluation runs."""
    evaluated: int | None = None
    """The last version that an evaluation was started for."""
    evaluations: dict[int, dict[str, float]] = Field(default_factory=dict)
    """Metrics of the first and the last evaluation."""

    progress_at: float = 0.0
    """When anything moved last."""
    looked_at: float | None = None
    """When the watchdog has looked last; at first, when the run began. None by an older build."""

    # Controls
    paused: bool = False
    checkpoint_wanted: bool = False
    """A person asked for a checkpoint of the last committed step, or of the next."""
    checkpoint_error: str | None = None
    """Why the last one that was wanted couldn't be saved."""
    told: int = 0
    """The number of the next control in this life; those before are written, but for one over
    which the run was cancelled."""
    told_committed: int = 0
    """The first that no committed step has followed."""
    stop: bool = False
    drain: bool = False
    fatal: Fatal | None = None

    @classmethod
    def initial(cls, run: RunRef, config: RunConfig, now: float) -> "RunState":
        """A run that hasn't looked at its rows yet."""
        return cls(
            run=run,
            started_at=now,
            published_at=now,
            progress_at=now,
            looked_at=now,
            admission=Admission(
                group=config.completions_per_prompt,
                batch=config.batch_samples,
                max_head_offpolicy_versions=config.max_head_offpolicy_versions,
                concurrency=config.max_concurrency_rollout_sample,
            ),
            cursor=Cursor(total=0),
            queue=GroupQueue(batch_size=config.prompt_groups_per_step),
            gauges=Gauges.starting(now),
        )

    @model_validator(mode="before")
    @classmethod
    def _up_to_date(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        schema = values.get("schema_version", STATE_SCHEMA)
        if schema != STATE_SCHEMA and schema not in MIGRATIONS:
            known = sorted((STATE_SCHEMA, *MIGRATIONS), reverse=True)
            raise ValueError(
                f"the run's state has schema {schema}, and this worker reads "
                f"{', '.join(map(str, known))}. Nothing is lost: go on with `everburn resume`"
            )
        for older in range(schema, STATE_SCHEMA):
            values = MIGRATIONS[older](dict(values)) | {"schema_version": older + 1}
        return values

    def restart_step(self) -> None:
        """The next step starts anew: nothing of its batch has been sent."""
        self.queue.restart()
        self.sent = Sent()

    def progressed(self, now: float) -> None:
        """Something has moved."""
        self.progress_at = now

    def standstill(self, now: float) -> str:
        """What the run waits for, and since when, if nothing has moved for long; else empty."""
        if not self.waiting_for or now - self.progress_at < NO_PROGRESS:
            return ""
        since = datetime.fromtimestamp(self.progress_at, UTC)
        return (
            f"nothing has moved since {since:%Y-%m-%d %H:%M:%S} UTC; waiting for {self.waiting_for}"
        )

    def enter(self, phase: str, waiting_for: str = "") -> None:
        """What the run does from now on, and what it waits for over it."""
        self.phase, self.waiting_for = phase, waiting_for

    def note(self, text: str) -> None:
        """Something a person should know; the last few are kept."""
        self.notes = [*self.notes, text[:MAX_NOTE]][-MAX_NOTES:]

    def refuse_checkpoint(self, why: str) -> None:
        """Nobody need wait for the checkpoint that was asked for, if one was."""
        if self.checkpoint_wanted:
            self.checkpoint_error, self.checkpoint_wanted = why, False

    def note_saved(self, step: int, path: str) -> None:
        """A checkpoint has been saved: people want its full path."""
        self.checkpoint = path
        self.saves = [*self.saves, f"step {step}: {path}"][-MAX_SAVES:]

    def next_save(self, step: int) -> int:
        """The number of the next attempt to save a step: 1, 2, ... under each lease."""
        tries = self.tries
        if tries is None or (tries.step, tries.epoch) != (step, self.epoch):
            tries = SaveTries(step=step, epoch=self.epoch)
        self.tries = tries.model_copy(update={"count": tries.count + 1})
        return self.tries.count

    @property
    def recovered(self) -> Recovered | None:
        """What was lost and got back so far; None while nothing was."""
        if self.leases <= 1 and not self.reused_rollouts:
            return None
        return Recovered(
            leases=self.leases,
            redone_steps=self.redone_steps,
            reused_rollouts=self.reused_rollouts,
            seconds=self.recovery_seconds,
        )

    @property
    def batch_sealed(self) -> bool:
        """Full, or as full as it will get: rows have run out and nothing is in flight."""
        if self.queue.full:
            return True
        dry = self.cursor.exhausted and not self.out and not self.retries
        return dry and bool(self.queue.batch)

    @property
    def rows_done(self) -> bool:
        """Whether there is nothing left to train."""
        idle = not self.out and not self.retries and not self.queue.groups
        return self.cursor.exhausted and idle

    @property
    def saved(self) -> bool:
        """Whether the last committed step has a checkpoint."""
        return bool(self.checkpoints) and self.checkpoints[-1].step == self.step

    @property
    def stopping(self) -> bool:
        """Whether a stop takes effect now; with `drain` it waits for rollouts in flight."""
        awaited = self.out or (self.retries and not self.paused)
        return self.stop and not (self.drain and awaited)
