"""The signed Hadamard transform, in the one order of operations that every backend follows.

``y = x @ (diag(signs) @ H / sqrt(n))`` in Sylvester order, computed in float32 as: signs, then butterflies of stride
1, 2, 4, ..., then the factor 1/sqrt(n), then one rounding to BF16. A matrix product would add in another order
and differ in a few outputs per ten million.
"""

import math

import torch
from torch import Tensor

from nvfp4_kernels.reference.philox import random16

SIGN_STREAM = 0x48414441  # second word of the Philox key of signs that are drawn; no element draws from it


def signs(mask: int, size: int, device: torch.device | str = "cpu") -> Tensor:
    """float32 ``[size]``: -1 where the bit of ``mask`` is set, else 1."""
    return torch.tensor([-1.0 if (mask >> i) & 1 else 1.0 for i in range(size)], device=device)


def step_signs(seed: Tensor, size: int) -> Tensor:
    """float32 ``[size]`` drawn from ``seed``: sign i is -1 where bit i % 16 of 16-bit number i // 16 is set.

    All groups of all operands of a module call share one vector: both operands of a GEMM are rotated alike.
    """
    words = random16(seed, SIGN_STREAM, (size + 15) // 16).view(torch.int16).to(torch.int32)
    bits = (words.unsqueeze(1) >> torch.arange(16, device=seed.device, dtype=torch.int32)) & 1
    return 1.0 - 2.0 * bits.view(-1)[:size].to(torch.float32)


def rotate(x: Tensor, size: int, mask: int | Tensor, dim: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Transform every group of ``size`` neighbours of ``x`` along ``dim``; ``mask``: of signs, or float32 signs.

    ``x``: float32 ``[I, J]``, contiguous, its length along ``dim`` (0 or 1) a multiple of ``size``, a power of two.
    Returns ``dtype`` of the same shape, contiguous.
    """
    assert size >= 1 and size & (size - 1) == 0, f"a Hadamard transform has a power of two as its size, not {size}"
    rows, columns = x.shape
    if dim == 1:  # make the group the outer dimension, so that the butterflies run over long contiguous rows
        return rotate(x.view(-1, size).t().contiguous(), size, mask, 0, dtype).t().contiguous().view(rows, columns)
    y = x.view(rows // size, size, columns) * _column(mask, size, x.device)
    return _butterflies(y, size).to(dtype).view(rows, columns)


def rotate_back(y: Tensor, size: int, mask: int | Tensor) -> Tensor:
    """The inverse of ``rotate`` along the last dimension, float32 ``[I, J]``, without a rounding to BF16.

    Order: butterflies, the factor 1/sqrt(n), signs.
    """
    groups = y.reshape(-1, size).t().clone(memory_format=torch.contiguous_format).view(1, size, -1)
    return (_butterflies(groups, size) * _column(mask, size, y.device)).view(size, -1).t().reshape(y.shape)


def _column(mask: int | Tensor, size: int, device: torch.device) -> Tensor:
    sign = mask if isinstance(mask, Tensor) else signs(mask, size, device)
    return sign.view(1, size, 1)


def _butterflies(y: Tensor, size: int) -> Tensor:
    """Butterflies of stride 1, 2, 4, ... along the middle of ``[groups, size, columns]``, then the factor; destroys
    y."""
    groups, _, columns = y.shape
    other = torch.empty_like(y)
    stride = 1
    while stride < size:
        pairs = (groups, size // (2 * stride), 2, stride, columns)
        source, target = y.view(pairs), other.view(pairs)
        torch.add(source[:, :, 0], source[:, :, 1], out=target[:, :, 0])
        torch.sub(source[:, :, 0], source[:, :, 1], out=target[:, :, 1])
        y, other = other, y
        stride *= 2
    return y.mul_(1 / math.sqrt(size))
