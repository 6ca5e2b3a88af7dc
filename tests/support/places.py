"""A run on a dedicated trainer without a workflow: its folder, its job, its sessions."""

from pathlib import Path
from typing import Any

from everburn.config import RunConfig, parse_config
from everburn.emulator.models.base_model import TINY
from everburn.records.ids import LeaseKey, RunRef
from everburn.records.run_folder import Owner, create_run_folder
from everburn.records.store import ArtifactStore
from everburn.trainers.dedicated import DedicatedTrainer
from everburn.trainers.jobs import RunProvisioning
from support.emulator import RunningEmulator, wait_for


class Place:
    """A run's folder with its configuration."""

    def __init__(self, emulator: RunningEmulator, folder: Path, **fields: Any) -> None:
        values = {
            "rollout": "task:make",
            "dataset": "rows.jsonl",
            "base_model": TINY,
            "lora_rank": 0,
            "backend": "emulator-dedicated",
            "base_url": emulator.url,
        }
        self.config: RunConfig = parse_config(values | fields)
        self.run = RunRef(store=str(folder), id="run")
        self.store = ArtifactStore.of(self.run)
        create_run_folder(self.run, self.config, Owner(first_execution_id=str(folder)))
        self.provisioning = RunProvisioning(self.run, self.config)

    def make_ready(self) -> None:
        """Provision job and deployment until both are ready, like the lease workflow."""
        wait_for(lambda: self.provisioning.advance().stage == "ready")

    async def open(self, lease_epoch: int, incarnation: int = 0) -> DedicatedTrainer:
        lease = LeaseKey(incarnation, lease_epoch)
        return await DedicatedTrainer.open_for(self.run, self.config, lease)
