"""From a completion's sampling calls to its segments.

Owns exact ancestry: which call continues which, by token ids alone. Nothing is tokenised here, and
text isn't looked at: what is trained is what was sampled, with the logprobs it was sampled with.
Doesn't own sampling (everburn/rollouts/sampling.py) or how prompts come about (renderers,
environments).
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
    """A prompt doesn't continue the tokens that were kept, and the task asked for one unbroken
    trace. The completion is retried with other samples, then dropped."""

    sample_afresh = True


@dataclass(frozen=True, slots=True)
class Call:
    """One sampling call, as inference saw it.

    prompt: exact prompt ids, at least one. tokens: sampled ids, a stop token included.
    logprobs: one per sampled token. truncated: whether the token limit ended it. raw_logprobs,
    routing: one per sampled token too, where the sampler tells them.

    Raises:
        ValueError: an empty prompt, or another number of any of these than of tokens.
    """

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    truncated: bool = False
    raw_logprobs: list[float] | None = None
    routing: list[str] | None = None

    def __post_init__(self) -> None:
        if not self.prompt:
            raise ValueError("a call's prompt is empty: its first token would follow from nothing")
        if len(self.tokens) != len(self.logprobs):
            raise ValueError(
                f"a call has {len(self.tokens)} tokens and {len(self.logprobs)} logprobs; each "
                "token needs the logprob it was sampled with"
            )
        for name in ("raw_logprobs", "routing"):
            values = getattr(self, name)
            if values is not None and len(values) != len(self.tokens):
                raise ValueError(f"a call has {len(self.tokens)} tokens and {len(values)} {name}")

    @classmethod
    def of(cls, prompt: Sequence[int], sample: "Sample") -> "Call":
        """The call that a prompt and the sampler's answer to it make."""
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
    """Where a call's sampled tokens lie: at `start..stop-1` of their segment.

    call: its index among the calls. `tokens[:start]` is what the policy saw before this turn.
    """

    call: int
    start: int
    stop: int


@dataclass(slots=True)
class Boundaries:
    """What happened between calls; every call is counted in exactly one of the first five.

    starts: the first call. appends: prompts that continue the end of a segment. branches: prompts
    that continue an earlier call whose continuation is already in another segment, or repeat an
    earlier prompt. splits: prompts that continue nothing exactly (a history that was rewritten or
    shortened, text tokenised again, another conversation). empty: calls that sampled nothing;
    they are left out.
    truncated: calls that the token limit ended. repeated_tokens: sampled tokens that a branch
    repeats as context; they are trained on the first path only.
    """

    starts: int = 0
    appends: int = 0
    branches: int = 0
    splits: int = 0
    empty: int = 0
    truncated: int = 0
    repeated_tokens: int = 0

    def as_info(self) -> dict[str, int]:
        """For `RolloutRun.info`."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Assembled:
    """The segments of a completion.

    turns: of each segment, in order; together they name every call but the empty ones once.
    """

    segments: list[RolloutSample]
    turns: list[list[Turn]]
    boundaries: Boundaries


def assemble(calls: Iterable[Call], reward: float, on_branch: OnBranch = "split") -> Assembled:
    """Put calls together, in the order in which they were made.

    A call whose prompt begins with everything that a segment holds continues that segment, and
    what it adds (tool results, the next generation prompt) is context. Any other call begins a
    segment with its whole prompt as context. So every sampled token is trained exactly once,
    wherever its path goes on.

    on_branch: what to do with a call that continues no segment. "split" begins another; "reject"
    takes one unbroken trace or none.

    Raises:
        TraceIntegrityError: under "reject", naming the call and where its prompt departs.
        ValueError: `on_branch` is neither.
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
    """A segment as it grows."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    raw_logprobs: list[float] | None = field(default_factory=list)
    routing: list[str] | None = field(default_factory=list)
    """Both None once a call doesn't tell."""
    turns: list[Turn] = field(default_factory=list)

    def extend(self, index: int, call: Call) -> None:
        """Take a call whose prompt begins with all tokens of this path."""
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
    """Where a call ended: its path, the path's length then, and the sampled tokens up to there."""

    path: _Path
    length: int
    sampled: int

    @property
    def is_open(self) -> bool:
        return len(self.path.tokens) == self.length


class _Trace:
    """The paths of a completion, and by their bytes the ends at which they can be continued."""

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
        before = 0 if parent is None else parent.sampled
        if parent is not None and parent.is_open:
            counts.appends += 1
            path = parent.path
        else:
            if not self.paths:
                counts.starts += 1
            elif on_branch == "reject":
                raise TraceIntegrityError(self._departure(index, call))
            elif parent is not None or prompt in self._prompts:
                counts.branches += 1
            else:
                counts.splits += 1
            counts.repeated_tokens += before
            path = _Path()
            self.paths.append(path)
        path.extend(index, call)
        end = _End(path, len(path.tokens), before + len(call.tokens))
        # Two calls may end alike (the same sample twice); the later one is the open one.
        self._ends[_packed(path.tokens)] = end
        self._prompts.add(prompt)
        self._last = path.tokens

    def _parent(self, prompt: bytes) -> _End | None:
        """The longest end that the prompt begins with."""
        matching = [kept for kept in self._ends if prompt.startswith(kept)]
        return self._ends[max(matching, key=len)] if matching else None

    def _departure(self, index: int, call: Call) -> str:
        kept, asked = self._last, call.prompt
        shared = next(
            (i for i, pair in enumerate(zip(kept, asked, strict=False)) if pair[0] != pair[1]),
            min(len(kept), len(asked)),
        )
        return (
            f"the prompt of call {index} ({len(asked)} tokens) doesn't continue the {len(kept)} "
            f"tokens kept so far: they agree up to token {shared}, then "
            f"{asked[shared : shared + 3]} follows instead of {kept[shared : shared + 3]}"
        )


def _extended(kept: list[T] | None, context: list[T], new: list[T] | None) -> list[T] | None:
    return None if kept is None or new is None else kept + context + new


def _packed(tokens: list[int]) -> bytes:
    """Token ids as bytes of fixed width: prefixes of lists are prefixes of bytes."""
    return array("q", tokens).tobytes()
