"""Tests for the live service. If FIREWORKS_API_KEY is set they use it, cost little, and end every
session that they open; otherwise they use an emulator, which shows that the tests themselves
work. The answers about the server are printed at the end.

    FIREWORKS_API_KEY=... pytest tests/live
    EVERBURN_LIVE_MODEL, EVERBURN_LIVE_URL: another base model, another server
    EVERBURN_LIVE_TRAINING_SHAPE: the GPUs that test_dedicated.py may use; without it, the tests
        use an emulator
"""

import os
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from everburn.config import RunConfig, parse_config
from everburn.emulator.models.base_model import TINY
from everburn.trainers.backends import EMULATOR_KEY
from everburn.trainers.serverless import ServerlessTrainer
from support.emulator import RunningEmulator

KEY = "FIREWORKS_API_KEY"
MODEL = os.environ.get("EVERBURN_LIVE_MODEL", "accounts/fireworks/models/qwen3p8-27b")
URL = os.environ.get("EVERBURN_LIVE_URL")
_answers: list[str] = []

Answer = Callable[[str, object], None]


def on_both_answers(*, live: bool) -> pytest.MarkDecorator:
    """`worst`: the emulator's switches (everburn/emulator/unknowns.py); the live service answers
    for itself."""
    return pytest.mark.parametrize("worst", [None] if live else [False, True], ids=str)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if _answers:
        asked = "the live service" if os.environ.get(KEY) else "the emulator"
        terminalreporter.section(f"what {asked} answers")
        for line in _answers:
            terminalreporter.write_line(line)


@pytest.fixture
def answer() -> Answer:
    """Record what a test has found out about an open question."""

    def keep(question: str, found: object) -> None:
        _answers.append(f"{question}: {found}")

    return keep


@pytest.fixture
def server(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> tuple[str, str | None]:
    """The base model, and the URL of the service; None is the live one."""
    if os.environ.get(KEY):
        return MODEL, URL
    monkeypatch.setenv(KEY, EMULATOR_KEY)
    emulator: RunningEmulator = request.getfixturevalue("emulator")
    return TINY, emulator.base_url


@pytest.fixture
def config(server: tuple[str, str | None]) -> RunConfig:
    model, url = server
    values = {
        "rollout": "task:make",
        "dataset": "rows.jsonl",
        "base_model": model,
        "tokenizer_model": "not needed",
        "lora_rank": 8,
        "backend": "serverless",
        "learning_rate": 1e-4,
    }
    return parse_config(values | ({"base_url": url} if url else {}))


@pytest.fixture
async def trainer(config: RunConfig) -> AsyncIterator[ServerlessTrainer]:
    session = await ServerlessTrainer.open(config)
    yield session
    await session.close()
