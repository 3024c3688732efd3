"""Quantize one tensor along its rows, its columns or both: the definition that every other backend must match bitwise.

    1  the signed Hadamard transform along the blocks' axis, rounded to BF16 (hadamard.py)
    2  amax of the tensor or of the outer blocks, amax (or ``spread``) of the blocks
    3  block scales and encode factors by the scheme's rule (scales.py), four over six (select.py)
    4  element = round(x * enc), x / s for float32 scales: to nearest or stochastically (codecs.py)
    5  MS-EDEN's corrected scales (select.py)

For NVFP4 the numbers follow TransformerEngine's reference (2.20). They depart from it in two places, where its order
misbehaves: below amax 7.9e-36 S_enc is clipped and the output shrinks, so x and amax are first multiplied by 2^64
(exact); and non-finite input gives NaN, never a finite number.

Both forms of a tensor are computed in its own memory layout, x [I, J]: the row form takes blocks along J; the
column form, of x.T, along I, and hands back transposed views.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from nvfp4_kernels.quantized import Quantized
from nvfp4_kernels.reference import codecs, scales, select
from nvfp4_kernels.reference.blocks import (
    as_operand,
    beside,
    blocked,
    expand,
    outermost,
    round_up,
    tiled,
    within_outer,
)  # fmt: skip
from nvfp4_kernels.reference.decode import LIFT, block_scales, decode, dequantize
from nvfp4_kernels.reference.hadamard import rotate, step_signs
from nvfp4_kernels.reference.philox import DRAWS_PER_CALL, random16, random16_rows
from nvfp4_kernels.reference.scales import FLT_MAX
from nvfp4_kernels.scheme import PER_STEP, Scheme

__all__ = ["decode", "dequantize", "global_amax", "quantize"]

ENCODE_RANGE = codecs.E4M3_LARGEST * codecs.E2M1_LARGEST  # 2688
SMALLEST_AMAX = ENCODE_RANGE / FLT_MAX  # below it 2688 / amax overflows
ELEMENTS_AT_ONCE = 131072  # rounded at once on a CPU
FORMS = ("packed", "decoded", "both")


def global_amax(
    x: Tensor, rows: Scheme | None, columns: Scheme | None, seed: Tensor | None = None
) -> tuple[Tensor | None, Tensor | None]:
    """The float32 0-d amax that each form of ``x`` [I, J] is scaled by; NaN if any element is NaN or Inf.

    None for a form that is not asked for or has no global scale. After a Hadamard transform it is the amax of the
    transformed tensor; ``seed`` as in ``quantize``, for signs that are drawn.
    """
    _check_input(x)
    plain = None
    found = []
    for axis, scheme in ((1, rows), (0, columns)):
        if scheme is None or not scheme.has_global_scale:
            found.append(None)
        elif scheme.hadamard:
            found.append(_largest(_operand(x, scheme, axis, seed).abs()))
        else:
            plain = _largest(x.abs()) if plain is None else plain
            found.append(plain)
    return found[0], found[1]


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
    """Quantize ``x`` (``rows``) and ``x.T`` (``columns``); None where no scheme is given.

    ``x``: float32, bfloat16 or float16 [I, J], any strides. ``amax_*``: float32 0-d, found here if None.
    ``seed``: int64 0-d on x's device, needed iff a scheme is ``random``. ``*_form``: "packed" (codes and scales),
    "decoded" (operand) or "both". ValueError for another dtype, rank or form, or a missing seed.

    Element (i, j) of x draws 16-bit number i * J + j of its stream in either form, so nothing that is appended below
    changes a draw, and two forms with one stream share their draws. ``origin`` (row, column, width): x is the part of a
    tensor ``width`` wide that begins at (row, column), and draws the numbers it would draw there:
    (i + row) * width + (j + column).
    """
    _check_input(x)
    for scheme, form in ((rows, rows_form), (columns, columns_form)):
        if form not in FORMS:
            raise ValueError(f"form must be one of {', '.join(FORMS)}, not {form!r}")
        if scheme is not None and scheme.random and seed is None:
            raise ValueError("stochastic rounding needs a seed: an int64 0-d tensor on the device of x")
    height, width = x.shape
    # Padding along either axis takes the numbers that follow in its row or column, past the tensor's own.
    padded = [round_up(size, s.group if s else 1) for size, s in ((height, columns), (width, rows))]
    streams: dict[int, Tensor] = {}

    def draws(stream: int) -> Tensor:
        if stream not in streams:
            streams[stream] = _draws(seed, stream, padded, width, origin)
        return streams[stream]

    results = []
    for axis, scheme, amax, stream, form in (
        (1, rows, amax_rows, row_stream, rows_form),
        (0, columns, amax_columns, column_stream, columns_form),
    ):
        if scheme is None:
            results.append(None)
            continue
        random = draws(stream) if scheme.stochastic else None
        results.append(_quantize_along(x, scheme, axis, amax, random, form, seed))
    return results[0], results[1]


def _quantize_along(
    x: Tensor, scheme: Scheme, axis: int, amax: Tensor | None, random: Tensor | None, form: str, seed: Tensor | None
) -> Quantized:
    """One form of x [I, J]: blocks along ``axis``, the result indexed with the other axis first."""
    operand = _operand(x, scheme, axis, seed)
    rows = x.shape[1 - axis]
    columns = operand.shape[axis] if scheme.hadamard else x.shape[axis]
    scheme_, scheme = scheme, scheme.on(rows, operand.shape[axis])
    block = scheme.block[1]
    apart = blocked(operand, block, axis)
    block_amax = apart.abs().amax(dim=2 if axis else 1)  # [R, blocks] or [blocks, R]
    block_amax = tiled(block_amax if axis else block_amax.t(), scheme)
    outer = None
    if scheme_.has_global_scale:
        amax = _largest(block_amax) if amax is None else amax
    else:
        amax = None
    if scheme.outer is not None:
        outer = outermost(block_amax, scheme)
        outer = torch.where(outer.isinf(), torch.nan, outer)
    level = amax if outer is None else within_outer(outer, scheme)
    if scheme.clip:
        block_amax = scales.spread(apart, axis, scheme.clip)

    lift = _lift(level, scheme) if scheme.rule == "nvfp4" else None
    if lift is not None:
        apart = apart * (lift if lift.dim() == 0 else beside(lift, axis))
        block_amax, level = block_amax * lift, level * lift
    if scheme_.tensor_scale_only:
        block_amax = amax.expand(1, 1)
    stored, encode = _block_scales(apart, block_amax, level, scheme, axis)

    if random is not None:  # the numbers in the shape of the blocks
        step = random.stride(0)
        random = random.as_strided(
            apart.shape, (step, block, 1) if axis else (block * step, step, 1), random.storage_offset()
        )
    y, mask = _round(apart, beside(expand(encode, scheme, rows), axis), random, scheme)
    if scheme.rounding == "stochastic_scale":
        scaled = apart * beside(encode, axis)
        stored = select.corrected_scales(scaled, y, stored, random, scheme, axis)

    codes = decoded = None
    if form != "decoded":
        codes = codecs.encode(y, scheme.number)
        finite = expand(~encode.isnan(), scheme, rows)  # no code means NaN: the scale says it
        codes = codes.mul_(beside(finite, axis)).view(operand.shape)
        codes = codecs.pack(codes, axis) if scheme.number.packed else codes
        codes = codes if axis else codes.t()
    if form != "packed":
        decoded = _decoded(y, stored, outer, scheme_, scheme, axis).view(operand.shape)
        decoded = as_operand(decoded, axis, columns)
    if mask is not None:
        mask = codecs.pack_bits(mask.view(operand.shape), axis)
        mask = mask if axis else mask.t()
    return Quantized(codes, stored if form != "decoded" else None, decoded, amax, outer, mask)


def _block_scales(
    apart: Tensor, block_amax: Tensor, level: Tensor | None, scheme: Scheme, axis: int
) -> tuple[Tensor, Tensor]:
    """(what is stored, the factors that x is multiplied by - or divided by, for float32 scales), [tiles, blocks]."""
    if scheme.scale == "e8m0":
        return scales.power_of_two(block_amax, scheme)
    if scheme.rule != "nvfp4":
        return scales.one_level(block_amax, scheme)
    s_enc = scales.encode_scale(level, scheme)
    if scheme.select:
        return select.four_over_six(apart, block_amax, level, s_enc, scheme, axis)
    return scales.two_level(block_amax, s_enc, scheme)


def _decoded(y: Tensor, stored: Tensor, outer: Tensor | None, given: Scheme, scheme: Scheme, axis: int) -> Tensor:
    """The operand from the grid ``y``, in place where it can be; the same numbers as ``decode`` gives."""
    if given.tensor_scale_only:
        return y.to(torch.bfloat16)
    rows = y.shape[0] if axis else y.shape[2]
    scale, lift = block_scales(stored, scheme, outer)
    y.mul_(beside(expand(scale, scheme, rows), axis))
    if lift is not None:
        y.mul_(beside(within_outer(lift.reciprocal(), scheme), axis))
    return y.to(torch.bfloat16) if given.exact_in_bf16 else y


def _round(apart: Tensor, encode: Tensor, random: Tensor | None, scheme: Scheme) -> tuple[Tensor, Tensor | None]:
    """(``apart * encode`` on the element's grid, a new float32 tensor; which elements do not saturate, if asked).

    On a CPU piece by piece, to stay in its cache.
    """
    y = torch.empty_like(apart)
    mask = torch.empty_like(apart, dtype=torch.bool) if scheme.masked else None
    if y.numel() == 0:
        return y, mask
    scaling = torch.div if scheme.scale == "float32" else torch.mul
    element, rounding = scheme.number, scheme.rounding
    at_once = ELEMENTS_AT_ONCE if y.device.type == "cpu" else y.numel()
    step = max(1, at_once // y[0].numel())
    for start in range(0, len(y), step):
        part = slice(start, start + step)
        piece = scaling(apart[part], encode[part], out=y[part])
        if mask is not None:
            torch.le(piece.abs(), element.largest, out=mask[part])
        if rounding in ("nearest", "stochastic_scale"):
            codecs.nearest_(piece, element)
        else:
            codecs.stochastic_(piece, random[part], element, 8 if rounding == "stochastic8" else 16)
    return y, mask


def _draws(seed: Tensor, stream: int, padded: list[int], width: int, origin: tuple[int, int, int] | None) -> Tensor:
    """uint16 ``padded`` (rows, columns): the numbers of x's elements, ``width`` a row, and of those that padding
    adds."""
    row, column, whole = origin or (0, 0, width)
    first = row * whole + column
    if whole != width:
        return random16_rows(seed, stream, *padded, first, whole)
    rows, columns = padded
    return random16(seed, stream, rows * width + columns, first).as_strided(padded, (width, 1), first % DRAWS_PER_CALL)


def _lift(amax: Tensor, scheme: Scheme) -> Tensor | None:
    """2^64 for an amax so small that its encode scale overflows, else 1 - or None where that is known on the host."""
    tiny = (amax > 0) & (amax < scheme.top * scheme.range / FLT_MAX)
    if amax.device.type == "cpu" and not tiny.any().item():
        return None  # saves a pass; on a GPU the pass is cheaper than the host's wait
    return torch.where(tiny, LIFT, 1.0).to(torch.float32)


def _operand(x: Tensor, scheme: Scheme, axis: int, seed: Tensor | None) -> Tensor:
    """x as float32, contiguous, padded with zeros along ``axis`` to the scheme's group and rotated if it says so."""
    x = x.to(torch.float32)
    missing = -x.shape[axis] % scheme.group
    if missing:
        x = F.pad(x, (0, missing) if axis else (0, 0, 0, missing))
    x = x.contiguous()
    if not scheme.hadamard:
        return x
    signs = step_signs(seed, scheme.hadamard) if scheme.sign_mask == PER_STEP else scheme.sign_mask
    return rotate(x, scheme.hadamard, signs, axis).to(torch.float32)


def _largest(magnitudes: Tensor) -> Tensor:
    """float32 0-d: the largest, NaN if any is NaN or Inf, 0 of nothing."""
    if magnitudes.numel() == 0:
        return torch.zeros((), dtype=torch.float32, device=magnitudes.device)
    largest = magnitudes.amax().to(torch.float32)
    return torch.where(largest.isinf(), torch.nan, largest)


def _check_input(x: Tensor) -> None:
    if x.dim() != 2:
        raise ValueError(f"a tensor of two dimensions is quantized, not one of shape {tuple(x.shape)}")
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"float32, bfloat16 or float16 is quantized, not {x.dtype}")
