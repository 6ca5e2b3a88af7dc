"""Batched sampling from any number of policy versions: one forward pass per token, a KV cache.

Requests for the same weights share a batch, which they join and leave between any two tokens. The
batches take turns. Each request has its own random generator, so a seed gives the same draws in any
batch. Probabilities may differ in their last bits between batch shapes.

Doesn't own HTTP, the thread it runs on or the lifetime of snapshots.
"""

import random
import secrets
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from everburn.emulator.errors import ContextExceeded, InvalidInput
from everburn.emulator.models.bases import Base
from everburn.emulator.sampling.decoder import Decoder, KVCache
from everburn.emulator.sampling.distribution import SamplingParams, draw_tokens
from everburn.emulator.sampling.stops import StopStrings

T = TypeVar("T")

MAX_ROWS = 256
"""Requests decoded together; others wait."""

MAX_CACHE_POSITIONS = 1 << 17
"""Rows times width of one batch's KV cache."""

MAX_PROMPT_TOKENS = 4096
"""Prompt tokens admitted in one pass, so that long prompts don't delay decoding rows."""

MAX_RESIDENT = 4
"""Batches that are kept, with merged weights and caches, when idle."""


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished request. Its tokens include the end token or the stop string."""

    tokens: list[int]
    logprobs: list[float]
    """Under the model, at temperature 1."""
    sampling_logprobs: list[float]
    """Under the sampling distribution; 0 for greedy choices."""
    finish_reason: str
    """stop or length."""
    text: str
    """Without special tokens and without the stop string."""
    prompt_logprobs: list[float]
    """With echo, of each prompt token, 0 for the first; else empty."""


def uncancellable_future() -> Future[T]:
    """A future that the compute thread can always resolve, even if its waiter was cancelled."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()
    return future


@dataclass(eq=False, slots=True)
class Ticket:
    """A sampling request.

    `cancelled` may be set from any thread; the row is dropped before its next token.
    """

    prompt: Sequence[int]
    params: SamplingParams
    cancelled: bool = False
    completion: Future[Completion] = field(default_factory=uncancellable_future)

    @property
    def longest(self) -> int:
        """Largest number of tokens."""
        return len(self.prompt) + self.params.max_tokens


def check_request(base: Base, prompt: Sequence[int], params: SamplingParams) -> None:
    """Raises ContextExceeded or InvalidInput."""
    if not prompt:
        raise InvalidInput("prompt holds no token")
    if len(prompt) + params.max_tokens > base.positions:
        raise ContextExceeded(
            f"prompt of {len(prompt)} tokens and max_tokens of {params.max_tokens} exceed the base "
            f"model's {base.positions} positions"
        )
    if min(prompt) < 0 or max(prompt) >= base.vocabulary:
        outside = next(token for token in prompt if not 0 <= token < base.vocabulary)
        raise InvalidInput(
            f"prompt holds token id {outside}, outside the vocabulary of {base.vocabulary}"
        )


class Sampler:
    """All batches. Used on the compute thread only."""

    def __init__(self) -> None:
        self._batches: OrderedDict[Hashable, Batch] = OrderedDict()

    def add(self, key: Hashable, open_batch: Callable[[], "Batch"], ticket: Ticket) -> None:
        """Queue a request for the weights that `key` names; `open_batch` loads them."""
        batch = self._batches.get(key)
        if batch is None:
            batch = self._batches[key] = open_batch()
        self._batches.move_to_end(key)
        batch.add(ticket)
        self._drop_idle()

    @property
    def busy(self) -> bool:
        return any(batch.busy for batch in self._batches.values())

    def step(self) -> list[tuple[Hashable, Exception]]:
        """Draw one token for every row of every batch.

        Returns key and error of each failed batch, for the caller to forget.
        """
        failed: list[tuple[Hashable, Exception]] = []
        for key, batch in self._batches.items():
            if batch.busy:
                try:
                    batch.step()
                except Exception as error:
                    failed.append((key, error))
        return failed

    def forget(self, key: Hashable) -> list[Ticket]:
        """Drop a batch; returns its unfinished tickets."""
        batch = self._batches.pop(key, None)
        return [] if batch is None else batch.unfinished()

    def _drop_idle(self) -> None:
        idle = [key for key, batch in self._batches.items() if not batch.busy]
        for key in idle[: max(0, len(self._batches) - MAX_RESIDENT)]:
            del self._batches[key]


@dataclass(slots=True)
class _Row:
    ticket: Ticket
    rng: random.Random
    stops: StopStrings | None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    sampling_logprobs: list[float] = field(default_factory=list)
    prompt_logprobs: list[float] = field(default_factory=list)

    @property
    def position(self) -> int:
        """Of the newest token."""
        return len(self.ticket.prompt) + len(self.tokens) - 1


