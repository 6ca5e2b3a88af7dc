"""The rules between the fields of a configuration: which combinations can't run, or seldom
should."""

import math
from collections.abc import Iterator

from pydantic_core import InitErrorDetails, PydanticCustomError

from everburn.config.fields import RunFields
from everburn.config.names import is_bare_name
from everburn.learning.losses import settings_problems, unknown_settings


def broken_combinations(config: RunFields, wrong: set[int | str]) -> list[InitErrorDetails]:
    """The problems between fields, except where one of the fields is wrong by itself."""
    return [
        InitErrorDetails(type=PydanticCustomError("combination", text), loc=fields[:1], input=None)
        for fields, text in _combination_problems(config)
        if wrong.isdisjoint(fields)
    ]


def _combination_problems(config: RunFields) -> Iterator[tuple[tuple[str, ...], str]]:
    """Broken rules: their fields, first the one to change, and a text."""
    group = config.completions_per_prompt
    if config.min_group_size > group:
        yield (
            ("min_group_size", "completions_per_prompt"),
            f"{config.min_group_size} is above completions_per_prompt, which is {group}",
        )
    limit = config.max_concurrency_rollout_sample
    if limit is not None and limit < group:
        yield (
            ("max_concurrency_rollout_sample", "completions_per_prompt"),
            f"{limit} can't hold one whole row: completions_per_prompt is {group}",
        )
    if group == 1 and isinstance(config.advantages, str):
        yield (
            ("completions_per_prompt", "advantages"),
            f"a group of one has no {config.advantages} advantage: take at least 2, or name an "
            "`advantages` function of your own that is defined for one reward",
        )
    yield from _loss_problems(config)
    if config.max_seq_len is not None and config.max_seq_len < 2:
        yield ("max_seq_len",), "must leave room for a prompt and a token"
    if config.evaluation is not None and config.evaluation_dataset is not None:
        yield (
            ("evaluation", "evaluation_dataset"),
            "excludes evaluation_dataset: a function evaluates, or Everburn evaluates "
            "held-out rows",
        )
    if config.warm_start_from_adapter is not None and config.init_from_checkpoint is not None:
        yield (
            ("warm_start_from_adapter", "init_from_checkpoint"),
            "excludes init_from_checkpoint: a checkpoint brings its own weights",
        )
    if config.warm_start_from_adapter is not None and config.lora_rank == 0:
        yield (
            ("lora_rank", "warm_start_from_adapter"),
            "must be the adapter's rank, above 0, to start from an adapter",
        )
    if config.output_merged and config.output_model_id is None:
        yield ("output_merged", "output_model_id"), "requires output_model_id"
    if config.output_merged and config.lora_rank == 0:
        yield ("output_merged", "lora_rank"), "all parameters are trained: there is no adapter"
    if config.output_merged and not config.dedicated:
        yield (
            ("output_merged", "backend"),
            "needs a trainer job of the run's own: serverless training exports adapters only",
        )
    if config.backend == "serverless" and config.lora_rank == 0:
        yield (
            ("lora_rank", "backend"),
            "backend 'serverless' trains LoRA adapters only: set a rank, for example 8",
        )
    if not config.local and config.tokenizer_model is None:
        yield (
            ("tokenizer_model", "backend"),
            f"backend {config.backend!r} needs it, for example 'Qwen/Qwen3.8-27B'",
        )
    yield from _provisioning_problems(config)


def _provisioning_problems(config: RunFields) -> Iterator[tuple[tuple[str, ...], str]]:
    """Broken rules of `trainer` and `deployment`."""
    if not config.dedicated:
        for name in ("trainer", "deployment"):
            if getattr(config, name) is not None:
                yield (
                    (name, "backend"),
                    f"belongs to backend 'dedicated' (or 'emulator-dedicated'), not to "
                    f"{config.backend!r}",
                )
        return
    trainer, deployment = config.trainer_provisioning, config.deployment_provisioning
    if config.backend == "dedicated" and not (
        trainer.training_shape or deployment.shape or deployment.deployment_id
    ):
        yield (
            ("trainer", "deployment", "backend"),
            "name a training_shape, or for the deployment a shape or the deployment_id of an "
            "existing one: nothing else says which hardware serves the rollouts",
        )
    if deployment.tokenizer_model not in (None, config.tokenizer_model):
        yield (
            ("deployment", "tokenizer_model"),
            f"its tokenizer_model {deployment.tokenizer_model!r} isn't the run's, which is "
            f"{config.tokenizer_model!r}: a run has one tokenizer, so name it in one place",
        )
    if deployment.weight_sync_scope == "per_deployment" and trainer.job_id is not None:
        yield (
            ("deployment", "trainer"),
            "weight_sync_scope 'per_deployment' is fixed when the trainer job is created: it "
            "can't be combined with the job_id of an existing one",
        )


def _loss_problems(config: RunFields) -> Iterator[tuple[tuple[str, ...], str]]:
    if isinstance(config.loss, str):
        for problem in settings_problems(config.loss, config.loss_config):
            yield ("loss_config", "loss"), problem
    elif config.loss_config:
        yield (
            ("loss_config", "loss"),
            "belongs to the service's losses; a Python loss gets its settings as its kwargs",
        )


def origin_problem(config: RunFields) -> str | None:
    """Why a new run can't start from `init_from_checkpoint`, or None: only an existing run has
    checkpoints."""
    name = config.init_from_checkpoint
    if name is None or not is_bare_name(name):
        return None
    return (
        f"init_from_checkpoint: {name!r} is the name of a checkpoint within a run, and a new "
        "run has none: give the full path, as printed when it was saved, or continue "
        f"that run by `everburn resume RUN --set init_from_checkpoint={name}`"
    )


def warnings_of(config: RunFields) -> list[str]:
    """Valid settings that their author probably didn't intend."""
    notes = []
    limit = config.max_concurrency_rollout_sample
    if limit is not None:
        needed = math.ceil(limit / config.batch_samples) - 1
        if config.max_head_offpolicy_versions < needed:
            notes.append(
                f"max_concurrency_rollout_sample={limit} can never fill: with batches of "
                f"{config.batch_samples} completions it takes max_head_offpolicy_versions >= "
                f"{needed}, and it is {config.max_head_offpolicy_versions}"
            )
    if isinstance(config.loss, str):
        for key in unknown_settings(config.loss, config.loss_config):
            notes.append(
                f"loss_config.{key} isn't a setting of {config.loss} that Everburn knows; it is "
                "passed through as it is"
            )
    if config.loss == "gspo" and config.grad_accumulation_normalization == "num_loss_tokens":
        notes.append(
            "loss gspo divides each sequence's loss by its length already, and "
            "grad_accumulation_normalization='num_loss_tokens' divides by the number of tokens "
            "once more: with 'num_sequences' a step is the mean over sequences, as published"
        )
    if config.temperature == 0:
        notes.append("temperature=0: all completions of a row are equal and train nothing")
    return notes
