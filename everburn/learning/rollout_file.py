"""The file of one finished completion: one Parquet row per segment.

Owns the columns, which pandas, duckdb and datasets can read and from which datums are built.
Doesn't own keys (records/keys.py) or validation (rollouts/contract.py).
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Any

from pydantic import BaseModel, ConfigDict

from everburn.records.ids import StoredRef
from everburn.records.store import ArtifactStore
from everburn.rollouts.contract import RolloutRun, RolloutSample


class CompletionRecord(BaseModel):
    """The identity and the description of a completion."""

    model_config = ConfigDict(extra="forbid")

    run: str
    cursor: int
    row_index: int
    epoch: int
    attempt: int
    incarnation: int
    completion: int
    version: int
    """Policy version at admission."""
    versions: list[int]
    """Policy version of each sampling call."""
    at_token_limit: bool
    output_tokens: int
    prompt: str
    answer: str
    info: dict[str, Any]
    seconds: float
    """Wall time of the rollout function."""


def write_rollout(
    store: ArtifactStore, key: str, record: CompletionRecord, run: RolloutRun
) -> StoredRef:
    """Write a validated rollout."""
    values = record.model_dump(exclude={"info"}) | {"info": json.dumps(record.info)}
    count = len(run.segments)
    columns: dict[str, list[Any]] = {name: [value] * count for name, value in values.items()}
    columns["segment"] = list(range(count))
    columns["tokens"] = [list(map(int, s.tokens)) for s in run.segments]
    columns["logprobs"] = [list(map(float, s.logprobs)) for s in run.segments]
    columns["loss_mask"] = [list(map(int, s.loss_mask)) for s in run.segments]
    columns["reward"] = [float(s.reward) for s in run.segments]
    columns["raw_logprobs"] = [_list_of(float, s.raw_logprobs) for s in run.segments]
    columns["routing"] = [_list_of(str, s.routing) for s in run.segments]
    columns["turns"] = [_list_of(int, s.turns) for s in run.segments]
    columns["ground_truth_tokens"] = [_list_of(int, run.ground_truth_tokens)] * count
    return store.put_table(key, columns, _schema())


def read_rollout(store: ArtifactStore, ref: str | StoredRef) -> tuple[CompletionRecord, RolloutRun]:
    rows = store.get_table(ref)
    record = {name: rows[0][name] for name in CompletionRecord.model_fields}
    record["info"] = json.loads(record["info"])
    segments = [
        RolloutSample(**{field.name: row[field.name] for field in fields(RolloutSample)})
        for row in rows
    ]
    truth = rows[0]["ground_truth_tokens"]
    return CompletionRecord(**record), RolloutRun(segments, record["answer"], record["info"], truth)


def _list_of(kind: Callable[[Any], Any], values: Iterable[Any] | None) -> list[Any] | None:
    return None if values is None else [kind(value) for value in values]


def _schema() -> Any:
    import pyarrow as pa

    return pa.schema(
        [
            ("run", pa.string()),
            ("cursor", pa.int64()),
            ("row_index", pa.int64()),
            ("epoch", pa.int32()),
            ("attempt", pa.int32()),
            ("incarnation", pa.int32()),
            ("completion", pa.int32()),
            ("version", pa.int32()),
            ("versions", pa.list_(pa.int32())),
            ("segment", pa.int32()),
            ("reward", pa.float64()),
            ("prompt", pa.string()),
            ("answer", pa.string()),
            ("info", pa.string()),
            ("at_token_limit", pa.bool_()),
            ("output_tokens", pa.int32()),
            ("seconds", pa.float64()),
            ("tokens", pa.list_(pa.int32())),
            ("loss_mask", pa.list_(pa.int8())),
            ("logprobs", pa.list_(pa.float32())),
            ("raw_logprobs", pa.list_(pa.float32())),
            ("routing", pa.list_(pa.string())),
            ("turns", pa.list_(pa.int32())),
            ("ground_truth_tokens", pa.list_(pa.int32())),
        ]
    )
