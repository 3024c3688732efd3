"""Measurements that a schedule can wait for (``when:``); the trainer makes them and hands them to ``set_progress``.

    ratio = nt.grad_to_noise(model, lambda: loss(model(batch)).backward())
    nt.set_progress(model, step, total_steps, measured={"grad_to_noise": ratio})

``grad_to_noise``: the norm of the gradient over the norm of its quantization noise. Training in few bits stops to help
when it falls under sqrt(3) (arXiv:2505.19115, section 4.1: noise above the gradient's norm / sqrt(3 d) a coordinate).
"""

import math
from collections.abc import Callable

import torch
from torch import nn


def grad_to_noise(model: nn.Module, compute: Callable[[], object]) -> float:
    """``||g|| / ||noise||`` over the weights of the converted layers; inf where nothing is drawn.

    ``compute`` runs forward and backward on one batch. It is called twice, with different draws of torch's generator
    and the same batch: half of ||a - b||^2 estimates the noise of stochastic rounding, <a, b> the gradient's squared
    norm, both without bias. (The error of rounding to nearest is no noise: it is the same both times.) Gradients are
    left as they were. Raises ValueError where no converted layer has a gradient.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    before = [p.grad for p in parameters]
    measured = {
        id(p) for layer in model.modules() if hasattr(layer, "recipe") and hasattr(layer, "plan")
        for p in layer.parameters(recurse=False) if p.dim() > 1
    }  # fmt: skip
    found: list[dict[int, torch.Tensor]] = []
    try:
        for _ in range(2):
            for p in parameters:
                p.grad = None
            compute()
            found.append({id(p): p.grad for p in parameters if id(p) in measured and p.grad is not None})
    finally:
        for p, grad in zip(parameters, before, strict=True):
            p.grad = grad
    first, second = found
    if not first:
        raise ValueError(
            "grad_to_noise: no converted layer got a gradient: convert the model, and let compute run backward"
        )
    product = sum((first[key].double() * second[key].double()).sum() for key in first)
    noise = sum((first[key].double() - second[key].double()).square().sum() for key in first) / 2
    signal, noise = max(float(product), 0.0), float(noise)
    return math.sqrt(signal / noise) if noise > 0 else math.inf
