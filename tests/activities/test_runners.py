"""Which runs' user code stays loaded; runners that are dropped are closed."""

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from activities import runners as runners_module
from activities.runners import Runners
from everburn.records.ids import RunRef
from everburn.records.run_folder import OWNER_KEY, Owner
from everburn.records.store import ArtifactStore
from everburn.usercode.loop import UserLoop
from support.waiting import until

loaded: list[str] = []
closed: list[str] = []


class Runner:
    """Stands in for a run's user code."""

    def __init__(self, run: RunRef) -> None:
        self.id = run.id
        loaded.append(self.id)
        if self.id == "broken" and loaded.count("broken") == 1:
            raise ImportError("not yet")

    def close(self) -> None:
        closed.append(self.id)


@pytest.fixture
def user_loop() -> Iterator[UserLoop]:
    loop = UserLoop("test")
    yield loop
    loop.close()


@pytest.fixture
def runners(user_loop: UserLoop, monkeypatch: pytest.MonkeyPatch) -> Runners:
    loaded.clear()
    closed.clear()
    monkeypatch.setattr(runners_module, "RolloutRunner", Runner)
    monkeypatch.setattr(runners_module, "MAX_RUNS", 2)
    return Runners(user_loop)


def a_run(name: str) -> RunRef:
    return RunRef(store=str(Path("nowhere")), id=name)


async def use(runners: Runners, *names: str) -> None:
    for name in names:
        async with runners.using(a_run(name)):
            pass


async def test_the_least_recently_used_runner_is_closed(runners: Runners) -> None:
    await use(runners, "a", "b", "a", "c")
    await until(lambda: closed == ["b"])
    await use(runners, "a", "b")
    await until(lambda: closed == ["b", "c"])
    assert loaded == ["a", "b", "c", "b"]


async def test_a_runner_in_use_stays_open_until_it_is_idle(runners: Runners) -> None:
    async with AsyncExitStack() as stack:
        for name in ("a", "b", "c"):
            await stack.enter_async_context(runners.using(a_run(name)))
        await use(runners, "d", "a")
        await until(lambda: closed == ["d"])
    await until(lambda: len(closed) == 2)
    assert loaded == ["a", "b", "c", "d"]


async def test_a_new_run_with_the_same_id_loads_its_own_code(
    runners: Runners, tmp_path: Path
) -> None:
    """After its folder is deleted, a run's id can be used for another run."""
    run = RunRef(store=str(tmp_path), id="a")
    for chain in ("first", "first", "second"):
        ArtifactStore.of(run).put_json(OWNER_KEY, Owner(first_execution_id=chain).model_dump())
        async with runners.using(run):
            pass
    assert loaded == ["a", "a"]


@pytest.mark.usefixtures("runners")
async def test_all_runners_are_closed_at_the_end() -> None:
    user_loop = UserLoop("test")
    runners = Runners(user_loop)
    await use(runners, "a", "b")
    user_loop.close(runners.close)
    await until(lambda: closed == ["a", "b"])


async def test_a_runner_that_failed_to_load_is_loaded_by_the_next_caller(runners: Runners) -> None:
    with pytest.raises(ImportError):
        await use(runners, "broken")
    await asyncio.gather(*(use(runners, "broken") for _ in range(3)))
    assert loaded == ["broken", "broken"]
