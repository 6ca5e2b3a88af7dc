"""Sessions with their models, sampler snapshots and results.

A session lives as long as its client is active. Only checkpoints outlive it. After a restart of the
server every session is unknown.

Used on the event loop only. Doesn't own computations (training/operations.py).
"""

import asyncio
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from everburn.emulator.errors import NotFound, SessionExpired
from everburn.emulator.models.bases import Base, SamplerWeights
from everburn.emulator.training.checkpoints import CheckpointRef
from everburn.emulator.training.engine import Engine
from everburn.emulator.training.futures import OperationQueue, Promise
from everburn.emulator.training.spec import ModelSpec


@dataclass(eq=False, slots=True)
class Snapshot:
    """Published weights of one policy version."""

    ref: CheckpointRef
    base: Base
    spec: ModelSpec
    weights: SamplerWeights
    created: str
    """UTC, ISO 8601."""


@dataclass(eq=False, slots=True)
class Model:
    model_id: str
    session: "Session"
    engine: Engine
    queue: OperationQueue
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held by the running operation. Models that share an engine share the lock."""
    last_export: str | None = None
    """Identity of the last export, which the next delta builds on."""
    applied: Counter[str] = field(default_factory=Counter)
    """Number of succeeded operations, by name."""
    failed: Counter[str] = field(default_factory=Counter)
    stale: bool = False
    """Injected fault: new snapshots hold the weights of the previous one."""

    @property
    def spec(self) -> ModelSpec:
        return self.engine.spec

    @property
    def run(self) -> str:
        """`run-<32 hex>`; for a frozen model `base-<32 hex>`."""
        return self.model_id.partition(":")[0]


@dataclass(eq=False, slots=True)
class Session:
    session_id: str
    last_seen: float
    job: str | None = None
    """The dedicated trainer job; None for the serverless service."""
    models: dict[str, Model] = field(default_factory=dict)
    snapshots: dict[CheckpointRef, Snapshot] = field(default_factory=dict)
    promises: dict[str, Promise] = field(default_factory=dict)
    """By request id."""
    creations: dict[int, Promise] = field(default_factory=dict)
    """By model_seq_id."""

    def promise(self) -> Promise:
        promise = Promise(f"{self.session_id}.{len(self.promises) + 1}")
        self.promises[promise.request_id] = promise
        return promise

    def snapshots_of(self, model: Model) -> list[Snapshot]:
        return [snapshot for snapshot in self.snapshots.values() if snapshot.ref.run == model.run]


class Sessions:
    """All live sessions, and the ids of those that have expired since the server started."""

    def __init__(self) -> None:
        self._live: dict[str, Session] = {}
        self._models: dict[str, Model] = {}
        self._expired: set[str] = set()
        self._session_of_model: dict[str, str] = {}

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._live.values()))

    def create(self, job: str | None = None) -> Session:
        kind = "ts" if job is None else "sess"
        session = Session(f"{kind}-{uuid.uuid4().hex[:12]}", time.monotonic(), job)
        self._live[session.session_id] = session
        return session

    def get(self, session_id: str) -> Session:
        """A live session; doesn't count as activity. Raises NotFound or SessionExpired."""
        session = self._live.get(session_id)
        if session is not None:
            return session
        if session_id in self._expired:
            raise SessionExpired(
                f"session {session_id} has expired, with its models, snapshots and results"
            )
        raise NotFound(f"unknown session {session_id}: it never existed, or the emulator restarted")

    def touch(self, session_id: str) -> Session:
        """A live session; counts as activity. Raises NotFound or SessionExpired."""
        session = self.get(session_id)
        session.last_seen = time.monotonic()
        return session

    def add_model(self, model: Model) -> None:
        """Raises SessionExpired if the model's session has ended."""
        self.get(model.session.session_id)
        model.session.models[model.model_id] = model
        self._models[model.model_id] = model
        self._session_of_model[model.model_id] = model.session.session_id

    def model(self, model_id: str) -> Model:
        """A live model; counts as activity. Raises NotFound or SessionExpired."""
        model = self._models.get(model_id)
        if model is not None:
            self.touch(model.session.session_id)
            return model
        if model_id in self._session_of_model:
            self.get(self._session_of_model[model_id])
            raise NotFound(f"model {model_id} was unloaded")
        raise NotFound(f"unknown model {model_id}: it never existed, or the emulator restarted")

    def promise(self, request_id: str) -> Promise:
        """The promise of a request; counts as activity. Raises NotFound or SessionExpired."""
        session = self.touch(request_id.partition(".")[0])
        promise = session.promises.get(request_id)
        if promise is None:
            raise NotFound(f"unknown request {request_id}")
        return promise

    def snapshot(self, ref: CheckpointRef, session_id: str | None = None) -> Snapshot:
        """A live snapshot, of one session or of any. Raises NotFound."""
        owners = [self._live[session_id]] if session_id in self._live else []
        for session in owners if session_id is not None else self:
            if ref in session.snapshots:
                return session.snapshots[ref]
        raise NotFound(
            f"there is no sampler snapshot {ref}; snapshots end with their session"
            + (f" {session_id}" if session_id else "")
        )

    def require_run(self, run: str) -> None:
        """Raise NotFound unless a live session trains `run`."""
        if not any(model.run == run for model in self._models.values()):
            raise NotFound(f"unknown run {run}: its session has ended, and its snapshots with it")

    def remove_model(self, model: Model) -> list[Snapshot]:
        """Returns the removed snapshots."""
        model.queue.close()
        del self._models[model.model_id]
        del model.session.models[model.model_id]
        removed = model.session.snapshots_of(model)
        for snapshot in removed:
            del model.session.snapshots[snapshot.ref]
        return removed

    def expire(self, session_id: str) -> list[Snapshot]:
        """End a session; returns its snapshots. Raises NotFound or SessionExpired."""
        session = self.get(session_id)
        del self._live[session_id]
        self._expired.add(session_id)
        for model in session.models.values():
            model.queue.close()
            del self._models[model.model_id]
        for promise in session.promises.values():
            promise.abandon()
        return list(session.snapshots.values())

    def of_job(self, job: str) -> list[str]:
        """Session ids of a dedicated job."""
        return [session.session_id for session in self if session.job == job]

    def inactive(self, seconds: float) -> list[str]:
        """Ids of sessions that have been inactive for `seconds`."""
        limit = time.monotonic() - seconds
        return [session.session_id for session in self if session.last_seen < limit]
