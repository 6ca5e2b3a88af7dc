"""The rollout contract: which arguments a rollout function may declare, and what it must return."""

import dataclasses
import functools
import json
import math
from typing import Any

import numpy as np
import pytest
import torch

from everburn.rollouts.contract import (
    CONTEXT_PARAMETERS,
    InvalidRolloutError,
    RolloutRun,
    RolloutSample,
    Sample,
)
from everburn.rollouts.validation import (
    context_parameters,
    require_routing,
    validate_rollout,
    written_info,
)

WHERE = "run arithmetic · row 17 · completion 3"


def segment(**changes: Any) -> RolloutSample:
    """A segment with prompt tokens 5 and 6, and sampled tokens 7 and 8."""
    good = RolloutSample(
        tokens=[5, 6, 7, 8], logprobs=[0.0, 0.0, -0.5, -1.5], loss_mask=[0, 0, 1, 1], reward=1.0
    )
    return dataclasses.replace(good, **changes)


def complaint(value: object, vocab_size: int | None = None) -> str:
    with pytest.raises(InvalidRolloutError) as caught:
        validate_rollout(value, WHERE, vocab_size)
    return str(caught.value)


def test_a_good_rollout_is_returned_as_it_is():
    run = RolloutRun([segment(), segment(tokens=[1, 2, 3, 4])])
    before = dataclasses.asdict(run)
    assert validate_rollout(run, WHERE, vocab_size=9) is run
    assert dataclasses.asdict(run) == before


@pytest.mark.parametrize(
    "changes",
    [
        {"tokens": (5, 6, 7, 8)},
        {"tokens": np.array([5, 6, 7, 8])},
        {"tokens": np.array([5, 6, 7, 8], dtype=np.uint16)},
        {"tokens": torch.tensor([5, 6, 7, 8])},
        {"tokens": [0, 0, 0, 0]},
        {"tokens": [np.int64(5), 6, np.int32(7), 8]},
        {"logprobs": np.array([0, 0, -0.5, -1.5], dtype=np.float32)},
        {"logprobs": torch.tensor([0, 0, -0.5, -1.5])},
        {"logprobs": [0, 0, -1, -2]},
        {"loss_mask": np.array([0, 0, 1, 1])},
        {"loss_mask": [False, False, True, True]},
        {"loss_mask": [0.0, 0.0, 1.0, 1.0]},
        {"loss_mask": torch.tensor([0, 0, 1, 1])},
        {"tokens": [5, 6], "logprobs": [0.0, -0.5], "loss_mask": [0, 1]},
        {"reward": 1},
        {"reward": np.float32(0.5)},
        {"reward": torch.tensor(0.5)},
        {"reward": True},
        {"reward": -3.5},
    ],
)
def test_lists_arrays_and_tensors_of_numbers_are_accepted(changes: dict[str, Any]):
    validate_rollout(RolloutRun([segment(**changes)]), WHERE, vocab_size=9)


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        (
            {"tokens": [5, 6, 7]},
            "tokens, logprobs and loss_mask must be equally long, got 3, 4 and 4",
        ),
        (
            {"logprobs": [0.0] * 5},
            "tokens, logprobs and loss_mask must be equally long, got 4, 5 and 4",
        ),
        (
            {"loss_mask": []},
            "tokens, logprobs and loss_mask must be equally long, got 4, 4 and 0",
        ),
        (
            {"tokens": [5], "logprobs": [0.0], "loss_mask": [1]},
            "has 1 token(s); at least two are needed, one to predict from the other",
        ),
        (
            {"tokens": [], "logprobs": [], "loss_mask": []},
            "has 0 token(s); at least two are needed, one to predict from the other",
        ),
        ({"tokens": [5, 6, 7.0, 8]}, "token 2 is 7.0, not an integer id"),
        ({"tokens": [5, 6, "7", 8]}, "token 2 is '7', not an integer id"),
        ({"tokens": [5, 6, None, 8]}, "token 2 is None, not an integer id"),
        ({"tokens": [5, True, 7, 8]}, "token 1 is True, not an integer id"),
        (
            {"tokens": np.array([5.0, 6.0, 7.0, 8.0])},
            "token 0 is np.float64(5.0), not an integer id",
        ),
        (
            {"tokens": torch.tensor([5.0, 6.0, 7.0, 8.0])},
            "token 0 is tensor(5.), not an integer id",
        ),
        ({"tokens": [[5], [6], [7], [8]]}, "token 0 is [5], not an integer id"),
        ({"tokens": [5, 6, -1, 8]}, "token 2 is -1, outside the vocabulary"),
        ({"tokens": "5678"}, "tokens is a str, not a flat list"),
        ({"tokens": b"5678"}, "tokens is a bytes, not a flat list"),
        ({"tokens": {5, 6, 7, 8}}, "tokens is a set, not a flat list"),
        ({"tokens": np.array([[5], [6], [7], [8]])}, "tokens is a ndarray, not a flat list"),
        ({"tokens": None}, "tokens is a NoneType, not a flat list"),
        ({"logprobs": -0.5}, "logprobs is a float, not a flat list"),
        ({"logprobs": np.array(-0.5)}, "logprobs is a ndarray, not a flat list"),
        ({"loss_mask": {0: 0, 1: 1, 2: 1, 3: 1}}, "loss_mask is a dict, not a flat list"),
        ({"logprobs": [0.0, 0.0, math.nan, -1.0]}, "logprob 2 is nan, not a finite number"),
        ({"logprobs": [0.0, 0.0, -1.0, -math.inf]}, "logprob 3 is -inf, not a finite number"),
        ({"logprobs": [0.0, None, -1.0, -1.0]}, "logprob 1 is None, not a finite number"),
        ({"logprobs": [0.0, 0.0, "-1.0", -1.0]}, "logprob 2 is '-1.0', not a finite number"),
        ({"loss_mask": [0, 0, 2, 1]}, "loss_mask 2 is 2; it must be 0 or 1"),
        ({"loss_mask": [0, 0, 0.5, 1]}, "loss_mask 2 is 0.5; it must be 0 or 1"),
        ({"loss_mask": [0, "1", 1, 1]}, "loss_mask 1 is '1'; it must be 0 or 1"),
        (
            {"loss_mask": [0, 0, 0, 0]},
            "loss_mask trains no token: return None to drop the completion",
        ),
        (
            {"loss_mask": [1, 0, 0, 0]},
            "loss_mask trains no token: return None to drop the completion",
        ),
        ({"reward": math.nan}, "reward is nan, not a finite number"),
        ({"reward": math.inf}, "reward is inf, not a finite number"),
        ({"reward": None}, "reward is None, not a finite number"),
        ({"reward": "1.0"}, "reward is '1.0', not a finite number"),
        ({"reward": 10**400}, f"reward is {10**400}, not a finite number"),
    ],
)
def test_each_broken_rule_is_named_with_run_row_completion_and_segment(
    changes: dict[str, Any], rule: str
):
    assert complaint(RolloutRun([segment(), segment(**changes)])) == f"{WHERE} · segment 1: {rule}"


