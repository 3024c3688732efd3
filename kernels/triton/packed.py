"""Arithmetic on two bfloat16 numbers in one register: half the instructions, and exact where it is used.

A kernel holds a tile twice: as float32 ``x`` and as ``bits``, int16 tensors of bfloat16 bits of which two neighbours of
a row share a register. Kernels are bound by the number of instructions they issue, and comparisons, logic and byte
permutations run at half the rate of multiplications; hence the steps below.

Nearest, for a = |x * encode| and m = max(a, 1 + 2^-21): m - fma(a, -2^-22, m) is a rounded to two significant bits
where a >= 1, and to a multiple of 1/2 below, ties to even, times 2^-22. For a is a multiple of its own unit u (its last
place), m of one not smaller, and the product with 2^-22 is exact in the multiply-add: what is rounded is m - a / 2^22,
a number in m's binade, whose last place is 2^-22 of the grid's step. (At the very beginning of a binade the result may
fall into the one below, where units are half as large; a is within 2^-21 of a power of two there, and comes out as
that.) m in units is even where a lies between two steps, so the even result of the subtraction is the even code. No
intermediate overflows.
"""

import triton
import triton.language as tl
from nvfp4_kernels.triton import codecs

TWO_P22_SCALE = tl.constexpr(4194304.0)


def _nearest(k: int, x: str, encode: str) -> list[str]:
    """float32 ``r{k}`` = magnitude of ``x * encode`` rounded to the grid, times 2^-22; up to 8 or more, or NaN."""
    return [
        f"abs.f32 a, {x};",
        f"mul.rn.f32 a, a, {encode};",
        "max.f32 m, a, 0f3F800004;",
        "fma.rn.f32 a, a, 0fB4800000, m;",
        "sub.rn.f32 a, m, a;",
        f"mov.b32 r{k}, a;",
    ]


def _nearest_operand_asm(wide: bool) -> str:
    """$0: two bfloat16 from the floats $1, $2, with the signs of $3, the factors $4, $5 and the scales $6."""
    lines = [".reg .f32 a, m;", ".reg .b32 r1, r2, p, s, z;", "mov.b32 z, 0x80008000;"]
    lines += _nearest(1, "$1", "$4") + _nearest(2, "$2", "$5")
    lines += ["prmt.b32 p, r1, r2, 0x7632;", "mov.b32 s, 0x35C035C0;", "min.bf16x2 p, p, s;"]  # 6 * 2^-22
    lines += ["and.b32 s, $3, 0x80008000;", "or.b32 p, p, s;"]
    if wide:  # scales that have no room for 2^22
        lines += ["mov.b32 s, 0x4A804A80;", "fma.rn.bf16x2 p, p, s, z;"]
    return "{ " + " ".join([*lines, "fma.rn.bf16x2 $0, p, $6, z;"]) + " }"


def _nearest_codes_asm() -> str:
    """Four bytes $0: low nibbles from the floats $1-$4, high from $5-$8, their signs in $9, $10 and $11, $12.

    $13-$16: factors, $17: what the bytes are and-ed with. A value times 2^-126 is its code, in bits 6-8 of a bfloat16.
    """
    lines = [".reg .f32 a, m;", ".reg .b32 " + ", ".join(f"r{k}" for k in range(1, 9)) + ", p, q, s, t, z, c;"]
    lines += ["mov.b32 z, 0x80008000;", "mov.b32 c, 0x35C035C0;", "mov.b32 s, 0x0B800B80;"]  # 6 * 2^-22, 2^-104
    for k in range(1, 9):
        lines += _nearest(k, f"${k}", f"${13 + (k - 1) % 4}")
    for a, b in ((1, 3), (2, 4), (5, 7), (6, 8)):
        lines += [f"prmt.b32 r{a}, r{a}, r{b}, 0x7632;", f"min.bf16x2 r{a}, r{a}, c;"]
        lines += [f"fma.rn.bf16x2 r{a}, r{a}, s, z;"]
    lines += ["mad.lo.u32 p, r5, 16, r1;", "mad.lo.u32 q, r6, 16, r2;"]  # bytes of codes 0, 2 and 1, 3
    lines += ["shr.u32 p, p, 6;", "mad.lo.u32 p, q, 4, p;"]
    lines += ["prmt.b32 s, $9, $10, 0xFDB9;", "prmt.b32 t, $11, $12, 0xFDB9;"]  # the sign of each, eight times
    lines += ["and.b32 s, s, 0x0F0F0F0F;", "and.b32 t, t, 0xF0F0F0F0;", "or.b32 s, s, t;"]
    lines += ["and.b32 s, s, 0x88888888;", "or.b32 p, p, s;", "and.b32 $0, p, $17;"]
    return "{ " + " ".join(lines) + " }"


