"""Losses through the unmodified SDK against the emulator: the service's by name, one's own by a
Python function, and what a trainer can't do."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fireworks.training.sdk import types

from everburn.config import Entrypoint
from everburn.emulator.models.base_model import TINY
from everburn.emulator.training.losses import Loss
from everburn.learning.datums import Datum, build_datum
from everburn.learning.losses import LOSSES, wire_loss_of
from everburn.records.ledger import AdamParams
from everburn.rollouts.contract import RolloutSample
from everburn.trainers.protocol import TrainerRejectedError, TrainerUnfitError
from everburn.trainers.serverless import ServerlessTrainer, to_sdk
from everburn.usercode import limits
from support import losses
from support.emulator import RunningEmulator
from support.sessions import ADAM, a_config
from support.waiting import PATIENCE, until

PLAIN = AdamParams(
    learning_rate=1e8,
    beta1=0.0,
    beta2=0.0,
    eps=1e8,
    weight_decay=0.0,
    grad_clip_norm=0.0,
    normalization="none",
)
"""With these an optimizer step subtracts the gradient itself."""


def a_datum(first: int = 2, advantage: float = 1.0) -> Datum:
    sample = RolloutSample(
        tokens=[first, 3, 4, 5, 6],
        logprobs=[0.0, 0.0, -4.0, -4.2, -3.9],
        loss_mask=[0, 0, 1, 0, 1],
        reward=1.0,
    )
    return build_datum(sample, advantage)


DATUMS = [a_datum(), a_datum(first=7, advantage=-0.5)]


def own(name: str, **kwargs: Any) -> Entrypoint:
    return Entrypoint(name=f"support.losses:{name}", kwargs=kwargs)


@pytest.fixture
async def trainer(emulator: RunningEmulator) -> AsyncIterator[ServerlessTrainer]:
    session = await ServerlessTrainer.open(a_config(emulator.base_url))
    yield session
    await session.close()


async def gradient(
    emulator: RunningEmulator, trainer: ServerlessTrainer, name: str
) -> dict[str, torch.Tensor]:
    """The accumulated gradient, by what an optimizer step takes off; weights are put back."""
    before = await trainer.save_checkpoint(f"{name}-before")
    await trainer.optim_step(PLAIN)
    after = await trainer.save_checkpoint(f"{name}-after")
    await trainer.load_checkpoint(before)
    old, new = emulator.saved_weights(before), emulator.saved_weights(after)
    return {key: old[key] - new[key] for key in old}


@pytest.mark.parametrize("name", LOSSES)
async def test_every_loss_is_computed_by_its_own_formula(trainer: ServerlessTrainer, name: str):
    """The service's sum over the trained tokens is the formula at the logprobs that it reports."""
    result = await trainer.forward_backward(DATUMS, name, {})
    loss = Loss.parse(*wire_loss_of(name, {}))
    expected = [
        loss(
            torch.tensor([own_logprobs]),
            torch.from_numpy(datum.logprobs)[None],
            torch.from_numpy(datum.advantages)[None],
        ).sum()
        for datum, own_logprobs in zip(DATUMS, result.logprobs, strict=True)
    ]
    assert result.metrics["loss:sum"] == pytest.approx(float(sum(expected)), rel=1e-4, abs=1e-5)


async def test_asymmetric_clipping_reaches_the_trainer(trainer: ServerlessTrainer):
    """A ratio of 1.25 is clipped by 1.2 and not by 1.3."""
    (own_logprobs,) = (await trainer.forward_backward([a_datum()], "grpo", {})).logprobs
    closer = np.asarray(own_logprobs, dtype=np.float32) - np.float32(np.log(1.25))
    datum = replace(a_datum(), logprobs=closer * a_datum().mask)
    sums = [
        (await trainer.forward_backward([datum], "grpo", {"clip_high_threshold": high})).metrics
        for high in (1.2, 1.3)
    ]
    assert [each["loss:sum"] for each in sums] == pytest.approx([-2.4, -2.5], rel=1e-4)


