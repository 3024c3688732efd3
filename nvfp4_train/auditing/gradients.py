"""Do the gradients that leave a layer come from the products that ran, and do they point where they should?

The straight-through surrogate of a layer is the derivative of what Fprop computed, with the rounding taken as the
identity (but for elements that a recipe masks). It is built from the very operands that ran: Fprop's weight and input
as it multiplied them, and the gradient as it arrived.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nvfp4_train.auditing.chain_rule import UNIT, Space, requantized
from nvfp4_train.auditing.evidence import OPERANDS, Call
from nvfp4_train.auditing.findings import Verdicts
from nvfp4_train.auditing.origins import as_source, mean_apart, origin, scheme_in, used_by_fprop

SIGMAS = 6.0


def gradients(calls: list[Call], module: nn.Module, grads: dict[str, Tensor | None], verdicts: Verdicts) -> None:
    """What left a layer over all its calls, against the products that ran and against the surrogate.

    ``grads``: what the weight and the bias received in this run (of ``.grad`` or ``main_grad``); a key is missing
    where it cannot be told, as for a tied weight.
    """
    calls = [call for call in calls if call.backward_ran]
    if not calls:
        return
    for call in calls:
        _input_gradient(call, verdicts)
    _bias_gradient(calls, module, grads, verdicts)
    if "weight" in grads:
        _weight_gradient(calls, grads["weight"], verdicts)


def _plain(call: Call) -> bool:
    """Whether what a product gave is what left the layer: nothing was set apart, masked or rotated back."""
    names = [name for operands in OPERANDS.values() for name, _, _ in operands]
    schemes = [scheme for name in names if (scheme := scheme_in(call, name)) is not None]
    return not any(scheme.masked or scheme.requantized or scheme.split is not None for scheme in schemes)


def _input_gradient(call: Call, verdicts: Verdicts) -> None:
    product, dy = call.products.get("dgrad"), call.source("grad_output")
    arrived = call.input_gradient
    if call.needs_gradient is not None and call.needs_gradient[0] and arrived is None:
        verdicts.failed("gradient_missing", call.layer, "no gradient reached the layer's input")
    if product is None or dy is None or "fprop" not in call.products:
        return
    plain = _plain(call) and product.out is not None
    if arrived is not None and plain and not torch.equal(arrived, product.out.to(arrived.dtype)):
        verdicts.failed("gradient", call.layer, "the gradient that reached the input is not what Dgrad computed")
    if arrived is None and not plain:
        return
    dy = dy.double()
    space, weight = Space.of(call, "input"), used_by_fprop(call, "weight")
    surrogate = space.through(dy @ weight)
    along = space.adjoint(surrogate)
    begin = origin(call, "dgrad.grad_output")
    error = as_source(call, "dgrad.grad_output", product.a, begin, False) - begin.double()
    spread = float((error * (along @ weight.T)).norm())
    ran_weight = as_source(call, "dgrad.weight", product.b, origin(call, "dgrad.weight"), True)
    if requantized(call, "dgrad.weight"):
        shift = float((dy @ (ran_weight - weight) * along).sum())
    else:
        shift = float((dy @ (ran_weight - Space.of(call, "weight").back(weight)) * space.back(along)).sum())
    ran = (arrived if arrived is not None else product.out).double()
    _direction(call.layer, "dgrad", ran, surrogate, spread, shift, _relative(error, dy), verdicts)


def _weight_gradient(calls: list[Call], arrived: Tensor | None, verdicts: Verdicts) -> None:
    layer = calls[0].layer
    if any("wgrad" not in call.products for call in calls):
        return
    if arrived is None:
        if calls[0].needs_gradient is None or calls[0].needs_gradient[1]:
            verdicts.failed("gradient_missing", layer, "no gradient reached the weight")
        return
    if any(call.source("grad_output") is None or call.source("input") is None for call in calls):
        return
    if all(_plain(call) and call.products["wgrad"].out is not None for call in calls):
        summed = sum(call.products["wgrad"].out.double() for call in calls)
        off = float((arrived.double() - summed).norm() / summed.norm().clamp(min=1e-300))
        if off > 4 * UNIT[arrived.dtype] * math.sqrt(len(calls)) + 2.0**-20:
            verdicts.failed(
                "gradient", layer, f"the weight's gradient differs by {100 * off:.2f}% from what Wgrad computed"
            )
    if any("wgrad" in call.apart for call in calls):
        return  # channels apart have products of their own: each operand was judged
    parts, surrogate = [], torch.zeros_like(arrived, dtype=torch.float64)
    for call in calls:
        dy, used = call.source("grad_output").double(), used_by_fprop(call, "input")
        space = Space.of(call, "weight")
        inside = Space.of(call, "input")
        mean = mean_apart(call, "fprop.input")
        surrogate += space.through(dy.T @ used) + (0.0 if mean is None else torch.outer(dy.sum(0), mean))
        product, begin = call.products["wgrad"], origin(call, "wgrad.grad_output")
        dy_error = as_source(call, "wgrad.grad_output", product.a, begin, True) - begin.double()
        ran_x = as_source(call, "wgrad.input", product.b, origin(call, "wgrad.input"), True)
        x_error = ran_x - (used if requantized(call, "wgrad.input") else inside.back(used))
        if not requantized(call, "wgrad.input"):
            x_error = F.pad(x_error, (0, inside.padded - inside.columns))
            if inside.matrix is not None:
                x_error = (x_error.view(len(x_error), -1, len(inside.matrix)) @ inside.matrix).view(x_error.shape)
        parts.append((dy, dy_error, used, x_error, space))
    square, relative = 0.0, 0.0
    for dy, dy_error, used, x_error, space in parts:
        along = space.adjoint(surrogate)
        square += float((dy_error * (used @ along.T)).square().sum() + (x_error * (dy @ along)).square().sum())
        relative = max(relative, _relative(dy_error, dy) + _relative(x_error, used))
    _direction(layer, "wgrad", arrived.double(), surrogate, math.sqrt(square), 0.0, relative, verdicts)


def _relative(error: Tensor, of: Tensor) -> float:
    """Squared error over squared norm."""
    return float(error.square().sum() / of.square().sum().clamp(min=1e-300))


def _direction(
    layer: str, gemm: str, ran: Tensor, surrogate: Tensor, spread: float, shift: float, relative: float,
    verdicts: Verdicts,
) -> None:  # fmt: skip
    """The derivative along the surrogate's own direction, over what the surrogate says it is: 1 but for rounding.

    ``shift``: what a weight other than Fprop's moves it by, known exactly. Tolerance: errors of single elements are
    independent, so their sum along a direction has the standard deviation ``spread``; rounding to nearest may also
    shrink a tensor, by about its squared relative error, and two such errors meet in a product: twice ``relative``.
    """
    square = float(surrogate.square().sum())
    if square == 0.0:
        return
    slope = float((ran * surrogate).sum()) / square
    wanted = 1 + shift / square
    tolerance = SIGMAS * spread / square + 2 * relative + 2.0**-7
    if abs(slope - wanted) > tolerance:
        verdicts.failed(
            "gradient_direction", layer, f"{gemm}: along the straight-through surrogate the gradient is {slope:.3f} of "
            f"what it should be ({wanted:.3f} +- {tolerance:.3f})",
        )  # fmt: skip
    else:
        verdicts.held(f"{gemm} points where the straight-through surrogate of the operands that ran points")


def _bias_gradient(calls: list[Call], module: nn.Module, grads: dict[str, Tensor | None], verdicts: Verdicts) -> None:
    bias = getattr(module, "bias", None)
    if bias is None or not bias.requires_grad or "bias" not in grads:
        return
    outputs = [call.sources.get("grad_output") for call in calls]
    if any(dy is None for dy in outputs):
        return
    expected = sum(dy.double().sum(0) for dy in outputs)
    size = sum(dy.double().abs().sum(0) for dy in outputs)
    arrived = grads["bias"]
    room = 2 * UNIT[bias.dtype] * expected.abs() + 2.0**-18 * size + 1e-300
    # a gradient in BF16 is summed by torch in its own precision
    if any(dy.dtype != torch.float32 for dy in outputs):
        room = room + 2.0**-8 * expected.abs()
    if arrived is None or bool(((arrived.double() - expected).abs() > room).any()):
        lost = "is lost" if arrived is None or not arrived.any() else "is not the sum of the output's gradient"
        verdicts.failed("bias_gradient", calls[0].layer, f"the bias's gradient {lost}")
    else:
        verdicts.held("the bias's gradient is the sum of the output's gradient")
