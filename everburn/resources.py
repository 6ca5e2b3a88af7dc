"""What completions make and must not leave behind: sandboxes, processes, folders.

A completion registers each with its reaper, a function by name with JSON arguments. The record is
in the run's store before the resource is made, so that whoever comes next can reap it: the end of
the completion (success, failure, timeout, cancellation), its next attempt, the end of its group or
of its run, or `everburn reap RUN`. Owns records and reaping. Doesn't own when what is left behind
is looked for (rollout_runner.py, workflows/).
"""

import asyncio
import inspect
import logging
import time
import uuid
from collections import defaultdict
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, JsonValue

from everburn.config import Entrypoint
from everburn.entrypoints import call, resolve
from everburn.refs import RESOURCES, resource_key
from everburn.sampling import current_scope
from everburn.store import ArtifactStore
from everburn.threads import in_thread

log = logging.getLogger(__name__)

REAP_TIMEOUT = 30.0
"""Seconds of one reaper; one that takes longer has failed, and is called again by the next."""
END_TIMEOUT = 50.0
"""Seconds of all of them at the end of a completion or group, which others wait for."""
AT_ONCE = 32
"""Completions whose leftovers are reaped at the same time."""


class Registered(BaseModel):
    """The record of a resource. at: seconds since the epoch. where: names its completion."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    reaper: Entrypoint
    at: float
    where: str


@dataclass(frozen=True, slots=True)
class Reaped:
    """How many resources were reaped; the others failed, with what each said."""

    count: int
    failures: list[str]


class Resources:
    """Registers the resources of the completion in whose context it is called."""

    def __init__(self, store: ArtifactStore) -> None:
        self._store = store

    async def register(self, reaper: str, **arguments: JsonValue) -> "Resource":
        """Have `reaper(**arguments)` called when the completion has ended, however it ends.

        Register first, then make the resource, under a name that the arguments hold: a worker
        that dies in between leaves nothing unknown. The reaper may be called on any rollout
        worker, more than once, and for what was never made. It may be async, and may block. The
        arguments lie in the run's folder: no secrets.

        Raises:
            EntrypointError: the reaper can't be imported.
            StoreError: the record can't be written; then don't make the resource.
        """
        entrypoint = Entrypoint(name=reaper, kwargs=arguments)
        resolve(entrypoint)
        scope = current_scope.get()
        record = Registered(reaper=entrypoint, at=time.time(), where=scope.where)
        key = resource_key(scope.name, uuid.uuid4().hex)
        await asyncio.to_thread(self._store.put_json, key, record.model_dump(mode="json"))
        return Resource(self._store, key)


@dataclass(frozen=True, slots=True)
class Resource:
    """A registered resource."""

    _store: ArtifactStore
    _key: str

    async def reap(self) -> None:
        """Reap it now, before the completion ends.

        Raises:
            What the reaper raises, and TimeoutError; it is reaped again at the completion's end.
        """
        await _reap(self._store, self._key)


def registered(store: ArtifactStore, owner: str = "") -> list[str]:
    """The keys of the resources that are registered under a name, or under one that it begins:
    a completion's, a group's, or all of a run's."""
    begin = f"{RESOURCES}/{owner}." if owner else f"{RESOURCES}/"
    return [key for key in store.keys(RESOURCES) if key.startswith(begin)]


async def reap(store: ArtifactStore, owner: str = "") -> Reaped:
    """Reap what is registered under a name; those of one completion the latest first.

    Never raises because of a reaper: what couldn't be reaped stays registered.
    """
    owners: defaultdict[str, list[str]] = defaultdict(list)
    for key in await asyncio.to_thread(registered, store, owner):
        owners[key.rsplit(".", 2)[0]].append(key)
    slots = asyncio.Semaphore(AT_ONCE)

    async def reap_all(keys: list[str]) -> list[str]:
        async with slots:
            return await _reap_in_order(store, keys)

    failures = await asyncio.gather(*map(reap_all, owners.values()))
    failed = [text for texts in failures for text in texts]
    return Reaped(sum(map(len, owners.values())) - len(failed), failed)


async def reap_at_end(store: ArtifactStore, owner: str) -> None:
    """Reap within END_TIMEOUT; what takes longer stays registered, for the end of the run."""
    try:
        async with asyncio.timeout(END_TIMEOUT):
            await reap(store, owner)
    except TimeoutError:
        log.warning("%s: not all of its resources were reaped within %g s", owner, END_TIMEOUT)


async def _reap_in_order(store: ArtifactStore, keys: list[str]) -> list[str]:
    """Reap a completion's resources, the latest first; what those said that failed."""
    found = await asyncio.to_thread(lambda: [(key, _find(store, key)) for key in keys])
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
    record = await asyncio.to_thread(_find, store, key)
    if record is None:
        return  # it has been reaped meanwhile
    async with asyncio.timeout(REAP_TIMEOUT):
        result = await in_thread(lambda: call(record.reaper))
        if inspect.isawaitable(result):
            await result
    await asyncio.to_thread(store.delete, key)


def _find(store: ArtifactStore, key: str) -> Registered | None:
    found = store.find_json(key)
    return None if found is None else Registered.model_validate(found)
