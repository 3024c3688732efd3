"""OsciReset: weights that flip between two quantized values are set to the one they are at.

A weight near the middle between two values of its grid is quantized now to one, now to the other, while it hardly
moves itself. In a window of steps the moves of each weight and of its quantized value are summed; where the latter
exceed the former ``ratio``-fold, the weight is set to its quantized value, the middle of its bin.

    optimizer.step()
    nt.after_optimizer_step(model, step, total_steps)

Source: TetraJet-v2, arXiv:2510.27527, OsciReset. Q is Fprop's quantization of the weight, to nearest.
"""

import math
import warnings
from fractions import Fraction
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nvfp4_train.quantization import quantize
from nvfp4_train.selection import OscillationReset
from nvfp4_train.sharding import is_sharded


class Window(NamedTuple):
    """The sums of a window that is open; all float32 ``[N, K]``."""

    weight: Tensor  # of the last step
    quantized: Tensor
    weight_moves: Tensor
    quantized_moves: Tensor

    def state(self) -> dict[str, Tensor]:
        return {key: value.clone() for key, value in self._asdict().items()}

    @classmethod
    def of(cls, state: dict[str, Any]) -> "Window":
        return cls(**state)


@torch.no_grad()
def after_optimizer_step(model: nn.Module, step: int, total_steps: int) -> int:
    """Call it after each optimizer step (``step`` as in ``set_progress``); how many weights were reset.

    Does nothing for recipes without ``oscillation_reset``. Raises ValueError for a step outside 0..total_steps and
    for weights that are sharded over ranks.
    """
    if not 0 <= step <= total_steps or total_steps < 1:
        raise ValueError(f"step must lie in 0..{total_steps} (total_steps), got {step}")
    reset = 0
    for layer in model.modules():
        settings = getattr(getattr(layer, "recipe", None), "oscillation_reset", None)
        if settings is None or not hasattr(layer, "plan") or layer.plan.fprop_weight == "bf16":
            continue
        if is_sharded(layer.weight):
            raise ValueError(f"{layer.label}: oscillation_reset needs whole weights, and weight is sharded over ranks")
        reset += _after_step(layer, settings, step, total_steps)
        layer.oscillation_step = step
    return reset


def remind(layer: nn.Module, step: int, total_steps: int) -> None:
    """Warns where ``set_progress`` begins a step and nobody told that the step before it was made."""
    settings, before = layer.recipe.oscillation_reset, layer.__dict__.get("quantizer_step")
    if settings is None or before is None or step != before + 1 or before < _begins(settings, total_steps):
        return
    if layer.__dict__.get("oscillation_step") != before:
        warnings.warn(
            f"recipe {layer.recipe.name} resets weights that oscillate: call nvfp4_train.after_optimizer_step(model, "
            "step, total_steps) after each optimizer step, or nothing is reset",
            stacklevel=3,
        )


def _begins(settings: OscillationReset, total_steps: int) -> int:
    """The first step that is watched."""
    return math.ceil(Fraction(str(settings.start)) * total_steps)  # exact: no float's last digit adds a step


def _matrix(layer: nn.Module) -> Tensor:
    """The layer's one weight as Fprop reads it, ``[out, in]``: transformers' Conv1D keeps the transpose."""
    return layer.weight if isinstance(layer, nn.Linear) else layer.weight.T


def _after_step(layer: nn.Module, settings: OscillationReset, step: int, total_steps: int) -> int:
    begins = _begins(settings, total_steps)
    place = (step - begins) % settings.every
    if step < begins or place > settings.window:
        layer.oscillation = None
        return 0
    weight = _matrix(layer)
    now, quantized = weight.float(), _quantized(weight, layer.plan.fprop_weight)
    if place == 0 or layer.__dict__.get("oscillation") is None:
        layer.oscillation = Window(now.clone(), quantized, torch.zeros_like(now), torch.zeros_like(now))
        return 0
    window = layer.oscillation
    window.weight_moves.add_((now - window.weight).abs_())
    window.quantized_moves.add_((quantized - window.quantized).abs_())
    layer.oscillation = window._replace(weight=now.clone(), quantized=quantized)
    if place < settings.window:
        return 0
    layer.oscillation = None
    flips = (window.weight_moves > 0) & (window.quantized_moves >= settings.ratio * window.weight_moves)
    weight.copy_(torch.where(flips, quantized, now).to(weight.dtype))
    return int(flips.sum())


def _quantized(weight: Tensor, text: str) -> Tensor:
    return quantize(weight.detach(), text).dequantize(torch.float32)[:, : weight.shape[1]]
