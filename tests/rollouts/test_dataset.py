"""Rows: reading and checking them, and the order in which a run takes them."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from everburn.config import Entrypoint
from everburn.records.ids import RunRef
from everburn.records.keys import ROWS_KEY
from everburn.records.store import ArtifactStore
from everburn.rollouts.dataset import DatasetError, RowOrder, load_rows, stored_rows, write_rows

Write = Callable[[str | bytes], str]


@pytest.fixture
def jsonl(tmp_path: Path) -> Write:
    """Write a .jsonl file and return its path."""

    def write(text: str | bytes) -> str:
        path = tmp_path / "rows.jsonl"
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return str(path)

    return write


def complaint(source: str | Entrypoint) -> str:
    with pytest.raises(DatasetError) as caught:
        load_rows(source)
    return str(caught.value)


def test_a_jsonl_file_has_one_row_a_line(jsonl: Write):
    path = jsonl('{"question": "1+1", "answer": 2}\r\n\n{"question": "ä", "answer": null}')
    assert load_rows(path) == [
        {"question": "1+1", "answer": 2},
        {"question": "ä", "answer": None},
    ]


def test_only_newlines_end_a_line(jsonl: Write):
    rows = [{"text": "a\u2028b\u0085c\x0bd"}, {"text": "e"}]
    path = jsonl("\n".join(json.dumps(row, ensure_ascii=False) for row in rows))
    assert load_rows(path) == rows


def test_only_the_first_rows_are_used_if_configured(jsonl: Write):
    path = jsonl('{"n": 0}\n{"n": 1}\n{"n": 2}\n')
    assert load_rows(path, max_rows=2) == [{"n": 0}, {"n": 1}]
    assert len(load_rows(path, max_rows=9)) == 3


@pytest.mark.parametrize(
    ("line", "complains"),
    [
        ("{'n': 1}", "not valid JSON: Expecting property name enclosed in double quotes"),
        ('{"n": 1', "not valid JSON: Expecting ',' delimiter (column 8)"),
        ('{"n": 1} {"n": 2}', "not valid JSON: Extra data (column 10)"),
        ("[1, 2]", "a row is a JSON object, not list"),
        ('"text"', "a row is a JSON object, not str"),
        ("null", "a row is a JSON object, not NoneType"),
        ('{"reward": NaN}', "the row can't be written as JSON: Out of range float values"),
        ('{"deep": [{"x": -Infinity}]}', "the row can't be written as JSON: Out of range float"),
        (b'{"text": "\xff"}', "not UTF-8 text, at byte 10 of the line"),
    ],
)
def test_a_bad_line_is_named_by_its_number(jsonl: Write, line: str | bytes, complains: str):
    line = line.encode() if isinstance(line, str) else line
    path = jsonl(b'{"n": 0}\n\n' + line + b'\n{"n": 3}\n')
    assert complaint(path).startswith(f"{path}:3: {complains}")


@pytest.mark.parametrize("text", ["", "\n\n  \n"])
def test_a_file_without_rows_is_refused(jsonl: Write, text: str):
    path = jsonl(text)
    assert complaint(path) == f"{path} has no rows: a run needs at least one"


def test_a_missing_file_is_named_with_the_folder_that_paths_start_from():
    text = complaint("no/such/rows.jsonl")
    assert "can't read dataset no/such/rows.jsonl: " in text
    assert "No such file" in text
    assert "relative paths start at the folder of the worker processes" in text


def test_an_unknown_kind_of_url_is_refused():
    assert "can't read dataset nowhere://rows.jsonl: " in complaint("nowhere://rows.jsonl")


def test_rows_can_come_from_a_url(jsonl: Write):
    assert load_rows("file://" + jsonl('{"n": 1}')) == [{"n": 1}]


def parquet(path: Path, **columns: list[Any]) -> str:
    pq.write_table(pa.table(columns), path)
    return str(path)


def test_a_parquet_file_has_one_row_a_record(tmp_path: Path):
    path = parquet(tmp_path / "rows.parquet", question=["a", "b"], choices=[[1, 2], []])
    assert load_rows(path) == [
        {"question": "a", "choices": [1, 2]},
        {"question": "b", "choices": []},
    ]


@pytest.mark.parametrize(
    ("values", "complains"),
    [
        ([0.5, math.nan], "the row can't be written as JSON: Out of range float values"),
        ([b"ok", b"\xff"], "the row can't be written as JSON: Object of type bytes"),
    ],
)
def test_a_parquet_row_that_isnt_json_is_named(tmp_path: Path, values: list[Any], complains: str):
    path = parquet(tmp_path / "rows.parquet", x=values)
    bad = 1 if isinstance(values[0], float) else 0
    assert complaint(path).startswith(f"{path}, row {bad}: {complains}")


def test_something_else_named_parquet_is_refused(tmp_path: Path):
    path = tmp_path / "rows.parquet"
    path.write_text('{"n": 1}\n')
    assert complaint(str(path)).startswith(f"{path} isn't a Parquet file, or is damaged: ")


@pytest.mark.parametrize("damaged", [slice(4, 60), slice(-200, -8), slice(-4, None)])
def test_a_damaged_parquet_file_is_refused(tmp_path: Path, damaged: slice):
    path = Path(parquet(tmp_path / "rows.parquet", n=list(range(1000))))
    data = bytearray(path.read_bytes())
    data[damaged] = b"\xee" * len(data[damaged])
    path.write_bytes(data)
    assert complaint(str(path)).startswith(f"{path} isn't a Parquet file, or is damaged: ")


def make_rows(count: int, bad: int | None = None) -> Any:
    """A user's dataset function."""
    return ({"n": math.nan if n == bad else n} for n in range(count))


