"""kill -9 of the orchestrator at its writes and between them."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from chaos.harness import Chaos, process_command
from everburn.records import metrics
from everburn.records.publications import current_publication, find_publication

FREE_OF_EVALUATION = [
    "after put owner.json",
    "before put config.json",
    "after put config.json",
    # Before and after the commit, and between ledger and metrics.
    "before put ledger/000002.json",
    "after put ledger/000002.json",
    "after append metrics.jsonl",
    "before continue_as_new",
    "after continue_as_new",
]


async def test_a_step_is_committed_once_even_if_the_committer_dies(chaos: Chaos) -> None:
    chaos.plan("after put ledger/000002.json")
    run = await chaos.start()
    await chaos.survived(run)
    # Only the orchestrator died: the trainer kept its session.
    assert [entry.lease_epoch for entry in run.ledger] == [1, 1, 1, 1]


@pytest.mark.chaos
@pytest.mark.parametrize("point", FREE_OF_EVALUATION)
async def test_the_orchestrator_dies(chaos: Chaos, point: str) -> None:
    chaos.plan(point)
    run = await chaos.start()
    await chaos.survived(run)
    assert {entry.lease_epoch for entry in run.ledger} == {1}


@pytest.mark.chaos
@pytest.mark.parametrize(
    "point",
    [
        "after optim_step",
        "before publish policy-0002-*",
        "after put publications/*/000002.json",
        "before save_checkpoint state-2",
        "after put checkpoints/state-2/*",
    ],
)
async def test_the_orchestrator_dies_while_the_trainer_works(chaos: Chaos, point: str) -> None:
    """The trainer's operation is executed once, and its result is there when the orchestrator is
    back."""
    moment = chaos.plan(point, "freeze")
    run = await chaos.start()
    assert await chaos.frozen(moment) == "trainer"
    chaos.stack.processes.kill("orchestrator")
    chaos.stack.processes.thaw("trainer")
    await chaos.survived(run)
    assert {entry.lease_epoch for entry in run.ledger} == {1}


@pytest.mark.chaos
@pytest.mark.parametrize("moment", ["before", "after"])
async def test_the_orchestrator_dies_during_a_step_without_update(
    chaos: Chaos, moment: str
) -> None:
    """The orchestrator writes this publication: the previous snapshot serves the new version."""
    chaos.plan(f"{moment} put publications/lease-000001/000002.json")
    run = await chaos.start(
        task="chaos.tasks", max_head_offpolicy_versions=0, shuffle=False, extras={"flat": [2, 3]}
    )
    await chaos.survived(run)
    assert [entry.updated for entry in run.ledger] == [True, False, True, True]
    assert run.ledger[1].snapshot == run.ledger[0].snapshot


@pytest.mark.chaos
async def test_the_orchestrator_dies_during_an_evaluation(chaos: Chaos) -> None:
    held_out = {"name": "system.tiny_task:rows", "kwargs": {"count": 3}}
    shard = chaos.plan("before put evaluations/000002/shard-0000.json", "freeze")
    run = await chaos.start(evaluation_dataset=held_out, evaluation_interval=2)
    assert await chaos.frozen(shard) == "rollout"
    chaos.stack.processes.kill("orchestrator")
    chaos.stack.processes.thaw("rollout")
    await chaos.survived(run)
    assert all(run.store.exists(f"evaluations/{version:06d}.json") for version in (0, 2, 4))


@pytest.mark.chaos
@pytest.mark.parametrize("moment", ["before", "after"])
async def test_the_orchestrator_dies_while_it_records_an_evaluation(
    chaos: Chaos, moment: str
) -> None:
    """An evaluation adds to the metrics of its step."""
    held_out = {"name": "system.tiny_task:rows", "kwargs": {"count": 3}}
    chaos.plan(f"{moment} amend 4")
    run = await chaos.start(evaluation_dataset=held_out)
    await chaos.survived(run)
    result = await run.result()
    assert set(result.evaluations) == {0, 4}
    (last,) = [r for r in metrics.read(run.store) if r.key == (metrics.STEP_STREAM, 4)]
    assert {"eval/reward", "train/lr"} <= last.values.keys()


@pytest_asyncio.fixture(loop_scope="session")
async def second_orchestrator(chaos: Chaos) -> AsyncIterator[None]:
    command = process_command("worker", "orchestrator", "--address", chaos.stack.address)
    chaos.stack.processes.start("orchestrator-2", command)
    yield
    chaos.stack.processes.stop("orchestrator-2")


@pytest.mark.chaos
@pytest.mark.parametrize("file", ["000002.json", "current.json"])
async def test_an_orchestrator_that_comes_back_reverts_no_version(
    chaos: Chaos, second_orchestrator: None, file: str
) -> None:
    """It was frozen before it wrote a publication that another orchestrator has written since."""
    run = await chaos.start(
        rows=12,
        task="chaos.tasks",
        max_head_offpolicy_versions=0,
        shuffle=False,
        extras={"flat": [2, 3], "pause": 0.5},
    )
    # The trainer writes the publications of versions 0 and 1; the orchestrator writes the next.
    await run.until_step(1)
    moment = chaos.plan(f"before put publications/lease-000001/{file}", "freeze")
    late = await chaos.frozen(moment)
    assert late.startswith("orchestrator")
    await run.until_step(3)
    chaos.stack.processes.thaw(late)
    await chaos.survived(run, steps=6)
    found = [find_publication(run.store, version) for version in range(7)]
    assert [record and record.version for record in found] == list(range(7))
    last, carried, before = found[6], found[2], found[1]
    assert current_publication(run.store) == last
    assert carried is not None
    assert before is not None
    assert carried.snapshot == before.snapshot


@pytest.mark.chaos
@pytest.mark.parametrize("moment", ["before commit", "after commit"])
async def test_the_orchestrator_dies_at_every_step(chaos: Chaos, moment: str) -> None:
    word = moment.split()[0]
    for step in range(1, 5):
        chaos.plan(f"{word} put ledger/{step:06d}.json")
    run = await chaos.start()
    await chaos.survived(run)
