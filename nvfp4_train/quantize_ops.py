"""The operators behind ``quantize``: opaque to torch.compile, run as Python, which is where the ledger counts.

One operator makes the row form (of ``x``), the column form (of ``x.T``) or both from one read of ``x``; the global
amaxes come first, by an operator of their own, so that ranks that share a tensor can join them in between.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from nvfp4_kernels.quantized import Quantized, amax_place
from nvfp4_kernels.reference import quantize as reference
from nvfp4_kernels.scheme import Scheme
from nvfp4_train import ledger
from nvfp4_train.operators import operator, shapes_of


class Layout(NamedTuple):
    """Shapes of one form of ``x [I, J]``, in the order the op returns them."""

    codes: tuple[int, int]
    scales: tuple[int, int]
    operand: tuple[int, int]
    outer: tuple[int, int] | None
    mask: tuple[int, int] | None


def layout_of(rows: int, columns: int, scheme: Scheme) -> Layout:
    padded = -(-columns // scheme.group) * scheme.group
    block_rows, block_columns = scheme.on(rows, padded).block
    return Layout(
        (rows, padded // 2 if scheme.number.packed else padded),
        (-(-rows // max(block_rows, 1)), padded // max(block_columns, 1)),
        (rows, padded if scheme.hadamard else columns),
        None if scheme.outer is None else (rows, padded // scheme.outer[1]),
        (rows, padded // 8) if scheme.masked else None,
    )


def able(backend: str, *schemes: Scheme | None) -> str:
    """``backend``, or the reference where a scheme is not in Triton's kernels: the ledger then says so, by operand."""
    return backend if all(scheme is None or scheme.in_triton for scheme in schemes) else "reference"


def kernels_of(backend: str):
    if backend == "reference":
        return reference
    from nvfp4_kernels.triton import quantize as triton_kernels  # triton is not installed everywhere

    return triton_kernels


@operator(
    "quantize(Tensor x, str? rows, str? columns, Tensor? amaxes, Tensor? seed, int stream, str rows_form, "
    "str columns_form, str backend, SymInt where, str rows_name, str columns_name, SymInt[]? origin) -> Tensor[]"
)
def quantize_op(
    x: Tensor,
    rows: str | None,
    columns: str | None,
    amaxes: Tensor | None,
    seed: Tensor | None,
    stream: int,
    rows_form: str,
    columns_form: str,
    backend: str,
    where: int,
    rows_name: str,
    columns_name: str,
    origin: list[int] | None,
) -> list[Tensor]:
    row_scheme = None if rows is None else Scheme.parse(rows)
    column_scheme = None if columns is None else Scheme.parse(columns)
    if rows and columns and able(backend, row_scheme) != able(backend, column_scheme):  # one of them is not in Triton
        rest = (amaxes, seed, stream, rows_form, columns_form, backend, where, rows_name, columns_name, origin)
        return quantize_op(x, rows, None, *rest) + quantize_op(x, None, columns, *rest)
    backend = able(backend, row_scheme, column_scheme)
    for scheme, name in ((rows, rows_name), (columns, columns_name)):
        if scheme is not None:
            ledger.count_quantization(where, name, scheme, backend, x.numel())
    if x.numel() == 0:
        return [t.zero_() for t in _empty_outputs(x, row_scheme, column_scheme, rows_form, columns_form)]
    row_form, column_form = kernels_of(backend).quantize(
        x, row_scheme, column_scheme, seed=seed, row_stream=stream, column_stream=stream,
        rows_form=rows_form, columns_form=columns_form,
        amax_rows=_amax_of(amaxes, row_scheme, False), amax_columns=_amax_of(amaxes, column_scheme, True),
        origin=None if origin is None else tuple(origin),
    )  # fmt: skip
    if ledger.observed():
        for form, scheme, name in ((row_form, rows, rows_name), (column_form, columns, columns_name)):
            if form is not None:
                transposed = form is column_form
                ledger.show_quantization(where, name, scheme, backend, x, transposed, seed, stream, form)
    return _flatten(row_form, transpose=False) + _flatten(column_form, transpose=True)


def _amax_of(amaxes: Tensor | None, scheme: Scheme | None, columns: bool) -> Tensor | None:
    return None if scheme is None or not scheme.has_global_scale else amaxes[amax_place(scheme, columns)]


