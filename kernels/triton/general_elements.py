"""Rounding to any element's grid and its codes: ``reference/codecs.py`` in float32 and integer arithmetic.

``MANTISSA``, ``LEAST``, ``LARGEST``: stored mantissa bits, exponent of the smallest normal number, largest value of a
float element; ``INTEGER``: the grid -LARGEST .. LARGEST instead. Comparisons are written so that NaN falls through.
"""

import triton
import triton.language as tl
from nvfp4_kernels.triton import codecs

TO_INTEGER = tl.constexpr(12582912.0)  # 1.5 * 2^23: what is added to it has its fraction rounded off, ties to even


@triton.jit
def at_most(x, LARGEST: tl.constexpr):
    """min(x, LARGEST); NaN stays."""
    return tl.where(x > LARGEST, LARGEST, x)


@triton.jit
def quotient(a, b):
    """a / b, rounded once."""
    a, b = tl.broadcast(a, b)
    return tl.math.div_rn(a, b)


@triton.jit
def over(x, DIVISOR: tl.constexpr):
    """x / DIVISOR, rounded once: a true division, as multiplying by the reciprocal rounds twice."""
    return tl.math.div_rn(x, x * 0.0 + DIVISOR)


@triton.jit
def _step_bits(magnitude, MANTISSA: tl.constexpr, LEAST: tl.constexpr):
    """float32 bits of the grid's step at a magnitude: uniform below 2^LEAST."""
    exponent = codecs.bits_of(magnitude) & codecs.INFINITY_BITS
    return tl.maximum(exponent, (127 + LEAST) << 23) - (MANTISSA << 23)


@triton.jit
def _signed(magnitude, y, INTEGER: tl.constexpr):
    """``magnitude`` with the sign of ``y``; integers have no -0.0."""
    bits = codecs.bits_of(magnitude) | (codecs.bits_of(y) & codecs.SIGN)
    if INTEGER:
        bits = tl.where(magnitude == 0, 0, bits)
    return codecs.float_of(bits)


@triton.jit
def nearest(y, INTEGER: tl.constexpr, MANTISSA: tl.constexpr, LEAST: tl.constexpr, LARGEST: tl.constexpr):
    """float32 ``y`` on the grid: nearest, ties to even, clamped to the largest; NaN stays."""
    magnitude = at_most(tl.abs(y), LARGEST)
    if INTEGER:
        return _signed((magnitude + TO_INTEGER) - TO_INTEGER, y, True)
    else:
        step = _step_bits(magnitude, MANTISSA, LEAST)
        steps = magnitude * codecs.float_of((254 << 23) - step)  # by a power of two
        return _signed(((steps + TO_INTEGER) - TO_INTEGER) * codecs.float_of(step), y, False)


@triton.jit
def stochastic(
    y, up16, EIGHT: tl.constexpr,
    INTEGER: tl.constexpr, MANTISSA: tl.constexpr, LEAST: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """float32 ``y`` on the grid, away from zero iff the draw is below floor(frac * 2^16), or 2^8 with its high half.

    ``up16``: 2^16 - 1 - draw, the low 16 bits of an integer: it carries into the whole steps.
    """
    magnitude = at_most(tl.abs(y), LARGEST)
    step = codecs.bits_of(magnitude * 0.0 + 1.0) if INTEGER else _step_bits(magnitude, MANTISSA, LEAST)
    steps = magnitude * codecs.float_of((254 << 23) - step)
    steps = tl.where(steps == steps, steps, 0.0)
    up = up16.to(tl.int32) & 0xFFFF
    fixed = ((steps * 256.0).to(tl.int32) << 8) if EIGHT else (steps * 65536.0).to(tl.int32)
    whole = ((fixed + up) >> 16).to(tl.float32) * codecs.float_of(step)
    return tl.where(y == y, _signed(whole, y, INTEGER), float("nan"))


@triton.jit
def code_of(grid, INTEGER: tl.constexpr, MANTISSA: tl.constexpr, LEAST: tl.constexpr, BITS: tl.constexpr):
    """int32 codes of float32 values on the grid; a float's sign is the highest of its bits. Not for NaN."""
    if INTEGER:
        return grid.to(tl.int32) & ((1 << BITS) - 1)
    else:
        # moved so that the grid's subnormals fall on float32's, the top bits are the code
        MOVE: tl.constexpr = 2.0 ** (-126 - LEAST)
        magnitude = codecs.bits_of(tl.abs(grid) * MOVE) >> (23 - MANTISSA)
        return magnitude | (((codecs.bits_of(grid) >> 31) & 1) << (BITS - 1))


@triton.jit
def value_of(code, INTEGER: tl.constexpr, MANTISSA: tl.constexpr, LEAST: tl.constexpr, BITS: tl.constexpr):
    """float32 values of int32 codes; the codes of NaN and Inf that some elements have are not met."""
    if INTEGER:
        return (code - ((code >> (BITS - 1)) << BITS)).to(tl.float32)
    else:
        MOVE: tl.constexpr = 2.0 ** (126 + LEAST)
        magnitude = codecs.float_of((code & ((1 << (BITS - 1)) - 1)) << (23 - MANTISSA)) * MOVE
        return codecs.float_of(codecs.bits_of(magnitude) | ((code >> (BITS - 1)) << 31))
