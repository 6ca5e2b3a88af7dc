"""Specification of a model and of an optimizer step: checked values, no tensors."""

import dataclasses
import secrets
from dataclasses import dataclass
from typing import Literal

from everburn.emulator.errors import InvalidInput

Normalization = Literal["none", "num_loss_tokens", "num_sequences"]


LARGEST_SETTING = 1e15
"""Bound of Adam's settings: a product of two of them stays within float32, so no step fails half
done.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A model without its weights; part of every checkpoint."""

    base_model: str
    rank: int
    """LoRA rank; 0 trains all parameters."""
    alpha: int | None = None
    """LoRA scale is alpha / rank; None for full parameters."""
    seed: int | None = None
    """Seed of the adapter's initialization; None for full parameters."""
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True
    frozen: bool = False
    """The base model itself, for reference log-probabilities: forward passes only."""

    def resolved(self) -> "ModelSpec":
        """With defaults: alpha 2 * rank, a random seed."""
        if not self.rank:
            return dataclasses.replace(self, alpha=None, seed=None)
        return dataclasses.replace(
            self,
            alpha=2 * self.rank if self.alpha is None else self.alpha,
            seed=secrets.randbits(32) if self.seed is None else self.seed,
        )

    @property
    def scaling(self) -> float | None:
        return self.alpha / self.rank if self.rank and self.alpha is not None else None

    def differences(self, other: "ModelSpec") -> list[str]:
        """The reasons why weights of `other` don't fit this model."""
        names = [field.name for field in dataclasses.fields(self) if field.name != "seed"]
        pairs = [(name, getattr(self, name), getattr(other, name)) for name in names]
        return [f"{name} is {b!r} there and {a!r} here" for name, a, b in pairs if a != b]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamSettings:
    """torch.optim.AdamW, with gradient clipping by the global norm."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0
    """Largest norm of the normalized gradient; 0: no clipping."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not 0 <= value <= LARGEST_SETTING:
                raise InvalidInput(
                    f"adam_params.{field.name} must be in [0, {LARGEST_SETTING:g}], not {value!r}"
                )
            if field.name.startswith("beta") and value >= 1:
                raise InvalidInput(f"adam_params.{field.name} must be below 1, not {value!r}")
