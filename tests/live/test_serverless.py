"""One real step on serverless Fireworks, and open questions that only the live service answers.

The questions are those of docs/fireworks.md. A test fails if Everburn relies on another answer;
answers that Everburn doesn't rely on are only recorded.
"""

import asyncio
import os
import time

import pytest

from everburn.config import RunConfig
from everburn.trainers.backends import api_key, control_url, training_url
from everburn.trainers.probe import check_served
from everburn.trainers.protocol import TrainerError
from everburn.trainers.serverless import ServerlessTrainer
from support.emulator import RunningEmulator

from .conftest import KEY, Answer, on_both_answers
from .wire import ADAM, PATIENCE, TOKENS, Wire, a_datum

LIVE = bool(os.environ.get(KEY))


async def gradient(trainer: ServerlessTrainer) -> None:
    await trainer.forward_backward([a_datum()], "importance_sampling", {})


async def grad_norm(trainer: ServerlessTrainer) -> float | None:
    return (await trainer.optim_step(ADAM)).get("grad_norm")


async def test_one_step_from_gradient_to_served_policy(
    config: RunConfig, trainer: ServerlessTrainer, answer: Answer
) -> None:
    before = await trainer.forward([TOKENS])
    await gradient(trainer)
    metrics = await trainer.optim_step(ADAM)
    after = await trainer.forward([TOKENS])
    assert sum(after[0][2:]) > sum(before[0][2:])
    answer("metrics of optim_step", sorted(metrics))

    snapshot = await trainer.publish("policy-0001-e1")
    gap = await check_served(trainer, snapshot, TOKENS, 2, config.served_tolerance)
    answer("gap between trainer and sampler, in nats", f"{gap:.4f}")

    path = await trainer.save_checkpoint("state-1")
    await trainer.load_checkpoint(path)
    answer("form of a checkpoint's path", path)


@on_both_answers(live=LIVE)
async def test_a_submission_that_is_sent_twice(
    config: RunConfig,
    trainer: ServerlessTrainer,
    answer: Answer,
    request: pytest.FixtureRequest,
    worst: bool | None,
) -> None:
    """(a) Everburn sends none twice (everburn/trainers/send_once.py), and relies on neither answer.
    The test answers (e), too."""
    if worst is not None:
        emulator: RunningEmulator = request.getfixturevalue("emulator")
        request.addfinalizer(emulator.mend)
        emulator.admin("POST", "unknowns", {"applies_repetitions": worst})
    wire = Wire(training_url(config), api_key(config), trainer._client.model_id)
    steps, requests = await wire.one_and_two_submissions()
    norms: list[float | None] = [result.get("grad_norm") for result in steps]
    one, two = norms
    applied = two / one if one and two else None
    answer("(a) two submissions of one seq_id are applied so many times", applied or norms)
    answer("(a) their request ids", "equal" if len(set(requests)) == 1 else "different")
    again = await wire.result(requests[0])
    answer("(e) a result read again", "readable" if "metrics" in again else again)
    if worst is not None:
        assert applied == pytest.approx(2 if worst else 1, rel=1e-3)


async def test_loading_a_state_clears_gradients(trainer: ServerlessTrainer, answer: Answer) -> None:
    """(c) Everburn loads into new sessions only, and relies on neither answer."""
    path = await trainer.save_checkpoint("state-0")
    await gradient(trainer)
    await trainer.load_checkpoint(path)
    try:
        norm = await grad_norm(trainer)
    except TrainerError as error:
        answer("(c) optim_step after a load", f"refused: {error}")
    else:
        answer("(c) gradient that survives a load", norm)


@pytest.mark.chaos
async def test_a_session_without_heartbeats(config: RunConfig, answer: Answer) -> None:
    """(d) The answer bounds how long a session of a killed worker blocks its slot."""
    from fireworks.training.sdk.fireworks_client import FireworksClient

    trainer = await ServerlessTrainer.open(config)
    session = trainer.session
    await asyncio.to_thread(trainer._service.close)  # ends the heartbeats, not the session
    began = time.monotonic()
    with FireworksClient(api_key=api_key(config), base_url=control_url(config)) as control:
        name = f"accounts/{control.account_id}/trainingSessions/{session}"
        duration = f"more than {PATIENCE:g} s"
        while time.monotonic() - began < PATIENCE:
            try:
                await asyncio.to_thread(control.list_training_session_checkpoints, name)
            except RuntimeError:
                duration = f"about {time.monotonic() - began:.0f} s"
                break
            await asyncio.sleep(5)
        answer("(d) a session without heartbeats stays open for", duration)
        try:
            control.delete_training_session(name)
        except RuntimeError as error:
            answer("(d) deleting a session that is gone", str(error).splitlines()[0])


async def test_settings_of_the_other_losses(trainer: ServerlessTrainer, answer: Answer) -> None:
    """(f) The refusal of a key that can't exist may name those that do."""
    for loss in ("dro", "dapo", "gspo", "dppo", "reinforce"):
        try:
            await trainer.forward_backward([a_datum()], loss, {"no_such_setting": 1.0})
        except TrainerError as error:
            answer(f"(f) {loss} with an unknown setting", error)
        else:
            answer(f"(f) {loss} with an unknown setting", "accepted")


async def test_a_checkpoints_name_used_twice(trainer: ServerlessTrainer, answer: Answer) -> None:
    """(g) Everburn uses each name once per session."""
    first = await trainer.save_checkpoint("state-0")
    try:
        second = await trainer.save_checkpoint("state-0")
    except TrainerError as error:
        answer("(g) a name used twice", f"refused: {error}")
    else:
        answer("(g) a name used twice", "the same path" if first == second else second)


async def test_an_adapters_seed(config: RunConfig, answer: Answer) -> None:
    """(h) A fresh adapter changes nothing, so its seed shows only after a step."""
    found = []
    for seed in (7, 7, 8):
        session = await ServerlessTrainer.open(config.model_copy(update={"seed": seed}))
        try:
            await gradient(session)
            await session.optim_step(ADAM)
            found.append((await session.forward([TOKENS]))[0])
        finally:
            await session.close()
    same, other = (max(abs(a - b) for a, b in zip(found[0], x, strict=True)) for x in found[1:])
    answer(
        "(h) largest difference after a step, equal seeds and others", f"{same:.2g}, {other:.2g}"
    )
