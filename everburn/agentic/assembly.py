"""Assembles the sampling calls of a completion into segments.

Owns which call continues which, by token ids alone: nothing is tokenized again, and sampled tokens
keep their logprobs. Doesn't own sampling (everburn/rollouts/sampling.py) or prompts (formats.py).
"""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Literal, TypeVar

from everburn.rollouts.contract import RecoverableRolloutError, RolloutSample

if TYPE_CHECKING:
    from everburn.rollouts.contract import Sample

T = TypeVar("T")

OnBranch = Literal["split", "reject"]


class TraceIntegrityError(RecoverableRolloutError):
    """Under "reject", a prompt doesn't continue the tokens so far. The completion is retried with
    new samples, then dropped."""

    sample_afresh = True


@dataclass(frozen=True, slots=True)
class Call:
    """One sampling call: exact prompt ids (at least one) and sampled ids (stop token included).

    logprobs: one per sampled token; raw_logprobs and routing too, if the sampler reports them.
    truncated: ended by the token limit.
    """

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    truncated: bool = False
    raw_logprobs: list[float] | None = None
    routing: list[str] | None = None

    def __post_init__(self) -> None:
        if not self.prompt:
            raise ValueError("a call's prompt is empty; its first token needs a context")
        if len(self.tokens) != len(self.logprobs):
            raise ValueError(
                f"a call has {len(self.tokens)} tokens and {len(self.logprobs)} logprobs; each "
                "token needs its sampling logprob"
            )
        for name in ("raw_logprobs", "routing"):
            values = getattr(self, name)
            if values is not None and len(values) != len(self.tokens):
                raise ValueError(f"a call has {len(self.tokens)} tokens and {len(values)} {name}")

    @classmethod
    def of(cls, prompt: Sequence[int], sample: "Sample") -> "Call":
        return cls(
            list(prompt),
            sample.tokens,
            sample.logprobs,
            sample.finish_reason == "length",
            sample.raw_logprobs,
            sample.routing,
        )


@dataclass(frozen=True, slots=True)
class Turn:
    """A call (by index) whose sampled tokens are `tokens[start:stop]` of their segment, with
    `tokens[:start]` as context."""

    call: int
    start: int
    stop: int


@dataclass(slots=True)
class Boundaries:
    """Counts of how calls relate; each call is in exactly one of the first five.

    starts: the first call. appends: the prompt continues a segment. branches: it continues a call
    that another segment already continued, or repeats an earlier prompt. splits: it continues no
    call exactly (rewritten history, text tokenized again, another conversation). empty: nothing was
    sampled; omitted. truncated: ended by the token limit. repeated_tokens: sampled tokens that a
    branch repeats as context; only the first path trains them.
    """

    starts: int = 0
    appends: int = 0
    branches: int = 0
    splits: int = 0
    empty: int = 0
    truncated: int = 0
    repeated_tokens: int = 0

    def as_info(self) -> dict[str, int]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Assembled:
    """The segments of a completion. turns: per segment; each non-empty call appears once."""

    segments: list[RolloutSample]
    turns: list[list[Turn]]
    boundaries: Boundaries


def assemble(calls: Iterable[Call], reward: float, on_branch: OnBranch = "split") -> Assembled:
    """Assemble calls, given in the order in which they were made.

    A call whose prompt begins with all tokens of a segment continues it; the rest of the prompt
    (tool results, generation prompt) is context. Any other call begins a segment with its whole
    prompt as context ("split") or raises ("reject"). So each sampled token is trained exactly once.

    Raises:
        TraceIntegrityError: under "reject"; names the call and where its prompt departs.
        ValueError: `on_branch` is unknown.
    """
    if on_branch not in ("split", "reject"):
        raise ValueError(f"on_branch is {on_branch!r}; it must be 'split' or 'reject'")
    trace = _Trace()
    for index, call in enumerate(calls):
        trace.add(index, call, on_branch)
    return Assembled(
        segments=[path.segment(reward) for path in trace.paths],
        turns=[path.turns for path in trace.paths],
        boundaries=trace.boundaries,
    )


