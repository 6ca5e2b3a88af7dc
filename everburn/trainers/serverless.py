"""A serverless Fireworks training session, through the unmodified SDK.

Owns the translation of datums, losses and errors to and from the SDK. The emulator is used in the
same way. Doesn't own leases, retries or the order of steps.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from everburn.config import Entrypoint, RunConfig
from everburn.learning.datums import Datum
from everburn.learning.losses import LossConfig, wire_loss_of
from everburn.records.ledger import AdamParams
from everburn.trainers import sdk
from everburn.trainers.backends import (
    UnreachableError,
    api_key,
    check_reachable,
    control_url,
    training_url,
)
from everburn.trainers.custom_loss import CustomLoss
from everburn.trainers.errors import QUOTA_PATIENCE, describe, status_of, translated
from everburn.trainers.guards import GradientCount, check_capabilities
from everburn.trainers.promotion import promote
from everburn.trainers.protocol import (
    Gradients,
    Snapshot,
    TrainerError,
    TrainerUnavailableError,
    TrainerUnfitError,
)
from everburn.trainers.session_opening import wait_for_session
from everburn.usercode.threads import in_thread

if TYPE_CHECKING:
    from fireworks.training.sdk import FiretitanServiceClient, FiretitanTrainingClient
    from fireworks.training.sdk.fireworks_client import FireworksClient

log = logging.getLogger(__name__)

OPEN_TIMEOUT = 600.0
"""Seconds to open a session with its model; the SDK has no limit."""
RESULT_TIMEOUT = 3600.0
"""Seconds for the result of one request; the SDK has no limit."""
PUBLISH_TIMEOUT = 900.0
"""Seconds to save a snapshot and make it available to samplers."""
UNLOAD_TIMEOUT = 10.0
"""Seconds to unload a closing session's model; the SDK first waits for operations in flight."""
CLOSE_TIMEOUT = 30.0
"""Seconds to close a session; the SDK retries for minutes if the service doesn't answer."""
SERVED_TIMEOUT = 120.0
"""Seconds for a sampler to load a snapshot and score."""
SERVED_INTERVAL = 1.0


