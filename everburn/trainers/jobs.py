"""A run's trainer job and deployment: creation, progress, reattachment and cleanup.

Owns the calls to the control plane, through the SDK's managers, and the reaction to each state. All
calls are short and idempotent: present state is looked up, and ids are recorded before anything is
created. Doesn't own the waiting (the TrainerLease workflow) or training (dedicated.py).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

from everburn.config import RunConfig
from everburn.records.ids import RunRef
from everburn.records.provisioning import (
    ProvisioningRecord,
    find_provisioning,
    planned_provisioning,
    put_provisioning,
)
from everburn.records.run_folder import run_owner
from everburn.records.store import ArtifactStore, StoreError
from everburn.trainers.backends import UnreachableError, api_key, api_root, check_reachable
from everburn.trainers.errors import describe, status_of, translated
from everburn.trainers.hotload import NOT_READY
from everburn.trainers.protocol import TrainerError, TrainerRejectedError, TrainerUnavailableError

if TYPE_CHECKING:
    from fireworks.training.sdk import DeploymentInfo, DeploymentManager, TrainerJobManager

RESUMABLE = frozenset(
    {"JOB_STATE_FAILED", "JOB_STATE_CANCELLED", "JOB_STATE_PAUSED", "JOB_STATE_COMPLETED"}
)
GONE = frozenset({"JOB_STATE_DELETED", "JOB_STATE_ARCHIVED", "JOB_STATE_DELETING"})
BROKEN_DEPLOYMENT = frozenset({"FAILED", "DELETED", "DELETING"})
NO_WAIT: dict[str, float] = {"poll_interval_s": 0, "timeout_s": 0, "pending_timeout_s": 0}
"""Makes the SDK's waits single polls that raise TimeoutError."""
POLLS = 3
"""Polls per `advance`: jobs and deployments that are ready at once need no wait."""


@dataclass(frozen=True)
class Readiness:
    """Progress of a run's job and deployment. stage: `pending` waits for capacity, possibly for
    days. resumed: a stopped job was just restarted; `text` says how it had ended."""

    stage: Literal["ready", "pending", "starting"]
    text: str = ""
    resumed: bool = False


