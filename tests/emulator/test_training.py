"""Conformance of training, through the unmodified SDK."""

import json
from typing import Any

import httpx
import pytest
import torch
from fireworks.training.sdk import FiretitanServiceClient, RequestFailedError, types

from everburn.emulator.models.base_model import TINY
from everburn.emulator.models.bases import Base
from everburn.emulator.training.losses import LOSSES
from support.emulator import (
    POSITIONS,
    RunningEmulator,
    gradient_through_sdk,
    logprobs_of,
    rollout,
    supervised,
    wait_for,
)

from . import reference

ADAM = types.AdamParams(learning_rate=1e-2)
SEQUENCES = [[9, 4, 33, 60, 2, 17], [5, 6, 7, 8], [40, 41, 42, 43, 44, 45, 46, 47, 48]]


def warm_up(trainer: Any) -> None:
    """Two steps, after which neither half of the adapter is zero."""
    for _ in range(2):
        trainer.forward_backward(
            [supervised(tokens) for tokens in SEQUENCES], "cross_entropy"
        ).result()
        trainer.optim_step(ADAM, grad_accumulation_normalization="num_loss_tokens").result()


def train_step(trainer: Any, *sequences: list[int]) -> dict[str, float]:
    trainer.forward_backward([supervised(list(s)) for s in sequences], "cross_entropy").result()
    metrics = (
        trainer.optim_step(ADAM, grad_accumulation_normalization="num_loss_tokens").result().metrics
    )
    return dict(metrics)


def digests(emulator: RunningEmulator, path: str) -> tuple[str, str]:
    meta = json.loads((emulator.checkpoint(path) / "meta.json").read_text())
    return meta["weights_sha256"], meta["optimizer_sha256"]