def _decoded_asm() -> str:
    """Low ($0, $1) and high ($2, $3) nibbles of the four bytes $4 as bfloat16, two a register, times $5, $6."""
    lines = [".reg .b32 t, u, v, k, z;", "mov.b32 z, 0x80008000;", "mov.b32 k, 0x7E807E80;"]  # 2^126
    for word, bytes_ in enumerate(("0x4140", "0x4342")):
        lines.append(f"prmt.b32 t, $4, 0, {bytes_};")
        for out, shift in ((word, 6), (word + 2, 2)):  # code and sign to where a subnormal bfloat16 has them
            lines += [f"shl.b32 u, t, {shift};", f"shl.b32 v, t, {shift + 6};", "and.b32 u, u, 0x01C001C0;"]
            lines += ["and.b32 v, v, z;", "or.b32 u, u, v;", "fma.rn.bf16x2 u, u, k, z;"]
            lines.append(f"fma.rn.bf16x2 ${out}, u, ${5 + word}, z;")
    return "{ " + " ".join(lines) + " }"


DECODED_ASM = tl.constexpr(_decoded_asm())
NEAREST_OPERAND_ASM = tl.constexpr(_nearest_operand_asm(False))
NEAREST_WIDE_ASM = tl.constexpr(_nearest_operand_asm(True))
NEAREST_CODES_ASM = tl.constexpr(_nearest_codes_asm())


@triton.jit
def rounded_bits(x):
    """int16 bits of float32 ``x`` rounded to bfloat16, ties to even."""
    if codecs.INTERPRETED:
        return codecs.bfloat16_bits(codecs.round_to_bfloat16(x))
    else:
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [x], dtype=tl.int16, is_pure=True, pack=2
        )


@triton.jit
def widened(x, BF16_BITS: tl.constexpr):
    """codecs.to_float32 of a tile of which a thread holds pairs of neighbours."""
    if BF16_BITS and not codecs.INTERPRETED:
        return tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xFFFF0000;", "=&f,=f,r", [x], dtype=tl.float32, is_pure=True, pack=2
        )
    else:
        return codecs.to_float32(x, BF16_BITS)


@triton.jit
def larger_magnitude(a, b, XORSIGN: tl.constexpr):
    """int16 bits of the bfloat16 of larger magnitude, of any sign; NaN if either is. XORSIGN: sm_86 or later."""
    if codecs.INTERPRETED:
        return tl.maximum(a & 0x7FFF, b & 0x7FFF)
    elif XORSIGN:
        return tl.inline_asm_elementwise(
            "max.NaN.xorsign.abs.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int16, is_pure=True, pack=2
        )
    else:
        ASM: tl.constexpr = "{ .reg .b32 a, b; abs.bf16x2 a, $1; abs.bf16x2 b, $2; max.NaN.bf16x2 $0, a, b; }"
        return tl.inline_asm_elementwise(ASM, "=r,r,r", [a, b], dtype=tl.int16, is_pure=True, pack=2)


@triton.jit
def _halved(both, XORSIGN: tl.constexpr):
    a, b = tl.split(both)
    return larger_magnitude(a, b, XORSIGN)


