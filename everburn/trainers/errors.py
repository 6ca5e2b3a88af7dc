"""The table of training service errors: from SDK errors to Everburn's errors, with advice.

The SDK itself repeats, for up to five minutes, requests that were refused temporarily or only read.
A request that may have been applied isn't repeated (send_once.py) and arrives as "anything else".
Doesn't own the reactions, which are the callers'.
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

NOT_REPEATED = 412
"""The answer to a request that send_once.py refuses: a status that the SDK doesn't retry and that
the service doesn't use for training requests."""
QUOTA_PATIENCE = 60
"""Seconds to wait for quota in a call; the SDK's default is an hour."""

MAX_SERVER_MESSAGE = 500
"""Characters of a server's message in an error text."""

Reaction = Literal["retry", "wait", "replace", "fail", "hold"]
"""retry: open a session again, a few times. wait: retry until there is one. replace: the lease ends
and recovery acquires a new one. fail: the run fails and can be resumed. hold: the run pauses until
a person resumes or stops it."""


@dataclass(frozen=True)
class Traits:
    """The traits by which an error is classified. opening: no session was open yet, so no state can
    be lost."""

    text: str
    status: int | None
    user_error: bool
    opening: bool
    types: frozenset[str]
    """Class names of the error and its causes, with their bases."""


@dataclass(frozen=True)
class Rule:
    case: str
    reaction: Reaction
    error: type[TrainerError]
    applies: Callable[[Traits], bool]
    advice: str = ""


_SDK_DETAILS = " for self.request_id="
"""Begins details that only help the SDK's authors."""
_CAPACITY = re.compile(r"capacity|resource_exhausted|concurrent[- ]run|quota slot", re.IGNORECASE)
_NOT_NOW = (408, 425)
"""Temporary 4xx: a timeout; a deployment that is loading or has no replica."""
_UNANSWERED = (*_NOT_NOW, NOT_REPEATED)
"""4xx that aren't an answer to the operation."""
_MALFORMED = frozenset({"JSONDecodeError", "UnicodeDecodeError", "ValidationError", "KeyError"})

RULES = (
    Rule(
        "quota used up (402)",
        "hold",
        QuotaExceededError,
        lambda traits: traits.status == 402,
        f"the account's quota is used up (waited {QUOTA_PATIENCE} s): add credit or raise the "
        "spending limit, then resume the run",
    ),
    Rule(
        "no key in the worker's environment",
        "fail",
        KeyRefusedError,
        lambda traits: "MissingKeyError" in traits.types,
    ),
    Rule(
        "key refused (401)",
        "fail",
        KeyRefusedError,
        lambda traits: traits.status == 401,
        "the API key in {variable} is refused: training needs a key of the account that is valid "
        "and isn't for inference only",
    ),
    Rule(
        "permission missing (403)",
        "fail",
        KeyRefusedError,
        lambda traits: traits.status == 403,
        "the API key in {variable} lacks the permission: its user needs the right to train with "
        "this model in this account",
    ),
    Rule(
        "no capacity for a session (409, 429)",
        "wait",
        TrainerCapacityError,
        lambda traits: (
            traits.opening and (traits.status in (409, 429) or bool(_CAPACITY.search(traits.text)))
        ),
        "the service has no capacity for another session, or the account has reached its limit",
    ),
    Rule(
        "session gone while it is opened (404, 410 for a result)",
        "retry",
        TrainerUnavailableError,
        lambda traits: (
            traits.opening
            and traits.status in (404, 410)
            and ("retrieving result" in traits.text or "RetryableException" in traits.types)
        ),
        "the service lost the session before it was ready",
    ),
    Rule(
        "invalid request",
        "fail",
        TrainerRejectedError,
        lambda traits: traits.user_error,
    ),
    Rule(
        "session refused (other 4xx)",
        "fail",
        TrainerRejectedError,
        lambda traits: (
            traits.opening
            and traits.status is not None
            and 400 <= traits.status < 500
            and traits.status not in _NOT_NOW
        ),
    ),
    Rule(
        "refused by the SDK itself",
        "fail",
        TrainerRejectedError,
        lambda traits: (
            traits.opening
            and traits.status is None
            and "ValueError" in traits.types
            and not traits.types & _MALFORMED
        ),
    ),
    Rule(
        "service unreachable or failing",
        "retry",
        TrainerUnavailableError,
        lambda traits: traits.opening,
    ),
    Rule(
        "rate limit beyond the SDK's own patience (429)",
        "replace",
        TrainerStateLostError,
        lambda traits: traits.status == 429,
        "requests were rate-limited for longer than the SDK waits",
    ),
    Rule(
        "session or model gone (404, 410), preemption included",
        "replace",
        TrainerStateLostError,
        lambda traits: traits.status in (404, 410) or "RetryableException" in traits.types,
    ),
    Rule(
        "client poisoned by an earlier refusal",
        "replace",
        TrainerStateLostError,
        lambda traits: "reconnect" in traits.text,
        "the SDK's client sends nothing more after a refused submission",
    ),
    Rule(
        "result that never comes",
        "replace",
        TrainerStateLostError,
        lambda traits: "TimeoutError" in traits.types,
        "there was no result in time; whether it was applied isn't known",
    ),
    Rule(
        "malformed reply",
        "replace",
        TrainerStateLostError,
        lambda traits: bool(traits.types & _MALFORMED),
        "the answer can't be read; whether the request was applied isn't known",
    ),
    Rule(
        "operation failed by the service",
        "replace",
        TrainerFailedError,
        lambda traits: (
            "RequestFailedError" in traits.types
            or (traits.status in range(400, 500) and traits.status not in _UNANSWERED)
        ),
    ),
    Rule(
        "anything else",
        "replace",
        TrainerStateLostError,
        lambda traits: True,
    ),
)
"""The first that applies is used."""


