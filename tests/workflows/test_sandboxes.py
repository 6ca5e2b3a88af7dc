"""Sandboxes of dead workers' completions are reaped at the end of the run."""

import time

from everburn.config import Entrypoint
from everburn.records.keys import sandbox_key
from everburn.records.store import ArtifactStore
from everburn.rollouts.sandboxes import SandboxRecord, sandbox_keys
from support.farm import Run, Start
from support.sandboxes import noted
from support.script import Draw, Script
from support.waiting import until
from workflows.messages import RunResult


def leave_behind(store: ArtifactStore, number: int, reaper: str = "note") -> None:
    """The sandbox of a worker that dies in a completion without a further attempt."""
    record = SandboxRecord(
        reaper=Entrypoint(name=f"support.sandboxes:{reaper}", kwargs={"number": number}),
        at=time.time(),
        where="a completion of a dead worker",
    )
    store.put_json(sandbox_key("row-000099.0.0", str(number)), record.model_dump())


class Leaving:
    """Rollouts of which the first leaves a sandbox behind; their rewards are given."""

    def __init__(self, number: int, reaper: str = "note", fatal: bool = False) -> None:
        self.number = number
        self.reaper = reaper
        self.fatal = fatal
        self.run: Run | None = None

    async def __call__(self, draw: Draw) -> float:
        if draw.place == (0, 0):
            await until(lambda: self.run is not None)
            assert self.run is not None
            leave_behind(self.run.store, self.number, self.reaper)
            if self.fatal:
                raise KeyError("a fault of the task")
        return float(draw.completion)


async def started(start: Start, play: Leaving) -> Run:
    play.run = await start(Script(play), rows=1)
    return play.run


async def test_a_run_that_completes_reaps_leftover_sandboxes(start: Start) -> None:
    run = await started(start, Leaving(101))
    result: RunResult = await run.result()
    assert result.steps == 1
    assert 101 in noted and sandbox_keys(run.store) == []
    assert (await run.status()).notes == []


async def test_a_run_that_fails_reaps_leftover_sandboxes(start: Start) -> None:
    run = await started(start, Leaving(102, fatal=True))
    await run.failure()
    assert 102 in noted and sandbox_keys(run.store) == []


async def test_a_run_notes_a_sandbox_that_cannot_be_reaped_and_ends(start: Start) -> None:
    run = await started(start, Leaving(103, reaper="refuse"))
    await run.result()
    assert len(sandbox_keys(run.store)) == 1
    assert (await run.status()).notes == ["1 sandboxes of rollouts are left: see `everburn reap`"]
