"""Block scales in the order the tensor core reads them, written once and in both directions.

``[rows, columns]`` scales are padded with zeros to multiples of (128, 4) and cut into tiles of 128 x 4. Inside a tile,
rows 0, 32, 64 and 96 stand side by side, so that 16 neighbouring bytes belong to four rows that are 32 apart:

    offset(r, c) = ((r // 128 * ceil(columns / 4) + c // 4) * 32 + r % 32) * 16 + (r % 128 // 32) * 4 + c % 4

Source: the scale-factor layouts of ``tcgen05.mma`` (PTX ISA) and of cuBLASLt's 1-D block scaling, which are the same.
"""

import torch
from torch import Tensor

TILE_ROWS, TILE_COLUMNS = 128, 4


def tiles(rows: int, columns: int) -> tuple[int, int]:
    """How many tiles of 128 x 4 hold scales ``[rows, columns]``, down and across."""
    return -(-rows // TILE_ROWS), -(-columns // TILE_COLUMNS)


def swizzle(scales: Tensor) -> Tensor:
    """Contiguous ``[row tiles, column tiles, 32, 4, 4]`` of ``scales`` [rows, columns] (any one-byte dtype, any
    strides); the padding is filled with zeros, so that it adds nothing to a product."""
    rows, columns = scales.shape
    down, across = tiles(rows, columns)
    padded = torch.zeros(down * TILE_ROWS, across * TILE_COLUMNS, dtype=torch.uint8, device=scales.device)
    padded[:rows, :columns] = scales.view(torch.uint8) if scales.dtype != torch.uint8 else scales
    parts = padded.view(down, 4, 32, across, 4)  # row = (tile, quarter, row of 32), column = (tile, column of 4)
    return parts.permute(0, 3, 2, 1, 4).contiguous().view(scales.dtype)


def unswizzle(swizzled: Tensor, rows: int, columns: int) -> Tensor:
    """The inverse: contiguous ``[rows, columns]`` of what ``swizzle`` made, in any shape of as many elements.

    Raises ValueError if ``swizzled`` holds another number of scales than that many rows and columns take.
    """
    down, across = tiles(rows, columns)
    if swizzled.numel() != down * across * TILE_ROWS * TILE_COLUMNS:
        raise ValueError(
            f"{rows} x {columns} scales take {down * across * TILE_ROWS * TILE_COLUMNS} swizzled ones, "
            f"got {swizzled.numel()}"
        )
    parts = swizzled.reshape(down, across, 32, 4, 4).permute(0, 3, 2, 1, 4)
    return parts.reshape(down * TILE_ROWS, across * TILE_COLUMNS)[:rows, :columns].contiguous()
