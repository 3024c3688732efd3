"""Does the backward pass differentiate the function that the forward pass computed?

For each layer and call: is Dgrad's weight bitwise Fprop's; do both Wgrad operands share their rotation; is each product
the product of its operands, rounded once; did the gradients that left the layer come from those products; and do they
point where the straight-through surrogate points, built from the very operands that ran?
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nvfp4_train.auditing.evidence import GEMMS, OPERANDS, Call
from nvfp4_train.auditing.findings import Verdicts
from nvfp4_train.auditing.operands import mask_of, rotation
from nvfp4_train.auditing.origins import (
    amax_of,
    as_source,
    factor_of,
    mean_apart,
    origin,
    scheme_in,
    unsaturated,
    used_by_fprop,
)  # fmt: skip
from nvfp4_train.ledger import Product

ROWS = 64  # of a product that are worked out again in float64
SIGMAS = 6.0
UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-9, torch.float16: 2.0**-11}  # half a unit in the last place
ACCUMULATION = 2.0**-21  # float32 sums in any order, times the square root of their length (tensor cores truncate)


class Space(NamedTuple):
    """The rotated space of one of Fprop's operands, where it has one, and the elements whose gradient passes."""

    columns: int  # of the source
    padded: int
    matrix: Tensor | None
    passes: Tensor | None  # None: all

    @staticmethod
    def of(call: Call, key: str) -> Space:
        source, scheme = call.source(key), scheme_in(call, f"fprop.{key}")
        columns = source.shape[1]
        if scheme is None or not (scheme.hadamard or scheme.masked):
            return Space(columns, columns, None, None)
        matrix = None
        if scheme.hadamard:
            mask = mask_of(source, False, source, scheme, call.seed)
            matrix = rotation(scheme.hadamard, mask).to(source.device)
        return Space(columns, columns + -columns % scheme.group, matrix, unsaturated(call, key))

    def back(self, t: Tensor) -> Tensor:
        """Out of the rotated space."""
        if self.matrix is not None:
            t = (t.reshape(len(t), -1, len(self.matrix)) @ self.matrix.T).view(t.shape)
        return t[:, : self.columns]

    def through(self, gradient: Tensor) -> Tensor:
        """The source's gradient from the gradient of what Fprop multiplied."""
        return self.back(gradient if self.passes is None else gradient * self.passes)

    def adjoint(self, t: Tensor) -> Tensor:
        """The transpose of ``through``."""
        t = F.pad(t, (0, self.padded - t.shape[1]))
        if self.matrix is not None:
            t = (t.view(len(t), -1, len(self.matrix)) @ self.matrix).view(t.shape)
        return t if self.passes is None else t * self.passes


def _requantized(call: Call, name: str) -> bool:
    scheme = scheme_in(call, name)
    return scheme is not None and scheme.requantized


def same_weight(call: Call, must: bool, verdicts: Verdicts) -> dict[str, Any] | None:
    """Fprop's weight against Dgrad's. -> a row for the report: layer, bitwise, mismatch (relative)."""
    fprop, dgrad = call.products.get("fprop"), call.products.get("dgrad")
    if fprop is None or dgrad is None or call.source("weight") is None:
        return None
    rows, columns = call.source("weight").shape
    space = Space.of(call, "weight")
    forward = space.back(used_by_fprop(call, "weight"))[:, :columns]
    backward = as_source(call, "dgrad.weight", dgrad.b, origin(call, "dgrad.weight"), True)
    backward = space.back(backward) if _requantized(call, "dgrad.weight") else backward
    bitwise = torch.equal(fprop.b[:, :columns], dgrad.b[:, :rows].T)
    size = float((forward - backward).norm() / forward.norm().clamp(min=1e-300))
    if must and not bitwise:
        verdicts.failed(
            "weight_mismatch", call.layer, f"Dgrad used another quantized weight than Fprop: they differ by "
            f"{100 * size:.2f}% and the recipe does not declare weight_match: false",
        )  # fmt: skip
    elif must:
        verdicts.held("Dgrad's weight is bitwise Fprop's")
    return {"layer": call.layer, "declared": must, "bitwise": bitwise, "mismatch": size}


