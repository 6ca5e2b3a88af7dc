"""Conformance of sampling, through the unmodified SDK."""

import asyncio
from typing import Any

import httpx
import pytest
from fireworks.training.sdk import FiretitanServiceClient, types
from fireworks.training.sdk.client import FiretitanSamplingClient
from fireworks.training.sdk.concurrency import FixedConcurrencyController

from everburn.emulator.models.base_model import TINY
from everburn.emulator.models.bases import Base
from support.emulator import (
    PATIENCE,
    POSITIONS,
    RunningEmulator,
    logprobs_of,
    rollout,
    supervised,
    wait_for,
)

from . import reference
from .test_training import SEQUENCES, warm_up

PROMPT = [3, 1, 4, 1, 5]


def sampler(service: FiretitanServiceClient, path: str) -> FiretitanSamplingClient:
    return service.create_sampling_client(
        model_path=path, concurrency_controller=FixedConcurrencyController(64)
    )


def snapshot(trainer: Any, name: str) -> str:
    return str(trainer.save_weights_for_sampler(name).result().path)


def sample(client: FiretitanSamplingClient, prompt: list[int] = PROMPT, **params: Any) -> Any:
    settings = types.SamplingParams(**{"max_tokens": 12, **params})
    return client.sample(types.ModelInput.from_ints(prompt), 1, settings).result().sequences[0]


def complete(emulator: RunningEmulator, model: str, **body: Any) -> httpx.Response:
    """A raw completions request."""
    body = {"model": model, "prompt": PROMPT, "max_tokens": 4, **body}
    return emulator.post("/inference/v1/completions", body)


def model_of(service: FiretitanServiceClient, path: str) -> str:
    return f"{service.training_session_name}/checkpoints/{path}"


def test_sampling_logprobs_equal_forward_logprobs(
    service: FiretitanServiceClient, trainer: Any
) -> None:
    warm_up(trainer)
    client = sampler(service, snapshot(trainer, "policy"))
    for seed in range(5):
        sequence = sample(client, seed=seed, max_tokens=30)
        output = trainer.forward(
            [supervised([*PROMPT, *sequence.tokens])], "cross_entropy"
        ).result()
        forward = logprobs_of(output)[len(PROMPT) - 1 :]
        assert sequence.logprobs == pytest.approx(forward, abs=1e-4)


def test_snapshots_of_several_versions_are_served_at_once(
    service: FiretitanServiceClient, trainer: Any, tiny: Base
) -> None:
    versions = [snapshot(trainer, "version-0")]
    for _ in range(2):
        warm_up(trainer)
        versions.append(snapshot(trainer, f"version-{len(versions)}"))
    clients = [sampler(service, path) for path in versions]
    model_input = types.ModelInput.from_ints(SEQUENCES[0])
    with pytest.warns(UserWarning, match="use training_client.forward"):
        scores = [client.compute_logprobs(model_input) for client in clients]
    sums = [sum(logprobs.result()[1:]) for logprobs in scores]
    assert sums[0] < sums[1] < sums[2]  # training made the sequence more likely
    base = reference.policy_logprobs(tiny.model, {}, 0.0, SEQUENCES[0])
    assert sums[0] == pytest.approx(float(base.sum()), abs=1e-4)


def test_a_sampler_handle_works_without_the_service_and_its_key(
    service: FiretitanServiceClient, trainer: Any
) -> None:
    client = sampler(service, snapshot(trainer, "policy"))
    handle = client.get_sampler_handle()
    elsewhere = FiretitanSamplingClient.from_sampler_handle(handle, api_key="fw_other")
    assert sample(elsewhere, seed=11).tokens == sample(client, seed=11).tokens


def test_the_base_model_can_be_sampled(
    emulator: RunningEmulator, service: FiretitanServiceClient, trainer: Any, tiny: Base
) -> None:
    warm_up(trainer)
    in_session = service.create_sampling_client(base_model=TINY)
    other = emulator.connect()
    standalone = other.create_sampling_client(base_model=TINY)
    assert sample(in_session, temperature=0.0).tokens == sample(standalone, temperature=0.0).tokens
    with pytest.raises(RuntimeError, match="unknown base model"):
        other.create_sampling_client(base_model="accounts/acme/models/nope")
    other.close()


def test_a_live_snapshot_can_be_sampled_from_another_service(
    emulator: RunningEmulator, service: FiretitanServiceClient, trainer: Any
) -> None:
    path = snapshot(trainer, "policy")
    other = emulator.connect()
    by_run = other.create_sampling_client(model_path=path)
    by_session = other.create_sampling_client(model_path=model_of(service, path))
    expected = sample(sampler(service, path), seed=1).tokens
    assert sample(by_run, seed=1).tokens == sample(by_session, seed=1).tokens == expected
    other.close()


