"""The configuration of a run: every field, its default, its rule.

Owns names, types, bounds and the rules between fields, and the text in which all problems of a
configuration are reported at once. Doesn't own what needs the outside world to check: whether an
entry point imports, a dataset exists or a server answers is found out by the run's first
activity, before anything is provisioned.
"""

import json
import math
import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self, cast, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    ModelWrapValidatorHandler,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails, InitErrorDetails, PydanticCustomError

from everburn.learning.losses import (
    LOSSES,
    Clip,
    LossName,
    Settings,
    clip_of,
    effective_settings,
    settings_problems,
    unknown_settings,
)
from everburn.config.provisioning import DeploymentResource, TrainerResource
from everburn.config.names import check_adapter, check_checkpoint, check_model_id, is_bare_name

MAX_COMPLETIONS = 512
"""Of a row: each is an activity of one workflow, and a server allows so many to be pending."""
MAX_CONFIG_BYTES = 64 * 1024
"""A run's configuration travels in workflow history; more than this belongs in files."""

_ENTRYPOINT = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


class ConfigError(ValueError):
    """A configuration that can't be run. The message lists every problem with its path."""


class Entrypoint(BaseModel):
    """A Python callable by name, `package.module:attribute`, with its keyword arguments.

    In JSON either the bare name or `{"name": "package.module:attribute", "kwargs": {...}}`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    name: str
    kwargs: dict[str, JsonValue] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _accept_bare_name(cls, value: Any) -> Any:
        if not isinstance(value, str | dict | Entrypoint):
            raise ValueError("write 'package.module:attribute', or an object with that as its name")
        return {"name": value} if isinstance(value, str) else value

    @field_validator("name")
    @classmethod
    def _check_form(cls, value: str) -> str:
        if not _ENTRYPOINT.fullmatch(value):
            raise ValueError(
                f"{value!r} doesn't name a callable: write 'package.module:attribute', "
                "for example 'my_task:make_rollout_fn'"
            )
        return value


def _source(value: Any) -> Any:
    """A bare string is a path or URL; a callable that returns rows is written as an object."""
    if isinstance(value, str):
        return value
    if not isinstance(value, dict | Entrypoint):
        raise ValueError('write a path or URL, or {"name": "package.module:function"}')
    return Entrypoint.model_validate(value)


DatasetSource = Annotated[str | Entrypoint, BeforeValidator(_source)]
"""Rows: the path or URL of a .jsonl or .parquet file, or `{"name": "module:function"}`."""


def _loss(value: Any) -> Any:
    """A bare string names a loss of the service; a Python function is written as an object."""
    if isinstance(value, str):
        if value not in LOSSES:
            raise ValueError(
                f"{value!r} is no loss of the service ({', '.join(LOSSES)}); a Python loss is "
                'written as {"name": "package.module:function"}'
            )
        return value
    if not isinstance(value, dict | Entrypoint):
        raise ValueError('write the name of a loss, or {"name": "package.module:function"}')
    return Entrypoint.model_validate(value)


LossSource = Annotated[LossName | Entrypoint, BeforeValidator(_loss)]
"""What is minimised: a loss of the service by name, or `{"name": "module:function"}`."""


def _advantages(value: Any) -> Any:
    """As `_loss`: a bare string is one of Everburn's own functions."""
    if isinstance(value, str) and value not in get_args(AdvantageName):
        raise ValueError(
            f"{value!r} is none of {', '.join(get_args(AdvantageName))}; a function of your own is "
            'written as {"name": "package.module:function"}'
        )
    if isinstance(value, str | Entrypoint):
        return value
    if not isinstance(value, dict):
        raise ValueError('write a name, or {"name": "package.module:function"}')
    return Entrypoint.model_validate(value)


AdvantageName = Literal["group_zscore", "mean_only", "leave_one_out"]
AdvantageSource = Annotated[AdvantageName | Entrypoint, BeforeValidator(_advantages)]
"""Rewards of a group to advantages: by name, or `{"name": "module:function"}`."""

