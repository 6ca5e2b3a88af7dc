"""The `hud` package: its first import, and the rule about its key."""

import asyncio
import logging
import os

HUD_KEY_ENV = "HUD_API_KEY"


class HudMissingError(ImportError):
    """The extra isn't installed."""


class HudKeyMissingError(RuntimeError):
    """The HUD platform is needed and there is no key."""


def import_hud() -> None:
    """Import hud with the key in HUD_API_KEY, or without a key: then hud sends nothing.

    By default hud would also read a key from `.env` in the current folder or `~/.hud/.env`, and
    then upload the trace of every rollout.

    Raises:
        HudMissingError
    """
    try:
        from hud.settings import settings
    except ImportError as error:
        raise HudMissingError(
            f"HUD environments need the hud package ({error}): in Everburn's checkout, "
            "pip install -c constraints.txt -e '.[hud]'"
        ) from None
    settings.api_key = hud_key()
    # hud logs the start of every environment: thousands of lines in a worker's log.
    logging.getLogger("hud.environment").setLevel(logging.WARNING)
    logging.getLogger("asyncio").addFilter(_is_not_cancelled_connection)


def hud_key() -> str | None:
    return os.environ.get(HUD_KEY_ENV, "").strip() or None


def require_hud_key(user: str) -> None:
    """Raise HudKeyMissingError, which names `user`, if there is no key."""
    if hud_key() is None:
        raise HudKeyMissingError(
            f"{user} needs a key of the HUD platform: set {HUD_KEY_ENV} where the workers run, or "
            "put it into a .env file there"
        )


def _is_not_cancelled_connection(record: logging.LogRecord) -> bool:
    """Log filter: Python 3.11 logs an error for each connection whose handler is cancelled, which
    is how HUD ends every environment."""
    kind = record.exc_info[0] if record.exc_info else None
    return kind is not asyncio.CancelledError or "connection_made" not in record.getMessage()
