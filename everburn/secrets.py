"""Secrets: API keys that must not leave the process that read them.

Owns the values that this process knows to be secret, and their removal from text that goes
anywhere: errors, logs, history. Doesn't own where keys come from (trainers/backends.py).
"""

import logging
import os

REDACTED = "[secret]"
SHORTEST = 8
"""Characters; a shorter value would take harmless text with it."""

_values: set[str] = set()


def keep_secret(value: str) -> None:
    """Never show this value from now on."""
    if len(value) >= SHORTEST:
        _values.add(value)


def redacted(text: str) -> str:
    """Text without the secrets of this process."""
    for value in sorted(_values, key=len, reverse=True):
        text = text.replace(value, REDACTED)
    return text


def keep_environment_secret() -> None:
    """Whatever the environment calls a key, a token or a password: user code, and servers that
    repeat what they were sent, may show it before Everburn has used it."""
    for name, value in os.environ.items():
        if name.upper().endswith(("_KEY", "_TOKEN", "_SECRET", "_PASSWORD")):
            keep_secret(value.strip())


class RedactingFormatter(logging.Formatter):
    """Another formatter's text, tracebacks included, without secrets."""

    def __init__(self, formatter: logging.Formatter) -> None:
        super().__init__()
        self._formatter = formatter

    def format(self, record: logging.LogRecord) -> str:
        return redacted(self._formatter.format(record))


def redact_logs() -> None:
    """Let no handler of the root logger, nor of the last resort, write a secret."""
    for handler in [*logging.getLogger().handlers, logging.lastResort]:
        if handler is not None and not isinstance(handler.formatter, RedactingFormatter):
            handler.setFormatter(RedactingFormatter(handler.formatter or logging.Formatter()))
