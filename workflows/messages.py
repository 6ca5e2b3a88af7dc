"""What workflows receive at start and by signal, and what `status` answers.

Signals are keyed and idempotent: a repeated one changes nothing.
"""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from activities.messages import LeaseGrant, ProvisioningReadiness
from everburn.records.ids import GroupKey, RunRef

ROLLOUT_FAILED = "RolloutFailed"
"""Type of the error of a run that a failed rollout has ended."""


class Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class GroupOrder(Message):
    """Start of a PromptGroup: G completions of one row under one version stamp."""

    run: RunRef
    key: GroupKey
    version: int
    completions: int
    rollout_timeout: float
    report_releases: bool
    fail_on_failure: bool
    """Whether one failed completion fails the group, once all have ended and are counted."""
    last: bool
    """Whether no attempt follows this one."""


GroupFate = Literal["accepted", "filtered", "incomplete", "fatal", "cancelled"]


class GroupReport(Message):
    """How a group ended. `failures` has one flag per completion that counts for the breaker, in
    the order in which they ended: true for a recoverable failure, false for a success."""

    key: GroupKey
    version: int
    fate: GroupFate
    survivors: int = 0
    datums: int = 0
    reward_sum: float = 0.0
    drops: int = 0
    reused: int = 0
    """Completions that used what an earlier attempt had finished."""
    failures: list[bool] = Field(default_factory=list)
    error: str | None = None
    """What failed first; of a group that isn't fatal, its beginning."""
    error_type: str | None = None
    completion: int | None = None
    """The one that failed first."""
    failed: int = 0
    """Completions that ended in a failure."""


class RolloutsFailed(Message):
    """What failed of a phase's rollouts; the details of a run's failure that they are the cause of.

    version: the policy that was sampled. evaluation: of held-out rows; otherwise for training.
    failed: how many, as far as they had ended. first: why the first one did.
    """

    version: int
    evaluation: bool
    failed: int
    first: str

    def counting(self, report: GroupReport) -> "RolloutsFailed":
        """After another group of the same phase has ended."""
        if self.evaluation or report.version != self.version:
            return self
        return self.model_copy(update={"failed": self.failed + report.failed})


class Released(Message):
    """So many completions of a group have ended by now, in total."""

    key: GroupKey
    total: int


class ProvisioningWait(Message):
    """How long a lease may wait for its trainer job and deployment, and how long it has. Seconds;
    times are workflow times."""

    pending_timeout: float
    """For capacity."""
    ready_timeout: float
    """For what has its machines."""
    stage: Literal["pending", "starting"] = "starting"
    stage_begun: float = 0.0
    resumptions: int = 0
    """How often the job had stopped and was started again."""

    def continued(self, found: ProvisioningReadiness, now: float) -> "ProvisioningWait":
        """After another look that found it not ready."""
        stage: Literal["pending", "starting"] = (
            "pending" if found.stage == "pending" else "starting"
        )
        anew = not self.stage_begun or stage != self.stage
        return self.model_copy(
            update={
                "stage": stage,
                "stage_begun": now if anew else self.stage_begun,
                "resumptions": self.resumptions + found.resumed,
            }
        )


class LeaseOrder(Message):
    """provisioning: of a lease that needs a trainer job and a deployment first."""

    run: RunRef
    epoch: int
    provisioning: ProvisioningWait | None = None


class LeaseWaiting(Message):
    """What the lease waits for, in words."""

    epoch: int
    text: str


class LeaseGranted(Message):
    grant: LeaseGrant


class LeaseEnded(Message):
    """The lease is over: released, lost, or never had."""

    epoch: int
    error: str | None = None
    error_type: str | None = None


class EvaluationOrder(Message):
    """rows: held-out rows; 0 for an evaluation function."""

    run: RunRef
    version: int
    rows: int
    timeout: float
    search_attributes: bool
    count_failures: bool = False
    """Whether an evaluation that fails goes on until all that fails is counted."""
    life: int = 0
    """Of the run, which has begun it."""


class EvaluationReport(Message):
    """life: of the run, which has begun the evaluation; None where an earlier build reports."""

    version: int
    life: int | None = None
    metrics: dict[str, float]
    error: str | None = None
    failed: int = 0
    """Rows that failed."""


class StopRequest(Message):
    """drain: await rollouts in flight instead of cancelling them."""

    drain: bool = False


class Recovered(Message):
    """What a run has lost and got back, since its start or resumption."""

    leases: int
    """Trainer sessions used."""
    redone_steps: int
    reused_rollouts: int
    """Completions of which finished work was used again."""
    seconds: float
    """Spent on getting trainers back."""

    @property
    def text(self) -> str:
        """For people."""
        counted = [
            _counted(self.leases, "trainer session") if self.leases > 1 else "",
            _counted(self.redone_steps, "step", " replayed"),
            _counted(self.reused_rollouts, "rollout", " reused"),
        ]
        spent = f"{self.seconds:.0f} s spent recovering"
        return ", ".join(text for text in (*counted, spent) if text)


def _counted(number: int, noun: str, fate: str = "") -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}{fate}" if number else ""


class Status(Message):
    """Where a run is; the answer of the `status` query."""

    run: str
    phase: str
    waiting_for: str
    standstill: str
    """Not empty if nothing has moved for long: since when, and what the run waits for."""
    step: int
    total_steps: int
    version: int
    rows_total: int
    rows_resolved: int
    groups_in_flight: int
    samples_in_flight: int
    groups_ready: int
    batch_size: int
    staleness_capacity: int
    reward: float | None
    step_seconds: float | None
    elapsed_seconds: float
    evaluations: dict[int, dict[str, float]]
    lease_epoch: int
    recovered: Recovered | None = None
    """None while nothing was lost."""
    checkpoint: str | None
    saved: list[str]
    """The last checkpoints: `step 4: <full path>`."""
    model: str | None
    error: str | None
    folder: str
    origin: str | None
    """Where a fork comes from."""
    notes: list[str]


class RunResult(Message):
    """What a run came to."""

    run: str
    folder: str
    steps: int
    version: int
    rows: int
    """Resolved: trained, or rejected for good."""
    stopped: bool
    seconds: float
    """From its start, or from where it was resumed."""
    checkpoint: str | None
    model: str | None = None
    """What the final policy was promoted to, where output_model_id asks for it."""
    evaluations: dict[int, dict[str, float]]
    recovered: Recovered | None = None
