"""Quantize one tensor along its rows, its columns or both: the definition that every other backend must match bitwise.

The numbers follow TransformerEngine's NVFP4 reference (2.20), all in float32 and in this order (amax: the tensor's):

    S_enc = min(2688 / amax, FLT_MAX), 1 if amax is 0                S_dec = 1 / S_enc
    scale = E4M3(min(block_amax * (S_enc * f32(1/6)), FLT_MAX))      nearest even, saturating at 448
    enc   = min(1 / (f32(scale) * S_dec), FLT_MAX)                   from the *rounded* scale
    code  = E2M1(x * enc)
    value = code * ((f32(scale) * amax) * f32(1/2688))

It departs from it in two places, where that order misbehaves: below amax 7.9e-36 S_enc is clipped and the output
shrinks, so x and amax are first multiplied by 2^64 (exact); and non-finite input gives NaN, never a finite number.
MXFP4 follows the OCP MX specification v1.0, with its own scale rule (``floor``) or DeepSeek's (``ceil``).

Both forms of a tensor are computed in its own memory layout, x [I, J]: the row form takes blocks along J; the
column form, of x.T, along I, and hands back transposed views.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from nvfp4_kernels.quantized import Quantized
from nvfp4_kernels.reference import codecs
from nvfp4_kernels.reference.hadamard import rotate
from nvfp4_kernels.reference.philox import random16
from nvfp4_kernels.scheme import Scheme

FLT_MAX = float.fromhex("0x1.fffffep127")
ENCODE_RANGE = codecs.E4M3_LARGEST * codecs.E2M1_LARGEST  # 2688
SMALLEST_AMAX = ENCODE_RANGE / FLT_MAX  # below it 2688 / amax overflows
LARGEST_AMAX = FLT_MAX / codecs.E4M3_LARGEST  # above it scale * amax overflows
LIFT = 2.0**64
CEIL_SMALLEST_AMAX = 1e-4  # DeepSeek's floor under a block's amax
ELEMENTS_AT_ONCE = 131072  # rounded at once on a CPU
FORMS = ("packed", "decoded", "both")


def global_amax(x: Tensor, rows: Scheme | None, columns: Scheme | None) -> tuple[Tensor | None, Tensor | None]:
    """The float32 0-d amax that each form of ``x`` [I, J] is scaled by; NaN if any element is NaN or Inf.

    None for a form that is not asked for or has no global scale. After a Hadamard transform it is the amax of the
    transformed tensor.
    """
    _check_input(x)
    plain = None
    found = []
    for axis, scheme in ((1, rows), (0, columns)):
        if scheme is None or not scheme.has_global_scale:
            found.append(None)
        elif scheme.hadamard:
            found.append(_largest(_operand(x, scheme, axis).abs()))
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
) -> tuple[Quantized | None, Quantized | None]:
    """Quantize ``x`` (``rows``) and ``x.T`` (``columns``); None where no scheme is given.

    ``x``: float32, bfloat16 or float16 [I, J], any strides. ``amax_*``: float32 0-d, found here if None.
    ``seed``: int64 0-d on x's device, needed iff a scheme is stochastic. ``*_form``: "packed" (codes and scales),
    "decoded" (operand) or "both". ValueError for another dtype, rank or form, or a missing seed.

    Element (i, j) of x draws 16-bit number i * J + j of its stream in either form, so nothing that is appended below
    changes a draw, and two forms with one stream share their draws.
    """
    _check_input(x)
    for scheme, form in ((rows, rows_form), (columns, columns_form)):
        if form not in FORMS:
            raise ValueError(f"form must be one of {', '.join(FORMS)}, not {form!r}")
        if scheme is not None and scheme.stochastic and seed is None:
            raise ValueError("stochastic rounding needs a seed: an int64 0-d tensor on the device of x")
    height, width = x.shape
    # Padding along either axis may need draws beyond the tensor's own: row padding of all rows, then the last row's.
    groups = [scheme.group for scheme in (rows, columns) if scheme is not None] or [1]
    count = _round_up(height, max(groups)) * width + max(groups)
    streams: dict[int, Tensor] = {}

    def draws(stream: int) -> Tensor:
        if stream not in streams:
            streams[stream] = random16(seed, stream, count)
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
        results.append(_quantize_along(x, scheme, axis, amax, random, form))
    return results[0], results[1]


def decode(codes: Tensor, scales: Tensor, scheme: Scheme, columns: int) -> Tensor:
    """The operand a GEMM multiplies: bfloat16 [R, columns], without the global scale; exact (6 significant bits)."""
    values = codecs.unpack(codes)
    scale = _expand(_decode_scales(scales, scheme), scheme, codes.shape[0])
    axis = 1 if values.is_contiguous() else 0
    values = values if axis else values.t()
    blocked = _blocked(values, scheme.block[1], axis).mul_(_beside(scale, axis).to(torch.bfloat16))
    return _as_operand(blocked.view(values.shape), axis, columns)


def dequantize(
    codes: Tensor, scales: Tensor, amax: Tensor | None, scheme: Scheme, columns: int, dtype: torch.dtype
) -> Tensor:
    """The quantized tensor's values, ``dtype`` [R, columns] (of the transformed tensor after a Hadamard transform).

    ``amax``: float32 0-d, None for a scheme without a global scale. At the ends of the float32 range amax is moved by
    a power of two and back, so that no step of the chain over- or underflows.
    """
    values = codecs.unpack(codes).to(torch.float32)
    scale = _decode_scales(scales, scheme)
    lift = None
    if scheme.has_global_scale:
        one = torch.ones_like(amax)
        lift = torch.where(amax > LARGEST_AMAX, one / LIFT, torch.where(amax < SMALLEST_AMAX, one * LIFT, one))
        scale = (scale * (amax * lift)) * (1 / ENCODE_RANGE)
    scale = _expand(scale, scheme, codes.shape[0])
    axis = 1 if values.is_contiguous() else 0
    values = values if axis else values.t()
    _blocked(values, scheme.block[1], axis).mul_(_beside(scale, axis))
    if lift is not None:
        values.mul_(lift.reciprocal())
    return _as_operand(values, axis, columns).to(dtype)


def _quantize_along(
    x: Tensor, scheme: Scheme, axis: int, amax: Tensor | None, random: Tensor | None, form: str
) -> Quantized:
    """One form of x [I, J]: blocks along ``axis``, the result indexed with the other axis first."""
    height, width = x.shape
    operand = _operand(x, scheme, axis)
    blocked = _blocked(operand, scheme.block[1], axis)
    block_amax = blocked.abs().amax(dim=2 if axis else 1)  # [R, blocks] or [blocks, R]
    block_amax = _tile_amax(block_amax if axis else block_amax.t(), scheme)
    if scheme.has_global_scale:
        amax = _largest(block_amax) if amax is None else amax
        lift = _lift(amax)
        if lift is not None:
            blocked, block_amax = blocked * lift, block_amax * lift
        scales, encode = _nvfp4_scales(block_amax, amax if lift is None else amax * lift)
    else:
        amax = None
        scales, encode = _mx_scales(block_amax, scheme.rule)

    rows = width if axis == 0 else height
    if random is not None:  # number i * J + j for element (i, j), in the shape of the blocks
        block = scheme.block[1]
        random = random.as_strided(blocked.shape, (width, block, 1) if axis else (block * width, width, 1))
    y = _round(blocked, _beside(_expand(encode, scheme, rows), axis), random, scheme.rounding)

    codes = decoded = None
    if form != "decoded":
        codes = codecs.e2m1_encode(y)
        finite = _expand(~encode.isnan(), scheme, rows)  # no code means NaN: the scale says it
        codes = codecs.pack(codes.mul_(_beside(finite, axis)).view(operand.shape), axis)
        codes = codes if axis else codes.t()
    if form != "packed":
        y.mul_(_beside(_expand(_decode_scales(scales, scheme), scheme, rows), axis))
        columns = operand.shape[axis] if scheme.hadamard else x.shape[axis]
        decoded = _as_operand(y.view(operand.shape).to(torch.bfloat16), axis, columns)
    return Quantized(codes, scales if form != "decoded" else None, decoded, amax)


def _round(blocked: Tensor, encode: Tensor, random: Tensor | None, rounding: str) -> Tensor:
    """``blocked * encode`` on the E2M1 grid, a new float32 tensor; on a CPU piece by piece, to stay in its cache."""
    y = torch.empty_like(blocked)
    if y.numel() == 0:
        return y
    at_once = ELEMENTS_AT_ONCE if y.device.type == "cpu" else y.numel()
    step = max(1, at_once // y[0].numel())
    for start in range(0, len(y), step):
        part = slice(start, start + step)
        piece = torch.mul(blocked[part], encode[part], out=y[part])
        if rounding == "nearest":
            codecs.e2m1_nearest_(piece)
        else:
            codecs.e2m1_stochastic_(piece, random[part], 8 if rounding == "stochastic8" else 16)
    return y


def _nvfp4_scales(block_amax: Tensor, amax: Tensor) -> tuple[Tensor, Tensor]:
    """(uint8 E4M3 bytes, float32 encode factors), both of the shape of ``block_amax``. NaN stays NaN."""
    one = torch.ones_like(amax)
    s_enc = torch.div(one * ENCODE_RANGE, amax).clamp(max=FLT_MAX)  # a true division: `2688 / amax` rounds twice
    s_enc = torch.where(amax == 0, one, s_enc)
    s_enc = torch.where(amax.isinf(), torch.nan, s_enc)  # the reference takes 1 here, which would hide the Inf
    scale = (block_amax * (s_enc * (1 / codecs.E2M1_LARGEST))).clamp_(max=FLT_MAX)
    scale = scale.masked_fill_(block_amax.isinf(), torch.nan)
    byte = codecs.e4m3_encode(scale)
    encode = (codecs.e4m3_decode(byte) * s_enc.reciprocal()).reciprocal_().clamp_(max=FLT_MAX)
    return byte, encode


def _mx_scales(block_amax: Tensor, rule: str) -> tuple[Tensor, Tensor]:
    """(uint8 E8M0 bytes, float32 encode factors 2^-e), both of the shape of ``block_amax``. Exponents only, no log2."""
    finite = block_amax.isfinite()
    if rule == "floor":
        _, exponent = torch.frexp(block_amax.where(finite, 0.0))  # amax = m * 2^exponent, 0.5 <= m < 1
        exponent = torch.where(block_amax == 0, -127, exponent - 3)
    else:
        assert rule == "ceil", rule
        mantissa, exponent = torch.frexp(block_amax.where(finite, 0.0).clamp_(min=CEIL_SMALLEST_AMAX))
        exponent = exponent - 3 + (mantissa > 0.75)  # the least e with 6 * 2^e >= amax, as 6 = 0.75 * 2^3
    exponent = exponent.clamp(-127, 127)
    byte = torch.where(finite, exponent + 127, 255).to(torch.uint8)
    return byte, codecs.power_of_two(-exponent).masked_fill_(~finite, torch.nan)


def _lift(amax: Tensor) -> Tensor | None:
    """2^64 for an amax so small that its encode scale overflows, else 1 - or None where that is known on the host."""
    tiny = (amax > 0) & (amax < SMALLEST_AMAX)
    if amax.device.type == "cpu" and not tiny.item():
        return None  # saves a pass; on a GPU the pass is cheaper than the host's wait
    return torch.where(tiny, LIFT, 1.0).to(torch.float32)


def _operand(x: Tensor, scheme: Scheme, axis: int) -> Tensor:
    """x as float32, contiguous, padded with zeros along ``axis`` to the scheme's group and rotated if it says so."""
    x = x.to(torch.float32)
    missing = -x.shape[axis] % scheme.group
    if missing:
        x = F.pad(x, (0, missing) if axis else (0, 0, 0, missing))
    x = x.contiguous()
    return rotate(x, scheme.hadamard, scheme.sign_mask, axis).to(torch.float32) if scheme.hadamard else x


