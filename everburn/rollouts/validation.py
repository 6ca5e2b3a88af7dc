"""The rules for a rollout function and its results.

A rollout that breaks a rule is refused with its place (run, row, completion, segment), never
repaired. Doesn't own the types (contract.py).
"""

import inspect
import json
import math
import operator
from collections.abc import Sequence
from functools import partial
from typing import Any

from everburn.rollouts.contract import (
    CONTEXT_PARAMETERS,
    InvalidRolloutError,
    RolloutFn,
    RolloutRun,
    RolloutSample,
)


def context_parameters(rollout_fn: RolloutFn) -> frozenset[str]:
    """The context parameters that a rollout function declares.

    Raises:
        InvalidRolloutError: it isn't an async callable, or requires an unknown parameter.
    """
    if not _is_async(rollout_fn):
        raise InvalidRolloutError(
            f"the rollout factory returned {rollout_fn!r}: it must return an async function, "
            "`async def rollout_fn(sample_prompt)`"
        )
    parameters = list(inspect.signature(rollout_fn).parameters.values())
    others = parameters[1:]
    unknown = [
        p.name
        for p in others
        if p.default is p.empty
        and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        and p.name not in CONTEXT_PARAMETERS
    ]
    takes_row = any(p.kind not in (p.KEYWORD_ONLY, p.VAR_KEYWORD) for p in parameters[:1])
    if not takes_row or unknown:
        wanted = f"asks for {', '.join(unknown)}" if takes_row else "takes no row"
        raise InvalidRolloutError(
            f"rollout_fn {wanted}: it receives the row, and any of {', '.join(CONTEXT_PARAMETERS)}"
        )
    if any(p.kind is p.VAR_KEYWORD for p in others):
        return frozenset(CONTEXT_PARAMETERS)
    return frozenset(p.name for p in others) & frozenset(CONTEXT_PARAMETERS)


def _is_async(function: object) -> bool:
    """Whether a call returns an awaitable: an async function, possibly partially applied or
    decorated, or an object with an async `__call__`."""
    while isinstance(function, partial):
        function = function.func
    call = function if inspect.isroutine(function) else getattr(type(function), "__call__", None)  # noqa: B004
    return any(inspect.iscoroutinefunction(each) for each in (call, inspect.unwrap(call)))  # type: ignore[arg-type]


def validate_rollout(value: object, where: str, vocab_size: int | None = None) -> RolloutRun:
    """Check the result of a rollout function. where: its run, row and completion.

    Raises:
        InvalidRolloutError: names the place, the segment and the broken rule.
    """
    if not isinstance(value, RolloutRun):
        raise InvalidRolloutError(
            f"{where}: rollout_fn returned {type(value).__name__}, not RolloutRun or None"
        )
    if not isinstance(value.segments, list) or not value.segments:
        raise InvalidRolloutError(
            f"{where}: RolloutRun.segments must be a list of segments, not empty"
        )
    for index, segment in enumerate(value.segments):
        problem = _segment_problem(segment, vocab_size)
        if problem:
            raise InvalidRolloutError(f"{where} · segment {index}: {problem}")
    rewards = {float(segment.reward) for segment in value.segments}
    if len(rewards) > 1:
        raise InvalidRolloutError(
            f"{where}: all segments of a completion share its reward, got {sorted(rewards)}"
        )
    if value.answer is not None and not isinstance(value.answer, str):
        raise InvalidRolloutError(f"{where}: answer is {value.answer!r}, not text or None")
    truth = value.ground_truth_tokens
    if truth is not None:
        if not _is_flat(truth) or len(truth) == 0:
            raise InvalidRolloutError(
                f"{where}: ground_truth_tokens is {truth!r}, not a list of at least one token id"
            )
        problem = _token_problem(truth, vocab_size)
        if problem:
            raise InvalidRolloutError(f"{where} · ground_truth_tokens: {problem}")
    return value


def written_info(run: RolloutRun, where: str) -> dict[str, Any]:
    """A rollout's `info` as files hold it: values that JSON can't hold (an array, NaN) are text.

    Raises:
        InvalidRolloutError: names the place; it isn't a dict, or can't be written at all.
    """
    if not isinstance(run.info, dict):
        raise InvalidRolloutError(f"{where}: info is a {type(run.info).__name__}, not a dict")
    try:
        text = json.dumps(run.info, default=str)
    except Exception as error:
        raise InvalidRolloutError(f"{where}: info can't be written as JSON: {error}") from error
    info: dict[str, Any] = json.loads(text, parse_constant=str)
    return info


