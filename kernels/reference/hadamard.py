"""The signed Hadamard transform, in the one order of operations that every backend follows.

``y = x @ (diag(signs) @ H / sqrt(n))`` in Sylvester order, computed in float32 as: signs, then butterflies of stride
1, 2, 4, ..., then the factor 1/sqrt(n), then one rounding to BF16. A matrix product would add in another order
and differ in a few outputs per ten million.
"""

import math

import torch
from torch import Tensor


def signs(mask: int, size: int, device: torch.device | str = "cpu") -> Tensor:
    """float32 ``[size]``: -1 where the bit of ``mask`` is set, else 1."""
    bits = (mask >> torch.arange(size, device=device)) & 1
    return 1.0 - 2.0 * bits.to(torch.float32)


def rotate(x: Tensor, size: int, mask: int, dim: int) -> Tensor:
    """Transform every group of ``size`` neighbours of ``x`` along ``dim``.

    ``x``: float32 ``[I, J]``, contiguous, its length along ``dim`` (0 or 1) a multiple of ``size``, a power of two.
    Returns bfloat16 of the same shape, contiguous.
    """
    assert size >= 1 and size & (size - 1) == 0, f"a Hadamard transform has a power of two as its size, not {size}"
    rows, columns = x.shape
    if dim == 1:  # make the group the outer dimension, so that the butterflies run over long contiguous rows
        return rotate(x.view(-1, size).t().contiguous(), size, mask, 0).t().contiguous().view(rows, columns)
    y = x.view(rows // size, size, columns) * signs(mask, size, x.device).view(1, size, 1)
    other = torch.empty_like(y)
    stride = 1
    while stride < size:
        pairs = (rows // size, size // (2 * stride), 2, stride, columns)
        source, target = y.view(pairs), other.view(pairs)
        torch.add(source[:, :, 0], source[:, :, 1], out=target[:, :, 0])
        torch.sub(source[:, :, 0], source[:, :, 1], out=target[:, :, 1])
        y, other = other, y
        stride *= 2
    return y.mul_(1 / math.sqrt(size)).to(torch.bfloat16).view(rows, columns)