def same_rotation(call: Call, verdicts: Verdicts) -> None:
    """Both operands of each product must be rotated by the same signs: only then the rotation cancels."""
    for gemm in call.products:
        turns = []
        for name, _, _ in OPERANDS[gemm]:
            scheme = scheme_in(call, name)
            turns.append((scheme.hadamard, scheme.sign_mask) if scheme is not None and scheme.hadamard else (0, 0))
        if turns[0] != turns[1]:
            told = " and ".join(f"{size} points, signs {signs_text(mask)}" for size, mask in turns)
            verdicts.failed("hadamard_signs", call.layer, f"{gemm}: the operands are rotated differently ({told})")
        elif turns[0][0]:
            verdicts.held(f"Hadamard: both operands of {gemm} share their signs, the rotation cancels")


def signs_text(mask: int | str) -> str:
    return mask if isinstance(mask, str) else f"{mask:04X}"


def right_product(call: Call, gemm: str, product: Product, verdicts: Verdicts) -> None:
    """The result is the product of the operands times their global scales, rounded once."""
    if product.out is None or product.out.numel() == 0:
        return
    scale = torch.ones((), dtype=torch.float64, device=product.out.device)
    for name, _, transposed in OPERANDS[gemm]:
        source = origin(call, name)
        if source is None:
            return
        scale = scale * factor_of(
            scheme_in(call, name), source, transposed, amax=amax_of(call, name), seed=call.seed
        )
    a, b, out = product.a[:ROWS].double(), product.b.double(), product.out[:ROWS].double()
    if not (a.isfinite().all() and b.isfinite().all()):
        return
    bare = a @ b.T
    exact = bare * scale
    slope = float((out * exact).sum() / exact.square().sum().clamp(min=1e-300)) if exact.any() else 1.0
    if abs(slope - 1) > 2.0**-7:  # a coarse look first: what is off by less is a matter of rounding
        verdicts.failed("global_scale", call.layer, f"{gemm}: the result is {slope:.4g} times what its operands give")
        return
    room = ACCUMULATION * math.sqrt(a.shape[1]) * (a.abs() @ b.abs().T) * scale
    unit = _half_unit(exact, product.out.dtype)
    over = ((out - exact).abs() > 1.001 * unit + room).double().mean()
    if over > 0.01:
        verdicts.failed(
            "rounded_twice", call.layer, f"{gemm}: {100 * float(over):.0f}% of the results are not the product rounded "
            "once: something was rounded before the global scale or the float32 sum was complete",
        )  # fmt: skip
    else:
        verdicts.held(f"{gemm} is the product of its operands, rounded once")


def _half_unit(exact: Tensor, dtype: torch.dtype) -> Tensor:
    _, exponent = torch.frexp(exact)
    return torch.ldexp(torch.full_like(exact, UNIT[dtype]), exponent)


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
    if _requantized(call, "dgrad.weight"):
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
        x_error = ran_x - (used if _requantized(call, "wgrad.input") else inside.back(used))
        if not _requantized(call, "wgrad.input"):
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


def all_ran(call: Call, verdicts: Verdicts) -> None:
    """Each GEMM of a call that should have run did, in this library's own product."""
    if "fprop" not in call.products:
        verdicts.failed("gemm_missing", call.layer, "fprop did not run in the quantized product")
    if call.needs_gradient is None or "grad_output" not in call.sources:
        return
    for gemm, needed in zip(GEMMS[1:], call.needs_gradient, strict=True):
        if needed and gemm not in call.products:
            verdicts.failed(
                "gemm_missing", call.layer, f"{gemm} did not run in the quantized product: the backward pass took "
                "another way, in high precision",
            )  # fmt: skip
