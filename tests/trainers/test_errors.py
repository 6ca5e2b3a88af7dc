"""Each row of the table of errors, by an emulator fault through the unmodified SDK."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from fireworks.training.sdk._core.lib import internal_client_holder

from everburn.trainers import serverless
from everburn.trainers.errors import RULES, traits_of
from everburn.trainers.protocol import (
    KeyRefusedError,
    QuotaExceededError,
    TrainerCapacityError,
    TrainerError,
    TrainerFailedError,
    TrainerRejectedError,
    TrainerStateLostError,
    TrainerUnavailableError,
)
from everburn.trainers.serverless import ServerlessTrainer
from support.emulator import RunningEmulator
from support.sessions import ADAM, a_config, a_datum

ALWAYS = 1000
DOCS = Path(__file__).parents[2] / "docs" / "fireworks.md"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serverless, "QUOTA_PATIENCE", 0)


@pytest.fixture
async def trainer(emulator: RunningEmulator) -> AsyncIterator[ServerlessTrainer]:
    session = await ServerlessTrainer.open(a_config(emulator.base_url))
    yield session
    emulator.admin("DELETE", "faults")
    await session.close()


@pytest.mark.usefixtures("quick_retries")
@pytest.mark.parametrize(
    ("status", "message", "expected", "text"),
    [
        (401, "", KeyRefusedError, "the API key in FIREWORKS_API_KEY is refused"),
        (403, "", KeyRefusedError, "the API key in FIREWORKS_API_KEY lacks the permission"),
        (402, "", QuotaExceededError, "quota is used up"),
        (400, "at capacity", TrainerCapacityError, "no capacity for another session"),
        (422, "", TrainerRejectedError, "injected fault"),
    ],
)
async def test_errors_while_opening_a_session(
    emulator: RunningEmulator,
    status: int,
    message: str,
    expected: type[TrainerError],
    text: str,
) -> None:
    emulator.plan_fault("create_session", "status", status=status, message=message, count=ALWAYS)
    with pytest.raises(expected, match=text) as caught:
        await ServerlessTrainer.open(a_config(emulator.base_url))
    assert type(caught.value) is expected


@pytest.mark.parametrize("status", [404, 410])
async def test_a_session_that_is_lost_while_opening_is_retried(
    emulator: RunningEmulator, status: int
) -> None:
    """For example because the service restarts. An unknown model isn't retried."""
    emulator.plan_fault("retrieve_future", "status", status=status, count=ALWAYS)
    with pytest.raises(TrainerUnavailableError, match="lost the session") as caught:
        await ServerlessTrainer.open(a_config(emulator.base_url))
    assert type(caught.value) is TrainerUnavailableError


@pytest.mark.usefixtures("quick_retries")
@pytest.mark.parametrize(
    ("operation", "status", "expected", "text"),
    [
        ("optim_step", 402, QuotaExceededError, "add credit"),
        ("retrieve_future", 402, QuotaExceededError, "add credit"),
        ("optim_step", 401, KeyRefusedError, "FIREWORKS_API_KEY is refused"),
        ("retrieve_future", 403, KeyRefusedError, "lacks the permission"),
        ("optim_step", 410, TrainerStateLostError, "injected fault"),
        ("retrieve_future", 404, TrainerStateLostError, "404"),
        ("retrieve_future", 410, TrainerStateLostError, "expired"),
        ("retrieve_future", 409, TrainerFailedError, "409"),
        ("optim_step", 400, TrainerFailedError, "injected fault"),
    ],
)
async def test_errors_of_an_open_session(
    emulator: RunningEmulator,
    trainer: ServerlessTrainer,
    operation: str,
    status: int,
    expected: type[TrainerError],
    text: str,
) -> None:
    await trainer.forward_backward([a_datum()], "grpo", {})
    emulator.plan_fault(operation, "status", status=status, count=ALWAYS)
    with pytest.raises(expected, match=text) as caught:
        await trainer.optim_step(ADAM)
    assert type(caught.value) is expected


@pytest.mark.parametrize(("operation", "waited"), [("forward_backward", 2), ("retrieve_future", 1)])
async def test_a_rate_limit_is_waited_for_in_place(
    emulator: RunningEmulator, trainer: ServerlessTrainer, operation: str, waited: float
) -> None:
    """A submission waits as long as the service says; polling waits one second at first and doubles
    that each time, whatever the service says."""
    before = max(emulator.arrivals(operation), default=0.0)
    emulator.plan_fault(operation, "status", status=429, retry_after=2)
    gradients = await trainer.forward_backward([a_datum()], "grpo", {})
    assert "loss:sum" in gradients.metrics
    refused, repeated, *_ = [at for at in emulator.arrivals(operation) if at > before]
    assert repeated - refused >= waited


