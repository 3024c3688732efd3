"""Choices made on a block's own quantization error: four over six, and MS-EDEN's corrected scale.

Four over six (arXiv:2512.02010): a block's amax is mapped to 6 or, with a scale 1.5 times as large, to 4, whichever
gives the smaller error; ties keep 6. The error is taken on values rounded to nearest, also where the elements are then
rounded stochastically: a choice that saw the draws would bias them.

MS-EDEN (arXiv:2601.22813): elements are rounded to nearest; over each Hadamard group of the operand
S = <x, x> / <x, q> corrects the length, and the product of S and each block scale is rounded to E4M3 stochastically.
Over random rotations the result is unbiased. (In units of the operand without its global scale, which cancels in S.)
"""

import torch
from torch import Tensor

from nvfp4_kernels.reference import codecs
from nvfp4_kernels.reference.scales import encode_factor, over, six_and_four, tree_sum
from nvfp4_kernels.scheme import Scheme


def four_over_six(
    blocked: Tensor, block_amax: Tensor, amax: Tensor, s_enc: Tensor, scheme: Scheme, axis: int
) -> tuple[Tensor, Tensor]:
    """(uint8 E4M3 bytes, float32 encode factors) of the shape of ``block_amax`` [tiles, blocks].

    ``blocked``: float32, blocks apart along ``axis``. ``amax``, ``s_enc``: 0-d or of the shape of ``block_amax``.
    Order, in float32: q = E2M1(x * enc); d = ((q * s) * amax) / (top * range) - x; d * d, |d| or their maximum, summed
    along a block's row one after the other, then over the rows of a tile by halving.
    """
    candidates = []
    for byte in six_and_four(block_amax, s_enc, scheme):
        encode = encode_factor(byte, s_enc)
        candidates.append((byte, encode, _error(blocked, byte, encode, amax, scheme, axis)))
    (six, six_encode, six_error), (four, four_encode, four_error) = candidates
    pick = four_error < six_error  # false for NaN
    return torch.where(pick, four, six), torch.where(pick, four_encode, six_encode)


def _error(blocked: Tensor, byte: Tensor, encode: Tensor, amax: Tensor, scheme: Scheme, axis: int) -> Tensor:
    rows = blocked.shape[0] if axis else blocked.shape[2]
    tile = scheme.block[0]

    def beside(t: Tensor) -> Tensor:
        t = t if tile == 1 else t.repeat_interleave(tile, dim=0)[:rows]
        return t.unsqueeze(2) if axis else t.t().unsqueeze(1)

    grid = codecs.nearest_(blocked * beside(encode), scheme.number)
    scaled = grid.mul_(beside(codecs.e4m3_decode(byte)))
    difference = over(scaled.mul_(amax if amax.dim() == 0 else beside(amax)), scheme.top * scheme.range) - blocked
    dim = 2 if axis else 1
    magnitude = difference.square_() if scheme.select == "mse" else difference.abs_()
    if scheme.select == "max":
        error = magnitude.amax(dim=dim)
    else:
        parts = magnitude.unbind(dim)
        error = parts[0]
        for part in parts[1:]:
            error = error + part
    error = error if axis else error.t()
    if tile == 1:
        return error
    missing = -rows % tile
    error = torch.nn.functional.pad(error, (0, 0, 0, missing)).view(-1, tile, error.shape[1])
    return error.amax(dim=1) if scheme.select == "max" else tree_sum(error, 1)


def corrected_scales(scaled: Tensor, grid: Tensor, byte: Tensor, draws: Tensor, scheme: Scheme, axis: int) -> Tensor:
    """MS-EDEN: uint8 E4M3 bytes [R, blocks] in place of ``byte``.

    ``scaled``: float32, x times the encode factors, blocks apart along ``axis``; ``grid``: its rounding. ``draws``:
    uint16 of the same shape, of which each block uses its first. Order, in float32: sums of scaled^2 and of scaled *
    grid over a block by halving, times s * s (0 where s is), over the blocks of a Hadamard group by halving; S is their
    quotient, 1 where the divisor is 0; s * S is rounded stochastically.
    """
    dim = 2 if axis else 1
    scale = codecs.e4m3_decode(byte)
    weight = scale * scale

    def summed(products: Tensor) -> Tensor:
        blocks = tree_sum(products, dim)
        # a scale that underflowed has no inverse: x times the clamped encode factor may be infinite there
        blocks = torch.where(weight == 0, 0.0, weight * (blocks if axis else blocks.t()))
        groups = blocks.view(blocks.shape[0], -1, scheme.hadamard // scheme.block[1])
        return tree_sum(groups, 2).repeat_interleave(groups.shape[2], dim=1)

    length, overlap = summed(scaled * scaled), summed(scaled * grid)
    correction = torch.where(overlap == 0, 1.0, length / overlap)
    first = draws[:, :, 0] if axis else draws[:, 0].t()
    return codecs.e4m3_encode(codecs.stochastic_(scale * correction, first.contiguous(), codecs.E4M3))
