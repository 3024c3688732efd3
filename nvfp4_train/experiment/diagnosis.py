"""Where numbers broke: the first tensor that is not finite, by name. Runs only when a loss or a norm has said so."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from nvfp4_train.sharding import is_sharded


@torch.no_grad()
def first_bad_weight(model: nn.Module) -> str | None:
    """The first weight with NaN or Inf, as a phrase; None where all are finite."""
    for name, weight in model.named_parameters():
        if not _finite(weight):
            return f"the weight {name} is not finite"
    return None


@torch.no_grad()
def bad_batch(model: nn.Module, forward: Callable[[], object]) -> str | None:
    """The first module output that is not finite, in order of execution; `forward` runs the batch again."""
    found: list[str] = []

    def look(name: str) -> Callable[..., None]:
        def hook(_module, _inputs, output):
            tensors = output if isinstance(output, tuple | list) else [output]
            if not found and any(isinstance(t, Tensor) and not _finite(t) for t in tensors):
                found.append(f"the output of {name} is not finite")

        return hook

    handles = [module.register_forward_hook(look(name)) for name, module in model.named_modules() if name]
    try:
        forward()
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else None


def first_bad_gradient(model: nn.Module) -> str | None:
    """The first gradient in reverse order of the parameters, which is about the order of the backward pass."""
    for name, weight in reversed(list(model.named_parameters())):
        if weight.grad is not None and not _finite(weight.grad):
            return f"the gradient of {name} is not finite"
    return None


def _finite(tensor: Tensor) -> bool:
    """Of what this rank has of it: another rank finds what is wrong with its own part."""
    return bool(torch.isfinite(tensor.to_local() if is_sharded(tensor) else tensor).all())
