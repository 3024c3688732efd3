"""Does the backward pass differentiate the function that the forward pass computed?

For each layer and call: did every GEMM run; is Dgrad's weight bitwise Fprop's; do both operands of a product share
their rotation; is each product the product of its operands, rounded once? What leaves the layer: see gradients.py.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nvfp4_train.auditing.evidence import GEMMS, OPERANDS, Call
from nvfp4_train.auditing.findings import Verdicts
from nvfp4_train.auditing.operands import mask_of, rotation
from nvfp4_train.auditing.origins import (
    amax_of,
    as_source,
    factor_of,
    origin,
    scheme_in,
    unsaturated,
    used_by_fprop,
)  # fmt: skip
from nvfp4_train.ledger import Product

ROWS = 64  # of a product that are worked out again in float64
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


def requantized(call: Call, name: str) -> bool:
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
    backward = space.back(backward) if requantized(call, "dgrad.weight") else backward
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
