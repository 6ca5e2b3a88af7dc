"""What may change in a configuration: while its run goes on, and in a fork of it."""

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
"""What may change while a run goes on: what its workflow decides by, step for step."""


def reconfigured(config: RunConfig, changes: dict[str, Any]) -> RunConfig:
    """A running run's configuration with some fields changed.

    Raises:
        ConfigError: a field can't change while a run goes on, or its value won't do.
    """
    fixed = sorted(set(changes) - RECONFIGURABLE)
    if fixed or not changes:
        what = f"{', '.join(fixed)} can't change while a run goes on" if fixed else "no changes"
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
"""What a run's past was made with, and can't be told otherwise: its weights, and which row a cursor
means."""


STARTS = frozenset({"init_from_checkpoint", "warm_start_from_adapter"})
"""Where the weights of a new run come from."""


def forked(config: RunConfig, values: dict[str, Any]) -> RunConfig:
    """A fork's configuration: `values`, whole, where they leave the past of `config` alone.

    Raises:
        ConfigError: a field can't change in a fork, or its value won't do.
    """
    found = parse_config(values)
    changed = changed_fields(config, found).keys()
    if starts := sorted(changed & STARTS):
        raise ConfigError(
            f"{', '.join(starts)} can't change in a fork: its weights and optimizer are those that "
            "the run had after the step of --at-step. Start a new run for others"
        )
    fixed = sorted(changed & FIXED_IN_FORKS)
    if fixed:
        raise ConfigError(
            f"{', '.join(fixed)} can't change in a fork, whose past was made with it: start a new "
            f"run for that. What can't: {', '.join(sorted(FIXED_IN_FORKS | STARTS))}"
        )
    return found


def changed_fields(old: RunConfig, new: RunConfig) -> dict[str, JsonValue]:
    """The fields of `new` that differ."""
    values = new.model_dump(mode="json")
    return {name: v for name, v in values.items() if getattr(old, name) != getattr(new, name)}
