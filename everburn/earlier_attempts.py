"""What earlier attempts of a row have left: rollouts that were finished, calls that were recorded.

An attempt's number grows when its child died, was cancelled by a stop, or failed for good on one
completion; what its other completions had finished is as good as ever, and is used. Where an
attempt came to a group, its draws were used: the next one draws afresh. Owns that rule. Doesn't own
the files themselves (learning/rollout_file.py, call_log.py).
"""

from everburn.learning.rollout_file import read_rollout, write_rollout
from everburn.refs import (
    ROLLOUTS,
    GroupKey,
    call_log_key,
    group_key,
    rollout_key,
)
from everburn.store import ArtifactStore


def adopt_rollout(store: ArtifactStore, group: GroupKey, completion: int, version: int) -> bool:
    """Take over the completion's rollout from an earlier attempt, if one has finished it.

    version: the stamp of this attempt; which versions were sampled from stays on record.
    """
    for earlier in unused_attempts(store, group):
        key = rollout_key(earlier, completion)
        if store.exists(key):
            record, run = read_rollout(store, key)
            stamp = {"attempt": group.attempt, "version": version}
            write_rollout(
                store, rollout_key(group, completion), record.model_copy(update=stamp), run
            )
            return True
    return False


def earlier_call_logs(store: ArtifactStore, group: GroupKey, completion: int) -> list[str]:
    """The keys of what earlier attempts recorded of the completion's calls, newest first."""
    keys = [call_log_key(earlier, completion) for earlier in unused_attempts(store, group)]
    return [key for key in keys if store.exists(key)]


def unused_attempts(store: ArtifactStore, group: GroupKey) -> list[GroupKey]:
    """Earlier attempts of the row since the last that came to a group, newest first."""
    if group.attempt == 0:
        return []
    names = (key.rpartition("/")[2] for key in store.keys(ROLLOUTS))
    found = [GroupKey.named(name) for name in names if name.startswith(f"row-{group.cursor:06d}.")]
    earlier = sorted((k.attempt for k in found if k.attempt < group.attempt), reverse=True)
    attempts = []
    for attempt in earlier:
        key = GroupKey(cursor=group.cursor, attempt=attempt)
        if store.exists(group_key(key)):
            break
        attempts.append(key)
    return attempts