class ServerlessTrainer:
    """The Trainer protocol over one SDK training client."""

    def __init__(
        self,
        service: "FiretitanServiceClient",
        client: "FiretitanTrainingClient",
        config: RunConfig,
    ) -> None:
        self._service = service
        self._client = client
        self._config = config
        self._custom_lock = asyncio.Lock()
        self._gradient_count = GradientCount()

    @classmethod
    async def open(cls, config: RunConfig) -> "ServerlessTrainer":
        """A new session with a new model: the base model and, with LoRA, a new adapter.

        Raises:
            TrainerUnavailableError: the service doesn't answer, or has no capacity.
            KeyRefusedError, QuotaExceededError: the account may not train.
            TrainerRejectedError: the model is unknown, or can't be trained with these settings.
            TrainerUnfitError: the session lacks a capability that the configuration needs.
        """
        try:
            return await wait_for_session(asyncio.to_thread(cls._open, config), OPEN_TIMEOUT)
        except TimeoutError:
            raise TrainerUnavailableError(
                f"no training session for {config.base_model} within {OPEN_TIMEOUT:g} s"
            ) from None

    @classmethod
    def _open(cls, config: RunConfig) -> "ServerlessTrainer":
        sdk.load()
        url = training_url(config)
        service = None
        try:
            check_reachable(url)
        except UnreachableError as error:
            raise TrainerUnavailableError(str(error)) from error
        try:
            service = open_service(url, api_key(config))
            client = service.create_training_client(
                base_model=config.base_model,
                lora_rank=config.lora_rank,
                lora_alpha=config.lora_alpha,
                seed=config.seed,
            )
        except Exception as error:
            if service is not None:
                close_quietly(service)
            raise translated(
                error,
                f"no training session for {config.base_model} at {url}",
                config.api_key_env,
                opening=True,
            ) from error
        trainer = cls(service, client, config)
        try:
            check_capabilities(config, client)
        except TrainerUnfitError:
            trainer._close()
            raise
        return trainer

    @property
    def session(self) -> str:
        return str(self._service.training_session_id)

    def forward_backward(
        self, datums: list[Datum], loss: str | Entrypoint, loss_config: LossConfig
    ) -> Awaitable[Gradients]:
        if isinstance(loss, Entrypoint):
            # Sent as a linear loss: it is unknown which of its sequences the trainer counts.
            self._gradient_count.skip()
            # A task, so that this call takes the place in the order of custom losses.
            return asyncio.ensure_future(self._custom(datums, loss))
        wire_loss, wire_config = wire_loss_of(loss, loss_config)
        data = [self._to_sdk(datum) for datum in datums]
        with self._translated("forward_backward"):
            future = self._client.forward_backward(data, wire_loss, wire_config or None)
        self._gradient_count.add(datums)
        return self._gradients(future)

    async def forward(self, sequences: list[list[int]]) -> list[list[float]]:
        data = [_to_score(sequence) for sequence in sequences]
        with self._translated("forward"):
            future = self._client.forward(data, "cross_entropy")
            return _logprobs(await asyncio.wait_for(_result(future), RESULT_TIMEOUT))

    async def optim_step(self, adam: AdamParams) -> dict[str, float]:
        from fireworks.training.sdk import AdamParams as SdkAdamParams

        parameters = SdkAdamParams(
            learning_rate=adam.learning_rate,
            beta1=adam.beta1,
            beta2=adam.beta2,
            eps=adam.eps,
            weight_decay=adam.weight_decay,
            grad_clip_norm=adam.grad_clip_norm,
        )
        with self._translated("optim_step"):
            future = self._client.optim_step(
                parameters, grad_accumulation_normalization=adam.normalization
            )
            result = await asyncio.wait_for(_result(future), RESULT_TIMEOUT)
        metrics = dict(result.metrics or {})
        self._gradient_count.check_update(metrics)
        return metrics

    async def publish(self, name: str) -> Snapshot:
        with self._translated("save_weights_for_sampler"):
            publishing = asyncio.to_thread(self._publish, name)
            return await asyncio.wait_for(publishing, self._publish_timeout())

    def _publish_timeout(self) -> float:
        return PUBLISH_TIMEOUT

    def _publish(self, name: str) -> Snapshot:
        path = self._client.save_weights_for_sampler(name).result().path
        sampler = self._service.create_sampling_client(model_path=path)
        try:
            return Snapshot(path=path, handle=sampler.get_sampler_handle())
        finally:
            sampler.close()

    async def score_twice(
        self, snapshot: Snapshot, tokens: list[int]
    ) -> tuple[list[float], list[float]]:
        (trained,), served = await asyncio.gather(
            self.forward([tokens]), self.served_logprobs(snapshot, tokens)
        )
        return trained, served

    async def served_logprobs(self, snapshot: Snapshot, tokens: list[int]) -> list[float]:
        """The sampler's half of `score_twice`."""
        with self._translated(f"sampling from {snapshot.path}"):
            # Longer than the timeout inside, whose error has the server's message.
            return await asyncio.wait_for(self._score(snapshot, tokens), 2 * SERVED_TIMEOUT)

    async def _score(self, snapshot: Snapshot, tokens: list[int]) -> list[float]:
        from fireworks.training.sdk import FiretitanSamplingClient

        sampler = FiretitanSamplingClient.from_sampler_handle(
            snapshot.handle, api_key=api_key(self._config)
        ).deployment_sampler
        try:
            completion = await _echoed(sampler, tokens)
        finally:
            sampler.close()
        logprobs = completion.inference_logprobs
        if logprobs is None or len(logprobs) < len(tokens) - 1:
            raise ValueError("the sampler's answer has no logprobs of the prompt")
        return list(map(float, logprobs[: len(tokens) - 1]))

    async def promote(self, snapshot: str, model_id: str, *, again: bool) -> str:
        return await asyncio.to_thread(self._promote, snapshot, model_id, again)

    def _promote(self, snapshot: str, model_id: str, again: bool) -> str:
        from fireworks.training.sdk.fireworks_client import FireworksClient

        key, url = api_key(self._config), control_url(self._config)
        with FireworksClient(api_key=key, base_url=url) as control:
            return promote(
                self._config,
                control,
                snapshot,
                model_id,
                lambda: self._promotable(control, snapshot),
                lambda name: self._request_promotion(control, name, model_id),
                again=again,
            )

    def _promotable(self, control: "FireworksClient", snapshot: str) -> str:
        """The control plane's name of a snapshot."""
        rows = control.list_training_session_checkpoints(
            f"accounts/{control.account_id}/trainingSessions/{self.session}"
        )
        return str(find_row(rows, snapshot)["name"])

    def _request_promotion(
        self, control: "FireworksClient", name: str, model_id: str
    ) -> dict[str, Any]:
        """Request the model; returns the control plane's record of it."""
        return dict(control.promote_session_checkpoint(name, model_id, self._config.base_model))

    async def save_checkpoint(self, name: str) -> str:
        with self._translated("save_state"):
            saved = await asyncio.wait_for(_result(self._client.save_state(name)), RESULT_TIMEOUT)
            return str(saved.path)

    async def load_checkpoint(self, path: str) -> None:
        with self._translated(f"load {path} with its optimizer"):
            future = self._client.load_state_with_optimizer(path)
            await asyncio.wait_for(_result(future), RESULT_TIMEOUT)

    async def load_adapter(self, path: str) -> None:
        with self._translated(f"load adapter {path}"):
            await asyncio.wait_for(_result(self._client.load_adapter(path)), RESULT_TIMEOUT)

    async def probe(self) -> None:
        with self._translated("get_info"):
            await self._client.get_info_async()

    async def close(self) -> None:
        # On its own thread, which continues after the timeout and doesn't block process exit.
        try:
            await asyncio.wait_for(in_thread(self._close), CLOSE_TIMEOUT)
        except TimeoutError:
            log.warning(
                "session %s isn't closed yet: the service doesn't answer. Without heartbeats it "
                "expires",
                self.session,
            )

    def _close(self) -> None:
        session = self.session
        try:
            self._client.unload_model().result(timeout=UNLOAD_TIMEOUT)
        except Exception as error:
            # The model may be gone, and is deleted with its session.
            log.info("unloading the model of session %s: %s", session, describe(error))
        try:
            self._delete_session()
        except Exception as error:
            log.warning("session %s isn't closed: %s", session, describe(error))
        close_quietly(self._service)

    def _delete_session(self) -> None:
        import httpx

        try:
            self._service.delete_training_session()
        except (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError):
            # The SDK doesn't retry after a broken connection.
            self._service.delete_training_session()

    async def _custom(self, datums: list[Datum], entrypoint: Entrypoint) -> Gradients:
        """Two requests, with the loss computed here in between; calls run one after another, so
        that gradients are summed in the order of the calls.

        The SDK's `forward_backward_custom` sends the same requests, but would call the user's
        function on the event loop that all sessions of the process share.
        """
        loss = CustomLoss(entrypoint, datums)
        data = [_to_linear(datum, routing=self._config.router_replay) for datum in datums]
        async with self._custom_lock:
            with self._translated("forward"):
                future = self._client.forward(data, "cross_entropy")
                scored = _logprobs(await asyncio.wait_for(_result(future), RESULT_TIMEOUT))
            weights = await loss.weights(scored)
            data = [_with_weights(datum, w) for datum, w in zip(data, weights, strict=True)]
            with self._translated("forward_backward"):
                future = self._client.forward_backward(data, "cross_entropy", None)
            gradients = await self._gradients(future)
        return replace(
            gradients,
            metrics=gradients.metrics | {"loss:sum": loss.value},
            loss_metrics=loss.metrics,
        )

    def _to_sdk(self, datum: Datum) -> Any:
        return to_sdk(datum, routing=self._config.router_replay)

    @contextmanager
    def _translated(self, operation: str) -> Iterator[None]:
        """Translates the SDK's errors (errors.py)."""
        try:
            yield
        except (asyncio.CancelledError, TrainerError):
            raise
        except Exception as error:
            raise translated(error, operation, self._config.api_key_env) from error

    async def _gradients(self, future: Any) -> Gradients:
        with self._translated("forward_backward"):
            output = await asyncio.wait_for(_result(future), RESULT_TIMEOUT)
        return Gradients(metrics=dict(output.metrics), logprobs=_logprobs(output))


