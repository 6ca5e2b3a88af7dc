"""The managed surface, through the unmodified SDK: trainer jobs, deployments, hotload."""

import math
import time
import uuid
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fireworks.training.sdk import (
    APIStatusError,
    DeploymentConfig,
    DeploymentManager,
    DeploymentSampler,
    FiretitanServiceClient,
    RequestFailedError,
    TrainerJobConfig,
    TrainerJobManager,
    types,
)

from everburn.emulator.models.base_model import TINY
from support.emulator import (
    PATIENCE,
    RunningEmulator,
    logprobs_of,
    running_emulator,
    supervised,
    wait_for,
)

DATUM = supervised([2, 3, 4, 5])
SHAPE = "accounts/everburn/trainingShapes/tiny"


def new_id(kind: str) -> str:
    return f"{kind}-{uuid.uuid4().hex[:8]}"


@pytest.fixture(scope="module")
def own_emulator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEmulator]:
    with running_emulator(tmp_path_factory.mktemp("dedicated")) as running:
        yield running


@pytest.fixture
def emulator(own_emulator: RunningEmulator) -> Iterator[RunningEmulator]:
    """An emulator whose capacity and unknowns a test may change."""
    yield own_emulator
    own_emulator.mend()


@pytest.fixture
def clock(emulator: RunningEmulator, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The control plane's clock, in whole seconds: it stands until a test changes `now`."""
    clock = SimpleNamespace(now=float(math.ceil(time.monotonic())))
    fixed = SimpleNamespace(monotonic=lambda: clock.now)
    monkeypatch.setattr("everburn.emulator.managed.time", fixed)
    return clock


@pytest.fixture
def jobs(emulator: RunningEmulator) -> Iterator[TrainerJobManager]:
    with TrainerJobManager(api_key="fw_local", base_url=emulator.url) as manager:
        yield manager


@pytest.fixture
def deployments(emulator: RunningEmulator) -> Iterator[DeploymentManager]:
    with DeploymentManager(api_key="fw_local", base_url=emulator.url) as manager:
        yield manager


def job_config(job_id: str, rank: int = 0, **fields: Any) -> TrainerJobConfig:
    return TrainerJobConfig(
        base_model=TINY,
        lora_rank=rank,
        requested_job_id=job_id,
        auto_select_training_shape=True,
        **fields,
    )


class Stage:
    """A running job with a client, and a deployment that loads its exports."""

    def __init__(self, jobs: TrainerJobManager, deployments: DeploymentManager, rank: int) -> None:
        self.jobs, self.deployments, self.rank = jobs, deployments, rank
        self.job = new_id("job")
        self.endpoint = jobs.create_and_wait(job_config(self.job, rank))
        self.deployment = new_id("dep")
        deployments.create_or_get(
            DeploymentConfig(
                self.deployment, TINY, hot_load_trainer_job=self.endpoint.job_name, region=None
            )
        )
        self.trainer = self.connect()

    def connect(self) -> Any:
        service = FiretitanServiceClient(base_url=self.endpoint.base_url, api_key="fw_local")
        return service.create_training_client(base_model=TINY, lora_rank=self.rank)

    def load(self, identity: str, previous: str | None = None, patience: float = PATIENCE) -> bool:
        metadata = {"previous_snapshot_identity": previous, "compression_format": "arc_v2"}
        wait_for(lambda: self._hotload(identity, metadata if previous else None))
        return self.deployments.wait_for_hotload(
            self.deployment, TINY, identity, timeout_seconds=patience, poll_interval=0.1
        )

    def _hotload(self, identity: str, metadata: dict[str, str | None] | None) -> bool:
        """False if the deployment isn't ready yet."""
        try:
            self.deployments.hotload(self.deployment, TINY, identity, metadata)
        except httpx.HTTPStatusError as error:
            if error.response.status_code != 425:
                raise
            return False
        return True

    def serving(self) -> str | None:
        status = self.deployments.hotload_check_status(self.deployment, TINY)
        return status["replicas"][0]["current_snapshot_identity"]

    async def scores(self, tokens: list[int]) -> list[float]:
        """Logprobs of tokens[1:] from the deployment."""
        sampler = DeploymentSampler(
            self.deployments.inference_url,
            f"accounts/everburn/deployments/{self.deployment}",
            "fw_local",
        )
        (completion,) = await sampler.sample_with_prompt_tokens(
            tokens, max_tokens=1, logprobs=True, echo=True
        )
        return list(completion.sampling_logprobs[: len(tokens) - 1])


@pytest.fixture
def full(jobs: TrainerJobManager, deployments: DeploymentManager) -> Stage:
    return Stage(jobs, deployments, rank=0)


@pytest.fixture
def lora(jobs: TrainerJobManager, deployments: DeploymentManager) -> Stage:
    return Stage(jobs, deployments, rank=4)


def step(trainer: Any, rate: float = 0.05) -> dict[str, Any]:
    trainer.forward_backward([DATUM], "cross_entropy").result()
    return dict(trainer.optim_step(types.AdamParams(learning_rate=rate)).result().metrics)


def scores_of(trainer: Any) -> list[float]:
    return logprobs_of(trainer.forward([DATUM], "cross_entropy").result())


# Jobs


def test_repeated_creation_of_a_job_returns_the_same_job(jobs: TrainerJobManager) -> None:
    job = new_id("job")
    first, second = jobs.create(job_config(job)), jobs.create(job_config(job))
    assert first == second
    assert jobs.wait_for_ready(job).base_url.endswith(
        f"/training/v1/rlorTrainerJobs/everburn/{job}"
    )


def test_the_id_of_a_deleted_job_stays_taken(jobs: TrainerJobManager) -> None:
    job = new_id("job")
    jobs.create_and_wait(job_config(job))
    jobs.delete(job)
    assert jobs.get(job)["state"] == "JOB_STATE_DELETED"
    with pytest.raises(RuntimeError, match="cannot be recreated with the same ID"):
        jobs.create(job_config(job))


def test_without_capacity_a_job_is_pending(
    emulator: RunningEmulator, jobs: TrainerJobManager
) -> None:
    emulator.admin("POST", "capacity", {"available": False})
    job = new_id("job")
    jobs.create(job_config(job))
    with pytest.raises(TimeoutError, match="remained pending for capacity"):
        jobs.wait_for_ready(job, poll_interval_s=0.01, pending_timeout_s=0.1)
    emulator.admin("POST", "capacity", {"available": True})
    jobs.wait_for_ready(job, poll_interval_s=0.01)


def test_a_job_takes_its_boot_time_to_start(
    emulator: RunningEmulator, clock: SimpleNamespace, jobs: TrainerJobManager
) -> None:
    emulator.admin("POST", "capacity", {"boot_seconds": 60.0})
    job = new_id("job")
    jobs.create(job_config(job))
    clock.now += 59.0
    assert jobs.get(job)["state"] == "JOB_STATE_CREATING"
    clock.now += 1.0
    jobs.wait_for_ready(job, poll_interval_s=0.01, timeout_s=PATIENCE)


def test_a_failed_job_has_a_reason_and_is_resumed_without_its_models(
    emulator: RunningEmulator, full: Stage
) -> None:
    saved = full.trainer.save_state("state-1").result().path
    emulator.admin(
        "POST", f"jobs/{full.job}", {"state": "JOB_STATE_FAILED", "message": "out of memory"}
    )
    with pytest.raises(RuntimeError, match="out of memory"):
        full.jobs.wait_for_ready(full.job)
    with pytest.raises(APIStatusError, match="isn't running"):
        full.trainer.forward([DATUM], "cross_entropy").result()
    full.jobs.reconnect_and_wait(full.job)
    reply = httpx.post(
        f"{full.endpoint.base_url}/api/v1/get_info", json={"model_id": full.trainer.model_id}
    )
    assert reply.status_code == 410
    full.connect().load_state_with_optimizer(saved).result()


def test_an_inactive_job_is_stopped(tmp_path: Path) -> None:
    with (
        running_emulator(tmp_path, session_ttl=0.2) as emulator,
        TrainerJobManager(api_key="fw_local", base_url=emulator.url) as jobs,
    ):
        jobs.create(job_config("idle", inactivity_timeout="0.2s"))
        wait_for(lambda: jobs.get("idle")["state"] == "JOB_STATE_CANCELLED")
        assert "no activity" in jobs.get("idle")["status"]["message"]


def test_inactivity_is_bounded(jobs: TrainerJobManager) -> None:
    with pytest.raises(ValueError, match="at most 3 hours"):
        jobs.create(job_config(new_id("job"), inactivity_timeout=timedelta(hours=4)))


def test_jobs_and_deployments_outlive_the_emulator(tmp_path: Path) -> None:
    with running_emulator(tmp_path) as emulator:
        jobs = TrainerJobManager(api_key="fw_local", base_url=emulator.url)
        deployments = DeploymentManager(api_key="fw_local", base_url=emulator.url)
        stage = Stage(jobs, deployments, rank=4)
        saved = stage.trainer.save_state("state-1").result().path
        jobs.create(job_config("gone"))
        jobs.delete("gone")
    with running_emulator(tmp_path) as emulator:
        jobs = TrainerJobManager(api_key="fw_local", base_url=emulator.url)
        endpoint = jobs.wait_for_ready(stage.job)
        assert jobs.get("gone")["state"] == "JOB_STATE_DELETED"
        service = FiretitanServiceClient(base_url=endpoint.base_url, api_key="fw_local")
        trainer = service.create_training_client(base_model=TINY, lora_rank=4)
        trainer.load_state_with_optimizer(saved).result()
        deployments = DeploymentManager(api_key="fw_local", base_url=emulator.url)
        assert deployments.get(stage.deployment) is not None


def test_a_model_must_fit_its_job(full: Stage) -> None:
    service = FiretitanServiceClient(base_url=full.endpoint.base_url, api_key="fw_local")
    with pytest.raises(RequestFailedError, match="rank 8 doesn't fit a trainer job of rank 0"):
        service.create_training_client(base_model=TINY, lora_rank=8)


# Exports and hotloads


@pytest.mark.parametrize("rank", [0, 4])
async def test_the_managed_client_trains_publishes_and_samples(
    emulator: RunningEmulator, rank: int
) -> None:
    service = FiretitanServiceClient.from_firetitan_config(
        api_key="fw_local",
        base_url=emulator.url,
        base_model=TINY,
        lora_rank=rank,
        training_shape_id=SHAPE,
        trainer_job_id=new_id("job"),
        deployment_id=new_id("dep"),
        cleanup_trainer_on_close=True,
        cleanup_deployment_on_close="delete",
    )
    trainer = service.create_training_client()
    for version in range(3):  # full parameters: a base, then deltas
        step(trainer)
        path = trainer.save_weights_for_sampler(f"policy-{version}").result().path
        sampler = service.create_sampling_client(model_path=path)
        sampled = await sampler.compute_logprobs_async(types.ModelInput.from_ints([2, 3, 4, 5]))
        assert sampled[1:] == pytest.approx(scores_of(trainer), abs=1e-4)
    job, deployment = service.trainer_job_id, service.deployment_id
    service.close()
    state = emulator.admin("GET", "state")
    assert state["jobs"][job] == "JOB_STATE_DELETED"
    assert deployment not in state["deployments"]


async def test_one_version_is_served_at_a_time(lora: Stage) -> None:
    names = []
    for version in range(2):
        step(lora.trainer)
        names.append(lora.trainer.save_weights_for_sampler_ext(f"v{version}").snapshot_name)
    own = scores_of(lora.trainer)
    assert lora.load(names[0])
    old = await lora.scores([2, 3, 4, 5])
    assert lora.load(names[1])
    assert lora.serving() == names[1]
    assert await lora.scores([2, 3, 4, 5]) == pytest.approx(own, abs=1e-4)
    assert old != pytest.approx(own, abs=1e-4)


def test_the_name_of_a_snapshot_is_used_once(lora: Stage) -> None:
    lora.trainer.save_weights_for_sampler_ext("v0")
    with pytest.raises(RequestFailedError, match="choose a new name"):
        lora.trainer.save_weights_for_sampler_ext("v0")


def test_a_delta_can_only_be_loaded_over_its_base(full: Stage) -> None:
    names = []
    for version in range(3):
        step(full.trainer)
        names.append(full.trainer.save_weights_for_sampler_ext(f"v{version}").snapshot_name)
    assert not full.load(names[1], previous=names[0])  # which isn't loaded
    assert full.load(names[0])
    assert not full.load(names[2], previous=names[0])
    assert not full.load(names[1])  # a delta without its previous export
    assert full.load(names[1], previous=names[0])
    assert full.load(names[2], previous=names[1])


async def test_an_adapter_is_exported_whole_or_merged_into_the_base(lora: Stage) -> None:
    with pytest.raises(RequestFailedError, match="adapters are exported whole"):
        lora.trainer.save_weights_for_sampler_ext("delta", checkpoint_type="delta")
    with pytest.raises(RequestFailedError, match="differs from a new one"):
        lora.trainer.save_weights_for_sampler_ext("merged", checkpoint_type="merged_base")
    step(lora.trainer)
    saved = lora.trainer.save_weights_for_sampler_ext("merged-1", checkpoint_type="merged_base")
    assert lora.load(saved.snapshot_name)
    own = scores_of(lora.trainer)
    assert await lora.scores([2, 3, 4, 5]) == pytest.approx(own, abs=1e-4)


def test_a_failed_hotload_reports_its_error(emulator: RunningEmulator, lora: Stage) -> None:
    name = lora.trainer.save_weights_for_sampler_ext("v0").snapshot_name
    emulator.plan_fault("hot_load", "hotload_error")
    assert not lora.load(name)
    assert "stage=error" in (lora.deployments.last_hotload_error_message or "")
    assert lora.serving() is None
    assert lora.load(name)


def test_a_stuck_hotload_leaves_the_deployment_not_ready(
    emulator: RunningEmulator, lora: Stage
) -> None:
    name = lora.trainer.save_weights_for_sampler_ext("v0").snapshot_name
    emulator.plan_fault("hot_load", "hotload_stuck")
    assert not lora.load(name, patience=0.3)
    model = f"accounts/everburn/deployments/{lora.deployment}"
    reply = httpx.post(
        f"{emulator.url}/inference/v1/completions", json={"model": model, "prompt": [2]}
    )
    assert (reply.status_code, reply.json()["error"]["code"]) == (425, "TOO_EARLY")


def test_replicas_load_one_after_the_other_and_serve_the_old_weights_meanwhile(
    emulator: RunningEmulator, clock: SimpleNamespace, lora: Stage
) -> None:
    lora.deployments.update(lora.deployment, {"maxReplicaCount": 2}, "max_replica_count")
    old, new = (lora.trainer.save_weights_for_sampler_ext(n).snapshot_name for n in ("v0", "v1"))
    assert lora.load(old)
    emulator.admin("POST", "hotload", {"seconds": 10.0})
    lora.deployments.hotload(lora.deployment, TINY, new)

    def state() -> list[tuple[bool, bool, str]]:
        replicas = lora.deployments.hotload_check_status(lora.deployment, TINY)["replicas"]
        return [
            (
                replica["readiness"],
                replica["current_snapshot_identity"] == new,
                replica["loading_state"]["stage"],
            )
            for replica in replicas
        ]

    serves, swaps, done = (True, False, "loading"), (False, False, "loading"), (True, True, "done")
    for stage in ([serves, serves], [swaps, serves], [done, serves], [done, swaps]):
        assert state() == stage
        with pytest.raises(httpx.HTTPStatusError, match="425"):
            lora.deployments.hotload(lora.deployment, TINY, old)
        clock.now += 5.0
    assert state() == [done, done]


def test_a_paused_job_is_resumed(emulator: RunningEmulator, full: Stage) -> None:
    emulator.admin("POST", f"jobs/{full.job}", {"state": "JOB_STATE_PAUSED"})
    with pytest.raises(APIStatusError, match="isn't running: JOB_STATE_PAUSED"):
        full.trainer.forward([DATUM], "cross_entropy").result()
    full.jobs.resume_and_wait(full.job, poll_interval_s=0.01)
    step(full.connect())


def test_a_snapshot_is_loaded_from_the_bucket_of_its_trainer(
    lora: Stage, jobs: TrainerJobManager, deployments: DeploymentManager
) -> None:
    other = Stage(jobs, deployments, rank=4)
    name = lora.trainer.save_weights_for_sampler_ext("v0").snapshot_name
    assert not other.load(name)
    deployments.reattach_trainer(
        other.deployment,
        base_model=TINY,
        trainer_job_name=lora.endpoint.job_name,
        timeout_s=5,
    )
    assert other.load(name)


def test_a_deployment_may_own_the_bucket(
    jobs: TrainerJobManager, deployments: DeploymentManager
) -> None:
    deployment, job = new_id("dep"), new_id("job")
    deployments.create_or_get(DeploymentConfig(deployment, TINY))
    endpoint = jobs.create_and_wait(job_config(job, 4, hot_load_deployment_id=deployment))
    service = FiretitanServiceClient(base_url=endpoint.base_url, api_key="fw_local")
    trainer = service.create_training_client(base_model=TINY, lora_rank=4)
    name = trainer.save_weights_for_sampler_ext("v0").snapshot_name
    assert deployments.hotload_and_wait(deployment, TINY, name, timeout_seconds=1)


def test_a_deployment_can_be_scaled_to_zero_replicas(lora: Stage) -> None:
    lora.deployments.scale_to_zero(lora.deployment)
    assert lora.deployments.hotload_check_status(lora.deployment, TINY) == {"replicas": []}


def test_a_checkpoint_of_another_job_is_loaded_by_its_name(
    lora: Stage, jobs: TrainerJobManager, deployments: DeploymentManager
) -> None:
    step(lora.trainer)
    lora.trainer.save_state("state-1").result()
    other = Stage(jobs, deployments, rank=4)
    other.trainer.load_state_with_optimizer(
        other.trainer.resolve_checkpoint_path("state-1", source_job_id=lora.job)
    ).result()
    assert scores_of(other.trainer) == scores_of(lora.trainer)
    with pytest.raises(RequestFailedError, match="has saved no checkpoint 'state-9'"):
        other.trainer.load_state(f"cross_job://{lora.job}/state-9").result()


# The unknowns


@pytest.mark.usefixtures("quick_retries")
def test_in_the_worst_case_a_repeated_submission_is_applied_again(
    emulator: RunningEmulator, lora: Stage
) -> None:
    emulator.admin("POST", "unknowns", {"applies_repetitions": True})
    emulator.plan_fault("forward_backward", "drop", applied=True)
    assert step(lora.trainer)["num_sequences"] == 2
    emulator.admin("POST", "unknowns", {})
    emulator.plan_fault("forward_backward", "drop", applied=True)
    assert step(lora.trainer)["num_sequences"] == 1


@pytest.mark.usefixtures("quick_retries")
def test_in_the_worst_case_a_repeated_step_applies_the_momentum_again(
    emulator: RunningEmulator, lora: Stage
) -> None:
    step(lora.trainer)
    scores = []
    for applies in (False, True):
        emulator.admin("POST", "unknowns", {"applies_repetitions": applies})
        lora.trainer.forward_backward([DATUM], "cross_entropy").result()
        emulator.plan_fault("optim_step", "drop", applied=True)
        metrics = lora.trainer.optim_step(types.AdamParams()).result().metrics
        scores.append((metrics["step"], metrics["grad_norm"] == 0))
    assert scores == [(2, False), (4, True)]
    emulator.admin("POST", "unknowns", {})
    with pytest.raises(RequestFailedError, match="without a forward_backward"):
        lora.trainer.optim_step(types.AdamParams()).result()


def test_in_the_worst_case_full_parameter_models_share_everything(
    emulator: RunningEmulator, full: Stage
) -> None:
    emulator.admin("POST", "unknowns", {"shares_full_parameters": True})
    first, second = full.connect(), full.connect()
    first.forward_backward([DATUM], "cross_entropy").result()
    metrics = step(second)
    assert (metrics["num_sequences"], metrics["step"]) == (2, 1)
    assert step(first)["step"] == 2
    assert scores_of(first) == scores_of(second)
    first.unload_model().result()
    assert step(second)["step"] == 3


def test_in_the_best_case_full_parameter_models_are_separate(full: Stage) -> None:
    other = full.connect()
    step(other)
    assert scores_of(full.trainer) != scores_of(other)


def test_in_the_worst_case_loading_keeps_accumulated_gradients(
    emulator: RunningEmulator, lora: Stage
) -> None:
    saved = lora.trainer.save_state("state-0").result().path
    for keeps, accumulated in ((True, 2), (False, 1)):
        emulator.admin("POST", "unknowns", {"keeps_gradients": keeps})
        lora.trainer.forward_backward([DATUM], "cross_entropy").result()
        lora.trainer.load_state_with_optimizer(saved).result()
        assert step(lora.trainer)["num_sequences"] == accumulated


def test_a_preemption_ends_the_process_in_the_middle_of_a_step(
    emulator: RunningEmulator, full: Stage
) -> None:
    emulator.plan_fault("optim_step", "preempt_job")
    with pytest.raises(APIStatusError, match="isn't running"):
        step(full.trainer)
    wait_for(lambda: full.jobs.get(full.job)["state"] == "JOB_STATE_FAILED")
    full.jobs.resume_and_wait(full.job, poll_interval_s=0.01)
    step(full.connect())
