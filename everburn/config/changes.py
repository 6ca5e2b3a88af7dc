"""Changes to a configuration: of a running run, and in a fork."""

from typing import Any

from pydantic import JsonValue

from everburn.config.problems import ConfigError
from everburn.config.run_config import RunConfig, parse_config

RECONFIGURABLE = frozenset(
    {
        "learning_rate",
        "lr_scheduler",
        "warmup_steps",
        "weight_decay",
        "grad_clip_norm",
        "max_head_offpolicy_versions",
        "max_concurrency_rollout_sample",
        "evaluation_interval",
        "dcp_save_interval",
        "on_fatal",
        "require_update",
        "save_final_checkpoint",
        "output_model_id",
    }
)
"""Fields that may change while a run continues: its workflow reads them at every step."""


def reconfigured(config: RunConfig, changes: dict[str, Any]) -> RunConfig:
    """A running run's configuration with some fields changed.

    Raises:
        ConfigError: a field can't change while a run continues, or its value is invalid.
    """
    fixed = sorted(set(changes) - RECONFIGURABLE)
    if fixed or not changes:
        what = f"{', '.join(fixed)} can't change while a run continues" if fixed else "no changes"
        raise ConfigError(f"{what}; what can: {', '.join(sorted(RECONFIGURABLE))}")
    return parse_config(config.model_dump(mode="json") | changes)


FIXED_IN_FORKS = frozenset(
    {
        "base_model",
        "tokenizer_model",
        "lora_rank",
        "lora_alpha",
        "backend",
        "base_url",
        "dataset",
        "max_rows",
        "shuffle",
        "seed",
        "store",
    }
)
"""Fields on which a run's past depends: its weights, and the row that a cursor refers to."""


STARTS = frozenset({"init_from_checkpoint", "warm_start_from_adapter"})
"""The origins of a new run's weights."""


def forked(config: RunConfig, values: dict[str, Any]) -> RunConfig:
    """A fork's configuration, from all its values.

    Raises:
        ConfigError: a field differs from `config` that can't change in a fork, or is invalid.
    """
    found = parse_config(values)
    changed = changed_fields(config, found).keys()
    if starts := sorted(changed & STARTS):
        raise ConfigError(
            f"{', '.join(starts)} can't change in a fork: its weights and optimizer are those of "
            "the run after the step of --at-step. Start a new run for others"
        )
    fixed = sorted(changed & FIXED_IN_FORKS)
    if fixed:
        raise ConfigError(
            f"{', '.join(fixed)} can't change in a fork, because its past depends on it: start a "
            f"new run for that. What can't: {', '.join(sorted(FIXED_IN_FORKS | STARTS))}"
        )
    return found


def changed_fields(old: RunConfig, new: RunConfig) -> dict[str, JsonValue]:
    """The fields of `new` that differ."""
    values = new.model_dump(mode="json")
    return {name: v for name, v in values.items() if getattr(old, name) != getattr(new, name)}