async def test_a_client_after_a_refused_submission_reports_that_it_sends_nothing(
    emulator: RunningEmulator, trainer: ServerlessTrainer
) -> None:
    emulator.plan_fault("forward_backward", "status", status=400)
    with pytest.raises(TrainerStateLostError):
        await trainer.forward_backward([a_datum()], "grpo", {})
    with pytest.raises(TrainerStateLostError, match="sends nothing more after a refused"):
        await trainer.forward_backward([a_datum()], "grpo", {})


async def test_a_result_that_never_comes_ends_the_lease(
    emulator: RunningEmulator, trainer: ServerlessTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serverless, "RESULT_TIMEOUT", 0.1)
    emulator.plan_fault("retrieve_future", "delay", seconds=1.5)
    with pytest.raises(TrainerStateLostError, match="no result in time"):
        await trainer.forward_backward([a_datum()], "grpo", {})


async def test_a_publication_times_out(
    emulator: RunningEmulator, trainer: ServerlessTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serverless, "PUBLISH_TIMEOUT", 0.1)
    emulator.plan_fault("save_weights_for_sampler", "delay", seconds=1.5)
    with pytest.raises(TrainerStateLostError, match=r"save_weights_for_sampler: .* in time"):
        await trainer.publish("policy-0000-e1")


@pytest.mark.parametrize("operation", ["optim_step", "retrieve_future"])
async def test_a_malformed_reply_ends_the_lease(
    emulator: RunningEmulator, trainer: ServerlessTrainer, operation: str
) -> None:
    await trainer.forward_backward([a_datum()], "grpo", {})
    emulator.plan_fault(operation, "malformed", count=ALWAYS)
    with pytest.raises(TrainerStateLostError, match="can't be read"):
        await asyncio.wait_for(trainer.optim_step(ADAM), 60)


@pytest.mark.parametrize("status", [404, 425])
async def test_a_snapshot_that_is_never_loaded_reports_the_servers_error(
    emulator: RunningEmulator,
    trainer: ServerlessTrainer,
    monkeypatch: pytest.MonkeyPatch,
    status: int,
) -> None:
    monkeypatch.setattr(serverless, "SERVED_TIMEOUT", 0.5)
    monkeypatch.setattr(serverless, "SERVED_INTERVAL", 0.1)
    snapshot = await trainer.publish("policy-0000-e1")
    emulator.plan_fault("sample", "status", status=status, message="still loading", count=ALWAYS)
    with pytest.raises(TrainerStateLostError, match=f"sampling from {snapshot.path}.*{status}"):
        await trainer.served_logprobs(snapshot, [1, 2, 3])


class FastClock:
    """The `time` module with a clock that runs a thousand times too fast."""

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def time(self) -> float:
        return 1000 * time.time()


@pytest.fixture
def impatient(quick_retries: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The SDK stops repeating a request after a second instead of five minutes."""
    monkeypatch.setattr(internal_client_holder, "time", FastClock())


async def test_a_service_that_is_down_is_unavailable(dead_url: str) -> None:
    with pytest.raises(TrainerUnavailableError, match="nothing answers") as caught:
        await ServerlessTrainer.open(a_config(dead_url))
    assert type(caught.value) is TrainerUnavailableError


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("operation", ["create_session", "create_model"])
@pytest.mark.parametrize("fault", [{"kind": "status", "status": 503}, {"kind": "drop"}])
async def test_a_service_that_fails_is_unavailable(
    emulator: RunningEmulator, operation: str, fault: dict[str, Any]
) -> None:
    emulator.plan_fault(operation, count=ALWAYS, **fault)
    with pytest.raises(TrainerUnavailableError) as caught:
        await ServerlessTrainer.open(a_config(emulator.base_url))
    assert type(caught.value) is TrainerUnavailableError


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("status", [409, 429])
async def test_a_limit_of_sessions_is_a_lack_of_capacity(
    emulator: RunningEmulator, status: int
) -> None:
    emulator.plan_fault("create_session", "status", status=status, count=ALWAYS)
    with pytest.raises(TrainerCapacityError, match="no capacity for another session"):
        await ServerlessTrainer.open(a_config(emulator.base_url))


@pytest.mark.usefixtures("impatient")
async def test_a_rate_limit_beyond_the_sdks_patience_ends_the_lease(
    emulator: RunningEmulator, trainer: ServerlessTrainer
) -> None:
    emulator.plan_fault("optim_step", "status", status=429, count=ALWAYS)
    with pytest.raises(TrainerStateLostError, match="longer than the SDK waits"):
        await trainer.optim_step(ADAM)


def test_causes_are_considered() -> None:
    outer = ValueError("Error retrieving result")
    inner: Any = RuntimeError("refused")
    inner.status_code = 401
    outer.__cause__ = inner
    assert traits_of(outer).status == 401
    inner.__cause__ = outer
    assert traits_of(outer).types >= {"ValueError", "RuntimeError"}


def test_each_rule_is_documented() -> None:
    page = DOCS.read_text()
    assert [rule.case for rule in RULES if f"| {rule.case} |" not in page] == []
