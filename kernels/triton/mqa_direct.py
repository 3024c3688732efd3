"""MQA logits straight from packed keys, decoded in registers: for keys that are read once or a few times.

Three ways to find the keys of a query: a range of rows, pages of a cache, a list of indices. A tile of keys has its
even elements in one operand and its odd ones in another, so no nibble changes its place; queries are laid out alike.

With ``E5M2`` (the interpreter's twin of ``mqa_hopper_direct``) a key whose exponents do not fit (``mqa_codes``) raises
the flag, and the kernel that runs next in the stream, in bfloat16, does the work again.
"""

from typing import NamedTuple

import torch
from torch import Tensor

import triton
import triton.language as tl
from nvfp4_kernels.triton import codecs
from nvfp4_kernels.triton.mqa_codes import HIGHEST, LOWEST, bf16_halves, by_byte, e5m2_halves
from nvfp4_kernels.triton.mqa_dense import query_range
from nvfp4_kernels.triton.mqa_tile import MINUS_INFINITY, global_scale, on_device, put, readable, weighted


class Tile(NamedTuple):
    """``keys`` of a tile, at most ``columns`` of (query, head); ``programs`` to split the keys into, at least."""

    keys: int = 64
    columns: int = 64
    warps: int = 4
    stages: int = 3
    programs: int = 132 * 32


NARROW, WIDE = Tile(), Tile()  # in E5M2 and in bfloat16
# Where the kernel runs only if another could not: programs that leave at once cost a little, too.
SECOND = Tile(columns=128, programs=132 * 8)

RANGE, PAGED, LISTED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)

@triton.jit
def _halves(pair, scale, BLOCK: tl.constexpr, E5M2: tl.constexpr, BN: tl.constexpr, D: tl.constexpr):
    """(even, odd) operands [BN, D / 2] of packed ``pair`` uint8 [BN, D / 2] with int32 scale bytes [BN, D / BLOCK]."""
    if E5M2:
        low, high = e5m2_halves(pair, by_byte(scale, BLOCK, BN, D))
        if codecs.INTERPRETED:
            return readable(low), readable(high)
        else:
            return low.to(tl.float8e5, bitcast=True), high.to(tl.float8e5, bitcast=True)
    else:
        low, high = bf16_halves(pair, by_byte(codecs.scale_value(scale, BLOCK == 16), BLOCK, BN, D))
        if codecs.INTERPRETED:
            return readable(low), readable(high)
        else:
            return low.to(tl.bfloat16, bitcast=True), high.to(tl.bfloat16, bitcast=True)


