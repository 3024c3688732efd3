"""Packed E2M1 to what a matrix unit reads: E5M2 where the block scales allow it exactly, else bfloat16.

E5M2 has room for block exponents that spread by 26. For a query's head they may lie anywhere: a power of two is taken
out and goes into the head's weight, at no cost. Keys have none of their own (it would cost a load and a multiplication
a logit): their scale bytes must lie in ``mqa_codes``' window, 2^-15 to 2^11. DeepSeek's scale rule never goes below it,
and its top is reached by elements of 12288. What does not fit (a NaN scale, too) raises a flag on the device; the
caller's kernels read it there, and no one waits for it. A block of zeros fits whatever its scale.
"""

from typing import NamedTuple

import torch
from torch import Tensor

import triton
import triton.language as tl
from nvfp4_kernels.triton import codecs
from nvfp4_kernels.triton.mqa_codes import HIGHEST, LIFT, LOWEST, bf16_halves, by_byte, e5m2_halves
from nvfp4_kernels.triton.mqa_tile import on_device

WILD = tl.constexpr(40)  # a query's exponents beyond this would put too much into a float32 weight
ROWS = 64


@triton.jit
def _expand(
    codes_ptr, scales_ptr, weights_ptr, out_ptr, weights_out, flag_ptr, first, rows,
    H: tl.constexpr, HP: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, E5M2: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """BR rows of the result from ``first`` on; row m * HP + h of it is row m * H + h of the codes, none for h >= H."""
    BLOCKS: tl.constexpr = D // BLOCK
    at = first + tl.arange(0, BR).to(tl.int64)
    head = at % HP
    row = (at // HP) * H + head
    inside = at < rows
    keep = inside & (head < H)
    byte = tl.arange(0, D // 2)
    pair = tl.load(codes_ptr + row[:, None] * (D // 2) + byte[None, :], mask=keep[:, None], other=0)
    block = tl.arange(0, BLOCKS)
    # 56 is a finite scale in both formats
    scale = tl.load(scales_ptr + row[:, None] * BLOCKS + block[None, :], mask=keep[:, None], other=56).to(tl.int32)
    if E5M2:
        filled = tl.max(tl.reshape((pair & 0x77).to(tl.int32), (BR, BLOCKS, BLOCK // 2)), 2) > 0
        top = tl.max(tl.where(filled, scale, 0), 1)
        bottom = tl.min(tl.where(filled, scale, 255), 1)
        if weights_ptr is None:
            taken = tl.zeros_like(top)
        else:
            strange = (top > 127 + WILD) | (top < 127 - WILD) | (bottom < 127 - WILD)
            taken = tl.where(strange, 0, top - HIGHEST)
        wild = (top - taken > HIGHEST) | (bottom - taken < LOWEST) | (tl.max(scale, 1) == 255)
        if tl.max((wild & keep).to(tl.int32), 0) > 0:
            tl.store(flag_ptr, 1)
        shifted = tl.minimum(tl.maximum(scale - taken[:, None], LOWEST), HIGHEST)
        low, high = e5m2_halves(pair, by_byte(shifted, BLOCK, BR, D))
    else:
        low, high = bf16_halves(pair, by_byte(codecs.scale_value(scale, BLOCK == 16), BLOCK, BR, D))
    pointers = out_ptr + at[:, None] * D + byte[None, :]
    tl.store(pointers, low.to(out_ptr.dtype.element_ty, bitcast=True), mask=inside[:, None])
    tl.store(pointers + D // 2, high.to(out_ptr.dtype.element_ty, bitcast=True), mask=inside[:, None])
    if weights_ptr is not None:
        weight = tl.load(weights_ptr + row, mask=keep, other=0.0)
        if E5M2:  # both operands of the products are LIFT times too large
            weight = weight * (codecs.e8m0_value(taken + 127) * (1 / (LIFT * LIFT)))
        tl.store(weights_out + at, weight, mask=inside)


@triton.jit
def expand_kernel(
    q_codes, q_scales, weights, q_out, weights_out, q_rows, k_codes, k_scales, k_out, k_rows, flag, q_programs,
    H: tl.constexpr, HP: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, E5M2: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """Queries in the first programs, keys in the rest: one launch for both."""
    program = tl.program_id(0)
    if program < q_programs:
        _expand(
            q_codes, q_scales, weights, q_out, weights_out, flag, program.to(tl.int64) * BR, q_rows,
            H, HP, D, BLOCK, E5M2, BR,
        )  # fmt: skip
    else:
        _expand(
            k_codes, k_scales, None, k_out, None, flag, (program - q_programs).to(tl.int64) * BR, k_rows,
            1, 1, D, BLOCK, E5M2, BR,
        )  # fmt: skip


class Expanded(NamedTuple):
    """Operands of one type: float8_e5m2 or bfloat16."""

    queries: Tensor  # [M * HP, D], HP heads to a query
    weights: Tensor  # float32 [M * HP], times the power of two taken out of the query's head
    keys: Tensor  # [N, D]
    flag: Tensor | None  # int32 [1], not 0 where E5M2 did not hold an operand; None for bfloat16
    heads: int  # HP: H rounded up to a power of two, the added heads being zero


def expand(
    q_codes: Tensor, q_scales: Tensor, weights: Tensor, k_codes: Tensor, k_scales: Tensor, block: int, *,
    e5m2: bool, least: int = 1,
) -> Expanded:  # fmt: skip
    """Codes uint8 [M * H, D / 2] and [N, D / 2], scales uint8 [.., D / block], ``weights`` float32 [M, H].

    ``least``: of HP. The global scales of NVFP4 stay outside.
    """
    (m, heads), n, head_dim = weights.shape, len(k_codes), 2 * k_codes.shape[1]
    padded = max(triton.next_power_of_2(heads), least)
    dtype, bits = (torch.float8_e5m2, torch.int8) if e5m2 else (torch.bfloat16, torch.int16)
    device = weights.device
    queries = torch.empty(m * padded, head_dim, dtype=dtype, device=device)
    keys = torch.empty(n, head_dim, dtype=dtype, device=device)
    weights_out = torch.empty(m * padded, dtype=torch.float32, device=device)
    flag = torch.zeros(1, dtype=torch.int32, device=device) if e5m2 else None
    programs = triton.cdiv(m * padded, ROWS)
    with on_device(weights):
        expand_kernel[(programs + triton.cdiv(n, ROWS),)](
            q_codes, q_scales, weights, queries.view(bits), weights_out, m * padded,
            k_codes, k_scales, keys.view(bits), n, flag, programs,
            H=heads, HP=padded, D=head_dim, BLOCK=block, E5M2=e5m2, BR=ROWS, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return Expanded(queries, weights_out, keys, flag, padded)
