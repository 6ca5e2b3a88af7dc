"""The `hud` package: whether it is here, and whose key it uses.

Owns its first import and the rule about keys. Doesn't own what is done with it.
"""

import asyncio
import logging
import os

HUD_KEY_ENV = "HUD_API_KEY"


class HudMissingError(ImportError):
    """The extra isn't installed."""


class HudKeyMissingError(RuntimeError):
    """Something of the HUD platform was asked for, and there is no key."""


def import_hud() -> None:
    """Import hud, with the key of this process's environment or none.

    Without a key it sends nothing anywhere. By itself it would also find one in `.env` of the
    current folder or in `~/.hud/.env`, and upload the trace of every rollout from then on.

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
    # Every environment says when it is up: thousands of lines in a worker's log.
    logging.getLogger("hud.environment").setLevel(logging.WARNING)
    logging.getLogger("asyncio").addFilter(_is_news)


def hud_key() -> str | None:
    """The key of the HUD platform, from the environment only."""
    return os.environ.get(HUD_KEY_ENV, "").strip() or None


def require_hud_key(what: str) -> None:
    """Raises HudKeyMissingError where there is no key; `what` needs it."""
    if hud_key() is None:
        raise HudKeyMissingError(
            f"{what} is on the HUD platform: set {HUD_KEY_ENV} where the workers run, or put it "
            "into a .env file there"
        )


def _is_news(record: logging.LogRecord) -> bool:
    """Python 3.11 logs an error for each connection whose handler is cancelled, which is how HUD
    ends every environment."""
    kind = record.exc_info[0] if record.exc_info else None
    return kind is not asyncio.CancelledError or "connection_made" not in record.getMessage()
