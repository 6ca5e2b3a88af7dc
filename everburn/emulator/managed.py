"""The managed surface: trainer jobs, deployments, and the exports that deployments load.

A job's process dies when the job leaves JOB_STATE_RUNNING, with its sessions and models; its
exports stay in its bucket. Jobs and deployments are kept on disk: after a restart of the emulator
jobs run in new processes, and deployments serve the base model.

Used on the event loop only. Doesn't own HTTP (http/managed_routes.py) or computations
(training/operations.py).
"""

import asyncio
import json
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from everburn.emulator.errors import AlreadyExists, InvalidInput, NotFound, NotReady
from everburn.emulator.sessions import Snapshot
from everburn.emulator.training.engine import Engine

JobState = Literal[
    "JOB_STATE_PENDING",
    "JOB_STATE_CREATING",
    "JOB_STATE_RUNNING",
    "JOB_STATE_PREEMPTED",
    "JOB_STATE_PAUSED",
    "JOB_STATE_FAILED",
    "JOB_STATE_CANCELLED",
    "JOB_STATE_DELETED",
]
RESUMABLE: frozenset[JobState] = frozenset(
    {"JOB_STATE_PAUSED", "JOB_STATE_FAILED", "JOB_STATE_CANCELLED"}
)
DEFAULT_INACTIVITY = 3600.0
"""Seconds without a request after which a job is cancelled."""
MAX_INACTIVITY = 3 * 3600.0
BUCKET_EXPORTS = 16
"""Exports that a bucket keeps, the newest."""
PREEMPTION_SECONDS = 0.2
"""Time from a preemption until the job counts as failed and can be resumed."""

