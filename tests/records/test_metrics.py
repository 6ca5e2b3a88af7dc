"""The metrics file has one record per stream and index, whatever is retried."""

import json
import tracemalloc
from pathlib import Path

import pytest

from everburn.records import metrics
from everburn.records.metrics import PRODUCER_STREAM, STEP_STREAM, Record
from everburn.records.store import ArtifactStore


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return ArtifactStore(str(tmp_path))


def lines(store: ArtifactStore) -> list[dict[str, float]]:
    return [json.loads(line) for line in store.get("metrics.jsonl").splitlines()]


def a_step(index: int, **values: float) -> Record:
    return Record(stream=STEP_STREAM, index=index, values=values)


def test_records_are_flat_lines(store: ArtifactStore) -> None:
    metrics.record(store, [Record(stream=STEP_STREAM, index=1, values={"train/lr": 0.1})])

    assert lines(store) == [{"rollout/step": 1, "train/lr": 0.1}]


def test_an_existing_record_is_not_written_again(store: ArtifactStore) -> None:
    metrics.record(store, [a_step(1, a=1.0)])
    metrics.record(store, [a_step(1, a=2.0), a_step(2, a=3.0)])

    assert lines(store) == [{"rollout/step": 1, "a": 1.0}, {"rollout/step": 2, "a": 3.0}]


def test_each_of_the_two_streams_has_its_own_clock(store: ArtifactStore) -> None:
    metrics.record(store, [a_step(1), Record(stream=PRODUCER_STREAM, index=1)])

    assert [record.key for record in metrics.read(store)] == [
        (STEP_STREAM, 1),
        (PRODUCER_STREAM, 1),
    ]


def test_an_evaluation_adds_to_the_record_of_its_step(store: ArtifactStore) -> None:
    metrics.record(store, [a_step(1, a=1.0), a_step(2, a=2.0)])
    metrics.amend(store, STEP_STREAM, 1, {"eval/reward": 0.5})
    metrics.amend(store, STEP_STREAM, 1, {"eval/reward": 0.5})

    assert [(r.index, r.values) for r in metrics.read(store)] == [
        (1, {"a": 1.0, "eval/reward": 0.5}),
        (2, {"a": 2.0}),
    ]
    assert lines(store)[2:] == [{"rollout/step": 1, "eval/reward": 0.5}], "the file only grows"


def test_a_late_writer_removes_no_record(
    store: ArtifactStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer has read the file, was frozen while others wrote, and continues."""
    metrics.record(store, [a_step(1, a=1.0)])
    write = ArtifactStore.append_lines

    def write_late(late: ArtifactStore, key: str, lines: list[str]) -> None:
        monkeypatch.undo()
        metrics.amend(store, STEP_STREAM, 1, {"eval/reward": 0.5})
        metrics.record(store, [a_step(2, a=2.0)])
        write(late, key, lines)

    monkeypatch.setattr(ArtifactStore, "append_lines", write_late)
    metrics.amend(store, STEP_STREAM, 1, {"eval/reward": 0.5})

    assert [(r.index, r.values) for r in metrics.read(store)] == [
        (1, {"a": 1.0, "eval/reward": 0.5}),
        (2, {"a": 2.0}),
    ]


def test_a_table_of_the_file_has_a_row_per_record(store: ArtifactStore) -> None:
    """The table is read in the way that docs/metrics.md describes."""
    import pandas

    metrics.record(store, [a_step(1, a=1.0), a_step(2, a=2.0)])
    metrics.amend(store, STEP_STREAM, 1, {"eval/reward": 0.5})
    file = pandas.read_json(store.path("metrics.jsonl"), lines=True)
    table = file.groupby("rollout/step").last()

    assert table["a"].to_dict() == {1: 1.0, 2: 2.0}
    assert table.loc[1, "eval/reward"] == 0.5


def test_an_evaluation_before_the_first_step_has_its_own_record(store: ArtifactStore) -> None:
    metrics.amend(store, STEP_STREAM, 0, {"eval/reward": 0.5})
    metrics.record(store, [a_step(1)])

    assert [record.index for record in metrics.read(store)] == [0, 1]


def test_a_line_that_a_crash_cut_off_is_written_again(store: ArtifactStore) -> None:
    metrics.record(store, [a_step(1, a=1.0)])
    with Path(store.path("metrics.jsonl")).open("a") as file:
        file.write('{"rollout/step": 2, "a"')
    metrics.record(store, [a_step(2, a=2.0)])

    assert [(r.index, r.values) for r in metrics.read(store)] == [(1, {"a": 1.0}), (2, {"a": 2.0})]


LONG = 5000
"""Steps of a run whose metrics file has a few megabytes."""


@pytest.fixture
def long_store(store: ArtifactStore) -> ArtifactStore:
    values = {f"train/metric-{number}": 0.123456789 for number in range(20)}
    metrics.record(store, [a_step(index, **values) for index in range(1, LONG + 1)])
    return store


def test_a_commit_of_a_long_run_reads_the_end_of_its_file_only(long_store: ArtifactStore) -> None:
    size = Path(long_store.path("metrics.jsonl")).stat().st_size
    tracemalloc.start()
    try:
        metrics.record(long_store, [a_step(LONG, a=1.0), a_step(LONG + 1, a=1.0)])
        metrics.amend(long_store, STEP_STREAM, LONG, {"eval/reward": 0.5})
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert peak < size / 4
    assert [line["rollout/step"] for line in lines(long_store)[-2:]] == [LONG + 1, LONG]


def test_late_values_join_their_record_however_old_it_is(
    long_store: ArtifactStore,
) -> None:
    before = metrics.read(long_store)
    metrics.amend(long_store, STEP_STREAM, 1, {"eval/reward": 0.5})
    metrics.record(long_store, [before[1]])

    first, *others = metrics.read(long_store)
    assert (first.key, others) == (before[0].key, before[1:])
    assert first.values == before[0].values | {"eval/reward": 0.5}


def test_a_value_that_is_not_a_number_is_refused(store: ArtifactStore) -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        metrics.record(store, [a_step(1, a=float("nan"))])
