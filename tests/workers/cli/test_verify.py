"""The checkpoints that `everburn verify` reads from an emulator's folder."""

from pathlib import Path

import pytest

from everburn.records.verification import VerificationError
from support.emulator import RunningEmulator
from support.sessions import a_config
from workers.cli.verify import checkpoint_digest


async def test_a_missing_or_damaged_checkpoint_is_named(emulator: RunningEmulator) -> None:
    from everburn.trainers.serverless import ServerlessTrainer

    session = await ServerlessTrainer.open(a_config(emulator.base_url))
    path = await session.save_checkpoint("state-0")
    await session.close()
    assert "/" in checkpoint_digest(emulator.home, path)

    error = f"^checkpoint {path} can't be read: "
    (emulator.checkpoint(path) / "meta.json").write_text("{")
    with pytest.raises(VerificationError, match=error):
        checkpoint_digest(emulator.home, path)
    (emulator.checkpoint(path) / "meta.json").unlink()
    with pytest.raises(VerificationError, match=error):
        checkpoint_digest(emulator.home, path)


def test_a_path_that_is_not_a_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(VerificationError, match=r"^checkpoint state-1 can't be read: .*reference"):
        checkpoint_digest(tmp_path, "state-1")
