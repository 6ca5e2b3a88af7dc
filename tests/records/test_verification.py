"""Rules for a run's records: one outcome per row, one submission per group."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from everburn.config import parse_config
from everburn.learning.submissions import SubmissionManifest
from everburn.records.commands import Command, Ending, record_command
from everburn.records.ids import (
    GroupKey,
    GroupOutcome,
    LeaseKey,
    RunRef,
    StoredRef,
)
from everburn.records.keys import group_key, ledger_key, rollout_key, submission_key
from everburn.records.ledger import LedgerEntry, PreparedBatch, commit
from everburn.records.run_folder import Owner, create_run_folder
from everburn.records.store import ArtifactStore
from everburn.records.verification import VerificationError, check_records
from records.test_ledger import an_entry
from support.records import a_group, a_member

CONFIG = parse_config(
    {
        "rollout": "task:make_rollout_fn",
        "dataset": {"name": "task:rows"},
        "base_model": "accounts/everburn/models/tiny",
        "backend": "emulator",
        "lora_rank": 4,
        "completions_per_prompt": 2,
    }
)


@dataclass
class Records:
    """A run's folder, written by hand."""

    run: RunRef

    @property
    def store(self) -> ArtifactStore:
        return ArtifactStore.of(self.run)

    def group(
        self, row: int, outcome: GroupOutcome = "accepted", advantage: float = 1.0, attempt: int = 0
    ) -> StoredRef:
        key = GroupKey(cursor=row, attempt=attempt)
        members = [
            a_member(
                self.store.put(rollout_key(key, number), f"{row}/{number}".encode()),
                completion=number,
                reward=float(number),
                advantage=advantage if number else -advantage,
                row_index=row,
            )
            for number in range(2)
        ]
        manifest = a_group(key, members, outcome=outcome, rejected=outcome != "accepted")
        return self.store.put_json(group_key(key), manifest.model_dump(mode="json"))

    def step(
        self,
        number: int,
        batch: dict[int, StoredRef],
        submitted: list[list[StoredRef]],
        **fields: Any,
    ) -> LedgerEntry:
        submissions = [
            self.store.put_json(
                submission_key(number, submission, LeaseKey(0, 1)),
                SubmissionManifest(
                    incarnation=0, lease_epoch=1, step=number, submission=submission, groups=refs
                ).model_dump(),
            )
            for submission, refs in enumerate(submitted)
        ]
        entry = an_entry(number, tuple(str(row) for row in batch)).model_copy(
            update={
                "digests": [ref.sha256 for ref in batch.values()],
                "submissions": submissions,
                **fields,
            }
        )
        return commit(self.store, entry)

    def ends(self, ending: Ending) -> None:
        record_command(self.store, Command(at=1.0, text=ending, ending=ending))


@pytest.fixture
def records(tmp_path: Path) -> Records:
    """The records of a run with six rows: step 1 trains rows 0 and 1, row 2 is rejected."""
    found = Records(RunRef(store=str(tmp_path), id="run"))
    create_run_folder(found.run, CONFIG, Owner(first_execution_id="first"))
    found.store.put("rows.jsonl", b"{}\n" * 6)
    batch = {row: found.group(row) for row in (0, 1)}
    found.step(1, batch, [[batch[0]], [batch[1]]])
    found.group(2, "filtered")
    return found


def complaint(records: Records) -> str:
    with pytest.raises(VerificationError) as failure:
        check_records(records.run)
    return str(failure.value)


UNREADABLE = {
    "advantages": {"key": "advantages", "sha256": "0" * 64},
    "groups": ["3", "x"],
    "datums": 1,
}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"digests": []}, "it has 1 groups and 0 digests"),
        ({"groups": ["three"]}, "groups.0: Value error, invalid literal for int() with base 10:"),
        ({"prepared": UNREADABLE}, "prepared.groups.1: Value error, invalid literal for int()"),
    ],
    ids=["digests", "groups", "prepared"],
)
def test_an_entry_that_no_run_wrote_is_named(
    records: Records, fields: dict[str, Any], said: str
) -> None:
    group = records.group(3)
    entry = records.step(2, {3: group}, [[group]])
    records.store.put_json(ledger_key(2), entry.model_dump(mode="json") | fields)
    assert complaint(records).startswith(f"{records.store.path(ledger_key(2))} is damaged: {said}")


def test_a_stopped_run_lists_its_open_rows(records: Records) -> None:
    records.ends("stopped")
    outcomes = check_records(records.run)
    assert (outcomes.trained, outcomes.rejected, outcomes.ending) == (2, 1, "stopped")
    assert outcomes.open_rows == "rows 3, 4, 5"


