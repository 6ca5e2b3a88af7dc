"""The first lease of a run: a trainer as the configuration starts it, saved and published.

Owns what comes before the first step: the wait for a session, the model that the run starts from,
`state-0`, from which recovery can always start, and the initial policy. Doesn't own later leases
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
    from workflows.run.parts import RunParts
    from workflows.run.recovery import Recovery, backoff
    from workflows.run.session import LeaseFailedError

START_PATIENCE = 120.0
"""Seconds that a service or a store may not answer before the first session: it may be starting. A
wrong name or address isn't waited for any longer."""
AWAITED = (FailureKind.CAPACITY, FailureKind.UNAVAILABLE, FailureKind.STORE)
"""Failures after which a session is requested again; after CAPACITY without limit."""


@dataclass
class FirstLease:
    parts: RunParts
    recovery: Recovery

    async def acquire(self) -> None:
        """Open a session, save its initial state, publish its policy.

        Raises:
            LeaseFailedError: no session was available.
            ApplicationError: the service ends each session, and the run doesn't hold.
        """
        attempts = 0
        deadline = workflow.time() + START_PATIENCE
        while True:
            try:
                await self._begin()
                return
            except LeaseFailedError as error:
                self.recovery.count(error)
                await self.parts.trainer.abandon(error)
                waits = error.kind == FailureKind.CAPACITY or workflow.time() < deadline
                if self.recovery.takes_for_fatal(error):
                    await self.parts.producer.settle_fatal()
                elif error.kind in AWAITED and waits:
                    phase = f"waiting for {WAITS_FOR[FailureKind(error.kind)]}"
                    self.parts.state.enter(phase, f"a trainer session: {error}")
                    await workflow.sleep(backoff(attempts))
                    attempts += 1
                elif not self.parts.trainer.granted:
                    raise
                elif self.recovery.suspects_step(error):
                    await self.parts.producer.settle_fatal()
                else:
                    await self.recovery.pause()

    async def _begin(self) -> None:
        state, trainer = self.parts.state, self.parts.trainer
        state.enter("acquiring a trainer", "a trainer worker that opens a session")
        await trainer.acquire()
        await self._load_origin()
        state.enter("saving the initial state", "checkpoint state-0")
        saved = await self.parts.checkpoints.save(step=0)
        state.enter("publishing the initial policy", "sampler weights")
        published: Published = await trainer.run(
            LeaseContract.publish,
            Publish(lease=trainer.ref, version=state.version),
            "publish the initial policy, v0",
        )
        state.step.publish(published.snapshot, workflow.time())
        state.checkpoints.remember(0, saved.path)

    async def _load_origin(self) -> None:
        """Load what the configuration starts from, unless that is the base model."""
        config, lease = self.parts.config, self.parts.trainer.ref
        if config.init_from_checkpoint is not None:
            field, path = "init_from_checkpoint", config.init_from_checkpoint
            activity: Any = LeaseContract.load_checkpoint
            order: Any = LoadCheckpoint(lease=lease, step=0, path=path)
        elif config.warm_start_from_adapter is not None:
            field, path = "warm_start_from_adapter", config.warm_start_from_adapter
            activity, order = LeaseContract.load_adapter, LoadAdapter(lease=lease, path=path)
        else:
            return
        self.parts.state.enter("loading what the run starts from", path)
        try:
            await self.parts.trainer.run(activity, order, f"load {path}")
        except ActivityError as error:
            raise ApplicationError(
                f"{field} can't be used: {message_of(error)}",
                type="OriginRefused",
                non_retryable=True,
            ) from error
