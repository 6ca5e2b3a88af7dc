"""A task on sums as a person brings one: `sums.py` and `run.json` in a folder.

For tests of commands. What is rewarded is of no interest, as long as completions differ in it.
"""

import json
from pathlib import Path
from typing import Any

TASK = """
from everburn import RolloutRun, RolloutSample

def make_rollout_fn(setup):
    async def rollout_fn(sample_prompt):
        prompt = setup.tokenizer.encode(sample_prompt["prompt"])
        sample = await setup.sampler.sample(prompt, **setup.sampling_kwargs)
        reward = float(sum(sample.tokens) % 7) * setup.extras.get("scale", 1.0)
        return RolloutRun([RolloutSample.of_sample(prompt, sample, reward)])
    return rollout_fn

def loss(data, logprobs):
    import torch
    gains = (
        ((own - torch.from_numpy(datum.logprobs)).exp() * torch.from_numpy(datum.advantages)).sum()
        for datum, own in zip(data, logprobs)
    )
    return -sum(gains), {}

def rows(count):
    return [{"prompt": f"{10 + index % 90}+{10 + index // 90}="} for index in range(count)]
"""


def write_sums(folder: Path, rows: int, **changes: Any) -> None:
    """Put the task there, of so many rows, at most 8,100; changes: of the run's configuration."""
    config = {
        "rollout": "sums:make_rollout_fn",
        "dataset": {"name": "sums:rows", "kwargs": {"count": rows}},
        "base_model": "accounts/everburn/models/tiny",
        "lora_rank": 4,
        "backend": "emulator",
        "prompt_groups_per_step": 2,
        "max_completion_tokens": 4,
    }
    (folder / "sums.py").write_text(TASK)
    (folder / "run.json").write_text(json.dumps(config | changes))
