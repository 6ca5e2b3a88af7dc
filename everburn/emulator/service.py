"""The emulator behind its routes: sessions, computations and files, wired together.

Everything here runs on the event loop and never waits for torch or the disk: such work goes to the
compute thread, and its results come back to the loop.
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
from everburn.emulator.unknowns import KINDEST, Unknowns

T = TypeVar("T")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatorSettings:
    home: Path
    """Folder for checkpoints; created if missing."""
    enable_faults: bool = False
    """Adds the routes under /emulator: fault injection and introspection."""
    session_ttl: float = 60.0
    """Seconds a session lives without a sign of life. The SDK sends a heartbeat every 10 s."""
    gap_timeout: float = 60.0
    """Seconds an operation waits for one of lower seq_id that has not arrived."""
    account: str = "everburn"
    """The account every API key belongs to."""
    unknowns: Unknowns = KINDEST
    """At the start; with faults enabled, tests may change them."""


@dataclass(frozen=True, slots=True)
class Target:
    """What a sampling request's `model` resolved to."""

    base: Base
    snapshot: Snapshot | None

    @property
    def key(self) -> Hashable:
        return self.snapshot or self.base.name

    def open(self) -> Batch:
        """A new batch over these weights."""
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
        """Sampling requests that were finished or cancelled."""
        self._bases = Bases()
        self._compute = ComputeThread()
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop: asyncio.AbstractEventLoop

    def start(self) -> None:
        """Start computing; call on the event loop that will serve."""
        self._loop = asyncio.get_running_loop()
        self._compute.start()

    async def stop(self) -> None:
        """Stop computing, abandoning what is queued."""
        await asyncio.to_thread(self._compute.stop)

    async def watch(self) -> None:
        """Until cancelled: expire silent sessions, give up on operations that never come."""
        while True:
            await asyncio.sleep(min(self.settings.session_ttl, self.settings.gap_timeout) / 4)
            self._reap()

    async def compute(self, work: Work[T]) -> T:
        """Run work on the compute thread and wait for its result."""
        future: asyncio.Future[T] = self._loop.create_future()

        def settle(result: Any, error: Exception | None) -> None:
            if future.cancelled():
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)

        def done(result: Any, error: Exception | None) -> None:
            self._loop.call_soon_threadsafe(settle, result, error)

        self._compute.submit(work, done)
        return await future

    def create_model(self, session: Session, body: Mapping[str, Any]) -> Promise:
        """Start creating a model; the same model_seq_id again gives the same promise."""
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
        """Queue an operation of a model; the same seq_id again gives the same promise."""
        seq_id = wire.integer(body, "seq_id")
        fingerprint = hashlib.blake2b(raw, digest_size=16).digest()
        known = model.queue.find(seq_id, fingerprint)
        if known is not None and not self.unknowns.applies_repetitions:
            return known
        promise = model.session.promise()
        operation = Operation(name, seq_id, fingerprint, promise, start)
        try:
            (model.queue.put if known is None else model.queue.repeat)(operation)
        except EmulatorError as error:
            promise.resolve(wire.encode(failed_result(error)))
        return promise

    def publish(self, model: Model, body: Mapping[str, Any]) -> Work[Result]:
        """Work that takes a snapshot of a model and makes it known to its session, or to the
        deployment of its job."""
        # Now, on the loop: the work itself runs on the compute thread.
        job = model.session.job
        bucket = dict(self.managed.bucket(job)) if job is not None else {}
        earlier = model.session.snapshots_of(model)
        if model.exported is not None and model.exported in bucket:
            earlier.append(bucket[model.exported].snapshot)
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
        if kind == "merged_base":  # it has no adapter any more
            spec = dataclasses.replace(spec, rank=0).resolved()
        snapshot = Snapshot(ref, model.engine.base, spec, weights, created)
        if job is not None:
            export = Export(ref.name, snapshot, kind, model.exported if kind == "delta" else None)
            self._loop.call_soon_threadsafe(self._export, model, export)
            return {"type": "save_weights_for_sampler", "path": ref.name}
        # Before the result: the loop runs callbacks in order, so who sees the result can sample.
        self._loop.call_soon_threadsafe(model.session.snapshots.__setitem__, ref, snapshot)
        return {"type": "save_weights_for_sampler", "path": str(ref)}

    def load_weights(self, model: Model, body: Mapping[str, Any]) -> Work[Result]:
        """Work that loads a checkpoint, of this model's run or of another's."""

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
        """Make a model of a snapshot, as a promotion's body asks for.

        Raises InvalidInput, AlreadyExists.
        """
        trained_on = snapshot.spec.base_model
        if (base := wire.text(body, "base_model")) != trained_on:
            raise InvalidInput(f"{snapshot.ref} was trained on {trained_on}, not on {base}")
        name, source = wire.text(body, "output_model"), str(snapshot.ref)
        return await self.compute(
            operations.at_once(
                lambda: self.models.add(name, snapshot.spec, snapshot.weights, source)
            )
        )

    def unload(self, model: Model) -> Promise:
        """Forget a model and its snapshots."""
        promise = model.session.promise()
        gone = NotFound(f"model {model.model_id} was unloaded, with its sampler snapshots")
        self._forget(self.sessions.remove_model(model), gone)
        promise.resolve(wire.encode({"type": "unload_model", "model_id": model.model_id}))
        return promise

    def expire(self, session_id: str) -> None:
        """End a session now."""
        snapshots = self.sessions.expire(session_id)
        self._forget(snapshots, NotFound(f"session {session_id} has ended, with its snapshots"))

    def _stop_process(self, job_id: str) -> None:
        """End a dedicated job's process: what its sessions held is gone."""
        for session_id in self.sessions.of_job(job_id):
            self.expire(session_id)

    def _export(self, model: Model, export: Export) -> None:
        assert model.session.job is not None
        self.managed.export(model.session.job, export)
        model.exported = export.identity

    async def base(self, name: str) -> Base:
        """A base model, loaded if necessary. Raises InvalidInput for unknown names."""
        return await self.compute(operations.at_once(lambda: self._bases.get(name)))

    def sample(
        self, target: Target, prompt: list[int], params: SamplingParams
    ) -> tuple[Ticket, asyncio.Future[Ticket]]:
        """Queue a sampling request; its end resolves the future.

        Raises ContextExceeded or InvalidInput if the base model can't serve it.
        """
        check_request(target.base, prompt, params)
        future: asyncio.Future[Ticket] = self._loop.create_future()

        def settle(ticket: Ticket) -> None:
            if not future.done():
                future.set_result(ticket)

        def done(ticket: Ticket) -> None:
            self._loop.call_soon_threadsafe(settle, ticket)

        ticket = Ticket(prompt, params, done)
        self._compute.sample(target.key, target.open, ticket)
        return ticket, future

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
        shares = self.unknowns.shares_full_parameters and not spec.rank and not spec.frozen
        if shares:
            job.shared = job.shared or SharedModel(engine)
            engine = job.shared.engine
        model = self._model(session, model_seq_id, engine)
        if shares and job.shared is not None:
            model.turn = job.shared.turn
        if not spec.frozen:
            self.managed.remember(job, model.run)
        return model

    def _model(self, session: Session, model_seq_id: int, engine: Engine) -> Model:
        # A frozen model is no training run: the SDK tells them apart by the id.
        kind, suffix = ("base", "base") if engine.spec.frozen else ("run", f"train:{model_seq_id}")
        model_id = f"{kind}-{uuid.uuid4().hex}:{suffix}"
        queue = OperationQueue(model_id, lambda turn: self._spawn(self._execute(model, turn)))
        model = Model(model_id, session, engine, queue)
        return model

    async def _execute(self, model: Model, operation: Operation) -> None:
        """Run an operation whose turn has come."""
        try:
            async with model.turn:
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
        """End the sessions that have given no sign of life for so long."""
        for session_id in self.sessions.overdue(seconds):
            log.warning("session %s expired: no sign of life", session_id)
            self.expire(session_id)

    def _reap(self) -> None:
        self.managed.jobs()  # stops those without activity
        self.expire_silent(self.settings.session_ttl)
        for session in self.sessions:
            for model in session.models.values():
                for promise, error in model.queue.break_if_stalled(self.settings.gap_timeout):
                    promise.resolve(wire.encode(failed_result(error)))


def _encoded(work: Work[Result]) -> Work[bytes]:
    """The same work, encoded on the compute thread: results may hold many numbers."""
    result = yield from work
    return wire.encode(result)


def _failure(name: str, error: Exception) -> bytes:
    if not isinstance(error, EmulatorError):
        log.error("%s failed unexpectedly", name, exc_info=error)
    return wire.encode(failed_result(error))
