"""A scripted trainer session: a test double for the training service.

It implements the Trainer protocol and computes nothing. The tests on the emulator cover real
sessions.
"""

import math
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import TypeVar

from everburn.config import Entrypoint
from everburn.learning.datums import Datum
from everburn.learning.losses import LossConfig
from everburn.records.ledger import AdamParams
from everburn.trainers.protocol import Gradients, Snapshot
from support.waiting import Gate, until

T = TypeVar("T")


@dataclass
class ScriptedTrainer:
    """All sessions of one run, one after the other.

    calls: started operations, in order, each with its subject: `forward_backward 8`, `optim_step`,
    `publish policy-0001-e1`, `save_checkpoint state-0`, `open`, `close`. finished: the successful
    ones.
    """

    calls: list[str] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)
    adam: list[AdamParams] = field(default_factory=list)
    datums: list[list[Datum]] = field(default_factory=list)
    """The datums of each forward_backward."""
    reports: list[dict[str, float]] = field(default_factory=list)
    """Metrics that each forward_backward reports in addition to its loss, while any are left."""
    served: float = -1.0
    """The samplers' log-probability of every token; the trainer's is -1."""
    _gates: dict[str, Gate] = field(default_factory=dict)
    _errors: dict[str, Exception] = field(default_factory=dict)
    _failing: list[tuple[str, int, Exception]] = field(default_factory=list)
    _poisoned: set[str] = field(default_factory=set)

    def hold(self, call: str) -> Gate:
        """Make calls with this prefix wait at the returned gate."""
        return self._gates.setdefault(call, Gate())

    def refuse(self, call: str, error: Exception) -> None:
        """Make calls with this prefix fail after their gate."""
        self._errors[call] = error

    def fail_once(self, call: str, error: Exception, *, after: int = 0) -> None:
        """Make one call with this prefix fail, after `after` successful ones."""
        self._failing.append((call, after, error))

    def poison(self, call: str) -> None:
        """Make this operation report non-finite values, until `mend`."""
        self._poisoned.add(call)

    def mend(self) -> None:
        """Undo `refuse` and `poison`."""
        self._errors.clear()
        self._poisoned.clear()

    def count(self, call: str) -> int:
        """Number of started calls with this prefix."""
        return sum(each.startswith(call) for each in self.calls)

    async def reached(self, call: str, times: int = 1) -> None:
        """Wait until `times` such calls have started."""
        await until(lambda: self.count(call) >= times, lambda: (call, self.calls))

    async def open(self) -> "ScriptedTrainer":
        await self._do("open", None)
        return self

    @property
    def session(self) -> str:
        return f"scripted-{self.count('open')}"

    def forward_backward(
        self, datums: list[Datum], loss: str | Entrypoint, loss_config: LossConfig
    ) -> Awaitable[Gradients]:
        self.datums.append(datums)
        loss = self._healthy("forward_backward", float(len(datums)))
        others = self.reports.pop(0) if self.reports else {}
        result = Gradients(
            metrics={"loss:sum": loss} | others,
            logprobs=[datum.logprobs.tolist() for datum in datums],
        )
        return self._do(f"forward_backward {len(datums)}", result)

    async def forward(self, sequences: list[list[int]]) -> list[list[float]]:
        result = [[-1.0] * (len(sequence) - 1) for sequence in sequences]
        return await self._do(f"forward {len(sequences)}", result)

    async def score_twice(
        self, snapshot: Snapshot, tokens: list[int]
    ) -> tuple[list[float], list[float]]:
        count = len(tokens) - 1
        return [-1.0] * count, [self.served] * count

    async def promote(self, snapshot: str, model_id: str, *, again: bool) -> str:
        name = f"accounts/scripted/models/{model_id}"
        return await self._do(f"promote {snapshot} {model_id}{' again' * again}", name)

    async def load_adapter(self, path: str) -> None:
        await self._do(f"load_adapter {path}", None)

    async def optim_step(self, adam: AdamParams) -> dict[str, float]:
        self.adam.append(adam)
        return await self._do("optim_step", {"grad_norm": self._healthy("optim_step", 1.0)})

    async def publish(self, name: str) -> Snapshot:
        return await self._do(f"publish {name}", Snapshot(path=name, handle=f"handle/{name}"))

    async def save_checkpoint(self, name: str) -> str:
        return await self._do(f"save_checkpoint {name}", f"scripted/{name}")

    async def load_checkpoint(self, path: str) -> None:
        await self._do(f"load_checkpoint {path}", None)

    async def probe(self) -> None:
        """Always succeeds: only failing operations end a session."""

    async def close(self) -> None:
        self.calls.append("close")

    def _healthy(self, call: str, value: float) -> float:
        return math.nan if call in self._poisoned else value

    def _do(self, call: str, result: T) -> Awaitable[T]:
        self.calls.append(call)
        return self._outcome(call, result)

    async def _outcome(self, call: str, result: T) -> T:
        for begin, gate in list(self._gates.items()):
            if call.startswith(begin):
                await gate.passed()
        for begin, error in self._errors.items():
            if call.startswith(begin):
                raise error
        for planned in self._failing:
            begin, after, error = planned
            if call.startswith(begin) and self.count(begin) > after:
                self._failing.remove(planned)
                raise error
        self.finished.append(call)
        return result
