"""README.md: its rollout function runs, its configuration is one, its commands exist."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import typer

from everburn import RolloutRun
from everburn.config import parse_config
from everburn.rollouts.validation import validate_rollout
from support.command_line import ROOT
from support.policies import ScriptedPolicy, qwen3_tokenizer, setup_of
from workers.cli.app import app

PAGE = (ROOT / "README.md").read_text()


def block(language: str) -> str:
    (text,) = re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.DOTALL)
    return str(text)


@pytest.mark.parametrize(("answer", "reward"), [("4", 1.0), ("5", 0.0)])
async def test_the_rollout_function_runs(tmp_path: Path, answer: str, reward: float) -> None:
    names: dict[str, Any] = {}
    exec(block("python"), names)
    tokenizer = qwen3_tokenizer(tmp_path)
    setup = setup_of(ScriptedPolicy(tokenizer, [f" {answer}<|im_end|>"]), tokenizer)
    rollout_fn = names["make_rollout_fn"](setup)
    run = await rollout_fn({"question": "2+2=", "answer": "4"})
    assert isinstance(run, RolloutRun)
    assert [segment.reward for segment in validate_rollout(run, "here").segments] == [reward]


def test_the_configuration_is_one() -> None:
    config = parse_config(json.loads(block("json")))
    assert config.rollout.name == "my_task:make_rollout_fn" and config.warnings() == []


def test_the_commands_exist() -> None:
    command = typer.main.get_command(app)
    commands = set(getattr(command, "commands", {}))
    named = set(re.findall(r"`(?:\.venv/bin/)?everburn ([a-z]+)", PAGE))
    assert {"run", "resume", "fork", "verify", "doctor"} <= named <= commands