def to_sdk(datum: Datum, *, routing: bool = False) -> Any:
    """An SDK datum for a built-in loss. routing: include the expert routing of sampling, if the
    datum has it."""
    return _sdk_datum(
        datum.inputs.tolist(),
        datum.routing if routing else None,
        target_tokens=datum.targets,
        logprobs=datum.logprobs,
        advantages=datum.advantages,
    )


def _to_linear(datum: Datum, *, routing: bool = False) -> Any:
    """An SDK datum for the linear loss of a Python loss; with its zero weights it only scores."""
    return _sdk_datum(
        datum.inputs.tolist(),
        datum.routing if routing else None,
        target_tokens=datum.targets,
        weights=np.zeros_like(datum.mask),
    )


def _with_weights(datum: Any, weights: npt.NDArray[np.float32]) -> Any:
    """The datum with a gradient as weights: cross_entropy is the sum of -weights * logprobs."""
    from fireworks.training.sdk import Datum as SdkDatum
    from fireworks.training.sdk import TensorData

    inputs = datum.loss_fn_inputs | {"weights": TensorData.from_numpy(weights)}
    return SdkDatum(model_input=datum.model_input, loss_fn_inputs=inputs)


def _to_score(tokens: list[int]) -> Any:
    """An SDK datum whose forward pass returns the logprob of each token after the first."""
    targets = np.asarray(tokens[1:], dtype=np.int64)
    weights = np.ones(len(targets), dtype=np.float32)
    return _sdk_datum(tokens[:-1], None, target_tokens=targets, weights=weights)