def test_tokens_are_checked_against_a_known_vocabulary():
    run = RolloutRun([segment()])
    validate_rollout(run, WHERE)
    assert complaint(run, vocab_size=8) == (
        f"{WHERE} · segment 0: token 3 is 8, outside the vocabulary of 8"
    )


def test_all_segments_share_the_reward_of_their_completion():
    run = RolloutRun([segment(reward=1.0), segment(reward=1), segment(reward=0.5)])
    assert complaint(run) == (
        f"{WHERE}: all segments of a completion share its reward, got [0.5, 1.0]"
    )


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (segment(), "rollout_fn returned RolloutSample, not RolloutRun or None"),
        ({"segments": []}, "rollout_fn returned dict, not RolloutRun or None"),
        (None, "rollout_fn returned NoneType, not RolloutRun or None"),
        (RolloutRun([]), "RolloutRun.segments must be a list of segments, not empty"),
        (
            RolloutRun((segment(),)),  # type: ignore[arg-type]
            "RolloutRun.segments must be a list of segments, not empty",
        ),
    ],
)
def test_the_run_itself_is_checked(value: object, text: str):
    assert complaint(value) == f"{WHERE}: {text}"


def test_a_segment_of_another_type_is_refused():
    run = RolloutRun([segment(), {"tokens": [1, 2]}])  # type: ignore[list-item]
    assert complaint(run) == f"{WHERE} · segment 1: is a dict, not a RolloutSample"


def test_one_turn_becomes_a_segment_that_trains_its_output():
    turn = RolloutSample.of_turn([5, 6], (7, 8), np.array([-0.5, -1.5]), reward=1.0)
    assert turn == segment()
    validate_rollout(RolloutRun([turn]), WHERE, vocab_size=9)


