"""Earlier attempts of a row, whose finished work is used again.

A row gets a new attempt when its group's workflow died, was cancelled by a stop, or when one
completion failed finally; the other completions' finished work is used again. If an attempt
produced a completed group, its rollouts were consumed: the next attempt samples new ones. Owns that
rule. Doesn't own what is used of them (destinations.py, call_log.py).
"""

import threading
from collections import defaultdict

from everburn.records.ids import NUMBERS_PER_LIFE, GroupKey
from everburn.records.keys import ROLLOUTS, group_key
from everburn.records.store import ArtifactStore


class EarlierAttempts:
    """Of all rows of a run, as one process finds them.

    Attempts of this life of the run are asked for one by one: their numbers follow each other. What
    earlier lives have left is listed once, since there is one name per row that ever began. A
    worker of theirs that comes back late adds to it what is then done again.
    """

    def __init__(self, store: ArtifactStore) -> None:
        self._store = store
        self._listing = threading.Lock()
        self._listed_before = 0
        self._listed: dict[int, list[int]] = {}
        """By cursor, the numbers of attempts of the lives before that number, the newest first."""

    def unused(self, group: GroupKey) -> list[GroupKey]:
        """Earlier attempts of the row since the last that came to a group, newest first."""
        first = group.attempt - group.attempt % NUMBERS_PER_LIFE
        numbers = [*reversed(range(first, group.attempt)), *self._before(first, group.cursor)]
        attempts = []
        for number in numbers:
            key = GroupKey(cursor=group.cursor, attempt=number)
            if self._store.exists(group_key(key)):
                break
            attempts.append(key)
        return attempts

    def _before(self, first: int, cursor: int) -> list[int]:
        """The numbers of the row's attempts in earlier lives."""
        if first == 0:
            return []
        with self._listing:
            # Workers may outlive a life of the run, and serve the next.
            if self._listed_before != first:
                self._listed = _attempts_before(self._store, first)
                self._listed_before = first
            return self._listed.get(cursor, [])


def _attempts_before(store: ArtifactStore, first: int) -> dict[int, list[int]]:
    names = (key.rpartition("/")[2] for key in store.keys(ROLLOUTS))
    found: defaultdict[int, list[int]] = defaultdict(list)
    for group in (GroupKey.named(name) for name in names if name.startswith("row-")):
        if group.attempt < first:
            found[group.cursor].append(group.attempt)
    return {cursor: sorted(numbers, reverse=True) for cursor, numbers in found.items()}
