"""Running a step for the audit, and leaving everything as it was found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from nvfp4_train.conversion import converted_layers

Loss = Callable[[], Tensor]
MOVED = ("plan", "quantizer_step", "reached")  # what set_progress changes in a layer
NUDGE = 0.05  # of a weight's standard deviation: what the audit's own "optimizer step" moves, enough to change codes


def backward_of(loss: Loss) -> None:
    value = loss()
    if not isinstance(value, Tensor) or value.numel() != 1:
        raise ValueError("a loss for the audit must give one number, as a tensor that backward() can start from")
    if not bool(value.detach().isfinite()):
        raise ValueError(f"the loss is {float(value.detach())}: nothing can be audited on numbers that are not finite")
    value.backward()


@contextmanager
def left_as_found(model: nn.Module) -> Iterator[Callable[[], None]]:
    """Puts gradients, buffers, plans and generators back; gives a function that clears the gradients in between."""
    parameters = list(model.parameters())
    grads = [p.grad for p in parameters]
    main = {p: p.main_grad.clone() for p in parameters if getattr(p, "main_grad", None) is not None}
    buffers = [(b, b.clone()) for b in model.buffers()]
    layers = list(converted_layers(model).values())
    kept = [{key: layer.__dict__[key] for key in MOVED if key in layer.__dict__} for layer in layers]
    cuda = [p.device for p in parameters if p.device.type == "cuda"]

    def reset() -> None:
        for parameter in parameters:
            parameter.grad = None
        for parameter in main:
            parameter.main_grad.zero_()

    with torch.random.fork_rng(devices=sorted({d.index for d in cuda})):
        try:
            yield reset
        finally:
            for parameter, grad in zip(parameters, grads, strict=True):
                parameter.grad = grad
            with torch.no_grad():
                for parameter, kept_grad in main.items():
                    parameter.main_grad.copy_(kept_grad)
                for buffer, kept_buffer in buffers:
                    buffer.copy_(kept_buffer)
            for layer, before in zip(layers, kept, strict=True):
                for key in MOVED:
                    layer.__dict__.pop(key, None)
                layer.__dict__.update(before)


@torch.no_grad()
def nudge(layers: dict[str, nn.Module]) -> dict[str, Tensor]:
    """Moves the weights in place, as an optimizer does, by noise of its own; -> the weights before, by layer."""
    old = {}
    generator = torch.Generator().manual_seed(0)
    for label, module in layers.items():
        weight = module.weight
        old[label] = weight.detach().clone()
        noise = torch.randn(weight.shape, generator=generator).to(weight)
        weight.add_(noise * (NUDGE * weight.std() if weight.numel() > 1 else NUDGE))
    return old