class RunProvisioning:
    """The job and the deployment of one run."""

    def __init__(self, run: RunRef, config: RunConfig) -> None:
        self._run = run
        self._config = config
        self._trainer = config.trainer_provisioning
        self._deployment = config.deployment_provisioning
        self._store = ArtifactStore.of(run)

    def advance(self) -> Readiness:
        """Take the next steps towards a running job and a ready deployment.

        Raises:
            TrainerRejectedError: a request was refused; says what to change.
            TrainerClosedError: the account may not create it.
            TrainerCapacityError: the control plane has no capacity now.
            TrainerUnavailableError: the control plane can't be reached.
            StoreError: the record can't be written or read.
        """
        with _managers(self._config) as (jobs, deployments):
            for _ in range(POLLS):
                readiness = self._advance(jobs, deployments, self._record())
                if readiness.stage == "ready" or readiness.resumed:
                    break
        return readiness

    def clean_up(self) -> str:
        """Clean up the run's job and deployment as configured; returns what was done. A failure of
        one doesn't keep the other.

        Raises:
            TrainerUnavailableError: some cleanup failed; says which, and what was done.
            StoreError: the record can't be read.
        """
        record = find_provisioning(self._store)
        if record is None:
            return "nothing was created"
        done: list[str] = []
        failed: list[str] = []
        with _managers(self._config) as (jobs, deployments):
            cleanups: dict[str, Callable[[], str]] = {
                _deployment(record): lambda: self._clean_up_deployment(deployments, record),
                _job(record): lambda: self._clean_up_job(jobs, record),
            }
            for name, clean_up in cleanups.items():
                try:
                    with _translated(name, self._config):
                        done.append(clean_up())
                except TrainerError as error:
                    failed.append(str(error))
        text = "; ".join([*failed, *done])
        if failed:
            raise TrainerUnavailableError(text)
        return text

    def _record(self) -> ProvisioningRecord:
        record = find_provisioning(self._store)
        if record is not None:
            return record
        first = run_owner(self._store).first_execution_id
        return put_provisioning(self._store, planned_provisioning(self._run, first, self._config))

    def _advance(
        self,
        jobs: "TrainerJobManager",
        deployments: "DeploymentManager",
        record: ProvisioningRecord,
    ) -> Readiness:
        if self._deployment.weight_sync_scope == "per_deployment":
            # The job is created for the deployment's bucket, so the deployment comes first.
            deployment = self._advance_deployment(jobs, deployments, record, None)
            job = self._advance_job(jobs, record)
        else:
            job = self._advance_job(jobs, record)
            if job.stage == "pending" or job.resumed:
                return job  # replicas would wait idle for a trainer that is queued
            name = f"accounts/{jobs.account_id}/rlorTrainerJobs/{self._record().job_id}"
            deployment = self._advance_deployment(jobs, deployments, record, name)
        return job if job.stage != "ready" else deployment

    # The job

    def _advance_job(self, jobs: "TrainerJobManager", record: ProvisioningRecord) -> Readiness:
        job = jobs.try_get(record.job_id)
        if job is not None and job.get("state") in GONE and record.own_job:
            record = put_provisioning(self._store, record.next_attempt())
            job = jobs.try_get(record.job_id)
        if job is None:
            return self._create_job(jobs, record)
        name, state = _job(record), str(job.get("state", ""))
        if state in GONE:
            raise TrainerRejectedError(
                f"{name}, to which trainer.job_id attaches, was deleted: set another, or none"
            )
        if state in RESUMABLE:
            with suppress(TimeoutError):  # the SDK would wait for days if necessary
                jobs.resume_and_wait(record.job_id, **NO_WAIT)
            return Readiness("starting", f"{name}, which was {_described(job)}", resumed=True)
        if state == "JOB_STATE_PENDING":
            return Readiness("pending", f"{name}: pending, for lack of capacity")
        if state != "JOB_STATE_RUNNING":
            return Readiness("starting", f"{name}: {_described(job)}")
        try:
            jobs.wait_for_ready(record.job_id, **NO_WAIT)
        except TimeoutError:
            return Readiness("starting", f"{name}: running, and not answering yet")
        return Readiness("ready")

    def _create_job(self, jobs: "TrainerJobManager", record: ProvisioningRecord) -> Readiness:
        from fireworks.training.sdk import TrainerJobConfig

        if not record.own_job:
            raise TrainerRejectedError(
                f"there is no trainer job {record.job_id} in account {jobs.account_id}, to which "
                "trainer.job_id attaches: set an existing job, or remove it"
            )
        training_shape = self._trainer.training_shape
        shape = jobs.resolve_training_profile(training_shape) if training_shape else None
        per_deployment = self._deployment.weight_sync_scope == "per_deployment"
        jobs.create(
            TrainerJobConfig(
                base_model=self._config.base_model,
                lora_rank=self._config.lora_rank,
                requested_job_id=record.job_id,
                display_name=f"everburn {self._run.id}"[:63],
                # A shape without a version: the control plane uses its latest version.
                training_shape_ref=training_shape,
                auto_select_training_shape=shape is None,
                max_context_length=None if shape is not None else self._trainer.max_context_length,
                trainer_replica_count=self._trainer.replicas,
                region=self._trainer.region,
                use_reservation=self._trainer.use_reservation,
                reservation_target=self._trainer.reservation_target,
                inactivity_timeout=timedelta(seconds=self._trainer.inactivity_timeout),
                hot_load_deployment_id=record.deployment_id if per_deployment else None,
            )
        )
        return Readiness("starting", f"{_job(record)}: created")

    def _clean_up_job(self, jobs: "TrainerJobManager", record: ProvisioningRecord) -> str:
        name = _job(record)
        if not record.own_job or self._trainer.cleanup == "keep":
            return f"{name} is kept, and stops by itself when it is idle"
        job = jobs.try_get(record.job_id)
        if job is None or job.get("state") in GONE:
            return f"{name} is deleted"
        jobs.delete(record.job_id)  # only logs failures
        job = jobs.try_get(record.job_id)
        if job is not None and job.get("state") not in GONE:
            raise TrainerUnavailableError(f"{name} couldn't be deleted: it is {_described(job)}")
        return f"{name} is deleted"

    # The deployment

    def _advance_deployment(
        self,
        jobs: "TrainerJobManager",
        deployments: "DeploymentManager",
        record: ProvisioningRecord,
        trainer: str | None,
    ) -> Readiness:
        name = _deployment(record)
        deployment = deployments.get(record.deployment_id)
        if deployment is None or (deployment.state in BROKEN_DEPLOYMENT and record.own_deployment):
            deployment = self._create_deployment(jobs, deployments, record, trainer)
        elif deployment.state in BROKEN_DEPLOYMENT:
            raise TrainerRejectedError(f"{name} is {deployment.state}: set another, or none")
        elif changes := self._changes(deployment, trainer):
            _update(deployments, record.deployment_id, changes)
            return Readiness("starting", f"{name}: switching to another trainer's weights")
        try:
            deployments.wait_for_ready(record.deployment_id, timeout_s=0.1, poll_interval_s=0.1)
        except TimeoutError:
            return Readiness("starting", f"{name}: {deployment.state.lower()}")
        try:
            status = deployments.hotload_check_status(record.deployment_id, self._config.base_model)
        except Exception as error:
            if status_of(error) not in NOT_READY:
                raise
            return Readiness("starting", f"{name}: {describe(error)}")
        if not status.get("replicas"):
            if record.own_deployment:
                _update(deployments, record.deployment_id, self._replicas())
            return Readiness("starting", f"{name}: no replica yet")
        return Readiness("ready")

    def _create_deployment(
        self,
        jobs: "TrainerJobManager",
        deployments: "DeploymentManager",
        record: ProvisioningRecord,
        trainer: str | None,
    ) -> "DeploymentInfo":
        from fireworks.training.sdk import DeploymentConfig

        if not record.own_deployment:
            raise TrainerRejectedError(
                f"there is no deployment {record.deployment_id} in account "
                f"{deployments.account_id}: set deployment.deployment_id to an existing one, or "
                "remove it"
            )
        return deployments.create_or_get(
            DeploymentConfig(
                deployment_id=record.deployment_id,
                base_model=self._config.base_model,
                description=f"everburn run {self._run.id}",
                deployment_shape=self._deployment_shape(jobs),
                region=self._deployment.region,
                min_replica_count=self._deployment.replicas,
                max_replica_count=self._deployment.replicas,
                hot_load_trainer_job=trainer,
                hot_load_transition_type=self._deployment.transition_type,
                for_training=True,
            )
        )

    def _deployment_shape(self, jobs: "TrainerJobManager") -> str | None:
        shape = self._deployment.shape
        training = self._trainer.training_shape
        if shape is not None or training is None:
            return shape
        return jobs.resolve_training_profile(training).deployment_shape or None

    def _changes(self, deployment: "DeploymentInfo", trainer: str | None) -> "list[_Change]":
        changes: list[_Change] = []
        if trainer is not None and deployment.hot_load_trainer_job != trainer:
            changes.append(("hot_load_trainer_job", "hotLoadTrainerJob", trainer))
        transition = (self._deployment.transition_type or "").upper()
        if transition and (deployment.hot_load_transition_type or "ASYNC") != transition:
            changes.append(("hot_load_transition_type", "hotLoadTransitionType", transition))
        return changes

    def _replicas(self) -> "list[_Change]":
        count = self._deployment.replicas
        return [
            ("min_replica_count", "minReplicaCount", count),
            ("max_replica_count", "maxReplicaCount", count),
        ]

    def _clean_up_deployment(
        self, deployments: "DeploymentManager", record: ProvisioningRecord
    ) -> str:
        name = _deployment(record)
        cleanup = self._deployment.cleanup
        if not record.own_deployment or cleanup == "keep":
            return f"{name} is kept, and costs as long as it has replicas"
        deployment = deployments.get(record.deployment_id)
        if deployment is None or deployment.state in BROKEN_DEPLOYMENT:
            return f"{name} is deleted"
        if cleanup == "scale_to_zero":
            deployments.scale_to_zero(record.deployment_id)  # only logs failures
            status = deployments.hotload_check_status(record.deployment_id, self._config.base_model)
            if status.get("replicas"):
                raise TrainerUnavailableError(f"{name} still has replicas")
            return f"{name} is scaled to zero"
        deployments.delete(record.deployment_id)  # only logs failures
        deployment = deployments.get(record.deployment_id)
        if deployment is not None and deployment.state not in BROKEN_DEPLOYMENT:
            raise TrainerUnavailableError(f"{name} couldn't be deleted: it is {deployment.state}")
        return f"{name} is deleted"


