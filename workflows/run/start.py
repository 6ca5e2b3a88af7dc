"""The first lease of a run: a trainer as the configuration starts it, saved and published.

Owns what comes before the first step: waiting for a session, what the run starts from, `state-0`,
which recovery can always come back to, and the initial policy. Doesn't own later leases
(recovery.py).
"""

from dataclasses import dataclass
from typing import Any

from temporalio import workflow
from temporalio.exceptions import ActivityError, ApplicationError

with workflow.unsafe.imports_passed_through():
    from activities.contracts import LeaseContract
    from activities.failure_types import WAITS_FOR, FailureKind, message_of
    from activities.messages import LoadAdapter, LoadCheckpoint, Publish, Published
    from workflows.run.live_config import Settings
    from workflows.run.producer import Producer
    from workflows.run.recovery import Recovery, backoff, remember
    from workflows.run.session import LeaseLostError, TrainerSession
    from workflows.run.state import CheckpointAt, RunState
    from workflows.run.step import save_checkpoint

START_PATIENCE = 120.0
"""Seconds for a service or a store that doesn't answer to be back, before the first session is had:
it may be starting. A name or address that is wrong isn't waited for any longer."""
AWAITED = (FailureKind.CAPACITY, FailureKind.UNAVAILABLE, FailureKind.STORE)
"""What a session is asked for again over; capacity for as long as it takes."""


@dataclass
class FirstLease:
    state: RunState
    settings: Settings
    trainer: TrainerSession
    producer: Producer
    recovery: Recovery

    async def acquire(self) -> None:
        """A session, its initial state saved, its policy published: a place to come back to.

        Raises:
            LeaseLostError: no session was available.
            ApplicationError: the service ends each session, and the run doesn't hold.
        """
        state = self.state
        attempts = 0
        deadline = workflow.time() + START_PATIENCE
        while True:
            try:
                state.enter("acquiring a trainer", "a trainer worker that opens a session")
                await self.trainer.acquire()
                await self._load_origin()
                state.enter("saving the initial state", "checkpoint state-0")
                saved = await save_checkpoint(self.trainer, state, step=0)
                state.enter("publishing the initial policy", "sampler weights")
                await self._publish_initial()
                remember(state, CheckpointAt(step=0, path=saved.path))
                return
            except LeaseLostError as loss:
                self.recovery.count(loss)
                await self.trainer.abandon(loss)
                if self.recovery.takes_for_fatal(loss):
                    await self.producer.settle_fatal()
                elif loss.kind in AWAITED and (
                    loss.kind == FailureKind.CAPACITY or workflow.time() < deadline
                ):
                    # Capacity may take days; nothing is held meanwhile.
                    state.enter(
                        f"waiting for {WAITS_FOR[FailureKind(loss.kind)]}",
                        f"a trainer session: {loss}",
                    )
                    await workflow.sleep(backoff(attempts))
                    attempts += 1
                elif state.grant is None:
                    raise
                elif self.recovery.suspects_step(loss):
                    await self.producer.settle_fatal()
                else:
                    await self.recovery.pause()

    async def _load_origin(self) -> None:
        """What the run's configuration starts from, where that isn't the base model."""
        config, lease = self.settings.config, self.trainer.ref
        if config.init_from_checkpoint is not None:
            field, path = "init_from_checkpoint", config.init_from_checkpoint
            activity: Any = LeaseContract.load_checkpoint
            order: Any = LoadCheckpoint(lease=lease, step=0, path=path)
        elif config.warm_start_from_adapter is not None:
            field, path = "warm_start_from_adapter", config.warm_start_from_adapter
            activity, order = LeaseContract.load_adapter, LoadAdapter(lease=lease, path=path)
        else:
            return
        self.state.enter("loading what the run starts from", path)
        try:
            await self.trainer.run(activity, order, f"load {path}")
        except ActivityError as error:
            cause = message_of(error)
            raise ApplicationError(
                f"{field} can't be used: {cause}", type="OriginRefused", non_retryable=True
            ) from error

    async def _publish_initial(self) -> None:
        published: Published = await self.trainer.run(
            LeaseContract.publish,
            Publish(lease=self.trainer.ref, version=self.state.admission.version),
            "publish the initial policy, v0",
        )
        self.state.snapshot = published.snapshot
        self.state.published_at = workflow.time()
