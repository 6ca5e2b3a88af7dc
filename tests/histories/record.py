"""Records histories of every kind of workflow: `make histories`.

Not a test, although pytest runs it. It writes the histories to this folder, and
tests/workflows/test_recorded_histories.py replays them with the current workflow code. Record them
again after a change that isn't meant to continue old runs. They don't identify the machine on which
they were recorded.
"""

import asyncio
import base64
import gzip
import json
import os
import platform
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from temporalio.client import WorkflowHistory

from everburn.config import reconfigured
from everburn.records.ids import RunRef
from everburn.records.run_folder import Origin, configured
from everburn.trainers.backends import EMULATOR_URL_ENV
from everburn.trainers.protocol import TrainerStateLostError
from support import tiny_turns
from support.emulator import running_emulator
from support.farm import Farm, Run, open_farm
from support.histories import run_histories
from support.script import Draw, Script
from support.temporal import running_temporal
from support.waiting import until
from workers.cli.fork import Fork
from workers.cli.run_file import RunFile
from workflows.run.train_run import TrainRun

HERE = Path(__file__).parent
OFTEN = "limit.historyCount.suggestContinueAsNew=150"
MACHINE = f"{os.getpid()}@{platform.node()}"
PATIENCE = 180.0
GROUPS_KEPT = ("row-0", "row-1.", "row-2.")


async def play(draw: Draw) -> float | None:
    """Row 1 is retried once; every row ends with a reward per completion."""
    return None if draw.place == (1, 0) and draw.retry == 0 else draw.completion


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """A server on which runs continue as new after a few steps."""
    with running_temporal(tmp_path, OFTEN) as address:
        yield address


async def test_record(
    server: str, tmp_path: Path, tiny_tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Relative paths, so that the recordings are the same on every machine.
    shutil.copytree(tiny_tokenizer, tmp_path / "tokenizer")
    monkeypatch.chdir(tmp_path)
    async with open_farm(server, "default", Path("tokenizer")) as farm:
        eventful = await an_eventful_run(farm)
        held = await a_held_run(farm)
        recorded = {
            "eventful": await histories(farm, eventful),
            "held": await histories(farm, held),
            "resumed": await histories(farm, await a_resumed_run(farm, held)),
            "forked": await histories(farm, await a_forked_run(farm, eventful)),
            "dedicated": await histories(farm, await a_dedicated_run(farm, tmp_path)),
        }
    for file in HERE.glob("*.json.gz"):
        file.unlink()
    for scenario, found in recorded.items():
        for name, history in found.items():
            text = json.dumps(without_machine(json.loads(history.to_json())), indent=1)
            file = HERE / f"{scenario}.{name}.json.gz"
            file.write_bytes(gzip.compress(text.encode(), mtime=0))


async def an_eventful_run(farm: Farm) -> Run:
    """Retries, a filter, evaluations, checkpoints, a lease failure, continue-as-new."""
    script = Script(
        play,
        evaluate=lambda step, rollout_fn: {"skill": step},
        keep=lambda group: group.row["row"] != 2,
    )
    script.trainer.fail_once("optim_step", TrainerStateLostError("the service restarted"), after=4)
    run = await farm.start(
        script,
        Path("runs"),
        rows=16,
        prompt_groups_per_step=2,
        max_head_offpolicy_versions=1,
        max_concurrency_rollout_sample=8,
        min_group_size=2,
        max_incomplete_group_retries=1,
        evaluation_interval=4,
        dcp_save_interval=3,
    )
    # The first run of a process waits for its imports.
    result = await asyncio.wait_for(run.handle.result(), PATIENCE)
    assert result.rows == 16
    assert {entry.lease_epoch for entry in run.ledger} == {1, 2}
    return run


async def a_held_run(farm: Farm) -> Run:
    """Held-out rows in shards, a fatal error, commands, a stop during its last row."""

    async def fail(draw: Draw) -> float:
        if draw.row == 1 and not draw.evaluation:
            raise KeyError("tool")
        if draw.row == 3 and not draw.evaluation:
            await asyncio.Event().wait()
        return draw.completion

    run = await farm.start(
        Script(fail),
        Path("runs"),
        rows=4,
        on_fatal="hold",
        evaluation_dataset={"name": "support.tasks:rows", "kwargs": {"count": 2}},
    )
    await run.until(phase="held")
    await run.handle.execute_update(TrainRun.reconfigure, {"learning_rate": 0.5})
    await run.handle.execute_update(TrainRun.skip_row)
    await until(lambda: len(run.ledger) == 2)
    await run.handle.signal(TrainRun.stop)
    await run.result()
    return run


async def a_resumed_run(farm: Farm, ended: Run) -> Run:
    """The held run, resumed after its stop. Its last row has no training signal."""
    ended.script.play = flat
    run = await farm.resume(ended)
    await run.result()
    assert [entry.updated for entry in run.ledger] == [True, True, False]
    return run


async def a_forked_run(farm: Farm, origin: Run) -> Run:
    """A fork of the eventful run."""
    source, ref = RunRef(store="runs", id=origin.id), RunRef(store="runs", id=f"{origin.id}-fork")
    changes: dict[str, object] = {"learning_rate": 0.5}
    config = reconfigured(configured(source, 4), changes)
    file = RunFile(ref.id, config.model_dump(mode="json"), config)
    state = Fork(Origin(run=source, step=4, changes={"learning_rate": 0.5}), ref, file).make()
    run = await farm.go_on(ref, origin.script, config, state)
    await run.result()
    return run


async def flat(draw: Draw) -> float:
    return 1.0


async def a_dedicated_run(farm: Farm, folder: Path) -> Run:
    """A trainer job and a deployment are created, waited for and deleted."""
    with running_emulator(folder / "emulator") as emulator, pytest.MonkeyPatch.context() as patch:
        patch.setenv(EMULATOR_URL_ENV, emulator.url)
        fields = tiny_turns.fields(emulator.url, backend="emulator-dedicated") | {"base_url": None}
        run = await farm.start(Script(), Path("runs"), rows=4, **fields)
        await asyncio.wait_for(run.handle.result(), PATIENCE)
    return run


async def histories(farm: Farm, run: Run) -> dict[str, WorkflowHistory]:
    """The histories of the run's executions, of a few groups and of its other children, by name."""
    found: dict[str, WorkflowHistory] = {}
    executions = 0
    for history in await run_histories(farm.client, run.id, run.first_execution):
        name = history.workflow_id.removeprefix(run.id).removeprefix("/")
        if not name:
            executions += 1
            name = f"run-{executions}"
        if not name.startswith("row-") or name.startswith(GROUPS_KEPT):
            found[name] = history
    return found


def without_machine(value: Any) -> Any:
    """A history's JSON without the name of this machine, process and folder."""
    match value:
        case dict():
            return {
                key: "" if key == "stackTrace" else _payload(key, without_machine(part))
                for key, part in value.items()
            }
        case list():
            return [without_machine(part) for part in value]
        case str():
            return value.replace(MACHINE, "1@worker")
    return value


def _payload(key: str, value: Any) -> Any:
    if key != "data" or not isinstance(value, str):
        return value
    text = base64.b64decode(value).decode()
    return base64.b64encode(without_machine(text).encode()).decode()
