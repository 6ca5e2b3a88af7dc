"""What a run's configuration asks of a trainer session, against what the session says it can do.

Owns the comparison, made once a session is open and before anything is trained or sampled. Doesn't
own which setting needs what (learning/losses.py).
"""

from everburn.config import Entrypoint, RunConfig
from everburn.learning.losses import Need, needs
from everburn.trainers.protocol import TrainerUnfitError


def check_capabilities(config: RunConfig, client: object) -> None:
    """Compare with the flags that create_model's answer has left on the SDK's client.

    Raises:
        TrainerUnfitError: naming every flag that is missing, and what needs it.
    """
    missing = [need for need in needed(config) if getattr(client, need.flag, None) is not True]
    if missing:
        lacks = "; ".join(f"{need.what} needs {need.flag}" for need in missing)
        raise TrainerUnfitError(
            f"the trainer of {config.base_model} doesn't advertise what the run asks for: {lacks}. "
            "Change the setting, or train where it is supported"
        )


def needed(config: RunConfig) -> list[Need]:
    """The capabilities that a configuration asks for."""
    found: list[Need] = []
    if not isinstance(config.loss, Entrypoint):
        found += needs(config.loss, config.loss_config)
    if config.router_replay:
        found.append(Need("supports_router_replay", "router_replay (a model with experts)"))
    return found
