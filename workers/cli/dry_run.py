"""`everburn run --dry-run`: what a run would do, in numbers.

Reads the configuration, resolves its names and reads its rows, as a worker would. Needs no key, no
server and no model; writes nothing. Doesn't own the rules of batches, schedules and admission.
"""

import math
from collections.abc import Iterator

from everburn.config import RunConfig
from everburn.records.ids import RunRef
from everburn.records.provisioning import readable_name
from everburn.rollouts.dataset import DatasetError, load_rows
from everburn.rollouts.function import resolve_names
from everburn.trainers.backends import api_root, training_url
from everburn.usercode.entrypoints import EntrypointError
from workers.cli.run_file import RunFile
from workers.errors import BadInputError

Line = tuple[str, str]
MAX_NAMES = 6
"""Above this number, checkpoint names are abbreviated."""


def describe_run(file: RunFile, run_id: str | None) -> list[str]:
    """The run, one fact per line.

    Raises:
        BadInputError: a name doesn't resolve, or rows can't be read.
    """
    config = file.config
    try:
        resolve_names(config)
        rows = len(load_rows(config.dataset, config.max_rows))
        held_out = len(load_rows(config.evaluation_dataset)) if config.evaluation_dataset else 0
    except (EntrypointError, DatasetError) as error:
        raise BadInputError(str(error)) from None
    name = run_id or f"{file.name}-<time>"
    made_as = readable_name(run_id) if run_id else f"{readable_name(file.name)}<time>-"
    facts = list(_facts(config, rows, held_out, name, f"{made_as}<8 hex digits>"))
    width = max(len(name) for name, _ in facts)
    lines = [f"{name:{width}}  {text}" for name, text in facts]
    return lines + [f"note: {text}" for text in config.warnings()]


def _facts(
    config: RunConfig, rows: int, held_out: int, run_id: str, made_as: str
) -> Iterator[Line]:
    total = rows * config.epochs
    steps = math.ceil(total / config.prompt_groups_per_step)
    yield "run", run_id
    yield "folder", RunRef(store=config.store, id=run_id).folder
    yield from _provisioning(config, steps, made_as)
    yield "rows", f"{rows} x {config.epochs} epochs = {total}" if config.epochs > 1 else f"{rows}"
    yield from _rollouts(config, total, steps)
    yield "checkpoints", _checkpoints(config, steps)
    yield "evaluations", _evaluations(config, steps, held_out)


def _provisioning(config: RunConfig, steps: int, made_as: str) -> Iterator[Line]:
    yield "trains", _trained(config)
    url = api_root(config) if config.dedicated else training_url(config)
    yield "at", f"{url} ({config.backend})"
    if not config.local:
        yield "key", f"read from {config.api_key_env} by the workers"
    yield "starts from", _origin(config)
    if config.dedicated:
        yield from _trainer_job(config, made_as)
        yield from _deployment(config, made_as)
        trainer, deployment = config.trainer_provisioning, config.deployment_provisioning
        if not (trainer.job_id and deployment.deployment_id):
            yield (
                "",
                "provisioning.json in the run's folder has both ids before anything is created",
            )
        yield "hotloads", f"{steps + 1}, one for each policy version"
    else:
        yield (
            "session",
            f"one training session at a time, with a sampler snapshot for each of {steps + 1} "
            "policy versions; it ends with the run, and its snapshots with it",
        )
    if config.output_model_id is not None:
        merged = ", the adapter merged into its base model" if config.output_merged else ""
        yield "promotes", f"the final policy to the model {config.output_model_id!r}{merged}"


def _trainer_job(config: RunConfig, made_as: str) -> Iterator[Line]:
    wish = config.trainer_provisioning
    yield "trainer job", _provision(wish.job_id, made_as, wish.cleanup)
    if wish.job_id is None:
        chosen = _chosen(
            shape=wish.training_shape or "selected by the service",
            region=wish.region or "chosen by the service",
            replicas=wish.replicas or "the shape's",
            max_context_length=wish.max_context_length,
            reservation=wish.reservation_target if wish.use_reservation else "not used",
        )
        yield "", chosen
    yield (
        "",
        f"waits up to {_duration(wish.pending_timeout)} for capacity, then up to "
        f"{_duration(wish.ready_timeout)} until it is ready; stopped by the service after "
        f"{_duration(wish.inactivity_timeout)} without a session",
    )


