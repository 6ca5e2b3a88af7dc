"""What a model and an optimizer step are asked to be.

Plain values with their checks; no tensors. `ModelSpec` is part of every checkpoint.
"""

import dataclasses
import secrets
from dataclasses import dataclass
from typing import Literal

from everburn.emulator.errors import InvalidInput

Normalization = Literal["none", "num_loss_tokens", "num_sequences"]


LARGEST_SETTING = 1e15
"""Bound of Adam's settings: products of two of them stay within float32, so that no step fails half
done.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """What a model is, apart from its weights; part of every checkpoint."""

    base_model: str
    rank: int
    """LoRA rank; 0 trains all parameters."""
    alpha: int | None = None
    """LoRA scale is alpha / rank; None for full parameters."""
    seed: int | None = None
    """Seed of the adapter's initialisation; None for full parameters."""
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True
    frozen: bool = False
    """The base model as it is, for reference log-probabilities: forward only."""

    def resolved(self) -> "ModelSpec":
        """The same with nothing left open: alpha defaults to 2 * rank, the seed to a random one."""
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
        """What keeps weights of `other` from being loaded into this model, in words."""
        names = [field.name for field in dataclasses.fields(self) if field.name != "seed"]
        pairs = [(name, getattr(self, name), getattr(other, name)) for name in names]
        return [f"{name} is {b!r} there and {a!r} here" for name, a, b in pairs if a != b]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamSettings:
    """Adam with decoupled weight decay, as torch.optim.AdamW, with clipping by the global norm."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0
    """Largest norm of the normalised gradient; 0 does not clip."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not 0 <= value <= LARGEST_SETTING:
                raise InvalidInput(
                    f"adam_params.{field.name} must be in [0, {LARGEST_SETTING:g}], not {value!r}"
                )
            if field.name.startswith("beta") and value >= 1:
                raise InvalidInput(f"adam_params.{field.name} must be below 1, not {value!r}")
