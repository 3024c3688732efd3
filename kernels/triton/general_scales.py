"""Block scales by any rule, four over six, MS-EDEN: ``reference/scales.py`` and ``select.py``, in their orders.

Per-block values are [rows of blocks, blocks of a row]; a tile of elements is seen as [TR / BR, BR, TC / BC, BC].
"""

import triton
import triton.language as tl
from nvfp4_kernels.triton import codecs
from nvfp4_kernels.triton.general_elements import at_most, nearest, over, quotient, stochastic


@triton.jit
def tree_sum(t, SIZE: tl.constexpr):
    """float32 [L, SIZE] -> [L]: the upper half is added to the lower until one is left. SIZE: at most 128."""
    LENGTH: tl.constexpr = t.shape[0]
    for stage in tl.static_range(7):
        if (SIZE >> (stage + 1)) > 0:
            low, high = tl.split(tl.permute(tl.reshape(t, (LENGTH, 2, SIZE >> (stage + 1))), (0, 2, 1)))
            t = low + high
    return tl.reshape(t, (LENGTH,))


@triton.jit
def _one_by_one(t, LENGTH: tl.constexpr):
    """float32 [LENGTH, 16] -> [LENGTH]: summed one after the other."""
    even, odd = tl.split(tl.reshape(t, (LENGTH, 2, 2, 2, 2)))
    e0, e1 = tl.split(even)
    o0, o1 = tl.split(odd)
    e00, e01 = tl.split(e0)
    e10, e11 = tl.split(e1)
    o00, o01 = tl.split(o0)
    o10, o11 = tl.split(o1)
    a0, a8 = tl.split(e00)
    a4, a12 = tl.split(e01)
    a2, a10 = tl.split(e10)
    a6, a14 = tl.split(e11)
    a1, a9 = tl.split(o00)
    a5, a13 = tl.split(o01)
    a3, a11 = tl.split(o10)
    a7, a15 = tl.split(o11)
    first = ((((((a0 + a1) + a2) + a3) + a4) + a5) + a6) + a7
    return (((((((first + a8) + a9) + a10) + a11) + a12) + a13) + a14) + a15


@triton.jit
def lift_of(level, SMALLEST: tl.constexpr):
    """2^64 for an amax so small that its encode scale would overflow, else 1."""
    return tl.where((level > 0) & (level < SMALLEST), codecs.LIFT, 1.0)


@triton.jit
def encode_scale(level, TOP_RANGE: tl.constexpr):
    """S_enc of rule nvfp4; NaN where the amax is NaN or Inf."""
    s_enc = at_most(quotient(level * 0.0 + TOP_RANGE, level), codecs.FLT_MAX)
    s_enc = tl.where(level == 0, 1.0, s_enc)
    return tl.where((codecs.bits_of(level) & 0x7FFFFFFF) >= codecs.INFINITY_BITS, float("nan"), s_enc)


@triton.jit
def _finite(scale, amax):
    return tl.where((codecs.bits_of(amax) & 0x7FFFFFFF) >= codecs.INFINITY_BITS, float("nan"), scale)


@triton.jit
def encode_factor(scale, s_enc):
    """min(1 / (scale * S_dec), FLT_MAX)"""
    return at_most(quotient(s_enc * 0.0 + 1.0, scale * quotient(s_enc * 0.0 + 1.0, s_enc)), codecs.FLT_MAX)


@triton.jit
def two_level(block_amax, s_enc, ONE_OVER_TOP: tl.constexpr):
    """Rule nvfp4: (float32 values on the E4M3 grid, encode factors)."""
    scale = _e4m3(_finite(at_most(block_amax * (s_enc * ONE_OVER_TOP), codecs.FLT_MAX), block_amax))
    return scale, encode_factor(scale, s_enc + scale * 0.0)


@triton.jit
def _e4m3(scale):
    return nearest(scale, False, 3, -6, 448.0)


@triton.jit
def one_level(block_amax, FLOAT32: tl.constexpr, TOP: tl.constexpr):
    """Rule amax: (float32 scales, what x is divided by), or (values on the E4M3 grid, encode factors)."""
    scale = _finite(over(block_amax, TOP), block_amax)
    if FLOAT32:
        return scale, tl.where(scale == 0, 1.0, scale)
    else:
        scale = _e4m3(scale)
        return scale, at_most(quotient(scale * 0.0 + 1.0, scale), codecs.FLT_MAX)


