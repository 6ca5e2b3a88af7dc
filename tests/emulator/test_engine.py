"""The engine as an object, without a server."""

import dataclasses
from collections.abc import Generator
from typing import Any, TypeVar

import pytest
import torch

from everburn.emulator.errors import InvalidInput, NonFinite, UnsupportedOperation
from everburn.emulator.models.base_model import TINY
from everburn.emulator.models.bases import Base
from everburn.emulator.training.checkpoints import digest
from everburn.emulator.training.datums import Submission, parse_submission
from everburn.emulator.training.engine import Engine
from everburn.emulator.training.spec import AdamSettings, ModelSpec

T = TypeVar("T")

LORA = ModelSpec(base_model=TINY, rank=4, alpha=8, seed=1)
FULL = ModelSpec(base_model=TINY, rank=0)
FROZEN = ModelSpec(base_model=TINY, rank=0, frozen=True)


def finish(work: Generator[None, None, T]) -> T:
    while True:
        try:
            next(work)
        except StopIteration as stop:
            return stop.value


def submission(*sequences: list[int], weight: float = 1.0) -> Submission:
    """Next-token prediction on whole sequences."""
    data = [
        {
            "model_input": {"chunks": [{"tokens": tokens[:-1]}]},
            "loss_fn_inputs": {
                "target_tokens": {"data": tokens[1:]},
                "weights": {"data": [weight] * (len(tokens) - 1)},
            },
        }
        for tokens in sequences
    ]
    return parse_submission(
        {"data": data, "loss_fn": "cross_entropy"}, vocabulary=64, positions=128
    )


def random_submission(datums: int, length: int, seed: int = 0) -> Submission:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 64, (datums, length), generator=generator)
    return submission(*tokens.tolist())


def trained(base: Base, spec: ModelSpec = LORA, steps: int = 2) -> Engine:
    """An engine whose adapter is no longer zero."""
    engine = Engine(base, spec)
    for step in range(steps):
        finish(engine.forward_backward(random_submission(4, 12, seed=step)))
        engine.optim_step(AdamSettings(learning_rate=1e-2), "num_loss_tokens")
    return engine


def assert_same(left: Any, right: Any, tolerance: float = 0.0) -> None:
    for name in left:
        torch.testing.assert_close(left[name], right[name], rtol=0, atol=tolerance)


@pytest.mark.parametrize("spec", [LORA, FULL])
def test_one_call_equals_several(tiny: Base, spec: ModelSpec) -> None:
    engine = trained(tiny, spec)
    whole = random_submission(40, 60)  # several micro-batches
    finish(engine.forward_backward(whole))
    at_once = engine.gradient()
    engine.clear_gradients()
    for part in (whole.examples[:7], whole.examples[7:8], whole.examples[8:]):
        finish(engine.forward_backward(dataclasses.replace(whole, examples=part)))
    per_token = 1 / (40 * 59)
    assert max(float(gradient.abs().max()) for gradient in at_once.values()) * per_token > 1e-3
    assert_same(
        {name: gradient * per_token for name, gradient in at_once.items()},
        {name: gradient * per_token for name, gradient in engine.gradient().items()},
        tolerance=1e-7,
    )


def test_the_same_request_on_the_same_state_gives_the_same_bits(tiny: Base) -> None:
    first, second = trained(tiny), trained(tiny)
    assert_same(first.weights(), second.weights())
    finish(first.forward_backward(random_submission(30, 50)))
    finish(second.forward(random_submission(9, 20, seed=5)))  # another request in between
    finish(second.forward_backward(random_submission(30, 50)))
    assert_same(first.gradient(), second.gradient())


def test_the_seed_determines_the_adapter(tiny: Base) -> None:
    def adapter(seed: int | None) -> str:
        return digest(Engine(tiny, dataclasses.replace(LORA, seed=seed)).weights())

    assert adapter(1) == adapter(1)
    assert adapter(1) != adapter(2)
    assert adapter(None) != adapter(None)


