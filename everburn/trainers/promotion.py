"""Promotion: a snapshot becomes a model of the account, and nobody else's model is taken for it.

Owns what an answer tells about whether the model was made. Doesn't own which request makes it (the
sessions) or how often that is tried (workflows/run/shutdown.py).
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from everburn.config import RunConfig
from everburn.secrets import redacted
from everburn.trainers.errors import describe, signs_of, translated
from everburn.trainers.protocol import (
    ModelIdTakenError,
    PromotionError,
    PromotionRefusedError,
    TrainerClosedError,
)

if TYPE_CHECKING:
    from fireworks.training.sdk.fireworks_client import FireworksClient


def promote(
    config: RunConfig,
    control: "FireworksClient",
    snapshot: str,
    model_id: str,
    find: Callable[[], str],
    send: Callable[[str], dict[str, Any]],
    *,
    again: bool,
) -> str:
    """Make a model of a snapshot; returns the model's name. Blocks.

    find: the control plane's name of the snapshot; it makes nothing. send: asks for the model, by
    that name. again: an earlier try may have made the model, so one that exists is it.

    Raises:
        ModelIdTakenError: a model of this id had existed before it was asked for.
        PromotionRefusedError: no model was made.
        PromotionError: whether one was made isn't known.
        TrainerClosedError: the account may not promote.
    """
    what = f"{snapshot} isn't promoted to model {model_id}"
    sent: list[str] = []
    try:
        name = f"accounts/{control.account_id}/models/{model_id}"
        if not again and model_exists(control, name):
            raise _taken(what, name)
        found = find()
        _count_promotions(control, sent)
        return redacted(str(send(found)["name"]))
    except PromotionError:
        raise
    except Exception as error:
        closed = translated(error, what, config.api_key_env, opening=True)
        if isinstance(closed, TrainerClosedError):
            raise closed from error
        status = signs_of(error).status
        if status == 409 and (again or len(sent) > 1):
            # Just now there was none: of what was sent more than once, an earlier one has made it.
            return name
        if status == 409:
            raise _taken(what, name) from error
        refused = not sent or (len(sent) == 1 and status is not None and status < 500)
        kind = PromotionRefusedError if refused else PromotionError
        raise kind(f"{what}: {describe(error)}") from error


def model_exists(control: "FireworksClient", name: str) -> bool:
    """Whether the account sees a model. The SDK has no look-up of its record but this one."""
    from fireworks.training.sdk.fireworks_client import ModelDetailsUnavailableError

    try:
        control.model_is_moe(name)
    except ModelDetailsUnavailableError as error:
        if error.status_code == 404:
            return False
        raise
    except ValueError:
        return True  # it is there, and doesn't say whether it has experts
    return True


def _taken(what: str, name: str) -> ModelIdTakenError:
    return ModelIdTakenError(
        f"{what}: {name} exists already. It isn't this run's, unless an earlier life of the run "
        "was cut off while it made it: choose another output_model_id, or delete that model"
    )


def _count_promotions(control: "FireworksClient", sent: list[str]) -> None:
    """Note each request for a promotion: the SDK repeats one itself, after a timeout or a 5xx that
    may have been answered too late. It counts nothing itself."""

    def note(request: Any) -> None:
        if request.url.path.endswith(":promote"):
            sent.append(request.url.path)

    control._sync_client.event_hooks = {"request": [note]}
