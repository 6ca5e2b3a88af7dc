"""The activities as workflows see them: names, messages, and the limits that both sides keep.

Workflow modules import this module and no implementation, which keeps the orchestrator process
light. One class per worker that serves its activities. Doesn't own what an activity does: the
implementations subclass the contracts.
"""

from collections.abc import Callable
from inspect import iscoroutinefunction
from typing import Any, Protocol

from temporalio import activity

from activities import messages
from everburn.records.ids import GroupResult, RolloutOutcome, RunRef
from everburn.records.ledger import PreparedBatch, StepCommit

LOAD_TIMEOUT = 600.0
"""Seconds that the user's factory may block; also the limit for preparing a task."""
LEASE_SLOTS = 64
"""Concurrent activities on a lease's queue; more than the submissions ever pending."""


class RecordContract(Protocol):
    """The orchestrator's activities on a run's folder."""

    @activity.defn
    async def create_run(self, order: messages.CreateRun) -> messages.RunCreated:
        """Create the run's folder, and check what the server supports."""

    @activity.defn
    async def commit_step(self, step: StepCommit) -> messages.Committed:
        """Append a step to the ledger, and write its metrics."""

    @activity.defn
    async def skip_group(self, order: messages.SkipGroup) -> None:
        """Record that a row is given up, so that a resume doesn't retry it."""

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
        """Serve a version that changed no weights from the previous version's snapshot."""

    @activity.defn
    async def finish_run(self, order: messages.FinishRun) -> None:
        """Write the evaluations before and after training, and the last checkpoint's save time."""

    @activity.defn
    async def count_sandboxes(self, run: RunRef) -> int:
        """Count the sandboxes that are still registered."""


class ReconciliationContract(Protocol):
    """The orchestrator's checks of what a run waits for."""

    @activity.defn
    async def reconcile(self, order: messages.Reconcile) -> messages.Reconciled:
        """Check everything that the run waits for."""

    @activity.defn
    async def run_is_open(self, within: messages.RunIncarnation) -> bool:
        """Whether the run still waits for its child workflow."""


class RolloutContract(Protocol):
    """Activities of rollout workers: everything that runs the user's code."""

    @activity.defn
    async def prepare_task(self, run: RunRef) -> messages.Prepared:
        """Resolve the run's entry points, and store its dataset rows."""

    @activity.defn
    async def rollout(self, order: messages.RolloutOrder) -> RolloutOutcome:
        """Sample one completion of a row, and record its outcome."""

    @activity.defn
    async def complete_group(self, order: messages.CompleteGroup) -> GroupResult:
        """Write a group's advantages, filter result and manifest, once all completions ended."""

    @activity.defn
    async def reap(self, run: RunRef) -> messages.ReapResult:
        """Clean up sandboxes whose workers died."""

    @activity.defn
    async def evaluate_shard(self, order: messages.ShardOrder) -> None:
        """Evaluate some held-out rows."""

    @activity.defn
    async def evaluate_function(
        self, order: messages.EvaluateFunction
    ) -> messages.EvaluationSummary:
        """Call the user's evaluation function, with the rollout function pinned to a version."""

    @activity.defn
    async def complete_evaluation(
        self, order: messages.CompleteEvaluation
    ) -> messages.EvaluationSummary:
        """Write an evaluation's report."""


class ProvisioningContract(Protocol):
    """Short activities of trainer workers on a run's trainer job and deployment."""

    @activity.defn
    async def advance_provisioning(self, run: RunRef) -> messages.ProvisioningReadiness:
        """Take the next possible step towards a running job and a ready deployment."""

    @activity.defn
    async def clean_up_provisioning(self, run: RunRef, orphaned: bool = False) -> str:
        """Delete what the run provisioned; returns a description of what was done.

        orphaned: the caller found the run gone. If it was resumed meanwhile, it uses what its
        former incarnation provisioned, and nothing is deleted.
        """


class TrainerContract(Protocol):
    """Lease activities that any trainer worker can execute."""

    @activity.defn
    async def acquire_lease(self, ref: messages.LeaseRef) -> messages.LeaseGrant:
        """Open a trainer session, and a task queue that only this process serves."""


class HolderContract(Protocol):
    """Activities of a lease's holder, on the lease's own queue."""

    @activity.defn
    async def hold_lease(self, ref: messages.LeaseRef) -> None:
        """Run as long as the session lives; returns on release, fails if the lease fails."""

    @activity.defn
    async def release_lease(self, ref: messages.LeaseRef) -> None:
        """Close the session, and stop serving its queue."""


class LeaseContract(Protocol):
    """The operations of a lease, on its own queue. Each is executed once, even if repeated."""

    @activity.defn
    async def prepare_batch(self, order: messages.PrepareBatch) -> PreparedBatch:
        """Compute the sealed batch's advantages with the user's function, or read stored ones."""

    @activity.defn
    async def forward_backward(self, order: messages.SubmitGroups) -> messages.Submitted:
        """Submit some groups for their gradients; several submissions may be pending."""

    @activity.defn
    async def optim_step(self, order: messages.OptimStep) -> messages.OptimStepped:
        """One optimizer step over the accumulated gradients."""

    @activity.defn
    async def publish(self, order: messages.Publish) -> messages.Published:
        """Save sampler weights, check that they are served, and record the publication."""

    @activity.defn
    async def save_checkpoint(self, order: messages.SaveCheckpoint) -> messages.Saved:
        """Save weights and optimizer, and record the checkpoint."""

    @activity.defn
    async def load_checkpoint(self, order: messages.LoadCheckpoint) -> None:
        """Replace weights and optimizer with a saved state."""

    @activity.defn
    async def load_adapter(self, order: messages.LoadAdapter) -> None:
        """Replace the adapter's weights."""

    @activity.defn
    async def promote(self, order: messages.Promote) -> messages.Promoted:
        """Promote a snapshot to a model of the account, while the snapshot's session lives."""

    @activity.defn
    async def replay_step(self, order: messages.ReplayStep) -> None:
        """Apply a committed step again."""


def activities_of(contract: type, implementation: object) -> list[Callable[..., Any]]:
    """The contract's activities, as a worker registers them."""
    names = [name for name, member in vars(contract).items() if iscoroutinefunction(member)]
    return [getattr(implementation, name) for name in names]
