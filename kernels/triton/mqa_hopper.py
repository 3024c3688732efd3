"""The dense kernel of ``mqa_dense`` for Hopper, written in Gluon: products of one half tile run while another is summed.

A warp group has 256 columns of (query, head) in two halves, with an accumulator each. It issues the products of one half
and, while the matrix unit works on them, takes relu, weight and sum of the other. Partial sums of four lanes meet in
shared memory, on the way to a layout whose stores are 128 bytes wide, instead of through shuffles.
"""

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from nvfp4_kernels.triton.mqa_expand import Expanded
from nvfp4_kernels.triton.mqa_tile import on_device


class Tile(NamedTuple):
    """Tiles of keys in flight; relu by addition (x + |x|, with half the weight) or by maximum."""

    stages: int = 4
    fadd: bool = True


barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # its name until Triton 3.6
load_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
NAN_TOO = gl.constexpr(tl.PropagateNan.ALL)
HALF = gl.constexpr(128)  # columns
BN = gl.constexpr(64)  # keys of a tile
GLOBAL = gl.constexpr(1 / 2688)


@gluon.jit
def _relu(x, FADD: gl.constexpr):
    if FADD:
        return x + gl.abs(x)  # twice the relu: the other pipe, and NaN stays
    else:
        return gl.maximum(x, 0.0, propagate_nan=NAN_TOO)