def _blocked(x: Tensor, block: int, axis: int) -> Tensor:
    """A view with the blocks along ``axis`` apart: [I, J // block, block] or [I // block, block, J]."""
    height, width = x.shape
    return x.view(height, width // block, block) if axis else x.view(height // block, block, width)


def _beside(scale: Tensor, axis: int) -> Tensor:
    """Scales [R, blocks] shaped to broadcast against ``_blocked``."""
    return scale.unsqueeze(2) if axis else scale.t().unsqueeze(1)


def _tile_amax(block_amax: Tensor, scheme: Scheme) -> Tensor:
    """[R, blocks] -> [ceil(R / rows of a block), blocks]."""
    tile = scheme.block[0]
    if tile == 1:
        return block_amax
    rows, blocks = block_amax.shape
    padded = F.pad(block_amax, (0, 0, 0, -rows % tile))
    return padded.reshape(padded.shape[0] // tile, tile, blocks).amax(dim=1)


def _expand(scale: Tensor, scheme: Scheme, rows: int) -> Tensor:
    """The inverse shape change: a tile's value on each of its rows, [rows, blocks]."""
    return scale if scheme.block[0] == 1 else scale.repeat_interleave(scheme.block[0], dim=0)[:rows]


def _decode_scales(scales: Tensor, scheme: Scheme) -> Tensor:
    return codecs.e4m3_decode(scales) if scheme.scale == "e4m3" else codecs.e8m0_decode(scales)


def _as_operand(values: Tensor, axis: int, columns: int) -> Tensor:
    return values[:, :columns] if axis else values[:columns].t()


def _largest(magnitudes: Tensor) -> Tensor:
    """float32 0-d: the largest, NaN if any is NaN or Inf, 0 of nothing."""
    if magnitudes.numel() == 0:
        return torch.zeros((), dtype=torch.float32, device=magnitudes.device)
    largest = magnitudes.amax().to(torch.float32)
    return torch.where(largest.isinf(), torch.nan, largest)


def _round_up(number: int, multiple: int) -> int:
    return (number + multiple - 1) // multiple * multiple


def _check_input(x: Tensor) -> None:
    if x.dim() != 2:
        raise ValueError(f"a tensor of two dimensions is quantized, not one of shape {tuple(x.shape)}")
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"float32, bfloat16 or float16 is quantized, not {x.dtype}")
