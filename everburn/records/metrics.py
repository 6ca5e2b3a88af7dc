"""The metrics file: `metrics.jsonl`, one flat JSON object per line.

Owns the file and the rule that a (stream, index) has one record, whatever is retried. There are two
streams, each with its own index: optimizer steps (`rollout/step`) and producer events
(`producer/event`). The file is append-only, so a paused writer that writes late removes nothing:
later values of a record are a new line, and a line may be repeated. Doesn't own the meaning of the
numbers (docs/metrics.md).
"""

import json
from collections.abc import Iterable, Mapping

from pydantic import BaseModel, ConfigDict, Field

from everburn.records.keys import METRICS_KEY
from everburn.records.store import ArtifactStore

Number = float | int | bool
Value = Number | str
"""Text only for the reason why a run waits."""

TAIL = 65536
"""Bytes at the file's end that are searched for lines of an earlier attempt: few lines come between
two attempts, and a long run's file has hundreds of megabytes."""
STEP_STREAM = "rollout/step"
PRODUCER_STREAM = "producer/event"


class Record(BaseModel):
    """The values of one record. A value that can't be computed is absent, never a sentinel."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    stream: str
    index: int
    values: dict[str, Value] = Field(default_factory=dict)

    @property
    def key(self) -> tuple[str, int]:
        return self.stream, self.index


def record(store: ArtifactStore, records: Iterable[Record]) -> None:
    """Append the records that aren't in the file's tail yet. Idempotent."""
    present = {record.key for record in _merged(store.last_lines(METRICS_KEY, TAIL))}
    _append(store, [record for record in records if record.key not in present])


def amend(store: ArtifactStore, stream: str, index: int, values: Mapping[str, Value]) -> None:
    """Add values to a record, or create it: an evaluation ends after its step was recorded."""
    amendment = Record(stream=stream, index=index, values=dict(values))
    tail = _merged(store.last_lines(METRICS_KEY, TAIL))
    known = {record.key: record.values for record in tail}.get(amendment.key)
    if known is None or not amendment.values.items() <= known.items():
        _append(store, [amendment])


def read(store: ArtifactStore) -> list[Record]:
    """All records with their added values, in order of their first lines.

    A line that a crash cut off is skipped; its record will be written again.
    """
    if not store.exists(METRICS_KEY):
        return []
    return _merged(store.get(METRICS_KEY).decode().splitlines())


def _merged(lines: Iterable[str]) -> list[Record]:
    records: dict[tuple[str, int], Record] = {}
    for line in lines:
        found = _parse(line)
        if found is not None:
            known = records.get(found.key)
            values = found.values if known is None else known.values | found.values
            records[found.key] = found.model_copy(update={"values": values})
    return list(records.values())


def _append(store: ArtifactStore, records: list[Record]) -> None:
    if records:
        store.append_lines(METRICS_KEY, [_line(record) for record in records])


def _line(record: Record) -> str:
    return json.dumps({record.stream: record.index} | record.values, allow_nan=False)


def _parse(line: str) -> Record | None:
    try:
        values = json.loads(line)
    except json.JSONDecodeError:
        return None
    for stream in (STEP_STREAM, PRODUCER_STREAM):
        if stream in values:
            return Record(stream=stream, index=values.pop(stream), values=values)
    return None
