"""Whole runs through the unmodified SDK against the emulator: what is trained is what the ledger
says, bit for bit."""

from pathlib import Path
from typing import Any

import pytest

from everburn.emulator.checkpoints import weights_digest
from everburn.learning import igpo
from everburn.learning.batch import Batch
from everburn.refs import RunRef
from everburn.run_folder import stored_config
from everburn.trainers.serverless import ServerlessTrainer
from everburn.verification import Verified, verify
from support import tiny_turns
from support.emulator import RunningEmulator
from support.farm import Run, Start
from support.script import Script


async def verified(run: Run, store: Path, emulator: RunningEmulator) -> Verified:
    """Re-execute the run on a fresh session, and compare weights."""
    ref = RunRef(store=str(store), id=run.id)
    return await verify(
        ref,
        lambda: ServerlessTrainer.open(stored_config(ref)),
        lambda path: weights_digest(emulator.home, path),
        name=f"verify-{run.id}",
    )


async def test_igpo_trains_and_a_lost_session_reuses_its_advantages(
    start: Start, tmp_path: Path, emulator: RunningEmulator
):
    batches: list[Batch] = []

    def prepare(batch: Batch) -> Any:
        batches.append(batch)
        return igpo.prepare_batch(batch, gamma=0.9)

    # After the second step's advantages have been recorded, its session dies.
    emulator.plan_fault("optim_step", "expire_session", after=1)
    fields = tiny_turns.fields(emulator.base_url, dcp_save_interval=1)
    run = await start(Script(prepare=prepare), rows=6, **fields)
    await run.result()

    assert [batch.step for batch in batches] == [1, 2, 3]
    assert [entry.epoch for entry in run.ledger] == [1, 2, 2]
    assert all(entry.prepared is not None and entry.updated for entry in run.ledger)
    # Two turns: their advantages differ, and each is the same for all its tokens.
    files = [entry.prepared.advantages for entry in run.ledger if entry.prepared]
    rows = [row["advantages"] for file in files for row in run.store.get_table(file)]
    assert all(len(set(row)) <= 3 for row in rows) and any(len(set(row)) == 3 for row in rows)
    assert (await verified(run, tmp_path, emulator)).steps == 3
    assert len(batches) == 3  # nor did the verification ask again


@pytest.mark.parametrize("fault", ["expire_session", "drop"])
async def test_a_session_lost_over_the_scoring_is_replaced(
    start: Start, tmp_path: Path, emulator: RunningEmulator, fault: str
):
    emulator.plan_fault("forward", fault, after=1)
    prepare = {"name": "everburn.learning.igpo:prepare_batch"}
    fields = tiny_turns.fields(emulator.base_url, prepare_batch=prepare)
    run = await start(Script(), rows=4, **fields)
    await run.result()
    assert (await verified(run, tmp_path, emulator)).steps == 2