_RESOURCE_ID = re.compile(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?")
_DURATION = re.compile(r"(\d+(\.\d+)?)s")


def _now() -> float:
    return time.monotonic()


@dataclass
class Export:
    """Sampler weights in a bucket.

    kind: base, delta or merged_base. delta_from: identity of the export that a delta builds on.
    """

    identity: str
    snapshot: Snapshot
    kind: str
    delta_from: str | None


Bucket = dict[str, Export]


@dataclass
class SharedModel:
    """The full-parameter model of a trainer whose models share it."""

    engine: Engine
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


@dataclass(eq=False)
class Job:
    job_id: str
    request: dict[str, Any]
    state: JobState = "JOB_STATE_PENDING"
    message: str = ""
    runs: list[str] = field(default_factory=list)
    """`run-<32 hex>` of its models, oldest first: the folders of its checkpoints."""
    entered: float = field(default_factory=_now)
    """Time of the last change of state."""
    last_request: float = field(default_factory=_now)
    bucket: Bucket = field(default_factory=dict)
    shared: SharedModel | None = None

    @property
    def rank(self) -> int:
        return int(self.request.get("trainingConfig", {}).get("loraRank", 0))

    @property
    def inactivity(self) -> float:
        match = _DURATION.fullmatch(str(self.request.get("inactivityTimeout", "")))
        return float(match[1]) or DEFAULT_INACTIVITY if match else DEFAULT_INACTIVITY

    def enter(self, state: JobState, message: str = "") -> None:
        self.state, self.message, self.entered = state, message, _now()

    def as_json(self, account: str) -> dict[str, Any]:
        status = {"status": {"code": "UNKNOWN", "message": self.message}} if self.message else {}
        name = f"accounts/{account}/rlorTrainerJobs/{self.job_id}"
        return {**self.request, "name": name, "state": self.state, **status}


@dataclass(eq=False)
class Deployment:
    deployment_id: str
    request: dict[str, Any]
    created: float = field(default_factory=_now)
    bucket: Bucket = field(default_factory=dict)
    """Used if the deployment, not the trainer, owns the exports."""
    serving: Export | None = None
    """None: the base model."""
    target: str | None = None
    """Identity of the last hotload."""
    stage: str = "done"
    error: str = ""
    loading: Export | None = None
    """The export that replicas are loading, one after the other, for `load_seconds` each."""
    load_started: float = 0.0
    load_seconds: float = 0.0

    @property
    def replicas(self) -> int:
        return int(self.request.get("maxReplicaCount", 1))

    def as_json(self, account: str, state: str) -> dict[str, Any]:
        name = f"accounts/{account}/deployments/{self.deployment_id}"
        return {**self.request, "name": name, "state": state}

    def status(self) -> dict[str, Any]:
        """The response of GET hot_load."""
        return {"replicas": [self._replica_status(index) for index in range(self.replicas)]}

    def served(self) -> Export | None:
        """The export of the first replica that is ready. Raises NotReady."""
        for index in range(self.replicas):
            export, ready, _ = self._replica(index)
            if ready or self.stage == "error":
                return export
        raise NotReady(f"deployment {self.deployment_id} is loading {self.target}")

    def finish_load(self) -> None:
        """End the load once the last replica has loaded."""
        if self.loading is not None and self._replica(self.replicas - 1)[0] is self.loading:
            self.serving, self.loading = self.loading, None

    def _replica(self, index: int) -> tuple[Export | None, bool, str]:
        """Export, readiness and load stage of a replica. It serves the old weights for the first
        half of its load, while it fetches the new ones, and isn't ready for the second half."""
        if self.loading is None:
            return self.serving, self.stage == "done", self.stage
        age = _now() - self.load_started - index * self.load_seconds
        if age >= self.load_seconds:
            return self.loading, True, "done"
        return self.serving, age < self.load_seconds / 2, "loading"

    def _replica_status(self, index: int) -> dict[str, Any]:
        export, ready, stage = self._replica(index)
        loading = {"stage": stage, "target_snapshot_identity": self.target}
        return {
            "readiness": ready,
            "current_snapshot_identity": export.identity if export else None,
            "loading_state": loading | ({"error": self.error} if self.error else {}),
        }


class Managed:
    """All jobs and deployments of the account. stop_process: ends the sessions of a job."""

    def __init__(self, home: Path, account: str, stop_process: Callable[[str], None]) -> None:
        self._file = home / "managed.json"
        self._account = account
        self._stop_process = stop_process
        self._jobs: dict[str, Job] = {}
        self._deployments: dict[str, Deployment] = {}
        self.capacity = True
        """If False, created and resumed jobs stay pending."""
        self.boot_seconds = 0.0
        """Start time of a job and of a deployment."""
        self.hotload_seconds = 0.0
        """Load time per replica."""
        self.hotload_faults: list[Literal["error", "stuck"]] = []
        """Faults of the next hotloads."""
        self._read()

    # Jobs

    def create_job(self, job_id: str, request: Mapping[str, Any]) -> Job:
        """Raises AlreadyExists, also for the id of a deleted job, and InvalidInput."""
        _check_id("trainer job", job_id)
        if job_id in self._jobs:
            raise AlreadyExists(f"trainer job {job_id} exists")
        job = Job(job_id, dict(request))
        if job.inactivity > MAX_INACTIVITY:
            raise InvalidInput("inactivityTimeout must be at most 3 hours")
        self._jobs[job_id] = job
        return self.job(job_id)

    def job(self, job_id: str) -> Job:
        """A job, possibly deleted, in its current state. Raises NotFound."""
        job = self._jobs.get(job_id)
        if job is None:
            raise NotFound(f"there is no trainer job {job_id}")
        self._advance(job)
        return job

    def resume_job(self, job_id: str) -> Job:
        """Start a stopped job in a new process. Raises NotFound and InvalidInput."""
        job = self.job(job_id)
        if job.state not in RESUMABLE:
            raise InvalidInput(f"trainer job {job_id} can't be resumed from {job.state}")
        job.enter("JOB_STATE_PENDING")
        job.last_request = _now()
        return self.job(job_id)

    def delete_job(self, job_id: str) -> None:
        self.interrupt_job(job_id, "JOB_STATE_DELETED", "deleted by its owner")

    def interrupt_job(self, job_id: str, state: JobState, message: str = "") -> None:
        """End the job's process and put the job into a state. Raises NotFound."""
        job = self.job(job_id)
        job.enter(state, message)
        job.shared = None
        self._stop_process(job_id)
        self._write()

    def running_job(self, job_id: str) -> Job:
        """A running job; counts as a request to it. Raises NotFound: the gateway has no route to
        other jobs."""
        job = self.job(job_id)
        if job.state != "JOB_STATE_RUNNING":
            raise NotFound(f"trainer job {job_id} isn't running: {job.state}")
        job.last_request = _now()
        return job

    def jobs(self) -> list[Job]:
        return [self.job(job_id) for job_id in self._jobs]

    # Deployments

    def create_deployment(self, deployment_id: str, request: Mapping[str, Any]) -> Deployment:
        """Raises AlreadyExists and InvalidInput."""
        _check_id("deployment", deployment_id)
        if deployment_id in self._deployments:
            raise AlreadyExists(f"deployment {deployment_id} exists")
        self._require_trainer(request)
        deployment = self._deployments[deployment_id] = Deployment(deployment_id, dict(request))
        self._write()
        return deployment

    def deployment(self, deployment_id: str) -> Deployment:
        """Raises NotFound."""
        deployment = self._deployments.get(deployment_id)
        if deployment is None:
            raise NotFound(f"there is no deployment {deployment_id}")
        deployment.finish_load()
        return deployment

    def state_of(self, deployment: Deployment) -> str:
        booting = _now() - deployment.created < self.boot_seconds
        return "CREATING" if booting else "READY"

    def change_deployment(self, deployment_id: str, changes: Mapping[str, Any]) -> Deployment:
        """Change fields. A change of trainer or to no replicas resets it to the base model."""
        deployment = self.deployment(deployment_id)
        self._require_trainer(changes)
        deployment.request |= changes
        if "hotLoadTrainerJob" in changes or not deployment.replicas:
            deployment.serving, deployment.target, deployment.stage = None, None, "done"
            deployment.loading = None
        self._write()
        return deployment

    def delete_deployment(self, deployment_id: str) -> None:
        self.deployment(deployment_id)
        del self._deployments[deployment_id]
        self._write()

    def deployments(self) -> list[Deployment]:
        return list(self._deployments.values())

    def ready_deployment(self, deployment_id: str) -> Deployment:
        """A deployment that has replicas. Raises NotFound and NotReady."""
        deployment = self.deployment(deployment_id)
        if self.state_of(deployment) != "READY" or not deployment.replicas:
            raise NotReady(f"deployment {deployment_id} has no replica that serves")
        return deployment

    # Exports

    def bucket(self, job_id: str) -> Bucket:
        job = self._jobs[job_id]
        owner = job.request.get("hotLoadDeploymentId")
        return self.deployment(str(owner)).bucket if owner else job.bucket

    def export(self, job_id: str, export: Export) -> None:
        bucket = self.bucket(job_id)
        bucket[export.identity] = export
        for identity in list(bucket)[:-BUCKET_EXPORTS]:
            del bucket[identity]

    def hotload(self, deployment_id: str, model: str, body: Mapping[str, Any]) -> None:
        """Start to load an export into a deployment; the deployment's status has the result.

        Raises NotFound, NotReady, and InvalidInput if `model` isn't the deployment's.
        """
        deployment = self.ready_deployment(deployment_id)
        if model != deployment.request.get("baseModel"):
            raise InvalidInput(f"deployment {deployment_id} doesn't serve {model}")
        if deployment.loading is not None:
            raise NotReady(f"deployment {deployment_id} is loading {deployment.target}")
        deployment.target, deployment.error = str(body.get("identity", "")), ""
        fault = self.hotload_faults.pop(0) if self.hotload_faults else None
        problem = self._problem(deployment, body.get("incremental_snapshot_metadata"))
        if fault == "error":
            problem = "injected fault: the weights can't be read"
        if problem is not None:
            deployment.stage, deployment.error = "error", problem
        elif fault == "stuck":
            deployment.stage = "loading"
        else:
            deployment.loading = self._bucket_of(deployment)[deployment.target]
            deployment.load_started, deployment.load_seconds = _now(), self.hotload_seconds
            deployment.stage = "done"
            deployment.finish_load()

    def _problem(self, deployment: Deployment, incremental: Mapping[str, Any] | None) -> str | None:
        """The reason if a deployment can't load its target."""
        export = self._bucket_of(deployment).get(deployment.target or "")
        if export is None:
            return f"there is no snapshot {deployment.target} in the bucket"
        if (export.kind == "delta") != bool(incremental):
            return f"the request doesn't fit {export.identity}, which is of type {export.kind}"
        if incremental:
            current = deployment.serving.identity if deployment.serving else None
            previous = incremental.get("previous_snapshot_identity")
            if not (previous == current == export.delta_from):
                return (
                    f"delta {export.identity} builds on {export.delta_from}, the request says "
                    f"{previous}, and the deployment has {current}"
                )
        return None

    def exports(self, job_id: str) -> Bucket:
        """Oldest first. Raises NotFound."""
        self.job(job_id)
        return self.bucket(job_id)

    def _bucket_of(self, deployment: Deployment) -> Bucket:
        trainer = deployment.request.get("hotLoadTrainerJob")
        if trainer is None:
            return deployment.bucket
        job = self._jobs.get(str(trainer).rpartition("/")[2])
        return job.bucket if job is not None else {}

    def _require_trainer(self, request: Mapping[str, Any]) -> None:
        trainer = request.get("hotLoadTrainerJob")
        if trainer is not None:
            job = self._jobs.get(str(trainer).rpartition("/")[2])
            if job is None or job.state == "JOB_STATE_DELETED":
                raise InvalidInput(f"hotLoadTrainerJob {trainer!r} names no trainer job")

    def _advance(self, job: Job) -> None:
        """Enter the state that a job has reached by now."""
        before = job.state
        if job.state == "JOB_STATE_PENDING" and self.capacity:
            job.enter("JOB_STATE_CREATING")
        age = _now() - job.entered
        if job.state == "JOB_STATE_CREATING" and age >= self.boot_seconds:
            job.enter("JOB_STATE_RUNNING")
            job.last_request = _now()
        if job.state == "JOB_STATE_RUNNING" and _now() - job.last_request > job.inactivity:
            job.enter("JOB_STATE_CANCELLED", f"stopped: no activity for {job.inactivity:.0f} s")
            job.shared = None
            self._stop_process(job.job_id)
        if job.state == "JOB_STATE_PREEMPTED" and age >= PREEMPTION_SECONDS:
            job.enter("JOB_STATE_FAILED", "preempted: its machine was taken away")
        if job.state != before:
            self._write()

    # Disk

    def _write(self) -> None:
        jobs = {
            job.job_id: {
                "request": job.request,
                "state": job.state,
                "message": job.message,
                "runs": job.runs,
            }
            for job in self._jobs.values()
        }
        deployments = {d.deployment_id: d.request for d in self._deployments.values()}
        draft = self._file.with_suffix(".draft")
        draft.write_text(json.dumps({"jobs": jobs, "deployments": deployments}))
        draft.replace(self._file)

    def add_run(self, job: Job, run: str) -> None:
        job.runs.append(run)
        self._write()

    def _read(self) -> None:
        if not self._file.exists():
            return
        state = json.loads(self._file.read_text())
        self._jobs = {job_id: Job(job_id, **values) for job_id, values in state["jobs"].items()}
        self._deployments = {
            deployment_id: Deployment(deployment_id, request)
            for deployment_id, request in state["deployments"].items()
        }


def _check_id(kind: str, text: str) -> None:
    if not _RESOURCE_ID.fullmatch(text):
        raise InvalidInput(
            f"{text!r} can't be the id of a {kind}: at most 63 lower-case letters, digits and "
            "hyphens, beginning with a letter"
        )
