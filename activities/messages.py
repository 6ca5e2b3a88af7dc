"""What activities receive and return. At most 2 KB each: names and numbers, never tokens."""

from collections.abc import Iterable
from typing import Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field

from everburn.learning.diagnostics import PolicyDistance
from everburn.records.commands import Control
from everburn.records.ids import (
    NUMBERS_PER_LIFE,
    GroupKey,
    RewardSum,
    RolloutOutcome,
    RolloutStatus,
    RunRef,
)
from everburn.records.ledger import AdamParams, PreparedBatch
from everburn.records.metrics import Number
from everburn.records.run_folder import Owner


class Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class CreateRun(Message):
    """Make the run's folder and keep its configuration there. at, step: when, and after which
    step."""

    run: RunRef
    config: dict[str, object]
    owner: Owner
    at: float
    step: int


class RunCreated(Message):
    search_attributes: bool
    """Whether the server knows Everburn's search attributes."""


class Prepared(Message):
    """What the first rollout worker found out about the run's task."""

    rows: int
    evaluation_rows: int
    notes: list[str] = Field(default_factory=list)


class RunLife(Message):
    """A run, in one of its lives: resumed after its end, it is in another one."""

    run: RunRef
    life: int


class UserCodeOrder(Message):
    """Something that runs the user's code, whose errors may mean anything."""

    run: RunRef

    @property
    def where(self) -> str:
        """The place that errors name."""
        return f"run {self.run.id}"


class RolloutOrder(UserCodeOrder):
    group: GroupKey
    completion: int
    version: int
    tries: int = 0
    """Earlier attempts at the same completion."""

    @property
    def within(self) -> RunLife:
        """Whom it is done for."""
        return RunLife(run=self.run, life=self.group.life)

    @property
    def where(self) -> str:
        return f"{super().where} · row {self.group.cursor} · completion {self.completion}"


MAX_ERRORS = 8
"""Failures of a group whose texts travel; a judge that is down fails all of them alike."""


class ReapResult(Message):
    """How much of what completions had registered couldn't be reaped."""

    left: int


class CompleteGroup(UserCodeOrder):
    """All completions of the group have ended."""

    group: GroupKey
    version: int
    statuses: str
    """How each completion ended, in order, by the first letter of its status: a group may have
    hundreds."""
    errors: dict[int, str]
    """Of the first failures, by completion."""
    last: bool
    """Whether no attempt follows if too few have survived."""

    @classmethod
    def of(
        cls,
        run: RunRef,
        group: GroupKey,
        version: int,
        outcomes: Iterable[RolloutOutcome],
        last: bool,
    ) -> Self:
        in_order = sorted(outcomes, key=lambda outcome: outcome.completion)
        errors = [(o.completion, o.error) for o in in_order if o.error is not None]
        return cls(
            run=run,
            group=group,
            version=version,
            statuses="".join(outcome.status[0] for outcome in in_order),
            errors=dict(errors[:MAX_ERRORS]),
            last=last,
        )

    @property
    def within(self) -> RunLife:
        """Whom it is done for."""
        return RunLife(run=self.run, life=self.group.life)

    @property
    def where(self) -> str:
        return f"{super().where} · row {self.group.cursor}"

    @property
    def outcomes(self) -> list[RolloutOutcome]:
        names: dict[str, RolloutStatus] = {name[0]: name for name in get_args(RolloutStatus)}
        return [
            RolloutOutcome(completion=i, status=names[letter], error=self.errors.get(i))
            for i, letter in enumerate(self.statuses)
        ]


class GroupSummary(Message):
    """A completed group in numbers; its manifest is in the store."""

    fate: str
    survivors: int
    datums: int
    reward_sum: float


class ShardOrder(UserCodeOrder):
    """Held-out rows start..stop-1, evaluated under a policy version. life: of the run, which has
    begun the evaluation."""

    life: int
    version: int
    shard: int
    start: int
    stop: int
    tries: int = 0
    """Earlier attempts at the same shard."""

    @property
    def within(self) -> RunLife:
        """Whom it is done for."""
        return RunLife(run=self.run, life=self.life)

    @property
    def where(self) -> str:
        return f"{super().where} · evaluation rows {self.start}-{self.stop - 1}"


class RowsFailed(Message):
    """Details of a shard's failure: how many of its rows failed."""

    failed: int


class EvaluateFunction(UserCodeOrder):
    life: int
    version: int
    tries: int = 0

    @property
    def within(self) -> RunLife:
        """Whom it is done for."""
        return RunLife(run=self.run, life=self.life)

    @property
    def where(self) -> str:
        return f"{super().where} · evaluation function"


class CompleteEvaluation(Message):
    run: RunRef
    version: int
    shards: int = 0
    values: dict[str, float] = Field(default_factory=dict)
    """What an evaluation function returned; an evaluation in shards leaves it empty."""
    error: str | None = None
    seconds: float


class EvaluationSummary(Message):
    metrics: dict[str, float]


class ProvisioningReadiness(Message):
    """How far a run's trainer job and deployment are. `pending` waits for capacity. text: without
    secrets. resumed: a stopped job was started again just now."""

    stage: Literal["ready", "pending", "starting", "unwanted"]
    text: str = ""
    resumed: bool = False


class AcquireLease(Message):
    run: RunRef
    epoch: int


class LeaseGrant(Message):
    """A trainer session and the task queue on which its holder listens."""

    epoch: int
    task_queue: str
    session: str
    holder: str