def test_a_random_seed_is_recorded_in_the_spec(tiny: Base) -> None:
    engine = Engine(tiny, ModelSpec(base_model=TINY, rank=4))
    again = Engine(tiny, engine.spec)
    assert engine.spec.alpha == 8
    assert_same(engine.weights(), again.weights())


def test_a_new_adapter_does_not_change_the_logprobs(tiny: Base) -> None:
    request = random_submission(2, 10)
    adapted = finish(Engine(tiny, LORA).forward(request))
    reference = finish(Engine(tiny, FROZEN).forward(request))
    for ours, theirs in zip(adapted.logprobs, reference.logprobs, strict=True):
        assert ours.tolist() == pytest.approx(theirs.tolist(), abs=1e-6)


@pytest.mark.parametrize(
    ("trains", "layers"),
    [
        ({"train_mlp": False, "train_unembed": False}, {"q_proj", "k_proj", "v_proj", "o_proj"}),
        ({"train_attn": False, "train_unembed": False}, {"gate_proj", "up_proj", "down_proj"}),
        ({"train_attn": False, "train_mlp": False}, {"lm_head"}),
    ],
)
def test_the_adapter_covers_the_requested_layers(
    tiny: Base, trains: dict[str, bool], layers: set[str]
) -> None:
    engine = Engine(tiny, dataclasses.replace(LORA, **trains))
    assert {name.split(".lora_")[0].rpartition(".")[2] for name in engine.weights()} == layers


def test_adam_equals_torch_on_equal_gradients(tiny: Base) -> None:
    engine = Engine(tiny, FULL)
    ours = engine.weights()
    theirs = {name: torch.nn.Parameter(weights.clone()) for name, weights in ours.items()}
    optimizer = torch.optim.AdamW(theirs.values())
    schedule = [
        AdamSettings(learning_rate=3e-3, eps=1e-8),
        AdamSettings(learning_rate=1e-3, beta1=0.8, beta2=0.99, eps=1e-12, weight_decay=0.1),
        AdamSettings(learning_rate=2e-3, eps=1e-8, grad_clip_norm=0.01),
    ]
    for step, adam in enumerate(schedule):
        finish(engine.forward_backward(random_submission(4, 12, seed=step)))
        for name, gradient in engine.gradient().items():
            theirs[name].grad = gradient / (4 * 11)
        if adam.grad_clip_norm:
            torch.nn.utils.clip_grad_norm_(theirs.values(), adam.grad_clip_norm)
        optimizer.param_groups[0].update(
            lr=adam.learning_rate,
            betas=(adam.beta1, adam.beta2),
            eps=adam.eps,
            weight_decay=adam.weight_decay,
        )
        optimizer.step()
        engine.optim_step(adam, "num_loss_tokens")
    assert_same(engine.weights(), {name: p.detach() for name, p in theirs.items()}, 1e-6)


@pytest.mark.parametrize(
    ("normalization", "divisor"), [("none", 1), ("num_loss_tokens", 9), ("num_sequences", 2)]
)
def test_gradients_are_normalized_before_they_are_clipped(
    tiny: Base, normalization: Any, divisor: int
) -> None:
    engine = trained(tiny)
    finish(engine.forward_backward(submission([1, 2, 3, 4, 5])))
    finish(engine.forward_backward(submission([1, 2, 3, 4, 5, 6], [7, 8], weight=0.0)))
    finish(engine.forward_backward(submission([5, 4, 3, 2, 1, 0])))
    norm = sum(float(gradient.square().sum()) for gradient in engine.gradient().values()) ** 0.5
    metrics = engine.optim_step(AdamSettings(grad_clip_norm=1e-3), normalization)
    assert metrics["grad_norm"] == pytest.approx(norm / divisor, rel=1e-5)
    assert metrics["grad_norm_post_clip"] == 1e-3
    assert metrics["num_loss_tokens"] == 9
    assert metrics["num_sequences"] == 2


def test_a_step_consumes_the_gradients(tiny: Base) -> None:
    engine = trained(tiny)
    assert all(not gradient.any() for gradient in engine.gradient().values())
    with pytest.raises(InvalidInput, match="without a forward_backward"):
        engine.optim_step(AdamSettings(), "none")


