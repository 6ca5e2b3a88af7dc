"""Shared values of trainer session tests: a configuration, a datum, an optimizer step."""

from typing import Any

from everburn.config import RunConfig, parse_config
from everburn.emulator.models.base_model import TINY
from everburn.learning.datums import Datum, build_datum
from everburn.records.ledger import AdamParams
from everburn.rollouts.contract import RolloutSample

ADAM = AdamParams(
    learning_rate=0.01,
    beta1=0.9,
    beta2=0.95,
    eps=1e-12,
    weight_decay=0.0,
    grad_clip_norm=0.0,
    normalization="num_loss_tokens",
)


def a_config(url: str, **changes: Any) -> RunConfig:
    """A run on the emulator's tiny model at this URL; its rollout function is never called."""
    values = {
        "rollout": "task:make",
        "dataset": "rows.jsonl",
        "base_model": TINY,
        "lora_rank": 4,
        "backend": "emulator",
        "base_url": url,
    }
    return parse_config(values | changes)


def a_datum(advantage: float = 1.0) -> Datum:
    sample = RolloutSample(
        tokens=[2, 3, 4, 5], logprobs=[0.0, 0.0, -4.0, -4.0], loss_mask=[0, 0, 1, 1], reward=1.0
    )
    return build_datum(sample, advantage)
