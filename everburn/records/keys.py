"""The keys under which everything of a run lies in its store, relative to the run's folder.

Each is derived from what it identifies, so that a retried activity finds what its predecessor
wrote. Doesn't own the names of groups and completions (ids.py), or the data behind the keys.
"""

import hashlib
from collections.abc import Sequence

from everburn.records.ids import GroupKey, LeaseKey, group_ranges

ROLLOUTS = "rollouts"


def rollout_key(group: GroupKey, completion: int) -> str:
    return f"{ROLLOUTS}/{group.name}/completion-{completion}.parquet"


def call_log_key(group: GroupKey, completion: int) -> str:
    return f"{ROLLOUTS}/{group.name}/_calls-{completion}.jsonl"


GROUPS = "groups"


SANDBOXES = "sandboxes"


def completion_name(group: GroupKey, completion: int) -> str:
    return f"{group.name}.completion-{completion}"


def evaluation_name(version: int, part: str) -> str:
    return f"evaluation-{version:06d}.{part}"


def sandbox_key(owner: str, token: str) -> str:
    """A sandbox that an attempt at a completion, or at an evaluation's part, has registered."""
    return f"{SANDBOXES}/{owner}.{token}.json"


def group_key(group: GroupKey) -> str:
    return f"{GROUPS}/{group.name}.json"


# What a lease's holder records lies under the lease's name, so that a superseded holder, which may
# come back at any moment, has nothing of its successor's to overwrite.


def submission_key(step: int, submission: int, lease: LeaseKey) -> str:
    return f"steps/{step:06d}/{lease.name}/submission-{submission}.json"


def submission_metrics_key(step: int, submission: int, lease: LeaseKey) -> str:
    """What the trainer reported of a submission."""
    return f"steps/{step:06d}/{lease.name}/submission-{submission}-metrics.json"


def prepared_batch_key(step: int, groups: Sequence[GroupKey]) -> str:
    """What `prepare_batch` made of a step's batch. The batch is part of the name: a resumed run may
    put another one together for the same step."""
    batch = hashlib.sha256(group_ranges(groups).encode()).hexdigest()
    return f"steps/{step:06d}/advantages-{batch[:12]}.parquet"


LEDGER = "ledger"


def ledger_key(step: int) -> str:
    return f"{LEDGER}/{step:06d}.json"


COMMANDS = "commands"


def command_key(incarnation: int, number: int) -> str:
    return f"{COMMANDS}/{incarnation:03d}-{number:06d}.json"


PUBLICATIONS = "publications"


def publication_key(version: int, lease: LeaseKey) -> str:
    return f"{PUBLICATIONS}/{lease.name}/{version:06d}.json"


def current_publication_key(lease: LeaseKey) -> str:
    return f"{PUBLICATIONS}/{lease.name}/current.json"


def checkpoints_of(step: int) -> str:
    return f"checkpoints/state-{step}"


def checkpoint_key(step: int, lease: LeaseKey) -> str:
    return f"{checkpoints_of(step)}/{lease.name}.json"


def evaluation_key(version: int) -> str:
    return f"evaluations/{version:06d}.json"


def evaluation_folder(version: int) -> str:
    return f"evaluations/{version:06d}"


def evaluation_shard_key(version: int, shard: int) -> str:
    return f"{evaluation_folder(version)}/shard-{shard:04d}.json"


def evaluation_row_key(version: int, index: int) -> str:
    """A held-out row's sample, until its shard is written."""
    return f"{evaluation_folder(version)}/row-{index:06d}.json"


def evaluation_figures_key(version: int) -> str:
    """What the run's evaluation function returned."""
    return f"{evaluation_folder(version)}/figures.json"


def evaluation_log_key(version: int, part: str) -> str:
    return f"{evaluation_folder(version)}/_calls-{part}.jsonl"


CONFIG_KEY = "config.json"


ROWS_KEY = "rows.jsonl"


EVALUATION_ROWS_KEY = "evaluation-rows.jsonl"


METRICS_KEY = "metrics.jsonl"
