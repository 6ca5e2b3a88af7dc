"""`everburn doctor --live`: what a run needs from the service, checked free of charge.

Sends requests to the control plane only: opens no session, samples and trains nothing. Doesn't own
how findings are shown (doctor.py).
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Literal

from everburn.config import RunConfig
from everburn.rollouts.tokenizers import load_tokenizer
from everburn.trainers.backends import (
    MissingKeyError,
    UnreachableError,
    api_key,
    check_reachable,
    control_url,
)
from everburn.trainers.errors import translated
from everburn.trainers.promotion import model_exists

if TYPE_CHECKING:
    from fireworks.training.sdk.fireworks_client import FireworksClient

Verdict = Literal["ok", "missing"]
Answer = tuple[Verdict, str, str]
"""Verdict, subject, text."""


def live_answers(config: RunConfig) -> Iterator[Answer]:
    """Check key, account, models, training shape and tokenizer."""
    try:
        key, url = api_key(config), control_url(config)
        check_reachable(url)
    except (MissingKeyError, UnreachableError) as error:
        yield "missing", "service", str(error)
        return
    from fireworks.training.sdk.fireworks_client import FireworksClient

    with FireworksClient(api_key=key, base_url=url) as control:
        account = _asked(config, "account", lambda: control.account_id)
        yield account
        if account[0] == "missing":
            return
        yield _asked(config, "base model", lambda: _model(control, config.base_model))
        if (shape := config.trainer_provisioning.training_shape) is not None:
            yield _asked(config, "training shape", lambda: _shape(control, shape))
        if config.output_model_id is not None:
            name = f"accounts/{control.account_id}/models/{config.output_model_id}"
            yield _asked(config, "output_model_id", lambda: _free(control, name))
    yield _asked(config, "tokenizer", lambda: _tokenizer(config))


def _asked(config: RunConfig, subject: str, ask: Callable[[], str]) -> Answer:
    try:
        return "ok", subject, ask()
    except Exception as error:
        # Each error is a finding; `translated` knows what to do about a rejected key.
        found = translated(error, subject, config.api_key_env, opening=True)
        return "missing", subject, str(found).removeprefix(f"{subject}: ")


def _model(control: "FireworksClient", name: str) -> str:
    if not model_exists(control, name):
        raise LookupError(
            f"there is no model {name}, or this account has no access: Fireworks' own models are "
            "accounts/fireworks/models/<id>"
        )
    return name


def _shape(control: "FireworksClient", name: str) -> str:
    profile = control.resolve_training_profile(name)
    return f"{profile.training_shape_version}, up to {profile.max_supported_context_length} tokens"


def _free(control: "FireworksClient", name: str) -> str:
    if model_exists(control, name):
        raise LookupError(f"{name} exists already: choose another id")
    return f"{name} is free"


def _tokenizer(config: RunConfig) -> str:
    tokenizer = load_tokenizer(config)
    return f"{tokenizer.name_or_path}, {len(tokenizer)} tokens"
