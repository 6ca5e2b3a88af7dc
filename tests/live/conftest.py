"""Tests against the live service. They run only where FIREWORKS_API_KEY is set, cost little, and
end every session that they open. What they learn of it is printed at the end.

    FIREWORKS_API_KEY=... pytest tests/live
    EVERBURN_LIVE_MODEL, EVERBURN_LIVE_URL: another base model, another server (an emulator, say)
"""

import os
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from everburn.config import RunConfig, parse_config
from everburn.trainers.serverless import ServerlessTrainer

KEY = "FIREWORKS_API_KEY"
MODEL = os.environ.get("EVERBURN_LIVE_MODEL", "accounts/fireworks/models/qwen3p8-27b")
URL = os.environ.get("EVERBURN_LIVE_URL")
_answers: list[str] = []

Answer = Callable[[str, object], None]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ.get(KEY):
        return
    skip = pytest.mark.skip(reason=f"{KEY} is not set")
    for item in items:
        if "live" in item.path.parts:
            item.add_marker(skip)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if _answers:
        terminalreporter.section("what the live service answers")
        for line in _answers:
            terminalreporter.write_line(line)


@pytest.fixture
def answer() -> Answer:
    """Keep what a test has found out about an open question."""

    def keep(question: str, found: object) -> None:
        _answers.append(f"{question}: {found}")

    return keep


@pytest.fixture
def config() -> RunConfig:
    values = {
        "rollout": "task:make",
        "dataset": "rows.jsonl",
        "base_model": MODEL,
        "tokenizer_model": "not needed",
        "lora_rank": 8,
        "backend": "serverless",
        "learning_rate": 1e-4,
    }
    return parse_config(values | ({"base_url": URL} if URL else {}))


@pytest.fixture
async def trainer(config: RunConfig) -> AsyncIterator[ServerlessTrainer]:
    session = await ServerlessTrainer.open(config)
    yield session
    await session.close()
