"""The order in which the tensor core reads block scales, against the formula, element by element, and back."""

import pytest
import torch

from nvfp4_kernels.reference.swizzle import swizzle, tiles, unswizzle

ROWS, COLUMNS = range(1, 258), range(1, 10)


def offset(r: torch.Tensor, c: torch.Tensor, columns: int) -> torch.Tensor:
    """Where scale (r, c) lies: PTX ISA's layout, written as arithmetic on indices and nothing else."""
    across = (columns + 3) // 4
    return ((r // 128 * across + c // 4) * 32 + r % 32) * 16 + (r % 128 // 32) * 4 + c % 4


def numbered(rows: int, columns: int) -> torch.Tensor:
    """Bytes 1..251, no two near each other alike, so that a wrong place shows; 0 is left to the padding."""
    return ((torch.arange(rows * columns) * 97) % 251 + 1).to(torch.uint8).view(rows, columns)


@pytest.mark.parametrize("columns", COLUMNS)
def test_each_scale_lies_where_the_formula_says_and_the_rest_is_zero(columns):
    for rows in ROWS:
        scales = numbered(rows, columns)
        flat = swizzle(scales).flatten()
        down, across = tiles(rows, columns)
        assert flat.numel() == down * 128 * across * 4 and flat.numel() % 512 == 0
        r, c = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
        places = offset(r, c, columns)
        assert torch.equal(flat[places], scales), (rows, columns)
        assert places.unique().numel() == rows * columns
        assert torch.equal(flat.to(torch.int64).sum(), scales.to(torch.int64).sum()), "padding is not zero"
        assert torch.equal(unswizzle(swizzle(scales), rows, columns), scales)


def test_strides_and_dtype_are_kept():
    scales = numbered(70, 9)
    assert torch.equal(swizzle(scales.T.contiguous().T), swizzle(scales))
    typed = swizzle(scales.view(torch.float8_e4m3fn))
    assert typed.dtype == torch.float8_e4m3fn and torch.equal(typed.view(torch.uint8), swizzle(scales))


def test_a_wrong_size_is_refused():
    with pytest.raises(ValueError, match="129 x 4 scales take 1024 swizzled ones, got 512"):
        unswizzle(swizzle(numbered(128, 4)), 129, 4)
