"""Promotion of a snapshot to a model of the account.

Owns the conclusion from an answer whether the run's model was created. Doesn't own the requests
(the sessions) or retries (workflows/run/shutdown.py).
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from everburn.config import RunConfig
from everburn.secrets import redacted
from everburn.trainers.errors import describe, traits_of, translated
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
    """Make a snapshot a model; returns the model's name. Blocks.

    find: returns the control plane's name of the snapshot. send: requests the model, by that name.
    again: an earlier attempt may have created the model, so an existing one is taken for it.

    Raises:
        ModelIdTakenError: a model of this id existed before the request.
        PromotionRefusedError: no model was created.
        PromotionError: it is unknown whether one was created.
        TrainerClosedError: the account may not promote.
    """
    problem = f"{snapshot} isn't promoted to model {model_id}"
    requests: list[str] = []
    try:
        name = f"accounts/{control.account_id}/models/{model_id}"
        if not again and model_exists(control, name):
            raise _taken(problem, name)
        snapshot_name = find()
        _record_requests(control, requests)
        return redacted(str(send(snapshot_name)["name"]))
    except PromotionError:
        raise
    except Exception as error:
        closed = translated(error, problem, config.api_key_env, opening=True)
        if isinstance(closed, TrainerClosedError):
            raise closed from error
        status = traits_of(error).status
        if status == 409 and (again or len(requests) > 1):
            # No model existed before, so an earlier one of the repeated requests created it.
            return name
        if status == 409:
            raise _taken(problem, name) from error
        refused = not requests or (len(requests) == 1 and status is not None and status < 500)
        kind = PromotionRefusedError if refused else PromotionError
        raise kind(f"{problem}: {describe(error)}") from error


def model_exists(control: "FireworksClient", name: str) -> bool:
    """Whether the model exists. The SDK has no other call that reads a model's record."""
    from fireworks.training.sdk.fireworks_client import ModelDetailsUnavailableError

    try:
        control.model_is_moe(name)
    except ModelDetailsUnavailableError as error:
        if error.status_code == 404:
            return False
        raise
    except ValueError:
        pass  # it exists, and its record doesn't say whether it has experts
    return True


def _taken(problem: str, name: str) -> ModelIdTakenError:
    return ModelIdTakenError(
        f"{problem}: {name} exists already. It isn't this run's, unless an earlier incarnation of "
        "the run ended while creating it: choose another output_model_id, or delete that model"
    )


def _record_requests(control: "FireworksClient", requests: list[str]) -> None:
    """Append each promotion request to `requests`; the SDK repeats one after a timeout or a 5xx."""

    def record(request: Any) -> None:
        if request.url.path.endswith(":promote"):
            requests.append(request.url.path)

    control._sync_client.event_hooks = {"request": [record]}
