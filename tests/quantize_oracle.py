"""What the quantizer tests share: an oracle that goes element by element in numpy, and comparisons by bit pattern."""

import math

import numpy as np
import torch

from nvfp4_kernels.reference.codecs import E2M1_VALUES, e4m3_decode
from nvfp4_kernels.reference.quantize import quantize
from nvfp4_kernels.scheme import Scheme

FLT_MAX = np.finfo(np.float32).max
E4M3 = e4m3_decode(torch.arange(127, dtype=torch.uint8)).numpy()
F32 = np.float32


def gaussian(*shape, seed=0, scale=1.0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def bits(x: torch.Tensor) -> torch.Tensor:
    """The bit pattern, so that -0.0 and NaN compare."""
    return x.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()])


def same(a, b) -> bool:
    return all(
        (p is None and q is None) or (p.shape == q.shape and torch.equal(bits(p), bits(q)))
        for p, q in zip(a[:3], b[:3], strict=True)
    )


def both_axes(x, scheme, **options):
    """[(result, its input as the result is indexed)]: the row form of x and the column form of x."""
    rows, columns = quantize(x, scheme, scheme, rows_form="both", columns_form="both", **options)
    return [(rows, x), (columns, x.t())]


# The oracle: one element at a time, scalars in float32, roundings by search.


def oracle(x: np.ndarray, scheme: Scheme, numbers) -> tuple[list[list[int]], list[list[int]]]:
    """(codes, scale bytes) of float32 x [R, C], already padded and rotated, finite, amax in the normal range.

    ``numbers(r, c)``: the 16-bit number of that element.
    """
    tile, size = scheme.block
    height, width = x.shape
    amax = F32(np.abs(x).max(initial=0))
    codes = [[0] * width for _ in range(height)]
    scales = [[0] * (width // size) for _ in range(-(-height // tile))]
    for top in range(0, height, tile):
        for left in range(0, width, size):
            block = x[top : top + tile, left : left + size]
            byte, factor = oracle_scale(F32(np.abs(block).max()), amax, scheme.rule)
            scales[top // tile][left // size] = byte
            for (i, j), value in np.ndenumerate(block):
                codes[top + i][left + j] = oracle_code(value * factor, scheme.rounding, numbers(top + i, left + j))
    return codes, scales


def oracle_scale(block_amax: np.float32, amax: np.float32, rule: str) -> tuple[int, np.float32]:
    if rule == "nvfp4":
        s_enc = min(F32(2688) / amax, FLT_MAX) if amax else F32(1)
        s_dec = F32(1) / s_enc
        wanted = min(block_amax * (s_enc * F32(1 / 6)), F32(448))
        byte = min(range(127), key=lambda k: (abs(float(E4M3[k]) - float(wanted)), k % 2))
        divisor = E4M3[byte] * s_dec
        return byte, min(F32(1) / divisor, FLT_MAX) if divisor else FLT_MAX
    if rule == "floor":
        exponent = max(-127, math.frexp(block_amax)[1] - 3) if block_amax else -127
    else:
        exponent = next(e for e in range(-127, 128) if 6 * 2.0**e >= max(float(block_amax), float(F32(1e-4))))
    return exponent + 127, F32(2.0**-exponent)


def oracle_code(y: np.float32, rounding: str, number: int) -> int:
    magnitude = min(abs(float(y)), 6.0)
    if rounding == "nearest":
        code = min(range(8), key=lambda k: (abs(E2M1_VALUES[k] - magnitude), k % 2))
    else:
        code = max(k for k in range(8) if E2M1_VALUES[k] <= magnitude)
        if code < 7:
            fraction = (magnitude - E2M1_VALUES[code]) / (E2M1_VALUES[code + 1] - E2M1_VALUES[code])
            draw, levels = (number >> 8, 256) if rounding == "stochastic8" else (number, 65536)
            code += draw < math.floor(fraction * levels)
    return code | (8 if np.signbit(y) else 0)
