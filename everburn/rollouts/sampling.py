"""The sampler that rollout functions use.

Owns the policy version of a call (its completion's, resolved through the publication record at each
call), the run's sampling defaults, and the record of each call. Doesn't own transport, retries
within a call and decoding: the SDK's sampler does.
"""

import asyncio
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from everburn.config import RunConfig
from everburn.records.ids import LeaseKey
from everburn.records.publications import Publication, serving
from everburn.records.store import ArtifactStore
from everburn.rollouts.call_log import CallLog, LoggedCall, request_digest
from everburn.rollouts.contract import PromptTooLongError, Sample
from everburn.rollouts.failures import SnapshotGoneError
from everburn.trainers.backends import api_key
from everburn.trainers.errors import status_of, translated
from everburn.usercode.threads import to_thread

if TYPE_CHECKING:
    from fireworks.training.sdk import DeploymentSampler

RECOVERY_PATIENCE = 30.0
"""Seconds that a call waits for its version to be served again; then its completion is retried
later."""
RESOLVE_INTERVAL = 0.5


@dataclass(eq=False)
class CompletionScope:
    """One attempt at a completion as its sampling calls and sandboxes know it.

    where: its name in messages. version: policy version to sample from. temperature: replaces the
    caller's (evaluation) unless None. log: of calls, if they are recorded. run: the run's id.
    name: the completion's name in the store, the same in every attempt. retry: earlier attempts.
    """

    where: str
    version: int
    temperature: float | None = None
    log: CallLog | None = None
    run: str = ""
    name: str = ""
    retry: int = 0
    token: str = field(default_factory=lambda: uuid.uuid4().hex[:8])
    """Unique to this attempt."""
    calls: list[Sample] = field(default_factory=list)
    handles: set[str] = field(default_factory=set)
    """The handles of the samplers that it has used."""
    sandboxes: set[str] = field(default_factory=set)
    """Keys of its registered sandboxes that it hasn't reaped itself."""

    @property
    def attempt(self) -> str:
        """The name of this attempt."""
        return f"{self.name}.{self.retry}-{self.token}"

    @property
    def reused_calls(self) -> int:
        return 0 if self.log is None else self.log.reused

    def delete_log(self) -> None:
        if self.log is not None:
            self.log.delete()

    @property
    def at_token_limit(self) -> bool:
        return any(call.finish_reason == "length" for call in self.calls)

    @property
    def output_tokens(self) -> int:
        return sum(len(call.tokens) for call in self.calls)


current_scope: ContextVar[CompletionScope] = ContextVar("everburn_completion_scope")


class SamplingRefusedError(ValueError):
    """The server refused a request: the prompt is too long for the model, a token isn't in its
    vocabulary, or the account isn't allowed. Fatal: it would be refused again."""


