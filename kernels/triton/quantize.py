"""Quantize a tensor along its rows, its columns or both from one read: the bits of ``reference/quantize.py``.

A program reads one tile of x [I, J] and writes everything that is asked of it: packed codes and scales, the decoded
operand, or both, of the row form, the column form, or both. The column form keeps x's layout and is handed back as
transposed views, so no element ever changes its place; and since a random number belongs to an element of x, one draw
serves both forms where their streams are equal.
"""

import torch
from torch import Tensor

from nvfp4_kernels.quantized import Quantized
from nvfp4_kernels.scheme import Scheme
from nvfp4_kernels.triton import tiles
from nvfp4_kernels.triton.amax import as_bits, factor, global_amax, on_device, readable
from nvfp4_kernels.triton.decode import decode
from nvfp4_kernels.triton.quantize_kernel import quantize_kernel

__all__ = ["decode", "global_amax", "quantize"]

FORMS = ("packed", "decoded", "both")
ROUNDINGS = ("nearest", "stochastic", "stochastic8")


def quantize(
    x: Tensor,
    rows: Scheme | None,
    columns: Scheme | None,
    *,
    amax_rows: Tensor | None = None,
    amax_columns: Tensor | None = None,
    seed: Tensor | None = None,
    row_stream: int = 0,
    column_stream: int = 1,
    rows_form: str = "packed",
    columns_form: str = "packed",
) -> tuple[Quantized | None, Quantized | None]:
    """Quantize ``x`` (``rows``) and ``x.T`` (``columns``) from one read; None where no scheme is given.

    ``x``: float32, bfloat16 or float16 [I, J], any strides (copied first where a row's elements lie apart).
    ``amax_*``: float32 0-d, found here if None. ``seed``: int64 0-d on x's device, needed iff a scheme is stochastic.
    ``*_form``: "packed" (codes and scales), "decoded" (operand) or "both".
    Equal streams share their draws, which is faster. ValueError for another dtype, rank, device or form, or no seed.
    """
    x = readable(x)
    for scheme, form in ((rows, rows_form), (columns, columns_form)):
        if form not in FORMS:
            raise ValueError(f"form must be one of {', '.join(FORMS)}, not {form!r}")
        if scheme is not None and scheme.stochastic and (seed is None or seed.device != x.device):
            raise ValueError(f"stochastic rounding needs a seed: an int64 0-d tensor on {x.device}")
    find_rows = rows if amax_rows is None else None
    find_columns = columns if amax_columns is None else None
    if find_rows is not None or find_columns is not None:
        found = global_amax(x, find_rows, find_columns)
        amax_rows = amax_rows if find_rows is None else found[0]
        amax_columns = amax_columns if find_columns is None else found[1]

    row_out = _outputs(x, rows, rows_form, amax_rows, 1)
    column_out = _outputs(x, columns, columns_form, amax_columns, 0)
    if x.numel() and (rows is not None or columns is not None):
        with on_device(x):
            _launch(x, seed, row_stream, column_stream, rows, row_out, columns, column_out)
    *turned, amax = column_out
    column_result = Quantized(*(t if t is None else t.T for t in turned), amax)
    return (None if rows is None else row_out), (None if columns is None else column_result)


def _launch(
    x: Tensor, seed: Tensor | None, row_stream: int, column_stream: int,
    rows: Scheme | None, row_out: Quantized, columns: Scheme | None, column_out: Quantized,
) -> None:  # fmt: skip
    height, width = x.shape
    needed = max(rows.block[0] if rows else 1, columns.group if columns else 1)  # rows of x in one block
    tile = tiles.fit(_kind(rows, columns, column_out.codes is not None), height, width, needed)
    grid = (-(-height // tile.rows) * -(-width // tile.columns),)
    both_draw = rows is not None and columns is not None and rows.stochastic and columns.stochastic
    quantize_kernel[grid](
        as_bits(x), seed, height, width, x.stride(0), row_stream, column_stream,
        row_out.amax, row_out.codes, row_out.scales, _bits(row_out.operand),
        column_out.amax, column_out.codes, column_out.scales, _bits(column_out.operand),
        BF16_BITS=x.dtype == torch.bfloat16, BI=tile.rows, BJ=tile.columns,
        ROW_VECTOR=16 // x.element_size(), COLUMN_VECTOR=tile.vector or 16 // x.element_size(),
        EVEN=height % tile.rows == 0 and width % tile.columns == 0, BY_EIGHTS=width % 8 == 0,
        ONE_DRAW=both_draw and row_stream == column_stream and rows.rounding == columns.rounding,
        **_constants("ROW", rows, True), **_constants("COLUMN", columns, False),
        num_warps=tile.warps, maxnreg=tile.registers, enable_fp_fusion=False,
    )  # fmt: skip


def _constants(name: str, scheme: Scheme | None, along_rows: bool) -> dict:
    present = scheme is not None
    scheme = scheme or Scheme()
    block = scheme.block if along_rows else scheme.block[::-1]
    return {
        f"{name}S": present,
        f"{name}_RULE": scheme.rule,
        f"{name}_BR": block[0],
        f"{name}_BC": block[1],
        f"{name}_ROUNDING": ROUNDINGS.index(scheme.rounding),
        f"{name}_N": scheme.hadamard,
        f"{name}_MASK": scheme.sign_mask,
        f"{name}_FACTOR": factor(scheme.hadamard),
    }


def _kind(rows: Scheme | None, columns: Scheme | None, columns_packed: bool) -> str:
    if columns is not None and columns.block[0] == 1:
        return "columns_packed" if columns_packed else "columns"
    return "rows" if rows is not None and rows.block[0] == 1 else "square"


def _outputs(x: Tensor, scheme: Scheme | None, form: str, amax: Tensor | None, axis: int) -> Quantized:
    """Uninitialised results in the layout of x: reduced along ``axis``, which is padded to the scheme's group."""
    if scheme is None:
        return Quantized(None, None, None, None)

    def shape(block: tuple[int, int], padded: bool = True) -> list[int]:
        sizes = list(x.shape)
        if padded:
            sizes[axis] = -(-sizes[axis] // scheme.group) * scheme.group
        along, across = axis, 1 - axis
        sizes[across] = -(-sizes[across] // block[0])
        sizes[along] = sizes[along] // block[1]
        return sizes

    def empty(sizes: list[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(sizes, dtype=dtype, device=x.device)

    packed, decoded = form != "decoded", form != "packed"
    return Quantized(
        empty(shape((1, 2)), torch.uint8) if packed else None,
        empty(shape(scheme.block), torch.uint8) if packed else None,
        empty(shape((1, 1), padded=bool(scheme.hadamard)), torch.bfloat16) if decoded else None,
        amax if scheme.has_global_scale else None,
    )


def _bits(operand: Tensor | None) -> Tensor | None:
    return None if operand is None else operand.view(torch.int16)
