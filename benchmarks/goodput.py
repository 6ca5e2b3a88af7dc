"""Goodput: the speed of a run whose processes are killed at random.

    python -m benchmarks.goodput [--steps 40] [--seed N]

The trace of the scheduling benchmark with 3 s of training and 0.5 s of publication per step and
a checkpoint every third step. One undisturbed run, then one with kill -9 at random moments: on
average one kill per ten steps, equally of rollout worker, orchestrator, trainer worker and
emulator, each restarted after a second. Prints one JSON line: `goodput`, committed steps per second
divided by those of the undisturbed run; `recovery_s`, by process kind; the number of planned kills,
the number that found their process up, and each one's cost. The disturbed run is verified against
its ledger.

Everything is real, including the training service: gradients and snapshots end with their session,
and replays recompute them. Only time is simulated: rollouts and trainer work on the emulator's tiny
model, and wait as the trace requires.

    python -m benchmarks.goodput trainer ADDRESS    serves delayed sessions
"""

import argparse
import asyncio
import json
import math
import random
import sys
import tempfile
import time
from collections.abc import Awaitable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.recoveries import Recovery, recoveries
from benchmarks.scheduling_efficiency import admission_opens
from benchmarks.simulation import Trace, rollout_seconds
from everburn import RolloutFn, RolloutRun, RolloutSample, RolloutSetup
from everburn.config import RunConfig
from everburn.learning.datums import Datum
from everburn.records.ids import RunRef
from everburn.records.ledger import AdamParams, read_ledger
from everburn.records.store import ArtifactStore
from everburn.trainers.protocol import Gradients, Snapshot
from everburn.trainers.serverless import ServerlessTrainer
from system import tiny_task
from system.audit import audit
from system.processes import Stack, result_of, stack
from workers.stack.supervisor import everburn_command
from workflows.queues import ORCHESTRATOR_QUEUE
from workflows.run.train_run import TrainRun

TRACE = Trace(backward=2.4, optimizer=0.6, publication=0.5)
KINDS = ("rollout", "orchestrator", "trainer", "emulator")
STEPS_PER_KILL = 10
PATIENCE = 3600.0
"""Seconds for a run."""


def make_rollout_fn(setup: RolloutSetup) -> RolloutFn:
    """A rollout with the trace's duration, which samples at a random moment of it."""

    async def rollout_fn(
        sample_prompt: dict[str, Any], cursor_index: int, rollout_idx: int
    ) -> RolloutRun:
        tiny_task.note(setup, "begun", cursor_index, rollout_idx)
        seconds = rollout_seconds(cursor_index, rollout_idx)
        before = seconds * random.Random(f"{cursor_index}/{rollout_idx}").random()
        await asyncio.sleep(before)
        prompt = [4 + cursor_index % 40, 7]
        sample = await setup.sampler.sample(prompt, **setup.sampling_kwargs)
        await asyncio.sleep(seconds - before)
        segment = RolloutSample.of_sample(prompt, sample, float(rollout_idx))
        tiny_task.note(setup, "returned", cursor_index, rollout_idx)
        return RolloutRun([segment])

    return rollout_fn


class UnhurriedTrainer(ServerlessTrainer):
    """A session on the tiny model with the trace's durations, one request at a time."""

    _busy: asyncio.Lock

    @classmethod
    async def open(cls, config: RunConfig) -> "UnhurriedTrainer":
        opened = await super().open(config)
        assert isinstance(opened, cls)
        opened._busy = asyncio.Lock()
        return opened

    def forward_backward(
        self, datums: list[Datum], loss: str, loss_config: dict[str, float | str | bool]
    ) -> Awaitable[Gradients]:
        gradients = super().forward_backward(datums, loss, loss_config)
        return self._after(TRACE.backward * len(datums) / (TRACE.group * TRACE.per_step), gradients)

    async def optim_step(self, adam: AdamParams) -> dict[str, float]:
        await self._take(TRACE.optimizer)
        return await super().optim_step(adam)

    async def publish(self, name: str) -> Snapshot:
        await self._take(TRACE.publication)
        return await super().publish(name)

    async def _after(self, seconds: float, gradients: Awaitable[Gradients]) -> Gradients:
        await self._take(seconds)
        return await gradients

    async def _take(self, seconds: float) -> None:
        async with self._busy:
            await asyncio.sleep(seconds)


@dataclass(frozen=True)
class Kill:
    """at: seconds after the opening of admission."""

    kind: str
    at: float


def planned_kills(steps: int, seconds: float, seed: int) -> list[Kill]:
    """One kill per ten steps, at random moments within `seconds`, equally often of each kind."""
    draw = random.Random(seed)
    count = round(steps / STEPS_PER_KILL)
    kinds = [kind for _ in range(math.ceil(count / len(KINDS))) for kind in _shuffled(draw)]
    moments = sorted(draw.uniform(0, seconds) for _ in range(count))
    return [Kill(kind, at) for kind, at in zip(kinds, moments, strict=False)]


