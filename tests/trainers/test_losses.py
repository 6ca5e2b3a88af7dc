"""Built-in and Python losses, and missing capabilities, through the unmodified SDK against the
emulator."""

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
"""With these an optimizer step subtracts exactly the gradient."""


def a_datum(first: int = 2, advantage: float = 1.0) -> Datum:
    sample = RolloutSample(
        tokens=[first, 3, 4, 5, 6],
        logprobs=[0.0, 0.0, -4.0, -4.2, -3.9],
        loss_mask=[0, 0, 1, 0, 1],
        reward=1.0,
    )
    return build_datum(sample, advantage)


DATUMS = [a_datum(), a_datum(first=7, advantage=-0.5)]


def python_loss(name: str, **kwargs: Any) -> Entrypoint:
    return Entrypoint(name=f"support.losses:{name}", kwargs=kwargs)


@pytest.fixture
async def trainer(emulator: RunningEmulator) -> AsyncIterator[ServerlessTrainer]:
    session = await ServerlessTrainer.open(a_config(emulator.base_url))
    yield session
    await session.close()


async def gradient(
    emulator: RunningEmulator, trainer: ServerlessTrainer, name: str
) -> dict[str, torch.Tensor]:
    """The accumulated gradient: what an optimizer step subtracts. The weights are restored."""
    before = await trainer.save_checkpoint(f"{name}-before")
    await trainer.optim_step(PLAIN)
    after = await trainer.save_checkpoint(f"{name}-after")
    await trainer.load_checkpoint(before)
    old, new = emulator.saved_weights(before), emulator.saved_weights(after)
    return {key: old[key] - new[key] for key in old}


@pytest.mark.parametrize("name", LOSSES)
async def test_each_loss_follows_its_formula(trainer: ServerlessTrainer, name: str):
    """The reported sum equals the formula at the reported logprobs."""
    result = await trainer.forward_backward(DATUMS, name, {})
    loss = Loss.parse(*wire_loss_of(name, {}))
    expected = [
        loss(
            torch.tensor([logprobs]),
            torch.from_numpy(datum.logprobs)[None],
            torch.from_numpy(datum.advantages)[None],
        ).sum()
        for datum, logprobs in zip(DATUMS, result.logprobs, strict=True)
    ]
    assert result.metrics["loss:sum"] == pytest.approx(float(sum(expected)), rel=1e-4, abs=1e-5)


async def test_asymmetric_clipping_reaches_the_trainer(trainer: ServerlessTrainer):
    """A ratio of 1.25 is clipped by 1.2 and not by 1.3."""
    (logprobs,) = (await trainer.forward_backward([a_datum()], "grpo", {})).logprobs
    closer = np.asarray(logprobs, dtype=np.float32) - np.float32(np.log(1.25))
    datum = replace(a_datum(), logprobs=closer * a_datum().mask)
    sums = [
        (await trainer.forward_backward([datum], "grpo", {"clip_high_threshold": high})).metrics
        for high in (1.2, 1.3)
    ]
    assert [metrics["loss:sum"] for metrics in sums] == pytest.approx([-2.4, -2.5], rel=1e-4)


async def test_a_python_loss_has_the_gradient_of_the_built_in_loss_with_the_same_formula(
    emulator: RunningEmulator, trainer: ServerlessTrainer
):
    builtin = await trainer.forward_backward(DATUMS, "importance_sampling", {})
    builtin_gradient = await gradient(emulator, trainer, "builtin")
    result = await trainer.forward_backward(DATUMS, python_loss("importance_sampling"), {})
    python_gradient = await gradient(emulator, trainer, "python")

    assert result.metrics["loss:sum"] == pytest.approx(builtin.metrics["loss:sum"], rel=1e-5)
    assert result.logprobs == [pytest.approx(values, abs=1e-5) for values in builtin.logprobs]
    assert result.loss_metrics == {"datums": 2.0, "scale": 1.0}
    assert any(values.abs().max() > 0.1 for values in builtin_gradient.values())
    for name, values in builtin_gradient.items():
        torch.testing.assert_close(python_gradient[name], values, rtol=1e-3, atol=1e-4)


async def test_a_python_loss_trains_only_sampled_tokens(
    emulator: RunningEmulator, trainer: ServerlessTrainer
):
    await trainer.forward_backward(DATUMS, python_loss("every_token"), {})
    all_tokens = await gradient(emulator, trainer, "all")
    plain = [replace(datum, advantages=datum.mask) for datum in DATUMS]
    await trainer.forward_backward(plain, "reinforce", {})
    masked = await gradient(emulator, trainer, "masked")
    for name, values in masked.items():
        torch.testing.assert_close(all_tokens[name], values, rtol=1e-3, atol=1e-4)


async def test_a_datum_that_the_loss_ignores_has_no_gradient(
    emulator: RunningEmulator, trainer: ServerlessTrainer
):
    await trainer.forward_backward(DATUMS, python_loss("first_only"), {})
    both = await gradient(emulator, trainer, "both")
    await trainer.forward_backward(DATUMS[:1], python_loss("first_only"), {})
    alone = await gradient(emulator, trainer, "alone")
    for name, values in alone.items():
        torch.testing.assert_close(both[name], values, rtol=1e-3, atol=1e-4)


