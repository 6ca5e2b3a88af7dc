"""Sampling as an object, without a server."""

import math
from collections.abc import Sequence

import pytest
import torch

from everburn.emulator.errors import ContextExceeded, InvalidInput
from everburn.emulator.models.bases import Base
from everburn.emulator.sampling.decoder import Decoder
from everburn.emulator.sampling.distribution import SamplingParams, draw_tokens
from everburn.emulator.sampling.sampler import Batch, Completion, Sampler, Ticket, check_request
from support.emulator import POSITIONS

LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -3.0])


@pytest.fixture
def batch(tiny: Base) -> Batch:
    return open_batch(tiny)


def open_batch(base: Base) -> Batch:
    decoder = Decoder(base.config, base.merged(None))
    return Batch(base, decoder)


def ticket(prompt: Sequence[int], max_tokens: int = 20, **params: object) -> Ticket:
    return Ticket(prompt, SamplingParams(max_tokens=max_tokens, **params))


def run(batch: Batch, *tickets: Ticket) -> list[Completion]:
    for one in tickets:
        batch.add(one)
    while batch.busy:
        batch.step()
    return [one.completion.result(0) for one in tickets]


def distribution(temperature: float, top_k: int, top_p: float) -> list[float]:
    """The expected distribution, with plain floats."""
    weights = [math.exp(logit / temperature) for logit in LOGITS.tolist()]
    ranked = sorted(range(len(weights)), key=lambda i: -weights[i])[: top_k or None]
    total = sum(weights[i] for i in ranked)
    kept, mass = [], 0.0
    for i in ranked:
        kept.append(i)
        mass += weights[i] / total
        if mass >= top_p:
            break
    total = sum(weights[i] for i in kept)
    return [weights[i] / total if i in kept else 0.0 for i in range(len(weights))]


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, 0, 1.0), (0.7, 0, 1.0), (1.0, 3, 1.0), (1.0, 0, 0.8), (2.0, 4, 0.6), (1.0, 99, 1.0)],
)
def test_draws_follow_the_distribution_and_report_it(
    temperature: float, top_k: int, top_p: float
) -> None:
    expected = distribution(temperature, top_k, top_p)
    raw = distribution(1.0, 0, 1.0)
    grid = (torch.arange(2000, dtype=torch.float64) + 0.5) / 2000
    params = SamplingParams(max_tokens=1, temperature=temperature, top_k=top_k, top_p=top_p)
    tokens, logprobs, sampling = draw_tokens(LOGITS.expand(2000, -1), [params] * 2000, grid)
    frequencies = torch.bincount(tokens, minlength=len(expected)) / 2000
    assert frequencies.tolist() == pytest.approx(expected, abs=1e-3)
    for token, logprob, sampling_logprob in zip(
        tokens.tolist(), logprobs.tolist(), sampling.tolist(), strict=True
    ):
        assert sampling_logprob == pytest.approx(math.log(expected[token]), abs=1e-5)
        assert logprob == pytest.approx(math.log(raw[token]), abs=1e-5)


def test_rows_with_different_settings_share_a_draw() -> None:
    rows = [
        SamplingParams(max_tokens=1, temperature=0.0),
        SamplingParams(max_tokens=1, top_k=1),
        SamplingParams(max_tokens=1),
    ]
    tokens, logprobs, sampling = draw_tokens(
        LOGITS.expand(3, -1), rows, torch.tensor([0.999, 0.999, 0.999], dtype=torch.float64)
    )
    assert tokens.tolist() == [0, 0, 5]
    assert sampling.tolist() == pytest.approx(
        [0.0, 0.0, math.log(distribution(1, 0, 1)[5])], abs=1e-5
    )
    assert logprobs[0] == pytest.approx(math.log(distribution(1, 0, 1)[0]), abs=1e-5)


def test_a_seed_gives_the_same_tokens_in_any_batch(tiny: Base) -> None:
    alone = run(open_batch(tiny), ticket([1, 2, 3], seed=5))[0]
    company = [ticket([i] * (1 + i % 7), seed=i, max_tokens=3 + i % 11) for i in range(40)]
    together = run(open_batch(tiny), *company[:20], ticket([1, 2, 3], seed=5), *company[20:])[20]
    assert together.tokens == alone.tokens
    assert together.logprobs == pytest.approx(alone.logprobs, abs=1e-5)


def test_requests_join_and_leave_between_tokens(tiny: Base) -> None:
    batch, reference = open_batch(tiny), open_batch(tiny)
    tickets = [ticket([1 + i, 2, 3 + i], max_tokens=4 + 3 * i, seed=i) for i in range(8)]
    for one in tickets:
        batch.add(one)
        batch.step()
    run(batch)
    for i, one in enumerate(tickets):
        expected = run(reference, ticket([1 + i, 2, 3 + i], max_tokens=4 + 3 * i, seed=i))[0]
        assert one.completion.result(0).tokens == expected.tokens


def test_without_a_seed_draws_differ(batch: Batch) -> None:
    completions = run(batch, *(ticket([1, 2, 3]) for _ in range(8)))
    assert len({tuple(completion.tokens) for completion in completions}) > 1


