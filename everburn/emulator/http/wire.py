"""JSON of requests and responses.

Bodies are plain dicts, checked where they are used: the hot paths carry thousands of numbers a
second.
"""

import json
from collections.abc import Mapping
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from everburn.emulator.errors import EmulatorError, InvalidInput, http_body


def decode(raw: bytes) -> dict[str, Any]:
    """Parse a request body. Raises InvalidInput if it isn't a JSON object."""
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError:
        # Python clients may write NaN, which isn't JSON. The field's own check refuses it.
        try:
            body = json.loads(raw)
        except ValueError as error:
            raise InvalidInput(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise InvalidInput("the body must be a JSON object")
    return body


def encode(payload: Mapping[str, Any]) -> bytes:
    return orjson.dumps(payload, option=orjson.OPT_SERIALIZE_NUMPY)


async def read(request: Request) -> dict[str, Any]:
    return decode(await request.body())


def reply(payload: Mapping[str, Any] | bytes, status: int = 200) -> Response:
    content = payload if isinstance(payload, bytes) else encode(payload)
    return Response(content, status, media_type="application/json")


def refuse(error: EmulatorError) -> Response:
    return reply(http_body(error), error.status)


def text(body: Mapping[str, Any], key: str) -> str:
    value = body.get(key)
    if not isinstance(value, str) or not value:
        raise InvalidInput(f"{key} must be a non-empty string, not {value!r}")
    return value


def integer(body: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = body.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidInput(f"{key} must be an integer, not {value!r}")
    return value


def number(body: Mapping[str, Any], key: str, default: float) -> float:
    value = body.get(key, default)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise InvalidInput(f"{key} must be a number, not {value!r}")
    return float(value)


def flag(body: Mapping[str, Any], key: str, default: bool) -> bool:
    value = body.get(key, default)
    if not isinstance(value, bool):
        raise InvalidInput(f"{key} must be true or false, not {value!r}")
    return value
