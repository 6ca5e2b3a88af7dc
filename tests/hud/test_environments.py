"""Placement of environments: invalid configurations, and environments on the HUD platform."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hud.eval import HUDRuntime, LocalRuntime, Runtime, Task

from everburn.hud.environments import PlacementError, place
from everburn.hud.package import HUD_KEY_ENV, HudKeyMissingError
from everburn.learning.rollout_file import read_rollout
from everburn.records.ids import GroupKey
from everburn.records.keys import rollout_key
from everburn.records.store import ArtifactStore
from everburn.rollouts.sandboxes import Sandboxes
from everburn.usercode.entrypoints import EntrypointError
from support.hud_runs import ENV, Runs, a_task

FACTORY = "examples.arithmetic.hud_environment:environment"


@pytest.fixture
def sandboxes(tmp_path: Path) -> Sandboxes:
    return Sandboxes(ArtifactStore(str(tmp_path)))


@pytest.mark.parametrize(
    ("where", "complaint"),
    [
        ({}, "set exactly one of"),
        ({"env_path": ENV, "environment": FACTORY}, "set exactly one of"),
        ({"env_path": ENV, "hosted": True}, "set exactly one of"),
        ({"env_path": "no/such/env.py"}, "there is no HUD environment at .*no/such/env.py"),
        ({"env_path": ENV, "isolation": "container"}, "it must be 'thread', 'shared' or 'process'"),
        ({"environment": FACTORY, "isolation": "process"}, "'process' requires env_path"),
        ({"hosted": True, "isolation": "process"}, "'process' requires env_path"),
        ({"env_path": ENV, "max_environments": 0}, "it must be at least 1"),
    ],
)
def test_an_invalid_placement_is_refused(
    sandboxes: Sandboxes, where: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(PlacementError, match=complaint):
        place(sandboxes, **where)


def test_a_function_that_does_not_exist_is_refused(sandboxes: Sandboxes) -> None:
    with pytest.raises(EntrypointError, match="nothing_here"):
        place(sandboxes, environment="examples.arithmetic.hud_environment:nothing_here")


def test_the_platform_needs_a_key(sandboxes: Sandboxes) -> None:
    with pytest.raises(
        HudKeyMissingError,
        match=f"a hosted environment needs a key of the HUD platform: set {HUD_KEY_ENV}",
    ):
        place(sandboxes, hosted=True)


async def test_a_hosted_environment_is_requested_with_the_task(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    requested: list[Task] = []

    @asynccontextmanager
    async def session(self: HUDRuntime, task: Task) -> AsyncIterator[Runtime]:
        requested.append(task)
        async with LocalRuntime(ENV)(task) as runtime:
            yield runtime

    # Replaces HUD's platform, which is not available here, by a local environment.
    monkeypatch.setattr(HUDRuntime, "__call__", session)
    monkeypatch.setattr("everburn.hud.rollouts.hud_key", lambda: None)
    monkeypatch.setenv(HUD_KEY_ENV, "sk-hud-test")
    runner = await runs.runner([a_task("variety", start="ab")], hosted=True)
    key = GroupKey(cursor=0)
    await runner.complete(key, 0, 0)
    _, run = read_rollout(runner.store, rollout_key(key, 0))
    assert run.info["got"] == len(set(run.answer or ""))
    (task,) = requested
    assert (task.env, task.id, task.args) == ("counting", "variety", {"start": "ab"})
