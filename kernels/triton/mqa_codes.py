"""E2M1 bytes to operands of a matrix unit: E5M2 (exact within a window of exponents) or bfloat16 (always exact).

A value of E2M1 times 2^k is exact in E5M2 as long as the exponent stays a normal one, for 27 values of k. A byte holds
two codes; the low nibbles make one operand and the high ones another, so that no code changes its place: a dot product
does not mind in which order its terms are.

The E5M2 form takes four bytes at a time with one scale for all four: they must be neighbours in a row, in one register.
Hopper's operands have them so, and so has any tile that is loaded 4 bytes at a time. Other GPUs take bfloat16.
"""

import triton
import triton.language as tl
from nvfp4_kernels.triton import codecs

LOWEST = tl.constexpr(112)  # scale bytes of keys that E5M2 holds: 2^-15 (DeepSeek's rule goes no lower) to 2^11
HIGHEST = tl.constexpr(138)
LIFT = tl.constexpr(4.0)  # the E5M2 operand of a scale byte is 2^(byte - 125) times the E2M1 value, 4 times the key


def _e5m2_asm() -> str:
    """$0, $1: E5M2 bytes of the low and high nibbles of the four bytes $2; $3 (of $3-$6): their block's scale byte.

    A table of the eight magnitudes, 0 to 6 times 2^-13, with the scale added to every exponent but that of 0, is made
    for each word; two byte permutations look four nibbles up each, and two more put low and high ones together.
    """
    lines = [".reg .b32 a, b, m, n, l, h, s;"]
    for table, ones, magnitudes in (("a", 0x04040400, 0x0A080400), ("b", 0x04040404, 0x12100E0C)):
        lines.append(f"mad.lo.u32 {table}, $3, {ones}, {(magnitudes - LOWEST.value * ones) % 2**32};")
    lines += ["and.b32 m, $2, 0x77777777;", "shr.u32 n, m, 16;", "prmt.b32 m, a, b, m;", "prmt.b32 n, a, b, n;"]
    lines += ["prmt.b32 l, m, n, 0x6420;", "prmt.b32 h, m, n, 0x7531;", "shl.b32 s, $2, 4;"]
    for output, value, sign in (("$0", "l", "s"), ("$1", "h", "$2")):
        lines.append(f"lop3.b32 {output}, {value}, {sign}, 0x80808080, 0xD8;")  # sign where the mask is set
    return "{ " + " ".join(lines) + " }"


E5M2_ASM = tl.constexpr(_e5m2_asm())


@triton.jit
def by_byte(x, BLOCK: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr):
    """[ROWS, D / BLOCK] repeated for every byte of codes: [ROWS, D / 2]."""
    return tl.reshape(tl.broadcast_to(x[:, :, None], (ROWS, D // BLOCK, BLOCK // 2)), (ROWS, D // 2))


@triton.jit
def e5m2_halves(pair, byte):
    """uint8 bits of the E5M2 operands of the low and of the high nibbles of ``pair``, with int32 scale bytes ``byte``.

    What stands for scale bytes outside [LOWEST, HIGHEST] is finite and wrong.
    """
    if codecs.INTERPRETED:
        power = codecs.e8m0_value(tl.minimum(tl.maximum(byte, LOWEST), HIGHEST) + 2)
        pair = pair.to(tl.int32)
        return _e5m2_bits(codecs.e2m1_value(pair & 15) * power), _e5m2_bits(codecs.e2m1_value(pair >> 4) * power)
    else:
        return tl.inline_asm_elementwise(
            E5M2_ASM, "=r,=r,r,r,r,r,r", [pair, byte], dtype=(tl.uint8, tl.uint8), is_pure=True, pack=4
        )


@triton.jit
def _e5m2_bits(x):
    """Of float32 that is exact in E5M2: the upper half of a float16."""
    return (x.to(tl.float16).to(tl.int16, bitcast=True) >> 8).to(tl.uint8)


@triton.jit
def bf16_halves(pair, value):
    """int16 bits of the bfloat16 operands of the low and high nibbles of ``pair``, times float32 scales ``value``."""
    pair = pair.to(tl.int32)
    low, high = codecs.e2m1_value(pair & 15) * value, codecs.e2m1_value(pair >> 4) * value
    return codecs.bfloat16_bits(low), codecs.bfloat16_bits(high)
