"""The metrics file: `metrics.jsonl`, one flat JSON object per record of a stream.

Owns the file and the rule that a (stream, index) has one record, whatever is retried. Two streams
with clocks of their own: optimizer steps (`rollout/step`) and producer events (`producer/event`).
Doesn't own what the numbers mean (docs/metrics.md). One writer at a time.
"""

import json
from collections.abc import Iterable, Mapping

from pydantic import BaseModel, ConfigDict, Field

from everburn.refs import METRICS_KEY
from everburn.store import ArtifactStore

Number = float | int | bool
Value = Number | str
"""Text only where a record says what a run waits for."""

STEP_STREAM = "rollout/step"
PRODUCER_STREAM = "producer/event"


class Record(BaseModel):
    """The values of one record; what can't be computed is absent, never a sentinel."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    stream: str
    index: int
    values: dict[str, Value] = Field(default_factory=dict)

    @property
    def key(self) -> tuple[str, int]:
        return self.stream, self.index


def record(store: ArtifactStore, records: Iterable[Record]) -> None:
    """Append those records that aren't there yet."""
    present = {record.key for record in read(store)}
    fresh = [record for record in records if record.key not in present]
    if fresh:
        store.append_lines(METRICS_KEY, [_line(record) for record in fresh])


def amend(store: ArtifactStore, stream: str, index: int, values: Mapping[str, Value]) -> None:
    """Add values to a record, or make it: an evaluation ends after its step was recorded."""
    records = {record.key: record for record in read(store)}
    known = records.get((stream, index))
    merged = dict(values) if known is None else known.values | dict(values)
    records[stream, index] = Record(stream=stream, index=index, values=merged)
    store.put(METRICS_KEY, "".join(_line(r) + "\n" for r in records.values()).encode())


def read(store: ArtifactStore) -> list[Record]:
    """All records, in the order in which they were written.

    A line that was cut off by a crash is left out; its record will be written again.
    """
    if not store.exists(METRICS_KEY):
        return []
    found = (_parse(line) for line in store.get(METRICS_KEY).decode().splitlines())
    return [record for record in found if record is not None]


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
