"""Hotload: bringing a snapshot onto a deployment, and knowing which one it serves.

Owns the request, the wait for readiness and identity within a deadline, and the server's words
where it fails. Doesn't own what is in a snapshot or how a deployment comes to be (jobs.py).
"""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from everburn.config import RunConfig
from everburn.trainers.backends import api_key, api_root
from everburn.trainers.errors import describe, status_of, translated
from everburn.trainers.protocol import TrainerError, TrainerFailedError, TrainerStateLostError

if TYPE_CHECKING:
    from fireworks.training.sdk import DeploymentManager

log = logging.getLogger(__name__)

FIRST_LOOK, LONGEST_WAIT = 0.05, 5.0
"""Seconds between looks at a hotload; doubled from the one to the other."""

ASK_AGAIN = 1.0
"""Seconds between requests to a deployment that isn't ready for one, or doesn't answer."""
NOT_READY = (404, 425)
"""What a deployment that starts or has no replica yet answers to any request."""


@dataclass(frozen=True)
class Serving:
    """What the replica reports that is furthest from serving a snapshot. stage: of the load asked
    for last."""

    ready: bool
    identity: str | None
    stage: str
    target: str | None
    error: str


class Hotloader:
    """The way onto one deployment."""

    def __init__(self, config: RunConfig, deployment_id: str) -> None:
        self._config = config
        self.deployment_id = deployment_id

    def load(
        self,
        identity: str,
        previous: str | None,
        timeout: float,
        given_up: Callable[[], bool],
    ) -> None:
        """Return once the deployment serves the snapshot. Blocks.

        previous: the snapshot that a delta builds on; None if `identity` is whole. given_up: asked
        before each request; where it says so, none is sent.

        Raises:
            TrainerStateLostError: it can't, or not within `timeout` seconds; in the server's words.
            TrainerClosedError: the account may not.
        """
        deadline = time.monotonic() + timeout
        wait = FIRST_LOOK
        with self._manager() as manager:
            self._ask(manager, identity, previous, deadline, given_up)
            while True:
                found = self._look_until_told(manager, identity, deadline)
                if found.ready and found.identity == identity:
                    return
                if found.stage == "error" and found.target == identity:
                    raise TrainerFailedError(
                        f"deployment {self.deployment_id} couldn't load {identity}: "
                        f"{found.error or 'stage error, without a reason'}"
                    )
                if time.monotonic() > deadline:
                    raise TrainerStateLostError(
                        f"deployment {self.deployment_id} doesn't serve {identity} after "
                        f"{timeout:g} s: stage {found.stage}, ready {found.ready}, it has "
                        f"{found.identity or 'the base model'}"
                    )
                time.sleep(wait)
                wait = min(2 * wait, LONGEST_WAIT)

    def serving(self, identity: str | None) -> Serving:
        """How far the deployment is from serving a snapshot now, or the base model. Blocks. Raises
        as `load` does, if nobody says."""
        with self._manager() as manager:
            return self._look(manager, identity)

    def sampler_handle(self) -> str:
        """Opens a sampler on the deployment, in any process; no credentials in it."""
        from fireworks.training.sdk import DeploymentSampler, FiretitanSamplingClient

        with self._manager() as manager:
            model = f"accounts/{manager.account_id}/deployments/{self.deployment_id}"
            sampler = DeploymentSampler(manager.inference_url, model, manager.api_key)
        client = FiretitanSamplingClient(sampler)
        try:
            return str(client.get_sampler_handle())
        finally:
            client.close()

    def _ask(
        self,
        manager: "DeploymentManager",
        identity: str,
        previous: str | None,
        deadline: float,
        given_up: Callable[[], bool],
    ) -> None:
        """Send the request, again for as long as the deployment isn't ready for one."""
        import httpx
        from fireworks.training.sdk import DEFAULT_CHECKSUM_FORMAT, DEFAULT_DELTA_COMPRESSION

        delta = {
            "previous_snapshot_identity": previous,
            "compression_format": DEFAULT_DELTA_COMPRESSION,
            "checksum_format": DEFAULT_CHECKSUM_FORMAT,
        }
        while True:
            if given_up():
                raise TrainerStateLostError(f"{identity} isn't loaded: its lease has ended")
            try:
                manager.hotload(
                    self.deployment_id,
                    self._config.base_model,
                    identity,
                    incremental_snapshot_metadata=delta if previous is not None else None,
                )
                return
            except httpx.HTTPStatusError as error:
                if error.response.status_code not in NOT_READY or time.monotonic() > deadline:
                    raise
            time.sleep(ASK_AGAIN)

    def _look_until_told(
        self, manager: "DeploymentManager", identity: str, deadline: float
    ) -> Serving:
        """Look, and again for as long as nobody answers."""
        while True:
            try:
                return self._look(manager, identity)
            except Exception as error:
                if not _tells_nothing(error) or time.monotonic() > deadline:
                    raise
                log.info(
                    "deployment %s is looked at again: %s", self.deployment_id, describe(error)
                )
            time.sleep(ASK_AGAIN)

    def _look(self, manager: "DeploymentManager", identity: str | None) -> Serving:
        status = manager.hotload_check_status(self.deployment_id, self._config.base_model)
        replicas: list[dict[str, Any]] = status.get("replicas") or []
        if not replicas:
            return Serving(False, None, "no replica", None, "")

        def progress(replica: dict[str, Any]) -> tuple[bool, bool]:
            ready = bool(replica.get("readiness"))
            return ready and replica.get("current_snapshot_identity") == identity, ready

        slowest = min(replicas, key=progress)  # all of them sample
        loading = slowest.get("loading_state") or {}
        return Serving(
            ready=bool(slowest.get("readiness")),
            identity=slowest.get("current_snapshot_identity"),
            stage=str(loading.get("stage", "unknown")),
            target=loading.get("target_snapshot_identity"),
            error=str(loading.get("error") or loading.get("message") or ""),
        )

    @contextmanager
    def _manager(self) -> "Iterator[DeploymentManager]":
        """The SDK's manager, and its errors as ours."""
        from fireworks.training.sdk import DeploymentManager

        try:
            with DeploymentManager(
                api_key=api_key(self._config), base_url=api_root(self._config)
            ) as manager:
                yield manager
        except TrainerError:
            raise
        except Exception as error:
            operation = f"deployment {self.deployment_id}"
            raise translated(error, operation, self._config.api_key_env) from error


def _tells_nothing(error: Exception) -> bool:
    """Whether a look that ended so may be repeated, in the hope of an answer: it changed nothing,
    whatever became of it. The SDK does that itself after some of these, for a while."""
    import httpx

    status = status_of(error)
    if status is not None:
        return status in (*NOT_READY, 408, 429) or status >= 500
    return isinstance(error, httpx.TransportError | ValueError)
