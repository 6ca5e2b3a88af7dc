"""Farms of workers for the workflows, and the check of each history that a test has produced."""

import contextlib
from collections.abc import AsyncIterator, Awaitable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from activities import trainer
from support.farm import Farm, Run, Start, open_farm, register_namespace, shared_workflow_modules
from support.histories import check_payloads, replay, run_histories
from support.script import Script
from workers import processes
from workflows.children import trainer_lease

QUICK_THROTTLE = timedelta(seconds=0.1)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def farm(temporal_server: str, tiny_tokenizer: Path) -> AsyncIterator[Farm]:
    """Workers with production settings."""
    async with open_farm(temporal_server, "default", tiny_tokenizer) as farm:
        yield farm


@pytest_asyncio.fixture(loop_scope="session")
async def start(farm: Farm, tmp_path: Path) -> AsyncIterator[Start]:
    """Start runs on the farm. Their histories are checked after the test."""

    def start(script: Script, **fields: Any) -> Awaitable[Run]:
        return farm.start(script, tmp_path, **fields)

    yield start
    await check_histories(farm)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def tunable_farm(temporal_server: str, tiny_tokenizer: Path) -> AsyncIterator[Farm]:
    """Workers whose workflows see the constants that a test sets in a module, in a namespace
    without search attributes. Heartbeats aren't throttled: one per second would leave no margin on
    a busy machine for a test's timeout of one second."""
    await register_namespace(temporal_server, "tunable")
    tuning = shared_workflow_modules()
    async with contextlib.AsyncExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(processes, "THROTTLE", QUICK_THROTTLE)
            opening = open_farm(temporal_server, "tunable", tiny_tokenizer, tuning)
            farm = await stack.enter_async_context(opening)
        yield farm


@pytest_asyncio.fixture(loop_scope="session")
async def start_tuned(
    tunable_farm: Farm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Start]:
    """Start runs on the tunable farm. Their histories are checked after the test with the constants
    that it has set: monkeypatch is undone later."""
    for module in (processes, trainer):  # for workers that the test starts, and for its leases
        monkeypatch.setattr(module, "THROTTLE", QUICK_THROTTLE)

    def start(script: Script, **fields: Any) -> Awaitable[Run]:
        return tunable_farm.start(script, tmp_path, **fields)

    yield start
    await check_histories(tunable_farm)


@pytest.fixture
def quick_acquisition(monkeypatch: pytest.MonkeyPatch) -> None:
    """A session is requested as often as usual, but without the seconds between."""
    quick = replace(trainer_lease.ACQUIRE_ATTEMPTS, initial_interval=timedelta(milliseconds=10))
    monkeypatch.setattr(trainer_lease, "ACQUIRE_ATTEMPTS", quick)


async def check_histories(farm: Farm) -> None:
    """Each payload fits its budget, and the workflow code replays each history."""
    while farm.runs:
        run = farm.runs.pop()
        await farm.close(run)
        first = run.handle.first_execution_run_id
        assert first is not None
        histories = await run_histories(farm.client, run.id, first)
        for history in histories:
            check_payloads(history)
        await replay(histories, farm.plugins)
