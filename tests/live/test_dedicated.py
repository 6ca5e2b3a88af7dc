"""One real step on a trainer job and its deployment, and open questions about such jobs.

Uses the live service only if there is a key and EVERBURN_LIVE_TRAINING_SHAPE names the GPUs (and
EVERBURN_LIVE_DEDICATED_MODEL the model of the shape): one job and one deployment of one replica,
for all tests, deleted at their end. Otherwise it uses an emulator, whose answers depend on its
switches (everburn/emulator/unknowns.py): each question is asked with both settings.
"""

import asyncio
import contextlib
import os
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

import httpx
import pytest
from fireworks.training.sdk import FiretitanServiceClient, TrainerJobManager

from everburn.config import RunConfig, parse_config
from everburn.emulator.models.base_model import TINY
from everburn.records.ids import (
    LeaseKey,
    RunRef,
)
from everburn.records.provisioning import find_provisioning
from everburn.records.run_folder import Owner, create_run_folder
from everburn.records.store import ArtifactStore
from everburn.trainers.backends import EMULATOR_KEY, api_key, api_root
from everburn.trainers.dedicated import DedicatedTrainer
from everburn.trainers.jobs import RunProvisioning
from everburn.trainers.probe import check_served
from everburn.trainers.protocol import TrainerError, TrainerUnavailableError
from everburn.trainers.serverless import ServerlessTrainer
from support.emulator import RunningEmulator

from .conftest import KEY, URL, Answer, on_both_answers
from .wire import ADAM, TOKENS, Wire, a_datum

SHAPE = os.environ.get("EVERBURN_LIVE_TRAINING_SHAPE")
MODEL = os.environ.get("EVERBURN_LIVE_DEDICATED_MODEL", "accounts/fireworks/models/qwen3-4b")
TINY_SHAPE = "accounts/everburn/trainingShapes/tiny"
READY_PATIENCE = 3600.0
"""Seconds until a job and a deployment are ready."""
IDLE = 120.0
"""Seconds without a session after which the service stops the job."""

LIVE = bool(os.environ.get(KEY)) and SHAPE is not None


@dataclass(frozen=True)
class Place:
    """A full-parameter trainer job with its deployment, for the id of a run that never starts."""

    run: RunRef
    config: RunConfig
    emulator: RunningEmulator | None

    @property
    def job_id(self) -> str:
        record = find_provisioning(ArtifactStore.of(self.run))
        assert record is not None
        return record.job_id

    @property
    def key(self) -> str:
        return api_key(self.config)

    def jobs(self) -> TrainerJobManager:
        return TrainerJobManager(api_key=self.key, base_url=api_root(self.config))

    def make_ready(self) -> None:
        deadline = time.monotonic() + READY_PATIENCE
        while (found := RunProvisioning(self.run, self.config).advance()).stage != "ready":
            assert time.monotonic() < deadline, found.text
            time.sleep(0.1 if self.emulator else 10)

    def give_back(self) -> None:
        for attempt in range(5):
            with contextlib.suppress(TrainerUnavailableError):
                RunProvisioning(self.run, self.config).clean_up()
                return
            time.sleep(10 * (attempt + 1))
        pytest.fail(f"job and deployment {self.job_id} are left: delete them by hand")

    @property
    def endpoint(self) -> str:
        """The base URL of the job's own API."""
        with self.jobs() as manager:
            return str(manager.wait_for_ready(self.job_id, timeout_s=60).base_url)

    @contextlib.asynccontextmanager
    async def model(self, *, left: bool = False) -> AsyncIterator[ServerlessTrainer]:
        """A session with a model, without a run's fences. left: the model isn't unloaded, like that
        of a holder that died."""
        service = FiretitanServiceClient(base_url=self.endpoint, api_key=self.key)
        try:
            client = await asyncio.to_thread(
                service.create_training_client, base_model=self.config.base_model, lora_rank=0
            )
            yield ServerlessTrainer(service, client, self.config)
            if not left:
                await asyncio.to_thread(client.unload_model().result, timeout=10)
        finally:
            service.close()

    def set(self, **unknowns: bool) -> None:
        """The emulator's answers."""
        if self.emulator is not None:
            self.emulator.admin("POST", "unknowns", unknowns)


@pytest.fixture(scope="module")
def shared_place(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Place]:
    with pytest.MonkeyPatch.context() as environment:
        emulator: RunningEmulator | None = None
        if not LIVE:
            environment.setenv(KEY, EMULATOR_KEY)
            emulator = request.getfixturevalue("shared_emulator")
        url = emulator.url if emulator else URL
        values = {
            "rollout": "task:make",
            "dataset": "rows.jsonl",
            "backend": "dedicated",
            "base_model": TINY if emulator else MODEL,
            "tokenizer_model": "not needed",
            "lora_rank": 0,
            "trainer": {
                "training_shape": TINY_SHAPE if emulator else SHAPE,
                "inactivity_timeout": IDLE,
            },
        }
        folder = tmp_path_factory.mktemp("live")
        run = RunRef(store=str(folder), id="live-tests")
        place = Place(run, parse_config(values | ({"base_url": url} if url else {})), emulator)
        create_run_folder(run, place.config, Owner(first_execution_id=uuid.uuid4().hex))
        try:
            place.make_ready()
            yield place
        finally:
            place.give_back()


@pytest.fixture
def place(shared_place: Place) -> Iterator[Place]:
    yield shared_place
    shared_place.set()


@pytest.fixture
def answer(answer: Answer) -> Answer:
    """Mark answers that come from the emulator."""
    return answer if LIVE else lambda question, found: answer(f"{question} (emulator)", found)


