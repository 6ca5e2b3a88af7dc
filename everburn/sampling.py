"""The sampler that rollout functions use.

Owns which policy version a call samples from (that of the completion it belongs to, resolved
through the publication record at each call), the run's sampling defaults, and what is noted about
each call. Doesn't own transport, retries within a call and decoding: that is the SDK's sampler.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from everburn.backends import api_key
from everburn.call_log import CallLog, LoggedCall, question_digest
from everburn.config import RunConfig
from everburn.failures import SnapshotGoneError, status_of
from everburn.publications import Publication, serving
from everburn.rollouts import PromptTooLongError
from everburn.store import ArtifactStore

if TYPE_CHECKING:
    from fireworks.training.sdk import DeploymentSampler

RECOVERY_PATIENCE = 30.0
"""Seconds that a call waits for its version to be served again; then its completion is put off."""
RESOLVE_INTERVAL = 0.5
MAX_OPEN_SAMPLERS = 8
"""Policy versions whose connections a worker keeps open; more are rarely in use at once."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One sampled continuation.

    tokens: output ids, a final stop token included. logprobs: of the policy as it was sampled
    (temperature and filters applied), one per token. raw_logprobs: of the model itself, where the
    server reports them. finish_reason: "stop" or "length". version: the policy that sampled.
    routing: per token, the experts that predicted it, where the run replays them (router_replay).
    """

    tokens: list[int]
    logprobs: list[float]
    raw_logprobs: list[float] | None
    text: str
    finish_reason: str
    version: int
    routing: list[str] | None = None


@dataclass
class CompletionScope:
    """The completion that sampling calls belong to, and what they did.

    where: names it in messages. version: policy version to sample from. temperature: overrides
    the caller's (evaluation); None leaves it. log: of calls, where they are recorded. id: as
    refs.completion_id gives it.
    """

    where: str
    version: int
    temperature: float | None = None
    log: CallLog | None = None
    id: str = ""
    calls: list[Sample] = field(default_factory=list)

    @property
    def at_token_limit(self) -> bool:
        return any(call.finish_reason == "length" for call in self.calls)

    @property
    def output_tokens(self) -> int:
        return sum(len(call.tokens) for call in self.calls)


current_scope: ContextVar[CompletionScope] = ContextVar("everburn_completion_scope")


class SamplingRefusedError(ValueError):
    """The server won't sample what was asked (a prompt longer than the model allows, a token
    outside its vocabulary). Fatal: it would be refused again."""


class Sampler:
    """Samples for the completion in whose context it is called."""

    def __init__(self, store: ArtifactStore, config: RunConfig, tokenizer: Any) -> None:
        self._store = store
        self._config = config
        self._tokenizer = tokenizer
        self._open: OrderedDict[str, DeploymentSampler] = OrderedDict()
        limit = config.sampler_max_concurrency
        self._slots = None if limit is None else asyncio.Semaphore(limit)

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
        """Sample one continuation of exact prompt tokens.

        max_tokens and temperature default to the run's; an evaluation's temperature is the
        evaluation's whatever is passed. max_tokens is cut to what max_seq_len leaves.

        Raises:
            PromptTooLongError: the prompt leaves no room.
            SnapshotGoneError: the policy version isn't served at the moment.
        """
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
        sample = await self._logged(scope, prompt, settings)
        scope.calls.append(sample)
        return sample

    async def close(self) -> None:
        """Close all connections."""
        while self._open:
            _, sampler = self._open.popitem()
            sampler.close()

    async def _logged(
        self, scope: CompletionScope, prompt: list[int], settings: dict[str, Any]
    ) -> Sample:
        """The answer of an earlier attempt to the same question, or a new one, which is kept."""
        if scope.log is None:
            return await self._call(scope, prompt, settings)
        digest = question_digest(prompt, settings)
        index, known = scope.log.ask(digest)
        if known is not None:
            return Sample(**known.model_dump(exclude={"index", "digest"}))
        sample = await self._call(scope, prompt, settings)
        await scope.log.note(LoggedCall(index=index, digest=digest, **asdict(sample)))
        return sample

    async def _call(
        self, scope: CompletionScope, prompt: list[int], settings: dict[str, Any]
    ) -> Sample:
        if self._slots is None:
            return await self._request(scope, prompt, settings)
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
        """Ask whoever serves the scope's version.

        Where nobody does, the trainer is being recovered: the call waits for that, so that the
        rollout needn't begin again.
        """
        deadline = time.monotonic() + RECOVERY_PATIENCE
        gone: Publication | None = None
        while True:
            publication = serving(self._store, scope.version)
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
            (completion,) = await self._sampler(publication).sample_with_prompt_tokens(
                prompt, hotload_max_retries=0, **settings
            )
        except Exception as error:
            status = status_of(error)
            if status in (404, 410, 425):
                raise SnapshotGoneError(
                    f"{scope.where}: policy version {scope.version} isn't served: {error}"
                ) from error
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
        )

    def _sampler(self, publication: Publication) -> "DeploymentSampler":
        from fireworks.training.sdk import FiretitanSamplingClient, FixedConcurrencyController

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
            if len(self._open) > MAX_OPEN_SAMPLERS:
                self._open.popitem(last=False)
        else:
            self._open.move_to_end(publication.handle)
        return sampler


def _server_words(error: Exception) -> str:
    """What the server said, where the SDK keeps only the status."""
    response = getattr(error, "response", None)
    try:
        body = response.json()  # type: ignore[union-attr]
        return str(body["error"]["message"])
    except (AttributeError, KeyError, TypeError, ValueError):
        return str(error)
