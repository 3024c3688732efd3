"""Choices made on a block's own error, worked out again: four over six, and MS-EDEN's corrected scales.

Sources: arXiv:2512.02010 and arXiv:2601.22813; module ``nvfp4_kernels.reference.select`` is the definition.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from nvfp4_kernels.scheme import Scheme
from nvfp4_train.auditing.scale_rules import Scales, grid


def nearest_code(size: Tensor, magnitudes: Tensor) -> Tensor:
    """The magnitude nearest to ``size`` (clamped to the largest), ties down."""
    size = size.clamp(max=magnitudes[-1])
    above = torch.bucketize(size, magnitudes).clamp(1, len(magnitudes) - 1)
    lower, upper = magnitudes[above - 1], magnitudes[above]
    return torch.where(size - lower > upper - size, upper, lower)


def fitted(blocks: Tensor, values: Tensor, scales: Scales, magnitudes: Tensor) -> Tensor:
    """MS-EDEN stores another scale than the one it rounds elements with: the one that makes the operand of the codes.

    It must be an E4M3 number, one of the two beside the rounded scale times the correction of its group; the fit gives
    that number exactly, or none that explains the block.
    """
    code = nearest_code((blocks / scales.unit.unsqueeze(2).clamp(min=1e-300)).abs(), magnitudes)
    fit = (values.abs() * code).sum(2) / code.square().sum(2).clamp(min=1e-300)
    stored = fit.float().to(torch.float8_e4m3fn).double()
    near = (stored - scales.inside).abs() <= 0.25 * scales.inside + 2.0**-9  # the second: E4M3's least step
    return torch.where(near, stored, 0.0)


class ScaleRounding(NamedTuple):
    """What stochastic rounding did to block scales; fields as in ``operands.Agreement``."""

    farther: int
    farther_expected: float
    farther_variance: float
    lean: float
    lean_variance: float


def rounded_scales(at: dict[str, Tensor], scheme: Scheme) -> ScaleRounding:
    """MS-EDEN rounds scales stochastically, not elements: the counts of the rounding are those of the scales."""
    exact, scale = at["exact"], at["first"]
    code = at["nearest"] * exact.sign()
    inside = scheme.hadamard // scheme.block[1]

    def summed(products: Tensor) -> Tensor:
        weighted = torch.where(scale == 0, 0.0, scale.square() * products.sum(2))
        groups = weighted.view(len(scale), -1, inside).sum(2)
        return groups.repeat_interleave(inside, 1)

    overlap = summed(exact * code)
    wanted = scale * torch.where(overlap == 0, 1.0, summed(exact * exact) / overlap)
    steps = grid("e4m3").to(wanted.device)
    above = torch.bucketize(wanted.clamp(max=steps[-1]), steps).clamp(1, len(steps) - 1)
    lower, upper = steps[above - 1], steps[above]
    fraction = (wanted - lower) / (upper - lower)
    told = (wanted < steps[-1]) & (at["dead"] == 0) & at["right"].all(2) & (code != 0).any(2)
    stored = at["inside"]
    far = torch.where(fraction > 0.5, lower, upper)
    apart = torch.minimum(fraction, 1 - fraction).where(told, 0.0)
    lean = (stored - wanted) / (upper - lower)
    return ScaleRounding(
        int(((stored == far) & told).sum()), float(apart.sum()), float((apart * (1 - apart)).sum()),
        float(lean.where(told, 0.0).sum()), float((fraction * (1 - fraction)).where(told, 0.0).sum()),
    )  # fmt: skip


def right_choice(
    at: dict[str, Tensor], blocks: Tensor, pair: list[Scales], rows: Tensor, scheme: Scheme, magnitudes: Tensor
) -> float:
    """The share of blocks that took the scale with the smaller error of rounding to nearest (four over six)."""
    errors = []
    for scales in pair:
        code = nearest_code((blocks / scales.unit.unsqueeze(2).clamp(min=1e-300)).abs(), magnitudes)
        error = (code * scales.unit.unsqueeze(2) - blocks.abs()).abs()
        error = error.square() if scheme.select == "mse" else error
        error = error.amax(2) if scheme.select == "max" else error.sum(2)
        errors.append(_tile_sum(error, rows, scheme.block[0], scheme.select == "max"))
    six, four = errors
    clear = (six - four).abs() > 1e-5 * (six + four)  # closer than that, float32 sums may tell otherwise
    right = ((four < six).double() == at["second"]) | ~clear | at["either"]
    return float(right.double().mean())


def tile_amax(block_amax: Tensor, rows: Tensor, tile: int) -> Tensor:
    """The amax of a tile on each of its rows; ``rows`` are the row numbers, whole tiles."""
    if tile == 1:
        return block_amax
    number = torch.unique(rows // tile, return_inverse=True)[1]
    index = number[:, None].expand_as(block_amax)
    largest = torch.zeros_like(block_amax[: int(number.max()) + 1])
    return largest.scatter_reduce_(0, index, block_amax, "amax").gather(0, index)


def _tile_sum(error: Tensor, rows: Tensor, tile: int, largest: bool) -> Tensor:
    if tile == 1:
        return error
    if largest:
        return tile_amax(error, rows, tile)
    number = torch.unique(rows // tile, return_inverse=True)[1]
    index = number[:, None].expand_as(error)
    return torch.zeros_like(error[: int(number.max()) + 1]).scatter_add_(0, index, error).gather(0, index)
