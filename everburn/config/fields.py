"""The fields of a configuration: names, types, bounds, defaults, and values derived from them.

Doesn't own the rules between fields (rules.py).
"""

from typing import Annotated, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
)

from everburn.config.names import AdapterName, CheckpointName, ModelId
from everburn.config.provisioning import DeploymentProvisioning, TrainerProvisioning
from everburn.config.sources import AdvantageSource, DatasetSource, Entrypoint, LossSource
from everburn.learning.losses import (
    Clip,
    LossConfig,
    clip_of,
    effective_settings,
)

MAX_COMPLETIONS = 512
"""Per row: each is an activity of one workflow, and a server limits the pending ones."""


PROVISIONING: dict[str, type[BaseModel]] = {
    "trainer": TrainerProvisioning,
    "deployment": DeploymentProvisioning,
}
"""Fields that are objects with their own fields."""

_Count = Annotated[int, Field(ge=1)]
_Natural = Annotated[int, Field(ge=0)]
_Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class RunFields(BaseModel):
    """The fields alone; RunConfig checks their combinations."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    # The task
    rollout: Entrypoint = Field(
        description="`make_rollout_fn(setup, **kwargs) -> rollout_fn`, once per worker and run."
    )
    dataset: DatasetSource = Field(description="The training rows.")
    extras: dict[str, JsonValue] = Field(
        default_factory=dict, description="Passed to the rollout factory as `setup.extras`."
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
    seed: _Natural = Field(default=0, description="Seed of the row order and of a new adapter.")
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
        description="A Fireworks service, or the local emulator in place of either.",
    )
    trainer: TrainerProvisioning | None = Field(
        default=None, description="The trainer job of dedicated training."
    )
    deployment: DeploymentProvisioning | None = Field(
        default=None, description="The deployment of dedicated training."
    )
    init_from_checkpoint: CheckpointName | None = Field(
        default=None,
        description="Weights and optimizer to start from: another run's checkpoint, or for "
        "`everburn resume` one of the run's own by name.",
    )
    warm_start_from_adapter: AdapterName | None = Field(
        default=None, description="LoRA weights to start from, with a fresh optimizer."
    )
    output_model_id: ModelId | None = Field(
        default=None, description="The id under which the final policy becomes a model."
    )
    output_merged: bool = Field(
        default=False,
        description="Dedicated training: promote an adapter merged into its base model.",
    )
    base_url: str | None = Field(
        default=None,
        description="URL of the training API; by default that of Fireworks or the emulator.",
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
        default=True, description="A completion that is run again repeats no recorded call."
    )
    rollout_timeout: _Seconds = Field(default=3600.0, description="Per completion, in seconds.")

    # Optimization
    advantages: AdvantageSource = Field(
        default="group_zscore",
        description="Per group; `advantages(rewards, **kwargs)` returns one per completion.",
    )
    loss: LossSource = Field(
        default="grpo",
        description="A service loss, or `loss(data, logprobs, **kwargs) -> (loss, metrics)`.",
    )
    loss_config: LossConfig = Field(
        default_factory=dict, description="The service's loss_fn_config."
    )
    router_replay: bool = Field(
        default=False,
        description="For models with experts: train with the routing that sampling used.",
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
        default=True, description="Evaluate the policy with which the run starts or is resumed."
    )
    evaluation_temperature: _NonNegative = 0.0
    evaluation_timeout: _Seconds = 3600.0

    # Failure
    on_fatal: Literal["auto", "fail", "hold"] = Field(
        default="auto",
        description="On a fatal error. auto: an error in the run's code, data or configuration "
        "ends the run, one of the training service holds it until a person resumes it.",
    )
    require_update: bool = Field(
        default=False, description="A step without any training signal is an error."
    )
    on_any_rollout_failure: Literal["drop", "fail"] = Field(
        default="drop",
        description="When a completion has failed finally. fail: end the run once completions in "
        "flight have ended; for evaluations too.",
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
        default="runs", description="Folder or URL in which the run's folder is created."
    )

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
    def sent_loss_config(self) -> LossConfig:
        """The loss's settings, including defaults that are sent explicitly."""
        return effective_settings(self.loss, self.loss_config) if isinstance(self.loss, str) else {}

    @property
    def clip(self) -> Clip | None:
        """How the loss clips the policy ratio; None if it doesn't."""
        return clip_of(self.loss, self.loss_config) if isinstance(self.loss, str) else None

    @property
    def submits_whole_batches(self) -> bool:
        """Whether nothing is submitted before the batch is sealed."""
        return self.collect_full_batch or self.prepare_batch is not None

    @property
    def served_tolerance(self) -> float:
        """How much sampler and trainer may differ: on the emulator both compute in float32, on GPUs
        kernels and precision differ."""
        if self.publication_tolerance is not None:
            return self.publication_tolerance
        return 0.002 if self.local else 0.1

    @property
    def local(self) -> bool:
        """Whether it trains on the emulator."""
        return self.backend in ("emulator", "emulator-dedicated")

    @property
    def dedicated(self) -> bool:
        """Whether it trains on its own job and samples from a deployment."""
        return self.backend in ("dedicated", "emulator-dedicated")

    @property
    def trainer_provisioning(self) -> TrainerProvisioning:
        return self.trainer or TrainerProvisioning()

    @property
    def deployment_provisioning(self) -> DeploymentProvisioning:
        return self.deployment or DeploymentProvisioning()

    @property
    def evaluates(self) -> bool:
        return self.evaluation is not None or self.evaluation_dataset is not None
