"""Block scales in float64: what a scheme's rule gives for the amax of a block. Shares no code with the kernels.

Formulas are those of the canon (module ``nvfp4_kernels.reference.scales`` states them with their sources); here they
are evaluated in float64, and once more a hair above and below, since a quotient next to a tie may round the other way
in the float32 chain that ran.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from nvfp4_kernels.elements import ELEMENTS
from nvfp4_kernels.scheme import Scheme

E4M3_LARGEST = 448.0
HAIR = 2.0**-20  # float32's rounding of a handful of operations
RULES = ("nvfp4", "amax", "delayed", "floor", "even", "ceil", "up", "down")


class Scales(NamedTuple):
    """For each block, float64 [R, blocks]: ``unit``, an element's value over its exact code, and ``inside``, what the
    operand holds for code 1; they differ by what stands in the epilogue of the GEMM."""

    unit: Tensor
    inside: Tensor


def grid(element: str) -> Tensor:
    """float64: the magnitudes of an element type, ascending, 0 first."""
    kind = ELEMENTS[element]
    if kind.integer:
        return torch.arange(int(kind.largest) + 1, dtype=torch.float64)
    fractions = 2**kind.mantissa
    least = 2.0 ** (kind.least_exponent - kind.mantissa)
    values = [least * i for i in range(fractions)]
    exponent = kind.least_exponent
    while values[-1] < kind.largest:
        values += [2.0**exponent * (1 + i / fractions) for i in range(fractions)]
        exponent += 1
    return torch.tensor([value for value in values if value <= kind.largest], dtype=torch.float64)


def candidates(block_amax: Tensor, level: Tensor, scheme: Scheme) -> list[Scales]:
    """The scales a rule may give, the most likely first. ``block_amax``: [R, blocks]; ``level``: the amax of the tensor
    (0-d) or of the outer block (as ``block_amax``). ``scheme`` has its block sizes filled in."""
    found = []
    for hair in (1.0, 1 - HAIR, 1 + HAIR):
        found += _scales(block_amax * hair, level, scheme)
    return found


def _scales(amax: Tensor, level: Tensor, scheme: Scheme) -> list[Scales]:
    if scheme.scale == "e8m0":
        scale = torch.ldexp(torch.ones_like(amax), _exponent(amax, scheme).clamp(-127, 127))
        return [Scales(scale * scheme.headroom, scale)]
    if scheme.rule == "nvfp4":
        whole = level / (scheme.top * scheme.range)
        exact = (amax * scheme.range / level.clamp(min=1e-300)).clamp(max=E4M3_LARGEST)
        factors = (1.0, 1.5) if scheme.select else (1.0,)
        stored = [_e4m3((exact * factor).clamp(max=E4M3_LARGEST)) for factor in factors]
        return [Scales(s * whole, s * whole if scheme.outer is not None else s) for s in stored]
    scale = amax / scheme.top
    if scheme.scale == "e4m3":
        scale = _e4m3(scale.clamp(max=E4M3_LARGEST))
    return [Scales(scale, scale)]


def whole_tensor(level: Tensor, scheme: Scheme, like: Tensor) -> Scales:
    """One scale for the tensor, all of it in the epilogue: the operand holds the codes themselves."""
    ones = torch.ones_like(like)
    return Scales(ones * level / scheme.top, ones)


def _e4m3(x: Tensor) -> Tensor:
    return x.float().to(torch.float8_e4m3fn).double()


def _exponent(amax: Tensor, scheme: Scheme) -> Tensor:
    largest = scheme.number.largest
    if scheme.rule in ("floor", "even"):
        if scheme.rule == "even":  # to the element's significant bits, ties away from zero, before the logarithm
            mantissa, exponent = torch.frexp(amax)
            steps = 2.0**scheme.number.significant
            amax = torch.ldexp(torch.floor(mantissa * steps + 0.5) / steps, exponent)
        exponent = torch.frexp(amax)[1] - 1 - (math.frexp(largest)[1] - 1)
    elif scheme.rule == "down":
        exponent = torch.floor(torch.log2(amax / largest)).int()
    else:
        assert scheme.rule in ("ceil", "up"), scheme.rule
        amax = amax.clamp(min=1e-4) if scheme.rule == "ceil" else amax
        exponent = torch.ceil(torch.log2(amax / largest)).int()
    return torch.where(amax == 0, -127, exponent)