@triton.jit
def largest_of_rows(bits, XORSIGN: tl.constexpr):
    """bits [N, rows, J] of bfloat16 -> [N, J]: the largest magnitude over the rows, which lie in one thread."""
    N: tl.constexpr = bits.shape[0]
    J: tl.constexpr = bits.shape[2]
    if codecs.INTERPRETED:
        return tl.max(bits & 0x7FFF, 1)
    for _ in tl.static_range(bits.shape[1].bit_length() - 1):
        bits = _halved(tl.permute(tl.reshape(bits, (N, 2, bits.shape[1] // 2, J)), (0, 2, 3, 1)), XORSIGN)
    return tl.reshape(bits, (N, J))


@triton.jit
def largest_of_runs(bits, RUN: tl.constexpr, XORSIGN: tl.constexpr):
    """bits [I, J] of bfloat16 -> [I, 2 J / RUN]: two candidates for the largest magnitude of each run of a row."""
    ROWS: tl.constexpr = bits.shape[0]
    RUNS: tl.constexpr = bits.shape[1] // RUN
    if codecs.INTERPRETED:
        return tl.max(tl.reshape(bits & 0x7FFF, (ROWS, RUNS * 2, RUN // 2)), 2)
    bits = tl.reshape(bits, (ROWS, RUNS, RUN))
    for _ in tl.static_range(RUN.bit_length() - 2):
        bits = _halved(tl.permute(tl.reshape(bits, (ROWS, RUNS, 2, bits.shape[2] // 2)), (0, 1, 3, 2)), XORSIGN)
    return tl.reshape(bits, (ROWS, RUNS * 2))


@triton.jit
def nearest_operand(x, bits, encode, scale, WIDE: tl.constexpr):
    """int16 bits of bfloat16(e2m1_nearest(x * encode) * scale).

    ``bits``: int16 with the sign of each x in the highest. ``encode``, ``scale``: float32 as ``x``, the scale exact in
    bfloat16; ``WIDE`` if it may reach 2^106.
    """
    if codecs.INTERPRETED:
        return codecs.bfloat16_bits(codecs.e2m1_nearest(x * encode) * scale)
    elif WIDE:
        bits16 = codecs.bfloat16_bits(scale)
        return tl.inline_asm_elementwise(
            NEAREST_WIDE_ASM, "=r,f,f,r,f,f,r", [x, bits, encode, bits16], dtype=tl.int16, is_pure=True, pack=2
        )
    else:
        bits16 = codecs.bfloat16_bits(scale * TWO_P22_SCALE)
        return tl.inline_asm_elementwise(
            NEAREST_OPERAND_ASM, "=r,f,f,r,f,f,r", [x, bits, encode, bits16], dtype=tl.int16, is_pure=True, pack=2
        )


@triton.jit
def nearest_codes(low, high, low_bits, high_bits, encode, keep):
    """uint8 of the nearest codes of ``low * encode`` (low nibble) and ``high * encode``, and-ed with uint8 ``keep``.

    ``*_bits``: int16 with the sign of each in the highest.
    """
    if codecs.INTERPRETED:
        low, high = codecs.e2m1_nearest_code(low * encode), codecs.e2m1_nearest_code(high * encode)
        return (low | (high << 4)).to(tl.uint8) & keep
    else:
        return tl.inline_asm_elementwise(
            NEAREST_CODES_ASM, "=r" + ",r" * 17, [low, high, low_bits, high_bits, encode, keep],
            dtype=tl.uint8, is_pure=True, pack=4,
        )  # fmt: skip


@triton.jit
def decoded(pair, scale):
    """int16 bits of bfloat16 of the low and of the high nibbles of uint8 ``pair``, each times float32 ``scale``."""
    if codecs.INTERPRETED:
        code = pair.to(tl.int32)
        low, high = codecs.e2m1_value(code & 15) * scale, codecs.e2m1_value(code >> 4) * scale
        return codecs.bfloat16_bits(low), codecs.bfloat16_bits(high)
    else:
        return tl.inline_asm_elementwise(
            DECODED_ASM, "=&r,=&r,=&r,=r,r,r,r", [pair, codecs.bfloat16_bits(scale)],
            dtype=(tl.int16, tl.int16), is_pure=True, pack=4,
        )  # fmt: skip
