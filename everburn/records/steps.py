"""The record of an optimizer step: its ledger entry and its metrics.

Owns the values computed from the store when a step is committed. Reads only manifests, so that the
orchestrator process stays light. Doesn't own the ledger's rules (ledger.py), the metrics file
(metrics.py) or the execution of a step (workflows/run/step.py).
"""

import math
from collections.abc import Sequence

from everburn.learning.group import GroupManifest, load_group
from everburn.learning.reported import find_reported, reported_metrics
from everburn.records import metrics
from everburn.records.commands import changes_by, commands_between
from everburn.records.keys import group_key, submission_key
from everburn.records.ledger import LedgerEntry, StepCommit, StepRecord, commit
from everburn.records.run_folder import stored_config
from everburn.records.store import ArtifactStore


def commit_step(step: StepCommit) -> LedgerEntry:
    """Append the step to the ledger; a repeated call returns the first entry.

    Raises:
        LedgerConflictError
    """
    store = ArtifactStore.of(step.run)
    config = stored_config(step.run)
    batch = [load_group(store, key) for key in step.groups]
    commands = commands_between(store, step.incarnation, *step.command_range)
    reported = find_reported(store, step.step, step.submission_count, step.lease_key)
    known = {name: getattr(step, name) for name in StepRecord.model_fields}
    computed = batch_metrics(step, batch) | reported_metrics(reported)
    return commit(
        store,
        LedgerEntry(
            **known | {"metrics": step.metrics | computed},
            digests=[store.ref(group_key(key)).sha256 for key in step.groups],
            submissions=[
                store.ref(submission_key(step.step, submission, step.lease_key))
                for submission in range(step.submission_count)
            ],
            loss=config.loss,
            loss_config=config.sent_loss_config,
            changes=changes_by(commands),
            commands=commands,
        ),
    )


def record_step(store: ArtifactStore, entry: LedgerEntry) -> None:
    """Write the metrics record of a committed step."""
    record = metrics.Record(stream=metrics.STEP_STREAM, index=entry.step, values=entry.metrics)
    metrics.record(store, [record])


def batch_metrics(step: StepCommit, batch: Sequence[GroupManifest]) -> dict[str, metrics.Number]:
    """The `rollout/*` and `async/version_offset*` metrics of docs/metrics.md."""
    kept = [reward for group in batch for reward in group.rewards]
    raw_samples = len(kept) + step.rejected.samples
    own = step.prepared
    if own is None:
        kept_groups = sum(bool(group.datums) for group in batch)
        datums = sum(group.datums for group in batch)
    else:
        kept_groups, datums = len(own.groups), own.datums
    offsets = [step.version - 1 - group.version for group in batch]
    values: dict[str, metrics.Number] = {
        "rollout/raw_samples": raw_samples,
        "rollout/filtered_samples": len(kept),
        "rollout/kept_groups": kept_groups,
        "rollout/datums": datums,
        "rollout/updated": step.updated,
        "rollout/reward_std_within_group": _mean([group.reward_std for group in batch]),
        "async/version_offset_mean": _mean(offsets),
        "async/version_offset_max": max(offsets),
        "async/submissions": step.submission_count,
    }
    if raw_samples:
        total = math.fsum([*kept, step.rejected.total])
        values["rollout/raw_reward"] = total / raw_samples
        values["rollout/filter_ratio"] = 1 - len(kept) / raw_samples
    if kept:
        values["rollout/filtered_reward"] = _mean(kept)
    step_time = step.metrics.get("perf/step_time")
    if step_time:
        tokens = sum(member.tokens for group in batch for member in group.members)
        values["perf/step_samples_per_s"] = len(kept) / step_time
        values["perf/step_tokens_per_s"] = tokens / step_time
    return values


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
