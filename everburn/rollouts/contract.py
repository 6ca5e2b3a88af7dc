"""The user's contract: what a rollout function receives and returns.

Owns the types that user code sees, including the protocols of the sampler and of the sandbox
registry. Doesn't own the rules for a returned rollout (validation.py), or how rollouts are called,
sampled or stored.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from pydantic import JsonValue

RolloutFn = Callable[..., Awaitable["RolloutRun | None"]]
"""`async rollout_fn(sample_prompt: dict, [context...]) -> RolloutRun | None`.

None drops the completion."""

CONTEXT_PARAMETERS = (
    "cursor_index",
    "row_index",
    "epoch",
    "rollout_idx",
    "sample_index",
    "end_of_epoch",
    "evaluation",
)
"""Values that a rollout function receives if it declares a parameter of that name."""


class RecoverableRolloutError(Exception):
    """Raise it when a completion failed through no fault of the task: it is retried, then dropped.

    sample_afresh: whether the samples are at fault. If not, a retry gets the finished sampling
    calls back.
    """

    sample_afresh = False


class InvalidRolloutError(ValueError):
    """A rollout function broke the contract. Fatal: the same code would break it again."""


class PromptTooLongError(ValueError):
    """A prompt leaves no room for a completion. Fatal; names the row and both lengths."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One sampled continuation.

    tokens: output ids, including a final stop token. logprobs: one per token, under the sampled
    distribution (temperature and filters applied). raw_logprobs: under the model itself, if the
    server reports them. finish_reason: "stop" or "length". version: of the policy. routing: per
    token, the experts that predicted it, if the run replays them (router_replay).
    """

    tokens: list[int]
    logprobs: list[float]
    raw_logprobs: list[float] | None
    text: str
    finish_reason: str
    version: int
    routing: list[str] | None = None


@dataclass(slots=True)
class RolloutSample:
    """One segment: a trainer-ready token span of a completion.

    tokens: token ids, prompt and output, at least two.
    logprobs: one per token, under the sampled distribution (temperature and filters applied); 0.0
        where `loss_mask` is 0.
    loss_mask: 1 for the tokens that are trained (those the policy sampled), else 0.
    reward: of the whole completion; the same in all its segments.

    Optional:

    raw_logprobs: one per token, under the model itself (see `Sample.raw_logprobs`); 0.0 where
        `loss_mask` is 0. For train/inference_k1 and _k3.
    routing: one per token, the expert routing (base64) that predicted it (see `Sample.routing`);
        "" where there is none. For router replay.
    turns: the first position of each turn, ascending, at trained tokens. By default each unbroken
        run of trained tokens is a turn. For advantages per turn.
    """

    tokens: Sequence[int]
    logprobs: Sequence[float]
    loss_mask: Sequence[int]
    reward: float
    raw_logprobs: Sequence[float] | None = None
    routing: Sequence[str] | None = None
    turns: Sequence[int] | None = None

    @classmethod
    def of_turn(
        cls,
        prompt_tokens: Sequence[int],
        output_tokens: Sequence[int],
        output_logprobs: Sequence[float],
        reward: float,
        *,
        raw_logprobs: Sequence[float] | None = None,
        routing: Sequence[str] | None = None,
    ) -> "RolloutSample":
        """The segment of one prompt and one sampled output, all of which is trained. raw_logprobs
        and routing belong to the output."""
        prompt, output = list(prompt_tokens), list(output_tokens)
        return cls(
            tokens=prompt + output,
            logprobs=[0.0] * len(prompt) + list(output_logprobs),
            loss_mask=[0] * len(prompt) + [1] * len(output),
            reward=reward,
            raw_logprobs=None if raw_logprobs is None else [0.0] * len(prompt) + [*raw_logprobs],
            routing=None if routing is None else [""] * len(prompt) + [*routing],
        )

    @classmethod
    def of_sample(
        cls, prompt_tokens: Sequence[int], sample: Sample, reward: float
    ) -> "RolloutSample":
        """The segment of one prompt and the answer of `sampler.sample` to it."""
        return cls.of_turn(
            prompt_tokens,
            sample.tokens,
            sample.logprobs,
            reward,
            raw_logprobs=sample.raw_logprobs,
            routing=sample.routing,
        )

    def turn_starts(self) -> list[int]:
        """The first position of each turn: as given, or of each unbroken run of trained tokens."""
        if self.turns is not None:
            return [int(start) for start in self.turns]
        # The first token has no context to be predicted from: it is never trained.
        trained = [False, *(bool(flag) for flag in self.loss_mask[1:])]
        return [i for i in range(1, len(trained)) if trained[i] and not trained[i - 1]]


@dataclass(slots=True)
class RolloutRun:
    """One completion: its segments, and information for people.

    answer: the completion's text, shown in evaluation files; by default the trained tokens
        decoded.
    info: anything that explains the reward, by name; values that JSON can't hold become text.
    ground_truth_tokens: token ids of the right answer after a generation prompt, for a
        `prepare_batch` that scores it, such as IGPO.
    """

    segments: list[RolloutSample]
    answer: str | None = None
    info: dict[str, Any] = field(default_factory=dict)
    ground_truth_tokens: Sequence[int] | None = None


class Sampler(Protocol):
    """Samples for the completion in whose context it is called."""

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

        max_tokens and temperature default to the run's. In an evaluation its own temperature
        always applies. max_tokens is reduced to what max_seq_len leaves.

        Raises:
            PromptTooLongError: the prompt leaves no room.
            SnapshotGoneError: the policy version isn't served now.
        """
        ...


class RegisteredSandbox(Protocol):
    """A sandbox that a completion has registered."""

    async def reap(self) -> None:
        """Reap it now, before the completion ends.

        Raises:
            TimeoutError, and whatever the reaper raises; then it is reaped again at the end.
        """
        ...


class SandboxRegistry(Protocol):
    """Registers the sandboxes of the completion in whose context it is called."""

    async def register(self, reaper: str, **arguments: JsonValue) -> RegisteredSandbox:
        """Have `reaper(**arguments)` called when the completion has ended, however it ends.

        Register first, then create the sandbox under a name that the arguments hold, so that a
        worker that dies in between leaves nothing unknown. The reaper may be called on any rollout
        worker, more than once, and for a sandbox that was never created. It may be async, and may
        block. The arguments are stored in the run's folder: no secrets.

        Raises:
            EntrypointError: the reaper can't be imported.
            StoreError: the record can't be written; then don't create the sandbox.
        """
        ...


@dataclass(frozen=True, slots=True)
class RolloutSetup:
    """What a rollout factory receives, once per worker and run.

    tokenizer: a transformers tokenizer; tokenizer_id: its name.
    sampling_kwargs: `max_tokens` and `temperature` of the run, ready for `sampler.sample`.
    sampler: samples from the policy version of the current completion.
    model: the base model's name. extras: the run's `extras`.
    sandboxes: registers what a completion creates and must not leave behind.
    """

    tokenizer: Any
    tokenizer_id: str
    sampling_kwargs: dict[str, Any]
    sampler: Sampler
    model: str
    completions_per_prompt: int
    extras: dict[str, Any]
    sandboxes: SandboxRegistry
