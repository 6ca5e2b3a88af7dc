"""Dataset rows: reading and checking them, and the order in which a run takes them.

Owns the formats, the errors about rows, and the shuffled, epoch-repeated order that maps a cursor
to a row. Doesn't own which rows are done (scheduling/cursor.py).
"""

import json
import random
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from everburn.config import DatasetSource
from everburn.records.ids import RunRef
from everburn.records.store import ArtifactStore, CorruptArtifactError
from everburn.usercode.entrypoints import call

Row = dict[str, Any]


class DatasetError(ValueError):
    """Unusable rows; names the source, the line and the remedy."""


def load_rows(source: DatasetSource, max_rows: int | None = None) -> list[Row]:
    """Read rows from a .jsonl or .parquet file or URL, or from a named function.

    Raises:
        DatasetError: not readable, not rows of JSON objects (with the line), or empty.
    """
    name = source if isinstance(source, str) else source.name
    rows = _read_file(source) if isinstance(source, str) else _from_function(name, call(source))
    if not rows:
        raise DatasetError(f"{name} has no rows: a run needs at least one")
    return rows[:max_rows]


def _read_file(path: str) -> list[Row]:
    import fsspec

    try:
        with fsspec.open(path, "rb") as file:
            data: bytes = file.read()
    except (OSError, ValueError, ImportError) as error:
        raise DatasetError(
            f"can't read dataset {path}: {error}; relative paths start at the folder of the "
            "worker processes"
        ) from error
    if path.endswith(".parquet"):
        return _read_parquet(path, data)
    return _read_jsonl(path, data)


def _read_jsonl(path: str, data: bytes) -> list[Row]:
    rows = []
    # Split as bytes: in text, U+2028 and similar characters would end a line too.
    for number, line in enumerate(data.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise DatasetError(
                f"{path}:{number}: not UTF-8 text, at byte {error.start} of the line"
            ) from None
        except json.JSONDecodeError as error:
            raise DatasetError(
                f"{path}:{number}: not valid JSON: {error.msg} (column {error.colno}); "
                "each line is one JSON object"
            ) from None
        rows.append(_check_row(row, f"{path}:{number}"))
    return rows


def _read_parquet(path: str, data: bytes) -> list[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        rows = pq.read_table(pa.BufferReader(data)).to_pylist()
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DatasetError(f"{path} isn't a Parquet file, or is damaged: {error}") from None
    return [_check_row(row, f"{path}, row {number}") for number, row in enumerate(rows)]


def _from_function(name: str, rows: object) -> list[Row]:
    if not isinstance(rows, Iterable):
        raise DatasetError(f"{name} returned {type(rows).__name__}, not a list of rows")
    return [_check_row(row, f"{name}, row {number}") for number, row in enumerate(rows)]


def _check_row(row: object, where: str) -> Row:
    if not isinstance(row, dict):
        raise DatasetError(f"{where}: a row is a JSON object, not {type(row).__name__}")
    try:
        json.dumps(row, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise DatasetError(f"{where}: the row can't be written as JSON: {error}") from None
    return row


def write_rows(store: ArtifactStore, key: str, rows: list[Row]) -> None:
    """Copy the rows into the run's folder, so that every worker reads the same rows even if their
    source changes. An existing copy stays."""
    store.put(key, "".join(json.dumps(row) + "\n" for row in rows).encode(), once=True)


def stored_rows(run: RunRef, key: str) -> list[Row]:
    """The rows that `write_rows` wrote. Not cached, because a run's id may be used again.

    Raises:
        FileNotFoundError, CorruptArtifactError, StoreError
    """
    store = ArtifactStore.of(run)
    lines = store.get(key).splitlines()
    try:
        return [json.loads(line) for line in lines]
    except ValueError as error:
        raise CorruptArtifactError(f"{store.path(key)} isn't JSON: {error}") from None


@dataclass(frozen=True)
class Position:
    """The epoch and the row to which a cursor refers."""

    cursor: int
    epoch: int
    row_index: int
    end_of_epoch: bool


@dataclass(frozen=True)
class RowOrder:
    """The order of rows over all epochs; each epoch has its own permutation."""

    rows: int
    shuffle: bool
    seed: int

    def position(self, cursor: int) -> Position:
        epoch, place = divmod(cursor, self.rows)
        row_index = _permutation(self.rows, self.seed, epoch)[place] if self.shuffle else place
        return Position(cursor, epoch, row_index, place == self.rows - 1)


@lru_cache(maxsize=4)
def _permutation(rows: int, seed: int, epoch: int) -> list[int]:
    order = list(range(rows))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return order