RESOURCES: dict[str, type[BaseModel]] = {
    "trainer": TrainerResource,
    "deployment": DeploymentResource,
}
"""The fields that are objects with fields of their own."""

_Count = Annotated[int, Field(ge=1)]
_Natural = Annotated[int, Field(ge=0)]
_Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class RunConfig(BaseModel):
    """What a run trains, on what, and how. Immutable; unknown fields are refused, and nothing
    is converted: `"3"` and `true` aren't counts."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    # The task
    rollout: Entrypoint = Field(
        description="`make_rollout_fn(setup, **kwargs) -> rollout_fn`, once per worker and run."
    )
    dataset: DatasetSource = Field(description="The training rows.")
    extras: dict[str, JsonValue] = Field(
        default_factory=dict, description="Handed to the rollout factory as `setup.extras`."
    )
    dynamic_filter: Entrypoint | None = Field(
        default=None, description="`filter(group, **kwargs) -> bool`; false rejects the group."
    )
    prepare_batch: Entrypoint | None = Field(
        default=None,
        description="`prepare_batch(batch, **kwargs)` gives the sealed batch's advantages per "
        "segment or token; implies collect_full_batch.",
    )
    epochs: _Count = 1
    shuffle: bool = True
    seed: _Natural = Field(default=0, description="Of the row order and of a new adapter.")
    max_rows: _Count | None = Field(default=None, description="Use only the first rows.")

    # The model and where it trains
    base_model: str = Field(
        min_length=1,
        description="A model's name; on the emulator also a recipe's, `package.module:function`.",
    )
    tokenizer_model: str | None = Field(
        default=None,
        description="Tokenizer id or path; the emulator's base models bring their own.",
    )
    lora_rank: _Natural = Field(default=0, description="0 trains all parameters.")
    lora_alpha: _Count = 32
    backend: Literal["emulator", "emulator-dedicated", "serverless", "dedicated"] = Field(
        default="serverless",
        description="A service of Fireworks, or the local emulator in the place of either.",
    )
    trainer: TrainerResource | None = Field(
        default=None, description="The trainer job of dedicated training."
    )
    deployment: DeploymentResource | None = Field(
        default=None, description="The deployment of dedicated training."
    )
    init_from_checkpoint: str | None = Field(
        default=None,
        description="Weights and optimizer to start from: another run's checkpoint, or for "
        "`everburn resume` one of the run's own by name.",
    )
    warm_start_from_adapter: str | None = Field(
        default=None, description="LoRA weights to start from, with a fresh optimizer."
    )
    output_model_id: str | None = Field(
        default=None, description="The id under which the final policy becomes a model."
    )
    output_merged: bool = Field(
        default=False,
        description="Whether an adapter becomes a model with its base model merged in; dedicated.",
    )
    base_url: str | None = Field(
        default=None,
        description="Of the training API; by default Fireworks, or the local emulator's.",
    )
    api_key_env: str = Field(
        default="FIREWORKS_API_KEY",
        description="The environment variable of the workers that holds the API key.",
    )

    # Scheduling (names of the async RL recipe)
    completions_per_prompt: int = Field(
        default=4,
        ge=1,
        le=MAX_COMPLETIONS,
        description="G, completions per row; 1 only with an `advantages` function of your own.",
    )
    prompt_groups_per_step: _Count = Field(default=1, description="P, prompt groups per step.")
    max_head_offpolicy_versions: _Natural = Field(
        default=0, description="O, published versions that admission may run ahead."
    )
    max_concurrency_rollout_sample: _Count | None = Field(
        default=None, description="C, rollout_fn calls in flight over the whole run."
    )
    min_group_size: _Count = Field(default=1, description="Surviving completions to train a row.")
    max_incomplete_group_retries: _Natural = 0
    collect_full_batch: bool = Field(
        default=False,
        description="The synchronous recipe: submit only whole batches.",
    )

    # Sampling
    max_completion_tokens: _Count = 1024
    temperature: _NonNegative = 1.0
    max_seq_len: _Count | None = Field(default=None, description="Prompt and completion together.")
    sampler_max_concurrency: _Count | None = Field(
        default=None, description="Inference requests in flight per rollout worker."
    )
    record_sampling_calls: bool = Field(
        default=True, description="So that a completion that is run again repeats no finished call."
    )
    rollout_timeout: _Seconds = Field(default=3600.0, description="Per completion, in seconds.")

    # Optimisation
    advantages: AdvantageSource = Field(
        default="group_zscore",
        description="Of a group's completions; `advantages(rewards, **kwargs)` gives one for each.",
    )
    loss: LossSource = Field(
        default="grpo",
        description="One of the service, or `loss(data, logprobs, **kwargs) -> (loss, metrics)`.",
    )
    loss_config: Settings = Field(default_factory=dict, description="The service's loss_fn_config.")
    router_replay: bool = Field(
        default=False,
        description="Of models with experts: train with the routing that sampling used.",
    )
    learning_rate: _NonNegative = 1e-5
    lr_scheduler: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: _Natural = 0
    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    adam_beta2: float = Field(default=0.95, ge=0, lt=1)
    adam_eps: float = Field(default=1e-12, gt=0)
    weight_decay: _NonNegative = 0.0
    grad_clip_norm: _NonNegative = Field(default=0.0, description="0: no clipping.")
    grad_accumulation_normalization: Literal["none", "num_loss_tokens", "num_sequences"] = (
        "num_loss_tokens"
    )

    # Evaluation
    evaluation: Entrypoint | None = Field(
        default=None, description="`evaluate(step, rollout_fn, **kwargs) -> dict of numbers`."
    )
    evaluation_dataset: DatasetSource | None = Field(
        default=None, description="Held-out rows, one completion each, reported per sample."
    )
    evaluation_interval: _Count = 1
    initial_evaluation: bool = Field(
        default=True, description="Evaluate the policy that the run begins, or is resumed, with."
    )
    evaluation_temperature: _NonNegative = 0.0
    evaluation_timeout: _Seconds = 3600.0

    # Failure
    on_fatal: Literal["fail", "hold"] = "fail"
    require_update: bool = Field(
        default=False, description="A step without any training signal is an error."
    )
    on_any_rollout_failure: Literal["drop", "fail"] = Field(
        default="drop",
        description="What a completion that failed for good means; fail ends the run once those in "
        "flight have ended, and for an evaluation too.",
    )

    # State
    publication_tolerance: float | None = Field(
        default=None,
        gt=0,
        description="Mean difference of log-probabilities, in nats, between trainer and sampler "
        "of one policy; 0.1 by default, and 0.002 on the emulator.",
    )
    dcp_save_interval: _Natural = Field(
        default=0, description="Steps between checkpoints; 0: no periodic ones."
    )
    save_final_checkpoint: bool = True
    store: str = Field(
        default="runs", description="Folder or URL below which the run's own folder is made."
    )

    @field_validator("init_from_checkpoint")
    @classmethod
    def _check_checkpoint(cls, value: str | None) -> str | None:
        if value is not None:
            check_checkpoint(value)
        return value

    @field_validator("warm_start_from_adapter")
    @classmethod
    def _check_adapter(cls, value: str | None) -> str | None:
        if value is not None:
            check_adapter(value)
        return value

    @field_validator("output_model_id")
    @classmethod
    def _check_model_id(cls, value: str | None) -> str | None:
        if value is not None:
            check_model_id(value)
        return value

    @property
    def batch_samples(self) -> int:
        """B = P*G, completions per optimizer step."""
        return self.prompt_groups_per_step * self.completions_per_prompt

    @property
    def trainer_entrypoints(self) -> list[Entrypoint]:
        """The user's code that trainer workers run."""
        return [each for each in (self.prepare_batch, self.loss) if isinstance(each, Entrypoint)]

    @property
    def rollout_entrypoints(self) -> list[Entrypoint]:
        """The user's code that rollout workers run."""
        named = (self.rollout, self.dynamic_filter, self.evaluation, self.advantages)
        return [each for each in named if isinstance(each, Entrypoint)]

    @property
    def sent_loss_config(self) -> Settings:
        """The loss's settings with the defaults that are sent explicitly."""
        return effective_settings(self.loss, self.loss_config) if isinstance(self.loss, str) else {}

    @property
    def clip(self) -> Clip | None:
        """How the loss clips the policy ratio, where it does."""
        return clip_of(self.loss, self.loss_config) if isinstance(self.loss, str) else None

    @property
    def submits_whole_batches(self) -> bool:
        """Whether nothing is submitted before the batch is sealed."""
        return self.collect_full_batch or self.prepare_batch is not None

    @property
    def served_tolerance(self) -> float:
        """How far sampler and trainer may be apart: on the emulator both compute in float32, on
        GPUs they differ in kernels and precision."""
        if self.publication_tolerance is not None:
            return self.publication_tolerance
        return 0.002 if self.local else 0.1

    @property
    def local(self) -> bool:
        """Whether it trains on the emulator."""
        return self.backend in ("emulator", "emulator-dedicated")

    @property
    def dedicated(self) -> bool:
        """Whether it trains on a job of its own and samples from a deployment."""
        return self.backend in ("dedicated", "emulator-dedicated")

    @property
    def trainer_resource(self) -> TrainerResource:
        return self.trainer or TrainerResource()

    @property
    def deployment_resource(self) -> DeploymentResource:
        return self.deployment or DeploymentResource()

    @property
    def evaluates(self) -> bool:
        return self.evaluation is not None or self.evaluation_dataset is not None

    @model_validator(mode="wrap")
    @classmethod
    def _check_everything(cls, value: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """One error holds every problem: where some fields are wrong, the rules between the
        others are checked all the same."""
        value = _with_tokenizer(value)
        try:
            config = handler(value)
        except ValidationError as error:
            if not isinstance(value, dict):
                raise
            problems = [_restated(problem) for problem in error.errors(include_url=False)]
            wrong = {problem["loc"][0] for problem in problems}
            right = value.keys() & cls.model_fields.keys() - wrong
            draft = cls.model_construct(None, **{name: _read(name, value[name]) for name in right})
            problems += draft._broken_combinations(wrong)
        else:
            problems = config._broken_combinations(set())
            if not problems:
                return config
        raise ValidationError.from_exception_data(cls.__name__, problems)

    def _broken_combinations(self, wrong: set[int | str]) -> list[InitErrorDetails]:
        """The problems between fields, except where one of the fields is wrong by itself."""
        return [
            InitErrorDetails(
                type=PydanticCustomError("combination", text), loc=fields[:1], input=None
            )
            for fields, text in self._combination_problems()
            if wrong.isdisjoint(fields)
        ]

    def _combination_problems(self) -> Iterator[tuple[tuple[str, ...], str]]:
        """The broken rules between fields: the fields, first the one to change, and a text."""
        group = self.completions_per_prompt
        if self.min_group_size > group:
            yield (
                ("min_group_size", "completions_per_prompt"),
                f"{self.min_group_size} is above completions_per_prompt, which is {group}",
            )
        limit = self.max_concurrency_rollout_sample
        if limit is not None and limit < group:
            yield (
                ("max_concurrency_rollout_sample", "completions_per_prompt"),
                f"{limit} can't hold one whole row: completions_per_prompt is {group}",
            )
        if group == 1 and isinstance(self.advantages, str):
            yield (
                ("completions_per_prompt", "advantages"),
                f"a group of one has no {self.advantages} advantage: take at least 2, or name an "
                "`advantages` function of your own that is defined for one reward",
            )
        yield from self._loss_problems()
        if self.max_seq_len is not None and self.max_seq_len < 2:
            yield ("max_seq_len",), "must leave room for a prompt and a token"
        if self.evaluation is not None and self.evaluation_dataset is not None:
            yield (
                ("evaluation", "evaluation_dataset"),
                "excludes evaluation_dataset: a function evaluates, or Everburn evaluates "
                "held-out rows",
            )
        if self.warm_start_from_adapter is not None and self.init_from_checkpoint is not None:
            yield (
                ("warm_start_from_adapter", "init_from_checkpoint"),
                "excludes init_from_checkpoint: a checkpoint brings its own weights",
            )
        if self.warm_start_from_adapter is not None and self.lora_rank == 0:
            yield (
                ("lora_rank", "warm_start_from_adapter"),
                "must be the adapter's rank, above 0, to start from an adapter",
            )
        if self.output_merged and self.output_model_id is None:
            yield ("output_merged", "output_model_id"), "is about a model: name its output_model_id"
        if self.output_merged and self.lora_rank == 0:
            yield ("output_merged", "lora_rank"), "all parameters are trained: there is no adapter"
        if self.output_merged and not self.dedicated:
            yield (
                ("output_merged", "backend"),
                "needs a trainer job of the run's own: serverless training exports adapters only",
            )
        if self.backend == "serverless" and self.lora_rank == 0:
            yield (
                ("lora_rank", "backend"),
                "backend 'serverless' trains LoRA adapters only: set a rank, for example 8",
            )
        if not self.local and self.tokenizer_model is None:
            yield (
                ("tokenizer_model", "backend"),
                f"backend {self.backend!r} needs it, for example 'Qwen/Qwen3.8-27B'",
            )
        yield from self._resource_problems()

    def _resource_problems(self) -> Iterator[tuple[tuple[str, ...], str]]:
        """Broken rules of `trainer` and `deployment`."""
        if not self.dedicated:
            for name in ("trainer", "deployment"):
                if getattr(self, name) is not None:
                    yield (
                        (name, "backend"),
                        f"belongs to backend 'dedicated' (or 'emulator-dedicated'), not to "
                        f"{self.backend!r}",
                    )
            return
        trainer, deployment = self.trainer_resource, self.deployment_resource
        if self.backend == "dedicated" and not (
            trainer.training_shape or deployment.shape or deployment.deployment_id
        ):
            yield (
                ("trainer", "deployment", "backend"),
                "name a training_shape, or for the deployment a shape or the deployment_id of an "
                "existing one: nothing else says which hardware serves the rollouts",
            )
        if deployment.tokenizer_model not in (None, self.tokenizer_model):
            yield (
                ("deployment", "tokenizer_model"),
                f"its tokenizer_model {deployment.tokenizer_model!r} isn't the run's, which is "
                f"{self.tokenizer_model!r}: a run has one tokenizer, so name it in one place",
            )
        if deployment.weight_sync_scope == "per_deployment" and trainer.job_id is not None:
            yield (
                ("deployment", "trainer"),
                "weight_sync_scope 'per_deployment' is settled when the trainer job is made: it "
                "can't be had with a job_id to attach to",
            )

    def _loss_problems(self) -> Iterator[tuple[tuple[str, ...], str]]:
        if isinstance(self.loss, str):
            for problem in settings_problems(self.loss, self.loss_config):
                yield ("loss_config", "loss"), problem
        elif self.loss_config:
            yield (
                ("loss_config", "loss"),
                "belongs to the service's losses; a Python loss gets its settings as its kwargs",
            )

    def origin_problem(self) -> str | None:
        """Why a new run can't start from what it names, or None: only a run that exists has
        checkpoints of its own."""
        name = self.init_from_checkpoint
        if name is None or not is_bare_name(name):
            return None
        return (
            f"init_from_checkpoint: {name!r} is the name of a checkpoint within a run, and a new "
            "run has none: give the full path, as it was printed when it was saved, or go on with "
            f"that run by `everburn resume RUN --set init_from_checkpoint={name}`"
        )

    def warnings(self) -> list[str]:
        """Settings that run, but not as their author probably meant."""
        notes = []
        limit = self.max_concurrency_rollout_sample
        if limit is not None:
            needed = math.ceil(limit / self.batch_samples) - 1
            if self.max_head_offpolicy_versions < needed:
                notes.append(
                    f"max_concurrency_rollout_sample={limit} can never fill: with batches of "
                    f"{self.batch_samples} completions it takes max_head_offpolicy_versions >= "
                    f"{needed}, and it is {self.max_head_offpolicy_versions}"
                )
        if isinstance(self.loss, str):
            for key in unknown_settings(self.loss, self.loss_config):
                notes.append(
                    f"loss_config.{key} isn't a setting of {self.loss} that Everburn knows; it is "
                    "passed through as it is"
                )
        if self.loss == "gspo" and self.grad_accumulation_normalization == "num_loss_tokens":
            notes.append(
                "loss gspo divides each sequence's loss by its length already, and "
                "grad_accumulation_normalization='num_loss_tokens' divides by the number of tokens "
                "once more: with 'num_sequences' a step is the mean over sequences, as published"
            )
        if self.temperature == 0:
            notes.append("temperature=0: all completions of a row are alike and train nothing")
        return notes


def _with_tokenizer(value: Any) -> Any:
    """The recipe's configurations name the tokenizer with the deployment; a run has it by itself,
    whatever it trains on."""
    deployment = value.get("deployment") if isinstance(value, dict) else None
    named = deployment.get("tokenizer_model") if isinstance(deployment, dict) else None
    if not isinstance(named, str) or value.get("tokenizer_model") is not None:
        return value
    return value | {"tokenizer_model": named}


def parse_config(value: object) -> RunConfig:
    """Validate a decoded JSON value.

    Raises:
        ConfigError: with every problem and its path, one a line.
    """
    if not isinstance(value, dict):
        raise ConfigError(
            f"a run's configuration is a JSON object, not {type(value).__name__}: "
            "see examples/arithmetic/run.json"
        )
    size = len(json.dumps(value))
    if size > MAX_CONFIG_BYTES:
        raise ConfigError(
            f"the configuration has {size} bytes, more than {MAX_CONFIG_BYTES}: keep rows and "
            "texts in files and name them"
        )
    try:
        return RunConfig.model_validate(value)
    except ValidationError as error:
        raise ConfigError(describe_problems(error, value)) from None


def describe_problems(error: ValidationError, value: object) -> str:
    """All problems that validating `value` found, one a line, each with the field's path."""
    texts: dict[str, list[str]] = {}
    for problem in error.errors(include_url=False):
        path = _path(problem, value)
        texts.setdefault(path, []).append(_describe(problem, path))
    # A union complains once per alternative: that is one problem.
    lines = [f"{path}: {'; or '.join(dict.fromkeys(found))}" for path, found in texts.items()]
    count = f"{len(lines)} problem{'s' * (len(lines) > 1)}"
    return "\n  ".join([f"{count} in the configuration:", *lines])


def _path(problem: ErrorDetails, value: object) -> str:
    """The dotted path as the author of `value` wrote it: without the names that pydantic gives
    to a union's alternatives and to the parts of a bare entry point."""
    first, *others = problem["loc"]
    parts = [first]
    below = value[first] if isinstance(value, dict) and first in value else None
    for part in others:
        is_key = isinstance(below, dict) and part in below
        is_index = isinstance(below, list) and isinstance(part, int)
        if is_key or is_index:
            below = cast(Any, below)[part]
        if is_key or is_index or problem["type"] == "missing":
            parts.append(part)
    return ".".join(str(part) for part in parts)


def _describe(problem: ErrorDetails, path: str) -> str:
    if problem["type"] == "extra_forbidden":
        return f"no such field{_suggest(path)}"
    text = problem["msg"].removeprefix("Value error, ")
    given = problem["input"]
    already_named = isinstance(given, str) and repr(given) in text
    if already_named or not isinstance(given, str | int | float | bool):
        return text
    return f"{text} (got {given!r})"


def _suggest(path: str) -> str:
    from difflib import get_close_matches

    parent, _, name = path.rpartition(".")
    owner = RESOURCES.get(parent, Entrypoint) if parent else RunConfig
    close = get_close_matches(name, owner.model_fields, n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _read(name: str, value: Any) -> Any:
    """A right field's value as the rules between fields know it."""
    resource = RESOURCES.get(name)
    return resource.model_validate(value) if resource and value is not None else value


def _restated(problem: ErrorDetails) -> InitErrorDetails:
    """A problem in the form from which a new error can be made, its text unchanged."""
    kind = PydanticCustomError(problem["type"], problem["msg"])
    return InitErrorDetails(type=kind, loc=problem["loc"], input=problem["input"])


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
