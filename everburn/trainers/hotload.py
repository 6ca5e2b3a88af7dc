"""Hotload: loading a snapshot onto a deployment, and polling which one it serves.

Owns the request, the wait until the snapshot is served, and the server's error texts. Doesn't own
the content of snapshots or the creation of deployments (jobs.py).
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

MIN_POLL_INTERVAL, MAX_POLL_INTERVAL = 0.05, 5.0
"""Seconds between polls of a hotload; doubled from the first to the second."""

RETRY_INTERVAL = 1.0
"""Seconds between requests to a deployment that isn't ready or doesn't answer."""
NOT_READY = (404, 425)
"""Statuses of a deployment that is starting or has no replica."""


@dataclass(frozen=True)
class ServingStatus:
    """The report of the replica that is furthest from serving a snapshot. stage: of its latest
    load."""

    ready: bool
    identity: str | None
    stage: str
    target: str | None
    error: str


class Hotloader:
    def __init__(self, config: RunConfig, deployment_id: str) -> None:
        self._config = config
        self.deployment_id = deployment_id

    def load(
        self,
        identity: str,
        previous: str | None,
        timeout: float,
        abandoned: Callable[[], bool],
    ) -> None:
        """Load a snapshot and return when the deployment serves it. Blocks.

        previous: the base of a delta; None if `identity` is complete. abandoned: checked before
        each request; if true, none is sent.

        Raises:
            TrainerStateLostError: the load failed (with the server's reason) or timed out.
            TrainerClosedError: the account may not load it.
        """
        deadline = time.monotonic() + timeout
        interval = MIN_POLL_INTERVAL
        with self._manager() as manager:
            self._request(manager, identity, previous, deadline, abandoned)
            while True:
                status = self._poll_until_answered(manager, identity, deadline)
                if status.ready and status.identity == identity:
                    return
                if status.stage == "error" and status.target == identity:
                    raise TrainerFailedError(
                        f"deployment {self.deployment_id} couldn't load {identity}: "
                        f"{status.error or 'stage error, without a reason'}"
                    )
                if time.monotonic() > deadline:
                    raise TrainerStateLostError(
                        f"deployment {self.deployment_id} doesn't serve {identity} after "
                        f"{timeout:g} s: stage {status.stage}, ready {status.ready}, it has "
                        f"{status.identity or 'the base model'}"
                    )
                time.sleep(interval)
                interval = min(2 * interval, MAX_POLL_INTERVAL)

    def serving(self, identity: str | None) -> ServingStatus:
        """How far the deployment is from serving a snapshot, or (None) the base model. Blocks.
        Raises the errors of `load`."""
        with self._manager() as manager:
            return self._poll(manager, identity)

    def sampler_handle(self) -> str:
        """A handle that opens a sampler on the deployment in any process; has no credentials."""
        from fireworks.training.sdk import DeploymentSampler, FiretitanSamplingClient

        with self._manager() as manager:
            model = f"accounts/{manager.account_id}/deployments/{self.deployment_id}"
            sampler = DeploymentSampler(manager.inference_url, model, manager.api_key)
        client = FiretitanSamplingClient(sampler)
        try:
            return str(client.get_sampler_handle())
        finally:
            client.close()

    def _request(
        self,
        manager: "DeploymentManager",
        identity: str,
        previous: str | None,
        deadline: float,
        abandoned: Callable[[], bool],
    ) -> None:
        """Request the load; retry while the deployment isn't ready."""
        import httpx
        from fireworks.training.sdk import DEFAULT_CHECKSUM_FORMAT, DEFAULT_DELTA_COMPRESSION

        delta = {
            "previous_snapshot_identity": previous,
            "compression_format": DEFAULT_DELTA_COMPRESSION,
            "checksum_format": DEFAULT_CHECKSUM_FORMAT,
        }
        while True:
            if abandoned():
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
            time.sleep(RETRY_INTERVAL)

    def _poll_until_answered(
        self, manager: "DeploymentManager", identity: str, deadline: float
    ) -> ServingStatus:
        while True:
            try:
                return self._poll(manager, identity)
            except Exception as error:
                if not _is_transient(error) or time.monotonic() > deadline:
                    raise
                log.info("polling deployment %s again: %s", self.deployment_id, describe(error))
            time.sleep(RETRY_INTERVAL)

    def _poll(self, manager: "DeploymentManager", identity: str | None) -> ServingStatus:
        status = manager.hotload_check_status(self.deployment_id, self._config.base_model)
        replicas: list[dict[str, Any]] = status.get("replicas") or []
        if not replicas:
            return ServingStatus(False, None, "no replica", None, "")

        def progress(replica: dict[str, Any]) -> tuple[bool, bool]:
            ready = bool(replica.get("readiness"))
            return ready and replica.get("current_snapshot_identity") == identity, ready

        slowest = min(replicas, key=progress)  # any replica may be sampled
        loading = slowest.get("loading_state") or {}
        return ServingStatus(
            ready=bool(slowest.get("readiness")),
            identity=slowest.get("current_snapshot_identity"),
            stage=str(loading.get("stage", "unknown")),
            target=loading.get("target_snapshot_identity"),
            error=str(loading.get("error") or loading.get("message") or ""),
        )

    @contextmanager
    def _manager(self) -> "Iterator[DeploymentManager]":
        """The SDK's manager, with translated errors."""
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


def _is_transient(error: Exception) -> bool:
    """Whether to repeat a poll that ended in this error; polls have no effect."""
    import httpx

    status = status_of(error)
    if status is not None:
        return status in (*NOT_READY, 408, 429) or status >= 500
    return isinstance(error, httpx.TransportError | ValueError)
