"""Quantize a tensor along its rows, its columns or both from one read: the bits of ``reference/quantize.py``.

A program reads one tile of x [I, J] and writes everything that is asked of it: packed codes and scales, the decoded
operand, or both, of the row form, the column form, or both. The column form keeps x's layout and is handed back as
transposed views, so no element ever changes its place; and since a random number belongs to an element of x, one draw
serves both forms where their streams are equal.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nvfp4_kernels.quantized import Quantized
from nvfp4_kernels.scheme import Scheme
from nvfp4_kernels.triton import codecs, tiles
from nvfp4_kernels.triton.amax import as_bits, factor, global_amax, on_device, readable
from nvfp4_kernels.triton.decode import decode
from nvfp4_kernels.triton.hadamard import rotate
from nvfp4_kernels.triton.philox import draws

__all__ = ["decode", "global_amax", "quantize"]

FORMS = ("packed", "decoded", "both")
ROUNDINGS = ("nearest", "stochastic", "stochastic8")


@triton.jit
def _form(
    x, r16, amax_ptr, codes_ptr, scales_ptr, operand_ptr, i0, j0, I, J, padded_i, padded_j,
    EVEN: tl.constexpr, VECTOR: tl.constexpr, ALONG_ROWS: tl.constexpr, RULE: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
    ROUNDING: tl.constexpr, N: tl.constexpr, MASK: tl.constexpr, FACTOR: tl.constexpr,
):  # fmt: skip
    """One form of the tile ``x`` float32 [BI, BJ] at (i0 int64, j0), in blocks of BR x BC of x; stored where asked."""
    BI: tl.constexpr = x.shape[0]
    BJ: tl.constexpr = x.shape[1]
    blocks: tl.constexpr = (BI // BR, BR, BJ // BC, BC)
    if N > 0:
        x = rotate(x, N, MASK, FACTOR, ALONG_ROWS)
    x = tl.reshape(x, blocks)
    block_amax = codecs.largest_magnitude(codecs.largest_magnitude(x, 3), 1)  # [BI / BR, BJ / BC]
    if RULE == "nvfp4":
        s_enc_6, s_dec, lift = codecs.nvfp4_global(tl.load(amax_ptr))
        scale, encode = codecs.nvfp4_scales(block_amax, s_enc_6, s_dec, lift)
        x = x * lift
    else:
        scale, encode = codecs.mx_scales(block_amax, RULE == "ceil")
    y = x * encode[:, None, :, None]

    if ROUNDING > 0:
        r16 = tl.reshape(r16, blocks)
    if operand_ptr is not None:
        if ROUNDING > 0:
            scale_bits = tl.broadcast_to(codecs.bfloat16_bits(scale)[:, None, :, None], blocks)
            value = codecs.stochastic_operand(y, r16, scale_bits, ROUNDING == 2)
        else:
            value = codecs.bfloat16_bits(codecs.e2m1_nearest(y) * scale[:, None, :, None])
        value = tl.reshape(value, (BI, BJ))
        _store(operand_ptr, value, i0, j0, padded_i if N > 0 else I, padded_j if N > 0 else J, VECTOR, EVEN)
    if codes_ptr is not None:
        if ROUNDING > 0:
            code = codecs.e2m1_code(codecs.e2m1_stochastic(y, r16, ROUNDING == 2))
        else:
            code = codecs.e2m1_code(codecs.e2m1_nearest(y) * codecs.TWO_M126)
        keep = tl.where(scale == scale, 0xFF, 0).to(tl.uint32)[:, None, :, None]  # no code means NaN, the scale does
        if ALONG_ROWS:
            low, high = tl.split(tl.reshape(code, (BI // BR, BR, BJ // BC, BC // 2, 2)))
            pair = tl.reshape((low | (high << 4)) & keep, (BI, BJ // 2))
            _store(codes_ptr, pair.to(tl.uint8), i0, j0 // 2, I, padded_j // 2, VECTOR // 2, EVEN)
        else:
            apart = tl.reshape(code, (BI // BR, BR // 2, 2, BJ // BC, BC))
            low, high = tl.split(tl.permute(apart, (0, 1, 3, 4, 2)))
            pair = tl.reshape((low | (high << 4)) & keep, (BI // 2, BJ))
            _store(codes_ptr, pair.to(tl.uint8), i0 // 2, j0, padded_i // 2, J, VECTOR, EVEN)
        byte = codecs.e4m3_byte(scale) if RULE == "nvfp4" else codecs.e8m0_byte(scale)
        _store(scales_ptr, byte.to(tl.uint8), i0 // BR, j0 // BC, padded_i // BR, padded_j // BC, 8, EVEN)


@triton.jit
def _store(pointer, tile, i0, j0, height, width, VECTOR: tl.constexpr, EVEN: tl.constexpr):
    """``tile`` at (i0, j0) of a contiguous [height, width], VECTOR elements at once: as a thread holds them."""
    i = i0 + tl.arange(0, tile.shape[0])
    j = j0 + tl.arange(0, tile.shape[1])
    j = tl.max_contiguous(j, VECTOR)
    pointers = pointer + i[:, None] * width + j[None, :]
    if EVEN:
        tl.store(pointers, tile)
    else:
        tl.store(pointers, tile, mask=(i < height)[:, None] & (j < width)[None, :])


@triton.jit(do_not_specialize=["row_stream", "column_stream"])
def quantize_kernel(
    x_ptr, seed_ptr, I, J, stride, row_stream, column_stream,
    row_amax, row_codes, row_scales, row_operand,
    column_amax, column_codes, column_scales, column_operand,
    BF16_BITS: tl.constexpr, EVEN: tl.constexpr, BI: tl.constexpr, BJ: tl.constexpr, VECTOR: tl.constexpr,
    BY_EIGHTS: tl.constexpr, ONE_DRAW: tl.constexpr,
    ROWS: tl.constexpr, ROW_RULE: tl.constexpr, ROW_BR: tl.constexpr, ROW_BC: tl.constexpr,
    ROW_ROUNDING: tl.constexpr, ROW_N: tl.constexpr, ROW_MASK: tl.constexpr, ROW_FACTOR: tl.constexpr,
    COLUMNS: tl.constexpr, COLUMN_RULE: tl.constexpr, COLUMN_BR: tl.constexpr, COLUMN_BC: tl.constexpr,
    COLUMN_ROUNDING: tl.constexpr, COLUMN_N: tl.constexpr, COLUMN_MASK: tl.constexpr, COLUMN_FACTOR: tl.constexpr,
):  # fmt: skip
    """Blocks are given as BR rows by BC columns of x, for the column form too. An output that is None is not made."""
    tiles_j = tl.cdiv(J, BJ)
    i0 = (tl.program_id(0) // tiles_j).to(tl.int64) * BI
    j0 = (tl.program_id(0) % tiles_j) * BJ
    i = i0 + tl.arange(0, BI)
    j = j0 + tl.arange(0, BJ)
    j = tl.max_contiguous(j, VECTOR)
    pointers = x_ptr + i[:, None] * stride + j[None, :]
    inside = None if EVEN else (i < I)[:, None] & (j < J)[None, :]

    r16 = 0
    if ROWS:
        if ROW_ROUNDING > 0:
            r16 = draws(tl.load(seed_ptr), row_stream, i0, j0, J, BI, BJ, BY_EIGHTS)
        GROUP: tl.constexpr = ROW_N if ROW_N > ROW_BC else ROW_BC
        x = codecs.to_float32(tl.load(pointers, mask=inside, other=None if EVEN else 0), BF16_BITS)
        _form(
            x, r16, row_amax, row_codes, row_scales, row_operand, i0, j0, I, J,
            I if EVEN else tl.cdiv(I, ROW_BR) * ROW_BR, J if EVEN else tl.cdiv(J, GROUP) * GROUP,
            EVEN, VECTOR, True, ROW_RULE, ROW_BR, ROW_BC, ROW_ROUNDING, ROW_N, ROW_MASK, ROW_FACTOR,
        )  # fmt: skip
    if COLUMNS:
        if COLUMN_ROUNDING > 0:
            if not ONE_DRAW:
                r16 = draws(tl.load(seed_ptr), column_stream, i0, j0, J, BI, BJ, BY_EIGHTS)
        GROUP_I: tl.constexpr = COLUMN_N if COLUMN_N > COLUMN_BR else COLUMN_BR
        # Loaded anew (from the cache): to keep the tile would take more registers than there are.
        x = codecs.to_float32(tl.load(pointers, mask=inside, other=None if EVEN else 0), BF16_BITS)
        _form(
            x, r16, column_amax, column_codes, column_scales, column_operand, i0, j0, I, J,
            I if EVEN else tl.cdiv(I, GROUP_I) * GROUP_I, J if EVEN else tl.cdiv(J, COLUMN_BC) * COLUMN_BC,
            EVEN, VECTOR, False, COLUMN_RULE, COLUMN_BR, COLUMN_BC, COLUMN_ROUNDING, COLUMN_N, COLUMN_MASK, COLUMN_FACTOR,
        )  # fmt: skip


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
    tile = tiles.fit(_kind(rows, columns), height, width, needed)
    grid = (-(-height // tile.rows) * -(-width // tile.columns),)
    both_draw = rows is not None and columns is not None and rows.stochastic and columns.stochastic
    quantize_kernel[grid](
        as_bits(x), seed, height, width, x.stride(0), row_stream, column_stream,
        row_out.amax, row_out.codes, row_out.scales, _bits(row_out.operand),
        column_out.amax, column_out.codes, column_out.scales, _bits(column_out.operand),
        BF16_BITS=x.dtype == torch.bfloat16, BI=tile.rows, BJ=tile.columns, VECTOR=tile.vector or 16 // x.element_size(),
        EVEN=height % tile.rows == 0 and width % tile.columns == 0, BY_EIGHTS=width % 8 == 0,
        ONE_DRAW=both_draw and row_stream == column_stream and rows.rounding == columns.rounding,
        **_constants("ROW", rows, True), **_constants("COLUMN", columns, False),
        num_warps=tile.warps, enable_fp_fusion=False,
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


def _kind(rows: Scheme | None, columns: Scheme | None) -> str:
    if columns is not None and columns.block[0] == 1:
        return "rotated" if columns.hadamard or (rows is not None and rows.hadamard) else "columns"
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
