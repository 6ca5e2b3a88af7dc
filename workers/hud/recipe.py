"""`everburn hud train`: the options of the HUD x Fireworks recipe, as a run's configuration.

Owns the options, their defaults per backend, the checks in the recipe's order, and what a RunConfig
makes of them. Doesn't own tasks and rollouts (everburn/hud), the recipe's files (files.py), or
the run.
"""

import math
import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from everburn.config import ConfigError, parse_config
from workers import dotenv
from workers.cli.run_file import RunFile
from workers.errors import BadInputError

Backend = Literal["fireworks", "emulator"]
LossFn = Literal["importance_sampling", "ppo", "cispo"]

ARITHMETIC = "examples.arithmetic.hud_environment"
"""The bundled tasks and their environment."""
KEY_ENV = "FIREWORKS_API_KEY"
OVERHEAD = 60.0
"""Seconds that an environment may take besides sampling, in its turn."""


@dataclass(frozen=True)
class Profile:
    """What a backend's defaults are; every field but `template` is an option."""

    base_model: str
    tokenizer_model: str | None
    renderer: str
    lora_rank: int
    max_seq_len: int
    learning_rate: float
    steps: int
    tasks_per_step: int
    group_size: int
    max_tokens: int
    max_concurrent: int
    eval_tasks: int
    min_a: int
    max_a: int
    min_b: int
    max_b: int
    template: Literal["multiply", "add"]


FIREWORKS = Profile(
    base_model="accounts/fireworks/models/qwen3p8-27b",
    tokenizer_model="Qwen/Qwen3.8-27B",
    renderer="qwen3_8_disable_thinking",
    lora_rank=8,
    max_seq_len=8192,
    learning_rate=2.5e-5,
    steps=30,
    tasks_per_step=8,
    group_size=8,
    max_tokens=2048,
    max_concurrent=4,
    eval_tasks=16,
    min_a=1000,
    max_a=9999,
    min_b=1000,
    max_b=9999,
    template="multiply",
)
EMULATOR = Profile(
    base_model="examples.arithmetic.base_model:recipe",
    tokenizer_model=None,
    renderer="plain",
    lora_rank=32,
    max_seq_len=256,
    learning_rate=1e-3,
    steps=15,
    tasks_per_step=16,
    group_size=8,
    max_tokens=10,
    max_concurrent=32,
    eval_tasks=128,
    min_a=10,
    max_a=99,
    min_b=10,
    max_b=99,
    template="add",
)
PROFILES: dict[Backend, Profile] = {"fireworks": FIREWORKS, "emulator": EMULATOR}


@dataclass(frozen=True)
class HudOptions:
    """The recipe's options with their values; none of them is secret."""

    backend: Backend
    base_model: str
    tokenizer_model: str | None
    renderer: str | None
    lora_rank: int
    max_seq_len: int
    learning_rate: float
    temperature: float
    sampling_timeout: float
    checkpoint_every: int
    resume_from: str | None
    seed: int
    output_dir: str
    taskset: str | None
    tasks_file: str | None
    env_path: str | None
    steps: int
    tasks_per_step: int
    group_size: int
    max_tokens: int
    max_concurrent: int
    eval_tasks: int
    eval_before: bool
    loss_fn: LossFn
    calibrate: bool
    require_update: bool
    debug_samples: int
    min_a: int
    max_a: int
    min_b: int
    max_b: int

    @classmethod
    def of(cls, given: dict[str, Any]) -> "HudOptions":
        """Options as given on the command line, where None means the backend's default. How another
        base model is spoken to has none, except on the emulator, whose models bring it along."""
        defaults = asdict(PROFILES[given["backend"]])
        other = given.get("base_model") not in (None, defaults["base_model"])
        if other and given["backend"] == "fireworks":
            del defaults["tokenizer_model"], defaults["renderer"]
        names = [field.name for field in fields(cls)]
        chosen = {name: given[name] for name in names if given.get(name) is not None}
        values: dict[str, Any] = {name: chosen.get(name, defaults.get(name)) for name in names}
        return cls(**values)

    def check(self, folder: Path) -> None:
        """Everything that can be checked without looking at tasks; in the recipe's order.

        Raises:
            BadInputError
        """
        if self.taskset is not None and self.tasks_file is not None:
            raise BadInputError("--taskset and --tasks-file exclude each other")
        self._check_key(folder)
        counts = {
            "--steps": self.steps,
            "--tasks-per-step": self.tasks_per_step,
            "--max-tokens": self.max_tokens,
            "--max-concurrent": self.max_concurrent,
            "--eval-tasks": self.eval_tasks,
            "--checkpoint-every": self.checkpoint_every,
        }
        too_small = [flag for flag, value in counts.items() if value < 1]
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
        """Values with which nothing could be sampled, or only what the model doesn't understand."""
        spoken = {"--tokenizer-model": self.tokenizer_model, "--renderer": self.renderer}
        missing = [flag for flag, value in spoken.items() if value is None]
        if self.backend == "fireworks" and missing:
            raise BadInputError(
                f"--base-model {self.base_model} needs its own {' and '.join(missing)}: prompts "
                f"are rendered here, and the defaults are {FIREWORKS.base_model}'s"
            )
        if not 0 < self.sampling_timeout < math.inf:
            raise BadInputError("--sampling-timeout must be a number of seconds above 0")
        if self.max_tokens >= self.max_seq_len:
            raise BadInputError(
                f"--max-tokens {self.max_tokens} must be below --max-seq-len {self.max_seq_len}, "
                "which the prompt needs a part of"
            )

    def task_source(self, part: str, folder: Path) -> dict[str, Any]:
        """Keyword arguments of everburn.hud.tasks:rows. Calibration holds nothing out."""
        template = PROFILES[self.backend].template
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
        """The run. Raises BadInputError for values that no run can have."""
        values = self._values(folder)
        try:
            config = parse_config(values)
        except ConfigError as error:
            raise BadInputError(str(error)) from None
        if config.origin_problem() is not None:
            raise BadInputError(
                f"--resume-from {self.resume_from}: give the checkpoint's whole path, as it was "
                "printed when it was saved"
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
            # Every step trains on the same tasks.
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
            "rollout_timeout": self._patience(self.tasks_per_step * self.group_size),
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
                # At the end only, and at the start where that is asked for.
                "evaluation_interval": self.steps + 1,
                "initial_evaluation": self.eval_before,
                "evaluation_temperature": 0.0,
                "evaluation_timeout": self._patience(self.eval_tasks),
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

    def _patience(self, rollouts: int) -> float:
        """Seconds that the last of some rollouts may take: it waits for an environment first."""
        rounds = math.ceil(rollouts / self.max_concurrent)
        return rounds * (self.sampling_timeout + OVERHEAD)

    def _check_key(self, folder: Path) -> None:
        dotenv.load(folder)
        if self.backend == "fireworks" and not os.environ.get(KEY_ENV, "").strip():
            raise BadInputError(
                f"set {KEY_ENV} before training on Fireworks, in the environment or in a .env file "
                "here; `--backend emulator` needs no key"
            )


def _rows(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {"name": "everburn.hud.tasks:rows", "kwargs": kwargs}