def test_a_loss_that_overflows_accumulates_nothing(tiny: Base) -> None:
    engine = trained(tiny)
    finish(engine.forward_backward(random_submission(2, 10)))
    before = engine.gradient()
    good, bad = submission([1, 2, 3] * 40), submission([1, 2, 3], weight=3e38)
    mixed = dataclasses.replace(good, examples=[*good.examples * 9, *bad.examples])
    with pytest.raises(NonFinite, match="cross_entropy is not finite"):
        finish(engine.forward_backward(mixed))
    assert_same(before, engine.gradient())


def test_a_gradient_that_overflows_changes_neither_weights_nor_adam(tiny: Base) -> None:
    engine = trained(tiny)
    before = engine.state()
    # Each loss and each gradient is finite, but not their sum.
    while all(bool(gradient.isfinite().all()) for gradient in engine.gradient().values()):
        finish(engine.forward_backward(submission([1, 2], weight=1e36)))
    with pytest.raises(NonFinite, match="unchanged"):
        engine.optim_step(AdamSettings(), "none")
    after = engine.state()
    assert_same(before.weights, after.weights)
    assert_same(before.second_moment, after.second_moment)
    assert before.step == after.step


def test_weights_that_are_not_finite_are_not_exported(tiny: Base) -> None:
    engine = Engine(tiny, LORA)
    finish(engine.forward_backward(random_submission(2, 10)))
    # Half of a new adapter has no gradient yet: Adam divides zero by zero.
    engine.optim_step(AdamSettings(eps=0.0), "none")
    for export in (engine.state, engine.sampler_weights):
        with pytest.raises(NonFinite, match="not saved"):
            export()


@pytest.mark.parametrize("spec", [LORA, FULL])
def test_training_continues_exactly_from_a_loaded_state(tiny: Base, spec: ModelSpec) -> None:
    def continue_training(engine: Engine) -> str:
        finish(engine.forward_backward(random_submission(3, 20, seed=9)))
        engine.optim_step(AdamSettings(learning_rate=1e-2), "num_loss_tokens")
        return digest(engine.weights())

    engine = trained(tiny, spec)
    saved = engine.state()
    expected = continue_training(engine)
    finish(engine.forward_backward(random_submission(1, 5)))  # load must clear this gradient
    engine.load(saved, optimizer=True)
    assert continue_training(engine) == expected


def test_load_without_optimizer_resets_adam(tiny: Base) -> None:
    engine = trained(tiny)
    saved = engine.state()
    engine.load(saved, optimizer=False)
    assert_same(saved.weights, engine.weights())
    assert engine.optimizer_steps == 0
    assert all(not moment.any() for moment in engine.state().second_moment.values())


def test_a_frozen_model_only_computes_forward_passes(tiny: Base) -> None:
    engine = Engine(tiny, FROZEN)
    assert len(finish(engine.forward(random_submission(2, 10))).logprobs) == 2
    for attempt in (
        lambda: finish(engine.forward_backward(random_submission(1, 5))),
        lambda: engine.optim_step(AdamSettings(), "none"),
        engine.sampler_weights,
    ):
        with pytest.raises(UnsupportedOperation):
            attempt()


def test_training_does_not_change_the_shared_base_model(tiny: Base) -> None:
    before = digest(tiny.merged(None))
    trained(tiny, LORA)
    trained(tiny, FULL)
    assert digest(tiny.merged(None)) == before


@pytest.mark.parametrize(
    "settings", [{"learning_rate": float("nan")}, {"beta2": 1.0}, {"eps": -1.0}]
)
def test_adam_settings_out_of_range_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(InvalidInput, match=f"adam_params.{next(iter(settings))}"):
        AdamSettings(**settings)


def test_an_adapter_without_layers_is_refused(tiny: Base) -> None:
    nothing = dataclasses.replace(LORA, train_attn=False, train_mlp=False, train_unembed=False)
    with pytest.raises(InvalidInput, match="at least one"):
        Engine(tiny, nothing)