def _flatten(form: Quantized | None, transpose: bool) -> list[Tensor]:
    if form is None:
        return []
    parts = (form.codes, form.scales, form.operand, form.outer, form.mask)
    return [(t.T if transpose else t).contiguous() for t in parts if t is not None]


def _empty_outputs(x, row_scheme, column_scheme, rows_form, columns_form) -> list[Tensor]:
    outputs = []
    forms = ((row_scheme, rows_form, x.shape[0], x.shape[1]), (column_scheme, columns_form, x.shape[1], x.shape[0]))
    for index, (scheme, form, rows, columns) in enumerate(forms):
        if scheme is None:
            continue
        shapes = layout_of(rows, columns, scheme)
        orient = (lambda s: s[::-1]) if index == 1 else (lambda s: s)
        if form != "decoded":
            outputs.append(x.new_empty(orient(shapes.codes), dtype=torch.uint8))
            scale_type = torch.float32 if scheme.scale == "float32" else torch.uint8
            outputs.append(x.new_empty(orient(shapes.scales), dtype=scale_type))
        if form != "packed":
            outputs.append(x.new_empty(orient(shapes.operand), dtype=_operand_type(scheme)))
        if shapes.outer is not None:
            outputs.append(x.new_empty(orient(shapes.outer), dtype=torch.float32))
        if shapes.mask is not None:
            outputs.append(x.new_empty(orient(shapes.mask), dtype=torch.uint8))
    return outputs


@shapes_of(quantize_op)
def _(
    x, rows, columns, amaxes, seed, stream, rows_form, columns_form, backend, where, rows_name, columns_name, origin
):  # fmt: skip
    row_scheme = None if rows is None else Scheme.parse(rows)
    column_scheme = None if columns is None else Scheme.parse(columns)
    return _empty_outputs(x, row_scheme, column_scheme, rows_form, columns_form)


@operator("amaxes(Tensor x, str? rows, str? columns, Tensor? seed, str backend) -> Tensor")
def amaxes_op(x: Tensor, rows: str | None, columns: str | None, seed: Tensor | None, backend: str) -> Tensor:
    schemes = [None if text is None else Scheme.parse(text) for text in (rows, columns)]
    schemes = [scheme if scheme is not None and scheme.has_global_scale else None for scheme in schemes]
    kernels = kernels_of(able(backend, *schemes))
    if x.numel() and kernels is not reference:
        return kernels.amax_vector(x, *schemes, seed)
    found = x.new_zeros(3, dtype=torch.float32)
    if x.numel():
        amaxes = kernels.global_amax(x, *schemes, seed)
        for scheme, amax, along_columns in zip(schemes, amaxes, (False, True), strict=True):
            if scheme is not None:
                found[amax_place(scheme, along_columns)] = amax
    return found


@shapes_of(amaxes_op)
def _(x, rows, columns, seed, backend):
    return x.new_empty(3, dtype=torch.float32)


def _operand_type(scheme: Scheme) -> torch.dtype:
    return torch.bfloat16 if scheme.exact_in_bf16 else torch.float32


@operator("decode(Tensor codes, Tensor scales, Tensor? outer, str scheme, SymInt columns, str backend) -> Tensor")
def decode_op(
    codes: Tensor, scales: Tensor, outer: Tensor | None, scheme: str, columns: int, backend: str
) -> Tensor:
    parsed = Scheme.parse(scheme)
    if codes.numel() == 0:
        return codes.new_zeros(codes.shape[0], columns, dtype=_operand_type(parsed))
    outers = () if outer is None else (outer,)
    decoded = kernels_of(backend).decode(codes, scales, parsed, columns, *outers)
    # the same strides as the fake says: those of the codes
    return decoded.contiguous() if _row_major(codes) else decoded.T.contiguous().T


@shapes_of(decode_op)
def _(codes, scales, outer, scheme, columns, backend):
    rows, dtype = codes.shape[0], _operand_type(Scheme.parse(scheme))
    if _row_major(codes):
        return codes.new_empty(rows, columns, dtype=dtype)
    return codes.new_empty(columns, rows, dtype=dtype).T


def _row_major(codes: Tensor) -> bool:
    return codes.stride(1) == 1


@operator("draw_seed(Tensor x, SymInt where) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))
def draw_seed_op(x: Tensor, where: int) -> Tensor:
    return torch.randint(0, 2**32, (), dtype=torch.int64, device=x.device)


@shapes_of(draw_seed_op)
def _(x, where):
    return x.new_empty((), dtype=torch.int64)