def test_an_answer_of_the_sampler_becomes_a_segment():
    sample = Sample(
        tokens=[7, 8],
        logprobs=[-0.5, -1.5],
        raw_logprobs=[-0.7, -1.2],
        text="",
        finish_reason="stop",
        version=3,
        routing=["AA==", "AQ=="],
    )
    turn = RolloutSample.of_sample([5, 6], sample, reward=1.0)
    assert turn == segment(raw_logprobs=[0.0, 0.0, -0.7, -1.2], routing=["", "", "AA==", "AQ=="])
    validate_rollout(RolloutRun([turn]), WHERE)


def test_replayed_routing_must_be_there_for_every_trained_token():
    require_routing(RolloutRun([segment(routing=["", "", "AA==", "AQ=="])]), WHERE)
    for routing, text in (
        (None, "has no routing, and router_replay is set: pass Sample.routing on, or"),
        (["", "", "AA==", ""], "token 3 is trained and has no routing, and router_replay is set"),
    ):
        with pytest.raises(InvalidRolloutError) as caught:
            require_routing(RolloutRun([segment(routing=routing)]), WHERE)
        assert str(caught.value).startswith(f"{WHERE} · segment 0: {text}")


TWO_TURNS = {"tokens": [5, 7, 8, 6, 7], "logprobs": [0.0] * 5, "loss_mask": [0, 1, 1, 0, 1]}


def test_turns_begin_at_runs_of_trained_tokens_unless_given():
    assert segment(**TWO_TURNS).turn_starts() == [1, 4]
    assert segment(**TWO_TURNS, turns=np.array([1, 2, 4])).turn_starts() == [1, 2, 4]
    # The first token is never trained, whatever its mask says.
    assert segment(loss_mask=[1, 1, 0, 1]).turn_starts() == [1, 3]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"raw_logprobs": [0.0]}, "raw_logprobs must be as long as tokens, got 1 and 4"),
        (
            {"raw_logprobs": [0.0, 0.0, None, -1.0]},
            "raw_logprobs 2 is None, not a finite number",
        ),
        ({"routing": ["", "", "AA=="]}, "routing must be as long as tokens, got 3 and 4"),
        ({"routing": ["", "", "AA==", 5]}, "routing 3 is a int, not a string"),
        ({"routing": "AA=="}, "routing is a str, not a flat list"),
        ({"turns": [[2]]}, "turns is [[2]], not a flat list of positions"),
        ({"turns": [3, 2]}, "turns is [3, 2]: ascending positions of trained tokens are due"),
        ({"turns": [2, 2]}, "turns is [2, 2]: ascending positions of trained tokens are due"),
        ({"turns": [1, 2]}, "turns is [1, 2]: ascending positions of trained tokens are due"),
        ({"turns": [3]}, "token 2 is trained, but the first turn begins at 3"),
        ({"turns": []}, "token 2 is trained, but the first turn begins at None"),
    ],
)
def test_optional_fields_of_a_segment_are_checked_if_present(changes: dict[str, Any], text: str):
    run = RolloutRun([segment(**changes)])
    assert complaint(run) == f"{WHERE} · segment 0: {text}"


@pytest.mark.parametrize(
    ("truth", "text"),
    [
        ([], ": ground_truth_tokens is [], not a list of at least one token id"),
        ("132", ": ground_truth_tokens is '132', not a list of at least one token id"),
        ([1, 9], " · ground_truth_tokens: token 1 is 9, outside the vocabulary of 9"),
        ([1.5], " · ground_truth_tokens: token 0 is 1.5, not an integer id"),
    ],
)
def test_ground_truth_tokens_must_be_token_ids(truth: Any, text: str):
    run = RolloutRun([segment()], ground_truth_tokens=truth)
    assert complaint(run, vocab_size=9) == f"{WHERE}{text}"


async def plain(sample_prompt: dict[str, Any]) -> None: ...


async def asking(row: dict[str, Any], rollout_idx: int, evaluation: bool = False) -> None: ...


async def with_own_default(row: dict[str, Any], epoch: int, style: str = "short") -> None: ...


async def keyword_only(row: dict[str, Any], *, cursor_index: int, end_of_epoch: bool) -> None: ...


async def everything(row: dict[str, Any], **context: Any) -> None: ...


async def variadic(*args: Any, sample_index: int) -> None: ...


async def needs_style(style: str, row: dict[str, Any], row_index: int) -> None: ...


class Task:
    async def __call__(self, row: dict[str, Any], epoch: int) -> None: ...

    async def method(self, row: dict[str, Any], row_index: int) -> None: ...