_Change = tuple[str, str, str | int]
"""A field's path, its name in JSON, its new value."""


def _update(deployments: "DeploymentManager", deployment: str, changes: list[_Change]) -> None:
    deployments.update(
        deployment,
        body={name: value for _, name, value in changes},
        update_mask=[path for path, _, _ in changes],
    )


@contextmanager
def _managers(
    config: RunConfig,
) -> "Iterator[tuple[TrainerJobManager, DeploymentManager]]":
    """The SDK's managers, with translated errors."""
    from fireworks.training.sdk import DeploymentManager, TrainerJobManager

    root = api_root(config)
    try:
        check_reachable(root)
    except UnreachableError as error:
        raise TrainerUnavailableError(str(error)) from error
    with _translated(f"the control plane at {root}", config):
        key = api_key(config)
        with (
            TrainerJobManager(api_key=key, base_url=root) as jobs,
            DeploymentManager(api_key=key, base_url=root) as deployments,
        ):
            yield jobs, deployments


@contextmanager
def _translated(operation: str, config: RunConfig) -> Iterator[None]:
    """Translates the SDK's errors (errors.py), but not the store's."""
    try:
        yield
    except (TrainerError, StoreError):
        raise
    except Exception as error:
        raise translated(error, operation, config.api_key_env, opening=True) from error


def _job(record: ProvisioningRecord) -> str:
    return f"trainer job {record.job_id}"


def _deployment(record: ProvisioningRecord) -> str:
    return f"deployment {record.deployment_id}"


def _described(job: dict[str, Any]) -> str:
    state = str(job.get("state", "")).removeprefix("JOB_STATE_").lower()
    status = job.get("status")
    message = status.get("message") if isinstance(status, dict) else job.get("statusMessage")
    return f"{state} ({message})" if message else state
