"""What Everburn does about each error of a training service: one table.

Owns the rules from what the SDK raises to Everburn's own errors, and the advice in their texts.
What each error then does is decided where it arrives: a refused request fails the run, a lost
state ends the lease, quota holds the run, a key that is refused fails it (or holds it, with
`on_fatal = "hold"`), a lack of capacity is waited for.

Not in the table is what never arrives: the SDK itself repeats a request that was refused for now,
or that only reads, for up to five minutes. One that may have been applied isn't repeated
(send_once.py), and arrives as "anything else".
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from everburn.secrets import redacted
from everburn.trainers.protocol import (
    KeyRefusedError,
    QuotaExceededError,
    TrainerCapacityError,
    TrainerError,
    TrainerFailedError,
    TrainerRejectedError,
    TrainerStateLostError,
    TrainerUnavailableError,
)
from everburn.trainers.send_once import NOT_REPEATED

QUOTA_PATIENCE = 60
"""Seconds that a call is allowed to wait for a quota, which the SDK would do for an hour."""

MAX_ANSWER = 500
"""Characters of a server's answer that an error text repeats."""

Reaction = Literal["retry", "wait", "replace", "fail", "hold"]
"""retry: a session is asked for again, a few times. wait: again until there is one. replace: the
lease ends, and recovery takes a new one. fail: the run fails, and can be resumed. hold: the run
keeps what it has until a person resumes or stops it."""


@dataclass(frozen=True)
class Signs:
    """What can be told of an error. opening: no session had been granted yet, so nothing can have
    been lost."""

    text: str
    status: int | None
    user_error: bool
    opening: bool
    types: frozenset[str]
    """Names of the classes of the error and of its causes."""


@dataclass(frozen=True)
class Rule:
    case: str
    reaction: Reaction
    error: type[TrainerError]
    applies: Callable[[Signs], bool]
    advice: str = ""


_SDK_DETAILS = " for self.request_id="
"""What follows is of use to the SDK's authors only."""
_CAPACITY = re.compile(r"capacity|resource_exhausted|concurrent[- ]run|quota slot", re.IGNORECASE)
_NOT_NOW = (408, 425)
"""Of the 4xx: a timeout, and a deployment that loads or has no replica yet."""
_UNANSWERED = (*_NOT_NOW, NOT_REPEATED)
"""Of the 4xx: those that say nothing about the operation itself."""
_MALFORMED = frozenset({"JSONDecodeError", "UnicodeDecodeError", "ValidationError", "KeyError"})

RULES = (
    Rule(
        "quota used up (402)",
        "hold",
        QuotaExceededError,
        lambda signs: signs.status == 402,
        f"the account's quota is used up (waited {QUOTA_PATIENCE} s): add credit or raise the "
        "spending limit, then resume the run",
    ),
    Rule(
        "no key in the worker's environment",
        "fail",
        KeyRefusedError,
        lambda signs: "MissingKeyError" in signs.types,
    ),
    Rule(
        "key refused (401)",
        "fail",
        KeyRefusedError,
        lambda signs: signs.status == 401,
        "the API key in {variable} is refused: training needs a key of the account that is valid "
        "and isn't for inference only",
    ),
    Rule(
        "permission missing (403)",
        "fail",
        KeyRefusedError,
        lambda signs: signs.status == 403,
        "the API key in {variable} lacks the permission: its user needs the right to train with "
        "this model in this account",
    ),
    Rule(
        "no capacity for a session (409, 429)",
        "wait",
        TrainerCapacityError,
        lambda signs: (
            signs.opening and (signs.status in (409, 429) or bool(_CAPACITY.search(signs.text)))
        ),
        "the service has no capacity for another session, or the account has as many as it may",
    ),
    Rule(
        "session gone while it is opened (404, 410 for a result)",
        "retry",
        TrainerUnavailableError,
        lambda signs: (
            signs.opening
            and signs.status in (404, 410)
            and ("retrieving result" in signs.text or "RetryableException" in signs.types)
        ),
        "the service lost the session before it was ready",
    ),
    Rule(
        "invalid request",
        "fail",
        TrainerRejectedError,
        lambda signs: signs.user_error,
    ),
    Rule(
        "session refused (other 4xx)",
        "fail",
        TrainerRejectedError,
        lambda signs: (
            signs.opening
            and signs.status is not None
            and 400 <= signs.status < 500
            and signs.status not in _NOT_NOW
        ),
    ),
    Rule(
        "refused by the SDK itself",
        "fail",
        TrainerRejectedError,
        lambda signs: (
            signs.opening
            and signs.status is None
            and "ValueError" in signs.types
            and not signs.types & _MALFORMED
        ),
    ),
    Rule(
        "service unreachable or failing",
        "retry",
        TrainerUnavailableError,
        lambda signs: signs.opening,
    ),
    Rule(
        "rate limit beyond the SDK's own patience (429)",
        "replace",
        TrainerStateLostError,
        lambda signs: signs.status == 429,
        "requests were limited for longer than the SDK waits",
    ),
    Rule(
        "session or model gone (404, 410), preemption included",
        "replace",
        TrainerStateLostError,
        lambda signs: signs.status in (404, 410) or "RetryableException" in signs.types,
    ),
    Rule(
        "client poisoned by an earlier refusal",
        "replace",
        TrainerStateLostError,
        lambda signs: "reconnect" in signs.text,
        "the SDK's client sends nothing more after a refused submission",
    ),
    Rule(
        "result that never comes",
        "replace",
        TrainerStateLostError,
        lambda signs: "TimeoutError" in signs.types,
        "there was no result in time; whether it was applied isn't known",
    ),
    Rule(
        "malformed reply",
        "replace",
        TrainerStateLostError,
        lambda signs: bool(signs.types & _MALFORMED),
        "the answer can't be read; whether the request was applied isn't known",
    ),
    Rule(
        "operation failed by the service",
        "replace",
        TrainerFailedError,
        lambda signs: (
            "RequestFailedError" in signs.types
            or (signs.status in range(400, 500) and signs.status not in _UNANSWERED)
        ),
    ),
    Rule(
        "anything else",
        "replace",
        TrainerStateLostError,
        lambda signs: True,
    ),
)
"""The first that applies counts."""


