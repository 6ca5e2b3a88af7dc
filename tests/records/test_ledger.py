"""The ledger: append-only, idempotent, and an error if two writers disagree."""

from pathlib import Path

import pytest

from everburn.records.ledger import LedgerConflictError, as_rows, commit, find_entry, read_ledger
from everburn.records.store import ArtifactStore
from support.records import an_entry
from support.sessions import ADAM


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return ArtifactStore(str(tmp_path))


def test_steps_are_read_back_in_order(store: ArtifactStore) -> None:
    for step in (1, 2, 3):
        commit(store, an_entry(step, (str(2 * step), str(2 * step + 1))))

    assert [entry.step for entry in read_ledger(store)] == [1, 2, 3]


def test_committing_again_returns_what_was_committed_first(store: ArtifactStore) -> None:
    first = commit(store, an_entry(1))
    again = an_entry(1).model_copy(update={"seconds": 99.0})

    assert commit(store, again) == first
    assert find_entry(store, 1) == first


def test_another_batch_for_a_committed_step_is_refused(store: ArtifactStore) -> None:
    commit(store, an_entry(1))

    with pytest.raises(LedgerConflictError, match=r"step 1 was committed with groups .*'0', '1'"):
        commit(store, an_entry(1, ("0", "7")))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("adam", ADAM.model_copy(update={"learning_rate": 2e-3})),
        ("version", 7),
        ("updated", False),
        ("loss", "gspo"),
        ("loss_config", {"clip": 0.1}),
    ],
)
def test_no_other_field_of_a_committed_step_can_change(
    store: ArtifactStore, field: str, value: object
) -> None:
    commit(store, an_entry(1))

    with pytest.raises(LedgerConflictError, match=f"step 1 was committed with {field} "):
        commit(store, an_entry(1).model_copy(update={field: value}))


def test_a_step_without_its_predecessor_is_refused(store: ArtifactStore) -> None:
    with pytest.raises(LedgerConflictError, match="step 1 is missing"):
        commit(store, an_entry(2))


def test_the_ledger_becomes_a_table(store: ArtifactStore) -> None:
    import pandas

    commit(store, an_entry(1))
    table = pandas.DataFrame(as_rows(read_ledger(store)))

    assert table.loc[0, "adam/learning_rate"] == ADAM.learning_rate
    assert table.loc[0, "rollout/raw_reward"] == 0.5
