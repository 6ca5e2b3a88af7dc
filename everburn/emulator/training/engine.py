"""One trainable model: a base model with a LoRA adapter or full parameters, gradients and Adam.

Invariants:

- A failed operation changes neither weights, accumulated gradients nor optimizer: the gradient of a
  request has its own buffer and is added only if all of it is finite.
- The same state and request give the same bits (see datums.py), on the same machine with the same
  number of torch threads.
- Several calls accumulate the same gradient as one. `optim_step` consumes it.

Doesn't own the order of operations, files or JSON.
"""

import math
import warnings
from collections.abc import Generator
from dataclasses import dataclass

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from everburn.emulator.errors import InvalidInput, NonFinite, UnsupportedOperation
from everburn.emulator.models.bases import Base, SamplerWeights, Tensors
from everburn.emulator.training.datums import FloatArray, MicroBatch, Submission
from everburn.emulator.training.losses import Diagnostics
from everburn.emulator.training.parameters import FlatParameters
from everburn.emulator.training.spec import AdamSettings, ModelSpec, Normalization

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
UNEMBEDDING = ("lm_head",)


@dataclass(frozen=True, slots=True)
class ForwardOutput:
    """Log-probabilities of the targets of each datum, and metrics."""

    logprobs: list[FloatArray]
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True)
class TrainingState:
    """The state from which training continues exactly."""

    weights: Tensors
    first_moment: Tensors
    second_moment: Tensors
    step: int
    """Optimizer steps taken."""


class Engine:
    """A model in training. Not thread-safe: one operation at a time.

    `forward` and `forward_backward` yield between micro-batches, so that the caller can do other
    work on the same thread.
    """

    def __init__(self, base: Base, spec: ModelSpec) -> None:
        """Raises InvalidInput if the spec can't be built on the base model."""
        self.base = base
        self.spec = spec.resolved()
        self._module = _build(base, self.spec)
        self._trainable = FlatParameters(self._module)
        self._optimizer = torch.optim.AdamW([self._trainable.parameter])
        self._accumulated = torch.zeros_like(self._trainable.values)
        self.clear_gradients()
        self._reset_moments()

    @property
    def optimizer_steps(self) -> int:
        return int(self._moments["step"])

    def forward(self, submission: Submission) -> Generator[None, None, ForwardOutput]:
        progress = _Progress(submission)
        for batch in submission.micro_batches():
            # Not around the loop: no_grad would leak into work that runs while this is suspended.
            with torch.no_grad():
                progress.add(batch, self._logprobs(batch))
            yield
        return progress.outcome()

    def forward_backward(self, submission: Submission) -> Generator[None, None, ForwardOutput]:
        """Accumulate the gradient of the summed loss.

        Raises NonFinite, and accumulates nothing, if a log-probability, the loss or a gradient
        isn't finite.
        """
        self._require_trainable()
        progress = _Progress(submission)
        self._trainable.gradient.zero_()
        for batch in submission.micro_batches():
            progress.add(batch, self._logprobs(batch)).backward()  # type: ignore[no-untyped-call]
            yield
        if not bool(torch.isfinite(self._trainable.gradient).all()):
            raise NonFinite("the gradient of this request is not finite; nothing was accumulated")
        self._accumulated += self._trainable.gradient
        self._submissions += 1
        self._loss_tokens += progress.loss_tokens
        self._sequences += progress.sequences
        return progress.outcome()

    def optim_step(
        self, adam: AdamSettings, normalization: Normalization, *, empty: bool = False
    ) -> dict[str, float]:
        """Apply and clear the accumulated gradients; returns metrics.

        The gradient is divided first, then clipped. num_loss_tokens divides by the number of
        trained positions (weight not zero) of all requests since the last step, num_sequences by
        the number of datums that hold at least one.

        empty: if nothing is accumulated, step on a zero gradient, that is, on Adam's momentum only.

        Raises InvalidInput if nothing is accumulated, NonFinite if the gradient isn't finite.
        """
        self._require_trainable()
        if not self._submissions and not empty:
            raise InvalidInput("optim_step without a forward_backward since the last step")
        gradient = self._accumulated / self._divisor(normalization)
        norm = float(torch.linalg.vector_norm(gradient, dtype=torch.float64))
        if not math.isfinite(norm):
            raise NonFinite(
                "the accumulated gradient is not finite; weights and Adam are unchanged"
            )
        clipped = norm
        if 0 < adam.grad_clip_norm < norm:
            clipped = adam.grad_clip_norm
            gradient *= clipped / norm
        self._apply(gradient, adam)
        metrics = {
            "grad_norm": norm,
            "grad_norm_post_clip": clipped,
            "learning_rate": adam.learning_rate,
            "step": float(self.optimizer_steps),
            "num_loss_tokens": float(self._loss_tokens),
            "num_sequences": float(self._sequences),
        }
        self.clear_gradients()
        return metrics

    def gradient(self) -> Tensors:
        """A copy of the accumulated gradient by parameter, not normalized."""
        return self._trainable.named(self._accumulated)

    def clear_gradients(self) -> None:
        self._accumulated.zero_()
        self._submissions = 0
        self._loss_tokens = 0
        self._sequences = 0

    def state(self) -> TrainingState:
        """A copy of weights and optimizer. Raises NonFinite if the weights aren't finite."""
        return TrainingState(
            weights=self._finite_weights(),
            first_moment=self._trainable.named(self._moments["exp_avg"]),
            second_moment=self._trainable.named(self._moments["exp_avg_sq"]),
            step=self.optimizer_steps,
        )

    def load(self, state: TrainingState, *, optimizer: bool, keep_gradients: bool = False) -> None:
        """Replace the weights, and replace or reset Adam's state; clears accumulated gradients."""
        self._require_trainable()
        self._trainable.assign(self._trainable.values, state.weights)
        self._reset_moments()
        if optimizer:
            self._trainable.assign(self._moments["exp_avg"], state.first_moment)
            self._trainable.assign(self._moments["exp_avg_sq"], state.second_moment)
            self._moments["step"].fill_(state.step)
        if not keep_gradients:
            self.clear_gradients()

    def weights(self) -> Tensors:
        """A copy of the trainable weights by name; PEFT's names for an adapter."""
        return self._trainable.named(self._trainable.values)

    def sampler_weights(self) -> SamplerWeights:
        """A copy of the weights for sampling. Raises NonFinite."""
        if self.spec.frozen:
            raise UnsupportedOperation("a frozen base model has no weights of its own to publish")
        return SamplerWeights(self._finite_weights(), self.spec.scaling)

    def _logprobs(self, batch: MicroBatch) -> Tensor:
        logits: Tensor = self._module(input_ids=batch.tokens, use_cache=False).logits.float()
        chosen = logits.gather(-1, batch.targets.unsqueeze(-1)).squeeze(-1)
        return chosen - logits.logsumexp(-1)

    def _apply(self, gradient: Tensor, adam: AdamSettings) -> None:
        self._optimizer.param_groups[0].update(
            lr=adam.learning_rate,
            betas=(adam.beta1, adam.beta2),
            eps=adam.eps,
            weight_decay=adam.weight_decay,
        )
        self._trainable.parameter.grad = gradient
        self._optimizer.step()
        self._trainable.parameter.grad = None

    def _divisor(self, normalization: Normalization) -> int:
        if normalization == "none" or not self._submissions:
            return 1
        counted = self._loss_tokens if normalization == "num_loss_tokens" else self._sequences
        if not counted:
            raise InvalidInput(f"can't normalize the gradient: {normalization} is 0")
        return counted

    def _finite_weights(self) -> Tensors:
        if not bool(torch.isfinite(self._trainable.values).all()):
            raise NonFinite("the model's weights are not finite; they are not saved")
        return self.weights()

    def _require_trainable(self) -> None:
        if self.spec.frozen:
            raise UnsupportedOperation(
                "this is a frozen base model: it only computes forward passes"
            )

    @property
    def _moments(self) -> dict[str, Tensor]:
        moments: dict[str, Tensor] = self._optimizer.state[self._trainable.parameter]
        return moments

    def _reset_moments(self) -> None:
        self._moments.update(
            step=torch.zeros(()),
            exp_avg=torch.zeros_like(self._trainable.values),
            exp_avg_sq=torch.zeros_like(self._trainable.values),
        )


