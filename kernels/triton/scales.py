"""Block scales: from the amax of a tensor and of its blocks to the scale and to the factor that x is multiplied by."""

import triton
import triton.language as tl
from nvfp4_kernels.triton import codecs

SMALLEST_S_DEC = tl.constexpr(2.0**-64)  # from here on scale * S_dec is far from subnormal


@triton.jit
def nvfp4_global(amax):
    """(S_enc * 1/6, S_dec, lift) of the float32 amax of a tensor, in the order of the definition; NaN stays NaN."""
    lift = tl.where((amax > 0) & (amax < codecs.SMALLEST_AMAX), codecs.LIFT, 1.0)
    lifted = amax * lift
    quotient = tl.minimum(tl.math.div_rn(lifted * 0.0 + codecs.ENCODE_RANGE, lifted), codecs.FLT_MAX)
    s_enc = tl.where((lifted == 0) | (quotient == 0), 1.0, quotient)
    s_enc = tl.where((codecs.bits_of(amax) & 0x7FFFFFFF) >= codecs.INFINITY_BITS, float("nan"), s_enc)
    return s_enc * 0.16666667163372039794921875, tl.math.div_rn(s_enc * 0.0 + 1.0, s_enc), lift


@triton.jit
def is_ordinary(s_dec, lift):
    """Whether nvfp4_scales may leave out its steps for tensors of tiny amax."""
    return not ((lift != 1.0) | (s_dec < SMALLEST_S_DEC))  # so NaN is ordinary


@triton.jit
def nvfp4_scales(block_amax, s_enc_6, s_dec, lift, ORDINARY: tl.constexpr):
    """(float32 scale, float32 encode factor) of each block. The scale is NaN where the block or the tensor is."""
    if ORDINARY:
        scale = codecs.e4m3_nearest(tl.fma(block_amax, 0.0, block_amax * s_enc_6))  # NaN also of an Inf
        return scale, tl.minimum(codecs.reciprocal(scale * s_dec), codecs.FLT_MAX)
    else:
        scale = codecs.e4m3_nearest(tl.fma(block_amax, 0.0, (block_amax * lift) * s_enc_6))
        product = scale * s_dec  # at least 2^-149, at most 2^125.4; moved by a power of two where it may be subnormal
        up = tl.where(s_dec < SMALLEST_S_DEC, codecs.LIFT, 1.0)
        return scale, tl.minimum(codecs.reciprocal(product * up) * up, codecs.FLT_MAX)


@triton.jit
def mx_scales(block_amax, CEIL: tl.constexpr):
    """As nvfp4_scales, for E8M0: exponents only. The encode factor is 2^-e, a multiplication by it exact."""
    bits = codecs.bits_of(block_amax)
    if CEIL:  # the least e with 6 * 2^e >= amax
        least = tl.maximum(bits, 0x38D1B717)  # 1e-4
        byte = (least >> 23) - 2 + ((least & 0x7FFFFF) > 0x400000).to(tl.int32)
    else:
        byte = tl.maximum((bits >> 23) - 2, 0)
    byte = tl.minimum(byte, 254)
    return tl.where(bits >= codecs.INFINITY_BITS, float("nan"), codecs.e8m0_value(byte)), codecs.e8m0_value(254 - byte)
