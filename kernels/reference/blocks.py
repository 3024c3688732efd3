"""Shapes: a tensor seen as blocks along one of its axes, and what belongs to a block beside each of its elements.

``axis`` is the one that blocks run along: 1 for the row form of x [I, J], 0 for the column form, which keeps x's layout
and is handed back as transposed views. Per-block values are [R, blocks], R the length of the other axis (or, for blocks
of several rows, [tiles, blocks]).
"""

import torch.nn.functional as F
from torch import Tensor

from nvfp4_kernels.scheme import Scheme


def blocked(x: Tensor, block: int, axis: int) -> Tensor:
    """A view with the blocks along ``axis`` apart: [I, J // block, block] or [I // block, block, J]."""
    height, width = x.shape
    return x.view(height, width // block, block) if axis else x.view(height // block, block, width)


def beside(scale: Tensor, axis: int) -> Tensor:
    """Values [R, blocks] shaped to broadcast against ``blocked``."""
    return scale.unsqueeze(2) if axis else scale.t().unsqueeze(1)


def tiled(block_amax: Tensor, scheme: Scheme) -> Tensor:
    """[R, blocks] -> [ceil(R / rows of a block), blocks], the largest of each."""
    tile = scheme.block[0]
    if tile == 1:
        return block_amax
    rows, blocks = block_amax.shape
    padded = F.pad(block_amax, (0, 0, 0, -rows % tile))
    return padded.reshape(padded.shape[0] // tile, tile, blocks).amax(dim=1)


def expand(scale: Tensor, scheme: Scheme, rows: int) -> Tensor:
    """The inverse shape change: a tile's value on each of its rows, [rows, blocks]."""
    return scale if scheme.block[0] == 1 else scale.repeat_interleave(scheme.block[0], dim=0)[:rows]


def outermost(block_amax: Tensor, scheme: Scheme) -> Tensor:
    """[R, blocks] -> [R, outer blocks]: the largest of the block amaxes in each outer block."""
    inside = scheme.outer[1] // scheme.block[1]
    return block_amax.reshape(block_amax.shape[0], -1, inside).amax(dim=2)


def within_outer(outer: Tensor, scheme: Scheme) -> Tensor:
    """[R, outer blocks] -> [R, blocks]: an outer block's value for each of its blocks."""
    return outer.repeat_interleave(scheme.outer[1] // scheme.block[1], dim=1)


def as_operand(values: Tensor, axis: int, columns: int) -> Tensor:
    return values[:, :columns] if axis else values[:columns].t()


def round_up(number: int, multiple: int) -> int:
    return (number + multiple - 1) // multiple * multiple
