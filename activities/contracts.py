"""The activities as workflows see them: names, messages, and the limits that both sides keep.

Workflow modules import this one and never an implementation, so that the orchestrator's process
stays light. One class per worker that serves its activities. Doesn't own what an activity does:
the implementations subclass the contracts.
"""

from collections.abc import Callable
from inspect import iscoroutinefunction
from typing import Any, Protocol

from temporalio import activity

from activities import messages
from everburn.records.ids import GroupResult, RolloutOutcome, RunRef
from everburn.records.ledger import PreparedBatch, StepCommit

LOAD_TIMEOUT = 600.0
"""Seconds that the user's factory may block: as long as preparing a task may take."""
LEASE_SLOTS = 64
"""Concurrent activities on a lease's queue: more than submissions are ever pending."""


class RecordContract(Protocol):
    """The orchestrator's activities on a run's folder."""

    @activity.defn
    async def create_run(self, order: messages.CreateRun) -> messages.RunCreated:
        """Make the run's folder, and find out what the server supports."""

    @activity.defn
    async def commit_step(self, step: StepCommit) -> messages.Committed:
        """Append a step to the ledger, and write its metrics."""

    @activity.defn
    async def skip_group(self, order: messages.SkipGroup) -> None:
        """Record that a row isn't tried again, for a resume."""

    @activity.defn
    async def record_command(self, order: messages.RecordCommand) -> None:
        """Record a command that the run received, or how the run ended."""

    @activity.defn
    async def record_producer(self, order: messages.RecordProducer) -> None:
        """Append producer samples to the metrics."""

    @activity.defn
    async def record_evaluation(self, order: messages.RecordEvaluation) -> None:
        """Add an evaluation's metrics to its step's record."""

    @activity.defn
    async def carry_publication(self, order: messages.CarryPublication) -> None:
        """Let the previous version's snapshot serve a version that changed nothing."""

    @activity.defn
    async def finish_run(self, order: messages.FinishRun) -> None:
        """Write the evaluations before and after training, and the last checkpoint's time."""

    @activity.defn
    async def count_sandboxes(self, run: RunRef) -> int:
        """How many sandboxes of completions are still registered."""


class ReconciliationContract(Protocol):
    """The orchestrator's checks of what a run waits for."""

    @activity.defn
    async def reconcile(self, order: messages.Reconcile) -> messages.Reconciled:
        """Check everything that the run waits for."""

    @activity.defn
    async def run_is_open(self, within: messages.RunIncarnation) -> bool:
        """Whether the run still waits for the work of its child."""


class RolloutContract(Protocol):
    """Activities of rollout workers: everything that runs the user's code."""

    @activity.defn
    async def prepare_task(self, run: RunRef) -> messages.Prepared:
        """Resolve the run's entry points, and read and keep its rows."""

    @activity.defn
    async def rollout(self, order: messages.RolloutOrder) -> RolloutOutcome:
        """One completion of one row, to its terminal record."""

    @activity.defn
    async def complete_group(self, order: messages.CompleteGroup) -> GroupResult:
        """Advantages, dynamic filter and manifest of a group whose completions have ended."""

    @activity.defn
    async def reap(self, run: RunRef) -> messages.ReapResult:
        """Clean up the sandboxes of completions whose workers died."""

    @activity.defn
    async def evaluate_shard(self, order: messages.ShardOrder) -> None:
        """Evaluate some held-out rows."""

    @activity.defn
    async def evaluate_function(
        self, order: messages.EvaluateFunction
    ) -> messages.EvaluationSummary:
        """The user's evaluation function, with the rollout function pinned to the version."""

    @activity.defn
    async def complete_evaluation(
        self, order: messages.CompleteEvaluation
    ) -> messages.EvaluationSummary:
        """Write an evaluation's report."""


class ProvisioningContract(Protocol):
    """Short activities of trainer workers on a run's trainer job and deployment."""

    @activity.defn
    async def advance_provisioning(self, run: RunRef) -> messages.ProvisioningReadiness:
        """Do what can be done now towards a running job and a ready deployment."""

    @activity.defn
    async def clean_up_provisioning(self, run: RunRef, orphaned: bool = False) -> str:
        """Give back what the run made; returns what was done, in words.

        orphaned: the caller found the run gone. If it was resumed meanwhile, it uses what its
        former incarnation made, and nothing is given back.
        """


class TrainerContract(Protocol):
    """What any trainer worker does for a lease."""

    @activity.defn
    async def acquire_lease(self, ref: messages.LeaseRef) -> messages.LeaseGrant:
        """Open a trainer session, and a task queue that only this process serves."""


class HolderContract(Protocol):
    """What the holder of a lease does, on the lease's own queue."""

    @activity.defn
    async def hold_lease(self, ref: messages.LeaseRef) -> None:
        """Stay as long as the session lives; returns at its release, fails when it is lost."""

    @activity.defn
    async def release_lease(self, ref: messages.LeaseRef) -> None:
        """Give the session back, and stop serving its queue."""


class LeaseContract(Protocol):
    """The operations of a lease, on its own queue. Each happens once, however often it is asked
    for."""

    @activity.defn
    async def prepare_batch(self, order: messages.PrepareBatch) -> PreparedBatch:
        """Advantages of the sealed batch, by the user's function; found where it has run before."""

    @activity.defn
    async def forward_backward(self, order: messages.SubmitGroups) -> messages.Submitted:
        """Send the gradients of some groups; results of several may be pending together."""

    @activity.defn
    async def optim_step(self, order: messages.OptimStep) -> messages.OptimStepped:
        """One optimizer step over the accumulated gradients."""

    @activity.defn
    async def publish(self, order: messages.Publish) -> messages.Published:
        """Save sampler weights, check that they are served, and record who serves the version."""

    @activity.defn
    async def save_checkpoint(self, order: messages.SaveCheckpoint) -> messages.Saved:
        """Save weights and optimizer, and record the checkpoint."""

    @activity.defn
    async def load_checkpoint(self, order: messages.LoadCheckpoint) -> None:
        """Replace weights and optimizer by a saved state."""

    @activity.defn
    async def load_adapter(self, order: messages.LoadAdapter) -> None:
        """Replace the adapter's weights."""

    @activity.defn
    async def promote(self, order: messages.Promote) -> messages.Promoted:
        """Make a model of the account from a snapshot, for as long as its session lives."""

    @activity.defn
    async def replay_step(self, order: messages.ReplayStep) -> None:
        """Apply a committed step again."""


def activities_of(contract: type, implementation: object) -> list[Callable[..., Any]]:
    """The contract's activities, as a worker registers them."""
    names = [name for name, member in vars(contract).items() if iscoroutinefunction(member)]
    return [getattr(implementation, name) for name in names]
