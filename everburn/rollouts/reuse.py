"""Earlier attempts of a row, whose finished work is used again.

A row gets a new attempt when its group's workflow died, was cancelled by a stop, or when one
completion failed finally; the other completions' finished work is used again. If an attempt
produced a completed group, its rollouts were consumed: the next attempt samples new ones. Owns that
rule. Doesn't own what is used of them (destinations.py, call_log.py).
"""

import threading
from collections import defaultdict

from everburn.records.ids import (
    GroupKey,
    in_order,
)
from everburn.records.keys import ROLLOUTS, group_key
from everburn.records.store import ArtifactStore


class EarlierAttempts:
    """The earlier attempts at all rows of a run, as one process finds them.

    Attempts of this incarnation of the run are asked for one by one: their numbers follow each
    other. What earlier incarnations have left is listed once, since there is one name per row that
    ever began. What a worker of theirs adds later is done again.
    """

    def __init__(self, store: ArtifactStore) -> None:
        self._store = store
        self._listing = threading.Lock()
        self._listed_for = 0
        self._listed: dict[int, list[GroupKey]] = {}
        """For each cursor, the attempts of earlier incarnations, the newest first."""

    def unused(self, group: GroupKey) -> list[GroupKey]:
        """Earlier attempts of the row since the last that came to a group, newest first."""
        numbers = reversed(range(group.attempt))
        own = [group.model_copy(update={"attempt": number}) for number in numbers]
        attempts = []
        for key in [*own, *self._of_earlier_incarnations(group)]:
            if self._store.exists(group_key(key)):
                break
            attempts.append(key)
        return attempts

    def _of_earlier_incarnations(self, group: GroupKey) -> list[GroupKey]:
        if group.incarnation == 0:
            return []
        with self._listing:
            # Workers may outlive an incarnation of the run, and serve the next.
            if self._listed_for != group.incarnation:
                self._listed = _attempts_before(self._store, group.incarnation)
                self._listed_for = group.incarnation
            return self._listed.get(group.cursor, [])


def _attempts_before(store: ArtifactStore, incarnation: int) -> dict[int, list[GroupKey]]:
    names = (key.rpartition("/")[2] for key in store.keys(ROLLOUTS))
    groups = in_order(GroupKey.named(name) for name in names if name.startswith("row-"))
    found: defaultdict[int, list[GroupKey]] = defaultdict(list)
    for group in reversed(groups):
        if group.incarnation < incarnation:
            found[group.cursor].append(group)
    return found