class _Progress:
    """The accumulated output of a request."""

    def __init__(self, submission: Submission) -> None:
        self._submission = submission
        self._logprobs: list[FloatArray] = []
        self._diagnostics = Diagnostics()
        self._loss_sum = 0.0
        self.loss_tokens = 0
        self.sequences = 0

    def add(self, batch: MicroBatch, logprobs: Tensor) -> Tensor:
        """Record a micro-batch; returns its summed loss."""
        loss = self._submission.loss
        per_position = loss(logprobs, batch.recorded, batch.weights)
        total = per_position.sum()
        values, summed = logprobs.detach(), total.detach()
        if not (bool(summed.isfinite()) and bool(values.isfinite().all())):
            raise NonFinite(
                f"{loss.name} is not finite on this request; nothing was accumulated. Check "
                "advantages, recorded logprobs and the learning rate"
            )
        trained = batch.weights != 0
        self._loss_sum += float(per_position.detach().double().sum())
        self.loss_tokens += int(trained.sum())
        self.sequences += int(trained.any(-1).sum())
        if loss.reports_diagnostics:
            self._diagnostics.add(loss, values, batch.recorded, batch.weights)
        rows = values.numpy()
        self._logprobs += [np.array(rows[i, :n]) for i, n in enumerate(batch.lengths)]
        return total

    def outcome(self) -> ForwardOutput:
        metrics = {
            "loss:sum": self._loss_sum,
            "total_tokens:sum": float(self._submission.tokens),
            "num_loss_tokens:sum": float(self.loss_tokens),
        }
        return ForwardOutput(self._logprobs, metrics | self._diagnostics.metrics())


def _build(base: Base, spec: ModelSpec) -> nn.Module:
    model: nn.Module
    if spec.frozen:
        model = base.shared_copy()
    elif not spec.rank:
        model = base.copy().requires_grad_(True)
    else:
        model = _adapted(base, spec)
    return model.eval()


def _adapted(base: Base, spec: ModelSpec) -> nn.Module:
    assert spec.seed is not None
    targets = ATTENTION * spec.train_attn + MLP * spec.train_mlp + UNEMBEDDING * spec.train_unembed
    if not targets:
        raise InvalidInput("a LoRA model must train at least one of attn, mlp and unembed")
    lora = LoraConfig(
        r=spec.rank, lora_alpha=spec.alpha, target_modules=list(targets), lora_dropout=0.0
    )
    with warnings.catch_warnings():
        # PEFT warns that merging an adapter of a tied output layer changes the embedding, too.
        # `Base.merged` unties them.
        warnings.simplefilter("ignore")
        model: nn.Module = get_peft_model(base.shared_copy(), lora)
    # PEFT's initialization again, with a generator that nothing else draws from.
    generator = torch.Generator().manual_seed(spec.seed)
    for name, parameter in model.named_parameters():
        if ".lora_A." in name:
            nn.init.kaiming_uniform_(parameter, a=math.sqrt(5), generator=generator)
    return model