class LeaseRef(Message):
    run: RunRef
    epoch: int

    @property
    def life(self) -> int:
        """The life of the run that asked for the lease; after a thousand leases more than that,
        never less."""
        return self.epoch // NUMBERS_PER_LIFE


class PrepareBatch(Message):
    """Compute advantages for the sealed batch of a step, by the run's `prepare_batch`."""

    lease: LeaseRef
    step: int
    groups: str


class SubmitGroups(Message):
    """One `forward_backward` request: submission `part` of a step."""

    lease: LeaseRef
    step: int
    part: int
    groups: str
    """Their names, as refs.encode_groups writes them."""
    prepared: PreparedBatch | None = None


class Submitted(Message):
    """What one request came to."""

    datums: int
    loss_sum: float | None
    """Over its trained tokens; None where the trainer doesn't tell."""
    total_tokens: float | None = None
    """Of its datums, prompts included; None where the trainer doesn't tell."""
    distance: PolicyDistance
    loss_metrics: dict[str, float]
    """Of a Python loss, as it returned them."""


class OptimStep(Message):
    lease: LeaseRef
    step: int
    adam: AdamParams


class OptimStepped(Message):
    metrics: dict[str, float]


class Publish(Message):
    """current: the version becomes the run's policy; false for an older one that is served again
    because rollouts still use it."""

    lease: LeaseRef
    version: int
    current: bool = True


class Published(Message):
    snapshot: str
    seconds: float
    gap: float | None = None
    """Between the sampler's and the trainer's log-probabilities, in nats; where it was probed."""


class SaveCheckpoint(Message):
    lease: LeaseRef
    step: int
    version: int
    name: str


class LoadCheckpoint(Message):
    lease: LeaseRef
    step: int
    path: str


class LoadAdapter(Message):
    lease: LeaseRef
    path: str


class Promote(Message):
    """Make a model of the account from a snapshot. attempt: from 1. again: an earlier one may have
    made it unseen."""

    lease: LeaseRef
    version: int
    snapshot: str
    model_id: str
    attempt: int
    again: bool = False


class Promoted(Message):
    model: str
    """accounts/<account>/models/<id>"""


class ReplayStep(Message):
    """Apply the ledger's step again, on a lease that has the state before it."""

    lease: LeaseRef
    step: int


class Saved(Message):
    path: str
    seconds: float


PRODUCER_METRICS = (
    "elapsed_time_s",
    "no_progress_s",
    "published_version",
    "in_flight_samples",
    "admission_capacity_samples",
    "staleness_capacity_samples",
    "concurrency_capacity_samples",
    "rows_submitted_total",
    "rows_accepted_total",
    "rows_rejected_total",
    "completion_refill_attempts_total",
    "completion_refill_rows_submitted_total",
    "trajectory_drops_total",
    "recoverable_errors_total",
    "filter_drops_total",
    "incomplete_group_retries_total",
    "breaker_consecutive_failures",
    "breaker_tripped",
)
"""Names of a producer sample's numbers, in order, each under `producer/`."""


class ProducerSample(Message):
    """One record of the producer stream. Numbers without their names: many travel together."""

    index: int
    values: list[Number | None]
    """As PRODUCER_METRICS; None where there is nothing to measure."""
    waiting_for: str | None = None
    """At a standstill."""


class CommitStep(Message):
    """Everything about a finished step that the store doesn't hold yet."""

    run: RunRef
    step: int
    version: int
    """Published by this step."""
    epoch: int
    attempts: int
    """How often the step was begun."""
    updated: bool
    groups: str
    submissions: int
    prepared: PreparedBatch | None = None
    adam: AdamParams
    snapshot: str
    checkpoint: str | None
    life: int
    told: tuple[int, int]
    """What the run was told since the previous commit: the first number, and the one after the
    last."""
    seconds: float
    metrics: dict[str, float | int]
    rejected: RewardSum
    """Completions of rows rejected since the previous commit: they count in raw metrics."""
    save_seconds: dict[int, float] = Field(default_factory=dict)
    """Of checkpoints of earlier steps that were saved since the previous commit, by step."""
    producer: list[ProducerSample]


class Committed(Message):
    reward: float | None
    """Mean reward of all completions since the previous commit."""


class Reconcile(Message):
    """Whom a run waits for: groups, the lease and the evaluation, the latter by workflow id."""

    run: RunRef
    groups: str
    lease: str | None
    """Workflow id."""
    evaluation: str | None
    """Workflow id."""


class FinishedGroup(Message):
    """A group whose manifest is in the store."""

    key: GroupKey
    version: int
    fate: str
    survivors: int
    datums: int
    reward_sum: float


class Reconciled(Message):
    """What has ended without the run having heard of it."""

    finished: list[FinishedGroup]
    dead: str
    """Groups whose workflow is closed, and which left nothing."""
    lease_closed: bool
    evaluation_closed: bool


class SkipGroup(Message):
    """A group that failed, and that a person gives up."""

    run: RunRef
    group: GroupKey
    version: int


class RecordControl(Message):
    run: RunRef
    control: Control


class RecordProducer(Message):
    run: RunRef
    samples: list[ProducerSample]


class RecordEvaluation(Message):
    run: RunRef
    version: int
    metrics: dict[str, float]


class CarryPublication(Message):
    """A step without update: its version is served by the previous one's snapshot."""

    run: RunRef
    version: int


class FinishRun(Message):
    run: RunRef
    initial_version: int
    final_version: int
    save_seconds: dict[int, float] = Field(default_factory=dict)
    """As in CommitStep."""
