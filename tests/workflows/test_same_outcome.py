"""With completions in a scripted order, a run's weights and the outcomes of its rows don't depend
on how its workflow is executed: with a cache, without one, or in many executions."""

import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from temporalio.plugin import SimplePlugin

from everburn import RolloutRun, RolloutSample
from everburn.emulator.training.checkpoints import weights_digest
from everburn.trainers.backends import EMULATOR_URL_ENV
from support.emulator import RunningEmulator
from support.farm import (
    Farm,
    NoCache,
    Run,
    open_farm,
    register_namespace,
    shared_workflow_modules,
)
from support.histories import replay, run_histories
from support.script import Draw, Script
from support.waiting import Gate
from workflows.run import batch, train_run

ROWS = 6


@dataclass(frozen=True)
class Outcome:
    """The facts that must be equal. weights: digests of the initial and the final checkpoint."""

    weights: list[str]
    batches: list[list[str]]
    submissions: list[int]
    outcomes: dict[str, str]


class Ordered:
    """Rows whose completions end one row after the other; row 1 is retried, row 2 filtered."""

    def __init__(self) -> None:
        self.gates = [Gate() for _ in range(ROWS)]
        self.script = Script(self.play, keep=lambda group: group.row["row"] != 2)

    async def play(self, draw: Draw) -> RolloutRun | None:
        await self.gates[draw.row].passed()
        if draw.place == (1, 0) and draw.retry == 0:
            return None
        sample = RolloutSample(
            tokens=[1, 2 + draw.row, 3 + draw.completion],
            logprobs=[0.0, -1.0, -2.0],
            loss_mask=[0, 1, 1],
            reward=float(draw.completion),
        )
        return RolloutRun([sample])

    async def run(self, farm: Farm, store: Path) -> Run:
        run = await farm.start(
            self.script,
            store,
            rows=ROWS,
            prompt_groups_per_step=2,
            max_head_offpolicy_versions=2,
            collect_full_batch=True,
            min_group_size=2,
            max_incomplete_group_retries=1,
            base_model="accounts/everburn/models/tiny",
            tokenizer_model=None,
            lora_rank=4,
            learning_rate=0.01,
        )
        await run.until(groups_in_flight=ROWS)
        for row, gate in enumerate(self.gates):
            gate.open()
            await run.until(groups_in_flight=ROWS - row - 1)
        await run.result()
        return run


async def test_weights_and_outcomes_are_the_same(
    temporal_server: str,
    tiny_tokenizer: Path,
    tmp_path: Path,
    emulator: RunningEmulator,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv(EMULATOR_URL_ENV, emulator.url)

    @asynccontextmanager
    async def workers(name: str, *tuning: SimplePlugin) -> AsyncIterator[Farm]:
        await register_namespace(temporal_server, name)
        async with open_farm(temporal_server, name, tiny_tokenizer, *tuning) as farm:
            yield farm

    outcomes = {}
    executions = {}
    for name, tuning in {
        "plain": [],
        "without a cache": [NoCache()],
        "continued": [shared_workflow_modules()],
        "continued over its steps": [shared_workflow_modules()],
    }.items():
        with contextlib.ExitStack() as stack:
            patch = stack.enter_context(pytest.MonkeyPatch.context())
            if name == "continued":
                patch.setattr(train_run, "MAX_HISTORY", 1)
            if name == "continued over its steps":
                patch.setattr(batch, "LONG_STEP", 30)
            async with workers(name.replace(" ", "-"), *tuning) as farm:
                run = await Ordered().run(farm, tmp_path / name.replace(" ", "-"))
                outcomes[name] = outcome(run, emulator.home)
                found = await run_histories(farm.client, run.id, run.first_execution)
                await replay(found, farm.plugins)
                executions[name] = sum(history.workflow_id == run.id for history in found)

    plain = outcomes["plain"]
    assert executions.pop("continued over its steps") > 1
    assert executions == {"plain": 1, "without a cache": 1, "continued": 4}
    assert plain.batches == [["0", "1.1"], ["3", "4"], ["5"]]
    assert (
        plain.outcomes["row-000001.0"] == "incomplete"
        and plain.outcomes["row-000002.0"] == "filtered"
    )
    assert plain.weights[0] != plain.weights[1], "nothing was trained"
    assert outcomes["without a cache"] == plain
    assert outcomes["continued"] == outcomes["continued over its steps"] == plain


def outcome(run: Run, emulator_home: Path) -> Outcome:
    checkpoints = [run.store.keys(f"checkpoints/state-{step}")[-1] for step in (0, 3)]
    paths = [run.store.get_json(key)["path"] for key in checkpoints]
    return Outcome(
        weights=[weights_digest(emulator_home, path) for path in paths],
        batches=[[key.text for key in entry.groups] for entry in run.ledger],
        submissions=[len(entry.submissions) for entry in run.ledger],
        outcomes={group.key.name: group.outcome for group in run.groups},
    )
