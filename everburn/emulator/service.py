"""The emulator behind its routes: connects sessions, computations and files.

Runs on the event loop. Work with torch or the disk runs on the compute thread, and its results come
back to the loop.
"""

import asyncio
import dataclasses
import hashlib
import logging
import uuid
from collections import Counter
from collections.abc import Callable, Coroutine, Hashable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from everburn.emulator.compute import ComputeThread, Work
from everburn.emulator.errors import (
    EmulatorError,
    InvalidInput,
    NameTaken,
    NotFound,
    failed_result,
)
from everburn.emulator.http import wire
from everburn.emulator.managed import Bucket, Export, Managed, SharedModel
from everburn.emulator.models.bases import Base, Bases
from everburn.emulator.models.registry import ModelStore, PromotedModel
from everburn.emulator.sampling.decoder import Decoder
from everburn.emulator.sampling.distribution import SamplingParams
from everburn.emulator.sampling.sampler import Batch, Ticket, check_request
from everburn.emulator.sessions import Model, Session, Sessions, Snapshot
from everburn.emulator.training import operations
from everburn.emulator.training.checkpoints import CheckpointStore
from everburn.emulator.training.engine import Engine
from everburn.emulator.training.futures import Operation, OperationQueue, Promise, Result
from everburn.emulator.unknowns import BEST_CASE, Unknowns

T = TypeVar("T")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatorSettings:
    home: Path
    enable_faults: bool = False
    """Adds the routes under /emulator: fault injection and introspection."""
    session_ttl: float = 60.0
    """Seconds until an inactive session expires. The SDK sends a heartbeat every 10 s."""
    gap_timeout: float = 60.0
    """Seconds that an operation waits for a missing one of lower seq_id."""
    account: str = "everburn"
    """The account of every API key."""
    unknowns: Unknowns = BEST_CASE
    """Initial switches; with faults enabled, tests may change them."""


@dataclass(frozen=True, slots=True)
class Target:
    """The weights that a sampling request's `model` resolves to."""

    base: Base
    snapshot: Snapshot | None

    @property
    def key(self) -> Hashable:
        return self.snapshot or self.base.name

    def open(self) -> Batch:
        weights = self.base.merged(self.snapshot.weights if self.snapshot else None)
        return Batch(self.base, Decoder(self.base.config, weights))


