"""Sandboxes: what completions create and must not leave behind, such as processes and folders.

A completion registers each sandbox with its reaper, a function by name with JSON arguments. The
record is in the run's store before the sandbox exists, so it can always be reaped: at the end of
the completion (success, failure, timeout, cancellation), by its next attempt, at the end of its
group or run, or by `everburn reap RUN`.

A presumed-dead attempt may still run beside its successor, so each record names its attempt. An
attempt reaps its own sandboxes when it ends, and those of earlier attempts when it begins, never
those of later ones. An attempt whose sandboxes were reaped by another has been superseded: its
result is discarded.

Owns the records, reaping and that rule. Doesn't own when sandboxes are reaped (attempt.py,
workflows/).
"""

import asyncio
import inspect
import logging
import time
import uuid
from collections import defaultdict
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, JsonValue

from everburn.config import Entrypoint
from everburn.records.keys import SANDBOXES, sandbox_key
from everburn.records.store import ArtifactStore, through_outages
from everburn.rollouts.contract import RecoverableRolloutError
from everburn.rollouts.sampling import CompletionScope, current_scope
from everburn.usercode.deadlines import user_timeout
from everburn.usercode.entrypoints import call, resolve
from everburn.usercode.threads import in_thread, to_thread

log = logging.getLogger(__name__)

REAP_TIMEOUT = 30.0
"""Seconds for one reaper. One that takes longer has failed; it is called again later."""
END_TIMEOUT = 50.0
"""Seconds for all reapers at the end of a completion or group, which others wait for."""
AT_ONCE = 32
"""Completions whose sandboxes are reaped at the same time."""


class SandboxRecord(BaseModel):
    """The record of a sandbox. at: Unix time. where: its completion, in messages."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    reaper: Entrypoint
    at: float
    where: str


@dataclass(frozen=True, slots=True)
class Reaped:
    """How many sandboxes were reaped, and the error texts of the others."""

    count: int
    failures: list[str]


class Sandboxes:
    """The contract's `SandboxRegistry`, on the run's store."""

    def __init__(self, store: ArtifactStore) -> None:
        self._store = store

    async def register(self, reaper: str, **arguments: JsonValue) -> "Sandbox":
        entrypoint = Entrypoint(name=reaper, kwargs=arguments)
        resolve(entrypoint)
        scope = current_scope.get()
        record = SandboxRecord(reaper=entrypoint, at=time.time(), where=scope.where)
        key = sandbox_key(scope.attempt, uuid.uuid4().hex)
        await to_thread(self._store.put_json, key, record.model_dump(mode="json"))
        scope.sandboxes.add(key)
        return Sandbox(self._store, key, scope)


@dataclass(frozen=True, slots=True)
class Sandbox:
    """A registered sandbox."""

    _store: ArtifactStore
    _key: str
    _scope: CompletionScope

    async def reap(self) -> None:
        await _reap(self._store, self._key)
        self._scope.sandboxes.discard(self._key)


class SupersededError(RecoverableRolloutError):
    """Another attempt at the completion has begun and reaped this one's sandboxes, so this one's
    result may have been made without them."""


async def require_own(store: ArtifactStore, scope: CompletionScope, patience: float) -> None:
    """Check that an attempt still has its sandboxes. patience: seconds to wait for the store.

    Raises:
        SupersededError, StoreError
    """

    def missing() -> list[str]:
        return [key for key in scope.sandboxes if not store.exists(key)]

    gone = await through_outages(missing, patience=patience)
    if gone:
        raise SupersededError(
            f"{scope.where}: {len(gone)} of its sandboxes were reaped while it ran: another "
            "attempt at it has begun"
        )


async def reap_earlier(store: ArtifactStore, scope: CompletionScope) -> None:
    """Reap the sandboxes of earlier attempts: their workers are dead or given up. Not those of
    later attempts: this one may have been paused since before they began."""
    keys = await to_thread(sandbox_keys, store, scope.name)
    await _limited(scope.name, _reap_all(store, [key for key in keys if _is_earlier(key, scope)]))


def _is_earlier(key: str, scope: CompletionScope) -> bool:
    """Whether a sandbox belongs to another attempt that isn't later than this one. The same
    activity attempt may be executed twice, one after the other, hence <=."""
    attempt = key.removeprefix(f"{SANDBOXES}/").rsplit(".", 2)[0]
    retry = attempt.removeprefix(f"{scope.name}.").partition("-")[0]
    return attempt != scope.attempt and (not retry.isdigit() or int(retry) <= scope.retry)


def sandbox_keys(store: ArtifactStore, owner: str = "") -> list[str]:
    """The keys of all registered sandboxes of an owner: an attempt, a completion, a group or, by
    default, the run."""
    begin = f"{SANDBOXES}/{owner}." if owner else f"{SANDBOXES}/"
    return [key for key in store.keys(SANDBOXES) if key.startswith(begin)]


async def reap(store: ArtifactStore, owner: str = "") -> Reaped:
    """Reap an owner's sandboxes, those of one completion the latest first. A sandbox whose reaper
    fails stays registered.

    Raises:
        StoreError
    """
    return await _reap_all(store, await to_thread(sandbox_keys, store, owner))


async def reap_at_end(store: ArtifactStore, owner: str) -> None:
    """Reap for at most END_TIMEOUT; the rest stays registered, for the end of the run."""
    await _limited(owner, reap(store, owner))


async def _limited(owner: str, reaping: Coroutine[Any, Any, Reaped]) -> None:
    try:
        async with asyncio.timeout(END_TIMEOUT):
            await reaping
    except TimeoutError:
        log.warning("%s: some sandboxes weren't reaped within %g s", owner, END_TIMEOUT)


async def _reap_all(store: ArtifactStore, keys: list[str]) -> Reaped:
    completions: defaultdict[str, list[str]] = defaultdict(list)
    for key in keys:
        completions[key.rsplit(".", 3)[0]].append(key)
    slots = asyncio.Semaphore(AT_ONCE)

    async def reap_one(keys: list[str]) -> list[str]:
        async with slots:
            return await _reap_in_order(store, keys)

    failures = await asyncio.gather(*map(reap_one, completions.values()))
    failed = [text for texts in failures for text in texts]
    return Reaped(len(keys) - len(failed), failed)


async def _reap_in_order(store: ArtifactStore, keys: list[str]) -> list[str]:
    """Reap a completion's sandboxes, the latest first. Returns the error texts of those that
    failed."""
    found = await to_thread(lambda: [(key, _find(store, key)) for key in keys])
    records = [(key, record) for key, record in found if record is not None]
    failures = []
    for key, record in sorted(records, key=lambda pair: pair[1].at, reverse=True):
        try:
            await _reap(store, key)
        except Exception as error:
            text = f"{record.where}: {record.reaper.name}: {type(error).__name__}: {error}"
            log.warning("not reaped: %s", text)
            failures.append(text)
    return failures


async def _reap(store: ArtifactStore, key: str) -> None:
    record = await to_thread(_find, store, key)
    if record is None:
        return  # already reaped
    async with user_timeout(REAP_TIMEOUT):
        result = await in_thread(lambda: call(record.reaper))
        if inspect.isawaitable(result):
            await result
    await to_thread(store.delete, key)


def _find(store: ArtifactStore, key: str) -> SandboxRecord | None:
    found = store.find_json(key)
    return None if found is None else SandboxRecord.model_validate(found)