async def test_a_python_loss_trains_as_the_services_loss_of_the_same_formula(
    emulator: RunningEmulator, trainer: ServerlessTrainer
):
    builtin = await trainer.forward_backward(DATUMS, "importance_sampling", {})
    theirs = await gradient(emulator, trainer, "builtin")
    result = await trainer.forward_backward(DATUMS, own("importance_sampling"), {})
    ours = await gradient(emulator, trainer, "own")

    assert result.metrics["loss:sum"] == pytest.approx(builtin.metrics["loss:sum"], rel=1e-5)
    assert result.logprobs == [pytest.approx(each, abs=1e-5) for each in builtin.logprobs]
    assert result.loss_metrics == {"datums": 2.0, "scale": 1.0}
    assert any(values.abs().max() > 0.1 for values in theirs.values())
    for name, values in theirs.items():
        torch.testing.assert_close(ours[name], values, rtol=1e-3, atol=1e-4)


async def test_only_what_the_policy_sampled_is_trained_whatever_the_loss_says(
    emulator: RunningEmulator, trainer: ServerlessTrainer
):
    await trainer.forward_backward(DATUMS, own("every_token"), {})
    all_tokens = await gradient(emulator, trainer, "all")
    plain = [replace(datum, advantages=datum.mask) for datum in DATUMS]
    await trainer.forward_backward(plain, "reinforce", {})
    masked = await gradient(emulator, trainer, "masked")
    for name, values in masked.items():
        torch.testing.assert_close(all_tokens[name], values, rtol=1e-3, atol=1e-4)


async def test_a_datum_that_the_loss_leaves_out_has_no_gradient(
    emulator: RunningEmulator, trainer: ServerlessTrainer
):
    await trainer.forward_backward(DATUMS, own("first_only"), {})
    both = await gradient(emulator, trainer, "both")
    await trainer.forward_backward(DATUMS[:1], own("first_only"), {})
    alone = await gradient(emulator, trainer, "alone")
    for name, values in alone.items():
        torch.testing.assert_close(both[name], values, rtol=1e-3, atol=1e-4)


async def test_python_losses_that_are_pending_together_are_added_in_the_order_of_their_calls(
    emulator: RunningEmulator, trainer: ServerlessTrainer
):
    """Sums of floats depend on their order: bit for bit, or a replay would differ."""
    orders = []
    for attempt in range(2):
        pending = [
            trainer.forward_backward([datum], own("importance_sampling", scale=scale), {})
            for datum, scale in zip(DATUMS * 3, (1.0, 3.3, 0.1, 7.7, 0.5, 2.2), strict=True)
        ]
        for each in reversed(pending):
            await each
        orders.append(await gradient(emulator, trainer, f"order-{attempt}"))
    first, second = orders
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("raising", "loss support.losses:raising: KeyError: 'margin'"),
        ("exiting", "loss support.losses:exiting: SystemExit: no more of this"),
        ("overwriting", "loss support.losses:overwriting: RuntimeError: one of the variables"),
        ("without_metrics", r"returned Tensor, not \(loss, metrics\)"),
        ("detached", "the loss doesn't depend on the logprobs"),
        ("nan_loss", "the loss is nan"),
        ("nan_gradient", "the gradient of datum 0 isn't finite"),
        ("per_token", "the loss isn't a tensor of one number"),
    ],
)
async def test_a_python_loss_that_fails_is_refused_and_the_session_goes_on(
    trainer: ServerlessTrainer, name: str, text: str
):
    with pytest.raises(TrainerRejectedError, match=text):
        await trainer.forward_backward(DATUMS, own(name), {})
    await trainer.forward_backward(DATUMS, own("importance_sampling"), {})


@pytest.fixture
def block(monkeypatch: pytest.MonkeyPatch) -> Iterator[losses.Block]:
    """How far the loss `blocking` has come; it goes on when the test is over."""
    fresh = losses.Block()
    monkeypatch.setattr(losses, "block", fresh)
    yield fresh
    fresh.free.set()


async def test_sessions_answer_while_a_python_loss_takes_its_time(
    emulator: RunningEmulator, trainer: ServerlessTrainer, block: losses.Block
):
    """Also those of other runs, which share the SDK's event loop with it."""
    work = asyncio.ensure_future(trainer.forward_backward(DATUMS, own("blocking"), {}))
    await until(block.begun.is_set)
    await asyncio.wait_for(trainer.probe(), PATIENCE)
    other = await asyncio.wait_for(ServerlessTrainer.open(a_config(emulator.base_url)), PATIENCE)
    await asyncio.wait_for(other.forward_backward(DATUMS, own("first_only"), {}), PATIENCE)
    await other.close()
    assert not work.done()
    block.free.set()
    assert (await work).loss_metrics["datums"] == 2


