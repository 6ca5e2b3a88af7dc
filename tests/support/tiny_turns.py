"""A task of two turns for the emulator's tiny model, with all optional fields of a rollout.

It has no meaning: the reward is computed from the sampled tokens and the completion's index, so
that the rewards of a group differ.
"""

from typing import Any

from everburn import RolloutFn, RolloutRun, RolloutSample, RolloutSetup

MODEL = "accounts/everburn/models/tiny"
TOOL_RESPONSE = [3, 9]
GROUND_TRUTH = [5, 6]


def make_rollout_fn(setup: RolloutSetup) -> RolloutFn:
    async def rollout_fn(sample_prompt: dict[str, Any], rollout_idx: int) -> RolloutRun:
        tokens = [4 + sample_prompt["row"] % 40, 7]
        logprobs, raw, mask = [0.0, 0.0], [0.0, 0.0], [0, 0]
        for _ in range(2):
            sample = await setup.sampler.sample(tokens, **setup.sampling_kwargs)
            assert sample.raw_logprobs is not None
            after = [0] * len(TOOL_RESPONSE)
            tokens = [*tokens, *sample.tokens, *TOOL_RESPONSE]
            logprobs = [*logprobs, *sample.logprobs, *after]
            raw = [*raw, *sample.raw_logprobs, *after]
            mask = [*mask, *[1] * len(sample.tokens), *after]
        reward = rollout_idx + sum(tokens) % 7 / 14
        segment = RolloutSample(tokens, logprobs, mask, reward, raw_logprobs=raw)
        return RolloutRun([segment], ground_truth_tokens=GROUND_TRUTH)

    return rollout_fn


def fields(base_url: str, **others: Any) -> dict[str, Any]:
    """The configuration of a run of this task on an emulator."""
    return {
        "rollout": "support.tiny_turns:make_rollout_fn",
        "base_model": MODEL,
        "tokenizer_model": MODEL,
        "base_url": base_url,
        "lora_rank": 4,
        "prompt_groups_per_step": 2,
        "max_completion_tokens": 4,
        "learning_rate": 0.01,
    } | others
