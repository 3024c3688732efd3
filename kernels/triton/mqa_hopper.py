"""The dense kernel of ``mqa_dense`` for Hopper, in Gluon: products of one half tile run while another is summed.

A warp group has 256 columns of (query, head) in two halves, with an accumulator each. It issues the products of one
half and, while the matrix unit works on them, takes relu, weight and sum of the other. Partial sums of four lanes meet
in shared memory, on the way to a layout whose stores are 128 bytes wide, instead of through shuffles.

What was tried and what bounds it: experiments/2026-11-30_mqa_logits.
"""

from typing import NamedTuple

from torch import Tensor

import triton
import triton.language as tl
from nvfp4_kernels.triton.mqa_dense import split
from nvfp4_kernels.triton.mqa_expand import Expanded
from nvfp4_kernels.triton.mqa_tile import on_device
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor


class Tile(NamedTuple):
    """Tiles of keys in flight; relu by addition (x + |x|, with half the weight) or by maximum."""

    stages: int = 4
    fadd: bool = True


PROGRAMS = 264  # that run at a time on 132 multiprocessors
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
    q_desc, k_desc, weights_ptr, flag_ptr, ks_ptr, ke_ptr, out_ptr, M, N, groups, tiles_each,
    D: gl.constexpr, HP: gl.constexpr, STAGES: gl.constexpr, CLEAN: gl.constexpr, FADD: gl.constexpr,
):  # fmt: skip
    """Programs of a group of queries (256 columns) and a part of the keys each. Does nothing if the flag is up."""
    QH: gl.constexpr = HALF // HP
    QB: gl.constexpr = 2 * QH
    ACC: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, HALF, 32])
    LANES: gl.constexpr = gl.BlockedLayout([1, 1, 4], [32, 1, 1], [2, 2, 1], [2, 0, 1])
    OUT: gl.constexpr = gl.SliceLayout(2, LANES)
    WIDE: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [2, 2], [0, 1])
    if gl.load(flag_ptr) == 0:
        group = groups - 1 - gl.program_id(0) % groups  # the last queries see the most keys: first
        part = gl.program_id(0) // groups
        m = group * QB + gl.arange(0, QB, layout=gl.SliceLayout(0, WIDE))
        there = m < M
        start = gl.minimum(gl.maximum(gl.load(ks_ptr + m, mask=there, other=0), 0), N).to(gl.int32)
        end = gl.minimum(gl.maximum(gl.load(ke_ptr + m, mask=there, other=0), 0), N).to(gl.int32)
        empty = end <= start
        start, end = gl.where(empty, N, start), gl.where(empty, 0, end)
        tiles = gl.cdiv(N, BN)
        part_first = part * tiles_each
        part_last = gl.minimum(part_first + tiles_each, tiles)
        first = gl.minimum(gl.maximum(gl.min(start, 0) // BN, part_first), part_last)
        last = gl.maximum(gl.minimum(gl.cdiv(gl.max(end, 0), BN), part_last), first)
        if first < last:
            queries = gl.allocate_shared_memory(q_desc.dtype, [2, HALF, D], q_desc.layout)
            keys = gl.allocate_shared_memory(k_desc.dtype, [STAGES, BN, D], k_desc.layout)
            ready = gl.allocate_shared_memory(gl.int64, [STAGES + 1, 1], mbarrier.MBarrierLayout())
            for i in gl.static_range(STAGES + 1):
                mbarrier.init(ready.index(i), count=1)
            mbarrier.expect(ready.index(STAGES), 2 * HALF * D)
            for i in gl.static_range(2):
                load_tile(q_desc, [group * (2 * HALF) + i * HALF, 0], ready.index(STAGES), queries.index(i))
            for i in gl.static_range(STAGES):
                mbarrier.expect(ready.index(i), BN * D, pred=first + i < last)
                load_tile(k_desc, [(first + i) * BN, 0], ready.index(i), keys.index(i), pred=first + i < last)
            at = group.to(gl.int64) * (2 * HALF) + gl.arange(0, HALF, layout=gl.SliceLayout(0, ACC))
            factor = 0.5 if FADD else 1.0
            w0 = gl.load(weights_ptr + at, mask=at // HP < M, other=0.0) * factor
            w1 = gl.load(weights_ptr + at + HALF, mask=at // HP + QH < M, other=0.0) * factor
            q = group * QB + gl.arange(0, QH, layout=gl.SliceLayout(0, OUT))
            n = gl.arange(0, BN, layout=gl.SliceLayout(1, OUT))
            p0 = (out_ptr + q.to(gl.int64) * N)[None, :] + n[:, None]
            p1 = (out_ptr + (q + QH).to(gl.int64) * N)[None, :] + n[:, None]
            m0 = (q < M)[None, :]
            m1 = (q + QH < M)[None, :]
            zero = gl.zeros((BN, HALF), gl.float32, layout=ACC)
            mbarrier.wait(ready.index(STAGES), 0)
            q0 = queries.index(0).permute((1, 0))
            q1 = queries.index(1).permute((1, 0))
            phase = 0
            for tile in range(first, last, STAGES):
                # All stages in a straight line: products in flight where a loop turns back are waited for by the
                # assembler, and the places of the stages are constants.
                mbarrier.wait(ready.index(0), phase)
                a0 = warpgroup_mma(keys.index(0), q0, zero, use_acc=False, is_async=True)
                a1 = warpgroup_mma(keys.index(0), q1, zero, use_acc=False, is_async=True)
                for u in gl.static_range(STAGES):
                    s0 = warpgroup_mma_wait(1, deps=[a0])
                    key = (tile + u) * BN
                    limit = N if u == 0 else gl.where(tile + u < last, N, 0)  # an idle turn stores nothing
                    inside = (key + n < limit)[:, None]
                    _store(s0, w0, p0 + key, m0 & inside, QH, HP, LANES, FADD)
                    if u < STAGES - 1:
                        mbarrier.wait(ready.index(u + 1), phase, pred=tile + u + 1 < last)
                        a0 = warpgroup_mma(keys.index(u + 1), q0, zero, use_acc=False, is_async=True)
                        s1 = warpgroup_mma_wait(1, deps=[a1])
                    else:
                        s1 = warpgroup_mma_wait(0, deps=[a1])
                    _store(s1, w1, p1 + key, m1 & inside, QH, HP, LANES, FADD)
                    # the conversion in there had every warp wait for its products of this tile: its keys may go
                    again = tile + u + STAGES
                    mbarrier.expect(ready.index(u), BN * D, pred=again < last)
                    load_tile(k_desc, [again * BN, 0], ready.index(u), keys.index(u), pred=again < last)
                    if u < STAGES - 1:
                        a1 = warpgroup_mma(keys.index(u + 1), q1, zero, use_acc=False, is_async=True)
                phase = phase ^ 1
            for i in gl.static_range(STAGES + 1):
                mbarrier.invalidate(ready.index(i))
        if CLEAN:
            # The loop above stores whole tiles, which costs it no comparisons; where one lies outside a range is known.
            barrier()
            whole_first = gl.cdiv(gl.max(gl.where(there, start, 0), 0), BN)
            least_end = gl.min(gl.where(there, end, N), 0)
            whole_last = gl.where(least_end >= N, tiles, least_end // BN)
            whole_first = gl.minimum(gl.maximum(whole_first, part_first), part_last)
            whole_last = gl.maximum(gl.minimum(whole_last, part_last), whole_first)
            rows = out_ptr + m.to(gl.int64) * N
            _fill(rows, part_first, whole_first, start, end, there, N, WIDE)
            _fill(rows, whole_last, part_last, start, end, there, N, WIDE)


def logits(x: Expanded, ks: Tensor, ke: Tensor, out: Tensor, *, clean: bool, tile: Tile | None = None) -> None:
    """Writes ``out [M, N]`` from E5M2 operands of at least 8 heads; nothing if the flag is up."""
    (m, n), head_dim = out.shape, x.keys.shape[1]
    tile = tile or Tile()
    groups, tiles = triton.cdiv(m * x.heads, 256), triton.cdiv(n, 64)
    each = split(groups, tiles, PROGRAMS)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=head_dim, element_bitwidth=8, rank=2)
    with on_device(out):
        hopper_kernel[(groups * triton.cdiv(tiles, each),)](
            TensorDescriptor(x.queries, list(x.queries.shape), [head_dim, 1], [128, head_dim], layout),
            TensorDescriptor(x.keys, [n, head_dim], [head_dim, 1], [64, head_dim], layout),
            x.weights, x.flag, ks, ke, out, m, n, groups, each,
            D=head_dim, HP=x.heads, STAGES=tile.stages, CLEAN=clean, FADD=tile.fadd, num_warps=4, enable_fp_fusion=True,
        )  # fmt: skip