async def test_a_python_loss_that_never_returns_is_refused_and_the_session_goes_on(
    trainer: ServerlessTrainer, block: losses.Block, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(limits, "LIMIT", 0.2)
    text = r"loss support.losses:blocking: it hasn't returned within 0\.2 s"
    with pytest.raises(TrainerRejectedError, match=text):
        await trainer.forward_backward(DATUMS, own("blocking"), {})
    monkeypatch.setattr(limits, "LIMIT", PATIENCE)
    await trainer.forward_backward(DATUMS, own("importance_sampling"), {})


async def test_a_python_loss_sends_what_the_sdk_would_send_bit_for_bit(
    emulator: RunningEmulator, trainer: ServerlessTrainer
):
    await trainer.forward_backward(DATUMS, "importance_sampling", {})
    await trainer.optim_step(ADAM)
    begin = await trainer.save_checkpoint("begin")
    await trainer.forward_backward(DATUMS, own("importance_sampling"), {})
    ours = await gradient(emulator, trainer, "ours")

    service = emulator.connect()
    client = service.create_training_client(base_model=TINY, lora_rank=4, lora_alpha=32)
    client.load_state_with_optimizer(begin).result()
    data = [
        types.Datum(
            model_input=types.ModelInput.from_ints(datum.inputs.tolist()),
            loss_fn_inputs={"target_tokens": types.TensorData.from_numpy(datum.targets)},
        )
        for datum in DATUMS
    ]
    client.forward_backward_custom(
        data, lambda _, logprobs: losses.importance_sampling(DATUMS, logprobs)
    ).result()
    client.optim_step(types.AdamParams(**PLAIN.model_dump(exclude={"normalization"}))).result()
    end = client.save_state("end").result().path
    service.delete_training_session()
    service.close()

    old, new = emulator.saved_weights(begin), emulator.saved_weights(end)
    assert any(values.any() for values in ours.values())
    assert all(torch.equal(ours[name], old[name] - new[name]) for name in old)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"loss": "reinforce", "loss_config": {"score_centering": True}},
            r"loss_config\.score_centering needs supports_score_centering\. Change",
        ),
        (
            {"router_replay": True},
            r"router_replay \(a model with experts\) needs supports_router_replay",
        ),
    ],
)
async def test_what_a_trainer_cannot_do_is_said_before_anything_is_trained(
    emulator: RunningEmulator, changes: dict[str, Any], text: str
):
    before = set(emulator.admin("GET", "state")["sessions"])
    with pytest.raises(TrainerUnfitError, match=text):
        await ServerlessTrainer.open(a_config(emulator.base_url, **changes))
    assert set(emulator.admin("GET", "state")["sessions"]) <= before


async def test_what_a_trainer_can_do_is_used(emulator: RunningEmulator, tmp_path: Path):
    settings = {"weighting": "tis", "report_policy_diagnostics": True}
    config = a_config(emulator.base_url, loss="ppo", loss_config=settings)
    session = await ServerlessTrainer.open(config)
    result = await session.forward_backward(DATUMS, "ppo", config.sent_loss_config)
    assert "policy_kl:mean" in result.metrics
    await session.close()


def test_routing_lies_at_the_position_that_predicted_its_token_and_is_sent_on_demand():
    sample = RolloutSample.of_turn(
        [2, 3], [4, 5], [-1.0, -1.0], 1.0, routing=["of four", "of five"]
    )
    datum = build_datum(sample, 1.0)
    # Inputs 2, 3, 4 predict 3, 4, 5.
    assert to_sdk(datum, routing=True).model_input.routing_matrices == ["", "of four", "of five"]
    assert to_sdk(datum).model_input.routing_matrices is None
    plain = build_datum(RolloutSample.of_turn([2, 3], [4, 5], [-1.0, -1.0], 1.0), 1.0)
    assert to_sdk(plain, routing=True).model_input.routing_matrices is None
