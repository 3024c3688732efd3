"""Where numbers broke: the first tensor that is not finite, by name. Runs only when a loss or a norm has said so."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


@torch.no_grad()
def first_bad_weight(model: nn.Module) -> str | None:
    """The first weight with NaN or Inf, as a phrase; None where all are finite."""
    for name, weight in model.named_parameters():
        if not torch.isfinite(weight).all():
            return f"the weight {name} is not finite"
    return None


@torch.no_grad()
def first_bad_output(model: nn.Module, forward: Callable[[], object]) -> str:
    """The first weight, else the first module output in order of execution; `forward` runs the batch again."""
    if weight := first_bad_weight(model):
        return weight
    found: list[str] = []

    def look(name: str) -> Callable[..., None]:
        def hook(_module, _inputs, output):
            tensors = output if isinstance(output, tuple | list) else [output]
            if not found and any(isinstance(t, Tensor) and not torch.isfinite(t).all() for t in tensors):
                found.append(f"the output of {name} is not finite")

        return hook

    handles = [module.register_forward_hook(look(name)) for name, module in model.named_modules() if name]
    try:
        forward()
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else "the loss is not finite"


def first_bad_gradient(model: nn.Module) -> str:
    """The first gradient in reverse order of the parameters, which is about the order of the backward pass."""
    for name, weight in reversed(list(model.named_parameters())):
        if weight.grad is not None and not torch.isfinite(weight.grad).all():
            return f"the gradient of {name} is not finite"
    return "the norm of the gradients is not finite"
