"""Complete runs through the unmodified SDK against the emulator: trained weights follow from the
ledger, bit for bit."""

import re
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

from everburn.config import Entrypoint
from everburn.emulator.training.checkpoints import weights_digest
from everburn.learning import igpo
from everburn.learning.batch import Batch
from everburn.records.ids import RunRef
from everburn.records.run_folder import stored_config
from everburn.records.verification import Verified, verify
from everburn.trainers.protocol import Snapshot
from everburn.trainers.serverless import ServerlessTrainer
from everburn.usercode import limits
from support import losses, tiny_turns
from support.emulator import RunningEmulator
from support.farm import Run, Start
from support.script import Script
from support.waiting import until


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
    assert run.ledger[0].lease_epoch < run.ledger[1].lease_epoch
    assert all(entry.prepared is not None and entry.updated for entry in run.ledger)
    # Two turns with different advantages, each the same for all tokens of its turn.
    files = [entry.prepared.advantages for entry in run.ledger if entry.prepared]
    rows = [row["advantages"] for file in files for row in run.store.get_table(file)]
    assert all(len(set(row)) <= 3 for row in rows) and any(len(set(row)) == 3 for row in rows)
    assert (await verified(run, tmp_path, emulator)).steps == 3
    assert len(batches) == 3  # the verification didn't call the function either


@pytest.mark.parametrize("fault", ["expire_session", "drop"])
async def test_a_session_lost_during_scoring_is_replaced(
    start: Start, tmp_path: Path, emulator: RunningEmulator, fault: str
):
    emulator.plan_fault("forward", fault, after=1)
    prepare = {"name": "everburn.learning.igpo:prepare_batch"}
    fields = tiny_turns.fields(emulator.base_url, prepare_batch=prepare)
    run = await start(Script(), rows=4, **fields)
    await run.result()
    assert (await verified(run, tmp_path, emulator)).steps == 2


async def test_a_python_loss_is_replayed_and_verified_as_it_was_trained(
    start: Start, tmp_path: Path, emulator: RunningEmulator
):
    """Its gradients come from two requests each; several submissions of a step are pending."""
    emulator.plan_fault("optim_step", "expire_session", after=1)
    fields = tiny_turns.fields(
        emulator.base_url,
        loss={"name": "support.losses:importance_sampling", "kwargs": {"scale": 0.5}},
        prompt_groups_per_step=3,
    )
    run = await start(Script(), rows=9, **fields)
    await run.result()

    assert run.ledger[0].lease_epoch < run.ledger[1].lease_epoch
    assert run.ledger[0].loss == Entrypoint(
        name="support.losses:importance_sampling", kwargs={"scale": 0.5}
    )
    last = run.metrics()[-1]
    assert last["loss/scale"] == 0.5
    assert "train/clip_frac" not in last
    assert (await verified(run, tmp_path, emulator)).steps == 3


async def test_a_python_loss_that_never_returns_ends_its_run_and_is_named(
    start: Start, emulator: RunningEmulator, monkeypatch: pytest.MonkeyPatch
):
    block = losses.Block()
    monkeypatch.setattr(losses, "block", block)
    monkeypatch.setattr(limits, "LIMIT", 1.0)
    own = tiny_turns.fields(emulator.base_url, loss={"name": "support.losses:blocking"})
    run = await start(Script(), rows=2, **own)
    await until(block.begun.is_set)
    try:
        other = await start(Script(), rows=2, **tiny_turns.fields(emulator.base_url))
        result = await other.result()
        failure = await run.failure()
    finally:
        block.free.set()
    assert result.steps == 1 and [entry.lease_epoch for entry in other.ledger] == [1]
    assert failure.type == "TrainerRejectedError"
    assert "loss support.losses:blocking: it hasn't returned within 1 s" in failure.message


async def test_the_ledger_names_the_settings_that_were_sent(
    start: Start, tmp_path: Path, emulator: RunningEmulator
):
    settings = {"clip_high_threshold": 1.4}
    fields = tiny_turns.fields(emulator.base_url, loss="dapo", loss_config=settings)
    run = await start(Script(), rows=2, grad_clip_norm=0.01, advantages="leave_one_out", **fields)
    await run.result()

    (entry,) = run.ledger
    assert entry.loss_config == {"clip_low_threshold": 0.8, "clip_high_threshold": 1.4}
    assert entry.adam.grad_clip_norm == 0.01
    for group in run.groups:
        rewards, advantages = group.rewards, [member.advantage for member in group.members]
        assert advantages == pytest.approx([rewards[0] - rewards[1], rewards[1] - rewards[0]])
    assert (await verified(run, tmp_path, emulator)).steps == 1


async def test_a_steps_record_has_what_the_trainer_reports_of_its_requests(
    start: Start, emulator: RunningEmulator
):
    """The trainer's own diagnostics agree with those that Everburn computes."""
    fields = tiny_turns.fields(
        emulator.base_url, temperature=0.5, loss_config={"report_policy_diagnostics": True}
    )
    run = await start(Script(), rows=2, **fields)
    await run.result()
    (step,) = (each for each in run.metrics() if each["rollout/step"] == 1)
    assert step["trainer/policy_ratio_mean"] == pytest.approx(step["train/ratio_mean"], rel=1e-4)
    assert step["trainer/policy_outside_clip_mean"] == pytest.approx(step["train/clip_frac"])
    assert step["trainer/num_loss_tokens_sum"] == step["train/tokens"]
    assert step["trainer/policy_ratio_max"] > step["trainer/policy_ratio_mean"]
    assert run.ledger[0].metrics["trainer/policy_kl_mean"] == step["trainer/policy_kl_mean"] > 0
    assert step["trainer/total_tokens_sum"] > step["trainer/num_loss_tokens_sum"]