async def test_concurrent_python_losses_are_summed_in_the_order_of_their_calls(
    emulator: RunningEmulator, trainer: ServerlessTrainer
):
    """Float sums depend on their order, and a replay must reproduce them bit for bit."""
    orders = []
    for attempt in range(2):
        pending = [
            trainer.forward_backward([datum], python_loss("importance_sampling", scale=scale), {})
            for datum, scale in zip(DATUMS * 3, (1.0, 3.3, 0.1, 7.7, 0.5, 2.2), strict=True)
        ]
        for result in reversed(pending):
            await result
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
async def test_a_failing_python_loss_is_refused_and_the_session_continues(
    trainer: ServerlessTrainer, name: str, text: str
):
    with pytest.raises(TrainerRejectedError, match=text):
        await trainer.forward_backward(DATUMS, python_loss(name), {})
    await trainer.forward_backward(DATUMS, python_loss("importance_sampling"), {})


@pytest.fixture
def block(monkeypatch: pytest.MonkeyPatch) -> Iterator[losses.Block]:
    """The state of the loss `blocking`, which is released after the test."""
    fresh = losses.Block()
    monkeypatch.setattr(losses, "block", fresh)
    yield fresh
    fresh.free.set()


async def test_sessions_answer_while_a_python_loss_runs(
    emulator: RunningEmulator, trainer: ServerlessTrainer, block: losses.Block
):
    """Including sessions of other runs, which share the SDK's event loop."""
    work = asyncio.ensure_future(trainer.forward_backward(DATUMS, python_loss("blocking"), {}))
    await until(block.begun.is_set)
    await asyncio.wait_for(trainer.probe(), PATIENCE)
    other = await asyncio.wait_for(ServerlessTrainer.open(a_config(emulator.base_url)), PATIENCE)
    await asyncio.wait_for(other.forward_backward(DATUMS, python_loss("first_only"), {}), PATIENCE)
    await other.close()
    assert not work.done()
    block.free.set()
    assert (await work).loss_metrics["datums"] == 2


async def test_a_python_loss_that_never_returns_is_refused_and_the_session_continues(
    trainer: ServerlessTrainer, block: losses.Block, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(limits, "LIMIT", 0.2)
    text = r"loss support.losses:blocking: it hasn't returned within 0\.2 s"
    with pytest.raises(TrainerRejectedError, match=text):
        await trainer.forward_backward(DATUMS, python_loss("blocking"), {})
    monkeypatch.setattr(limits, "LIMIT", PATIENCE)
    await trainer.forward_backward(DATUMS, python_loss("importance_sampling"), {})


async def test_a_python_loss_equals_the_sdks_custom_loss_bit_for_bit(
    emulator: RunningEmulator, trainer: ServerlessTrainer
):
    await trainer.forward_backward(DATUMS, "importance_sampling", {})
    await trainer.optim_step(ADAM)
    start = await trainer.save_checkpoint("start")
    await trainer.forward_backward(DATUMS, python_loss("importance_sampling"), {})
    everburn = await gradient(emulator, trainer, "everburn")

    service = emulator.connect()
    client = service.create_training_client(base_model=TINY, lora_rank=4, lora_alpha=32)
    client.load_state_with_optimizer(start).result()
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

    old, new = emulator.saved_weights(start), emulator.saved_weights(end)
    assert any(values.any() for values in everburn.values())
    assert all(torch.equal(everburn[name], old[name] - new[name]) for name in old)


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
async def test_a_missing_capability_is_reported_before_training(
    emulator: RunningEmulator, changes: dict[str, Any], text: str
):
    before = set(emulator.admin("GET", "state")["sessions"])
    with pytest.raises(TrainerUnfitError, match=text):
        await ServerlessTrainer.open(a_config(emulator.base_url, **changes))
    assert set(emulator.admin("GET", "state")["sessions"]) <= before


async def test_a_supported_capability_is_used(emulator: RunningEmulator, tmp_path: Path):
    settings = {"weighting": "tis", "report_policy_diagnostics": True}
    config = a_config(emulator.base_url, loss="ppo", loss_config=settings)
    session = await ServerlessTrainer.open(config)
    result = await session.forward_backward(DATUMS, "ppo", config.sent_loss_config)
    assert "policy_kl:mean" in result.metrics
    await session.close()


def test_routing_belongs_to_the_predicting_position_and_is_sent_on_demand():
    sample = RolloutSample.of_turn(
        [2, 3], [4, 5], [-1.0, -1.0], 1.0, routing=["of four", "of five"]
    )
    datum = build_datum(sample, 1.0)
    # Inputs 2, 3, 4 predict 3, 4, 5.
    assert to_sdk(datum, routing=True).model_input.routing_matrices == ["", "of four", "of five"]
    assert to_sdk(datum).model_input.routing_matrices is None
    plain = build_datum(RolloutSample.of_turn([2, 3], [4, 5], [-1.0, -1.0], 1.0), 1.0)
    assert to_sdk(plain, routing=True).model_input.routing_matrices is None