def _shuffled(draw: random.Random) -> list[str]:
    return draw.sample(KINDS, len(KINDS))


@dataclass(frozen=True)
class Course:
    """Measurements of a run. began: when admission opened, in seconds since 1970. seconds: from the
    first publication to the last. killed: the executed kills."""

    began: float
    seconds: float
    steps: int
    killed: list[Kill]
    recoveries: list[Recovery]


async def course(steps: int, kills: list[Kill]) -> Course:
    """Execute a run with these kills."""
    with tempfile.TemporaryDirectory(prefix="everburn-goodput-") as name:
        folder = Path(name)
        executions = folder / "executions"
        executions.touch()
        async with stack(folder, _command) as opened:
            with opened.processes.kept_up():
                run = await _start(opened, folder, steps, executions)
                handle = opened.client.get_workflow_handle_for(TrainRun.run, run.id)
                await admission_opens(handle)
                began = time.time()
                killing = asyncio.create_task(_kill(opened, began, kills))
                await result_of(handle, PATIENCE)
                killed = await killing
                await audit(run, opened, executions)
                ledger = read_ledger(ArtifactStore.of(run))
                return Course(
                    began=began,
                    seconds=sum(entry.seconds for entry in ledger),
                    steps=len(ledger),
                    killed=killed,
                    recoveries=await recoveries(
                        opened.client, run.id, opened.processes.deaths, executions
                    ),
                )


async def _start(opened: Stack, folder: Path, steps: int, executions: Path) -> RunRef:
    config = tiny_task.config(
        folder / "runs",
        steps * TRACE.per_step,
        executions,
        rollout="benchmarks.goodput:make_rollout_fn",
        completions_per_prompt=TRACE.group,
        prompt_groups_per_step=TRACE.per_step,
        max_head_offpolicy_versions=TRACE.ahead,
        dcp_save_interval=3,
        shuffle=False,
    )
    await opened.client.start_workflow(
        TrainRun.run, args=[config], id="goodput", task_queue=ORCHESTRATOR_QUEUE
    )
    return RunRef(store=config["store"], id="goodput")


async def _kill(opened: Stack, began: float, kills: list[Kill]) -> list[Kill]:
    """Execute the kills; returns those whose process was up."""
    made = []
    for kill in kills:
        await asyncio.sleep(max(0.0, began + kill.at - time.time()))
        if opened.processes.is_up(kill.kind):
            opened.processes.kill(kill.kind)
            made.append(kill)
    return made


def _command(*arguments: str) -> list[str]:
    """The `everburn` command line, except for the trainer worker."""
    match arguments:
        case ["worker", "trainer", "--address", address]:
            return [sys.executable, "-m", "benchmarks.goodput", "trainer", address]
    return everburn_command(*arguments)


async def serve_trainer(address: str) -> None:
    """Run a trainer worker with delayed sessions."""
    from activities.trainer import TrainerActivities
    from everburn.trainers import sdk
    from workers.connection import connect
    from workers.processes import trainer_worker, until_stopped

    sdk.load()
    client = await connect(address, "default")
    activities = TrainerActivities(client, lambda ref, config: UnhurriedTrainer.open(config))
    async with trainer_worker(client, activities):
        await until_stopped()
    await activities.close()


async def measure(steps: int, seed: int) -> dict[str, Any]:
    undisturbed = await course(steps, [])
    kills = planned_kills(steps, undisturbed.seconds, seed)
    disturbed = await course(steps, kills)
    goodput = undisturbed.seconds / disturbed.seconds * disturbed.steps / undisturbed.steps
    known = [(r.kind, r.seconds) for r in disturbed.recoveries if r.seconds is not None]
    return {
        "goodput": round(goodput, 3),
        "steps": steps,
        "seed": seed,
        "undisturbed_s": round(undisturbed.seconds, 1),
        "disturbed_s": round(disturbed.seconds, 1),
        "recovery_s": {
            kind: max(seconds for each, seconds in known if each == kind)
            for kind in sorted({kind for kind, _ in known})
        },
        "kills_planned": len(kills),
        "kills_made": len(disturbed.killed),
        "kills": [
            asdict(recovery) | {"at": round(recovery.at - disturbed.began, 1)}
            for recovery in disturbed.recoveries
        ],
        "verified": True,
    }


def main() -> None:
    if sys.argv[1:2] == ["trainer"]:
        asyncio.run(serve_trainer(sys.argv[2]))
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seed", type=int, default=random.randrange(10_000))
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", file=sys.stderr, flush=True)
    print(json.dumps(asyncio.run(measure(arguments.steps, arguments.seed))), flush=True)


if __name__ == "__main__":
    main()