async def gradient(trainer: ServerlessTrainer) -> None:
    await trainer.forward_backward([a_datum()], "importance_sampling", {})


async def scores(trainer: ServerlessTrainer) -> list[float]:
    return (await trainer.forward([TOKENS]))[0]


def distance(one: list[float], other: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


async def test_one_step_from_gradient_to_served_policy(place: Place, answer: Answer) -> None:
    trainer = await DedicatedTrainer.open_for(place.run, place.config, LeaseKey(0, 1))
    try:
        before = await scores(trainer)
        await gradient(trainer)
        metrics = await trainer.optim_step(ADAM)
        after = await scores(trainer)
        assert sum(after[2:]) > sum(before[2:])
        answer("metrics of a dedicated optim_step", sorted(metrics))

        for version in (1, 2):  # complete weights, and then a difference
            began = time.monotonic()
            snapshot = await trainer.publish(f"policy-000{version}-e1")
            answer(f"hotload {version}", f"{time.monotonic() - began:.1f} s")
            gap = await check_served(trainer, snapshot, TOKENS, 2, place.config.served_tolerance)
            answer("gap between trainer and deployment, in nats", f"{gap:.4f}")
            await gradient(trainer)
            await trainer.optim_step(ADAM)

        saved = await scores(trainer)
        path = await trainer.save_checkpoint("state-1")
        await gradient(trainer)
        await trainer.optim_step(ADAM)
        await trainer.load_checkpoint(path)
        assert distance(await scores(trainer), saved) < place.config.served_tolerance
        answer("form of a dedicated checkpoint's path", path)
    finally:
        await trainer.close()


@on_both_answers(live=LIVE)
async def test_a_submission_that_is_sent_twice(
    place: Place, answer: Answer, worst: bool | None
) -> None:
    """(a) Everburn compares counts if the trainer reports them, and relies on nothing else."""
    place.set(applies_repetitions=bool(worst))
    async with place.model() as trainer:
        wire = Wire(place.endpoint, place.key, trainer._client.model_id)
        steps, _ = await wire.one_and_two_submissions()
    for submissions, result in enumerate(steps, start=1):
        counted = result.get("accumulated", "not reported")
        answer(f"(a) {submissions} submissions of one seq_id, as counted by the trainer", counted)
    norms = [float(result["grad_norm"]) for result in steps]
    applied = norms[1] / norms[0]
    answer("(a) two submissions of one seq_id on a job are applied", f"{applied:.2f} times")
    if worst is not None:
        assert applied == pytest.approx(2 if worst else 1, rel=1e-3)


@on_both_answers(live=LIVE)
async def test_two_models_of_a_full_parameter_job(
    place: Place, answer: Answer, worst: bool | None
) -> None:
    """(b) Everburn unloads the model of an earlier lease before it makes its own."""
    place.set(shares_full_parameters=bool(worst))
    async with place.model() as first, place.model() as second:
        before = await scores(second)
        await gradient(first)
        for trainer in (second, first):  # the model with the gradient changes weights
            with contextlib.suppress(TrainerError):
                await trainer.optim_step(ADAM)
            if trainer is second:
                gradients_shared = distance(await scores(second), before) > 0
        one, other = await scores(first), await scores(second)
    moved = max(distance(one, before), distance(other, before))
    assert moved > 0
    weights_shared = distance(one, other) < 0.1 * moved
    answer("(b) two models share accumulated gradients", gradients_shared)
    answer("(b) two models share weights", weights_shared)
    if worst is not None:
        assert (gradients_shared, weights_shared) == (worst, worst)


@on_both_answers(live=LIVE)
async def test_loading_a_state_clears_gradients(
    place: Place, answer: Answer, worst: bool | None
) -> None:
    """(c) Everburn drops what is accumulated before it loads."""
    place.set(keeps_gradients=bool(worst))
    async with place.model() as trainer:
        path = await trainer.save_checkpoint(f"state-{uuid.uuid4().hex[:8]}")
        before = await scores(trainer)
        await gradient(trainer)
        await trainer.load_checkpoint(path)
        with contextlib.suppress(TrainerError):
            await trainer.optim_step(ADAM)
        kept = distance(await scores(trainer), before) > 0
    answer("(c) gradients survive a load on a job", kept)
    if worst is not None:
        assert kept == worst


@on_both_answers(live=LIVE)
async def test_a_submission_repeated_after_a_restart(
    place: Place, answer: Answer, worst: bool | None
) -> None:
    """(a) The last test, since it waits until the service stops the job without a session. A holder
    from before the restart must find its model gone: Everburn makes a new one and loads."""
    place.set(applies_repetitions=bool(worst))
    async with place.model(left=True) as trainer:
        wire = Wire(place.endpoint, place.key, trainer._client.model_id)
        await wire.result(await wire.submit_gradient(seq_id=1))
    if place.emulator is not None:
        place.emulator.admin("POST", f"jobs/{place.job_id}", {"state": "JOB_STATE_PAUSED"})
    with place.jobs() as manager:
        deadline = time.monotonic() + 5 * IDLE
        while manager.get(place.job_id)["state"] == "JOB_STATE_RUNNING":
            if time.monotonic() > deadline:
                answer("(a) across a restart", f"not asked: idle for {5 * IDLE:g} s, and running")
                return
            await asyncio.sleep(5)
    await asyncio.to_thread(place.make_ready)
    again = Wire(place.endpoint, place.key, trainer._client.model_id)
    try:
        found = str((await again.result(await again.submit_gradient(seq_id=1))).get("error"))
        refused = found != "None"
    except httpx.HTTPStatusError as error:
        refused, found = True, f"HTTP {error.response.status_code}"
    answer("(a) a submission repeated after the job's restart", found if refused else "applied")
    assert refused
