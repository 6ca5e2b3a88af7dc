"""A serverless Fireworks training session, through the unmodified SDK.

Owns the translation between Everburn's datums, losses and errors and the SDK's. Talks to the
emulator just as it talks to Fireworks. Doesn't own leases, retries or the order of steps.
"""

import asyncio
import logging
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from everburn.backends import UnreachableError, api_key, check_reachable, training_url
from everburn.config import Entrypoint, RunConfig
from everburn.learning.datums import Datum
from everburn.learning.losses import Settings, wire_loss_of
from everburn.ledger import AdamParams
from everburn.trainers import (
    Gradients,
    Snapshot,
    TrainerRejectedError,
    TrainerStateLostError,
    TrainerUnavailableError,
    TrainerUnfitError,
    sdk,
)
from everburn.trainers.capabilities import check_capabilities
from everburn.trainers.custom_loss import CustomLoss

if TYPE_CHECKING:
    from fireworks.training.sdk import FiretitanServiceClient, FiretitanTrainingClient

log = logging.getLogger(__name__)


class ServerlessTrainer:
    """The Trainer protocol over one SDK training client."""

    def __init__(
        self,
        service: "FiretitanServiceClient",
        client: "FiretitanTrainingClient",
        *,
        router_replay: bool = False,
    ) -> None:
        self._service = service
        self._client = client
        self._router_replay = router_replay
        self._custom_turn = asyncio.Lock()

    @classmethod
    async def open(cls, config: RunConfig) -> "ServerlessTrainer":
        """A new session with a new model: the base model and, with LoRA, a fresh adapter.

        Raises:
            TrainerUnavailableError: nothing answers, the key is refused, the model is unknown.
            TrainerUnfitError: the session can't do what the configuration asks for.
        """
        return await asyncio.to_thread(cls._open, config)

    @classmethod
    def _open(cls, config: RunConfig) -> "ServerlessTrainer":
        sdk.load()
        from fireworks.training.sdk import FiretitanServiceClient

        url = training_url(config)
        service = None
        try:
            check_reachable(url)
        except UnreachableError as error:
            raise TrainerUnavailableError(str(error)) from error
        try:
            service = FiretitanServiceClient(base_url=url, api_key=api_key(config))
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
            raise TrainerUnavailableError(
                f"no training session for {config.base_model} at {url}: {describe(error)}"
            ) from error
        trainer = cls(service, client, router_replay=config.router_replay)
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
        self, datums: list[Datum], loss: str | Entrypoint, loss_config: Settings
    ) -> Awaitable[Gradients]:
        if isinstance(loss, Entrypoint):
            # A task, since its place in the queue of custom losses is taken by this call.
            return asyncio.ensure_future(self._custom(datums, loss))
        wire_loss, wire_config = wire_loss_of(loss, loss_config)
        data = [to_sdk(datum, routing=self._router_replay) for datum in datums]
        with _translated("forward_backward"):
            future = self._client.forward_backward(data, wire_loss, wire_config or None)
        return self._gradients(future)

    async def forward(self, sequences: list[list[int]]) -> list[list[float]]:
        data = [_to_score(sequence) for sequence in sequences]
        with _translated("forward"):
            output = await self._client.forward(data, "cross_entropy")
        return _logprobs(output)

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
        with _translated("optim_step"):
            result = await self._client.optim_step(
                parameters, grad_accumulation_normalization=adam.normalization
            )
        return dict(result.metrics or {})

    async def publish(self, name: str) -> Snapshot:
        return await asyncio.to_thread(self._publish, name)

    def _publish(self, name: str) -> Snapshot:
        with _translated("save_weights_for_sampler"):
            path = self._client.save_weights_for_sampler(name).result().path
            sampler = self._service.create_sampling_client(model_path=path)
            try:
                return Snapshot(path=path, handle=sampler.get_sampler_handle())
            finally:
                sampler.close()

    async def save_checkpoint(self, name: str) -> str:
        with _translated("save_state"):
            return str((await self._client.save_state(name)).path)

    async def load_checkpoint(self, path: str) -> None:
        with _translated("load_state_with_optimizer"):
            await self._client.load_state_with_optimizer(path)

    async def probe(self) -> None:
        with _translated("get_info"):
            await self._client.get_info_async()

    async def close(self) -> None:
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        session = self.session
        try:
            self._client.unload_model().result(timeout=10)
            self._service.delete_training_session()
        except Exception as error:
            # The session may be gone already, which is what closing wants.
            log.info("ending session %s: %s", session, describe(error))
        _close_quietly(self._service)

    async def _custom(self, datums: list[Datum], entrypoint: Entrypoint) -> Gradients:
        """Two requests, between which the loss is computed here; those of one call go before those
        of the next, so that gradients are added up in the order of the calls."""
        loss = CustomLoss(entrypoint, datums)
        data = [to_sdk_targets(datum, routing=self._router_replay) for datum in datums]
        async with self._custom_turn:
            with _translated("forward_backward_custom"):
                future = await asyncio.to_thread(self._client.forward_backward_custom, data, loss)
            gradients = await self._gradients(future)
        return replace(
            gradients,
            metrics=gradients.metrics | {"loss:sum": loss.value},
            loss_metrics=loss.metrics,
        )

    async def _gradients(self, future: Any) -> Gradients:
        with _translated("forward_backward"):
            output = await future
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


def to_sdk_targets(datum: Datum, *, routing: bool = False) -> Any:
    """The SDK's datum of ours with its targets only, for a loss that is computed here."""
    matrices = datum.routing if routing else None
    return _sdk_datum(datum.inputs.tolist(), matrices, target_tokens=datum.targets)


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


def describe(error: BaseException) -> str:
    """An SDK error in one line, without request bodies or headers."""
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"


@contextmanager
def _translated(operation: str) -> Iterator[None]:
    """The SDK's errors as Everburn's: the request was refused, or the state is in doubt."""
    from fireworks.training.sdk import RequestFailedError

    try:
        yield
    except RequestFailedError as error:
        if str(getattr(error.category, "value", error.category)).lower() == "user":
            raise TrainerRejectedError(f"{operation}: {error}") from error
        raise TrainerStateLostError(f"{operation}: {describe(error)}") from error
    except (asyncio.CancelledError, TrainerStateLostError, TrainerRejectedError):
        raise
    except Exception as error:
        # Anything else leaves open whether the operation was applied: never guess.
        raise TrainerStateLostError(f"{operation}: {describe(error)}") from error


def _close_quietly(service: "FiretitanServiceClient") -> None:
    try:
        service.close()
    except Exception as error:
        log.info("closing the training session: %s", describe(error))
