"""A serverless Fireworks training session, through the unmodified SDK.

Owns the translation between Everburn's datums, losses and errors and the SDK's. Talks to the
emulator just as it talks to Fireworks. Doesn't own leases, retries or the order of steps.
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
from everburn.trainers.guards import Tally, check_capabilities
from everburn.trainers.promotion import promote
from everburn.trainers.protocol import (
    Gradients,
    Snapshot,
    TrainerError,
    TrainerUnavailableError,
    TrainerUnfitError,
)
from everburn.trainers.session_opening import opened
from everburn.usercode.threads import in_thread

if TYPE_CHECKING:
    from fireworks.training.sdk import FiretitanServiceClient, FiretitanTrainingClient
    from fireworks.training.sdk.fireworks_client import FireworksClient

log = logging.getLogger(__name__)

OPEN_TIMEOUT = 600.0
"""Seconds for a session and its model; the SDK itself would wait without saying so."""
RESULT_TIMEOUT = 3600.0
"""Seconds for the result of one request, which the SDK polls for ever."""
PUBLISH_TIMEOUT = 900.0
"""Seconds for a snapshot to be saved and known to samplers."""
UNLOAD_TIMEOUT = 10.0
"""Seconds for a model to be unloaded when its session is given back. The SDK first waits for the
operations that are in flight."""
CLOSE_TIMEOUT = 30.0
"""Seconds for a session to be given back; the SDK asks a service that is gone for minutes."""
SERVED_TIMEOUT = 120.0
"""Seconds for a sampler to answer for a snapshot."""
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
        self._custom_turn = asyncio.Lock()
        self._tally = Tally()

    @classmethod
    async def open(cls, config: RunConfig) -> "ServerlessTrainer":
        """A new session with a new model: the base model and, with LoRA, a fresh adapter.

        Raises:
            TrainerUnavailableError: nothing answers, or there is no capacity.
            KeyRefusedError, QuotaExceededError: the account may not train.
            TrainerRejectedError: the model is unknown, or can't be trained like this.
            TrainerUnfitError: the session can't do what the configuration asks for.
        """
        try:
            return await opened(asyncio.to_thread(cls._open, config), OPEN_TIMEOUT)
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
            # Whatever the SDK raises here, nothing has been trained yet.
            if service is not None:
                _close_quietly(service)
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
        """The session's id, for people who look for it at the service."""
        return str(self._service.training_session_id)

    def forward_backward(
        self, datums: list[Datum], loss: str | Entrypoint, loss_config: LossConfig
    ) -> Awaitable[Gradients]:
        if isinstance(loss, Entrypoint):
            # The SDK makes weights of its gradients: what the trainer counts of them isn't known.
            self._tally.lose_count()
            # A task, since its place in the queue of custom losses is taken by this call.
            return asyncio.ensure_future(self._custom(datums, loss))
        wire_loss, wire_config = wire_loss_of(loss, loss_config)
        data = [self._to_sdk(datum) for datum in datums]
        with self._translated("forward_backward"):
            future = self._client.forward_backward(data, wire_loss, wire_config or None)
        self._tally.add(datums)
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
        self._tally.settle(metrics)
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
        (own,), served = await asyncio.gather(
            self.forward([tokens]), self.served_logprobs(snapshot, tokens)
        )
        return own, served

    async def served_logprobs(self, snapshot: Snapshot, tokens: list[int]) -> list[float]:
        """The sampler's half of `score_twice`."""
        with self._translated(f"sampling from {snapshot.path}"):
            # Longer than the wait within: that one knows what the server says.
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
            raise ValueError("the sampler's answer holds no log-probabilities of the prompt")
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
                lambda name: self._ask_promotion(control, name, model_id),
                again=again,
            )

    def _promotable(self, control: "FireworksClient", snapshot: str) -> str:
        """The control plane's name of a snapshot."""
        rows = control.list_training_session_checkpoints(
            f"accounts/{control.account_id}/trainingSessions/{self.session}"
        )
        return str(listed(rows, snapshot)["name"])

    def _ask_promotion(
        self, control: "FireworksClient", name: str, model_id: str
    ) -> dict[str, Any]:
        """The control plane's record of the new model."""
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
        # On a thread of its own, which goes on: a process that is told to end does so meanwhile.
        try:
            await asyncio.wait_for(in_thread(self._close), CLOSE_TIMEOUT)
        except TimeoutError:
            log.warning(
                "session %s isn't given back yet: the service doesn't answer. Without heartbeats "
                "it ends by itself",
                self.session,
            )

    def _close(self) -> None:
        session = self.session
        try:
            self._client.unload_model().result(timeout=UNLOAD_TIMEOUT)
        except Exception as error:
            # It goes with its session, and may be gone already.
            log.info("unloading the model of session %s: %s", session, describe(error))
        try:
            self._delete_session()
        except Exception as error:
            log.warning("session %s isn't given back: %s", session, describe(error))
        _close_quietly(self._service)

    def _delete_session(self) -> None:
        import httpx

        try:
            self._service.delete_training_session()
        except (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError):
            # A connection broke, which the SDK takes for an answer.
            self._service.delete_training_session()

    async def _custom(self, datums: list[Datum], entrypoint: Entrypoint) -> Gradients:
        """Two requests, between which the loss is computed here; those of one call go before those
        of the next, so that gradients are added up in the order of the calls.

        They are those of the SDK's `forward_backward_custom`, which would call the user's function
        on the one event loop that all sessions of the process share.
        """
        loss = CustomLoss(entrypoint, datums)
        data = [_to_linear(datum, routing=self._config.router_replay) for datum in datums]
        async with self._custom_turn:
            with self._translated("forward"):
                future = self._client.forward(data, "cross_entropy")
                scored = _logprobs(await asyncio.wait_for(_result(future), RESULT_TIMEOUT))
            weights = await loss.weights(scored)
            data = [_weighted(each, own) for each, own in zip(data, weights, strict=True)]
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
        """The SDK's errors as Everburn's: see errors.py."""
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
    """The SDK's datum of ours, for the policy losses.

    routing: send the expert routing that sampling used, where the datum has it.
    """
    return _sdk_datum(
        datum.inputs.tolist(),
        datum.routing if routing else None,
        target_tokens=datum.targets,
        logprobs=datum.logprobs,
        advantages=datum.advantages,
    )