@triton.jit
def packed_queries(
    codes_ptr, scales_ptr, weights_ptr, m, valid,
    H: tl.constexpr, HP: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, QB: tl.constexpr,
):  # fmt: skip
    """(even, odd) bfloat16 operands [QB * HP, D / 2] and float32 weights [QB * HP] of queries ``m`` [QB]."""
    head = tl.arange(0, HP)
    row = tl.reshape(m.to(tl.int64)[:, None] * H + head[None, :], (QB * HP,))
    keep = tl.reshape(valid[:, None] & (head < H)[None, :], (QB * HP,))
    byte, block = tl.arange(0, D // 2), tl.arange(0, D // BLOCK)
    pair = tl.load(codes_ptr + row[:, None] * (D // 2) + byte[None, :], mask=keep[:, None], other=0)
    scale = tl.load(scales_ptr + row[:, None] * (D // BLOCK) + block[None, :], mask=keep[:, None], other=56)
    low, high = _halves(pair, scale.to(tl.int32), BLOCK, False, QB * HP, D)
    return low, high, tl.load(weights_ptr + row, mask=keep, other=0.0)


@triton.jit
def key_rows(
    key, there, codes_ptr, scales_ptr, table_ptr, page_bytes,
    D: tl.constexpr, SCALES: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Pointers to codes and scale bytes of keys [BN]: rows of two tensors, or (PAGE > 0) slots of pages."""
    if PAGE > 0:
        page = tl.load(table_ptr + key // PAGE, mask=there, other=0).to(tl.int64) * page_bytes
        slot = key % PAGE
        return codes_ptr + page + slot * (D // 2), codes_ptr + page + PAGE * (D // 2) + slot * SCALES
    else:
        row = key.to(tl.int64)
        return codes_ptr + row * (D // 2), scales_ptr + row * SCALES


@triton.jit
def load_keys(codes, scales, there, D: tl.constexpr, BLOCK: tl.constexpr):
    """(uint8 [BN, D / 2], int32 [BN, D / BLOCK]) at pointers [BN]; what is not there is zero and never read."""
    pair = tl.load(codes[:, None] + tl.arange(0, D // 2)[None, :], mask=there[:, None], other=0)
    block = tl.arange(0, D // BLOCK)
    if D // BLOCK == 4:  # one word, which the copy engine of a thread can bring
        word = tl.load(scales.to(tl.pointer_type(tl.int32)), mask=there, other=0x78787878)
        scale = (word[:, None] >> (8 * block)[None, :]) & 255
    else:
        scale = tl.load(scales[:, None] + block[None, :], mask=there[:, None], other=0x78).to(tl.int32)
    return pair, scale


@triton.jit
def direct_kernel(
    q_ptr, q_scales_ptr, weights_ptr, codes_ptr, scales_ptr, q_amax_ptr, k_amax_ptr, flag_ptr, ks_ptr, ke_ptr,
    table_ptr, out_ptr, M, N, width, blocks, tiles_each, page_bytes, table_stride,
    H: tl.constexpr, HP: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, SCALES: tl.constexpr,
    EACH: tl.constexpr, QB: tl.constexpr, BN: tl.constexpr, MODE: tl.constexpr, PAGE: tl.constexpr,
    E5M2: tl.constexpr, COMPRESSED: tl.constexpr, CLEAN: tl.constexpr, BF16_BITS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Programs of QB queries (of one sequence, which has EACH of them) and a part of the columns each.

    With ``E5M2`` q_ptr and weights_ptr are those of ``expand``; else the packed queries, and the program runs only if
    there is no flag or it is up.
    """
    if flag_ptr is not None:
        if (tl.load(flag_ptr) != 0) == E5M2:
            return
    block = tl.program_id(0) % blocks
    part = tl.program_id(0) // blocks
    of_sequence: tl.constexpr = (EACH + QB - 1) // QB
    sequence = block // of_sequence
    if MODE == PAGED:
        inner = (block % of_sequence) * QB + tl.arange(0, QB)
        m = sequence * EACH + inner
        valid = inner < EACH
        end = tl.load(ke_ptr + m, mask=valid, other=0)
        end = tl.minimum(tl.maximum(end, 0), N).to(tl.int32)
        start = tl.zeros_like(end)
    else:
        m = block * QB + tl.arange(0, QB)
        valid = m < M
        if MODE == LISTED:
            start, end = tl.zeros((QB,), tl.int32), tl.zeros((QB,), tl.int32) + width
        else:
            start, end = query_range(ks_ptr, ke_ptr, m, M, N)
    if COMPRESSED:
        end = tl.minimum(end, (start.to(tl.int64) + width).to(tl.int32))
    empty = end <= start
    least = tl.min(tl.where(empty, N, start), 0) if MODE == RANGE else 0
    most = tl.max(tl.where(empty, 0, end), 0)
    base = tl.minimum(least, most) if COMPRESSED else 0
    part_first = part * tiles_each
    part_last = part_first + tiles_each
    if not COMPRESSED:
        part_last = tl.minimum(part_last, tl.cdiv(width, BN))
    first = tl.minimum(tl.maximum((least - base) // BN, part_first), part_last)
    last = tl.maximum(tl.minimum(tl.cdiv(most - base, BN), part_last), first)
    rows = out_ptr + m.to(tl.int64) * width
    n = tl.arange(0, BN)
    if CLEAN and not COMPRESSED:
        nothing = tl.full((BN, QB), MINUS_INFINITY, tl.float32)
        for tile in range(part_first, first):
            column = tile * BN + n
            put(rows[None, :] + column[:, None], nothing, valid[None, :] & (column < width)[:, None], BF16_BITS)
        for tile in range(last, part_last):
            column = tile * BN + n
            put(rows[None, :] + column[:, None], nothing, valid[None, :] & (column < width)[:, None], BF16_BITS)
    if first == last:
        return
    if E5M2:
        at = tl.reshape(m.to(tl.int64)[:, None] * HP + tl.arange(0, HP)[None, :], (QB * HP,))
        keep = tl.reshape(valid[:, None] & (tl.arange(0, HP) < HP)[None, :], (QB * HP,))
        pointers = q_ptr + at[:, None] * D + tl.arange(0, D // 2)[None, :]
        q_low = readable(tl.load(pointers, mask=keep[:, None], other=0.0))
        q_high = readable(tl.load(pointers + D // 2, mask=keep[:, None], other=0.0))
        weights = tl.load(weights_ptr + at, mask=keep, other=0.0)
    else:
        q_low, q_high, weights = packed_queries(q_ptr, q_scales_ptr, weights_ptr, m, valid, H, HP, D, BLOCK, QB)
    q_low, q_high = q_low.T, q_high.T
    scale = global_scale(q_amax_ptr, k_amax_ptr)
    table = table_ptr
    if MODE == PAGED:
        table += sequence.to(tl.int64) * table_stride
    if MODE == LISTED:
        table += block.to(tl.int64) * width
    strange = tl.zeros((BN, D // BLOCK), tl.int32)
    for tile in tl.range(first, last, num_stages=STAGES):
        column = base + tile * BN + n
        there = (column >= least) & (column < most)
        key = column
        if MODE == LISTED:
            key = tl.load(table + column, mask=there, other=-1)
            there = (key >= 0) & (key < N)
        codes, scales = key_rows(key, there, codes_ptr, scales_ptr, table, page_bytes, D, SCALES, PAGE)
        pair, k_scale = load_keys(codes, scales, there, D, BLOCK)
        if E5M2:
            strange |= ((k_scale < LOWEST) | (k_scale > HIGHEST)).to(tl.int32)
        low, high = _halves(pair, k_scale, BLOCK, E5M2, BN, D)
        scores = tl.dot(high, q_high, tl.dot(low, q_low))
        value = weighted(scores, weights, BN, QB, HP)
        if q_amax_ptr is not None:
            value = value * scale
        if MODE == LISTED:
            value = tl.where(there[:, None], value, MINUS_INFINITY)
            put(rows[None, :] + column[:, None], value, valid[None, :] & (column < width)[:, None], BF16_BITS)
        else:
            inside = (column[:, None] >= start[None, :]) & (column[:, None] < end[None, :])
            if COMPRESSED:
                put(rows[None, :] + (column[:, None] - start[None, :]), value, inside, BF16_BITS)
            else:
                if CLEAN:
                    value = tl.where(inside, value, MINUS_INFINITY)
                put(rows[None, :] + column[:, None], value, valid[None, :] & (column < width)[:, None], BF16_BITS)
    if E5M2:
        if tl.max(tl.max(strange, 1), 0) > 0:
            tl.store(flag_ptr, 1)


def direct(
    q: tuple[Tensor, Tensor | None, Tensor], keys: tuple[Tensor, Tensor | None], amax: tuple, flag: Tensor | None,
    out: Tensor, *, block: int, limit: int, heads: tuple[int, int], ranges: tuple = (None, None),
    table: Tensor | None = None, mode: tl.constexpr = RANGE, sequences: int = 0, compressed: bool = False,
    clean: bool = True, tile: Tile | None = None,
) -> None:  # fmt: skip
    """Writes ``out [M, width]``.

    Args:
        q: packed (codes [M * H, D / 2], scale bytes, weights [M, H]); or (E5M2 [M * HP, D], None, weights) of
            ``expand``, with a flag that it may raise. Packed with a flag: runs only if that is up.
        keys: (codes [N, D / 2], scale bytes); for PAGED (the cache, None).
        amax: of q and of the keys, or (None, None).
        block: elements to a scale. ``limit``: N, for PAGED the longest context. ``heads``: (H, HP).
        ranges: (ks, ke) [M]; (None, limits [B, T]) for PAGED.
        table: block table [B, P], or indices [M, width] for LISTED.
        compressed: column j is key ks + j; columns outside a range are not written.
    """
    m, width = out.shape
    e5m2 = q[1] is None
    head_dim = q[0].shape[1] if e5m2 else 2 * q[0].shape[1]
    paged = mode.value == PAGED.value
    each = m // sequences if paged else 1
    # compressed rows of their own keys: the union of several queries' ranges would be mostly empty
    tile = tile or (NARROW if e5m2 else WIDE)
    most = max(tile.columns // heads[1], 1)
    alone = compressed or mode.value == LISTED.value
    queries = min(triton.next_power_of_2(each), most) if paged else 1 if alone else most
    blocks = sequences * triton.cdiv(each, queries) if paged else triton.cdiv(m, queries)
    tiles = triton.cdiv(width, tile.keys)
    parts = min(max(tile.programs // max(blocks, 1), 1), max(tiles // 4, 1))
    tiles_each = triton.cdiv(tiles, parts)
    page = keys[0].shape[1] if paged else 0
    scales = keys[0].shape[3] - head_dim // 2 if paged else head_dim // block
    as_bf16 = out.dtype == torch.bfloat16
    with on_device(out):
        direct_kernel[(blocks * triton.cdiv(tiles, tiles_each),)](
            *q[:2], q[2], *keys, *amax, flag, *ranges, table, out.view(torch.int16) if as_bf16 else out,
            m, limit, width, blocks, tiles_each, keys[0].stride(0) if paged else 0, table.stride(0) if paged else 0,
            H=heads[0], HP=heads[1], D=head_dim, BLOCK=block, SCALES=scales, EACH=each, QB=queries, BN=tile.keys,
            MODE=mode.value, PAGE=page, E5M2=e5m2, COMPRESSED=compressed, CLEAN=clean, BF16_BITS=as_bf16,
            STAGES=tile.stages, num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=True,
        )  # fmt: skip
