"""What workflows receive at start and by signal, and what `status` answers.

Signals are keyed and idempotent: a repeated one changes nothing.
"""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from activities.messages import (
    LeaseGrant,
    LeaseRef,
    ProvisioningReadiness,
)
from everburn.records.ids import (
    GroupKey,
    GroupResult,
    Leased,
    RunRef,
)

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


class GroupReport(Message):
    """How a group ended. `failures` has one flag per completion that counts for the breaker, in
    the order in which they ended: true for a recoverable failure, false for a success."""

    result: GroupResult
    drops: int = 0
    reused: int = 0
    """Completions that used what an earlier attempt had finished."""
    failures: list[bool] = Field(default_factory=list)
    error: str | None = None
    """What failed first."""
    error_type: str | None = None
    completion: int | None = None
    """The one that failed first."""
    failed: int = 0
    """Completions that ended in a failure."""

    @property
    def key(self) -> GroupKey:
        return self.result.key


class RolloutsFailed(Message):
    """The failed rollouts of a policy version, as details of the run's failure.

    evaluation: whether they were of held-out rows. failed: how many of those that had ended.
    first: the first failure.
    """

    version: int
    evaluation: bool
    failed: int
    first: str

    def counting(self, report: GroupReport) -> "RolloutsFailed":
        """Count another group, if it belongs to the same version."""
        if self.evaluation or report.result.version != self.version:
            return self
        return self.model_copy(update={"failed": self.failed + report.failed})


class Released(Message):
    """total: completions of the group that have ended so far."""

    key: GroupKey
    total: int


class ProvisioningWait(Message):
    """How long a lease may wait for its trainer job and deployment, and how long it has waited. In
    seconds of workflow time."""

    pending_timeout: float
    """For capacity."""
    ready_timeout: float
    """For a start on machines that are available."""
    stage: Literal["pending", "starting"] = "starting"
    stage_begun: float = 0.0
    resumptions: int = 0
    """How often the job stopped and was started again."""

    def continued(self, found: ProvisioningReadiness, now: float) -> "ProvisioningWait":
        """After another check that found it not ready."""
        stage: Literal["pending", "starting"] = (
            "pending" if found.stage == "pending" else "starting"
        )
        begins = not self.stage_begun or stage != self.stage
        return self.model_copy(
            update={
                "stage": stage,
                "stage_begun": now if begins else self.stage_begun,
                "resumptions": self.resumptions + found.resumed,
            }
        )


class LeaseOrder(Message):
    """provisioning: for a lease that needs a trainer job and a deployment first."""

    lease: LeaseRef
    provisioning: ProvisioningWait | None = None


class LeaseWaiting(Leased):
    """text: what the lease waits for."""

    text: str


class LeaseGranted(Message):
    grant: LeaseGrant


class LeaseEnded(Leased):
    """The lease is over: released, lost, or never granted."""

    error: str | None = None
    error_type: str | None = None


class EvaluationOrder(Message):
    """An evaluation that an incarnation of the run has begun. rows: held-out rows; 0 for an
    evaluation function."""

    run: RunRef
    incarnation: int
    version: int
    rows: int
    timeout: float
    search_attributes: bool
    count_failures: bool = False
    """Whether a failed evaluation continues until all failures are counted."""


class EvaluationReport(Message):
    """incarnation: of the run that started the evaluation."""

    version: int
    incarnation: int
    metrics: dict[str, float]
    error: str | None = None
    failed: int = 0
    """Rows that failed."""


class StopRequest(Message):
    """drain: await rollouts in flight instead of cancelling them."""

    drain: bool = False


class Recovered(Message):
    """What a run has lost and recovered, since its start or resumption."""

    leases: int
    """Trainer sessions used."""
    redone_steps: int
    reused_rollouts: int
    """Completions whose finished work was used again."""
    seconds: float
    """Spent on recoveries."""

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


def _counted(number: int, noun: str, verb: str = "") -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}{verb}" if number else ""


class Status(Message):
    """Where a run is; the answer of the `status` query."""

    run: str
    phase: str
    waiting_for: str
    stall: str
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
    """None if nothing was lost."""
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
    """The result of a run."""

    run: str
    folder: str
    steps: int
    version: int
    rows: int
    """Resolved: trained, or rejected for good."""
    stopped: bool
    seconds: float
    """Since its start or resumption."""
    checkpoint: str | None
    model: str | None = None
    """The model that the final policy was promoted to, if output_model_id is set."""
    evaluations: dict[int, dict[str, float]]
    recovered: Recovered | None = None