def translated(
    error: BaseException, operation: str, variable: str, *, opening: bool = False
) -> TrainerError:
    """Everburn's error for one of the SDK's, with a text that says what to do.

    variable: the environment variable that holds the API key.
    """
    signs = signs_of(error, opening=opening)
    rule = next(rule for rule in RULES if rule.applies(signs))
    advice = rule.advice.format(variable=variable)
    text = f"{operation}: {advice + ': ' if advice else ''}{describe(error)}"
    return rule.error(text)


def signs_of(error: BaseException, *, opening: bool = False) -> Signs:
    """What an error and its causes tell."""
    chain = list(_chain(error))
    text = " ".join(f"{each} {_answer(each)}" for each in chain)
    statuses = (status_of(each) for each in chain)
    status = next((status for status in statuses if status is not None), None)
    if status is None and (found := re.search(r"\bHTTP (\d{3})\b", text)):
        # The SDK's control-plane errors carry their status in words only.
        status = int(found[1])
    categories = {str(getattr(getattr(e, "category", ""), "value", "")).lower() for e in chain}
    types = frozenset(base.__name__ for each in chain for base in type(each).__mro__)
    return Signs(text, status, "user" in categories, opening, types)


def status_of(error: BaseException) -> int | None:
    """The HTTP status that an error of any client library carries, if it does."""
    response = getattr(error, "response", None)
    for holder in (error, response):
        for name in ("status_code", "final_status", "status", "code"):
            status = getattr(holder, name, None)
            if isinstance(status, int) and 100 <= status < 600:
                return status
    return None


def describe(error: BaseException) -> str:
    """An error in one line, without request bodies, headers or secrets."""
    if answer := _answer(error):
        return answer
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = lines[0].partition(_SDK_DETAILS)[0] if lines else "no message"
    cause = next((line for line in lines[1:] if line.startswith("Cause: ")), None)
    text = said if cause is None else f"{said.removeprefix('ERROR: ')}: {cause[7:]}"
    return redacted(f"{type(error).__name__}: {text}")


def _answer(error: BaseException) -> str:
    """What the server said, where the error itself says only where: httpx's does."""
    response = getattr(error, "response", None)
    if type(error).__name__ != "HTTPStatusError" or response is None:
        return ""
    try:
        body = response.json()
    except ValueError:
        body = response.text
    said = body.get("error", body) if isinstance(body, dict) else body
    said = said.get("message", said) if isinstance(said, dict) else said
    return f"HTTP {response.status_code}: {redacted(str(said))[:MAX_ANSWER]}"


def _chain(error: BaseException) -> list[BaseException]:
    found: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in found:
        found.append(current)
        current = current.__cause__
    return found
