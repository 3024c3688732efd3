"""E2M1, E4M3, E8M0 and bfloat16 in float32 and integer arithmetic: exact on every GPU and in Triton's interpreter.

No hardware FP4 or FP8 conversion is used (they exist on few GPUs, and the interpreter's are wrong). A value on the
E2M1 grid is held in float32; times 2^-126 its top bits *are* the code, since float32's own subnormals then fall on
E2M1's. Kernels that call these are compiled with ``enable_fp_fusion=False``: a fused multiply-add where the definition
rounds twice would change bits.
"""

import os

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET", "0") == "1")

FLT_MAX = tl.constexpr(float.fromhex("0x1.fffffep127"))
ENCODE_RANGE = tl.constexpr(2688.0)  # 448 * 6
SMALLEST_AMAX = tl.constexpr(2688.0 / float.fromhex("0x1.fffffep127"))  # below it 2688 / amax overflows
LIFT = tl.constexpr(2.0**64)
TWO_M126 = tl.constexpr(2.0**-126)
TWO_P126 = tl.constexpr(2.0**126)
TWO_P120 = tl.constexpr(2.0**120)
TWO_M120 = tl.constexpr(2.0**-120)
SIGN = tl.constexpr(-0x80000000)
SMALLEST_E4M3 = tl.constexpr(2.0**-6 * (1 + 2.0**-19))  # the smallest normal, and a little more
INFINITY_BITS = tl.constexpr(0x7F800000)
NAN_BITS = tl.constexpr(0x7FC00000)


