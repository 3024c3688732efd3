"""The dense kernel of ``mqa_dense`` for FP4 matrix units (Blackwell): packed codes and scales go in as they are.

Nothing is widened and no exponent is too large. Compiled for sm_100 it is ``tcgen05.mma ... kind::mxf4 ... block32``
for MXFP4 and ``kind::mxf4nvf4 ... block16`` for NVFP4; no such GPU was there to run it on. 128 keys make a tile, since
fewer rows become a slower instruction without a word.
"""

import torch
from torch import Tensor

import triton
import triton.language as tl
from nvfp4_kernels.triton import codecs
from nvfp4_kernels.triton.mqa_codes import by_byte
from nvfp4_kernels.triton.mqa_dense import fill, query_range
from nvfp4_kernels.triton.mqa_tile import global_scale, on_device, put, weighted

KEYS, COLUMNS, WARPS, STAGES = 128, 128, 8, 3
# Triton 3.6 stops at FP4 sums that begin as a constant zero outside of a loop over K
OLD_TRITON = tl.constexpr(tuple(map(int, triton.__version__.split(".")[:2])) < (3, 8))


@triton.jit
def _decoded(codes, scales, BLOCK: tl.constexpr):
    """float32 [rows, D], even elements first: what the matrix unit multiplies, for the interpreter."""
    D: tl.constexpr = 2 * codes.shape[1]
    scale = by_byte(codecs.scale_value(scales.to(tl.int32), BLOCK == 16), BLOCK, codes.shape[0], D)
    low, high = codecs.e2m1_value(codes.to(tl.int32) & 15) * scale, codecs.e2m1_value(codes.to(tl.int32) >> 4) * scale
    return tl.reshape(tl.permute(tl.join(low, high), (0, 2, 1)), (codes.shape[0], D))


@triton.jit
def scaled_kernel(
    q_ptr, q_scales_ptr, weights_ptr, k_ptr, k_scales_ptr, q_amax_ptr, k_amax_ptr, ks_ptr, ke_ptr, out_ptr,
    M, N, width, groups, tiles_each,
    H: tl.constexpr, HP: tl.constexpr, QB: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
    COMPRESSED: tl.constexpr, CLEAN: tl.constexpr, BF16_BITS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Programs of a group of QB queries and a part of the keys each."""
    group = groups - 1 - tl.program_id(0) % groups
    part = tl.program_id(0) // groups
    m = group * QB + tl.arange(0, QB)
    start, end = query_range(ks_ptr, ke_ptr, m, M, N)
    if COMPRESSED:
        end = tl.minimum(end, (start.to(tl.int64) + width).to(tl.int32))
    empty = end <= start
    start, end = tl.where(empty, N, start), tl.where(empty, 0, end)
    part_first = part * tiles_each
    part_last = tl.minimum(part_first + tiles_each, tl.cdiv(N, BN))
    first = tl.minimum(tl.maximum(tl.min(start, 0) // BN, part_first), part_last)
    last = tl.maximum(tl.minimum(tl.cdiv(tl.max(end, 0), BN), part_last), first)
    rows = out_ptr + m.to(tl.int64) * width
    byte, block = tl.arange(0, D // 2), tl.arange(0, D // BLOCK)
    if first < last:
        head = tl.arange(0, HP)
        row = tl.reshape(m.to(tl.int64)[:, None] * H + head[None, :], (QB * HP,))
        keep = tl.reshape((m < M)[:, None] & (head < H)[None, :], (QB * HP,))
        queries = tl.load(q_ptr + row[:, None] * (D // 2) + byte[None, :], mask=keep[:, None], other=0)
        q_scales = tl.load(q_scales_ptr + row[:, None] * (D // BLOCK) + block[None, :], mask=keep[:, None], other=0.0)
        weights = tl.load(weights_ptr + row, mask=keep, other=0.0)
        scale = global_scale(q_amax_ptr, k_amax_ptr)
        for tile in tl.range(first, last, num_stages=STAGES):
            key = tile * BN + tl.arange(0, BN)
            at = key.to(tl.int64)
            there = (key < N)[:, None]
            keys = tl.load(k_ptr + at[:, None] * (D // 2) + byte[None, :], mask=there, other=0)
            k_scales = tl.load(k_scales_ptr + at[:, None] * (D // BLOCK) + block[None, :], mask=there, other=0.0)
            if codecs.INTERPRETED:
                left, right = _decoded(keys, k_scales, BLOCK), _decoded(queries, q_scales, BLOCK)
                scores = tl.dot(left, right.T, input_precision="ieee")
            elif OLD_TRITON:
                zero = tl.zeros((BN, QB * HP), tl.float32) + (tile < 0).to(tl.float32)
                scores = tl.dot_scaled(keys, k_scales, "e2m1", queries.T, q_scales, "e2m1", zero)
            else:
                scores = tl.dot_scaled(keys, k_scales, "e2m1", queries.T, q_scales, "e2m1")
            value = weighted(scores, weights, BN, QB, HP)
            if q_amax_ptr is not None:
                value = value * scale
            if COMPRESSED:
                inside = (key[:, None] >= start[None, :]) & (key[:, None] < end[None, :])
                put(rows[None, :] + (key[:, None] - start[None, :]), value, inside, BF16_BITS)
            else:
                put(rows[None, :] + key[:, None], value, (m < M)[None, :] & there, BF16_BITS)
    if CLEAN and not COMPRESSED:
        tl.debug_barrier()
        fill(rows, part_first, part_last, start, end, m, M, N, BN, BF16_BITS)


def logits(
    q_codes: Tensor, q_scales: Tensor, weights: Tensor, k_codes: Tensor, k_scales: Tensor, amax: tuple, ks: Tensor,
    ke: Tensor, out: Tensor, *, block: int, compressed: bool, clean: bool,
) -> None:  # fmt: skip
    """Writes ``out [M, width]``, from packed operands. Compressed columns outside a range are not written."""
    (m, heads), n, width = weights.shape, len(k_codes), out.shape[1]
    if block == 16 and not codecs.INTERPRETED.value:  # the type says what the scales are
        q_scales, k_scales = q_scales.view(torch.float8_e4m3fn), k_scales.view(torch.float8_e4m3fn)
    padded = triton.next_power_of_2(heads)
    queries = COLUMNS // padded
    groups, tiles = triton.cdiv(m, queries), triton.cdiv(n, KEYS)
    as_bf16 = out.dtype == torch.bfloat16
    each = max(1, min(tiles, 32))
    with on_device(out):
        scaled_kernel[(groups * triton.cdiv(tiles, each),)](
            q_codes, q_scales, weights, k_codes, k_scales, *amax, ks, ke, out.view(torch.int16) if as_bf16 else out,
            m, n, width, groups, each,
            H=heads, HP=padded, QB=queries, BN=KEYS, D=2 * k_codes.shape[1], BLOCK=block, COMPRESSED=compressed,
            CLEAN=clean, BF16_BITS=as_bf16, STAGES=STAGES, num_warps=WARPS, num_stages=STAGES, enable_fp_fusion=True,
        )  # fmt: skip
