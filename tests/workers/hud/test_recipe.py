"""The options of `everburn hud train`: defaults, order of checks, and the run they describe."""

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from workers.cli.app import app
from workers.errors import BadInputError
from workers.hud.recipe import HudOptions


def options(**given: Any) -> HudOptions:
    return HudOptions.model_validate(given)


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FIREWORKS_API_KEY", "fw_secret")


def error_text(folder: Path, **given: Any) -> str:
    with pytest.raises(BadInputError) as caught:
        options(**given).check(folder)
    return str(caught.value)


def test_default_options() -> None:
    found = options()
    assert (found.base_model, found.tokenizer_model, found.renderer) == (
        "accounts/fireworks/models/qwen3p8-27b",
        "Qwen/Qwen3.8-27B",
        "qwen3_8_disable_thinking",
    )
    assert (found.lora_rank, found.max_seq_len, found.learning_rate) == (8, 8192, 2.5e-5)
    assert (found.steps, found.tasks_per_step, found.group_size) == (30, 8, 8)
    assert (found.max_tokens, found.max_concurrent, found.eval_tasks) == (2048, 4, 16)
    assert (found.min_a, found.max_a, found.min_b, found.max_b) == (1000, 9999, 1000, 9999)
    assert (found.resume_from, found.taskset, found.tasks_file, found.env_path) == (None,) * 4


def test_given_options_replace_the_defaults_of_each_backend() -> None:
    for backend in ("fireworks", "emulator"):
        found = options(backend=backend, steps=3, min_a=2, learning_rate=0.5)
        assert (found.steps, found.min_a, found.learning_rate) == (3, 2, 0.5)


def test_a_run_of_the_recipe(tmp_path: Path) -> None:
    file = options(steps=7, eval_tasks=5, max_concurrent=3).run_file(tmp_path)
    config = file.config
    assert (config.backend, config.base_model) == ("serverless", options().base_model)
    assert (config.epochs, config.shuffle, config.prompt_groups_per_step) == (7, False, 8)
    assert (config.completions_per_prompt, config.max_head_offpolicy_versions) == (8, 0)
    assert config.max_concurrency_rollout_sample is None
    assert config.rollout.kwargs["max_environments"] == 3
    assert config.rollout.kwargs["renderer"] == "qwen3_8_disable_thinking"
    assert config.collect_full_batch
    assert config.on_any_rollout_failure == "fail"
    assert (config.loss, config.grad_accumulation_normalization) == ("importance_sampling", "none")
    assert (config.adam_beta1, config.adam_beta2, config.adam_eps) == (0.9, 0.95, 1e-8)
    assert (config.weight_decay, config.lr_scheduler, config.grad_clip_norm) == (0, "constant", 0)
    assert (config.temperature, config.evaluation_temperature) == (1.0, 0.0)
    assert (config.dcp_save_interval, config.save_final_checkpoint) == (5, True)
    # Held-out tasks at the end only.
    assert config.evaluation_interval > config.epochs
    assert not config.initial_evaluation
    assert config.store == str(tmp_path / "runs")
    # 64 rollouts, three at once: the last one's turn comes after 21 others'.
    assert config.rollout_timeout >= 22 * 600
    assert config.warnings() == []


def test_options_reach_the_run(tmp_path: Path) -> None:
    config = (
        options(eval_before=True, require_update=True, loss_fn="cispo", temperature=0.7, seed=4)
        .run_file(tmp_path)
        .config
    )
    assert config.initial_evaluation
    assert config.require_update
    assert (config.loss, config.temperature, config.seed) == ("cispo", 0.7, 4)


def test_a_run_resumes_from_a_checkpoint_by_its_whole_path(tmp_path: Path) -> None:
    path = "everburn/run-98ec83701fcb40dfafceee798c1f312c/state-20"
    config = options(resume_from=path).run_file(tmp_path).config
    assert config.init_from_checkpoint == path
    with pytest.raises(BadInputError, match=r"--resume-from state-20: give .* whole path"):
        options(resume_from="state-20").run_file(tmp_path)


