"""Arguments and results of activities: names and numbers, never tokens. Usually below 2 KB, never
above 64 KB."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from everburn.learning.diagnostics import PolicyDistance
from everburn.records.commands import Command
from everburn.records.ids import (
    GroupKey,
    GroupResult,
    Leased,
    RolloutOutcome,
    RunRef,
)
from everburn.records.ledger import AdamParams, PreparedBatch
from everburn.records.metrics import Record
from everburn.records.run_folder import Owner


class Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class CreateRun(Message):
    """Create the run's folder with its configuration. at, step: when the incarnation starts, and
    after which step."""

    run: RunRef
    config: dict[str, object]
    owner: Owner
    at: float
    step: int


class RunCreated(Message):
    search_attributes: bool
    """Whether the server knows Everburn's search attributes."""


class Prepared(Message):
    """The run's task as the first rollout worker found it."""

    rows: int
    evaluation_rows: int
    notes: list[str] = Field(default_factory=list)


class RunIncarnation(Message):
    """One incarnation of a run."""

    run: RunRef
    incarnation: int


class UserCodeOrder(Message):
    """The argument of an activity that runs user code, whose errors must be classified."""

    run: RunRef

    @property
    def where(self) -> str:
        """The location that error texts start with."""
        return f"run {self.run.id}"


class RolloutOrder(UserCodeOrder):
    group: GroupKey
    completion: int
    version: int
    retry: int = 0
    """Earlier attempts at the same completion."""

    @property
    def within(self) -> RunIncarnation:
        """The run incarnation that this work belongs to."""
        return RunIncarnation(run=self.run, incarnation=self.group.incarnation)

    @property
    def where(self) -> str:
        return f"{super().where} · row {self.group.cursor} · completion {self.completion}"


class ReapResult(Message):
    """left: sandboxes that couldn't be cleaned up."""

    left: int


class CompleteGroup(UserCodeOrder):
    """last: no retry follows if too few completions survived."""

    group: GroupKey
    version: int
    outcomes: list[RolloutOutcome]
    last: bool

    @property
    def within(self) -> RunIncarnation:
        """The run incarnation that this work belongs to."""
        return RunIncarnation(run=self.run, incarnation=self.group.incarnation)

    @property
    def where(self) -> str:
        return f"{super().where} · row {self.group.cursor}"


class ShardOrder(UserCodeOrder):
    """Evaluate held-out rows start..stop-1 under a policy version."""

    incarnation: int
    version: int
    shard: int
    start: int
    stop: int
    retry: int = 0
    """Earlier attempts at the same shard."""

    @property
    def within(self) -> RunIncarnation:
        """The run incarnation that this work belongs to."""
        return RunIncarnation(run=self.run, incarnation=self.incarnation)

    @property
    def where(self) -> str:
        return f"{super().where} · evaluation rows {self.start}-{self.stop - 1}"


class RowsFailed(Message):
    """Details of a shard's failure: how many of its rows failed."""

    failed: int


class EvaluateFunction(UserCodeOrder):
    incarnation: int
    version: int
    retry: int = 0

    @property
    def within(self) -> RunIncarnation:
        """The run incarnation that this work belongs to."""
        return RunIncarnation(run=self.run, incarnation=self.incarnation)

    @property
    def where(self) -> str:
        return f"{super().where} · evaluation function"


class CompleteEvaluation(Message):
    run: RunRef
    version: int
    shards: int = 0
    values: dict[str, float] = Field(default_factory=dict)
    """The result of an evaluation function; empty for an evaluation in shards."""
    error: str | None = None
    seconds: float


class EvaluationSummary(Message):
    metrics: dict[str, float]


class ProvisioningReadiness(Message):
    """State of a run's trainer job and deployment. `pending` waits for capacity. text: without
    secrets. resumed: a stopped job was just restarted."""

    stage: Literal["ready", "pending", "starting", "unwanted"]
    text: str = ""
    resumed: bool = False


class LeaseGrant(Leased):
    """A trainer session and the task queue that its holder serves."""

    task_queue: str
    session: str
    holder: str


class LeaseRef(Leased):
    run: RunRef


class PrepareBatch(Message):
    """Compute advantages of a step's sealed batch with the run's `prepare_batch`."""

    lease: LeaseRef
    step: int
    groups: list[GroupKey]


class SubmitGroups(Message):
    """One `forward_backward` request. submission: its number within the step, from 0."""

    lease: LeaseRef
    step: int
    submission: int
    groups: list[GroupKey]
    prepared: PreparedBatch | None = None


class Submitted(Message):
    """The result of one submission."""

    datums: int
    loss_sum: float | None
    """Over its trained tokens; None if the trainer doesn't report it."""
    total_tokens: float | None = None
    """Tokens of its datums, prompts included; None if the trainer doesn't report it."""
    distance: PolicyDistance
    loss_metrics: dict[str, float]
    """Metrics that a Python loss returned."""


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
    """Between the sampler's and the trainer's log-probabilities, in nats; None if not probed."""


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
    """Promote a snapshot to a model of the account. attempt: from 1. again: an earlier attempt may
    have created the model."""

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
    """Replay the ledger's step on a lease that has the state before it."""

    lease: LeaseRef
    step: int


class Saved(Message):
    path: str
    seconds: float


class Committed(Message):
    reward: float | None
    """Mean reward of all completions since the previous commit."""


class Reconcile(Message):
    """What a run waits for: groups, and the workflows of its lease and its evaluation."""

    run: RunRef
    groups: list[GroupKey]
    lease: str | None
    evaluation: str | None


class Reconciled(Message):
    """What ended without reporting to the run. dead: groups whose workflow closed without a
    manifest."""

    finished: list[GroupResult]
    dead: list[GroupKey]
    lease_closed: bool
    evaluation_closed: bool


class SkipGroup(Message):
    """Give up a failed group, on a person's command."""

    run: RunRef
    group: GroupKey
    version: int


class RecordCommand(Message):
    run: RunRef
    command: Command


class RecordProducer(Message):
    run: RunRef
    records: list[Record]


class RecordEvaluation(Message):
    run: RunRef
    version: int
    metrics: dict[str, float]


class CarryPublication(Message):
    """Serve the version of a step without update from the previous version's snapshot."""

    run: RunRef
    version: int


class FinishRun(Message):
    run: RunRef
    initial_version: int
    final_version: int
    save_seconds: dict[int, float] = Field(default_factory=dict)
    """See StepCommit."""
