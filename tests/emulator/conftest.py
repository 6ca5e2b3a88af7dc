from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fireworks.training.sdk import FiretitanServiceClient

from everburn.emulator.models.base_model import TINY
from everburn.emulator.models.bases import Base
from support.emulator import RunningEmulator

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny() -> Base:
    """The smallest base model, loaded for tests without a server."""
    return Base.load(TINY)


@pytest.fixture
def service(emulator: RunningEmulator) -> Iterator[FiretitanServiceClient]:
    """The unmodified SDK, connected to the emulator, with a new session."""
    client = emulator.connect()
    yield client
    client.delete_training_session()
    client.close()


@pytest.fixture
def trainer(service: FiretitanServiceClient) -> Any:
    """A LoRA training client."""
    return service.create_lora_training_client(base_model=TINY, rank=4, seed=7)


@pytest.fixture
def checkpoint_home(tmp_path: Path) -> Path:
    return tmp_path / "home"
