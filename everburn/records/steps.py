"""The record of an optimizer step: its ledger entry and its metrics.

Owns what is computed from the store when a step is committed. Reads manifests only, so it is at
home in the light orchestrator process. Doesn't own the ledger's rules (ledger.py), the metrics
file (metrics.py) or the course of a step (workflows/run/step.py).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from everburn.learning.group import GroupManifest, load_group
from everburn.learning.reported import find_reported, reported_metrics
from everburn.records import metrics
from everburn.records.commands import changes_by, controls_of
from everburn.records.ids import GroupKey, RewardSum, RunRef, decode_groups, group_ranges
from everburn.records.keys import group_key, submission_key
from everburn.records.ledger import AdamParams, LedgerEntry, PreparedBatch, commit
from everburn.records.run_folder import stored_config
from everburn.records.store import ArtifactStore


@dataclass(frozen=True)
class StepOutcome:
    """What the workflow knows of a step that the store doesn't.

    groups: the batch. rejected: completions of rows rejected since the previous commit. attempts:
    how often the step was begun, once per lease. submissions: how many requests were sent. life,
    told: the numbers, start and stop, of what the run was told since the previous commit. metrics:
    timings and what trainer and scheduler reported.
    """

    step: int
    version: int
    epoch: int
    updated: bool
    groups: Sequence[GroupKey]
    rejected: RewardSum
    attempts: int
    submissions: int
    prepared: PreparedBatch | None
    adam: AdamParams
    snapshot: str
    checkpoint: str | None
    life: int
    told: tuple[int, int]
    seconds: float
    metrics: dict[str, float | int]


def commit_step(run: RunRef, outcome: StepOutcome) -> LedgerEntry:
    """Append the step to the ledger; again returns what was committed first.

    Raises:
        LedgerConflictError
    """
    store = ArtifactStore.of(run)
    config = stored_config(run)
    batch = [load_group(store, key) for key in outcome.groups]
    manifests = [store.ref(group_key(key)) for key in outcome.groups]
    parts = range(outcome.submissions)
    controls = controls_of(store, outcome.life, *outcome.told)
    reported = find_reported(store, outcome.step, outcome.submissions, outcome.epoch)
    return commit(
        store,
        LedgerEntry(
            step=outcome.step,
            version=outcome.version,
            epoch=outcome.epoch,
            updated=outcome.updated,
            attempts=outcome.attempts,
            groups=[key.text for key in outcome.groups],
            digests=[ref.sha256 for ref in manifests],
            submissions=[
                store.ref(submission_key(outcome.step, part, outcome.epoch)) for part in parts
            ],
            prepared=_readable(outcome.prepared),
            loss=config.loss,
            loss_config=config.sent_loss_config,
            adam=outcome.adam,
            snapshot=outcome.snapshot,
            checkpoint=outcome.checkpoint,
            changes=changes_by(controls),
            controls=controls,
            seconds=outcome.seconds,
            metrics=outcome.metrics | batch_metrics(outcome, batch) | reported_metrics(reported),
        ),
    )


def _readable(prepared: PreparedBatch | None) -> PreparedBatch | None:
    """History packs its groups; the ledger is for people, too."""
    if prepared is None:
        return None
    return prepared.model_copy(update={"groups": group_ranges(decode_groups(prepared.groups))})


def record_step(store: ArtifactStore, entry: LedgerEntry) -> None:
    """Write the metrics record of a committed step."""
    step = metrics.Record(stream=metrics.STEP_STREAM, index=entry.step, values=entry.metrics)
    metrics.record(store, [step])


def batch_metrics(
    outcome: StepOutcome, batch: Sequence[GroupManifest]
) -> dict[str, float | int | bool]:
    """The `rollout/*` and `async/version_offset*` metrics of docs/metrics.md."""
    kept = [reward for group in batch for reward in group.rewards]
    raw_samples = len(kept) + outcome.rejected.samples
    own = outcome.prepared
    if own is None:
        kept_groups = sum(bool(group.datums) for group in batch)
        datums = sum(group.datums for group in batch)
    else:
        kept_groups, datums = len(decode_groups(own.groups)), own.datums
    offsets = [outcome.version - 1 - group.version for group in batch]
    values: dict[str, float | int | bool] = {
        "rollout/raw_samples": raw_samples,
        "rollout/filtered_samples": len(kept),
        "rollout/kept_groups": kept_groups,
        "rollout/datums": datums,
        "rollout/updated": outcome.updated,
        "rollout/reward_std_within_group": _mean([group.reward_std for group in batch]),
        "async/version_offset_mean": _mean(offsets),
        "async/version_offset_max": max(offsets),
        "async/submissions": outcome.submissions,
    }
    if raw_samples:
        total = math.fsum([*kept, outcome.rejected.total])
        values["rollout/raw_reward"] = total / raw_samples
        values["rollout/filter_ratio"] = 1 - len(kept) / raw_samples
    if kept:
        values["rollout/filtered_reward"] = _mean(kept)
    step_time = outcome.metrics.get("perf/step_time")
    if step_time:
        tokens = sum(member.tokens for group in batch for member in group.members)
        values["perf/step_samples_per_s"] = len(kept) / step_time
        values["perf/step_tokens_per_s"] = tokens / step_time
    return values


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
