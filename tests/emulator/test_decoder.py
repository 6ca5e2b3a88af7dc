"""The decoder compared with `transformers`, with merged adapters and full parameters."""

import pytest
import torch
from torch.func import functional_call

from everburn.emulator.models.bases import Base, SamplerWeights
from everburn.emulator.sampling.decoder import Decoder, KVCache
from everburn.emulator.training.spec import ModelSpec

from .test_engine import FULL, LORA, finish, random_submission, trained

SEQUENCES = [[5, 6, 7, 8, 9], [1, 2, 3, 4, 60], [11] * 9, list(range(20)), [63, 62, 61]]


@pytest.mark.parametrize("spec", [LORA, FULL, None])
def test_logits_equal_those_of_transformers(tiny: Base, spec: ModelSpec | None) -> None:
    weights = tiny.merged(trained(tiny, spec).sampler_weights() if spec else None)
    with torch.inference_mode():
        for sequence, logits in zip(SEQUENCES, _decode(Decoder(tiny.config, weights)), strict=True):
            inputs = (torch.tensor([sequence]),)
            expected = functional_call(tiny.model, weights, inputs, tie_weights=False).logits[0]
            torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)


def _decode(decoder: Decoder) -> list[torch.Tensor]:
    """Logits at every position; rows join at different times."""
    cache = KVCache(decoder.config)
    logits: list[list[torch.Tensor]] = [[] for _ in SEQUENCES]
    rows: list[int] = []
    consumed = [0] * len(SEQUENCES)
    # The first half of each prompt arrives at once, the rest is decoded token by token.
    for joining in ([0, 1], [], [2, 3], [4], *[[]] * 20):
        for index in [index for index in rows if consumed[index] == len(SEQUENCES[index])]:
            position, last = rows.index(index), len(rows) - 1
            cache.move(last, position)
            rows[position] = rows[last]
            rows.pop()
        heads = [SEQUENCES[index][: len(SEQUENCES[index]) // 2] for index in joining]
        decoding = [(SEQUENCES[i][consumed[i]], consumed[i]) for i in rows]
        if not (decoding or heads):
            continue
        hidden, prompts = decoder.forward(cache, decoding, heads)
        for row, index in enumerate(rows):
            logits[index].append(decoder.logits(hidden[row : row + 1]))
            consumed[index] += 1
        for index, states in zip(joining, prompts, strict=True):
            logits[index].append(decoder.logits(states))
            consumed[index] = len(states)
        rows += joining
    return [torch.cat(parts) for parts in logits]


def test_merging_gives_the_function_of_the_adapter(tiny: Base) -> None:
    engine = trained(tiny)
    request = random_submission(1, 30)
    expected = finish(engine.forward(request)).logprobs[0]
    decoder = Decoder(tiny.config, tiny.merged(engine.sampler_weights()))
    example = request.examples[0]
    with torch.inference_mode():
        _, (states,) = decoder.forward(KVCache(tiny.config), [], [example.tokens.tolist()])
        logprobs = decoder.logits(states).log_softmax(-1)
    chosen = logprobs[range(len(example.targets)), example.targets]
    assert chosen.tolist() == pytest.approx(expected.tolist(), abs=1e-5)


def test_weights_that_did_not_change_are_shared(tiny: Base) -> None:
    merged = tiny.merged(SamplerWeights({}, scaling=1.0))
    original = tiny.merged(None)
    assert all(merged[name] is original[name] for name in original)
