"""Frozen base models in memory, loaded once and shared by every adapter and every snapshot.

Owns how trained weights are merged with a base model. Doesn't own where base models come from
(base_model.py) or training.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging

from everburn.emulator.errors import InvalidInput
from everburn.emulator.models import base_model
from everburn.emulator.sampling.stops import StopTokens

Tensors = Mapping[str, Tensor]
"""Parameters by name, as in a safetensors file."""


@dataclass(frozen=True)
class SamplerWeights:
    """Weights of one policy version: LoRA matrices (PEFT's names, `scaling` = alpha / rank), or
    full parameters (`scaling` is None)."""

    tensors: Tensors
    scaling: float | None


@dataclass(frozen=True)
class Base:
    """A base model in memory: float32, evaluation mode, no gradients."""

    name: str
    folder: Path
    model: Qwen3ForCausalLM
    tokenizer: Any

    @classmethod
    def load(cls, name: str) -> "Base":
        """Raises InvalidInput for an unknown name. The first load may train for minutes."""
        try:
            folder = base_model.ensure(name)
        except base_model.UnknownBaseModel as error:
            raise InvalidInput(str(error)) from error
        logging.disable_progress_bar()  # the file is too small for one
        model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
        _require_plain(name, model.config)
        model.eval().requires_grad_(False)
        return cls(name, folder, model, AutoTokenizer.from_pretrained(folder))

    @property
    def config(self) -> Qwen3Config:
        return self.model.config

    @cached_property
    def vocabulary(self) -> int:
        return int(self.config.vocab_size)

    @cached_property
    def positions(self) -> int:
        """Longest sequence, in tokens."""
        return int(self.config.max_position_embeddings)

    @cached_property
    def end_tokens(self) -> frozenset[int]:
        end = self.tokenizer.eos_token_id
        return frozenset() if end is None else frozenset({int(end)})

    @cached_property
    def stop_tokens(self) -> StopTokens:
        return StopTokens(self.tokenizer, self.vocabulary)

    def copy(self) -> Qwen3ForCausalLM:
        """A copy with its own weights."""
        return copy.deepcopy(self.model)

    def shared_copy(self) -> Qwen3ForCausalLM:
        """A copy of the module that shares the frozen weights."""
        shared = {id(parameter): parameter for parameter in self.model.parameters()}
        return copy.deepcopy(self.model, memo=shared)

    def merged(self, weights: SamplerWeights | None) -> Tensors:
        """All parameters by name, with `weights` merged in; None: the base model itself.

        LoRA: W + scaling * B A. Unchanged tensors are shared, not copied.
        """
        tensors = dict(self.model.named_parameters(remove_duplicate=False))
        if weights is None:
            return tensors
        if weights.scaling is None:
            return self._with_parameters(tensors, weights.tensors)
        merged: dict[str, Tensor] = {**tensors}
        for name, down in weights.tensors.items():
            layer, separator, _ = name.partition(".lora_A.")
            if separator:
                up = weights.tensors[f"{layer}.lora_B.weight"]
                target = f"{layer.removeprefix('base_model.model.')}.weight"
                merged[target] = tensors[target] + weights.scaling * (up @ down)
        return merged

    def _with_parameters(self, tensors: Tensors, trained: Tensors) -> Tensors:
        # A tied output layer is listed once, under its embedding.
        tied = {"lm_head.weight": trained["model.embed_tokens.weight"]}
        return {**tensors, **(tied if self.config.tie_word_embeddings else {}), **trained}


class Bases:
    """The loaded base models. Used on the compute thread only."""

    def __init__(self) -> None:
        self._loaded: dict[str, Base] = {}

    def get(self, name: str) -> Base:
        if name not in self._loaded:
            self._loaded[name] = Base.load(name)
        return self._loaded[name]


def _require_plain(name: str, config: Qwen3Config) -> None:
    """Refuse variants of the architecture that emulator/sampling/decoder.py doesn't implement."""
    plain = (
        set(config.layer_types) == {"full_attention"}
        and config.rope_parameters["rope_type"] == "default"
        and config.hidden_act == "silu"
        and not config.attention_bias
    )
    if not plain:
        raise InvalidInput(
            f"base model {name!r} is not a plain Qwen3: the emulator takes full attention without "
            "bias, default rotary embedding and silu"
        )