@triton.jit
def power_of_two(
    block_amax, RULE: tl.constexpr, TOP_EXPONENT: tl.constexpr, TOP_FRACTION: tl.constexpr, MANTISSA: tl.constexpr,
    HEADROOM: tl.constexpr,
):  # fmt: skip
    """The rules for E8M0: (2^e, encode factors). ``TOP_EXPONENT``, ``TOP_FRACTION``: of the largest element, as 2^e and
    the 23 bits of its mantissa."""
    bits = codecs.bits_of(block_amax) & 0x7FFFFFFF
    finite = bits < codecs.INFINITY_BITS
    bits = tl.where(finite, bits, 0)
    if RULE == "even":
        bits = (bits + (1 << (22 - MANTISSA))) & 0x7F800000
    if RULE == "ceil":
        bits = tl.maximum(bits, 0x38D1B717)  # 1e-4
    exponent = (bits >> 23) - 127 - TOP_EXPONENT  # a subnormal amax is clamped below whatever its own exponent
    fraction = bits & 0x7FFFFF
    if RULE == "ceil" or RULE == "up":
        exponent += (fraction > TOP_FRACTION).to(tl.int32)
    if RULE == "down":
        exponent -= (fraction < TOP_FRACTION).to(tl.int32)
    byte = tl.minimum(tl.maximum(exponent + 127, 0), 254)
    encode = codecs.e8m0_value(254 - byte)
    if HEADROOM != 1.0:
        encode = encode * (1.0 / HEADROOM)
    return tl.where(finite, codecs.e8m0_value(byte), float("nan")), tl.where(finite, encode, float("nan"))


@triton.jit
def spread(x, LENGTH: tl.constexpr, SIZE: tl.constexpr, MULTIPLE: tl.constexpr):
    """float32 [LENGTH]: MULTIPLE times the standard deviation of each block of ``x`` [LENGTH, SIZE]."""
    mean = over(tree_sum(x, SIZE), SIZE * 1.0)
    square = over(tree_sum(x * x, SIZE), SIZE * 1.0)
    variance = square - mean * mean
    return tl.math.sqrt_rn(tl.where(variance < 0, 0.0, variance)) * MULTIPLE


@triton.jit
def four_over_six(
    x, block_amax, level, s_enc, SELECT: tl.constexpr, TOP: tl.constexpr, RANGE: tl.constexpr,
):  # fmt: skip
    """(values on the E4M3 grid, encode factors) [A, B]; ``x`` float32 [A, BR, B, BC]; ``level``, ``s_enc`` [A, B]."""
    scale = _finite(at_most(over(block_amax, TOP) * s_enc, codecs.FLT_MAX), block_amax)
    six, four = _e4m3(scale), _e4m3(scale * 1.5)
    six_encode, four_encode = encode_factor(six, s_enc + six * 0.0), encode_factor(four, s_enc + four * 0.0)
    level = level + block_amax * 0.0
    pick = _error(x, four, four_encode, level, SELECT, TOP, RANGE) < _error(
        x, six, six_encode, level, SELECT, TOP, RANGE
    )
    return tl.where(pick, four, six), tl.where(pick, four_encode, six_encode)


@triton.jit
def _error(x, scale, encode, level, SELECT: tl.constexpr, TOP: tl.constexpr, RANGE: tl.constexpr):
    A: tl.constexpr = x.shape[0]
    BR: tl.constexpr = x.shape[1]
    B: tl.constexpr = x.shape[2]
    BC: tl.constexpr = x.shape[3]
    grid = nearest(x * encode[:, None, :, None], False, 1, 0, 6.0)
    scaled = (grid * scale[:, None, :, None]) * level[:, None, :, None]
    difference = over(scaled, TOP * RANGE) - x
    if SELECT == "max":
        return codecs.largest_magnitude(codecs.largest_magnitude(difference, 3), 1)
    else:
        magnitude = difference * difference if SELECT == "mse" else tl.abs(difference)
        error = tl.reshape(_one_by_one(tl.reshape(magnitude, (A * BR * B, BC)), A * BR * B), (A, BR, B))
        if BR > 1:
            error = tree_sum(tl.reshape(tl.permute(error, (0, 2, 1)), (A * B, BR)), BR)
        return tl.reshape(error, (A, B))


@triton.jit
def corrected(scaled, grid, scale, up16, SIZE: tl.constexpr, BLOCKS: tl.constexpr):
    """MS-EDEN: the corrected scales, stochastically rounded to E4M3 [TR, B].

    ``scaled``, ``grid``: float32 [TR * B, SIZE]. ``scale``: [TR, B]. ``up16``: int32 [TR, B], of the draw of each
    block's first element. ``BLOCKS`` make a Hadamard group.
    """
    TR: tl.constexpr = scale.shape[0]
    B: tl.constexpr = scale.shape[1]
    weight = scale * scale
    length = tl.reshape(tree_sum(scaled * scaled, SIZE), (TR, B))
    length = _grouped(tl.where(weight == 0, 0.0, weight * length), BLOCKS)
    overlap = tl.reshape(tree_sum(scaled * grid, SIZE), (TR, B))
    overlap = _grouped(tl.where(weight == 0, 0.0, weight * overlap), BLOCKS)
    correction = tl.where(overlap == 0, 1.0, quotient(length, overlap))
    return stochastic(scale * correction, up16, False, False, 3, -6, 448.0)


@triton.jit
def _grouped(t, BLOCKS: tl.constexpr):
    """Sums over every BLOCKS neighbours of a row, back in their places."""
    TR: tl.constexpr = t.shape[0]
    B: tl.constexpr = t.shape[1]
    sums = tree_sum(tl.reshape(t, (TR * B // BLOCKS, BLOCKS)), BLOCKS)
    return tl.reshape(tl.broadcast_to(sums[:, None], (TR * B // BLOCKS, BLOCKS)), (TR, B))
