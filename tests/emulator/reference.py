"""An independent implementation of losses and gradients for the conformance tests: plain torch, one
sequence at a time, no emulator code except the base model's files.
"""

import torch
from torch import Tensor
from torch.func import functional_call
from transformers import Qwen3ForCausalLM

Weights = dict[str, Tensor]


def policy_logprobs(
    model: Qwen3ForCausalLM, adapter: Weights, scaling: float, tokens: list[int]
) -> Tensor:
    """log pi of tokens[1:], under W + scaling * B A for each adapted W."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, down in adapter.items():
        if ".lora_A." in name:
            up = adapter[name.replace("lora_A", "lora_B")]
            target = name.removeprefix("base_model.model.").replace("lora_A.", "")
            parameters[target] = parameters[target] + scaling * (up @ down)
    inputs = torch.tensor([tokens[:-1]])
    logits = functional_call(model, parameters, (inputs,), tie_weights=False).logits[0]
    return logits.log_softmax(-1)[range(len(tokens) - 1), tokens[1:]]


def sequence_loss(name: str, p: Tensor, q: Tensor, a: Tensor) -> Tensor:
    """Summed loss of one sequence, with the emulator's default settings.

    p: log pi, differentiable; q: recorded log-probabilities; a: advantages, or weights.
    """
    on = a != 0
    p, q, a = p[on], q[on], a[on]
    ratio = (p - q).exp()
    match name:
        case "cross_entropy" | "reinforce":
            return -(a * p).sum()
        case "importance_sampling":
            return -(ratio * a).sum()
        case "ppo":
            return -torch.min(ratio * a, ratio.clip(0.8, 1.2) * a).sum()
        case "dapo":
            return -torch.min(ratio * a, ratio.clip(0.8, 1.28) * a).sum()
        case "cispo":
            return -(ratio.detach().clip(0.8, 1.28) * a * p).sum()
        case "dro":
            return -(a * p - 0.025 * (p - q) ** 2).sum()
        case "gspo":
            # The paper's sequence form, which has the gradient of the token form.
            whole = (p - q).mean().exp()
            return -torch.min(whole * a, whole.clip(1 - 3e-4, 1 + 4e-4) * a).mean()
        case "dppo":
            further = ((a > 0) & (ratio > 1)) | ((a < 0) & (ratio < 1))
            masked = further & ((p.exp() - q.exp()).abs() > 0.15)
            return -(ratio * a)[~masked].sum()
    raise ValueError(name)


def gradient(
    model: Qwen3ForCausalLM,
    adapter: Weights,
    scaling: float,
    loss: str,
    data: list[tuple[list[int], list[float], list[float]]],
) -> Weights:
    """Gradient of the summed loss over (tokens, recorded, advantages), by adapter parameter."""
    leaves = {name: weights.clone().requires_grad_() for name, weights in adapter.items()}
    total = torch.zeros(())
    for tokens, recorded, advantages in data:
        p = policy_logprobs(model, leaves, scaling, tokens)
        total = total + sequence_loss(loss, p, torch.tensor(recorded), torch.tensor(advantages))
    total.backward()
    return {
        name: leaf.grad if leaf.grad is not None else torch.zeros_like(leaf)
        for name, leaf in leaves.items()
    }