def logged(function: Any) -> Any:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapper


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (plain, set()),
        (asking, {"rollout_idx", "evaluation"}),
        (with_own_default, {"epoch"}),
        (keyword_only, {"cursor_index", "end_of_epoch"}),
        (everything, set(CONTEXT_PARAMETERS)),
        (variadic, {"sample_index"}),
        (Task(), {"epoch"}),
        (Task().method, {"row_index"}),
        (functools.partial(needs_style, "short"), {"row_index"}),
        (functools.partial(with_own_default, style="long"), {"epoch"}),
        (functools.partial(Task()), {"epoch"}),
        (functools.partial(functools.partial(asking)), {"rollout_idx", "evaluation"}),
        (logged(asking), {"rollout_idx", "evaluation"}),
    ],
)
def test_a_rollout_function_receives_the_context_it_declares(function: Any, expected: set[str]):
    assert context_parameters(function) == expected


def test_a_decorator_may_make_a_function_async():
    def run_in_thread(function: Any) -> Any:
        @functools.wraps(function)
        async def wrapper(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

        return wrapper

    @run_in_thread
    def blocking(row: dict[str, Any], epoch: int) -> None: ...

    assert context_parameters(blocking) == {"epoch"}


def sync(row: dict[str, Any]) -> None: ...


async def generator(row: dict[str, Any]) -> Any:
    yield row


class SyncTask:
    def __call__(self, row: dict[str, Any]) -> None: ...


@pytest.mark.parametrize(
    "function", [sync, generator, SyncTask(), Task, functools.partial(sync), None, 5, print]
)
def test_anything_but_an_async_function_is_refused(function: Any):
    with pytest.raises(InvalidRolloutError, match=r"must return an async function, `async def"):
        context_parameters(function)


async def wants_more(row: dict[str, Any], epoch: int, judge: Any, *, style: str) -> None: ...


async def wants_more_and_everything(row: dict[str, Any], judge: Any, **rest: Any) -> None: ...


async def takes_nothing() -> None: ...


async def takes_row_by_name(*, sample_prompt: dict[str, Any]) -> None: ...


async def takes_context_only(**context: Any) -> None: ...


@pytest.mark.parametrize(
    ("function", "wanted"),
    [
        (wants_more, "asks for judge, style"),
        (wants_more_and_everything, "asks for judge"),
        (takes_nothing, "takes no row"),
        (takes_row_by_name, "takes no row"),
        (takes_context_only, "takes no row"),
        (functools.partial(plain, {}), "takes no row"),
    ],
)
def test_a_signature_that_cant_be_called_is_refused(function: Any, wanted: str):
    with pytest.raises(InvalidRolloutError) as caught:
        context_parameters(function)
    assert str(caught.value) == (
        f"rollout_fn {wanted}: it receives the row, and any of cursor_index, row_index, epoch, "
        "rollout_idx, sample_index, end_of_epoch, evaluation"
    )


class Judge:
    def __str__(self) -> str:
        return "judge 7"


def test_info_keeps_values_that_json_cant_represent_as_text():
    info = {
        "got": None,
        "parts": [1, 0.5, {"ä": True}],
        "score": float("nan"),
        "bounds": (float("-inf"), float("inf")),
        "weights": np.array([1, 2]),
        "judge": Judge(),
        7: "lucky",
    }
    written = written_info(RolloutRun([segment()], info=info), WHERE)
    assert written == {
        "got": None,
        "parts": [1, 0.5, {"ä": True}],
        "score": "NaN",
        "bounds": ["-Infinity", "Infinity"],
        "weights": "[1 2]",
        "judge": "judge 7",
        "7": "lucky",
    }
    json.dumps(written, allow_nan=False)


CIRCLE: dict[str, Any] = {}
CIRCLE["itself"] = CIRCLE


@pytest.mark.parametrize(
    ("info", "rule"),
    [
        ([1], "info is a list, not a dict"),
        (None, "info is a NoneType, not a dict"),
        ({(1, 2): 3}, "info can't be written as JSON: keys must be str"),
        (CIRCLE, "info can't be written as JSON: Circular reference"),
    ],
)
def test_info_that_json_cant_represent_is_refused_with_its_place(info: Any, rule: str):
    with pytest.raises(InvalidRolloutError) as caught:
        written_info(RolloutRun([segment()], info=info), WHERE)
    assert str(caught.value).startswith(f"{WHERE}: {rule}")


def test_an_answer_is_text():
    assert complaint(RolloutRun([segment()], answer=42)) == (  # type: ignore[arg-type]
        f"{WHERE}: answer is 42, not text or None"
    )
