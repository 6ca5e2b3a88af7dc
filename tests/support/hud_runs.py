"""Rollouts of HUD tasks with the real sampler and the emulator's tiny base model."""

import json
from pathlib import Path
from typing import Any

from everburn.config import RunConfig, parse_config
from everburn.emulator.models.base_model import TINY
from everburn.records.ids import RunRef
from everburn.records.publications import Publication, publish
from everburn.records.run_folder import Owner, create_run_folder
from everburn.records.store import ArtifactStore
from everburn.rollouts.runner import RolloutRunner
from everburn.rollouts.task import prepare_task
from everburn.trainers.serverless import ServerlessTrainer
from support.emulator import RunningEmulator

COUNTING = Path(__file__).parents[1] / "hud" / "counting"
ENV = str(COUNTING / "env.py")


class Runs:
    """Runs with a published version 0 on the emulator."""

    def __init__(self, emulator: RunningEmulator, folder: Path) -> None:
        self._emulator = emulator
        self._folder = folder
        self._trainers: list[ServerlessTrainer] = []

    async def runner(
        self, tasks: list[dict[str, Any]], run_id: str = "run-1", **kwargs: Any
    ) -> RolloutRunner:
        """The rollout runner of a run over these tasks; `kwargs` go to make_rollout_fn."""
        (self._folder / f"{run_id}.jsonl").write_text("\n".join(map(json.dumps, tasks)))
        config = self.config(str(self._folder / f"{run_id}.jsonl"), **kwargs)
        run = RunRef(store=str(self._folder / "runs"), id=run_id)
        create_run_folder(run, config, Owner(first_execution_id="test"))
        prepare_task(run)
        trainer = await ServerlessTrainer.open(config)
        self._trainers.append(trainer)
        snapshot = await trainer.publish("policy-0")
        record = Publication(
            version=0, incarnation=0, lease_epoch=1, snapshot=snapshot.path, handle=snapshot.handle
        )
        publish(ArtifactStore.of(run), record)
        return RolloutRunner(run)

    def config(self, dataset: str, **kwargs: Any) -> RunConfig:
        rollout = {"name": "everburn.hud.rollouts:make_rollout_fn", "kwargs": kwargs}
        return parse_config(
            {
                "rollout": rollout,
                "dataset": dataset,
                "shuffle": False,
                "base_model": TINY,
                "lora_rank": 4,
                "backend": "emulator",
                "base_url": self._emulator.base_url,
                "max_completion_tokens": 6,
            }
        )

    async def close(self) -> None:
        for trainer in self._trainers:
            await trainer.close()


def a_task(template: str, **args: Any) -> dict[str, Any]:
    """A row of a .jsonl file of HUD tasks."""
    return {"env": "counting", "id": template, "args": args}