def require_routing(run: RolloutRun, where: str) -> None:
    """Check that every segment carries the routing of its trained tokens, for router replay.

    Raises:
        InvalidRolloutError: names the place and the first token without routing.
    """
    for index, segment in enumerate(run.segments):
        if segment.routing is None:
            raise InvalidRolloutError(
                f"{where} · segment {index}: has no routing, and router_replay is set: pass "
                "Sample.routing on, or set router_replay to false if the model has no experts"
            )
        for position, (flag, matrix) in enumerate(
            zip(segment.loss_mask, segment.routing, strict=True)
        ):
            if flag and position and not matrix:
                raise InvalidRolloutError(
                    f"{where} · segment {index}: token {position} is trained and has no routing, "
                    "and router_replay is set"
                )


def _segment_problem(segment: object, vocab_size: int | None) -> str | None:
    if not isinstance(segment, RolloutSample):
        return f"is a {type(segment).__name__}, not a RolloutSample"
    for name in ("tokens", "logprobs", "loss_mask"):
        if not _is_flat(getattr(segment, name)):
            return f"{name} is a {type(getattr(segment, name)).__name__}, not a flat list"
    tokens, logprobs, mask = segment.tokens, segment.logprobs, segment.loss_mask
    if not len(tokens) == len(logprobs) == len(mask):
        return (
            f"tokens, logprobs and loss_mask must be equally long, "
            f"got {len(tokens)}, {len(logprobs)} and {len(mask)}"
        )
    if len(tokens) < 2:
        return f"has {len(tokens)} token(s); at least two are needed, one to predict from the other"
    problem = _token_problem(tokens, vocab_size)
    if problem:
        return problem
    for position, logprob in enumerate(logprobs):
        if not _is_finite_number(logprob):
            return f"logprob {position} is {logprob!r}, not a finite number"
    for position, flag in enumerate(mask):
        if flag not in (0, 1):
            return f"loss_mask {position} is {flag!r}; it must be 0 or 1"
    if not any(mask[1:]):
        # The first token has no context to be predicted from, so it can't be the only one.
        return "loss_mask trains no token: return None to drop the completion"
    if not _is_finite_number(segment.reward):
        return f"reward is {segment.reward!r}, not a finite number"
    return _optional_problem(segment)


def _token_problem(tokens: Sequence[int], vocab_size: int | None) -> str | None:
    for position, token in enumerate(tokens):
        if isinstance(token, bool) or not _is_integer(token):
            return f"token {position} is {token!r}, not an integer id"
        if token < 0 or (vocab_size is not None and token >= vocab_size):
            size = "" if vocab_size is None else f" of {vocab_size}"
            return f"token {position} is {token}, outside the vocabulary{size}"
    return None


def _optional_problem(segment: RolloutSample) -> str | None:
    """A problem of the optional fields."""
    for name in ("raw_logprobs", "routing"):
        values = getattr(segment, name)
        if values is None:
            continue
        if not _is_flat(values):
            return f"{name} is a {type(values).__name__}, not a flat list"
        if len(values) != len(segment.tokens):
            return f"{name} must be as long as tokens, got {len(values)} and {len(segment.tokens)}"
    for position, logprob in enumerate(() if (raw := segment.raw_logprobs) is None else raw):
        if not _is_finite_number(logprob):
            return f"raw_logprobs {position} is {logprob!r}, not a finite number"
    for position, matrix in enumerate(segment.routing or ()):
        if not isinstance(matrix, str):
            return f"routing {position} is a {type(matrix).__name__}, not a string"
    return None if segment.turns is None else _turns_problem(segment.turns, segment.loss_mask)


def _turns_problem(turns: Sequence[int], mask: Sequence[int]) -> str | None:
    if not _is_flat(turns) or not all(_is_integer(start) for start in turns):
        return f"turns is {turns!r}, not a flat list of positions"
    trained = [position for position, flag in enumerate(mask) if flag and position > 0]
    if sorted(set(turns)) != list(turns) or not set(turns) <= set(trained):
        return f"turns is {list(turns)}: ascending positions of trained tokens are due"
    if trained[0] not in turns:
        return f"token {trained[0]} is trained, but the first turn begins at {[*turns, None][0]}"
    return None


def _is_flat(value: object) -> bool:
    """Whether it is a sequence or a one-dimensional array."""
    if isinstance(value, Sequence):
        return not isinstance(value, str | bytes)
    return getattr(value, "ndim", None) == 1


def _is_integer(value: object) -> bool:
    # An attribute check isn't enough: all arrays and tensors have `__index__`.
    try:
        operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return False
    return True


def _is_finite_number(value: object) -> bool:
    try:
        return not isinstance(value, str) and math.isfinite(value)  # type: ignore[arg-type]
    except (TypeError, OverflowError):
        return False
