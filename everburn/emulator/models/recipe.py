"""How a base model is made: a small Qwen3, trained on demonstrations.

Doesn't own particular recipes (the examples) or the cache (base_model.py).
"""

import hashlib
import json
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

from everburn.emulator.models.vocabulary import Vocabulary

Demonstration = Sequence[tuple[str, bool]]
"""A text in parts, each with a flag: does the model learn to produce it."""

Progress = Callable[[int, int], None]
"""Called with the number of steps done and their total."""

VERSION = 1
"""Raise it when a change of the training below changes the models."""

IDENTITY_DEMONSTRATIONS = 256
"""Number of demonstrations that are part of a recipe's identity."""


@dataclass(frozen=True)
class Shape:
    """The transformer. inner: width of the feed-forward layers. positions: longest sequence."""

    layers: int
    width: int
    inner: int
    heads: int
    kv_heads: int
    positions: int


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that determines the model, except for the machine's rounding.

    name: of the model's folder. vocabulary: token strings. demonstrations: an endless stream; None
    if steps is 0 (random weights). cuts: lengths in tokens at which a batch is split, to save
    padding. final_rate: fraction of the learning rate at the end of its cosine.
    """

    name: str
    vocabulary: tuple[str, ...]
    shape: Shape
    seed: int
    steps: int = 0
    demonstrations: Callable[[random.Random], Iterator[Demonstration]] | None = None
    batch: int = 64
    cuts: tuple[int, ...] = ()
    learning_rate: float = 2.5e-3
    warmup: int = 50
    final_rate: float = 0.05
    weight_decay: float = 0.1
    clip: float = 1.0

    @cached_property
    def identity(self) -> str:
        """Twelve hex digits that change with the fields and the first demonstrations."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "demonstrations"}
        values |= {"version": VERSION, "shape": asdict(self.shape)}
        values["first"] = list(islice(self.stream(), IDENTITY_DEMONSTRATIONS))
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]

    def stream(self) -> Iterator[Demonstration]:
        """The demonstrations, the same at every call."""
        return self.demonstrations(random.Random(self.seed)) if self.demonstrations else iter(())


def make(recipe: Recipe, folder: Path, progress: Progress) -> None:
    """Train the model; write it with its tokenizer."""
    import torch

    vocabulary = Vocabulary(recipe.vocabulary)
    model = _untrained(recipe, vocabulary)
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=recipe.learning_rate,
        betas=(0.9, 0.99),
        weight_decay=recipe.weight_decay,
    )
    stream = recipe.stream()
    for step in range(recipe.steps):
        batch = [_encoded(d, vocabulary) for d in islice(stream, recipe.batch)]
        loss = _loss(model, batch, recipe.cuts, vocabulary.pad_id)
        for group in optimizer.param_groups:
            group["lr"] = _rate(recipe, step)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
        optimizer.step()
        progress(step + 1, recipe.steps)
    model.save_pretrained(folder)
    vocabulary.write_tokenizer(folder)


def _untrained(recipe: Recipe, vocabulary: Vocabulary) -> Any:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    shape = recipe.shape
    with torch.random.fork_rng():
        torch.manual_seed(recipe.seed)
        return Qwen3ForCausalLM(
            Qwen3Config(
                vocab_size=len(vocabulary),
                hidden_size=shape.width,
                intermediate_size=shape.inner,
                num_hidden_layers=shape.layers,
                num_attention_heads=shape.heads,
                num_key_value_heads=shape.kv_heads,
                head_dim=shape.width // shape.heads,
                max_position_embeddings=shape.positions,
                rope_parameters={"rope_type": "default", "rope_theta": 1e4},
                tie_word_embeddings=False,
                pad_token_id=vocabulary.pad_id,
                eos_token_id=vocabulary.end_id,
                bos_token_id=None,
            )
        )


def _encoded(demonstration: Demonstration, vocabulary: Vocabulary) -> tuple[list[int], list[bool]]:
    """Token ids, and a flag for each: does the model learn it."""
    tokens: list[int] = []
    learned: list[bool] = []
    for text, learns in demonstration:
        ids = vocabulary.encode(text)
        tokens += ids
        learned += [learns] * len(ids)
    return tokens, learned


def _loss(
    model: Any, batch: list[tuple[list[int], list[bool]]], cuts: Sequence[int], pad: int
) -> Any:
    """Mean cross-entropy of the learned tokens."""
    import torch
    from torch.nn.functional import cross_entropy

    total, count = torch.zeros(()), 0
    for low, high in zip((0, *cuts), (*cuts, math.inf), strict=True):
        part = [(tokens, flags) for tokens, flags in batch if low < len(tokens) <= high]
        if not part:
            continue
        width = max(len(tokens) for tokens, _ in part)
        first = min(flags.index(True) for _, flags in part)
        rows = torch.tensor([tokens + [pad] * (width - len(tokens)) for tokens, _ in part])
        learned = torch.tensor([flags + [False] * (width - len(flags)) for _, flags in part])
        hidden = model.model(input_ids=rows[:, :-1], use_cache=False).last_hidden_state
        logits = model.lm_head(hidden[:, first - 1 :])
        targets = rows[:, first:].masked_fill(~learned[:, first:], pad)
        total = total + cross_entropy(
            logits.flatten(0, 1), targets.flatten(), ignore_index=pad, reduction="sum"
        )
        count += int((targets != pad).sum())
    return total / count


def _rate(recipe: Recipe, step: int) -> float:
    """Linear warm-up, then a cosine down to `final_rate`."""
    warm = min(1.0, (step + 1) / recipe.warmup)
    done = max(0.0, (step - recipe.warmup) / (recipe.steps - recipe.warmup))
    cosine = (1 + math.cos(math.pi * done)) / 2
    return recipe.learning_rate * warm * (recipe.final_rate + (1 - recipe.final_rate) * cosine)