async def test_a_run_that_its_trainer_cannot_serve_ends_before_any_rollout(
    start: Start, emulator: RunningEmulator
):
    fields = tiny_turns.fields(emulator.base_url, router_replay=True)
    run = await start(Script(), rows=2, **fields)
    failure = await run.failure()
    assert failure.type == "TrainerUnfitError"
    assert "needs supports_router_replay" in failure.message
    assert run.store.keys("rollouts") == []


RATIO = ("train/ppo_kl", "train/clip_frac")
INFERENCE = ("train/inference_k1", "train/inference_k3")
GAP = ("train/publication_gap",)
OFFSET = ("async/version_offset_mean", "async/version_offset_max")
"""The columns of the table of planted discrepancies in docs/metrics.md."""


def shows(record: dict[str, Any], *moved: tuple[str, ...]) -> None:
    """Exactly these columns differ from their value without a discrepancy."""
    for column in (RATIO, INFERENCE, GAP, OFFSET):
        for name in column:
            assert (abs(record[name]) > 1e-3) == (column in moved), (name, record)
            assert column in moved or abs(record[name]) < 1e-4, (name, record)


async def test_without_a_discrepancy_no_column_moves(start: Start, emulator: RunningEmulator):
    run = await start(Script(), rows=2, **tiny_turns.fields(emulator.base_url))
    await run.result()
    (record,) = (each for each in run.metrics() if each["rollout/step"] == 1)
    shows(record)


async def test_a_temperature_shows_in_the_policy_ratio_only(
    start: Start, emulator: RunningEmulator
):
    fields = tiny_turns.fields(emulator.base_url, temperature=0.05)
    run = await start(Script(), rows=2, **fields)
    await run.result()
    (record,) = (each for each in run.metrics() if each["rollout/step"] == 1)
    shows(record, RATIO)
    assert all(abs(record[name]) > 0.05 for name in RATIO), record


async def test_a_sampler_with_old_weights_shows_as_an_inference_discrepancy(
    start: Start, emulator: RunningEmulator, monkeypatch: pytest.MonkeyPatch
):
    """Each publication names the first snapshot, so rollouts claim to be of the current policy. The
    check of publications would notice it first; here it tolerates anything."""
    publish = ServerlessTrainer.publish
    first: list[Snapshot] = []

    async def publish_old_weights(trainer: ServerlessTrainer, name: str) -> Snapshot:
        first.append(await publish(trainer, name))
        return first[0]

    monkeypatch.setattr(ServerlessTrainer, "publish", publish_old_weights)
    fields = tiny_turns.fields(emulator.base_url, learning_rate=0.05, publication_tolerance=100.0)
    run = await start(Script(), rows=4, **fields)
    await run.result()
    fresh, stale = (each for each in run.metrics() if each["rollout/step"] > 0)
    shows(fresh, GAP)  # it sampled from version 0, and published it as version 1
    shows(stale, RATIO, INFERENCE, GAP)  # according to the run's records, all was on policy


async def test_rollouts_of_an_earlier_version_show_their_age(
    start: Start, emulator: RunningEmulator
):
    fields = tiny_turns.fields(emulator.base_url, learning_rate=0.05, max_head_offpolicy_versions=1)
    run = await start(Script(), rows=4, **fields)
    await run.result()
    fresh, old = (each for each in run.metrics() if each["rollout/step"] > 0)
    shows(fresh)
    shows(old, RATIO, INFERENCE, OFFSET)
    assert old["async/version_offset_max"] == old["async/version_offset_mean"] == 1


async def test_the_metrics_are_exactly_the_documented_ones(start: Start, emulator: RunningEmulator):
    """Both sets are equal, for a run with every feature that adds metrics."""
    fields = tiny_turns.fields(
        emulator.base_url,
        prepare_batch={"name": "everburn.learning.igpo:prepare_batch"},
        loss="dapo",
        max_concurrency_rollout_sample=4,
        dcp_save_interval=1,
    )
    run = await start(Script(evaluate=lambda step, rollout_fn: {"score": 1.0}), rows=2, **fields)
    await run.result()

    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    rows = re.findall(r"^\| (\w+/.*?) \|", page, flags=re.MULTILINE)
    documented = {name for row in rows for name in row.split(", ")}
    steps, producer = run.metrics(), run.metrics("producer/event")
    written = {name for record in steps + producer for name in record}
    assert {name for name in written if not any(fnmatch(name, d) for d in documented)} == {
        "rollout/step",
        "producer/event",
    }
    missing = {name for name in documented if not any(fnmatch(w, name) for w in written)}
    # Metrics of a Python loss, and of recoveries, failed saves and a stall.
    others = {"loss/*", "checkpoint/failed", "producer/waiting_for"}
    assert {name for name in missing if not name.startswith("recovery/")} == others