class Emulator:
    def __init__(self, settings: EmulatorSettings) -> None:
        self.settings = settings
        self.sessions = Sessions()
        self.checkpoints = CheckpointStore(settings.home, settings.account)
        self.models = ModelStore(settings.home, settings.account)
        self.managed = Managed(settings.home, settings.account, self._stop_process)
        self.unknowns = settings.unknowns
        self.completions: Counter[str] = Counter()
        """Numbers of finished and cancelled requests."""
        self._bases = Bases()
        self._compute = ComputeThread()
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop: asyncio.AbstractEventLoop

    def start(self) -> None:
        """Start the compute thread. Call on the serving event loop."""
        self._loop = asyncio.get_running_loop()
        self._compute.start()

    async def stop(self) -> None:
        """Stop the compute thread. Queued work is abandoned."""
        await asyncio.to_thread(self._compute.stop)

    async def watch(self) -> None:
        """Periodically, until cancelled: end inactive jobs, sessions and operation queues."""
        while True:
            await asyncio.sleep(min(self.settings.session_ttl, self.settings.gap_timeout) / 4)
            self._reap()

    async def compute(self, work: Work[T]) -> T:
        """The result of work on the compute thread."""
        return await asyncio.wrap_future(self._compute.submit(work))

    def create_model(self, session: Session, body: Mapping[str, Any]) -> Promise:
        """Start to create a model; a repeated model_seq_id gives the same promise."""
        model_seq_id = wire.integer(body, "model_seq_id")
        if model_seq_id in session.creations:
            return session.creations[model_seq_id]
        promise = session.creations[model_seq_id] = session.promise()
        self._spawn(self._create(session, model_seq_id, body, promise))
        return promise

    def submit(
        self,
        name: str,
        model: Model,
        body: Mapping[str, Any],
        raw: bytes,
        start: Callable[[], Work[Result]],
    ) -> Promise:
        """Queue an operation of a model; a repeated seq_id gives the same promise."""
        seq_id = wire.integer(body, "seq_id")
        fingerprint = hashlib.blake2b(raw, digest_size=16).digest()
        earlier = model.queue.find(seq_id, fingerprint)
        if earlier is not None and not self.unknowns.applies_repetitions:
            return earlier
        promise = model.session.promise()
        operation = Operation(name, seq_id, fingerprint, promise, start)
        try:
            (model.queue.put if earlier is None else model.queue.repeat)(operation)
        except EmulatorError as error:
            promise.resolve(wire.encode(failed_result(error)))
        return promise

    def publish(self, model: Model, body: Mapping[str, Any]) -> Work[Result]:
        """Work that takes a snapshot of a model and adds it to its session or its job's bucket."""
        # Read now, on the loop: the work runs on the compute thread.
        job = model.session.job
        bucket = dict(self.managed.bucket(job)) if job is not None else {}
        earlier = model.session.snapshots_of(model)
        if model.last_export is not None and model.last_export in bucket:
            earlier.append(bucket[model.last_export].snapshot)
        return self._snapshot(model, body, bucket, earlier)

    def _snapshot(
        self, model: Model, body: Mapping[str, Any], bucket: Bucket, earlier: list[Snapshot]
    ) -> Work[Result]:
        job = model.session.job
        ref, weights = yield from operations.sampler_weights(
            model, self.settings.account, body, dedicated=job is not None
        )
        if ref.name in bucket:
            raise NameTaken(f"sampler snapshot {ref.name} exists; choose a new name")
        if model.stale and earlier:
            weights = earlier[-1].weights
        created = datetime.now(UTC).isoformat()
        kind = str(body.get("checkpoint_type", "base"))
        spec = model.spec
        if kind == "merged_base":  # has no adapter
            spec = dataclasses.replace(spec, rank=0).resolved()
        snapshot = Snapshot(ref, model.engine.base, spec, weights, created)
        if job is not None:
            export = Export(
                ref.name, snapshot, kind, model.last_export if kind == "delta" else None
            )
            self._loop.call_soon_threadsafe(self._export, model, export)
            return {"type": "save_weights_for_sampler", "path": ref.name}
        # Before the result: the loop runs callbacks in order, so the client can sample at once.
        self._loop.call_soon_threadsafe(model.session.snapshots.__setitem__, ref, snapshot)
        return {"type": "save_weights_for_sampler", "path": str(ref)}

    def load_weights(self, model: Model, body: Mapping[str, Any]) -> Work[Result]:
        """Work that loads a checkpoint of this or another run."""

        def runs_of_job(job_id: str) -> list[str]:
            if model.session.job is None:
                raise InvalidInput(
                    "cross_job:// names a checkpoint of a dedicated trainer job; serverless loads "
                    "names and <account>/<run>/<name>"
                )
            return self.managed.job(job_id).runs

        return operations.load_weights(
            model,
            self.checkpoints,
            self.settings.account,
            body,
            runs_of_job,
            keep_gradients=self.unknowns.keeps_gradients,
        )

    async def promote(self, snapshot: Snapshot, body: Mapping[str, Any]) -> PromotedModel:
        """Make a model of a snapshot. Raises InvalidInput, AlreadyExists."""
        trained_on = snapshot.spec.base_model
        if (base := wire.text(body, "base_model")) != trained_on:
            raise InvalidInput(f"{snapshot.ref} was trained on {trained_on}, not on {base}")
        name, source = wire.text(body, "output_model"), str(snapshot.ref)
        return await self.compute(
            operations.single_slice(
                lambda: self.models.add(name, snapshot.spec, snapshot.weights, source)
            )
        )

    def unload(self, model: Model) -> Promise:
        promise = model.session.promise()
        gone = NotFound(f"model {model.model_id} was unloaded, with its sampler snapshots")
        self._forget(self.sessions.remove_model(model), gone)
        promise.resolve(wire.encode({"type": "unload_model", "model_id": model.model_id}))
        return promise

    def expire(self, session_id: str) -> None:
        snapshots = self.sessions.expire(session_id)
        self._forget(snapshots, NotFound(f"session {session_id} has ended, with its snapshots"))

    def _stop_process(self, job_id: str) -> None:
        """End a dedicated job's process."""
        for session_id in self.sessions.of_job(job_id):
            self.expire(session_id)

    def _export(self, model: Model, export: Export) -> None:
        assert model.session.job is not None
        self.managed.export(model.session.job, export)
        model.last_export = export.identity

    async def base(self, name: str) -> Base:
        """A base model, loaded if needed. Raises InvalidInput for unknown names."""
        return await self.compute(operations.single_slice(lambda: self._bases.get(name)))

    def sample(self, target: Target, prompt: list[int], params: SamplingParams) -> Ticket:
        """Queue a sampling request. Raises ContextExceeded or InvalidInput."""
        check_request(target.base, prompt, params)
        ticket = Ticket(prompt, params)
        self._compute.sample(target.key, target.open, ticket)
        return ticket

    async def _create(
        self, session: Session, model_seq_id: int, body: Mapping[str, Any], promise: Promise
    ) -> None:
        try:
            if session.job is None:
                engine = await self.compute(operations.create_engine(self._bases, body))
                model = self._model(session, model_seq_id, engine)
            else:
                model = await self._dedicated_model(session, session.job, model_seq_id, body)
            self.sessions.add_model(model)
        except Exception as error:
            promise.resolve(_failure("create_model", error))
        else:
            result = {"type": "create_model", "model_id": model.model_id, **operations.CAPABILITIES}
            promise.resolve(wire.encode(result))

    async def _dedicated_model(
        self, session: Session, job_id: str, model_seq_id: int, body: Mapping[str, Any]
    ) -> Model:
        job = self.managed.running_job(job_id)
        engine = await self.compute(operations.create_engine(self._bases, body, job.rank))
        spec = engine.spec
        if self.unknowns.shares_full_parameters and not spec.rank and not spec.frozen:
            shared = job.shared = job.shared or SharedModel(engine)
            model = self._model(session, model_seq_id, shared.engine)
            model.lock = shared.lock
        else:
            model = self._model(session, model_seq_id, engine)
        if not spec.frozen:
            self.managed.add_run(job, model.run)
        return model

    def _model(self, session: Session, model_seq_id: int, engine: Engine) -> Model:
        # A frozen model is not a training run; the SDK distinguishes them by the id.
        kind, suffix = ("base", "base") if engine.spec.frozen else ("run", f"train:{model_seq_id}")
        model_id = f"{kind}-{uuid.uuid4().hex}:{suffix}"
        queue = OperationQueue(model_id, lambda operation: self._spawn(self._run(model, operation)))
        model = Model(model_id, session, engine, queue)
        return model

    async def _run(self, model: Model, operation: Operation) -> None:
        try:
            async with model.lock:
                payload = await self.compute(_encoded(operation.start()))
        except Exception as error:
            payload = _failure(operation.name, error)
            model.failed[operation.name] += 1
        else:
            model.applied[operation.name] += 1
        operation.promise.resolve(payload)
        model.queue.finished()

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(coroutine)
        # The loop holds tasks weakly.
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _forget(self, snapshots: list[Snapshot], reason: Exception) -> None:
        for snapshot in snapshots:
            self._compute.forget(snapshot, reason)

    def expire_silent(self, seconds: float) -> None:
        """End the sessions that have been inactive for so long."""
        for session_id in self.sessions.inactive(seconds):
            log.warning("session %s expired: inactive for %.0f s", session_id, seconds)
            self.expire(session_id)

    def _reap(self) -> None:
        self.managed.jobs()  # stops inactive jobs
        self.expire_silent(self.settings.session_ttl)
        for session in self.sessions:
            for model in session.models.values():
                for promise, error in model.queue.break_if_stalled(self.settings.gap_timeout):
                    promise.resolve(wire.encode(failed_result(error)))


def _encoded(work: Work[Result]) -> Work[bytes]:
    """Encodes the result on the compute thread: it may hold many numbers."""
    result = yield from work
    return wire.encode(result)


def _failure(name: str, error: Exception) -> bytes:
    if not isinstance(error, EmulatorError):
        log.error("%s failed unexpectedly", name, exc_info=error)
    return wire.encode(failed_result(error))
