"""MQA logits of ranges of keys, from operands that ``mqa_expand`` has widened for a matrix unit without FP4.

A program takes QB queries, all their heads side by side (QB * HP columns), and walks over tiles of BN keys. The queries
stay in shared memory; the copy engine brings the keys. E5M2 products run at twice the rate of bfloat16; Hopper adds
them with fewer fraction bits than float32 has, see experiments/2026-11-30_mqa_logits. Several small programs share a
multiprocessor, so that one's matrix products cover another's relu and sum.
"""

from typing import NamedTuple

import torch
from torch import Tensor

import triton
import triton.language as tl
from nvfp4_kernels.triton.mqa_expand import Expanded
from nvfp4_kernels.triton.mqa_tile import MINUS_INFINITY, global_scale, on_device, put, readable, weighted
from triton.tools.tensor_descriptor import TensorDescriptor


class Tile(NamedTuple):
    """``columns`` of (query, head) and ``keys`` of a tile."""

    columns: int = 256
    keys: int = 64
    warps: int = 4
    stages: int = 4
    programs: int = 264  # that run at a time: the keys are split so that these are evenly busy


E5M2 = Tile(stages=4)
BF16 = Tile(columns=128, stages=2)


@triton.jit
def query_range(ks_ptr, ke_ptr, m, M, N):
    """(first key, end) of queries ``m``, clamped to [0, N]; empty where there is no such query."""
    there = m < M
    start = tl.minimum(tl.maximum(tl.load(ks_ptr + m, mask=there, other=0), 0), N).to(tl.int32)
    end = tl.minimum(tl.maximum(tl.load(ke_ptr + m, mask=there, other=0), 0), N).to(tl.int32)
    return start, end


@triton.jit
def fill(rows, first, last, start, end, m, M, N, BN: tl.constexpr, BF16_BITS: tl.constexpr):
    """-inf outside [start, end) in the tiles from ``first`` to ``last``."""
    for tile in range(first, last):
        key = tile * BN + tl.arange(0, BN)
        outside = (key[:, None] < start[None, :]) | (key[:, None] >= end[None, :])
        nothing = tl.full((BN, rows.shape[0]), MINUS_INFINITY, tl.float32)
        put(rows[None, :] + key[:, None], nothing, outside & (m < M)[None, :] & (key < N)[:, None], BF16_BITS)


@triton.jit
def logits_kernel(
    q_desc, k_desc, weights_ptr, q_amax_ptr, k_amax_ptr, flag_ptr, ks_ptr, ke_ptr, out_ptr,
    M, N, width, groups, tiles_each,
    D: tl.constexpr, HP: tl.constexpr, QB: tl.constexpr, BN: tl.constexpr, COMPRESSED: tl.constexpr,
    CLEAN: tl.constexpr, BF16_BITS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Programs of a group of QB queries and a part of the keys each. Does nothing if the flag is up."""
    if flag_ptr is not None:
        if tl.load(flag_ptr) != 0:
            return
    group = groups - 1 - tl.program_id(0) % groups  # the last queries see the most keys: first
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
    n = tl.arange(0, BN)
    if first < last:
        queries = readable(q_desc.load([group * (QB * HP), 0])).T  # [D, QB * HP]
        column = group.to(tl.int64) * (QB * HP) + tl.arange(0, QB * HP)
        weights = tl.load(weights_ptr + column, mask=column // HP < M, other=0.0)
        scale = global_scale(q_amax_ptr, k_amax_ptr)
        for tile in tl.range(first, last, num_stages=STAGES):
            key = tile * BN + n
            keys = readable(k_desc.load([tile * BN, 0]))
            value = weighted(tl.dot(keys, queries), weights, BN, QB, HP)
            if q_amax_ptr is not None:
                value = value * scale
            if COMPRESSED:
                inside = (key[:, None] >= start[None, :]) & (key[:, None] < end[None, :])
                put(rows[None, :] + (key[:, None] - start[None, :]), value, inside, BF16_BITS)
            else:
                put(rows[None, :] + key[:, None], value, (m < M)[None, :] & (key < N)[:, None], BF16_BITS)
    if CLEAN and not COMPRESSED:
        # The loop above stores whole tiles, which costs it no comparisons; what lies outside is known here.
        tl.debug_barrier()
        here = m < M
        whole_first = tl.cdiv(tl.max(tl.where(here, start, 0), 0), BN)
        least_end = tl.min(tl.where(here, end, N), 0)
        whole_last = tl.where(least_end >= N, tl.cdiv(N, BN), least_end // BN)
        whole_first = tl.minimum(tl.maximum(whole_first, part_first), part_last)
        whole_last = tl.maximum(tl.minimum(whole_last, part_last), whole_first)
        fill(rows, part_first, whole_first, start, end, m, M, N, BN, BF16_BITS)
        fill(rows, whole_last, part_last, start, end, m, M, N, BN, BF16_BITS)


def logits(
    x: Expanded, q_amax: Tensor | None, k_amax: Tensor | None, ks: Tensor, ke: Tensor, out: Tensor, *,
    compressed: bool, clean: bool, tile: Tile | None = None,
) -> None:  # fmt: skip
    """Writes ``out [M, width]``; nothing if the flag is up. Compressed columns outside a range are not written."""
    (m, width), (n, head_dim) = out.shape, x.keys.shape
    tile = tile or (E5M2 if x.keys.dtype == torch.float8_e5m2 else BF16)
    block = max(tile.columns // x.heads, 1)
    groups, tiles = triton.cdiv(m, block), triton.cdiv(n, tile.keys)
    each = split(groups, tiles, tile.programs)
    as_bf16 = out.dtype == torch.bfloat16
    with on_device(out):
        logits_kernel[(groups * triton.cdiv(tiles, each),)](
            TensorDescriptor(x.queries, list(x.queries.shape), [head_dim, 1], [block * x.heads, head_dim]),
            TensorDescriptor(x.keys, [n, head_dim], [head_dim, 1], [tile.keys, head_dim]),
            x.weights, q_amax, k_amax, x.flag, ks, ke, out.view(torch.int16) if as_bf16 else out,
            m, n, width, groups, each,
            D=head_dim, HP=x.heads, QB=block, BN=tile.keys, COMPRESSED=compressed, CLEAN=clean, BF16_BITS=as_bf16,
            STAGES=tile.stages, num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=True,
        )  # fmt: skip


def split(groups: int, tiles: int, programs: int) -> int:
    """Tiles of keys for each program: the smallest number of parts that keeps ``programs`` busy to the end."""
    best, least = tiles, None
    for parts in range(1, min(tiles, 32) + 1):
        each = triton.cdiv(tiles, parts)
        # a program has a start-up of about two tiles
        time = triton.cdiv(groups * triton.cdiv(tiles, each), programs) * (each + 2)
        if least is None or time < 0.98 * least:
            best, least = each, time
    return best