def _to_linear(datum: Datum, *, routing: bool = False) -> Any:
    """The SDK's datum of ours for the linear loss that a loss of one's own becomes; as long as
    its weights are zero it only scores."""
    return _sdk_datum(
        datum.inputs.tolist(),
        datum.routing if routing else None,
        target_tokens=datum.targets,
        weights=np.zeros_like(datum.mask),
    )


def _weighted(datum: Any, weights: npt.NDArray[np.float32]) -> Any:
    """Such a datum with the gradient in it: cross_entropy is the sum of -weights * logprobs."""
    from fireworks.training.sdk import Datum as SdkDatum
    from fireworks.training.sdk import TensorData

    inputs = datum.loss_fn_inputs | {"weights": TensorData.from_numpy(weights)}
    return SdkDatum(model_input=datum.model_input, loss_fn_inputs=inputs)


def _to_score(tokens: list[int]) -> Any:
    """The SDK's datum whose forward pass tells the logprob of each token after the first."""
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
    return [list(map(float, one["logprobs"].data)) for one in output.loss_fn_outputs]


async def _echoed(sampler: Any, tokens: list[int]) -> Any:
    """One sampled token, and the echo of all others, which is what counts.

    A snapshot that isn't loaded yet is waited for: then the server's own error is raised.
    """
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


def listed(rows: list[dict[str, Any]], snapshot: str) -> dict[str, Any]:
    """The control plane's row of a snapshot, by its path or name."""
    last = snapshot.rpartition("/")[2]
    found = [row for row in rows if str(row["name"]).endswith(f"/{last}")]
    if not found:
        raise ValueError("its session doesn't list it")
    return found[0]


async def _result(future: Any) -> Any:
    return await future


def open_service(url: str, key: str) -> "FiretitanServiceClient":
    """A session's client: the SDK's, with an end to the hour that it waits for a quota, and no
    second sending of what may have been applied."""
    from fireworks.training.sdk import FiretitanServiceClient
    from fireworks.training.sdk.client import FIRETITAN_TINKER_CLIENT_CONFIG

    from everburn.trainers.send_once import watched_client

    settings = FIRETITAN_TINKER_CLIENT_CONFIG | {
        "billing_exception_max_pause_duration_sec": QUOTA_PATIENCE
    }
    return FiretitanServiceClient(
        base_url=url, api_key=key, http_client=watched_client(), _client_config=settings
    )


def _close_quietly(service: "FiretitanServiceClient") -> None:
    try:
        service.close()
    except Exception as error:
        log.info("closing the training session: %s", describe(error))
