"""Messages of activities: small, whatever they tell of."""

from activities.messages import MAX_ERRORS, CompleteGroup
from everburn.records.ids import GroupKey, RolloutOutcome, RunRef

RUN = RunRef(store="s3://bucket/a-folder-of-runs", id="a-run-with-quite-a-long-name")


def test_a_group_that_fails_as_a_whole_is_told_of_in_one_small_payload():
    outcomes = [
        RolloutOutcome(completion=index, status="failed", error="x" * 120) for index in range(512)
    ]
    order = CompleteGroup.of(RUN, GroupKey(cursor=10**6, attempt=7), 1000, outcomes, last=True)
    assert len(order.model_dump_json()) <= 2048
    assert [outcome.status for outcome in order.outcomes] == ["failed"] * 512
    assert sum(outcome.error is not None for outcome in order.outcomes) == MAX_ERRORS


def test_outcomes_arrive_in_the_order_of_completions_whatever_order_they_ended_in():
    outcomes = [
        RolloutOutcome(completion=2, status="dropped"),
        RolloutOutcome(completion=0, status="failed", error="no judge"),
        RolloutOutcome(completion=1, status="succeeded"),
    ]
    order = CompleteGroup.of(RUN, GroupKey(cursor=0), 0, outcomes, last=False)
    arrived = CompleteGroup.model_validate_json(order.model_dump_json()).outcomes
    assert arrived == sorted(outcomes, key=lambda outcome: outcome.completion)
