import logging

import pytest

from everburn.secrets import (
    REDACTED,
    RedactingFormatter,
    keep_environment_secret,
    keep_secret,
    redacted,
)


def test_a_kept_value_is_taken_out_of_text() -> None:
    keep_secret("fw_0123456789")
    assert redacted("key fw_0123456789, again fw_0123456789") == f"key {REDACTED}, again {REDACTED}"
    assert redacted("fw_012345678") == "fw_012345678"


def test_a_short_value_would_take_harmless_text_with_it() -> None:
    keep_secret("step")
    assert redacted("step 4") == "step 4"


def test_whatever_the_environment_calls_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_SERVICE_TOKEN", "tok-abcdefgh")
    monkeypatch.setenv("SOME_SERVICE_URL", "http://harmless.example")
    keep_environment_secret()
    assert redacted("tok-abcdefgh at http://harmless.example") == (
        f"{REDACTED} at http://harmless.example"
    )


def test_a_traceback_in_a_log_is_redacted() -> None:
    keep_secret("fw_in_a_traceback")
    formatter = RedactingFormatter(logging.Formatter("%(message)s"))
    try:
        raise ValueError("refused: fw_in_a_traceback")
    except ValueError as error:
        record = logging.LogRecord(
            "x", logging.ERROR, "x", 1, "with fw_in_a_traceback", None, (type(error), error, None)
        )
    text = formatter.format(record)
    assert "fw_in_a_traceback" not in text
    assert text.count(REDACTED) == 2