def _sdk_datum(inputs: list[int], routing: list[str] | None, **arrays: npt.NDArray[Any]) -> Any:
    from fireworks.training.sdk import Datum as SdkDatum
    from fireworks.training.sdk import ModelInput, TensorData

    return SdkDatum(
        model_input=ModelInput.from_ints(inputs, routing_matrices=routing),
        loss_fn_inputs={name: TensorData.from_numpy(values) for name, values in arrays.items()},
    )


def _logprobs(output: Any) -> list[list[float]]:
    return [list(map(float, datum["logprobs"].data)) for datum in output.loss_fn_outputs]


async def _echoed(sampler: Any, tokens: list[int]) -> Any:
    """A completion of one token with the echo of the prompt. Waits SERVED_TIMEOUT for a snapshot to
    be loaded, then raises the server's error."""
    deadline = time.monotonic() + SERVED_TIMEOUT
    while True:
        try:
            (completion,) = await sampler.sample_with_prompt_tokens(
                tokens,
                max_tokens=1,
                temperature=1.0,
                echo=True,
                logprobs=True,
                hotload_max_retries=0,
            )
            return completion
        except Exception as error:
            if status_of(error) not in (404, 425) or time.monotonic() > deadline:
                raise
        await asyncio.sleep(SERVED_INTERVAL)


def find_row(rows: list[dict[str, Any]], snapshot: str) -> dict[str, Any]:
    """The control plane's row of a snapshot, by its path or name. Raises ValueError."""
    name = snapshot.rpartition("/")[2]
    for row in rows:
        if str(row["name"]).endswith(f"/{name}"):
            return row
    raise ValueError("its session doesn't list it")


async def _result(future: Any) -> Any:
    return await future


def open_service(url: str, key: str) -> "FiretitanServiceClient":
    """The SDK's client of a session, with QUOTA_PATIENCE and mutations sent at most once."""
    from fireworks.training.sdk import FiretitanServiceClient
    from fireworks.training.sdk.client import FIRETITAN_TINKER_CLIENT_CONFIG

    from everburn.trainers.send_once import send_once_client

    settings = FIRETITAN_TINKER_CLIENT_CONFIG | {
        "billing_exception_max_pause_duration_sec": QUOTA_PATIENCE
    }
    return FiretitanServiceClient(
        base_url=url, api_key=key, http_client=send_once_client(), _client_config=settings
    )


def close_quietly(service: "FiretitanServiceClient") -> None:
    try:
        service.close()
    except Exception as error:
        log.info("closing the SDK's client: %s", describe(error))
