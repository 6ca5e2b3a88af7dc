"""The options of `everburn hud train`, and the run that they describe.

HudOptions is the only place that states an option: its type, default, help and checks; cli.py
generates the command line from it. Doesn't own tasks and rollouts (everburn/hud), the recipe's
files (files.py), or the run.
"""

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from everburn.config import ConfigError, parse_config
from workers import dotenv
from workers.cli.run_file import RunFile
from workers.errors import BadInputError

ARITHMETIC = "examples.arithmetic.hud_environment"
"""The bundled tasks and their environment."""
KEY_ENV = "FIREWORKS_API_KEY"
OVERHEAD = 60.0
"""Seconds that an environment may take in addition to sampling."""


@dataclass(frozen=True)
class OnEmulator:
    """An option's default with `--backend emulator`, if it differs."""

    default: Any


POSITIVE = object()
"""Marks an option that must be at least 1. Checked by `HudOptions.check`, not by pydantic: the
recipe checks the API key first."""
Count = Annotated[int, POSITIVE]


class HudOptions(BaseModel):
    """The recipe's options; none of them is secret."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    backend: Literal["fireworks", "emulator"] = Field(
        "fireworks", description="Where the model is trained"
    )
    base_model: Annotated[str, OnEmulator("examples.arithmetic.base_model:recipe")] = Field(
        "accounts/fireworks/models/qwen3p8-27b", description="Base model"
    )
    tokenizer_model: Annotated[str | None, OnEmulator(None)] = Field(
        "Qwen/Qwen3.8-27B", description="Hugging Face id or folder of the model's tokenizer"
    )
    renderer: Annotated[str | None, OnEmulator("plain")] = Field(
        "qwen3_8_disable_thinking", description="How messages become tokens"
    )
    lora_rank: Annotated[int, OnEmulator(32)] = Field(8, description="LoRA rank")
    max_seq_len: Annotated[int, OnEmulator(256)] = Field(
        8192, description="Most tokens of prompt and answer together"
    )
    learning_rate: Annotated[float, OnEmulator(1e-3)] = Field(
        2.5e-5, description="Adam's learning rate"
    )
    temperature: float = Field(
        1.0, description="Sampling temperature in training; evaluations use 0"
    )
    sampling_timeout: float = Field(600.0, description="Seconds for one sample")
    resume_from: str | None = Field(
        None, description="Path of the training checkpoint to start from"
    )
    seed: int = Field(0, description="Seed of the tasks, their split and the adapter")
    output_dir: str = Field(
        "runs/fireworks-serverless", description="Folder for the recipe's files"
    )
    taskset: str | None = Field(None, description="Name of a task set on the HUD platform")
    tasks_file: str | None = Field(
        None, description="Local tasks: a .py, .json or .jsonl file, or a folder"
    )
    env_path: str | None = Field(None, description="File of the environment of --tasks-file")
    steps: Annotated[Count, OnEmulator(15)] = Field(30, description="Optimizer steps")
    tasks_per_step: Annotated[Count, OnEmulator(16)] = Field(8, description="Tasks per step")
    group_size: int = Field(8, description="Rollouts per task")
    max_tokens: Annotated[Count, OnEmulator(10)] = Field(2048, description="Most tokens per answer")
    max_concurrent: Annotated[Count, OnEmulator(32)] = Field(
        4, description="Most environments at once in each rollout worker"
    )
    eval_tasks: Annotated[Count, OnEmulator(128)] = Field(16, description="Held-out tasks")
    checkpoint_every: Count = Field(5, description="Steps between checkpoints")
    eval_before: bool = Field(False, description="Evaluate the initial policy too")
    loss_fn: Literal["importance_sampling", "ppo", "cispo"] = Field(
        "importance_sampling", description="Policy loss"
    )
    calibrate: bool = Field(
        False, description="Roll out one batch, report the spread of its rewards, and end"
    )
    require_update: bool = Field(
        False, description="Fail at a step in which no group has different rewards"
    )
    debug_samples: int = Field(0, description="Answers to print after --calibrate")
    min_a: Annotated[int, OnEmulator(10)] = Field(1000, description="Smallest first operand")
    max_a: Annotated[int, OnEmulator(99)] = Field(9999, description="Largest first operand")
    min_b: Annotated[int, OnEmulator(10)] = Field(1000, description="Smallest second operand")
    max_b: Annotated[int, OnEmulator(99)] = Field(9999, description="Largest second operand")

    @classmethod
    def default(cls, name: str, backend: str = "fireworks") -> Any:
        """An option's default with a backend."""
        field = cls.model_fields[name]
        differing = [each.default for each in field.metadata if isinstance(each, OnEmulator)]
        return differing[0] if differing and backend == "emulator" else field.default

    @model_validator(mode="before")
    @classmethod
    def _fill_defaults(cls, given: dict[str, Any]) -> dict[str, Any]:
        """Another base model at Fireworks has no default tokenizer and renderer; a model of the
        emulator brings its tokenizer along."""
        if given.get("backend") == "emulator":
            return {name: cls.default(name, "emulator") for name in cls.model_fields} | given
        usual = cls.default("base_model")
        if given.get("base_model", usual) != usual:
            return {"tokenizer_model": None, "renderer": None} | given
        return given

    def check(self, folder: Path) -> None:
        """Check all that can be checked without reading tasks, in the recipe's order.

        Raises:
            BadInputError
        """
        if self.taskset is not None and self.tasks_file is not None:
            raise BadInputError("--taskset and --tasks-file exclude each other")
        self._check_key(folder)
        too_small = [
            flag(name)
            for name, field in type(self).model_fields.items()
            if POSITIVE in field.metadata and getattr(self, name) < 1
        ]
        if too_small:
            raise BadInputError(f"{', '.join(too_small)} must be at least 1")
        if self.group_size < 2:
            raise BadInputError(
                "--group-size must be at least 2: GRPO learns from the spread of rewards in a group"
            )
        if self.min_a > self.max_a or self.min_b > self.max_b:
            raise BadInputError("--min-a and --min-b must not exceed --max-a and --max-b")
        if self.debug_samples < 0:
            raise BadInputError("--debug-samples must be at least 0")
        if self.tasks_file is not None and self.env_path is None:
            raise BadInputError("--tasks-file needs --env-path")
        if self.env_path is not None and self.tasks_file is None:
            raise BadInputError("--env-path needs --tasks-file")
        if self.eval_before and self.calibrate:
            raise BadInputError("--eval-before excludes --calibrate, which evaluates nothing")
        self._check_sampling()

    def _check_sampling(self) -> None:
        missing = [
            flag(name) for name in ("tokenizer_model", "renderer") if getattr(self, name) is None
        ]
        if self.backend == "fireworks" and missing:
            raise BadInputError(
                f"--base-model {self.base_model} needs its own {' and '.join(missing)}: prompts "
                f"are rendered here, and the defaults are for {self.default('base_model')}"
            )
        if not 0 < self.sampling_timeout < math.inf:
            raise BadInputError("--sampling-timeout must be a number of seconds above 0")
        if self.max_tokens >= self.max_seq_len:
            raise BadInputError(
                f"--max-tokens {self.max_tokens} must be below --max-seq-len {self.max_seq_len}, "
                "which includes the prompt"
            )

    def task_source(self, part: str, folder: Path) -> dict[str, Any]:
        """Keyword arguments of everburn.hud.tasks:rows. Calibration holds nothing out."""
        template = "multiply" if self.backend == "fireworks" else "add"
        source: dict[str, Any]
        if self.taskset is not None:
            source = {"taskset": self.taskset}
        elif self.tasks_file is not None:
            source = {"tasks_file": str(folder / self.tasks_file)}
        else:
            a, b = [self.min_a, self.max_a], [self.min_b, self.max_b]
            kwargs = {"template": template, "a": a, "b": b}
            source = {"function": {"name": f"{ARITHMETIC}:tasks", "kwargs": kwargs}}
        held_out = 0 if self.calibrate else self.eval_tasks
        counts = {"training": self.tasks_per_step, "held_out": held_out, "seed": self.seed}
        return {"part": part} | counts | source

    def run_file(self, folder: Path) -> RunFile:
        """The run's configuration.

        Raises:
            BadInputError: a value isn't valid in a run.
        """
        values = self._values(folder)
        try:
            config = parse_config(values)
        except ConfigError as error:
            raise BadInputError(str(error)) from None
        if config.origin_problem() is not None:
            raise BadInputError(
                f"--resume-from {self.resume_from}: give the checkpoint's whole path, as printed "
                "when it was saved"
            )
        return RunFile("hud", values, config)

    def _values(self, folder: Path) -> dict[str, Any]:
        values: dict[str, Any] = {
            "rollout": {
                "name": "everburn.hud.rollouts:make_rollout_fn",
                "kwargs": {
                    "renderer": self.renderer,
                    "max_environments": self.max_concurrent,
                    "sampling_timeout": self.sampling_timeout,
                }
                | self._environments(folder),
            },
            "dataset": _rows(self.task_source("training", folder)),
            # One epoch per step: every step trains on the same tasks.
            "epochs": self.steps,
            "shuffle": False,
            "seed": self.seed,
            "backend": "serverless" if self.backend == "fireworks" else "emulator",
            "base_model": self.base_model,
            "tokenizer_model": self.tokenizer_model,
            "lora_rank": self.lora_rank,
            "completions_per_prompt": self.group_size,
            "prompt_groups_per_step": self.tasks_per_step,
            "max_head_offpolicy_versions": 0,
            "collect_full_batch": True,
            "max_completion_tokens": self.max_tokens,
            "max_seq_len": self.max_seq_len,
            "temperature": self.temperature,
            "rollout_timeout": self._timeout(self.tasks_per_step * self.group_size),
            "loss": self.loss_fn,
            "learning_rate": self.learning_rate,
            "adam_beta1": 0.9,
            "adam_beta2": 0.95,
            "adam_eps": 1e-8,
            "weight_decay": 0.0,
            "grad_accumulation_normalization": "none",
            "require_update": self.require_update,
            "on_any_rollout_failure": "fail",
            "dcp_save_interval": self.checkpoint_every,
            "store": str(folder / "runs"),
        }
        if not self.calibrate:
            values |= {
                "evaluation_dataset": _rows(self.task_source("held_out", folder)),
                # Longer than the run: evaluates at the end only, or also at the start.
                "evaluation_interval": self.steps + 1,
                "initial_evaluation": self.eval_before,
                "evaluation_temperature": 0.0,
                "evaluation_timeout": self._timeout(self.eval_tasks),
            }
        if self.resume_from is not None:
            values["init_from_checkpoint"] = self.resume_from
        return values

    def _environments(self, folder: Path) -> dict[str, Any]:
        if self.taskset is not None:
            return {"hosted": True}
        if self.env_path is not None:
            return {"env_path": str(folder / self.env_path)}
        return {"environment": f"{ARITHMETIC}:environment"}

    def _timeout(self, rollouts: int) -> float:
        """Seconds for the last of `rollouts`, including its wait for an environment."""
        rounds = math.ceil(rollouts / self.max_concurrent)
        return rounds * (self.sampling_timeout + OVERHEAD)

    def _check_key(self, folder: Path) -> None:
        dotenv.load(folder)
        if self.backend == "fireworks" and not os.environ.get(KEY_ENV, "").strip():
            raise BadInputError(
                f"set {KEY_ENV} before training on Fireworks, in the environment or in ./.env; "
                "`--backend emulator` needs no key"
            )


def flag(name: str) -> str:
    """The command-line option of a field."""
    return f"--{name.replace('_', '-')}"


def _rows(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {"name": "everburn.hud.tasks:rows", "kwargs": kwargs}