def translated(
    error: BaseException, operation: str, variable: str, *, opening: bool = False
) -> TrainerError:
    """Everburn's error for an SDK error, with advice. variable: names the environment variable of
    the API key."""
    traits = traits_of(error, opening=opening)
    rule = next(rule for rule in RULES if rule.applies(traits))
    advice = rule.advice.format(variable=variable)
    text = f"{operation}: {advice + ': ' if advice else ''}{describe(error)}"
    return rule.error(text)


def traits_of(error: BaseException, *, opening: bool = False) -> Traits:
    chain = _causes(error)
    text = " ".join(f"{cause} {_server_message(cause)}" for cause in chain)
    statuses = (status_of(cause) for cause in chain)
    status = next((status for status in statuses if status is not None), None)
    if status is None and (match := re.search(r"\bHTTP (\d{3})\b", text)):
        # The SDK's control-plane errors have their status only in the text.
        status = int(match[1])
    categories = {str(getattr(getattr(e, "category", ""), "value", "")).lower() for e in chain}
    types = frozenset(base.__name__ for cause in chain for base in type(cause).__mro__)
    return Traits(text, status, "user" in categories, opening, types)


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
    if message := _server_message(error):
        return message
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    first = lines[0].partition(_SDK_DETAILS)[0] if lines else "no message"
    cause = next((line for line in lines[1:] if line.startswith("Cause: ")), None)
    text = first if cause is None else f"{first.removeprefix('ERROR: ')}: {cause[7:]}"
    return redacted(f"{type(error).__name__}: {text}")


def _server_message(error: BaseException) -> str:
    """The server's message in an httpx status error, whose own text has only the URL."""
    response = getattr(error, "response", None)
    if type(error).__name__ != "HTTPStatusError" or response is None:
        return ""
    try:
        body = response.json()
    except ValueError:
        body = response.text
    message = body.get("error", body) if isinstance(body, dict) else body
    message = message.get("message", message) if isinstance(message, dict) else message
    return f"HTTP {response.status_code}: {redacted(str(message))[:MAX_SERVER_MESSAGE]}"


def _causes(error: BaseException) -> list[BaseException]:
    chain: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in chain:
        chain.append(current)
        current = current.__cause__
    return chain