def test_many_requests_at_once_are_all_answered(
    service: FiretitanServiceClient, trainer: Any
) -> None:
    client = sampler(service, snapshot(trainer, "policy"))

    async def flood() -> list[Any]:
        return await asyncio.gather(
            *(
                client.sample_async(
                    types.ModelInput.from_ints([1 + i % 50] * (1 + i % 9)),
                    1,
                    types.SamplingParams(max_tokens=1 + i % 20, seed=i),
                )
                for i in range(200)
            )
        )

    for i, response in enumerate(asyncio.run(flood())):
        assert 1 <= len(response.sequences[0].tokens) <= 1 + i % 20


def test_temperature_changes_the_reported_distribution(
    service: FiretitanServiceClient, trainer: Any
) -> None:
    client = sampler(service, snapshot(trainer, "policy"))
    greedy = sample(client, temperature=0.0)
    assert greedy.logprobs == [0.0] * len(greedy.tokens)
    assert sample(client, temperature=0.0).tokens == greedy.tokens
    assert sample(client, top_k=1, seed=4).tokens == greedy.tokens


def test_stop_strings_end_a_completion(
    service: FiretitanServiceClient, trainer: Any, tiny: Base
) -> None:
    client = sampler(service, snapshot(trainer, "policy"))
    free = sample(client, seed=2)
    stop = tiny.tokenizer.decode(free.tokens[:2])
    stopped = sample(client, seed=2, stop=[stop])
    assert (stopped.tokens, stopped.stop_reason) == (free.tokens[:2], "stop")


def test_a_response_holds_both_logprobs_and_the_text(
    emulator: RunningEmulator, service: FiretitanServiceClient, trainer: Any, tiny: Base
) -> None:
    model = model_of(service, snapshot(trainer, "policy"))
    body = complete(emulator, model, seed=1, temperature=0.5, logprobs=True).json()
    choice = body["choices"][0]
    tokens = choice["raw_output"]["completion_token_ids"]
    assert [entry["token_id"] for entry in choice["logprobs"]["content"]] == tokens
    assert all(e["logprob"] != e["sampling_logprob"] for e in choice["logprobs"]["content"])
    assert choice["text"] == tiny.tokenizer.decode(tokens, skip_special_tokens=True)
    assert body["usage"] == {"prompt_tokens": 5, "completion_tokens": len(tokens)}


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        (
            {"prompt": [1] * (POSITIONS - 8), "max_tokens": 9},
            f"{POSITIONS - 8} tokens and max_tokens of 9 exceed",
        ),
        ({"prompt": [64]}, "token id 64, outside the vocabulary of 64"),
        ({"prompt": "text"}, "list of token ids"),
        ({"prompt": []}, "holds no token"),
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"n": 2}, "n must be 1"),
        ({"stop": [""]}, "stop"),
        ({"seed": "x"}, "seed must be an integer"),
        ({"top_logprobs": 5}, "Extra inputs are not permitted, field: 'top_logprobs'"),
    ],
)
def test_invalid_requests_are_refused_with_the_name_of_the_field(
    emulator: RunningEmulator, body: dict[str, Any], complaint: str
) -> None:
    response = complete(emulator, f"accounts/everburn/trainingSamplers/{TINY}", **body)
    assert response.status_code == 400
    assert complaint in response.json()["error"]["message"]


@pytest.mark.parametrize(
    "model",
    [
        "gpt",
        "accounts/everburn/trainingSessions/ts-0/checkpoints/everburn/run-" + "0" * 32 + "/x",
        "accounts/everburn/trainingSamplers/checkpoints/everburn/run-" + "0" * 32 + "/x",
    ],
)
def test_unknown_weights_are_not_found(emulator: RunningEmulator, model: str) -> None:
    assert complete(emulator, model).status_code == 404


def test_a_client_that_disconnects_cancels_its_request(
    emulator: RunningEmulator, service: FiretitanServiceClient, trainer: Any
) -> None:
    model = model_of(service, snapshot(trainer, "policy"))
    before = emulator.admin("GET", "state")["completions"].get("cancelled", 0)
    emulator.plan_fault("sample", "delay", seconds=1.0)
    body = {"model": model, "prompt": PROMPT, "max_tokens": 100}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            f"{emulator.base_url}/inference/v1/completions",
            json=body,
            timeout=httpx.Timeout(PATIENCE, read=0.1),
        )
    wait_for(
        lambda: emulator.admin("GET", "state")["completions"].get("cancelled", 0) == before + 1
    )


def test_sampling_continues_during_a_long_forward_backward(
    service: FiretitanServiceClient, trainer: Any
) -> None:
    client = sampler(service, snapshot(trainer, "policy"))
    sample(client)  # opens the batch
    datums = [rollout([1 + i % 60] * 120, [-4.0] * 119, [1.0] * 119) for i in range(300)]
    long = trainer.forward_backward(datums, "importance_sampling")
    sample(client, max_tokens=30, seed=5)
    assert not long.future().done()
    assert len(long.result().loss_fn_outputs) == 300
