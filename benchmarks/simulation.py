"""A simulated task and trainer with the delays of the scheduling benchmark, and its ideal schedule.

Workflows, server and workers are real. Only the rollout function and the trainer session are
simulated: they wait instead of computing, so that the rest is overhead.

    python -m benchmarks.simulation trainer ADDRESS    serves simulated trainer sessions
"""

import asyncio
import heapq
import random
import sys
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any, TypeVar

from everburn import RolloutFn, RolloutRun, RolloutSample, RolloutSetup
from everburn.config import RunConfig
from everburn.learning.datums import Datum
from everburn.records.ledger import AdamParams
from everburn.scheduling.admission import Admission
from everburn.trainers.protocol import Gradients, Snapshot

T = TypeVar("T")


@dataclass(frozen=True)
class Trace:
    """The benchmark's delays, in seconds."""

    rows: int = 96
    group: int = 8
    per_step: int = 8
    ahead: int = 1
    backward: float = 0.8
    """Per full batch; a submission takes its share by groups."""
    optimizer: float = 0.2
    publication: float = 0.3


def rollout_seconds(row: int, completion: int) -> float:
    """Duration of a completion: one second and a heavy tail."""
    return 1 + min(6.0, random.Random(row * 1000 + completion).expovariate(1 / 1.5))


def make_rollout_fn(setup: RolloutSetup) -> RolloutFn:
    async def rollout_fn(
        sample_prompt: dict[str, Any], cursor_index: int, rollout_idx: int
    ) -> RolloutRun:
        await asyncio.sleep(rollout_seconds(cursor_index, rollout_idx))
        sample = RolloutSample(
            tokens=[1, 2, 3], logprobs=[0.0, -1.0, -1.0], loss_mask=[0, 1, 1], reward=rollout_idx
        )
        return RolloutRun([sample])

    return rollout_fn


def rows(count: int) -> list[dict[str, Any]]:
    return [{"row": index} for index in range(count)]


class SimulatedTrainer:
    """The Trainer protocol with delays in place of computation; one request at a time."""

    def __init__(self, config: RunConfig, trace: Trace) -> None:
        self._per_group = trace.backward / config.prompt_groups_per_step
        self._group = config.completions_per_prompt
        self._trace = trace
        self._busy = asyncio.Lock()

    @property
    def session(self) -> str:
        return "simulated"

    def forward_backward(
        self, datums: list[Datum], loss: str, loss_config: dict[str, float | str | bool]
    ) -> Awaitable[Gradients]:
        return self._backward(datums)

    async def optim_step(self, adam: AdamParams) -> dict[str, float]:
        return await self._for(self._trace.optimizer, {"grad_norm": 1.0})

    async def publish(self, name: str) -> Snapshot:
        return await self._for(self._trace.publication, Snapshot(path=name, handle=name))

    async def forward(self, sequences: list[list[int]]) -> list[list[float]]:
        return [[-1.0] * (len(tokens) - 1) for tokens in sequences]

    async def score_twice(
        self, snapshot: Snapshot, tokens: list[int]
    ) -> tuple[list[float], list[float]]:
        (scores,) = await self.forward([tokens])
        return scores, scores

    async def promote(self, snapshot: str, model_id: str, *, again: bool) -> str:
        return model_id

    async def save_checkpoint(self, name: str) -> str:
        return f"simulated/{name}"

    async def load_checkpoint(self, path: str) -> None:
        pass

    async def load_adapter(self, path: str) -> None:
        pass

    async def probe(self) -> None:
        pass

    async def close(self) -> None:
        pass

    async def _backward(self, datums: list[Datum]) -> Gradients:
        logprobs = [datum.logprobs.tolist() for datum in datums]
        seconds = self._per_group * len(datums) / self._group
        return await self._for(seconds, Gradients({"loss:sum": 0.0}, logprobs))

    async def _for(self, seconds: float, result: T) -> T:
        async with self._busy:
            await asyncio.sleep(seconds)
        return result


def ideal_seconds(trace: Trace, concurrency: int | None) -> float:
    """The wall time of the same schedule without overhead, by event simulation."""
    admission = Admission(
        group=trace.group,
        batch=trace.group * trace.per_step,
        max_head_offpolicy_versions=trace.ahead,
        concurrency=concurrency,
    )
    events: list[tuple[float, int, str, int]] = []
    unfinished: dict[int, int] = {}
    ready = next_row = trained = 0
    in_batch = 0
    trainer_free = now = 0.0

    def push(at: float, kind: str, row: int = 0) -> None:
        heapq.heappush(events, (at, len(events) + trained, kind, row))

    def refill() -> None:
        nonlocal next_row
        while next_row < trace.rows and admission.can_admit():
            admission.admit()
            unfinished[next_row] = trace.group
            for completion in range(trace.group):
                push(now + rollout_seconds(next_row, completion), "completion", next_row)
            next_row += 1

    def submit() -> None:
        nonlocal ready, in_batch, trainer_free
        taken = min(ready, trace.per_step - in_batch)
        if not taken:
            return
        ready -= taken
        in_batch += taken
        start = max(now, trainer_free)
        trainer_free = start + trace.backward * taken / trace.per_step
        last = next_row >= trace.rows and not unfinished and not ready
        if in_batch == trace.per_step or last:
            trainer_free += trace.optimizer + trace.publication
            push(trainer_free, "published")

    refill()
    while events:
        now, _, kind, row = heapq.heappop(events)
        if kind == "completion":
            admission.release(1)
            unfinished[row] -= 1
            if not unfinished[row]:
                del unfinished[row]
                admission.accept()
                ready += 1
                submit()
        else:
            trained += in_batch
            in_batch = 0
            admission.publish()
            submit()
        refill()
    assert trained == trace.rows, f"the simulation trained {trained} of {trace.rows} rows"
    return now


async def serve_trainer(address: str, trace: Trace) -> None:
    """Run a trainer worker with simulated sessions."""
    from activities.messages import LeaseRef
    from activities.trainer import TrainerActivities
    from workers.connection import connect
    from workers.processes import trainer_worker, until_stopped

    async def open_trainer(ref: LeaseRef, config: RunConfig) -> SimulatedTrainer:
        return SimulatedTrainer(config, trace)

    client = await connect(address, "default")
    activities = TrainerActivities(client, open_trainer)
    async with trainer_worker(client, activities):
        await until_stopped()
    await activities.close()


if __name__ == "__main__":
    asyncio.run(serve_trainer(sys.argv[2], Trace()))
