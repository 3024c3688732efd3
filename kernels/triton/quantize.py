"""Quantize a tensor along its rows, its columns or both from one read: the bits of ``reference/quantize.py``.

A program reads one tile of x [I, J] and writes everything that is asked of it: packed codes and scales, the decoded
operand, or both, of the row form, the column form, or both. The column form keeps x's layout and is handed back as
transposed views, so no element ever changes its place; and since a random number belongs to an element of x, one draw
serves both forms where their streams are equal.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from nvfp4_kernels.quantized import Quantized
from nvfp4_kernels.scheme import Scheme
from nvfp4_kernels.triton import general, tiles
from nvfp4_kernels.triton.amax import amax_vector, as_bits, factor, global_amax, has_xorsign, readable
from nvfp4_kernels.triton.conversion_check import conversion_on
from nvfp4_kernels.triton.decode import decode
from nvfp4_kernels.triton.general import fused
from nvfp4_kernels.triton.launch import Work, launch
from nvfp4_kernels.triton.quantize_kernel import quantize_kernel

__all__ = ["amax_vector", "decode", "global_amax", "quantize"]

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
    origin: tuple[int, int, int] | None = None,
) -> tuple[Quantized | None, Quantized | None]:
    """Quantize ``x`` (``rows``) and ``x.T`` (``columns``) from one read; None where no scheme is given.

    ``x``: float32, bfloat16 or float16 [I, J], any strides (copied first where a row's elements lie apart).
    ``amax_*``: float32 0-d, found here if None. ``seed``: int64 0-d on x's device, needed iff a scheme is stochastic.
    ``*_form``: "packed" (codes and scales), "decoded" (operand) or "both".
    ``origin`` (row, column, width): x is the part of a tensor ``width`` wide that begins there, and draws as there.
    Equal streams share their draws, which is faster. ValueError for another dtype, rank, device or form, or no seed.
    """
    x = readable(x)
    for scheme, form in ((rows, rows_form), (columns, columns_form)):
        if form not in FORMS:
            raise ValueError(f"form must be one of {', '.join(FORMS)}, not {form!r}")
        if scheme is not None and scheme.random and (seed is None or seed.device != x.device):
            raise ValueError(f"stochastic rounding needs a seed: an int64 0-d tensor on {x.device}")
    find_rows = rows if amax_rows is None else None
    find_columns = columns if amax_columns is None else None
    if find_rows is not None or find_columns is not None:
        found = global_amax(x, find_rows, find_columns, seed)
        amax_rows = amax_rows if find_rows is None else found[0]
        amax_columns = amax_columns if find_columns is None else found[1]

    draw_i, draw_j, draw_width = origin = origin or (0, 0, x.shape[1])
    row_general = rows is not None and not fused(rows)
    column_general = columns is not None and not fused(columns)
    if row_general or column_general:  # another kernel, which makes one form at a time
        common = dict(
            amax_rows=amax_rows, amax_columns=amax_columns, seed=seed, row_stream=row_stream,
            column_stream=column_stream, rows_form=rows_form, columns_form=columns_form, origin=origin,
        )  # fmt: skip
        return (
            general.quantize(x, rows, False, rows_form, amax_rows, seed, row_stream, origin)
            if row_general else quantize(x, rows, None, **common)[0],
            general.quantize(x, columns, True, columns_form, amax_columns, seed, column_stream, origin)
            if column_general else quantize(x, None, columns, **common)[1],
        )  # fmt: skip
    by_eights = draw_width % 8 == 0 and draw_j % 8 == 0
    streams_equal, convert = row_stream == column_stream, conversion_on(x.device)
    forms = (rows, columns, rows_form, columns_form)
    far = max(x.shape[1], x.stride(0)) >= 2**26
    key = (tuple(x.shape), x.dtype, *forms, streams_equal, by_eights, convert, has_xorsign(x.device), far)
    plan = _plan(*key)
    row_out = _outputs(x, plan.row_shapes, amax_rows)
    column_out = _outputs(x, plan.column_shapes, amax_columns)
    if plan.work.programs:
        arguments = (
            as_bits(x), seed, *x.shape, x.stride(0), plan.strips, row_stream, column_stream, draw_i, draw_j, draw_width,
            row_out.amax, row_out.codes, row_out.scales, _bits(row_out.operand),
            column_out.amax, column_out.codes, column_out.scales, _bits(column_out.operand),
        )  # fmt: skip
        launch(quantize_kernel, plan.work, key, arguments)
    column_result = Quantized(*(t if t is None else t.T for t in column_out[:3]), column_out.amax)
    return (None if rows is None else row_out), (None if columns is None else column_result)


class _Plan(NamedTuple):
    work: Work
    strips: int
    row_shapes: Quantized  # shapes in place of tensors, in the layout of x; None for what is not made
    column_shapes: Quantized


@lru_cache(maxsize=4096)
def _plan(
    shape: tuple[int, int], dtype: torch.dtype, rows: Scheme | None, columns: Scheme | None,
    rows_form: str, columns_form: str, streams_equal: bool, by_eights: bool, convert: int = 0,
    xorsign: bool = False, far: bool = False,
) -> _Plan:  # fmt: skip
    height, width = shape
    needed = max(rows.block[0] if rows else 1, columns.group if columns else 1)  # rows of x in one block
    columns_packed = columns is not None and columns_form != "decoded"
    tile = tiles.fit(_kind(rows, columns, columns_packed), height, width, needed)
    tiles_i, tiles_j = -(-height // tile.rows), -(-width // tile.columns)
    strips = tiles.strips(tile, tiles_i, tiles_j) if tiles_j and (rows is not None or columns is not None) else 0
    both_draw = rows is not None and columns is not None and rows.stochastic and columns.stochastic
    vector = 16 // dtype.itemsize
    constants = dict(
        BF16_BITS=dtype == torch.bfloat16, EVEN=height % tile.rows == 0 and width % tile.columns == 0,
        BI=tile.rows, BJ=tile.columns, ROW_VECTOR=vector, COLUMN_VECTOR=tile.vector or vector, BY_EIGHTS=by_eights,
        ONE_DRAW=both_draw and streams_equal and rows.rounding == columns.rounding,
        **_constants("ROW", rows, True), **_constants("COLUMN", columns, False), CONVERT=convert,
        XORSIGN=xorsign, FAR=far, AHEAD=tile.ahead,
    )  # fmt: skip
    row_shapes, column_shapes = _shapes(shape, rows, rows_form, 1), _shapes(shape, columns, columns_form, 0)
    registers = tile.registers if dtype.itemsize == 2 else 0
    return _Plan(Work(strips * tiles_j, constants, tile.warps, registers), strips, row_shapes, column_shapes)


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
        if columns_packed:  # draws beside two packed forms leave no registers for a wide tile
            return "both_packed_stochastic" if rows is not None and columns.stochastic else "columns_packed"
        return "columns_stochastic" if columns.stochastic else "columns"
    return "rows" if rows is not None and rows.block[0] == 1 else "square"


def _shapes(shape: tuple[int, int], scheme: Scheme | None, form: str, axis: int) -> Quantized:
    """The shapes of one form, in the layout of x: reduced along ``axis``, which is padded to the scheme's group."""
    if scheme is None:
        return Quantized(None, None, None, None)

    def reduced(block: tuple[int, int], padded: bool = True) -> tuple[int, ...]:
        sizes = list(shape)
        if padded:
            sizes[axis] = -(-sizes[axis] // scheme.group) * scheme.group
        sizes[1 - axis] = -(-sizes[1 - axis] // block[0])
        sizes[axis] = sizes[axis] // block[1]
        return tuple(sizes)

    packed, decoded = form != "decoded", form != "packed"
    return Quantized(
        reduced((1, 2)) if packed else None,
        reduced(scheme.block) if packed else None,
        reduced((1, 1), padded=bool(scheme.hadamard)) if decoded else None,
        () if scheme.has_global_scale else None,
    )


def _outputs(x: Tensor, shapes: Quantized, amax: Tensor | None) -> Quantized:
    """Uninitialised results, and the amax that was found."""

    def empty(sizes: tuple[int, ...] | None, dtype: torch.dtype) -> Tensor | None:
        return None if sizes is None else torch.empty(sizes, dtype=dtype, device=x.device)

    return Quantized(
        empty(shapes.codes, torch.uint8),
        empty(shapes.scales, torch.uint8),
        empty(shapes.operand, torch.bfloat16),
        None if shapes.amax is None else amax,
    )


def _bits(operand: Tensor | None) -> Tensor | None:
    return None if operand is None else operand.view(torch.int16)


def planned(rows: Scheme | None, columns: Scheme | None, convert: int) -> _Plan:
    """The launch of a large bfloat16 tensor, packed, as a layer makes it; ``convert``: see ``codecs_sm100``."""
    return _plan((8192, 8192), torch.bfloat16, rows, columns, "packed", "packed", True, True, convert)


def compile_arguments(rows: Scheme | None, columns: Scheme | None, plan: _Plan) -> tuple[dict, dict]:
    """(signature, constexprs) of that launch, for ``instructions.compile_for``."""
    sizes = ("height", "width", "stride", "strips", "row_stream", "column_stream", "draw_i", "draw_j", "draw_width")
    signature = {"x_ptr": "*i16", **dict.fromkeys(sizes, "i32")}
    constants = dict(plan.work.constants)
    if any(scheme is not None and scheme.random for scheme in (rows, columns)):
        signature["seed_ptr"] = "*i64"
    else:
        constants["seed_ptr"] = None
    for name, shapes in (("row", plan.row_shapes), ("column", plan.column_shapes)):
        for field, type_ in (("amax", "*fp32"), ("codes", "*u8"), ("scales", "*u8"), ("operand", "*i16")):
            if getattr(shapes, field) is None:
                constants[f"{name}_{field}"] = None
            else:
                signature[f"{name}_{field}"] = type_
    return signature, constants
