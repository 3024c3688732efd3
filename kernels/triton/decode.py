"""Decode packed codes to the BF16 operand of a GEMM, in the layout they have: rows packed along memory, or columns."""

from functools import lru_cache

import torch
from torch import Tensor

import triton
import triton.language as tl
from nvfp4_kernels.scheme import Scheme
from nvfp4_kernels.triton import codecs, general, packed, tiles
from nvfp4_kernels.triton.amax import require_device
from nvfp4_kernels.triton.launch import Work, launch


@triton.jit
def decode_kernel(
    codes_ptr, scales_ptr, out_ptr, height, width, codes_height, codes_width, scales_i, scales_j,
    ALONG_ROWS: tl.constexpr, E4M3: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
    EVEN: tl.constexpr, BI: tl.constexpr, BJ: tl.constexpr,
):  # fmt: skip
    """out bfloat16 bits [height, width] contiguous; blocks of BR x BC of it share a scale."""
    tiles_j = tl.cdiv(width, BJ)
    i0 = (tl.program_id(0) // tiles_j).to(tl.int64) * BI
    j0 = (tl.program_id(0) % tiles_j) * BJ
    CI: tl.constexpr = BI if ALONG_ROWS else BI // 2
    CJ: tl.constexpr = BJ // 2 if ALONG_ROWS else BJ
    ci = (i0 * CI) // BI + tl.arange(0, CI)
    # as many codes for a thread as make 16 bytes of a row of the output
    cj = tl.max_contiguous((j0 * CJ) // BJ + tl.arange(0, CJ), 4 if ALONG_ROWS else 8)
    si = i0 // BR + tl.arange(0, BI // BR)
    sj = j0 // BC + tl.arange(0, BJ // BC)
    code_pointers = codes_ptr + ci[:, None] * codes_width + cj[None, :]
    scale_pointers = scales_ptr + si[:, None] * scales_i + sj[None, :].to(tl.int64) * scales_j
    if EVEN:
        pair = tl.load(code_pointers)
        byte = tl.load(scale_pointers)
    else:
        pair = tl.load(code_pointers, mask=(ci < codes_height)[:, None] & (cj < codes_width)[None, :], other=0)
        byte = tl.load(scale_pointers, mask=(si * BR < height)[:, None] & (sj * BC < width)[None, :], other=0)
    scale = codecs.scale_value(byte.to(tl.int32), E4M3)
    rows: tl.constexpr = (CI * BR) // BI  # of codes, in a block
    columns: tl.constexpr = (CJ * BC) // BJ
    blocks: tl.constexpr = (BI // BR, rows, BJ // BC, columns)
    low, high = packed.decoded(tl.reshape(pair, blocks), tl.broadcast_to(scale[:, None, :, None], blocks))
    both = tl.join(tl.reshape(low, (CI, CJ)), tl.reshape(high, (CI, CJ)))  # [CI, CJ, 2]
    if not ALONG_ROWS:
        both = tl.permute(both, (0, 2, 1))
    bits = tl.reshape(both, (BI, BJ))
    i = i0 + tl.arange(0, BI)
    j = j0 + tl.arange(0, BJ)
    pointers = out_ptr + i[:, None] * width + j[None, :]
    if EVEN:
        tl.store(pointers, bits)
    else:
        tl.store(pointers, bits, mask=(i < height)[:, None] & (j < width)[None, :])


def decode(codes: Tensor, scales: Tensor, scheme: Scheme, columns: int, outer: Tensor | None = None) -> Tensor:
    """The operand [R, columns] of uint8 ``codes`` [R, Cpad / 2], without the global scale: bfloat16 and exact, or
    float32 where that would not be (``scheme.exact_in_bf16``). ``outer``: float32, the amax of each outer block.

    Codes that are a transposed view (the column form) give a transposed view. ``columns``: at most Cpad.
    """
    require_device(codes)
    elsewhere = scheme.element != "e2m1" or scheme.scale == "float32" or scheme.outer
    if elsewhere or not (scheme.block[0] and scheme.block[1]):
        return general.decode(codes, scales, scheme, columns, outer)
    along_rows = codes.stride(1) == 1 or codes.stride(0) != 1
    codes = (codes if along_rows else codes.T).contiguous()
    scales = scales if along_rows else scales.T
    block = scheme.block if along_rows else scheme.block[::-1]
    height, width = (codes.shape[0], columns) if along_rows else (columns, codes.shape[1])
    out = torch.empty(height, width, dtype=torch.bfloat16, device=codes.device)
    if out.numel():
        key = (height, width, along_rows, scheme.scale == "e4m3", block)
        arguments = (codes, scales, out.view(torch.int16), height, width, *codes.shape, *scales.stride())
        launch(decode_kernel, _work(*key), key, arguments)
    return out if along_rows else out.T


@lru_cache(maxsize=4096)
def _work(height: int, width: int, along_rows: bool, e4m3: bool, block: tuple[int, int]) -> Work:
    tile = tiles.fit("decode", height, width, block[0])
    constants = dict(
        ALONG_ROWS=along_rows, E4M3=e4m3, BR=block[0], BC=block[1],
        EVEN=height % tile.rows == 0 and width % tile.columns == 0, BI=tile.rows, BJ=tile.columns,
    )  # fmt: skip
    programs = -(-height // tile.rows) * -(-width // tile.columns)
    return Work(programs, constants, tile.warps)
