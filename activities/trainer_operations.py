"""What the holder of a lease does with its session: each operation, from its message to the domain
and back.

Doesn't own who may ask for it, and how often (trainer.py): asked twice, an operation is done twice.
The run's folder is another matter: what an operation reads and writes there may be done again, and
a store that fails for a while ends no lease.
"""

import asyncio
import time
from functools import partial
from typing import TYPE_CHECKING

from activities.messages import (
    LoadCheckpoint,
    Publish,
    Published,
    ReplayStep,
    SaveCheckpoint,
    Saved,
    SubmitGroups,
    Submitted,
)

if TYPE_CHECKING:
    from everburn.learning.batch import Score
    from everburn.trainers.lease import Lease


def scoring(lease: "Lease", loop: asyncio.AbstractEventLoop) -> "Score":
    """The session's forward pass for user code, which runs on a loop of its own."""
    from everburn.trainers.guards import require_finite_logprobs

    async def forward(sequences: list[list[int]]) -> list[list[float]]:
        return require_finite_logprobs("forward", await lease.trainer.forward(sequences))

    async def score(sequences: list[list[int]]) -> list[list[float]]:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(forward(sequences), loop))

    return score


async def submit(lease: "Lease", order: SubmitGroups) -> Submitted:
    from everburn.learning.diagnostics import policy_distance
    from everburn.learning.reported import record_reported
    from everburn.learning.submissions import prepare_submission
    from everburn.records.run_folder import stored_config
    from everburn.records.store import ArtifactStore, through_outages
    from everburn.trainers.guards import require_finite_gradients

    run = order.lease.run
    store, config = ArtifactStore.of(run), await through_outages(stored_config, run)
    datums = await through_outages(
        prepare_submission,
        store,
        order.step,
        order.part,
        order.lease.epoch,
        order.groups,
        order.prepared,
    )
    gradients = await lease.in_turn(
        order.step,
        order.part,
        lambda: lease.trainer.forward_backward(datums, config.loss, config.loss_config),
    )
    require_finite_gradients(gradients)
    distance = policy_distance(datums, gradients.logprobs, config.clip)
    await through_outages(
        record_reported,
        store,
        order.step,
        order.part,
        order.lease.epoch,
        distance.tokens,
        gradients.metrics,
    )
    return Submitted(
        datums=len(datums),
        loss_sum=gradients.metrics.get("loss:sum"),
        total_tokens=gradients.metrics.get("total_tokens:sum"),
        distance=distance,
        loss_metrics=gradients.loss_metrics,
    )


async def publish(lease: "Lease", order: Publish) -> Published:
    from everburn.records.publications import Publication, publish
    from everburn.records.run_folder import stored_config
    from everburn.records.store import ArtifactStore, through_outages
    from everburn.trainers.probe import check_served, recorded_completion

    started = time.monotonic()
    run = order.lease.run
    store, config = ArtifactStore.of(run), await through_outages(stored_config, run)
    if not order.current and config.dedicated:
        # A deployment serves one version: older ones go on at the current one.
        return Published(snapshot="", seconds=0.0)
    recorded = asyncio.create_task(
        through_outages(recorded_completion, store, order.version, lease.epoch)
    )
    snapshot = await lease.trainer.publish(f"policy-{order.version:04d}-e{lease.epoch}")
    gap = await check_served(lease.trainer, snapshot, *await recorded, config.served_tolerance)
    publication = Publication(
        version=order.version,
        epoch=lease.epoch,
        snapshot=snapshot.path,
        handle=snapshot.handle,
        shared=snapshot.shared,
    )
    await through_outages(partial(publish, current=order.current), store, publication)
    return Published(snapshot=snapshot.path, seconds=time.monotonic() - started, gap=gap)


async def load_checkpoint(lease: "Lease", order: LoadCheckpoint) -> None:
    from everburn.records.run_folder import stored_config
    from everburn.records.store import ArtifactStore, through_outages
    from everburn.trainers.fencing import check_fingerprint

    run = order.lease.run
    config = await through_outages(stored_config, run)
    await lease.trainer.load_checkpoint(order.path)
    if config.dedicated:
        await check_fingerprint(ArtifactStore.of(run), lease.trainer, order.path)


async def save_checkpoint(lease: "Lease", order: SaveCheckpoint) -> Saved:
    from everburn.records.checkpoints import Checkpoint, record_checkpoint
    from everburn.records.run_folder import stored_config
    from everburn.records.store import ArtifactStore, through_outages
    from everburn.trainers.fencing import record_fingerprint

    config = await through_outages(stored_config, order.lease.run)
    started = time.monotonic()
    path = await lease.trainer.save_checkpoint(order.name)
    checkpoint = Checkpoint(
        step=order.step,
        version=order.version,
        path=path,
        epoch=lease.epoch,
        base_model=config.base_model,
        lora_rank=config.lora_rank,
        adapter_seed=config.seed,
    )
    store = ArtifactStore.of(order.lease.run)
    if config.dedicated:
        await record_fingerprint(store, lease.trainer, path)
    await through_outages(record_checkpoint, store, checkpoint)
    return Saved(path=path, seconds=time.monotonic() - started)


async def replay(lease: "Lease", order: ReplayStep) -> None:
    from everburn.records.ledger import read_entry
    from everburn.records.replay import replay_step
    from everburn.records.store import ArtifactStore, through_outages

    store = ArtifactStore.of(order.lease.run)
    await replay_step(store, lease.trainer, await through_outages(read_entry, store, order.step))
