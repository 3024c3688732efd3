"""The kernel of ``mqa_direct`` for Hopper, in Gluon: MXFP4 keys that are read once, decoded in registers, in E5M2.

A warp group takes tiles of 64 keys for at most 128 columns of (query, head). A thread decodes its own part of the
operand: 8 words of codes, a dozen instructions each. Several programs share a multiprocessor, so that one's products
cover another's decoding and sums. Instructions, not memory, are what this kernel waits for: see
experiments/2026-11-30_mqa_logits.
"""

from typing import NamedTuple

from torch import Tensor

import triton
import triton.language as tl
from nvfp4_kernels.triton.mqa_codes import E5M2_ASM
from nvfp4_kernels.triton.mqa_tile import on_device
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait


class Tile(NamedTuple):
    """Turns of ``unroll`` tiles in flight; relu by addition (or by maximum); ``programs`` to split the keys into."""

    stages: int = 4
    unroll: int = 2
    fadd: bool = True
    programs: int = 132 * 32


BN = gl.constexpr(64)  # keys of a tile
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # its name until Triton 3.6
load_tile = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared
NAN_TOO = gl.constexpr(tl.PropagateNan.ALL)
ASM = gl.constexpr(E5M2_ASM.value)
IN_RANGE = gl.constexpr(0x70707070)


