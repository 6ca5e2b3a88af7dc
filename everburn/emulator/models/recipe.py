"""How a base model is made: a small Qwen3, trained on demonstrations.

Owns what a recipe says and the training that follows it. Doesn't own any particular recipe
(the examples), or where models are kept (base_model.py).
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
"""A text in parts: what is said, and whether the model learns to say it."""

Progress = Callable[[int, int], None]
"""Called with the steps done and their total."""

VERSION = 1
"""To be raised when the training below changes what comes out."""

IDENTIFYING = 256
"""Demonstrations that the identity of a recipe looks at."""


@dataclass(frozen=True)
class Shape:
    """Of the transformer. inner: width of its feed-forward part. positions: longest sequence."""

    layers: int
    width: int
    inner: int
    heads: int
    kv_heads: int
    positions: int


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that decides which model comes out, but for the machine's rounding.

    name: of the model's folder. vocabulary: token strings. demonstrations: an endless stream, of
    which each step takes a batch; None where steps is 0: then the weights are random. cuts: token
    counts at which a batch is cut by length, since padding is computed in vain.
    final_rate: of the learning rate, where its cosine ends.
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
        """Twelve hex digits that change with the recipe, its first demonstrations included."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "demonstrations"}
        values |= {"version": VERSION, "shape": asdict(self.shape)}
        values["first"] = list(islice(self.stream(), IDENTIFYING))
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]

    def stream(self) -> Iterator[Demonstration]:
        """The demonstrations, always the same."""
        return self.demonstrations(random.Random(self.seed)) if self.demonstrations else iter(())


def make(recipe: Recipe, folder: Path, progress: Progress) -> None:
    """Train the model and write it to a folder, with its tokenizer."""
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
    """Token ids, and which of them the model learns to say."""
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
    """Mean cross-entropy over the tokens that are learned."""
    import torch
    from torch.nn.functional import cross_entropy

    total, count = torch.zeros(()), 0
    for low, high in zip((0, *cuts), (*cuts, math.inf), strict=True):
        part = [(tokens, learned) for tokens, learned in batch if low < len(tokens) <= high]
        if not part:
            continue
        width = max(len(tokens) for tokens, _ in part)
        first = min(learned.index(True) for _, learned in part)
        rows = torch.tensor([tokens + [pad] * (width - len(tokens)) for tokens, _ in part])
        wanted = torch.tensor([flags + [False] * (width - len(flags)) for _, flags in part])
        hidden = model.model(input_ids=rows[:, :-1], use_cache=False).last_hidden_state
        logits = model.lm_head(hidden[:, first - 1 :])
        targets = rows[:, first:].masked_fill(~wanted[:, first:], pad)
        total = total + cross_entropy(
            logits.flatten(0, 1), targets.flatten(), ignore_index=pad, reduction="sum"
        )
        count += int((targets != pad).sum())
    return total / count


def _rate(recipe: Recipe, step: int) -> float:
    """Linear warm-up, then half a cosine."""
    warm = min(1.0, (step + 1) / recipe.warmup)
    done = max(0.0, (step - recipe.warmup) / (recipe.steps - recipe.warmup))
    cosine = (1 + math.cos(math.pi * done)) / 2
    return recipe.learning_rate * warm * (recipe.final_rate + (1 - recipe.final_rate) * cosine)