class PolicySampler:
    """The contract's `Sampler`: samples from the policy version of the current completion."""

    def __init__(self, store: ArtifactStore, config: RunConfig, tokenizer: Any) -> None:
        self._store = store
        self._config = config
        self._tokenizer = tokenizer
        self._open: dict[str, DeploymentSampler] = {}
        """One sampler per snapshot handle, while a completion uses it."""
        self._newest: Publication | None = None
        self._scopes: list[CompletionScope] = []
        limit = config.sampler_max_concurrency
        self._slots: AbstractAsyncContextManager[None] = (
            nullcontext() if limit is None else asyncio.Semaphore(limit)
        )

    async def sample(
        self,
        prompt_tokens: Sequence[int],
        *,
        max_tokens: int | None = None,
        temperature: float | None = None,
        top_p: float = 1.0,
        top_k: int = 0,
        stop: Sequence[str] | Sequence[int] | None = None,
        seed: int | None = None,
    ) -> Sample:
        scope = current_scope.get()
        prompt = [int(token) for token in prompt_tokens]
        wanted = max_tokens or self._config.max_completion_tokens
        settings = {
            "max_tokens": self._room(scope, len(prompt), wanted),
            "temperature": self._temperature(scope, temperature),
            "top_p": top_p,
            "top_k": top_k,
            "stop": list(stop) if stop else None,
            "logprobs": True,
        } | ({} if seed is None else {"seed": seed})
        if self._config.router_replay:
            settings["include_routing_matrix"] = True
        sample = await self._logged(scope, prompt, settings)
        scope.calls.append(sample)
        return sample

    @contextmanager
    def serving(self, scope: CompletionScope) -> Iterator[None]:
        """Calls within the block belong to the completion. At its end, samplers that no other
        completion uses are closed, except the newest policy's, which the next rows will use."""
        current_scope.set(scope)
        self._scopes.append(scope)
        try:
            yield
        finally:
            self._scopes.remove(scope)
            self._release()

    def close(self) -> None:
        """Close all connections."""
        while self._open:
            _, sampler = self._open.popitem()
            sampler.close()

    def _release(self) -> None:
        used = {handle for scope in self._scopes for handle in scope.handles}
        if self._newest is not None:
            used.add(self._newest.handle)
        for handle in self._open.keys() - used:
            self._open.pop(handle).close()

    async def _logged(
        self, scope: CompletionScope, prompt: list[int], settings: dict[str, Any]
    ) -> Sample:
        """The recorded answer of an earlier attempt to the same request, or a new one, which is
        recorded."""
        if scope.log is None:
            return await self._call(scope, prompt, settings)
        digest = request_digest(prompt, settings)
        index, known = scope.log.take(digest)
        if known is not None:
            return known.sample
        sample = await self._call(scope, prompt, settings)
        await scope.log.append(LoggedCall(index=index, digest=digest, sample=sample))
        return sample

    async def _call(
        self, scope: CompletionScope, prompt: list[int], settings: dict[str, Any]
    ) -> Sample:
        async with self._slots:
            return await self._request(scope, prompt, settings)

    def _room(self, scope: CompletionScope, prompt: int, wanted: int) -> int:
        limit = self._config.max_seq_len
        if limit is None:
            return wanted
        if prompt >= limit:
            raise PromptTooLongError(
                f"{scope.where}: the prompt has {prompt} tokens and max_seq_len is {limit}: no "
                "room for a completion. Shorten or leave out the row, or raise max_seq_len"
            )
        return min(wanted, limit - prompt)

    def _temperature(self, scope: CompletionScope, asked: float | None) -> float:
        if scope.temperature is not None:
            return scope.temperature
        return self._config.temperature if asked is None else asked

    async def _request(
        self, scope: CompletionScope, prompt: list[int], settings: dict[str, Any]
    ) -> Sample:
        """Sample from the sampler that serves the scope's version.

        If none does, the trainer is recovering: the call waits, so that the rollout needn't start
        again.
        """
        deadline = time.monotonic() + RECOVERY_PATIENCE
        gone: Publication | None = None
        while True:
            publication = await to_thread(serving, self._store, scope.version)
            if publication is not None and publication != gone:
                try:
                    return await self._ask(publication, scope, prompt, settings)
                except SnapshotGoneError:
                    gone = publication
                    if time.monotonic() > deadline:
                        raise
            elif time.monotonic() > deadline:
                raise SnapshotGoneError(
                    f"{scope.where}: policy version {scope.version} isn't served"
                )
            await asyncio.sleep(RESOLVE_INTERVAL)

    async def _ask(
        self,
        publication: Publication,
        scope: CompletionScope,
        prompt: list[int],
        settings: dict[str, Any],
    ) -> Sample:
        try:
            (completion,) = await self._sampler(publication, scope).sample_with_prompt_tokens(
                prompt, hotload_max_retries=0, **settings
            )
        except Exception as error:
            status = status_of(error)
            if status in (404, 410, 425):
                raise SnapshotGoneError(
                    f"{scope.where}: policy version {scope.version} isn't served: {error}"
                ) from error
            if status in (401, 402, 403):
                closed = translated(error, scope.where, self._config.api_key_env)
                raise SamplingRefusedError(str(closed)) from error
            if status in (400, 413, 422):
                raise SamplingRefusedError(
                    f"{scope.where}: the sampler refused the request: {_server_words(error)}"
                ) from error
            raise
        return Sample(
            tokens=list(completion.full_tokens[completion.prompt_len :]),
            logprobs=list(completion.sampling_logprobs),
            raw_logprobs=completion.inference_logprobs,
            text=completion.text,
            finish_reason="length" if completion.finish_reason == "length" else "stop",
            version=publication.version,
            routing=_routing(completion.routing_matrices),
        )

    def _sampler(self, publication: Publication, scope: CompletionScope) -> "DeploymentSampler":
        from fireworks.training.sdk import FiretitanSamplingClient, FixedConcurrencyController

        scope.handles.add(publication.handle)
        newest = self._newest
        if newest is None or _age(publication) > _age(newest):
            self._newest = publication
        sampler = self._open.get(publication.handle)
        if sampler is None:
            client = FiretitanSamplingClient.from_sampler_handle(
                publication.handle, api_key=api_key(self._config), tokenizer=self._tokenizer
            )
            sampler = client.deployment_sampler
            if self._config.local:
                # The SDK's adaptive window protects a shared service; the emulator batches.
                sampler.concurrency_controller = FixedConcurrencyController(256)
            self._open[publication.handle] = sampler
        return sampler


def _age(publication: Publication) -> tuple[LeaseKey, int]:
    return publication.lease_key, publication.version


def _routing(matrices: Any) -> list[str] | None:
    """The answer's expert routing, if it has any.

    Raises:
        SamplingRefusedError: the answer only refers to it, and it may expire before training.
    """
    if matrices is None or isinstance(matrices, list):
        return matrices
    raise SamplingRefusedError(
        "the sampler answered with references to routing instead of the routing itself, which "
        "router_replay needs: set router_replay to false"
    )


def _server_words(error: Exception) -> str:
    """The server's error text; the SDK's has only the status."""
    response = getattr(error, "response", None)
    try:
        body = response.json()  # type: ignore[union-attr]
        return str(body["error"]["message"])
    except (AttributeError, KeyError, TypeError, ValueError):
        return str(error)
