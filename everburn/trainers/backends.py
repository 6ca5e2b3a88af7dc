"""The base URLs and the API key of a run, from configuration and environment.

A key is read by the process that uses it; it never enters configuration, history, files or
messages.
"""

import os
import socket
from urllib.parse import urlsplit

from everburn.config import RunConfig
from everburn.secrets import keep_secret

FIREWORKS_ROOT = "https://api.fireworks.ai"
EMULATOR_URL_ENV = "EVERBURN_EMULATOR_URL"
EMULATOR_DEFAULT_URL = "http://127.0.0.1:8780"
SERVERLESS_PATH = "/training/v1/serverless"
FIREWORKS_URL = FIREWORKS_ROOT + SERVERLESS_PATH
EMULATOR_KEY = "fw_local"
"""The emulator accepts any key; the SDK wants one that doesn't start with `tml-`."""


CONNECT_TIMEOUT = 5.0
"""Seconds."""


class UnreachableError(ConnectionError):
    """No server answers at the run's address."""


class MissingKeyError(RuntimeError):
    """The configured environment variable has no API key."""


def training_url(config: RunConfig) -> str:
    """The base URL of the training API."""
    if config.base_url is not None:
        return config.base_url
    return emulator_url() + SERVERLESS_PATH if config.local else FIREWORKS_URL


def api_root(config: RunConfig) -> str:
    """The base URL of trainer jobs, deployments, hotload and inference."""
    if config.base_url is not None:
        return config.base_url.rstrip("/")
    return emulator_url() if config.local else FIREWORKS_ROOT


def emulator_url() -> str:
    return os.environ.get(EMULATOR_URL_ENV, EMULATOR_DEFAULT_URL).rstrip("/")


def control_url(config: RunConfig) -> str:
    """The base URL of the control plane that belongs to the training API."""
    return training_url(config).removesuffix(SERVERLESS_PATH)


def on_shared_emulator(config: RunConfig) -> RunConfig:
    """The same training on an emulator session without trainer job and deployment. It starts with
    the same policy and can load the emulator's checkpoints."""
    return config.model_copy(update={"backend": "emulator", "trainer": None, "deployment": None})


def check_reachable(url: str) -> None:
    """Raises UnreachableError if nothing listens; the SDK would retry for a minute."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        socket.create_connection((parts.hostname or "", port), timeout=CONNECT_TIMEOUT).close()
    except OSError as error:
        raise UnreachableError(
            f"nothing answers at {url}: {error.strerror or error}. `everburn dev` starts the "
            f"emulator; if it runs elsewhere, set {EMULATOR_URL_ENV} for the workers, or base_url"
        ) from None


def api_key(config: RunConfig) -> str:
    """The API key of this process. Raises MissingKeyError, which names the variable."""
    if config.local:
        return EMULATOR_KEY
    key = os.environ.get(config.api_key_env, "").strip()
    if not key:
        raise MissingKeyError(
            f"the environment variable {config.api_key_env} is empty: set it to your Fireworks API "
            "key where the workers run, or put it into a .env file there"
        )
    keep_secret(key)
    return key
