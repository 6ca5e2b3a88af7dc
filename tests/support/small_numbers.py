"""A task for the tiny model that any training improves: generate tokens of the lower half."""

from typing import Any

from everburn import RolloutFn, RolloutRun, RolloutSample, RolloutSetup

HALF = 24


def rows(count: int) -> list[dict[str, Any]]:
    return [{"row": index} for index in range(count)]


def make_rollout_fn(setup: RolloutSetup) -> RolloutFn:
    async def rollout_fn(sample_prompt: dict[str, Any]) -> RolloutRun:
        prompt = [5, 7]  # the same for all rows, so that learning is easy
        sample = await setup.sampler.sample(prompt, **setup.sampling_kwargs)
        low = sum(token < HALF for token in sample.tokens) / len(sample.tokens)
        return RolloutRun(
            [
                RolloutSample(
                    tokens=[*prompt, *sample.tokens],
                    logprobs=[0.0, 0.0, *sample.logprobs],
                    loss_mask=[0, 0, *[1] * len(sample.tokens)],
                    reward=low,
                )
            ]
        )

    return rollout_fn


def make_broken_rollout_fn(setup: RolloutSetup) -> RolloutFn:
    async def rollout_fn(sample_prompt: dict[str, Any]) -> RolloutRun:
        raise ValueError("broken on purpose")

    return rollout_fn