@gluon.jit
def _store(acc, weights, pointers, mask, QH: gl.constexpr, HP: gl.constexpr, LANES: gl.constexpr, FADD: gl.constexpr):
    """relu, weight, sum over heads of an accumulator [BN, HALF]; to ``pointers`` [BN, QH]."""
    x = _relu(acc, FADD) * weights[None, :]
    x = gl.reshape(x, (BN, QH, HP // 8, 4, 2))  # of a row, a lane has the pairs 8 i + 2 lane
    x = gl.sum(gl.sum(x, 2), 3)  # within a thread
    x = gl.sum(gl.convert_layout(x, LANES), 2)
    gl.store(pointers, x.to(pointers.dtype.element_ty), mask=mask)


@gluon.jit
def _fill(rows, first, last, start, end, there, N, WIDE: gl.constexpr):
    """-inf outside [start, end) in the tiles from ``first`` to ``last``."""
    n = gl.arange(0, BN, layout=gl.SliceLayout(1, WIDE))
    for tile in range(first, last):
        key = tile * BN + n
        outside = (key[:, None] < start[None, :]) | (key[:, None] >= end[None, :])
        mask = outside & there[None, :] & (key < N)[:, None]
        pointers = rows[None, :] + key[:, None]
        nothing = gl.full((BN, rows.shape[0]), float("-inf"), rows.dtype.element_ty, layout=WIDE)
        gl.store(pointers, nothing, mask=mask)


@gluon.jit
def hopper_kernel(
    q_desc, k_desc, weights_ptr, flag_ptr, ks_ptr, ke_ptr, out_ptr, M, N, groups, shares,
    D: gl.constexpr, HP: gl.constexpr, STAGES: gl.constexpr, CLEAN: gl.constexpr, FADD: gl.constexpr,
):  # fmt: skip
    """Persistent programs, each with two equal shares of all tiles, groups of queries one after the other: the n-th from
    the start and the n-th from the end, so that they are as busy as each other under a causal mask too. Does nothing if
    the flag is up.
    """
    QH: gl.constexpr = HALF // HP
    QB: gl.constexpr = 2 * QH
    ACC: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, HALF, 32])
    LANES: gl.constexpr = gl.BlockedLayout([1, 1, 4], [32, 1, 1], [2, 2, 1], [2, 0, 1])
    OUT: gl.constexpr = gl.SliceLayout(2, LANES)
    WIDE: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [2, 2], [0, 1])
    if gl.load(flag_ptr) == 0:
        queries = gl.allocate_shared_memory(q_desc.dtype, [2, HALF, D], q_desc.layout)
        keys = gl.allocate_shared_memory(k_desc.dtype, [STAGES, BN, D], k_desc.layout)
        ready = gl.allocate_shared_memory(gl.int64, [STAGES + 1, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(STAGES + 1):
            mbarrier.init(ready.index(i), count=1)
        q0 = queries.index(0).permute((1, 0))
        q1 = queries.index(1).permute((1, 0))
        n = gl.arange(0, BN, layout=gl.SliceLayout(1, OUT))
        zero = gl.zeros((BN, HALF), gl.float32, layout=ACC)
        tiles = gl.cdiv(N, BN)
        total = groups.to(gl.int64) * tiles
        stage = 0
        phase = 0
        q_phase = 0
        for side in range(2):
            share = gl.where(side == 0, gl.program_id(0), shares - 1 - gl.program_id(0)).to(gl.int64)
            low = share * total // shares
            high = (share + 1) * total // shares
            for group in range((low // tiles).to(gl.int32), gl.cdiv(high, tiles).to(gl.int32)):
                part_first = gl.maximum(low - group.to(gl.int64) * tiles, 0).to(gl.int32)
                part_last = gl.minimum(high - group.to(gl.int64) * tiles, tiles).to(gl.int32)
                m = group * QB + gl.arange(0, QB, layout=gl.SliceLayout(0, WIDE))
                there = m < M
                start = gl.minimum(gl.maximum(gl.load(ks_ptr + m, mask=there, other=0), 0), N).to(gl.int32)
                end = gl.minimum(gl.maximum(gl.load(ke_ptr + m, mask=there, other=0), 0), N).to(gl.int32)
                empty = end <= start
                start, end = gl.where(empty, N, start), gl.where(empty, 0, end)
                first = gl.minimum(gl.maximum(gl.min(start, 0) // BN, part_first), part_last)
                last = gl.maximum(gl.minimum(gl.cdiv(gl.max(end, 0), BN), part_last), first)
                if first < last:
                    mbarrier.expect(ready.index(STAGES), 2 * HALF * D)
                    for i in gl.static_range(2):
                        load_tile(q_desc, [group * (2 * HALF) + i * HALF, 0], ready.index(STAGES), queries.index(i))
                    for i in gl.static_range(STAGES):
                        slot = (stage + i) % STAGES
                        mbarrier.expect(ready.index(slot), BN * D, pred=first + i < last)
                        load_tile(k_desc, [(first + i) * BN, 0], ready.index(slot), keys.index(slot), pred=first + i < last)
                    at = group.to(gl.int64) * (2 * HALF) + gl.arange(0, HALF, layout=gl.SliceLayout(0, ACC))
                    factor = 0.5 if FADD else 1.0
                    w0 = gl.load(weights_ptr + at, mask=at < M.to(gl.int64) * HP, other=0.0) * factor
                    w1 = gl.load(weights_ptr + at + HALF, mask=at + HALF < M.to(gl.int64) * HP, other=0.0) * factor
                    q = group * QB + gl.arange(0, QH, layout=gl.SliceLayout(0, OUT))
                    p0 = (out_ptr + q.to(gl.int64) * N)[None, :] + n[:, None]
                    p1 = p0 + QH * N.to(gl.int64)
                    m0 = (q < M)[None, :]
                    m1 = (q + QH < M)[None, :]
                    mbarrier.wait(ready.index(STAGES), q_phase)
                    q_phase = q_phase ^ 1
                    for tile in range(first, last, 2):
                        # Both tiles of this turn in a straight line: products that are in flight where a loop turns
                        # back are waited for by the assembler.
                        mbarrier.wait(ready.index(stage), phase)
                        a0 = warpgroup_mma(keys.index(stage), q0, zero, use_acc=False, is_async=True)
                        a1 = warpgroup_mma(keys.index(stage), q1, zero, use_acc=False, is_async=True)
                        for u in gl.static_range(2):
                            s0 = warpgroup_mma_wait(1, deps=[a0])
                            key = (tile + u) * BN
                            limit = N if u == 0 else gl.where(tile + 1 < last, N, 0)
                            _store(s0, w0, p0 + key, m0 & (key + n < limit)[:, None], QH, HP, LANES, FADD)
                            before = stage
                            more = tile + u + 1 < last
                            stage = gl.where(tile + u < last, gl.where(stage == STAGES - 1, 0, stage + 1), stage)
                            phase = gl.where((tile + u < last) & (stage == 0), phase ^ 1, phase)
                            if u == 0:
                                mbarrier.wait(ready.index(stage), phase, pred=more)
                                a0 = warpgroup_mma(keys.index(stage), q0, zero, use_acc=False, is_async=True)
                                s1 = warpgroup_mma_wait(1, deps=[a1])
                            else:
                                s1 = warpgroup_mma_wait(0, deps=[a1])
                            _store(s1, w1, p1 + key, m1 & (key + n < limit)[:, None], QH, HP, LANES, FADD)
                            # the conversion in there had every warp wait for its products of this tile: its keys may go
                            again = tile + u + STAGES
                            mbarrier.expect(ready.index(before), BN * D, pred=again < last)
                            load_tile(k_desc, [again * BN, 0], ready.index(before), keys.index(before), pred=again < last)
                            if u == 0:
                                a1 = warpgroup_mma(keys.index(stage), q1, zero, use_acc=False, is_async=True)
                if CLEAN:
                    barrier()
                    whole_first = gl.cdiv(gl.max(gl.where(there, start, 0), 0), BN)
                    least_end = gl.min(gl.where(there, end, N), 0)
                    whole_last = gl.where(least_end >= N, tiles, least_end // BN)
                    whole_first = gl.minimum(gl.maximum(whole_first, part_first), part_last)
                    whole_last = gl.maximum(gl.minimum(whole_last, part_last), whole_first)
                    rows = out_ptr + m.to(gl.int64) * N
                    _fill(rows, part_first, whole_first, start, end, there, N, WIDE)
                    _fill(rows, whole_last, part_last, start, end, there, N, WIDE)
        for i in gl.static_range(STAGES + 1):
            mbarrier.invalidate(ready.index(i))


def logits(x: Expanded, ks: Tensor, ke: Tensor, out: Tensor, *, clean: bool, tile: Tile | None = None) -> None:
    """Writes ``out [M, N]`` from E5M2 operands of at least 8 heads; nothing if the flag is up."""
    (m, n), head_dim = out.shape, x.keys.shape[1]
    tile = tile or Tile()
    groups = triton.cdiv(m * x.heads, 256)
    # two programs a multiprocessor; no share should be so small that its start is most of its work
    programs = max(1, min(2 * multiprocessors(out.device), groups * triton.cdiv(n, 64) // 16))
    layout = gl.NVMMASharedLayout(swizzle_byte_width=head_dim, element_bitwidth=8, rank=2)
    with on_device(out):
        hopper_kernel[(programs,)](
            TensorDescriptor(x.queries, list(x.queries.shape), [head_dim, 1], [128, head_dim], layout),
            TensorDescriptor(x.keys, [n, head_dim], [head_dim, 1], [64, head_dim], layout),
            x.weights, x.flag, ks, ke, out, m, n, groups, 2 * programs,
            D=head_dim, HP=x.heads, STAGES=tile.stages, CLEAN=clean, FADD=tile.fadd, num_warps=4, enable_fp_fusion=True,
        )  # fmt: skip


@cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