@triton.jit
def bits_of(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def float_of(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def nan_maximum(a, b):
    """The larger of two non-negative floats; NaN if either is."""
    if INTERPRETED:  # its maximum follows numpy's NaN rules; ordering by bits puts NaN above Inf
        return float_of(tl.maximum(bits_of(a), bits_of(b)))
    else:
        return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def largest_magnitude(x, axis: tl.constexpr):
    """max |x| along ``axis``; NaN if any is NaN."""
    if INTERPRETED:
        return float_of(tl.max(bits_of(x) & 0x7FFFFFFF, axis))
    else:
        return tl.reduce(tl.abs(x), axis, nan_maximum)


@triton.jit
def to_float32(x, BF16_BITS: tl.constexpr):
    """float32 of what was loaded; bfloat16 arrives as int16 bits."""
    if BF16_BITS:
        return float_of(x.to(tl.int32) << 16)
    else:
        return x.to(tl.float32)


@triton.jit
def high_bits(x, BF16_BITS: tl.constexpr):
    """int16: the upper half of float32 of what was loaded."""
    return x if BF16_BITS else bfloat16_bits(x.to(tl.float32))


@triton.jit
def round_to_bfloat16(x):
    """float32 rounded to the nearest bfloat16, ties to even."""
    if INTERPRETED:
        bits = bits_of(x)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
        return float_of(tl.where((bits & 0x7FFFFFFF) > INFINITY_BITS, NAN_BITS, rounded))
    else:  # two at a time: the conversion of one runs at a quarter of the speed
        pair: tl.constexpr = """{
            .reg .b32 both;
            cvt.rn.bf16x2.f32 both, $3, $2;
            shl.b32 $0, both, 16;
            and.b32 $1, both, 0xFFFF0000;
        }"""
        return tl.inline_asm_elementwise(pair, "=f,=f,f,f", [x], dtype=tl.float32, is_pure=True, pack=2)


@triton.jit
def bfloat16_bits(x):
    """int16 bits of a float32 that is exact in bfloat16."""
    return (bits_of(x) >> 16).to(tl.int16)


@triton.jit
def _shifted(y):
    """(2^23 grid steps, the same plus |y| clamped to 6): no bits below a step are left, so the addition rounds."""
    magnitude = tl.minimum(tl.abs(y), 6.0)
    exponent = float_of(bits_of(tl.maximum(magnitude, 1.0)) & INFINITY_BITS)  # 2^e; the step is 2^-1 * 2^e
    return exponent, tl.fma(exponent, 4194304.0, magnitude)


@triton.jit
def e2m1_nearest(y):
    """Round to the E2M1 grid, ties to the even code, clamped to +-6; the sign stays, also of a zero."""
    exponent, shifted = _shifted(y)
    return float_of(bits_of(tl.fma(exponent, -4194304.0, shifted)) | (bits_of(y) & SIGN))


@triton.jit
def e2m1_nearest_code(y):
    """uint32 codes 0..15 of e2m1_nearest(y)."""
    _, shifted = _shifted(y)
    bits = bits_of(shifted)
    # low bits: |y| in steps; a code is that plus 2 for each e, and (bits >> 22) is 2 e + 298
    magnitude = (bits + (bits >> 22) - 298).to(tl.uint32, bitcast=True)
    return _with_sign(magnitude, y)


@triton.jit
def _with_sign(magnitude, y):
    """magnitude's low three bits and the sign of y, in one three-input operation."""
    return (magnitude & 7) | ((y.to(tl.uint32, bitcast=True) >> 28) & 0xFFFFFFF8)


@triton.jit
def e2m1_stochastic(y, up16, EIGHT_BITS: tl.constexpr):
    """Round to the E2M1 grid, away from zero iff r < floor(frac * 2^16), or 2^8 with the high half of the draw r.

    ``up16``: int16 bits of 2^16 - 1 - r. Returns value * 2^-126, whose top bits are the code: up16 carries into them.
    """
    magnitude = tl.abs(y)
    if INTERPRETED:
        low = tl.minimum(magnitude, 1.0)
        bits = tl.where(magnitude < 1.0, (low * 8388608.0).to(tl.int32), bits_of(magnitude) - (126 << 23))
    else:  # toward zero: bits that do not fit below must not round into a code above
        bits = bits_of(
            tl.inline_asm_elementwise(
                "mul.rz.f32 $0, $1, 0f00800000;", "=f,f", [magnitude], dtype=tl.float32, is_pure=True, pack=1
            )
        )
    carry = (up16.to(tl.int32) & (0xFF00 if EIGHT_BITS else 0xFFFF)) << 6
    bits = tl.minimum(bits + carry, 7 << 22) & 0x7FC00000
    return float_of(bits | (bits_of(y) & SIGN))


@triton.jit
def stochastic_operand(y, up16, scale_bits, EIGHT_BITS: tl.constexpr, XORSIGN: tl.constexpr):
    """int16 bits of bfloat16(e2m1_stochastic(y) * scale), ``scale_bits`` being the scale's. Two elements at a time.

    The same steps as above. ``dp2a`` picks one of two 16-bit numbers, shifts and adds it in one instruction; from there
    on both elements share a register, where bfloat16 holds every value exactly.
    """
    HEAD: tl.constexpr = """{
        .reg .f32 a, b;
        .reg .b32 m, n, p, u, v;
        mul.rz.f32 a, $1, 0f00800000;
        mul.rz.f32 b, $2, 0f00800000;
        mov.b32 m, a;
        mov.b32 n, b;
        and.b32 u, $3, """
    CARRY: tl.constexpr = """;
        dp2a.lo.u32.u32 m, u, 0x0040, m;
        dp2a.lo.u32.u32 n, u, 0x4000, n;
        prmt.b32 p, m, n, 0x7632;
        and.b32 p, p, 0xFFC0FFC0;
        mov.b32 u, 0x01C001C0;"""
    CLAMP: tl.constexpr = " min.xorsign.abs.bf16x2 p, p, u;"
    CLAMP_TWICE: tl.constexpr = " min.bf16x2 p, p, u; mov.b32 u, 0x81C081C0; max.bf16x2 p, p, u;"  # before sm_86
    TAIL: tl.constexpr = """
        mov.b32 u, 0x7E807E80;
        mov.b32 v, 0x80008000;
        fma.rn.bf16x2 p, p, u, v;
        fma.rn.bf16x2 $0, p, $4, v;
    }"""
    if INTERPRETED:
        value = e2m1_stochastic(y, up16, EIGHT_BITS) * TWO_P126
        return bfloat16_bits(value * float_of(scale_bits.to(tl.int32) << 16))
    else:
        MASK: tl.constexpr = "0xFF00FF00" if EIGHT_BITS else "0xFFFFFFFF"
        MIDDLE: tl.constexpr = CLAMP if XORSIGN else CLAMP_TWICE
        return tl.inline_asm_elementwise(
            HEAD + MASK + CARRY + MIDDLE + TAIL, "=r,f,f,r,r", [y, up16, scale_bits],
            dtype=tl.int16, is_pure=True, pack=2,
        )  # fmt: skip


@triton.jit
def e2m1_code(shrunk):
    """uint32 codes 0..15 of float32 values on the E2M1 grid times 2^-126."""
    return _with_sign(shrunk.to(tl.uint32, bitcast=True) >> 22, shrunk)


@triton.jit
def e2m1_value(code):
    """float32 values of int32 codes 0..15."""
    return float_of(((code & 7) << 22) | ((code & 8) << 28)) * TWO_P126


@triton.jit
def e4m3_nearest(scale):
    """Round non-negative float32 to the E4M3 grid, ties to even, saturating at 448; keeps NaN."""
    scale = tl.minimum(scale, 448.0, propagate_nan=tl.PropagateNan.ALL)
    least = tl.maximum(scale, SMALLEST_E4M3)
    shifted = tl.fma(least, 1048576.0, -scale)  # as in packed.py, for four significant bits, or multiples of 2^-9
    return tl.fma(least, 1048576.0, -shifted)


@triton.jit
def e4m3_byte(scale):
    """int32 bytes of non-negative float32 on the E4M3 grid; NaN is 0x7F."""
    return tl.where(scale == scale, bits_of(scale * TWO_M120) >> 20, 0x7F)


@triton.jit
def e4m3_value(byte):
    """float32 values of int32 E4M3 bytes below 0x7F (positive, finite)."""
    return float_of(byte << 20) * TWO_P120


@triton.jit
def e8m0_value(byte):
    """float32 2^(byte - 127) of int32 bytes below 255."""
    return float_of(tl.where(byte == 0, 1 << 22, byte << 23))


@triton.jit
def scale_value(byte, E4M3: tl.constexpr):
    """float32 values of int32 scale bytes, NaN included."""
    if E4M3:
        return float_of(tl.where(byte == 0x7F, NAN_BITS, bits_of(e4m3_value(byte))))
    else:
        return float_of(tl.where(byte == 255, NAN_BITS, bits_of(e8m0_value(byte))))


@triton.jit
def reciprocal(x):
    """1 / x rounded once, for x in [2^-126, 2^125]; NaN for 0.

    The approximation and one Newton step: what rcp.rn does there, without its branch to the rest of the range, which
    would keep the compiler from ordering a kernel's instructions as registers allow.
    """
    if INTERPRETED:
        return tl.math.div_rn(tl.full(x.shape, 1.0, tl.float32), tl.where(x == 0, float("nan"), x))
    else:
        newton: tl.constexpr = """{
            .reg .f32 r, e;
            rcp.approx.ftz.f32 r, $1;
            fma.rn.f32 e, r, $1, 0fBF800000;
            neg.f32 e, e;
            fma.rn.f32 $0, r, e, r;
        }"""
        return tl.inline_asm_elementwise(newton, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def e8m0_byte(scale):
    """int32 bytes of float32 powers of two; NaN is 255."""
    return tl.where(scale == scale, bits_of(scale) >> 23, 255)
