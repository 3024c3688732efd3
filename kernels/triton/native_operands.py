"""Operands as an FP4 tensor core reads them: packed along K, with swizzled block scales, padding filled with zeros.

Both operands of every GEMM are packed along K (TN): the fast FP4 instructions take nothing else, and an operand that
is packed along its other dimension falls, without a word, to an instruction of half the speed. What Wgrad and Dgrad
read transposed is therefore transposed here, once, in memory.
"""

from typing import NamedTuple

import torch
from torch import Tensor

import triton
import triton.language as tl
from nvfp4_kernels.fp4 import VECTOR, fp4_format
from nvfp4_kernels.reference.swizzle import tiles
from nvfp4_kernels.scheme import Scheme

BYTES = 16  # a row of codes is a multiple of this: what a tensor descriptor (TMA) and cuBLASLt ask for
SIDE = 64  # tile of the transposing kernels


class NativeOperand(NamedTuple):
    """One operand ``[rows, K]``, ready for the tensor core."""

    codes: Tensor  # uint8 [rows, Kpad / 2], contiguous; Kpad is a multiple of 32, the padding is zeros
    scales: Tensor  # uint8 [row tiles, column tiles, 32, 4, 4], see reference/swizzle.py


@triton.jit
def transpose_codes_kernel(in_ptr, out_ptr, height, width, out_width, NIBBLES: tl.constexpr, SIDE: tl.constexpr):
    """uint8 ``out`` [out rows, out_width] from contiguous uint8 ``in`` [height, width], zeros where ``in`` has none.

    ``NIBBLES``: ``in`` holds two neighbours of a row in a byte and ``out`` two neighbours of a column: the transpose of
    the matrix of codes. Otherwise the bytes themselves are transposed.
    """
    i0 = tl.program_id(0) * SIDE  # byte column of out
    j0 = tl.program_id(1) * SIDE  # byte column of in
    i = i0 + tl.arange(0, SIDE)
    j = j0 + tl.arange(0, SIDE)
    wide = width.to(tl.int64)
    if NIBBLES:
        across = (j < width)[None, :]
        source = in_ptr + (2 * i)[:, None] * wide + j[None, :]
        even = tl.load(source, mask=(2 * i < height)[:, None] & across, other=0).to(tl.int32)
        odd = tl.load(source + wide, mask=(2 * i + 1 < height)[:, None] & across, other=0).to(tl.int32)
        pairs = tl.join((even & 15) | ((odd & 15) << 4), (even >> 4) | (odd & 0xF0))
        tile = tl.reshape(pairs, (SIDE, 2 * SIDE)).to(tl.uint8)
        rows = 2 * j0 + tl.arange(0, 2 * SIDE)
        height_out = 2 * width
    else:
        tile = tl.load(
            in_ptr + i[:, None] * wide + j[None, :], mask=(i < height)[:, None] & (j < width)[None, :], other=0
        )
        rows = j
        height_out = width
    out = out_ptr + rows[:, None] * out_width.to(tl.int64) + i[None, :]
    tl.store(out, tl.trans(tile), mask=(rows < height_out)[:, None] & (i < out_width)[None, :])


@triton.jit
def swizzle_kernel(scales_ptr, out_ptr, rows, columns, stride_row, stride_column, BR: tl.constexpr, BC: tl.constexpr):
    """Tile (program 0, program 1) of 128 x 4 scales of [rows, columns], swizzled; one of ``scales_ptr`` for BR x BC."""
    at = tl.arange(0, 512)
    r = tl.program_id(0) * 128 + at % 16 // 4 * 32 + at // 16
    c = tl.program_id(1) * 4 + at % 4
    source = scales_ptr + (r // BR).to(tl.int64) * stride_row + (c // BC).to(tl.int64) * stride_column
    byte = tl.load(source, mask=(r < rows) & (c < columns), other=0)
    tile = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    tl.store(out_ptr + tile * 512 + at, byte)


def native_operand(codes: Tensor, scales: Tensor, scheme: Scheme, rows: int, transposed: bool = False) -> NativeOperand:
    """The operand ``[rows, K]`` whose ``codes`` and ``scales`` are those of a QuantizedTensor.

    ``codes``: uint8 [rows, Kpad / 2], in either memory order; with ``transposed`` (square blocks only) those of the
    transpose, [K, rows padded / 2]. ``scales``: uint8, one for each block of ``scheme``, likewise.
    """
    if transposed:
        scales = scales.T
        packed = _transposed(codes.contiguous(), codes.shape[0], rows, nibbles=True)
    elif codes.stride(1) == 1:
        packed = codes.contiguous()
        missing = -packed.shape[1] % BYTES
        packed = torch.nn.functional.pad(packed, (0, missing)) if missing else packed
    else:  # the column form: neighbours along K lie a row apart
        packed = _transposed(codes.T.contiguous(), 2 * codes.shape[1], rows, nibbles=False)
    repeated = scheme.block[1] // VECTOR[fp4_format(scheme)]
    return NativeOperand(packed, swizzled(scales, rows, scheme.block[0], repeated))


def swizzled(scales: Tensor, rows: int, block_rows: int = 1, block_columns: int = 1) -> Tensor:
    """uint8 ``[row tiles, column tiles, 32, 4, 4]`` of uint8 ``scales`` [ceil(rows / block_rows), any]: each is
    repeated for the ``block_rows`` x ``block_columns`` scales of the hardware that it stands for."""
    columns = scales.shape[1] * block_columns
    down, across = tiles(rows, columns)
    out = torch.empty(down, across, 32, 4, 4, dtype=torch.uint8, device=scales.device)
    if out.numel():
        with torch.cuda.device_of(scales):
            swizzle_kernel[(down, across)](
                scales, out, rows, columns, *scales.stride(), BR=block_rows, BC=block_columns
            )
    return out


def _transposed(stored: Tensor, columns: int, rows: int, nibbles: bool) -> Tensor:
    """uint8 [rows, columns padded to 32, / 2] of contiguous ``stored``, whose rows (or pairs of rows) run along K."""
    width = -(-columns // (2 * BYTES)) * BYTES
    height = 2 * stored.shape[1] if nibbles else stored.shape[1]
    out = torch.empty(height, width, dtype=torch.uint8, device=stored.device)
    if out.numel():
        with torch.cuda.device_of(stored):
            transpose_codes_kernel[(-(-width // SIDE), -(-stored.shape[1] // SIDE))](
                stored, out, *stored.shape, width, NIBBLES=nibbles, SIDE=SIDE
            )
    return out[:rows]
