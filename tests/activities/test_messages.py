"""The largest messages stay below the limit of a payload."""

import pytest
from pydantic import BaseModel

from activities.messages import (
    CompleteGroup,
    LeaseRef,
    Reconcile,
    Reconciled,
    RecordProducer,
    SubmitGroups,
)
from everburn.config.fields import MAX_COMPLETIONS
from everburn.records.ids import GroupKey, GroupResult, RolloutOutcome, RunRef
from everburn.records.metrics import PRODUCER_STREAM, Record
from everburn.scheduling.queue import MAX_GROUPS_PER_SUBMISSION
from support.histories import MAX_PAYLOAD
from workflows.children.prompt_group import MAX_ERRORS
from workflows.run.producer import MAX_GROUPS_OUT
from workflows.run.recorder import MAX_RECORDS

RUN = RunRef(store="s3://bucket/a-folder-of-runs", id="a-run-with-quite-a-long-name")
KEYS = [
    GroupKey(cursor=10**6 + 2 * place, attempt=9, incarnation=99) for place in range(MAX_GROUPS_OUT)
]
RESULTS = [
    GroupResult(
        key=key, version=1000, outcome="accepted", survivors=16, datums=160, reward_sum=1 / 3
    )
    for key in KEYS
]
OUTCOMES = [
    RolloutOutcome(completion=index, status="failed", error="x" * (MAX_ERRORS // MAX_COMPLETIONS))
    for index in range(MAX_COMPLETIONS)
]
VALUES = {f"producer/a_name_of_some_length_{n}": 1 / 3 for n in range(18)}
RECORDS = [Record(stream=PRODUCER_STREAM, index=10**6, values=VALUES) for _ in range(MAX_RECORDS)]


@pytest.mark.parametrize(
    "message",
    [
        CompleteGroup(run=RUN, group=KEYS[0], version=1000, outcomes=OUTCOMES, last=True),
        Reconcile(run=RUN, groups=KEYS, lease=RUN.id, evaluation=RUN.id),
        Reconciled(finished=RESULTS, dead=[], lease_closed=True, evaluation_closed=True),
        Reconciled(finished=[], dead=KEYS, lease_closed=True, evaluation_closed=True),
        SubmitGroups(
            lease=LeaseRef(run=RUN, incarnation=0, lease_epoch=1000),
            step=1000,
            submission=1,
            groups=KEYS[:MAX_GROUPS_PER_SUBMISSION],
        ),
        RecordProducer(run=RUN, records=RECORDS),
    ],
    ids=lambda message: type(message).__name__,
)
def test_the_largest_message_fits_into_a_payload(message: BaseModel):
    assert len(message.model_dump_json()) <= MAX_PAYLOAD
