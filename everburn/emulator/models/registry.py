"""Promoted models on disk.

    <home>/models/<id>/model.json              PromotedModel
                      /weights.safetensors     an adapter (PEFT's names) or all parameters

Owns that layout and a model's JSON. Doesn't own promotion (emulator/http/control_plane.py).
"""

import dataclasses
import json
import re
import shutil
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from everburn.emulator.errors import AlreadyExists, InvalidInput, NotFound
from everburn.emulator.models.bases import SamplerWeights, Tensors
from everburn.emulator.training.spec import ModelSpec

_ID = re.compile(r"[a-z0-9-]{1,63}")
_NAME = re.compile(r"accounts/([^/]+)/models/([^/]+)")


@dataclass(frozen=True, slots=True)
class PromotedModel:
    name: str
    """accounts/<account>/models/<id>"""
    spec: ModelSpec
    source: str
    """The snapshot it was promoted from."""

    def as_json(self) -> dict[str, Any]:
        """The model in the control plane's responses."""
        lora = self.spec.rank > 0
        model: dict[str, Any] = {
            "name": self.name,
            "state": "READY",
            "kind": "HF_PEFT_ADDON" if lora else "HF_BASE_MODEL",
            "baseModelDetails": {"moe": False},
        }
        if lora:
            model["peftDetails"] = {"baseModel": self.spec.base_model, "r": self.spec.rank}
        return model


class ModelStore:
    def __init__(self, home: Path, account: str) -> None:
        self._folder = home / "models"
        self._account = account

    def add(
        self, name: str, spec: ModelSpec, weights: SamplerWeights, source: str
    ) -> PromotedModel:
        """Write a model atomically. Raises AlreadyExists: a model's id is used once."""
        target = self._path(name)
        if target.exists():
            raise AlreadyExists(f"model {name} exists already")
        model = PromotedModel(name, spec, source)
        draft = self._folder / f".{uuid.uuid4().hex}"
        draft.mkdir(parents=True)
        try:
            save_file(dict(weights.tensors), draft / "weights.safetensors")
            (draft / "model.json").write_text(json.dumps(dataclasses.asdict(model), indent=2))
            draft.rename(target)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise
        return model

    def get(self, name: str) -> PromotedModel:
        """Raises NotFound."""
        try:
            fields: dict[str, Any] = json.loads((self._path(name) / "model.json").read_text())
        except FileNotFoundError:
            raise NotFound(f"there is no model {name}") from None
        return PromotedModel(**{**fields, "spec": ModelSpec(**fields["spec"])})

    def weights(self, name: str) -> Tensors:
        """Raises NotFound."""
        self.get(name)
        weights: Tensors = load_file(self._path(name) / "weights.safetensors")
        return weights

    def _path(self, name: str) -> Path:
        match = _NAME.fullmatch(name)
        if match is None or not _ID.fullmatch(match[2]):
            raise InvalidInput(
                f"{name!r} is not a model: write accounts/<account>/models/<id>, with an id of at "
                "most 63 of a-z, 0-9 and '-'"
            )
        if match[1] != self._account:
            raise InvalidInput(f"{name!r} belongs to account {match[1]!r}, not {self._account!r}")
        return self._folder / match[2]