def test_every_row_of_a_completed_run_has_an_outcome(records: Records) -> None:
    records.ends("completed")
    assert "the run completed, and rows 3, 4, 5" in complaint(records)

    batch = {row: records.group(row) for row in (3, 4)}
    flat = records.group(5, advantage=0.0)
    records.step(2, batch | {5: flat}, [[batch[3], batch[4]]])
    assert check_records(records.run).open == []


def test_a_group_in_two_submissions_is_named(records: Records) -> None:
    batch = {row: records.group(row) for row in (3, 4)}
    records.step(2, batch, [[batch[3], batch[4]], [batch[3]]])
    assert "step 2 submitted row 3 2 times, and once is right" in complaint(records)


def test_a_group_in_no_submission_is_named(records: Records) -> None:
    batch = {row: records.group(row) for row in (3, 4)}
    records.step(2, batch, [[batch[3]]])
    assert "step 2 submitted row 4 0 times, and once is right" in complaint(records)


def test_a_group_without_a_signal_is_not_submitted(records: Records) -> None:
    batch = {3: records.group(3), 4: records.group(4, advantage=0.0)}
    records.step(2, batch, [[batch[3], batch[4]]])
    assert "submitted row 4 1 times, and not at all is right" in complaint(records)


def test_a_prepared_batch_names_its_groups_without_a_signal(records: Records) -> None:
    batch = {3: records.group(3), 4: records.group(4, advantage=0.0)}
    advantages = records.store.put("steps/000002/advantages.parquet", b"numbers")
    prepared = PreparedBatch(advantages=advantages, groups=[GroupKey(cursor=4)], datums=2)
    records.step(2, batch, [[batch[4]]], prepared=prepared)
    assert check_records(records.run).trained == 4


def test_a_group_of_another_batch_is_named(records: Records) -> None:
    batch, other = {3: records.group(3)}, records.group(4)
    records.step(2, batch, [[batch[3], other]])
    assert "step 2 submitted row 4, which isn't in its batch" in complaint(records)


def test_a_step_without_update_has_no_signal(records: Records) -> None:
    batch = {3: records.group(3)}
    records.step(2, batch, [[batch[3]]], updated=False)
    assert "step 2 did not change weights" in complaint(records)


def test_a_row_that_was_trained_and_rejected_is_named(records: Records) -> None:
    records.group(1, "filtered", attempt=1)
    assert "row 1 was rejected, in " in complaint(records)
    assert "row-000001.1.json, and trained, in step 1" in complaint(records)


def test_a_row_that_was_rejected_twice_is_named(records: Records) -> None:
    records.group(2, "incomplete", attempt=1)
    assert "row 2 was rejected twice: in " in complaint(records)


def test_a_row_that_the_run_doesnt_have_is_named(records: Records) -> None:
    records.group(6, "filtered")
    assert "row 6: the run has 6 rows" in complaint(records)


def test_a_version_that_doesnt_follow_is_named(records: Records) -> None:
    batch = {3: records.group(3)}
    records.step(2, batch, [[batch[3]]], version=3)
    assert "step 2 published version 3" in complaint(records)


def changed(path: Path) -> None:
    path.write_bytes(b"other bytes")


@pytest.mark.parametrize(
    ("damage", "key", "named"),
    [
        (changed, rollout_key(GroupKey(cursor=0), 1), "has changed since it was recorded"),
        (Path.unlink, rollout_key(GroupKey(cursor=0), 1), "isn't in the store"),
        (changed, rollout_key(GroupKey(cursor=2), 0), "has changed since it was recorded"),
        (changed, group_key(GroupKey(cursor=1)), "has changed since it was recorded"),
        (Path.unlink, submission_key(1, 0, LeaseKey(0, 1)), "isn't in the store"),
        (changed, ledger_key(1), "isn't JSON"),
        (changed, "rows.jsonl", "is damaged"),
        (Path.unlink, "rows.jsonl", "is missing"),
    ],
)
def test_a_damaged_file_is_named(
    records: Records, damage: Callable[[Path], None], key: str, named: str
) -> None:
    path = Path(records.store.path(key))
    damage(path)
    assert str(path) in complaint(records)
    assert named in complaint(records)


def test_a_record_of_another_form_is_named(records: Records) -> None:
    records.store.put_json(ledger_key(1), {"step": 1})
    assert "000001.json is damaged: incarnation: Field required" in complaint(records)