@gluon.jit
def _pages(tile, most, table_ptr, PAGE: gl.constexpr, WIDE: gl.constexpr, LINE: gl.constexpr):
    """The pages of a tile's keys, for both copies; one number where a tile lies in one page. Read ahead of use."""
    if PAGE == 0:
        return 0, 0
    elif PAGE % BN == 0:
        page = gl.load(table_ptr + tile * BN // PAGE, mask=tile * BN < most, other=0)
        return page, page
    else:
        row = tile * BN + gl.arange(0, BN, layout=gl.SliceLayout(1, WIDE))
        line = tile * BN + gl.arange(0, BN, layout=LINE)
        rows = gl.load(table_ptr + row // PAGE, mask=row < most, other=0)
        return rows, gl.load(table_ptr + line // PAGE, mask=line < most, other=0)


@gluon.jit
def _fetch(
    tile, first, most, codes_ptr, scales_ptr, pages, page_bytes, codes_at, scales_at,
    D: gl.constexpr, PAGE: gl.constexpr, WIDE: gl.constexpr, LINE: gl.constexpr,
):  # fmt: skip
    """Starts the copy of a tile's codes [BN, D / 2] and scale words [BN]; none of a key at or beyond ``most``."""
    row = first + tile * BN + gl.arange(0, BN, layout=gl.SliceLayout(1, WIDE))
    line = first + tile * BN + gl.arange(0, BN, layout=LINE)
    byte = gl.arange(0, D // 2, layout=gl.SliceLayout(0, WIDE))
    if PAGE > 0:
        codes = codes_ptr + pages[0].to(gl.int64) * page_bytes + (row % PAGE) * (D // 2)
        scales = codes_ptr + pages[1].to(gl.int64) * page_bytes + (PAGE * (D // 2) + (line % PAGE) * 4)
        scales = scales.to(gl.pointer_type(gl.int32))
    else:
        codes = codes_ptr + row.to(gl.int64) * (D // 2)
        scales = scales_ptr.to(gl.pointer_type(gl.int32)) + line
    load_tile(codes_at, codes[:, None] + byte[None, :], mask=(row < most)[:, None])
    load_tile(scales_at, scales, mask=line < most)


@gluon.jit
def _operands(codes_at, word, D: gl.constexpr, DOT: gl.constexpr):
    """E5M2 (low, high) operands [BN, D / 2] in registers; ``word`` [BN] holds four scale bytes."""
    pair = codes_at.load(DOT)
    block = gl.arange(0, D // 2, layout=gl.SliceLayout(0, DOT)) // 16
    scale = (word[:, None] >> (8 * block)[None, :]) & 255
    low, high = gl.inline_asm_elementwise(
        ASM, "=r,=r,r,r,r,r,r", [pair, scale], dtype=(gl.uint8, gl.uint8), is_pure=True, pack=4
    )
    return low.to(gl.float8e5, bitcast=True), high.to(gl.float8e5, bitcast=True)


@gluon.jit
def _sum(scores, weights, QB: gl.constexpr, HP: gl.constexpr, FADD: gl.constexpr):
    if FADD:
        x = scores + gl.abs(scores)  # twice the relu
    else:
        x = gl.maximum(scores, 0.0, propagate_nan=NAN_TOO)
    return gl.sum(gl.reshape(x * weights[None, :], (BN, QB, HP)), 2)


@gluon.jit
def hopper_direct_kernel(
    q_ptr, weights_ptr, codes_ptr, scales_ptr, flag_ptr, ks_ptr, ke_ptr, table_ptr, out_ptr,
    M, N, width, blocks, tiles_each, page_bytes, table_stride,
    HP: gl.constexpr, D: gl.constexpr, EACH: gl.constexpr, QB: gl.constexpr, PAGE: gl.constexpr, STAGES: gl.constexpr,
    CLEAN: gl.constexpr, FADD: gl.constexpr, UNROLL: gl.constexpr,
):  # fmt: skip
    """Programs of QB queries of a sequence (PAGE > 0), or one query (compressed columns), and a part of the keys."""
    COLUMNS: gl.constexpr = QB * HP
    ACC: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, COLUMNS, 32])
    DOT: gl.constexpr = gl.DotOperandLayout(0, ACC, 4)
    WIDE: gl.constexpr = gl.BlockedLayout([1, 16], [8 * 64 // (D // 2), D // 2 // 16], [4, 1], [1, 0])
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    CODES: gl.constexpr = gl.SwizzledSharedLayout(16, 2, 4, [1, 0])
    LINES: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    QUERIES: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=D // 2, element_bitwidth=8, rank=2)
    FILL: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [4, 1], [0, 1])
    if gl.load(flag_ptr) == 0:
        block = gl.program_id(0) % blocks
        part = gl.program_id(0) // blocks
        of_sequence: gl.constexpr = (EACH + QB - 1) // QB
        sequence = block // of_sequence
        inner = (block % of_sequence) * QB + gl.arange(0, QB, layout=gl.SliceLayout(0, FILL))
        m = sequence * EACH + inner
        here = inner < EACH
        end = gl.minimum(gl.maximum(gl.load(ke_ptr + m, mask=here, other=0), 0), N).to(gl.int32)
        if PAGE > 0:
            base = 0
            most = gl.max(end, 0)
        else:
            start = gl.minimum(gl.maximum(gl.load(ks_ptr + m, mask=here, other=0), 0), N).to(gl.int32)
            base = gl.max(start, 0)
            most = gl.minimum(gl.max(end, 0).to(gl.int64), base.to(gl.int64) + width).to(gl.int32)
        count = gl.maximum(most - base, 0)  # of keys
        part_first = part * tiles_each
        part_last = gl.minimum(part_first + tiles_each, gl.cdiv(width, BN))
        last = gl.minimum(gl.cdiv(count, BN), part_last)
        if part_first < last:
            table = table_ptr
            if PAGE > 0:
                table = table_ptr + sequence.to(gl.int64) * table_stride
            codes = gl.allocate_shared_memory(gl.uint8, [STAGES * UNROLL, BN, D // 2], CODES)
            words = gl.allocate_shared_memory(gl.int32, [STAGES * UNROLL, BN], LINES)
            for i in gl.static_range((STAGES - 1) * UNROLL):
                pages = _pages(part_first + i, most, table, PAGE, WIDE, LINE)
                _fetch(
                    part_first + i, base, most, codes_ptr, scales_ptr, pages, page_bytes, codes.index(i),
                    words.index(i), D, PAGE, WIDE, LINE,
                )  # fmt: skip
                if i % UNROLL == UNROLL - 1:
                    async_copy.commit_group()
            pages = ()
            for u in gl.static_range(UNROLL):
                pages = pages + (_pages(part_first + (STAGES - 1) * UNROLL + u, most, table, PAGE, WIDE, LINE),)
            # the queries: [COLUMNS, D / 2] twice
            column = gl.arange(0, COLUMNS, layout=gl.SliceLayout(1, WIDE))
            byte = gl.arange(0, D // 2, layout=gl.SliceLayout(0, WIDE))
            at = (sequence * EACH + (block % of_sequence) * QB).to(gl.int64) * HP + column
            keep = (block % of_sequence) * QB + column // HP < EACH
            pointers = q_ptr + at[:, None] * D + byte[None, :]
            even = gl.load(pointers, mask=keep[:, None], other=0.0)
            odd = gl.load(pointers + D // 2, mask=keep[:, None], other=0.0)
            q_low = gl.allocate_shared_memory(gl.float8e5, [COLUMNS, D // 2], QUERIES, even)
            q_high = gl.allocate_shared_memory(gl.float8e5, [COLUMNS, D // 2], QUERIES, odd)
            fence_async_shared()
            q_low = q_low.permute((1, 0))
            q_high = q_high.permute((1, 0))
            column = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, ACC))
            at = (sequence * EACH + (block % of_sequence) * QB).to(gl.int64) * HP + column
            keep = (block % of_sequence) * QB + column // HP < EACH
            factor: gl.constexpr = 0.5 if FADD else 1.0
            weights = gl.load(weights_ptr + at, mask=keep, other=0.0) * factor
            zero = gl.zeros((BN, COLUMNS), gl.float32, layout=ACC)
            line = gl.arange(0, BN, layout=LINE)
            strange = gl.zeros((BN,), gl.int32, layout=LINE)
            slot = 0
            for tile in range(part_first, last, UNROLL):
                async_copy.wait_group(STAGES - 2)
                barrier()
                ahead = gl.where(slot == 0, (STAGES - 1) * UNROLL, slot - UNROLL)
                following = ()
                for u in gl.static_range(UNROLL):
                    new = tile + (STAGES - 1) * UNROLL + u
                    _fetch(
                        new, base, most, codes_ptr, scales_ptr, pages[u], page_bytes, codes.index(ahead + u),
                        words.index(ahead + u), D, PAGE, WIDE, LINE,
                    )  # fmt: skip
                    following = following + (_pages(new + UNROLL, most, table, PAGE, WIDE, LINE),)
                async_copy.commit_group()
                pages = following
                for u in gl.static_range(UNROLL):
                    word = gl.where((tile + u) * BN + line < count, words.index(slot + u).load(LINE), IN_RANGE)
                    # a byte is in range if it is 0x70 to 0x8A: its top bit says which of two sums must not carry
                    rest = word & 0x7F7F7F7F
                    strange |= (word & (rest + 0x75757575)) | (~word & ~(rest + 0x10101010))
                    word = words.index(slot + u).load(gl.SliceLayout(1, DOT))
                    low, high = _operands(codes.index(slot + u), word, D, DOT)
                    acc = warpgroup_mma(low, q_low, zero, use_acc=False, is_async=True)
                    acc = warpgroup_mma(high, q_high, acc, is_async=True)
                    scores = warpgroup_mma_wait(0, deps=[acc])
                    _finish(
                        scores, weights, tile + u, last, count, m, here, end, out_ptr, width,
                        QB, HP, PAGE, CLEAN, FADD,
                    )  # fmt: skip
                slot = gl.where(slot == (STAGES - 1) * UNROLL, 0, slot + UNROLL)
            async_copy.wait_group(0)
            found = gl.max((((strange >> 7) & 0x01010101) != 0).to(gl.int32), 0)
            if found > 0:
                gl.store(flag_ptr, 1)
        if CLEAN and PAGE > 0:
            n = gl.arange(0, BN, layout=gl.SliceLayout(1, FILL))
            rows = out_ptr + m.to(gl.int64) * width
            for tile in range(gl.maximum(last, part_first), part_last):
                column = tile * BN + n
                mask = (column < width)[:, None] & here[None, :]
                nothing = gl.full((BN, QB), float("-inf"), out_ptr.dtype.element_ty, layout=FILL)
                gl.store(rows[None, :] + column[:, None], nothing, mask=mask)


@gluon.jit
def _finish(
    scores, weights, tile, last, count, m, here, end, out_ptr, width,
    QB: gl.constexpr, HP: gl.constexpr, PAGE: gl.constexpr, CLEAN: gl.constexpr, FADD: gl.constexpr,
):  # fmt: skip
    """Sums a tile's scores and stores the logits of its keys, of which there are ``count``."""
    value = _sum(scores, weights, QB, HP, FADD)  # [BN, QB]
    LAYOUT: gl.constexpr = value.type.layout
    column = tile * BN + gl.arange(0, BN, layout=gl.SliceLayout(1, LAYOUT))
    query = gl.convert_layout(m, gl.SliceLayout(0, LAYOUT))
    there = gl.convert_layout(here, gl.SliceLayout(0, LAYOUT))[None, :]
    if PAGE > 0:
        limit = gl.where(tile < last, width, 0)
        mask = (column < limit)[:, None] & there
        if CLEAN:
            seen = gl.convert_layout(end, gl.SliceLayout(0, LAYOUT))[None, :]
            value = gl.where(column[:, None] < seen, value, float("-inf"))
    else:
        limit = gl.where(tile < last, count, 0)
        mask = (column < limit)[:, None] & there
    pointers = (out_ptr + query.to(gl.int64) * width)[None, :] + column[:, None]
    gl.store(pointers, value.to(out_ptr.dtype.element_ty), mask=mask)


def direct(
    queries: Tensor, weights: Tensor, codes: Tensor, scales: Tensor | None, flag: Tensor, out: Tensor, *, heads: int,
    limit: int, ranges: tuple[Tensor | None, Tensor], table: Tensor | None = None, sequences: int = 0,
    clean: bool = True, tile: Tile | None = None,
) -> None:  # fmt: skip
    """Writes ``out``; raises the flag where E5M2 does not hold a key. D is 128; else as in ``mqa_direct.direct``."""
    (m, width), head_dim = out.shape, queries.shape[1]
    tile = tile or Tile()
    paged = table is not None
    each = m // sequences if paged else 1
    block = min(triton.next_power_of_2(each), max(128 // heads, 1))
    blocks = (sequences if paged else m) * triton.cdiv(each, block)
    tiles = triton.cdiv(width, 64)
    tiles_each = triton.cdiv(tiles, min(max(tile.programs // blocks, 1), max(tiles // 8, 1)))
    with on_device(out):
        hopper_direct_kernel[(blocks * triton.cdiv(tiles, tiles_each),)](
            queries, weights, codes, scales, flag, *ranges, table, out, m, limit, width, blocks, tiles_each,
            codes.stride(0) if paged else 0, table.stride(0) if paged else 0,
            HP=heads, D=head_dim, EACH=each, QB=block, PAGE=codes.shape[1] if paged else 0, STAGES=tile.stages,
            CLEAN=clean, FADD=tile.fadd, UNROLL=tile.unroll, num_warps=4, enable_fp_fusion=True,
        )  # fmt: skip