def arithmetic(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {"name": "examples.arithmetic.hud_environment:tasks", "kwargs": kwargs}


@pytest.mark.parametrize(
    ("given", "tasks", "environments"),
    [
        (
            {},
            {
                "function": arithmetic(
                    {"template": "multiply", "a": [1000, 9999], "b": [1000, 9999]}
                )
            },
            {"environment": "examples.arithmetic.hud_environment:environment"},
        ),
        (
            {"backend": "emulator", "min_a": 20},
            {"function": arithmetic({"template": "add", "a": [20, 99], "b": [10, 99]})},
            {"environment": "examples.arithmetic.hud_environment:environment"},
        ),
        (
            {"tasks_file": "mine/tasks.py", "env_path": "/else/env.py"},
            {"tasks_file": "/here/mine/tasks.py"},
            {"env_path": "/else/env.py"},
        ),
        ({"taskset": "mine"}, {"taskset": "mine"}, {"hosted": True}),
    ],
)
def test_three_task_sources_and_their_environments(
    given: dict[str, Any], tasks: dict[str, Any], environments: dict[str, Any]
) -> None:
    config = options(**given).run_file(Path("/here")).config
    counts = {"training": options(**given).tasks_per_step, "seed": 0}
    counts["held_out"] = options(**given).eval_tasks
    assert config.dataset.kwargs == {"part": "training"} | counts | tasks  # type: ignore[union-attr]
    assert config.evaluation_dataset.kwargs == {"part": "held_out"} | counts | tasks  # type: ignore[union-attr]
    assert environments.items() <= config.rollout.kwargs.items()


def test_calibration_holds_nothing_out(tmp_path: Path) -> None:
    config = options(calibrate=True).run_file(tmp_path).config
    assert config.dataset.kwargs["held_out"] == 0  # type: ignore[union-attr]
    assert config.evaluation_dataset is None


def test_the_key_is_checked_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FIREWORKS_API_KEY")
    assert error_text(tmp_path, steps=0).startswith("set FIREWORKS_API_KEY")
    assert error_text(tmp_path, backend="emulator", steps=0) == "--steps must be at least 1"
    (tmp_path / ".env").write_text("FIREWORKS_API_KEY=fw_from_file\n")
    assert error_text(tmp_path, steps=0) == "--steps must be at least 1"
    monkeypatch.delenv("FIREWORKS_API_KEY")


def test_checks_come_in_the_recipes_order(tmp_path: Path) -> None:
    wrong: dict[str, Any] = {
        "steps": 0,
        "eval_tasks": -1,
        "checkpoint_every": 0,
        "group_size": 1,
        "min_a": 9,
        "max_a": 8,
        "debug_samples": -1,
        "tasks_file": "tasks.py",
        "eval_before": True,
        "calibrate": True,
    }
    assert error_text(tmp_path, **wrong) == (
        "--steps, --eval-tasks, --checkpoint-every must be at least 1"
    )
    for names, expected in [
        (("steps", "eval_tasks", "checkpoint_every"), "--group-size must be at least 2"),
        (("group_size",), "--min-a and --min-b must not exceed --max-a and --max-b"),
        (("min_a", "max_a"), "--debug-samples must be at least 0"),
        (("debug_samples",), "--tasks-file needs --env-path"),
    ]:
        for name in names:
            del wrong[name]
        assert error_text(tmp_path, **wrong).startswith(expected)
    wrong["env_path"] = wrong.pop("tasks_file")
    assert error_text(tmp_path, **wrong) == "--env-path needs --tasks-file"
    del wrong["env_path"]
    assert error_text(tmp_path, **wrong).startswith("--eval-before excludes --calibrate")
    del wrong["calibrate"]
    options(**wrong).check(tmp_path)


@pytest.mark.parametrize(
    "flag", ["steps", "tasks_per_step", "max_tokens", "max_concurrent", "eval_tasks"]
)
def test_counts_are_at_least_one(tmp_path: Path, flag: str) -> None:
    text = error_text(tmp_path, **{flag: 0})
    assert text == f"--{flag.replace('_', '-')} must be at least 1"


def test_two_task_sources_are_rejected(tmp_path: Path) -> None:
    text = error_text(tmp_path, taskset="mine", tasks_file="tasks.py", env_path="env.py")
    assert text == "--taskset and --tasks-file exclude each other"


def test_tasks_are_checked_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("hud", reason="needs the extra: pip install 'everburn[hud]'")
    monkeypatch.chdir(tmp_path)
    arguments = ["hud", "train", "--min-a", "1", "--max-a", "2", "--min-b", "1", "--max-b", "2"]
    done = CliRunner().invoke(app, arguments)
    assert isinstance(done.exception, BadInputError)
    assert "24 arithmetic tasks are needed, but the operand ranges hold only 4" in str(
        done.exception
    )
    done = CliRunner().invoke(app, ["hud", "train", "--taskset", "mine"])
    assert "set HUD_API_KEY" in str(done.exception)
    assert list(tmp_path.iterdir()) == []


def test_another_base_model_needs_its_own_tokenizer_and_renderer(tmp_path: Path) -> None:
    other: dict[str, Any] = {"base_model": "accounts/fireworks/models/other"}
    assert error_text(tmp_path, **other) == (
        "--base-model accounts/fireworks/models/other needs its own --tokenizer-model and "
        "--renderer: prompts are rendered here, and the defaults are for "
        "accounts/fireworks/models/qwen3p8-27b"
    )
    other["tokenizer_model"] = "Other/Other"
    assert "needs its own --renderer:" in error_text(tmp_path, **other)
    options(**other, renderer="default").check(tmp_path)
    options(base_model=options().base_model).check(tmp_path)
    # A model of the emulator brings its tokenizer along.
    options(backend="emulator", base_model="accounts/everburn/models/tiny").check(tmp_path)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"sampling_timeout": 0.0}, "--sampling-timeout must be a number of seconds above 0"),
        ({"sampling_timeout": -1.0}, "--sampling-timeout must be a number of seconds above 0"),
        ({"sampling_timeout": float("inf")}, "--sampling-timeout must be a number of seconds"),
        ({"sampling_timeout": float("nan")}, "--sampling-timeout must be a number of seconds"),
        ({"max_tokens": 8192}, "--max-tokens 8192 must be below --max-seq-len 8192"),
        ({"max_seq_len": 100}, "--max-tokens 2048 must be below --max-seq-len 100"),
    ],
)
def test_values_that_make_sampling_impossible(
    tmp_path: Path, given: dict[str, Any], expected: str
) -> None:
    assert error_text(tmp_path, **given).startswith(expected)
    # The recipe's own checks come first.
    assert error_text(tmp_path, **given, steps=0) == "--steps must be at least 1"