@dataclass(slots=True)
class _Path:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    raw_logprobs: list[float] | None = field(default_factory=list)
    routing: list[str] | None = field(default_factory=list)
    """raw_logprobs, routing: None once a call lacks them."""
    turns: list[Turn] = field(default_factory=list)

    def extend(self, index: int, call: Call) -> None:
        """Append a call that continues this path."""
        context = call.prompt[len(self.tokens) :]
        start = len(call.prompt)
        self.tokens += context + call.tokens
        self.logprobs += [0.0] * len(context) + call.logprobs
        self.mask += [0] * len(context) + [1] * len(call.tokens)
        self.raw_logprobs = _extended(self.raw_logprobs, [0.0] * len(context), call.raw_logprobs)
        self.routing = _extended(self.routing, [""] * len(context), call.routing)
        self.turns.append(Turn(index, start, start + len(call.tokens)))

    def segment(self, reward: float) -> RolloutSample:
        return RolloutSample(
            self.tokens,
            self.logprobs,
            self.mask,
            reward,
            raw_logprobs=self.raw_logprobs,
            routing=self.routing,
            turns=[turn.start for turn in self.turns],
        )


@dataclass(frozen=True, slots=True)
class _End:
    """The end of a call: its path, with length and sampled tokens up to there."""

    path: _Path
    length: int
    sampled: int

    @property
    def is_open(self) -> bool:
        return len(self.path.tokens) == self.length


class _Trace:
    """The paths of a completion, and the ends of calls by token bytes."""

    def __init__(self) -> None:
        self.paths: list[_Path] = []
        self.boundaries = Boundaries()
        self._ends: dict[bytes, _End] = {}
        self._prompts: set[bytes] = set()
        self._last: list[int] = []

    def add(self, index: int, call: Call, on_branch: OnBranch) -> None:
        counts = self.boundaries
        counts.truncated += call.truncated
        if not call.tokens:
            counts.empty += 1
            return
        prompt = _packed(call.prompt)
        parent = self._parent(prompt)
        sampled_before = 0 if parent is None else parent.sampled
        if parent is not None and parent.is_open:
            counts.appends += 1
            path = parent.path
        else:
            if not self.paths:
                counts.starts += 1
            elif on_branch == "reject":
                raise TraceIntegrityError(_mismatch(index, call.prompt, self._last))
            elif parent is not None or prompt in self._prompts:
                counts.branches += 1
            else:
                counts.splits += 1
            counts.repeated_tokens += sampled_before
            path = _Path()
            self.paths.append(path)
        path.extend(index, call)
        end = _End(path, len(path.tokens), sampled_before + len(call.tokens))
        # Of two equal ends (the same sample twice) the later one is open.
        self._ends[_packed(path.tokens)] = end
        self._prompts.add(prompt)
        self._last = path.tokens

    def _parent(self, prompt: bytes) -> _End | None:
        prefixes = [end for end in self._ends if prompt.startswith(end)]
        return self._ends[max(prefixes, key=len)] if prefixes else None


def _mismatch(index: int, prompt: list[int], tokens: list[int]) -> str:
    pairs = enumerate(zip(tokens, prompt, strict=False))
    shared = next((i for i, (old, new) in pairs if old != new), min(len(tokens), len(prompt)))
    return (
        f"the prompt of call {index} ({len(prompt)} tokens) doesn't continue the {len(tokens)} "
        f"tokens so far: they agree up to token {shared}, then "
        f"{prompt[shared : shared + 3]} follows instead of {tokens[shared : shared + 3]}"
    )


def _extended(old: list[T] | None, context: list[T], new: list[T] | None) -> list[T] | None:
    return None if old is None or new is None else old + context + new


def _packed(tokens: list[int]) -> bytes:
    """Token ids as bytes of fixed width: a prefix of a list is a prefix of its bytes."""
    return array("q", tokens).tobytes()