def test_greedy_takes_the_most_likely_token(tiny: Base, batch: Batch) -> None:
    completion = run(batch, ticket([1, 2, 3], temperature=0.0, max_tokens=5))[0]
    sequence = [1, 2, 3]
    for token in completion.tokens:
        with torch.inference_mode():
            logits = tiny.model(torch.tensor([sequence])).logits[0, -1]
        assert token == int(logits.argmax())
        sequence.append(token)
    assert completion.sampling_logprobs == [0.0] * len(completion.tokens)


def test_the_token_budget_ends_a_completion(batch: Batch) -> None:
    completion = next(
        one
        for one in run(batch, *(ticket([1], max_tokens=2) for _ in range(9)))
        if "length" in one.finish_reason
    )
    assert len(completion.tokens) == 2


def test_the_end_token_ends_a_completion_and_belongs_to_it(tiny: Base, batch: Batch) -> None:
    (end,) = tiny.end_tokens
    completions = run(batch, *(ticket([1, 2], max_tokens=120, seed=i) for i in range(20)))
    ended = [one for one in completions if one.finish_reason == "stop"]
    assert len(ended) > 10  # one in 64 tokens is an end token
    for completion in ended:
        assert completion.tokens[-1] == end
        assert end not in completion.tokens[:-1]


def test_a_stop_string_ends_a_completion(tiny: Base) -> None:
    free = run(open_batch(tiny), ticket([1, 2, 3], max_tokens=60, seed=3))[0]
    stop = tiny.tokenizer.decode(free.tokens[6:8])
    stopped = run(open_batch(tiny), ticket([1, 2, 3], max_tokens=60, seed=3, stop=["@", stop]))[0]
    first = next(n for n in range(1, 9) if stop in tiny.tokenizer.decode(free.tokens[:n]))
    assert stopped.tokens == free.tokens[:first]
    assert stopped.finish_reason == "stop"
    assert stopped.text == tiny.tokenizer.decode(free.tokens[:first]).removesuffix(stop)


def test_echo_scores_the_prompt(tiny: Base, batch: Batch) -> None:
    prompt = [5, 9, 2, 30]
    long, single = run(batch, ticket(prompt, echo=True), ticket([7], echo=True))
    with torch.inference_mode():
        logprobs = tiny.model(torch.tensor([prompt])).logits[0].log_softmax(-1)
    expected = [0.0, *(float(logprobs[i, token]) for i, token in enumerate(prompt[1:]))]
    assert long.prompt_logprobs == pytest.approx(expected, abs=1e-5)
    assert single.prompt_logprobs == [0.0]


def test_a_cancelled_request_leaves_the_batch(batch: Batch) -> None:
    running, waiting, kept = ticket([1], 120), ticket([2], 120), ticket([3], 120, seed=1)
    batch.add(running)
    batch.step()
    batch.add(waiting)
    batch.add(kept)
    running.cancelled = waiting.cancelled = True
    batch.step()
    assert batch.unfinished() == [kept]
    assert not running.completion.done() and not waiting.completion.done()


def test_more_requests_than_rows_are_all_served(batch: Batch) -> None:
    completions = run(batch, *(ticket([1 + i % 50], max_tokens=3) for i in range(600)))
    assert len(completions) == 600


def test_batches_of_different_weights_take_turns(tiny: Base) -> None:
    sampler, tickets = Sampler(), [ticket([1, 2], max_tokens=5) for _ in range(2)]
    for key, one in zip(("old", "new"), tickets, strict=True):
        sampler.add(key, lambda: open_batch(tiny), one)
    while sampler.busy:
        assert sampler.step() == []
    assert all(one.completion.done() for one in tickets)


def test_a_forgotten_batch_returns_its_requests(tiny: Base) -> None:
    sampler, one = Sampler(), ticket([1, 2])
    sampler.add("policy", lambda: open_batch(tiny), one)
    assert sampler.forget("policy") == [one]
    assert sampler.forget("policy") == []
    assert not sampler.busy


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "error", "complaint"),
    [
        ([], 1, InvalidInput, "holds no token"),
        (
            [1] * (POSITIONS - 8),
            9,
            ContextExceeded,
            f"{POSITIONS - 8} tokens and max_tokens of 9 exceed.*{POSITIONS} positions",
        ),
        ([1, 64], 1, InvalidInput, "token id 64"),
        ([-1], 1, InvalidInput, "token id -1"),
    ],
)
def test_requests_the_model_cannot_serve_are_refused(
    tiny: Base, prompt: list[int], max_tokens: int, error: type[Exception], complaint: str
) -> None:
    with pytest.raises(error, match=complaint):
        check_request(tiny, prompt, SamplingParams(max_tokens=max_tokens))


def test_the_last_position_can_be_used(tiny: Base, batch: Batch) -> None:
    full = ticket([1] * (POSITIONS - 8), max_tokens=8)
    check_request(tiny, full.prompt, full.params)
    assert len(run(batch, full)[0].tokens) <= 8
