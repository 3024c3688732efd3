"""E2M1 by Blackwell's conversion instructions: the codes of ``codecs.py``, two or four of them in one instruction.

    cvt.rn.satfinite.e2m1x2.f32   sm_100, sm_103, sm_120, sm_121: nearest, ties to even
    cvt.rs.satfinite.e2m1x4.f32   sm_100, sm_103 only: stochastic, by 8 random bits an element (``stochastic8``)

Nothing else of Blackwell has the second (its users saw all gradients become zero on sm_120): there, and for
16-bit draws everywhere, the integer arithmetic of ``codecs.py`` stays. The second adds its random bits to the bits that
are cut off and rounds away from zero on a carry: given 255 - draw it rounds so iff draw < floor(frac * 2^8), which is
the definition. Both give a negative that rounds to zero, and -0.0, code 8, saturate at 6, and make a finite number of
NaN: hence ``keep``.

Source: PTX ISA, "cvt". Its text does not say which of the 32 random bits belong to which of the four elements; here it
is byte i for code i, and ``nvfp4-train audit --device`` compares with the definition on the GPU.
"""

import triton
import triton.language as tl
from nvfp4_kernels.triton import codecs, packed

INTEGER, NEAREST, STOCHASTIC = 0, 1, 2  # what a kernel's constant CONVERT says: no instruction, the first, both
NAMES = ("integer arithmetic", "cvt.rn", "cvt.rn and cvt.rs")


def conversion(target: str) -> int:
    """The best of INTEGER, NEAREST and STOCHASTIC on ``sm_...``."""
    return {"sm_100": STOCHASTIC, "sm_103": STOCHASTIC, "sm_120": NEAREST, "sm_121": NEAREST}.get(target, INTEGER)


def _nearest_asm() -> str:
    """Four bytes $0: low nibbles from the floats $1-$4, high from $5-$8, and-ed with $9."""
    lines = [".reg .b8 " + ", ".join(f"b{k}" for k in range(4)) + "; .reg .b32 all;"]
    lines += [f"cvt.rn.satfinite.e2m1x2.f32 b{k}, ${k + 5}, ${k + 1};" for k in range(4)]  # the high nibble comes first
    lines += ["mov.b32 all, {b0, b1, b2, b3};", "and.b32 $0, all, $9;"]
    return "{ " + " ".join(lines) + " }"


def _stochastic_asm() -> str:
    """As above. $9, $10: 16-bit numbers of the low nibbles, two a register; $11, $12: of the high ones; $13: the mask.

    Of each 16-bit number the high byte is taken, in the order of the codes.
    """
    lines = [".reg .b16 h0, h1; .reg .b32 r0, r1, all;"]
    for pair in range(2):
        lines.append(f"prmt.b32 r{pair}, ${9 + pair}, ${11 + pair}, 0x7351;")
        first = 1 + 2 * pair
        inputs = ", ".join(f"${n}" for n in (first + 5, first + 1, first + 4, first))  # from the highest nibble down
        lines.append(f"cvt.rs.satfinite.e2m1x4.f32 h{pair}, {{{inputs}}}, r{pair};")
    lines += ["mov.b32 all, {h0, h1};", "and.b32 $0, all, $13;"]
    return "{ " + " ".join(lines) + " }"


NEAREST_ASM = tl.constexpr(_nearest_asm())
STOCHASTIC_ASM = tl.constexpr(_stochastic_asm())


@triton.jit
def nearest_codes(low, high, keep, CONVERT: tl.constexpr):
    """uint8 of the nearest codes of float32 ``low`` and ``high`` (low and high nibble), and-ed with uint8 ``keep``."""
    if CONVERT == 0 or codecs.INTERPRETED:
        one = tl.full(low.shape, 1.0, tl.float32)
        return packed.nearest_codes(low, high, codecs.bfloat16_bits(low), codecs.bfloat16_bits(high), one, keep)
    else:
        return tl.inline_asm_elementwise(
            NEAREST_ASM, "=r,r,r,r,r,r,r,r,r,r", [low, high, keep], dtype=tl.uint8, is_pure=True, pack=4
        )


@triton.jit
def stochastic_codes(low, high, low_up16, high_up16, keep, EIGHT_BITS: tl.constexpr, CONVERT: tl.constexpr):
    """uint8 of the stochastic codes of float32 ``low`` and ``high``, and-ed with uint8 ``keep``.

    ``*_up16``: int16 bits of 2^16 - 1 - draw of each element.
    """
    if CONVERT < 2 or codecs.INTERPRETED or not EIGHT_BITS:
        low = codecs.e2m1_code(codecs.e2m1_stochastic(low, low_up16, EIGHT_BITS))
        high = codecs.e2m1_code(codecs.e2m1_stochastic(high, high_up16, EIGHT_BITS))
        return (low | (high << 4)).to(tl.uint8) & keep
    else:
        return tl.inline_asm_elementwise(
            STOCHASTIC_ASM, "=r,r,r,r,r,r,r,r,r,r,r,r,r,r", [low, high, low_up16, high_up16, keep],
            dtype=tl.uint8, is_pure=True, pack=4,
        )  # fmt: skip


@triton.jit
def convert_kernel(
    x_ptr, up16_ptr, out_ptr, size,
    ROUNDING: tl.constexpr, CONVERT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """uint8 ``out`` [size / 2] from float32 ``x`` [size]: one block of pairs a program. ``up16``: int16 [size].

    ROUNDING: 0 nearest, 1 stochastic, 2 stochastic8. For the audits, which hold it against the definition.
    """
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    low, high = tl.split(tl.reshape(tl.load(x_ptr + at, mask=inside, other=0.0), (BLOCK // 2, 2)))
    keep = tl.full((BLOCK // 2,), 0xFF, tl.uint8)
    if ROUNDING == 0:
        pair = nearest_codes(low, high, keep, CONVERT)
    else:
        up16 = tl.load(up16_ptr + at, mask=inside, other=0)
        low_up16, high_up16 = tl.split(tl.reshape(up16, (BLOCK // 2, 2)))
        pair = stochastic_codes(low, high, low_up16, high_up16, keep, ROUNDING == 2, CONVERT)
    pairs = tl.program_id(0) * (BLOCK // 2) + tl.arange(0, BLOCK // 2)
    tl.store(out_ptr + pairs, pair, mask=pairs < size // 2)