def _deployment(config: RunConfig, made_as: str) -> Iterator[Line]:
    wish = config.deployment_provisioning
    yield "deployment", _provision(wish.deployment_id, made_as, wish.cleanup)
    training_shape = config.trainer_provisioning.training_shape
    shape = wish.shape or ("the training shape's" if training_shape else "")
    made = wish.deployment_id is None
    yield (
        "",
        _chosen(
            tokenizer=config.tokenizer_model or "the base model's own",
            shape=(shape or "selected by the service") if made else None,
            region=(wish.region or "chosen by the service") if made else None,
            replicas=wish.replicas if made else None,
            weight_sync_scope=wish.weight_sync_scope,
            transition_type=wish.transition_type or "the service's",
        ),
    )
    yield "", f"waits up to {_duration(wish.hotload_timeout)} for new weights"


def _provision(given: str | None, made_as: str, cleanup: str) -> str:
    if given is not None:
        return f"{given}, which exists already and is kept"
    return f"created for the run as {made_as}; at its end: {cleanup.replace('_', ' ')}"


def _chosen(**choices: object) -> str:
    """Fields by their configuration names, without those that are None."""
    return ", ".join(
        f"{name.replace('_', ' ')} {value}" for name, value in choices.items() if value is not None
    )


def _duration(seconds: float) -> str:
    """`48 h`, `10 min`, `90 s`."""
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= size and seconds % size == 0:
            return f"{seconds / size:g} {unit}"
    return f"{seconds:g} s"


def _trained(config: RunConfig) -> str:
    if not config.lora_rank:
        return f"all parameters of {config.base_model}"
    return f"a LoRA adapter of rank {config.lora_rank} on {config.base_model}"


def _origin(config: RunConfig) -> str:
    if config.init_from_checkpoint is not None:
        return f"weights and optimizer of {config.init_from_checkpoint}, at step 0 and row 0"
    if config.warm_start_from_adapter is not None:
        return f"the adapter {config.warm_start_from_adapter}, with a fresh optimizer"
    return f"a new adapter made from seed {config.seed}" if config.lora_rank else "the base model"


def _rollouts(config: RunConfig, total: int, steps: int) -> Iterator[Line]:
    group, batch = config.completions_per_prompt, config.batch_samples
    rollouts = total * group
    yield "steps", f"{steps} optimizer steps of {config.prompt_groups_per_step} rows x {group}"
    yield "rollouts", f"{rollouts} completions, one call of {config.rollout.name} each"
    most = rollouts * config.max_completion_tokens
    yield (
        "tokens",
        f"at most {most:,} sampled, {config.max_completion_tokens:,} per sampling call, if each "
        "completion makes one call, plus prompts",
    )
    window = (config.max_head_offpolicy_versions + 1) * batch
    limit = config.max_concurrency_rollout_sample
    yield (
        "in flight",
        f"at most {window if limit is None else min(window, limit)} completions, up to "
        f"{config.max_head_offpolicy_versions} policy versions ahead",
    )
    yield (
        "optimizer",
        f"{config.loss}, learning rate {config.learning_rate:g} ({config.lr_scheduler}"
        + (f", {config.warmup_steps} steps of warm-up)" if config.warmup_steps else ")"),
    )


def _checkpoints(config: RunConfig, steps: int) -> str:
    interval = config.dcp_save_interval
    saved = [0, *(range(interval, steps + 1, interval) if interval else [])]
    if config.save_final_checkpoint and saved[-1] != steps:
        saved.append(steps)
    names = [f"state-{step}" for step in saved]
    if len(names) > MAX_NAMES:
        names = [*names[:3], "...", names[-1]]
    return f"{len(saved)}: {', '.join(names)}"


def _evaluations(config: RunConfig, steps: int, held_out: int) -> str:
    if not config.evaluates:
        return "none"
    interval = config.evaluation_interval
    at = {*range(interval, steps + 1, interval), steps}
    if config.initial_evaluation:
        at.add(0)
    if config.evaluation is not None:
        return f"{len(at)} calls of {config.evaluation.name}"
    most = len(at) * held_out * config.max_completion_tokens
    return f"{len(at)} of {held_out} held-out rows each: at most {most:,} sampled tokens"
