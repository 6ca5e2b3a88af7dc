"""The log of a completion's sampling calls, so that a retry repeats none of them.

A completion that is run again (its worker died) asks the same questions as long as its course is
the same, and those the log answers. Once something differs, so do the prompts from there on, which
hold what was said before: they are sampled afresh. Matching is by question and not by order, since
an agent may ask several at once. Owns the log's file and the matching. Doesn't own sampling
(sampling.py).
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
from everburn.usercode.threads import to_thread

log = logging.getLogger(__name__)


class LoggedCall(BaseModel):
    """One finished call: which question, and its answer."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    index: int
    digest: str
    """Of prompt ids and parameters."""
    tokens: list[int]
    logprobs: list[float]
    raw_logprobs: list[float] | None
    text: str
    finish_reason: str
    version: int
    routing: list[str] | None = None


class CallLog:
    """The calls of one completion: those that an earlier attempt finished, and new ones.

    earlier: keys of further logs, which are read and not written to.
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

    def ask(self, digest: str) -> tuple[int, LoggedCall | None]:
        """The index of the next call, and a recorded answer to its question, each given once."""
        index, self._next = self._next, self._next + 1
        answers = self._recorded[digest]
        if not answers:
            return index, None
        self.reused += 1
        return index, answers.popleft()

    async def note(self, call: LoggedCall) -> None:
        """Keep a finished call, if the store takes it: a retry would merely repeat it."""
        line = call.model_dump_json()
        try:
            async with self._writing:
                await to_thread(self._store.append_lines, self._key, [line])
        except StoreError as error:
            log.warning("sampling call %d isn't recorded: %s", call.index, error)

    async def forget(self) -> None:
        """The completion has its terminal record, or is to be sampled afresh: the log, and what it
        was made of, has done its work."""
        await to_thread(self._store.discard, *self._sources)


def question_digest(prompt: list[int], settings: dict[str, Any]) -> str:
    """What makes two calls the same: exact prompt ids and parameters."""
    text = json.dumps([prompt, settings], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _read(store: ArtifactStore, key: str) -> list[LoggedCall]:
    """The calls of a log; lines that a crash cut off are left out."""
    if not store.exists(key):
        return []
    calls = []
    for line in store.get(key).splitlines():
        try:
            calls.append(LoggedCall.model_validate_json(line))
        except ValueError:
            continue
    return calls
