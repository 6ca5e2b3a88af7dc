"""The log of a completion's sampling calls, so that a retry repeats none of them.

A retried completion (its worker died) sends the same requests until something differs; the log
answers those. After a difference the prompts differ too, because they contain earlier answers, so
the rest is sampled. Requests are matched by digest, not by order: an agent may send several at
once. Owns the log's file and the matching. Doesn't own sampling (sampling.py).
"""

import asyncio
import hashlib
import json
import logging
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict

from everburn.records.store import ArtifactStore, StoreError
from everburn.rollouts.contract import Sample
from everburn.usercode.threads import to_thread

log = logging.getLogger(__name__)


class LoggedCall(BaseModel):
    """One finished call. digest: of its request (`request_digest`)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    index: int
    digest: str
    sample: Sample


class CallLog:
    """The calls of one completion: those that earlier attempts recorded, and new ones.

    Opening it reads the store, and blocks. earlier: keys of further logs, which are only read.
    """

    def __init__(self, store: ArtifactStore, key: str, earlier: Sequence[str] = ()) -> None:
        self._store = store
        self._key = key
        self._sources = (key, *earlier)
        self._recorded: defaultdict[str, deque[LoggedCall]] = defaultdict(deque)
        for source in self._sources:
            for call in _read(store, source):
                self._recorded[call.digest].append(call)
        self._next = 0
        self._writing = asyncio.Lock()
        self.reused = 0

    def take(self, digest: str) -> tuple[int, LoggedCall | None]:
        """The index of a new call, and a recorded call with the same request, each given once."""
        index, self._next = self._next, self._next + 1
        calls = self._recorded[digest]
        if not calls:
            return index, None
        self.reused += 1
        return index, calls.popleft()

    async def append(self, call: LoggedCall) -> None:
        """Record a finished call. If the store fails, a retry merely repeats the call."""
        line = call.model_dump_json()
        try:
            async with self._writing:
                await to_thread(self._store.append_lines, self._key, [line])
        except StoreError as error:
            log.warning("sampling call %d isn't recorded: %s", call.index, error)

    def delete(self) -> None:
        """Delete the log and the earlier ones: the completion is finished, or must be sampled
        again."""
        self._store.discard(*self._sources)


def request_digest(prompt: list[int], settings: dict[str, Any]) -> str:
    """Equal for calls with the same prompt ids and sampling parameters."""
    text = json.dumps([prompt, settings], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _read(store: ArtifactStore, key: str) -> list[LoggedCall]:
    """The calls of a log, without a line that a crash cut off."""
    if not store.exists(key):
        return []
    calls = []
    for line in store.get(key).splitlines():
        try:
            calls.append(LoggedCall.model_validate_json(line))
        except ValueError:
            continue
    return calls
