"""What completions make and must not leave behind: sandboxes, processes, folders.

A completion registers each with its reaper, a function by name with JSON arguments. The record is
in the run's store before the sandbox is made, so that whoever comes next can reap it: the end of
the completion (success, failure, timeout, cancellation), its next attempt, the end of its group or
of its run, or `everburn reap RUN`.

An attempt may outlive the belief in it: its worker stood still or was cut off, another attempt has
begun, and now both run. So each record names its attempt. One that ends reaps its own; one that
begins reaps what earlier ones left, never what later ones have; and one whose sandboxes were reaped
by another has been superseded, and comes to nothing.

Owns records, reaping and that rule. Doesn't own when what is left behind is looked for
(runner.py, workflows/).
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
"""Seconds of one reaper; one that takes longer has failed, and is called again by the next."""
END_TIMEOUT = 50.0
"""Seconds of all of them at the end of a completion or group, which others wait for."""
AT_ONCE = 32
"""Completions whose leftovers are reaped at the same time."""


class SandboxRecord(BaseModel):
    """The record of a sandbox. at: seconds since the epoch. where: names its completion."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    reaper: Entrypoint
    at: float
    where: str


@dataclass(frozen=True, slots=True)
class Reaped:
    """How many sandboxes were reaped; the others failed, with what each said."""

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
    """Another has reaped what this attempt had made: another attempt at the completion has begun,
    and what this one came to was made without its sandboxes, perhaps."""


async def require_own(store: ArtifactStore, scope: CompletionScope, patience: float) -> None:
    """See that an attempt still has what it registered; patience: seconds for a store that fails.

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
    """Reap what the attempts before this one have left: their workers are dead, or given up.

    Not what later ones have: this one may have stood still at its very beginning.
    """
    found = await to_thread(sandbox_keys, store, scope.name)
    await _within_the_end(scope.name, _reap_all(store, [k for k in found if _before(k, scope)]))


def _before(key: str, scope: CompletionScope) -> bool:
    """Whether a sandbox is of an attempt that isn't later than this one, and not of this one. The
    same order may be carried out twice, one after the other."""
    attempt = key.removeprefix(f"{SANDBOXES}/").rsplit(".", 2)[0]
    tries = attempt.removeprefix(f"{scope.name}.").partition("-")[0]
    return attempt != scope.attempt and (not tries.isdigit() or int(tries) <= scope.tries)


def sandbox_keys(store: ArtifactStore, owner: str = "") -> list[str]:
    """The keys of the sandboxes that are registered under a name, or under one that it begins:
    an attempt's, a completion's, a group's, or all of a run's."""
    begin = f"{SANDBOXES}/{owner}." if owner else f"{SANDBOXES}/"
    return [key for key in store.keys(SANDBOXES) if key.startswith(begin)]


async def reap(store: ArtifactStore, owner: str = "") -> Reaped:
    """Reap what is registered under a name; those of one completion the latest first.

    Never raises because of a reaper: what couldn't be reaped stays registered.
    """
    return await _reap_all(store, await to_thread(sandbox_keys, store, owner))


async def reap_at_end(store: ArtifactStore, owner: str) -> None:
    """Reap within END_TIMEOUT; what takes longer stays registered, for the end of the run."""
    await _within_the_end(owner, reap(store, owner))


async def _within_the_end(owner: str, reaping: Coroutine[Any, Any, Reaped]) -> None:
    try:
        async with asyncio.timeout(END_TIMEOUT):
            await reaping
    except TimeoutError:
        log.warning("%s: not all of its sandboxes were reaped within %g s", owner, END_TIMEOUT)


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
    """Reap a completion's sandboxes, the latest first; what those said that failed."""
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
        return  # it has been reaped meanwhile
    async with user_timeout(REAP_TIMEOUT):
        result = await in_thread(lambda: call(record.reaper))
        if inspect.isawaitable(result):
            await result
    await to_thread(store.delete, key)


def _find(store: ArtifactStore, key: str) -> SandboxRecord | None:
    found = store.find_json(key)
    return None if found is None else SandboxRecord.model_validate(found)