def not_rows() -> int:
    return 5


def test_rows_can_come_from_a_function():
    source = Entrypoint(name=f"{__name__}:make_rows", kwargs={"count": 3})
    assert load_rows(source) == [{"n": 0}, {"n": 1}, {"n": 2}]
    assert load_rows(source, max_rows=1) == [{"n": 0}]


@pytest.mark.parametrize(
    ("kwargs", "text"),
    [
        ({"count": 3, "bad": 2}, "make_rows, row 2: the row can't be written as JSON"),
        ({"count": 0}, "make_rows has no rows: a run needs at least one"),
    ],
)
def test_rows_from_a_function_are_checked_like_all_others(kwargs: dict[str, Any], text: str):
    source = Entrypoint(name=f"{__name__}:make_rows", kwargs=kwargs)
    assert complaint(source).startswith(f"{__name__}:{text}")


def test_a_function_that_returns_no_rows_is_refused():
    source = Entrypoint(name=f"{__name__}:not_rows")
    assert complaint(source) == f"{source.name} returned int, not a list of rows"


def test_rows_are_kept_with_the_run_if_their_source_changes(tmp_path: Path, jsonl: Write):
    path = jsonl('{"text": "a\\u2028b"}\n{"text": "\\ud83d\\ude00"}\n')
    run = RunRef(store=str(tmp_path / "runs"), id="r1")
    rows = load_rows(path)
    write_rows(ArtifactStore.of(run), ROWS_KEY, rows)
    Path(path).unlink()
    assert stored_rows(run, ROWS_KEY) == rows == [{"text": "a\u2028b"}, {"text": "😀"}]


def test_rows_that_are_written_late_change_nothing(tmp_path: Path):
    """A preparation that was given up can still be writing."""
    run = RunRef(store=str(tmp_path / "runs"), id="r1")
    store = ArtifactStore.of(run)
    write_rows(store, ROWS_KEY, [{"text": "first"}])
    kept = store.ref(ROWS_KEY)
    write_rows(store, ROWS_KEY, [{"text": "late"}])
    assert store.ref(ROWS_KEY) == kept
    assert stored_rows(run, ROWS_KEY) == [{"text": "first"}]


def test_rows_belong_to_the_run_that_owns_the_id_now(tmp_path: Path):
    run = RunRef(store=str(tmp_path), id="r1")
    store = ArtifactStore.of(run)
    for text in ("a", "b"):
        write_rows(store, ROWS_KEY, [{"text": text}])
        assert stored_rows(run, ROWS_KEY) == [{"text": text}]
        store.delete(ROWS_KEY)


def epoch_rows(order: RowOrder, epoch: int) -> list[int]:
    positions = [order.position(epoch * order.rows + place) for place in range(order.rows)]
    assert {position.epoch for position in positions} == {epoch}
    assert [position.end_of_epoch for position in positions] == [
        place == order.rows - 1 for place in range(order.rows)
    ]
    return [position.row_index for position in positions]


@pytest.mark.parametrize("rows", [1, 2, 7, 100])
def test_each_epoch_is_a_permutation(rows: int):
    order = RowOrder(rows=rows, shuffle=True, seed=3)
    for epoch in range(5):
        assert sorted(epoch_rows(order, epoch)) == list(range(rows))


def test_epochs_and_seeds_differ():
    orders = {
        tuple(epoch_rows(RowOrder(rows=50, shuffle=True, seed=seed), epoch))
        for seed in range(3)
        for epoch in range(3)
    }
    assert len(orders) == 9


def test_the_order_is_the_same_in_every_process_and_python():
    """The expected order is recorded: a resumed run must continue in the order of its start."""
    order = RowOrder(rows=8, shuffle=True, seed=0)
    assert epoch_rows(order, 0) == [0, 2, 1, 4, 6, 7, 3, 5]
    assert epoch_rows(order, 1) == [6, 1, 0, 2, 3, 4, 5, 7]


def test_without_shuffling_rows_keep_their_order():
    order = RowOrder(rows=4, shuffle=False, seed=9)
    assert [epoch_rows(order, epoch) for epoch in (0, 1)] == [[0, 1, 2, 3]] * 2


def test_positions_can_be_asked_for_in_any_order():
    order = RowOrder(rows=5, shuffle=True, seed=1)
    forward = [order.position(cursor) for cursor in range(40)]
    backward = [order.position(cursor) for cursor in reversed(range(40))]
    assert forward == backward[::-1]
    assert [position.cursor for position in forward] == list(range(40))
