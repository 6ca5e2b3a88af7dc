"""A user's task on sums, for tests of commands: `sums.py` and `run.json` in a folder.

The reward is arbitrary, but differs between completions.
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


def write_sums(folder: Path, rows: int, file: str = "run.json", **changes: Any) -> None:
    """Write the task with `rows` rows (at most 8,100). changes: to the run's configuration, which
    is in `file`."""
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
    (folder / file).write_text(json.dumps(config | changes))