def largest_difference(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    assert left.keys() == right.keys()
    return max(float((left[name] - right[name]).abs().max()) for name in left)


@pytest.mark.parametrize("loss", LOSSES)
def test_the_gradient_equals_plain_torch(
    emulator: RunningEmulator, trainer: Any, tiny: Base, loss: str
) -> None:
    warm_up(trainer)
    adapter = emulator.saved_weights(trainer.save_state("warm").result().path)
    generator = torch.Generator().manual_seed(1)
    data, datums = [], []
    for tokens in SEQUENCES:
        current = reference.policy_logprobs(tiny.model, adapter, 8.0, tokens).detach()
        # Far enough from the current policy to exceed both clipping thresholds.
        recorded = (current + torch.randn(len(current), generator=generator)).tolist()
        advantages = (0.05 * torch.randn(len(current), generator=generator)).tolist()
        if loss == "gspo":
            # One advantage and a ratio within its narrow bounds: the sequence form is exact.
            recorded, advantages = current.tolist(), [advantages[0]] * len(current)
        advantages[0] = 0.0
        data.append((tokens, recorded, advantages))
        datums.append(
            supervised(tokens, advantages)
            if loss == "cross_entropy"
            else rollout(tokens, recorded, advantages)
        )
    trainer.forward_backward(datums, loss).result()
    ours = gradient_through_sdk(emulator, trainer, loss.replace("_", "-"))
    theirs = reference.gradient(tiny.model, adapter, 8.0, loss, data)
    assert max(float(gradient.abs().max()) for gradient in theirs.values()) > 1e-2
    assert largest_difference(ours, theirs) < 1e-5


def test_one_call_equals_several(emulator: RunningEmulator, trainer: Any) -> None:
    warm_up(trainer)
    datums = [supervised([1 + i % 60, 2 + i % 50, 3], [1e-4, 1e-4]) for i in range(1100)]

    trainer.forward_backward(datums, "cross_entropy").result()  # the SDK sends two requests
    at_once = gradient_through_sdk(emulator, trainer, "at-once")
    trainer.load_state_with_optimizer("at-once-before").result()

    for start in range(0, 1100, 300):
        trainer.forward_backward(datums[start : start + 300], "cross_entropy").result()
    in_parts = gradient_through_sdk(emulator, trainer, "in-parts")

    assert max(float(gradient.abs().max()) for gradient in at_once.values()) > 1e-2
    assert largest_difference(at_once, in_parts) < 1e-6


def test_parts_of_one_call_give_one_result_in_order(trainer: Any) -> None:
    datums = [supervised([1 + i % 60, 2, 3]) for i in range(1100)]
    whole = trainer.forward(datums, "cross_entropy").result()
    assert len(whole.loss_fn_outputs) == 1100
    assert whole.metrics["total_tokens:sum"] == 2200
    for index in (0, 1023, 1024, 1099):
        alone = trainer.forward([datums[index]], "cross_entropy").result()
        assert logprobs_of(whole, index) == pytest.approx(logprobs_of(alone), abs=1e-5)


def test_training_lowers_the_loss(trainer: Any) -> None:
    def loss() -> float:
        output = trainer.forward([supervised(SEQUENCES[2])], "cross_entropy").result()
        return float(output.metrics["loss:sum"])

    before = loss()
    for _ in range(10):
        train_step(trainer, SEQUENCES[2])
    assert loss() < 0.8 * before


def test_a_custom_loss_is_trained_by_its_gradient(
    emulator: RunningEmulator, trainer: Any, tiny: Base
) -> None:
    warm_up(trainer)
    adapter = emulator.saved_weights(trainer.save_state("warm").result().path)
    datum = types.Datum(
        model_input=types.ModelInput.from_ints(SEQUENCES[0][:-1]),
        loss_fn_inputs={"target_tokens": SEQUENCES[0][1:]},
    )

    def squared(data: Any, logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        return 0.01 * logprobs[0].square().sum(), {"custom": 1.0}

    output = trainer.forward_backward_custom([datum], squared).result()
    ours = gradient_through_sdk(emulator, trainer, "custom")
    leaves = {name: weights.clone().requires_grad_() for name, weights in adapter.items()}
    logprobs = reference.policy_logprobs(tiny.model, leaves, 8.0, SEQUENCES[0])
    squared(None, [logprobs])[0].backward()
    theirs = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    assert output.metrics["custom"] == 1.0
    assert largest_difference(ours, theirs) < 1e-5


def test_a_repeated_seq_id_changes_nothing(emulator: RunningEmulator, trainer: Any) -> None:
    tensor = {"dtype": "int64", "data": [2, 3], "shape": [2]}
    datum = {
        "model_input": {"chunks": [{"tokens": [1, 2], "type": "encoded_text"}]},
        "loss_fn_inputs": {"target_tokens": tensor},
    }
    backward = {
        "forward_backward_input": {"data": [datum], "loss_fn": "cross_entropy"},
        "model_id": trainer.model_id,
        "seq_id": 1,
    }
    step = {"adam_params": {"learning_rate": 0.1}, "model_id": trainer.model_id, "seq_id": 2}

    def submit(path: str, body: dict[str, Any]) -> str:
        response = emulator.post(f"/api/v1/{path}", body)
        assert response.status_code == 200
        return str(response.json()["request_id"])

    def result(request_id: str) -> dict[str, Any]:
        reply = emulator.post("/api/v1/retrieve_future", {"request_id": request_id})
        return dict(reply.json())

    backwards = {submit("forward_backward", backward) for _ in range(3)}
    steps = {submit("optim_step", step) for _ in range(3)}
    assert len(backwards) == len(steps) == 1
    metrics = result(steps.pop())["metrics"]
    assert metrics["num_sequences"] == metrics["step"] == 1
    request_id = backwards.pop()
    assert result(request_id) == result(request_id)
    applied = {"forward_backward": 1, "optim_step": 1}
    assert emulator.model_state(trainer.model_id)["applied"] == applied

    assert submit("forward_backward", backward) == request_id  # also after later operations
    assert emulator.model_state(trainer.model_id)["applied"] == applied
    other = {**step, "adam_params": {"learning_rate": 0.2}}
    collision = emulator.post("/api/v1/optim_step", other)
    assert collision.status_code == 400
    assert "different optim_step request" in collision.text


def test_operations_wait_for_their_predecessors(emulator: RunningEmulator, trainer: Any) -> None:
    def saved(seq_id: int) -> dict[str, Any]:
        return {"model_id": trainer.model_id, "path": f"step-{seq_id}", "seq_id": seq_id}

    late = emulator.post("/api/v1/save_weights", saved(2)).json()["request_id"]
    assert emulator.model_state(trainer.model_id)["applied"] == {}
    emulator.post("/api/v1/save_weights", saved(1))
    reply = emulator.post("/api/v1/retrieve_future", {"request_id": late}).json()
    assert reply["path"].endswith("/step-2")
    assert [path.rpartition("/")[2] for path in trainer.list_checkpoints()][-2:] == [
        "step-1",
        "step-2",
    ]


@pytest.mark.parametrize("rank", [4, 0])
def test_save_continue_load_continue_is_bit_identical(
    emulator: RunningEmulator, service: FiretitanServiceClient, rank: int
) -> None:
    trainer = service.create_training_client(base_model=TINY, lora_rank=rank)
    warm_up(trainer)
    saved = trainer.save_state("saved").result().path
    train_step(trainer, SEQUENCES[0])
    train_step(trainer, SEQUENCES[1], SEQUENCES[2])
    first = trainer.save_state("first").result().path

    trainer.load_state_with_optimizer(saved).result()
    train_step(trainer, SEQUENCES[0])
    train_step(trainer, SEQUENCES[1], SEQUENCES[2])
    second = trainer.save_state("second").result().path

    assert digests(emulator, first) == digests(emulator, second)
    assert digests(emulator, first) != digests(emulator, saved)


def test_a_checkpoint_continues_in_another_session(emulator: RunningEmulator, trainer: Any) -> None:
    warm_up(trainer)
    saved = trainer.save_state("saved").result().path
    train_step(trainer, SEQUENCES[0])
    expected = digests(emulator, trainer.save_state("next").result().path)

    other = emulator.connect()
    # The SDK always creates models from a checkpoint with alpha 32.
    resumed = other.create_training_client_from_state_with_optimizer(saved)
    train_step(resumed, SEQUENCES[0])
    assert digests(emulator, resumed.save_state("next").result().path) == expected
    other.delete_training_session()
    other.close()


def test_loading_clears_accumulated_gradients(trainer: Any) -> None:
    saved = trainer.save_state("saved").result().path
    trainer.forward_backward([supervised(SEQUENCES[0])], "cross_entropy").result()
    trainer.load_state_with_optimizer(saved).result()
    assert train_step(trainer, SEQUENCES[1])["num_sequences"] == 1


def test_loading_weights_alone_resets_adam(trainer: Any) -> None:
    warm_up(trainer)
    trainer.save_state("saved").result()
    trainer.load_state("saved").result()
    assert train_step(trainer, SEQUENCES[0])["step"] == 1


def test_the_same_seed_gives_the_same_adapter(emulator: RunningEmulator) -> None:
    def new_adapter(seed: int) -> tuple[str, str]:
        service = emulator.connect()
        trainer = service.create_lora_training_client(base_model=TINY, rank=4, seed=seed)
        saved = digests(emulator, trainer.save_state("state-0").result().path)
        service.close()
        return saved

    assert new_adapter(3) == new_adapter(3)
    assert new_adapter(3) != new_adapter(4)


def test_capabilities_are_advertised(trainer: Any) -> None:
    assert trainer.supports_reinforce
    assert trainer.supports_policy_importance_sampling
    assert trainer.supports_policy_diagnostics
    assert trainer.supports_router_replay is False
    assert not trainer.supports_score_centering
    assert not trainer.supports_target_logprob_support


def test_advertised_settings_work(trainer: Any) -> None:
    datum = rollout([1, 2, 3], [-4.0, -4.0], [1.0, -1.0])
    settings = {
        "weighting": "tis",
        "anchor_logprob_source": "current_detached",
        "report_policy_diagnostics": True,
    }
    metrics = trainer.forward_backward([datum], "ppo", settings).result().metrics
    assert metrics["policy_ratio:mean"] > 0
    trainer.forward_backward([datum], "reinforce", {"weighting": "mis"}).result()


def test_a_frozen_reference_gives_the_base_models_logprobs(
    service: FiretitanServiceClient, trainer: Any, tiny: Base
) -> None:
    warm_up(trainer)
    frozen = service.create_base_training_client(TINY)
    output = frozen.forward([supervised(SEQUENCES[0])], "cross_entropy").result()
    expected = reference.policy_logprobs(tiny.model, {}, 0.0, SEQUENCES[0])
    assert logprobs_of(output) == pytest.approx(expected.tolist(), abs=1e-5)
    assert frozen.run_id is None
    with pytest.raises(RequestFailedError, match="frozen base model"):
        frozen.forward_backward([supervised(SEQUENCES[0])], "cross_entropy").result()


def test_information_about_models_and_checkpoints(
    service: FiretitanServiceClient, trainer: Any
) -> None:
    info = trainer.get_info()
    assert (info.model_data.model_name, info.is_lora, info.lora_rank) == (TINY, True, 4)
    path = trainer.save_state("described").result().path
    described = service.create_rest_client().get_weights_info_by_tinker_path(path).result()
    assert (described.base_model, described.is_lora, described.lora_rank) == (TINY, True, 4)
    assert path in trainer.list_checkpoints()
    assert trainer.run_name == f"accounts/everburn/trainingRuns/{trainer.run_id}"


@pytest.mark.parametrize(
    ("attempt", "complaint"),
    [
        (lambda t: t.forward_backward([supervised([1, 2, 99])], "cross_entropy"), "token id 99"),
        (
            lambda t: t.forward_backward([supervised([1, 2], [1.0, 1.0])], "cross_entropy"),
            "weights has 2 values, but model_input has 1",
        ),
        (
            lambda t: t.forward_backward([supervised([1, 2])], "cross_entropy", {"epsilon": 0.1}),
            "no 'epsilon'",
        ),
        (
            lambda t: t.forward([supervised([1] * (POSITIONS + 2))], "cross_entropy"),
            f"{POSITIONS + 1} tokens.*{POSITIONS} positions",
        ),
        (
            lambda t: t.forward_backward([supervised([1, 2], [3e38])], "cross_entropy"),
            "not finite.*nothing was accumulated",
        ),
        (lambda t: t.optim_step(ADAM), "without a forward_backward"),
        (lambda t: t.optim_step(types.AdamParams(beta1=1.5)), "adam_params.beta1 must be below 1"),
        (lambda t: t.load_state("missing"), "there is no checkpoint"),
        (lambda t: t.load_state("cross_job://job/step"), "dedicated trainer"),
        (lambda t: t.load_state("other/run-" + "0" * 32 + "/step"), "belongs to account 'other'"),
        (lambda t: t.save_state("Not a label"), "not a checkpoint reference"),
        (lambda t: t.load_adapter("accounts/a/models/m"), "belongs to account 'a'"),
    ],
)
def test_bad_content_is_a_typed_result_and_changes_nothing(
    emulator: RunningEmulator, trainer: Any, attempt: Any, complaint: str
) -> None:
    before = emulator.admin("GET", f"digest/{trainer.model_id}")
    with pytest.raises(RequestFailedError, match=complaint) as caught:
        attempt(trainer).result()
    assert caught.value.category == "user"
    assert emulator.admin("GET", f"digest/{trainer.model_id}") == before
    assert train_step(trainer, SEQUENCES[0])["num_sequences"] == 1  # the client stays usable


def test_a_snapshot_is_not_a_checkpoint(trainer: Any) -> None:
    snapshot = trainer.save_weights_for_sampler("snapshot").result().path
    with pytest.raises(RequestFailedError, match="is a sampler snapshot"):
        trainer.load_state(snapshot).result()


def test_a_checkpoint_of_another_shape_is_refused(
    service: FiretitanServiceClient, trainer: Any
) -> None:
    path = trainer.save_state("rank-4").result().path
    wider = service.create_lora_training_client(base_model=TINY, rank=8)
    with pytest.raises(RequestFailedError, match="rank is 4 there and 8 here"):
        wider.load_state(path).result()


def test_names_are_used_once(trainer: Any) -> None:
    trainer.save_state("once").result()
    with pytest.raises(RequestFailedError, match="once exists"):
        trainer.save_state("once").result()
    trainer.save_weights_for_sampler("once").result()
    with pytest.raises(RequestFailedError, match="exists"):
        trainer.save_weights_for_sampler("once")


@pytest.mark.parametrize(
    ("creation", "complaint"),
    [
        ({"base_model": "accounts/acme/models/nope"}, "unknown base model.*accounts/everburn"),
        ({"base_model": TINY, "init_method": "nora"}, "'kaiming' only"),
        ({"base_model": TINY, "alpha": -1}, "alpha must be above 0"),
        (
            {"base_model": TINY, "train_mlp": False, "train_attn": False, "train_unembed": False},
            "at least one of",
        ),
        ({"base_model": TINY, "projection_head_dim": 4}, "projection_head_dim"),
    ],
)
def test_invalid_models_are_refused(
    service: FiretitanServiceClient, creation: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(RequestFailedError, match=complaint):
        service.create_lora_training_client(**creation)


def test_a_repeated_creation_makes_one_model(emulator: RunningEmulator) -> None:
    session = emulator.post("/api/v1/create_session", {}).json()["session_id"]
    body = {
        "session_id": session,
        "model_seq_id": 0,
        "base_model": TINY,
        "lora_config": {"rank": 2},
    }
    requests = {emulator.post("/api/v1/create_model", body).json()["request_id"] for _ in range(3)}
    assert len(requests) == 1
    emulator.post("/api/v1/retrieve_future", {"request_id": requests.pop()})
    assert len(emulator.admin("GET", "state")["sessions"][session]["models"]) == 1
    emulator.admin("POST", f"expire/{session}")


@pytest.mark.parametrize("literal", ["NaN", "null", "1e39"])
def test_numbers_that_are_not_finite_are_refused_with_the_name_of_the_field(
    emulator: RunningEmulator, trainer: Any, literal: str
) -> None:
    """The SDK refuses NaN itself; other clients may send these literals."""
    data = (
        '{"model_input": {"chunks": [{"tokens": [1]}]}, "loss_fn_inputs": '
        '{"target_tokens": {"data": [2]}, "weights": {"data": [' + literal + "]}}}"
    )
    body = (
        f'{{"model_id": "{trainer.model_id}", "seq_id": 1, "forward_backward_input": '
        f'{{"loss_fn": "cross_entropy", "data": [{data}]}}}}'
    )
    accepted = httpx.post(f"{emulator.base_url}/api/v1/forward_backward", content=body)
    reply = emulator.post("/api/v1/retrieve_future", {"request_id": accepted.json()["request_id"]})
    assert reply.json() == {
        "error": "data[0].weights[0] is not a finite float32 number",
        "category": "user",
        "error_class": "NonFinite",
    }


def test_large_requests_are_parsed_off_the_loop(
    trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("everburn.emulator.http.training_routes.LARGE_BODY_BYTES", 1000)
    datums = [supervised([1 + i % 60] * 100) for i in range(10)]
    output = trainer.forward(datums, "cross_entropy").result()
    assert len(output.loss_fn_outputs) == 10


def test_unloading_frees_a_model_and_its_snapshots(
    emulator: RunningEmulator, service: FiretitanServiceClient, trainer: Any
) -> None:
    trainer.save_weights_for_sampler("snapshot").result()
    trainer.unload_model().result()
    state = emulator.admin("GET", "state")["sessions"][service.training_session_id]
    assert state == {"models": {}, "snapshots": [], "job": None}
    reply = emulator.post("/api/v1/get_info", {"model_id": trainer.model_id})
    assert reply.status_code == 404
    assert "was unloaded" in reply.text


def test_polling_returns_try_again_until_there_is_a_result(
    emulator: RunningEmulator, trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("everburn.emulator.http.training_routes.LONG_POLL_SECONDS", 0.01)
    waiting = emulator.post(
        "/api/v1/optim_step", {"adam_params": {}, "model_id": trainer.model_id, "seq_id": 2}
    ).json()
    reply = emulator.post("/api/v1/retrieve_future", {"request_id": waiting["request_id"]}).json()
    assert reply["type"] == "try_again"
    emulator.post("/api/v1/load_adapter", {"model_id": trainer.model_id, "seq_id": 1})
    wait_for(lambda: emulator.model_state(trainer.model_id)["failed"].get("optim_step") == 1)
    reply = emulator.post("/api/v1/retrieve_future", {"request_id": waiting["request_id"]}).json()
    assert reply["error_class"] == "InvalidInput"
