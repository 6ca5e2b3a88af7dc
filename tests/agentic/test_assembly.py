"""Token assembly: exactly the sampled tokens are trained, each once."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everburn.agentic.assembly import Assembled, Call, TraceIntegrityError, assemble
from everburn.rollouts.contract import RolloutRun
from everburn.rollouts.failures import classify
from everburn.rollouts.validation import validate_rollout

IDS = st.integers(0, 3)
"""Few ids, so that prompts also coincide by chance."""
SPANS = st.lists(IDS, max_size=3)


@st.composite
def traces(draw: st.DrawFn) -> list[Call]:
    """Calls as harnesses make them: each continues any earlier call, its prompt or part of it, or
    begins again; with tool results between, and sometimes without sampled tokens."""
    calls: list[Call] = []
    for number in range(draw(st.integers(1, 8))):
        if not calls or draw(st.booleans()):
            base = [call.prompt + call.tokens for call in calls[-1:]] or [[]]
        else:
            other = draw(st.sampled_from(calls))
            whole = other.prompt + other.tokens
            base = [whole, other.prompt, whole[: draw(st.integers(0, len(whole)))], []]
        prompt = draw(st.sampled_from(base)) + draw(SPANS)
        tokens = draw(st.lists(IDS, max_size=4))
        # Each logprob identifies its call and token.
        logprobs = [-(number * 10 + place + 1.0) for place in range(len(tokens))]
        raw = [2 * logprob for logprob in logprobs] if draw(st.booleans()) else None
        calls.append(Call(prompt or [0], tokens, logprobs, draw(st.booleans()), raw))
    return calls


def trained(assembled: Assembled) -> Counter[tuple[int, float]]:
    return Counter(
        (token, logprob)
        for segment in assembled.segments
        for token, logprob, flag in zip(
            segment.tokens, segment.logprobs, segment.loss_mask, strict=True
        )
        if flag
    )


def sampled(calls: list[Call]) -> Counter[tuple[int, float]]:
    return Counter(pair for call in calls for pair in zip(call.tokens, call.logprobs, strict=True))


@given(traces())
def test_exactly_the_sampled_tokens_are_trained_each_once(calls: list[Call]) -> None:
    assert trained(assemble(calls, 1.0)) == sampled(calls)


@given(traces())
def test_raw_logprobs_stay_with_their_tokens_if_all_calls_of_a_segment_have_them(
    calls: list[Call],
) -> None:
    assembled = assemble(calls, 1.0)
    for segment, turns in zip(assembled.segments, assembled.turns, strict=True):
        assert segment.turn_starts() == [turn.start for turn in turns]
        if any(calls[turn.call].raw_logprobs is None for turn in turns):
            assert segment.raw_logprobs is None
        else:
            assert segment.raw_logprobs == [2 * logprob for logprob in segment.logprobs]


@given(traces())
def test_each_turn_follows_the_prompt_that_it_was_sampled_from(
    calls: list[Call],
) -> None:
    assembled = assemble(calls, 1.0)
    turns = [
        (turn, segment)
        for segment, turns in zip(assembled.segments, assembled.turns, strict=True)
        for turn in turns
    ]
    for turn, segment in turns:
        call = calls[turn.call]
        assert segment.tokens[: turn.start] == call.prompt
        assert segment.tokens[turn.start : turn.stop] == call.tokens
        assert segment.logprobs[turn.start : turn.stop] == call.logprobs
        assert all(segment.loss_mask[turn.start : turn.stop])
    call_indices = sorted(turn.call for turn, _ in turns)
    assert call_indices == [index for index, call in enumerate(calls) if call.tokens]


@given(traces())
def test_assembled_segments_are_a_valid_rollout(calls: list[Call]) -> None:
    assembled = assemble(calls, 0.5)
    if assembled.segments:
        run = validate_rollout(RolloutRun(assembled.segments), "here", vocab_size=4)
        assert {segment.reward for segment in run.segments} == {0.5}
    else:
        assert not any(call.tokens for call in calls)
    for segment in assembled.segments:
        context = zip(segment.logprobs, segment.loss_mask, strict=True)
        assert all(logprob == 0.0 for logprob, flag in context if not flag)


@given(traces())
def test_each_call_is_counted_once(calls: list[Call]) -> None:
    assembled = assemble(calls, 1.0)
    counts = assembled.boundaries
    between = counts.starts, counts.appends, counts.branches, counts.splits, counts.empty
    assert sum(between) == len(calls)
    assert counts.starts + counts.branches + counts.splits == len(assembled.segments)
    assert counts.truncated == sum(call.truncated for call in calls)


@given(traces())
def test_reject_accepts_only_an_unbroken_trace(calls: list[Call]) -> None:
    counts = assemble(calls, 1.0).boundaries
    if counts.branches or counts.splits:
        with pytest.raises(TraceIntegrityError):
            assemble(calls, 1.0, on_branch="reject")
    else:
        assert assemble(calls, 1.0, on_branch="reject") == assemble(calls, 1.0)


def call(prompt: list[int], tokens: list[int], truncated: bool = False) -> Call:
    return Call(prompt, tokens, [-float(token) for token in tokens], truncated)


def test_turns_with_tool_results_between_them_make_one_segment() -> None:
    calls = [call([1], [2, 3]), call([1, 2, 3, 9, 9], [4]), call([1, 2, 3, 9, 9, 4], [5])]
    assembled = assemble(calls, 1.0)
    (segment,) = assembled.segments
    assert segment.tokens == [1, 2, 3, 9, 9, 4, 5]
    assert segment.loss_mask == [0, 1, 1, 0, 0, 1, 1]
    assert segment.logprobs == [0.0, -2.0, -3.0, 0.0, 0.0, -4.0, -5.0]
    assert [(turn.start, turn.stop) for turn in assembled.turns[0]] == [(1, 3), (5, 6), (6, 7)]
    assert assembled.boundaries.appends == 2


def test_the_shared_prefix_of_branches_is_trained_only_on_the_first_path() -> None:
    calls = [
        call([1], [2, 3]),
        call([1, 2, 3, 7], [4]),
        call([1, 2, 3, 8], [5]),
        call([1, 2, 3, 8, 5, 7], [6]),
    ]
    assembled = assemble(calls, 1.0)
    assert [s.tokens for s in assembled.segments] == [[1, 2, 3, 7, 4], [1, 2, 3, 8, 5, 7, 6]]
    assert [s.loss_mask for s in assembled.segments] == [[0, 1, 1, 0, 1], [0, 0, 0, 0, 1, 0, 1]]
    counts = assembled.boundaries
    assert (counts.branches, counts.appends, counts.repeated_tokens) == (1, 2, 2)


def test_several_samples_of_one_prompt_are_branches_without_shared_tokens() -> None:
    counts = assemble([call([1], [2]), call([1], [2]), call([1], [3])], 1.0).boundaries
    assert (counts.branches, counts.splits, counts.repeated_tokens) == (2, 0, 0)


def test_a_rewritten_history_splits_without_losing_tokens() -> None:
    assembled = assemble([call([1], [2, 3]), call([1, 23, 9], [4])], 1.0)
    assert [s.tokens for s in assembled.segments] == [[1, 2, 3], [1, 23, 9, 4]]
    assert [s.loss_mask for s in assembled.segments] == [[0, 1, 1], [0, 0, 0, 1]]
    assert assembled.boundaries.splits == 1


def test_interleaved_conversations_are_separate_segments() -> None:
    calls = [call([1], [2]), call([5], [6]), call([1, 2, 0], [3]), call([5, 6, 0], [7])]
    assembled = assemble(calls, 1.0)
    assert [s.tokens for s in assembled.segments] == [[1, 2, 0, 3], [5, 6, 0, 7]]
    counts = assembled.boundaries
    assert (counts.starts, counts.splits, counts.appends) == (1, 1, 2)


def test_a_truncated_call_is_trained_and_counted() -> None:
    assembled = assemble([call([1], [2], truncated=True), call([1, 2, 8], [3])], 1.0)
    assert assembled.boundaries.truncated == 1
    assert assembled.segments[0].loss_mask == [0, 1, 0, 1]


def test_the_rejection_error_says_where_the_prompt_departs_and_is_recoverable() -> None:
    calls = [call([1], [2, 3]), call([1, 23, 9], [4])]
    with pytest.raises(TraceIntegrityError, match=r"call 1 .*agree up to token 1, then") as caught:
        assemble(calls, 1.0, on_branch="reject")
    assert classify(caught.value) == "recoverable"


def test_a_call_needs_a_prompt_and_a_logprob_for_each_token() -> None:
    with pytest.raises(ValueError, match="prompt is empty"):
        Call([], [1], [0.0])
    with pytest.raises(ValueError, match="2 tokens and 1 logprobs"):
        Call([0], [1, 2], [0.0])


def test_an_unknown_on_branch_value_is_refused() -> None:
    with pytest.raises(ValueError, match="'split' or 'reject'"):
        assemble([], 1.0, on_branch="drop")  # type: ignore[arg-type]
