"""Philox4x32-7 on tiles: the random number of an element depends on its place in the tensor, not on the tile.

One call gives eight 16-bit numbers to eight neighbours along the tensor's rows. Where rows have no multiple of eight
elements the eight straddle rows, and each element makes a call of its own: right, but eight times the work.
"""

import triton
import triton.language as tl


@triton.jit
def philox4x32_7(c0, c1, k0, k1):
    """Four uint32 words for counter (c0, c1, 0, 0) and key (k0, k1), all uint32."""
    c2 = c0 * 0
    c3 = c2
    for _ in tl.static_range(7):
        # one widening multiplication gives both halves
        p0 = c0.to(tl.uint64) * 0xD2511F53
        p1 = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (p1 >> 32).to(tl.uint32) ^ c1 ^ k0
        c2 = (p0 >> 32).to(tl.uint32) ^ c3 ^ k1
        c1 = p1.to(tl.uint32)
        c3 = p0.to(tl.uint32)
        k0 = (k0.to(tl.uint64) + 0x9E3779B9).to(tl.uint32)
        k1 = (k1.to(tl.uint64) + 0xBB67AE85).to(tl.uint32)
    return c0, c1, c2, c3


@triton.jit
def inverted_draws(seed, stream, row, column, width, BI: tl.constexpr, BJ: tl.constexpr, BY_EIGHTS: tl.constexpr):
    """int16 bits [BI, BJ] of 2^16 - 1 - r, r being the draws of the tile at (row int64, column)."""
    k0 = seed.to(tl.uint32)
    k1 = stream.to(tl.uint32)
    rows = (row + tl.arange(0, BI))[:, None]
    if BY_EIGHTS:
        call = rows * (width // 8) + (column // 8 + tl.arange(0, BJ // 8))[None, :]
        w0, w1, w2, w3 = philox4x32_7(call.to(tl.uint32), (call >> 32).to(tl.uint32), k0, k1)
        words = ~tl.join(tl.join(w0, w2), tl.join(w1, w3))  # [BI, BJ / 8, 2, 2]
        return tl.reshape(tl.join(words.to(tl.int16), (words >> 16).to(tl.int16)), (BI, BJ))
    else:
        element = rows * width + (column + tl.arange(0, BJ))[None, :]
        call = element >> 3
        lane = (element & 7).to(tl.int32)
        w0, w1, w2, w3 = philox4x32_7(call.to(tl.uint32), (call >> 32).to(tl.uint32), k0, k1)
        word = ~tl.where(lane < 4, tl.where(lane < 2, w0, w1), tl.where(lane < 6, w2, w3))
        return tl.where((lane & 1) == 0, word, word >> 16).to(tl.int16)