class Batch:
    """Requests that sample from one set of weights."""

    def __init__(self, base: Base, decoder: Decoder) -> None:
        self._base = base
        self._decoder = decoder
        self._waiting: deque[Ticket] = deque()
        self._rows: list[_Row] = []
        self._cache = KVCache(base.config)

    @property
    def busy(self) -> bool:
        return bool(self._rows or self._waiting)

    def add(self, ticket: Ticket) -> None:
        self._waiting.append(ticket)

    def unfinished(self) -> list[Ticket]:
        return [row.ticket for row in self._rows] + list(self._waiting)

    @torch.inference_mode()
    def step(self) -> None:
        """Admit waiting tickets and draw one token for every row."""
        self._drop_cancelled()
        admitted = self._admit()
        if not (self._rows or admitted):
            return
        hidden, prompts = self._decoder.forward(
            self._cache,
            [(row.tokens[-1], row.position) for row in self._rows],
            [row.ticket.prompt for row in admitted],
        )
        for row, states in zip(admitted, prompts, strict=True):
            if row.ticket.params.echo:
                row.prompt_logprobs = self._score(states, row.ticket.prompt)
        self._rows += admitted
        self._draw(self._decoder.logits(hidden))

    def _drop_cancelled(self) -> None:
        for index in reversed(range(len(self._rows))):
            if self._rows[index].ticket.cancelled:
                self._remove(index)
        if self._waiting:
            self._waiting = deque(ticket for ticket in self._waiting if not ticket.cancelled)

    def _admit(self) -> list[_Row]:
        admitted: list[_Row] = []
        width = max((row.ticket.longest for row in self._rows), default=0)
        tokens = 0
        while self._waiting and len(self._rows) + len(admitted) < MAX_ROWS:
            ticket = self._waiting[0]
            rows = len(self._rows) + len(admitted) + 1
            width = max(width, ticket.longest)
            tokens += len(ticket.prompt)
            if (admitted and tokens > MAX_PROMPT_TOKENS) or (
                rows > 1 and rows * width > MAX_CACHE_POSITIONS
            ):
                break
            admitted.append(self._row(self._waiting.popleft()))
        # The decoder processes neighboring prompts of equal length together.
        return sorted(admitted, key=lambda row: len(row.ticket.prompt))

    def _row(self, ticket: Ticket) -> _Row:
        params = ticket.params
        seed = secrets.randbits(64) if params.seed is None else params.seed
        stops = StopStrings(self._base.stop_tokens, params.stop) if params.stop else None
        return _Row(ticket, random.Random(seed), stops)

    def _score(self, states: Tensor, prompt: Sequence[int]) -> list[float]:
        logprobs = self._decoder.logits(states[:-1]).float().log_softmax(-1)
        following = torch.tensor(prompt[1:], dtype=torch.long).unsqueeze(-1)
        return [0.0, *logprobs.gather(-1, following).squeeze(-1).tolist()]

    def _draw(self, logits: Tensor) -> None:
        """Draw a token for every row; complete and remove rows that end."""
        drawn = draw_tokens(
            logits,
            [row.ticket.params for row in self._rows],
            torch.tensor([row.rng.random() for row in self._rows], dtype=torch.float64),
        )
        finished: list[tuple[int, Completion]] = []
        for index, (row, token, logprob, sampling_logprob) in enumerate(
            zip(self._rows, *(values.tolist() for values in drawn), strict=True)
        ):
            row.tokens.append(token)
            row.logprobs.append(logprob)
            row.sampling_logprobs.append(sampling_logprob)
            if completion := self._completion(row, token):
                finished.append((index, completion))
        for index, completion in reversed(finished):
            ticket = self._rows[index].ticket
            self._remove(index)
            ticket.completion.set_result(completion)

    def _completion(self, row: _Row, token: int) -> Completion | None:
        """The row's completion if `token` is its last."""
        ended = token in self._base.end_tokens
        stop = row.stops.match(row.tokens) if row.stops and not ended else None
        if not (ended or stop or len(row.tokens) == row.ticket.params.max_tokens):
            return None
        if row.stops and stop:
            text = row.stops.text_before(row.tokens, stop)
        else:
            text = self._base.tokenizer.decode(row.tokens, skip_special_tokens=True)
        return Completion(
            tokens=row.tokens,
            logprobs=row.logprobs,
            sampling_logprobs=row.sampling_logprobs,
            finish_reason="stop" if ended or stop else "length",
            text=text,
            prompt_logprobs=row.prompt_logprobs,
        )

    def _remove(self, index: int) -> None:
        """Remove a row. The last row takes its place, so that rows stay contiguous."""
        last = self._rows.pop()
        if index < len(self._rows):
            self._cache.move(len(self._rows), index)
            self._rows[index] = last
