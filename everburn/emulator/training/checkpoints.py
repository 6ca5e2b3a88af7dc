"""Resumable training state on disk: written atomically, never overwritten.

    <home>/checkpoints/<run>/<name>/meta.json              CheckpointInfo
                                   /weights.safetensors    adapter (PEFT's names) or parameters
                                   /optimizer.safetensors  exp_avg/<name> and exp_avg_sq/<name>

Owns that layout, its references and digests.
"""

import dataclasses
import hashlib
import json
import os
import re
import shutil
import uuid
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from everburn.emulator.errors import CheckpointMismatch, CheckpointNotFound, InvalidInput, NameTaken
from everburn.emulator.training.spec import ModelSpec

if TYPE_CHECKING:
    from everburn.emulator.models.bases import Tensors
    from everburn.emulator.training.engine import TrainingState

_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_RUN = re.compile(r"run-[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class CheckpointRef:
    """`<account>/run-<32 hex>/<name>`, of a checkpoint or of a sampler snapshot."""

    account: str
    run: str
    name: str

    @classmethod
    def parse(cls, text: str, *, account: str, run: str | None = None) -> Self:
        """Parse a full reference or, if `run` is given, a bare name."""
        parts = text.split("/")
        if len(parts) == 1 and run is not None:
            parts = [account, run, *parts]
        if len(parts) != 3 or not _RUN.fullmatch(parts[1]) or not _LABEL.fullmatch(parts[2]):
            raise InvalidInput(
                f"{text!r} is not a checkpoint reference: give a name of lower-case letters, "
                "digits and hyphens, or <account>/run-<32 hex digits>/<name>"
            )
        if parts[0] != account:
            raise InvalidInput(f"{text!r} belongs to account {parts[0]!r}, not to {account!r}")
        return cls(*parts)

    def __str__(self) -> str:
        return f"{self.account}/{self.run}/{self.name}"


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """A checkpoint's meta.json."""

    spec: ModelSpec
    step: int
    """Optimizer steps taken."""
    weights_sha256: str
    optimizer_sha256: str
    created: str
    """UTC, ISO 8601."""


class CheckpointStore:
    def __init__(self, home: Path, account: str) -> None:
        self._folder = home / "checkpoints"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._account = account

    def save(self, ref: CheckpointRef, spec: ModelSpec, state: "TrainingState") -> CheckpointInfo:
        """Write a checkpoint atomically. Raises NameTaken if the name exists."""
        from safetensors.torch import save_file

        target = self._path(ref)
        if target.exists():
            raise NameTaken(f"checkpoint {ref} exists; choose a new name")
        moments = _moments(state)
        info = CheckpointInfo(
            spec=spec,
            step=state.step,
            weights_sha256=digest(state.weights),
            optimizer_sha256=digest(moments, state.step),
            created=datetime.now(UTC).isoformat(),
        )
        draft = self._folder / f".{uuid.uuid4().hex}"
        draft.mkdir()
        try:
            save_file(dict(state.weights), draft / "weights.safetensors")
            save_file(moments, draft / "optimizer.safetensors")
            (draft / "meta.json").write_text(json.dumps(dataclasses.asdict(info), indent=2))
            for file in draft.iterdir():
                _fsync(file)
            target.parent.mkdir(exist_ok=True)
            draft.rename(target)
            _fsync(target.parent)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise
        return info

    def info(self, ref: CheckpointRef) -> CheckpointInfo:
        """Raises CheckpointNotFound."""
        try:
            meta: dict[str, Any] = json.loads((self._path(ref) / "meta.json").read_text())
        except FileNotFoundError as error:
            raise CheckpointNotFound(
                f"there is no checkpoint {ref}. Sampler snapshots are not checkpoints: only what "
                "save_state returned can be loaded"
            ) from error
        return CheckpointInfo(**{**meta, "spec": ModelSpec(**meta["spec"])})

    def has(self, ref: CheckpointRef) -> bool:
        return (self._path(ref) / "meta.json").exists()

    def load(self, ref: CheckpointRef) -> "TrainingState":
        """Raises CheckpointNotFound, or CheckpointMismatch if the optimizer state is missing."""
        from safetensors.torch import load_file

        from everburn.emulator.training.engine import TrainingState

        info = self.info(ref)
        file = self._path(ref) / "optimizer.safetensors"
        if not file.is_file():
            raise CheckpointMismatch(
                f"checkpoint {ref} holds no optimizer state: training can't continue exactly from "
                "it. Load its weights alone to start with a fresh optimizer"
            )
        moments = load_file(file)
        return TrainingState(
            weights=load_file(self._path(ref) / "weights.safetensors"),
            first_moment=_without_prefix(moments, "exp_avg/"),
            second_moment=_without_prefix(moments, "exp_avg_sq/"),
            step=info.step,
        )

    def list(self) -> list[str]:
        """References of all checkpoints, oldest first."""
        files = sorted(
            self._folder.glob("run-*/*/meta.json"), key=lambda path: path.stat().st_mtime
        )
        return [
            str(CheckpointRef(self._account, path.parent.parent.name, path.parent.name))
            for path in files
        ]

    def _path(self, ref: CheckpointRef) -> Path:
        return self._folder / ref.run / ref.name


def weights_digest(home: Path, reference: str) -> str:
    """Digest of weights and optimizer of a checkpoint. Raises CheckpointNotFound."""
    ref = CheckpointRef.parse(reference, account=reference.split("/")[0])
    info = CheckpointStore(home, ref.account).info(ref)
    return f"{info.weights_sha256}/{info.optimizer_sha256}"


def digest(tensors: "Tensors", step: int | None = None) -> str:
    """sha256 over names, shapes and bytes in order of name, and over `step` if given."""
    sha = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        sha.update(f"{name}{tuple(tensor.shape)}".encode())
        sha.update(tensor.numpy().tobytes())
    if step is not None:
        sha.update(str(step).encode())
    return sha.hexdigest()


def _moments(state: "TrainingState") -> dict[str, Any]:
    first = {f"exp_avg/{name}": tensor for name, tensor in state.first_moment.items()}
    return first | {f"exp_avg_sq/{name}": tensor for name, tensor in state.second_moment.items()}


def _without_prefix(tensors: "Tensors", prefix: str) -> "Tensors":
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
