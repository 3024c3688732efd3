"""Any scheme on the GPU, one form at a time: the launches behind general_kernel.py.

``fused`` says which schemes the kernel of quantize_kernel.py does instead.
"""

import math
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from nvfp4_kernels.quantized import Quantized
from nvfp4_kernels.scheme import PER_STEP, WHOLE, Scheme
from nvfp4_kernels.triton.general_kernel import general_amax_kernel, general_decode_kernel, general_kernel
from nvfp4_kernels.triton.launch import Work, launch

ROUNDINGS = ("nearest", "stochastic", "stochastic8", "stochastic_scale")
TILE = 4096  # elements of a program
PER_WARP = 512
FUSED = {("e4m3", "nvfp4", (1, 16)), ("e4m3", "nvfp4", (16, 16))} | {
    ("e8m0", rule, (1, 32)) for rule in ("floor", "ceil")
}


@lru_cache(maxsize=4096)
def fused(scheme: Scheme) -> bool:
    """Whether the fused kernel has it: the formats and choices of the standard NVFP4 and MXFP4 recipes."""
    plain = Scheme(
        "e2m1", scheme.scale, scheme.rule, scheme.block, scheme.rounding, scheme.hadamard, scheme.sign_mask,
        requantized=scheme.requantized, split=scheme.split,
    )  # fmt: skip
    return (
        scheme == plain
        and (scheme.scale, scheme.rule, scheme.block) in FUSED
        and scheme.rounding != "stochastic_scale"
        and scheme.hadamard in (0, 16)
        and scheme.sign_mask != PER_STEP
    )


def amax_of(x: Tensor, scheme: Scheme, columns: bool, seed: Tensor | None, out: Tensor) -> None:
    """The bits of the amax of ``x`` [I, J] after the scheme's rotation, into ``out``, int32 0-d and zero."""
    rows, length, strides = _seen(x, columns)
    key = (rows, length, x.dtype, scheme)
    arguments = (_bits(x), seed if scheme.sign_mask == PER_STEP else None, out, rows, length, *strides)
    launch(general_amax_kernel, _amax_work(*key), key, arguments)


def quantize(
    x: Tensor, scheme: Scheme, columns: bool, form: str, amax: Tensor | None, seed: Tensor | None, stream: int,
    origin: tuple[int, int, int],
) -> Quantized:  # fmt: skip
    """One form of ``x`` [I, J]: of x itself, or of x.T (``columns``), kept in x's layout. As in quantize.py."""
    rows, length, strides = _seen(x, columns)
    padded = -(-length // scheme.group) * scheme.group
    local = scheme.on(rows, padded)

    def empty(height: int, width: int, dtype: torch.dtype) -> Tensor:
        if columns:
            return torch.empty(width, height, dtype=dtype, device=x.device).T
        return torch.empty(height, width, dtype=dtype, device=x.device)

    codes = stored = operand = outer = mask = given = None
    if form != "decoded":
        codes = empty(rows, padded // 2 if scheme.number.packed else padded, torch.uint8)
        kind = torch.float32 if scheme.scale == "float32" else torch.uint8
        stored = empty(-(-rows // local.block[0]), padded // local.block[1], kind)
    if form != "packed":
        operand = empty(rows, padded if scheme.hadamard else length, _decoded_type(scheme))
    if scheme.outer is not None:
        outer = empty(rows, padded // scheme.outer[1], torch.float32)
    if scheme.masked:
        mask = empty(rows, padded // 8, torch.uint8)
    if scheme.block == (1, WHOLE) and scheme.hadamard:
        raise ValueError("a Hadamard transform under one scale for each row needs backend 'reference'")
    if scheme.block == (1, WHOLE):
        given = x.abs().amax(dim=0 if columns else 1).float() if length else x.new_zeros(rows, dtype=torch.float32)
    if x.numel():
        by_eights = origin[2] % 8 == 0 and origin[1] % 8 == 0
        key = (rows, length, x.dtype, scheme, columns, by_eights)
        arguments = (
            _bits(x), seed if scheme.random else None, amax if scheme.has_global_scale else None, given,
            rows, length, *strides, stream, *origin,
            *_with_strides(codes), *_with_strides(stored), *_with_strides(_bits(operand)), *_with_strides(outer),
            *_with_strides(mask), padded, 0 if operand is None else operand.shape[1],
        )  # fmt: skip
        launch(general_kernel, _work(*key), key, arguments)
    return Quantized(codes, stored, operand, amax if scheme.has_global_scale else None, outer, mask)


def decode(codes: Tensor, scales: Tensor, scheme: Scheme, columns: int, outer: Tensor | None) -> Tensor:
    """The operand [R, columns] of ``codes``, without the global scale; in the layout of the codes."""
    rows = codes.shape[0]
    padded = codes.shape[1] * (2 if scheme.number.packed else 1)
    kind, turned = _decoded_type(scheme), codes.stride(1) != 1 and codes.stride(0) == 1
    shape = (columns, rows) if turned else (rows, columns)
    out = torch.empty(shape, dtype=kind, device=codes.device)
    out = out.T if turned else out
    if out.numel():
        key = (rows, padded, scheme)
        arguments = (
            *_with_strides(codes), *_with_strides(scales), *_with_strides(outer), *_with_strides(_bits(out)),
            rows, columns, padded,
        )  # fmt: skip
        launch(general_decode_kernel, _decode_work(*key), key, arguments)
    return out


def _seen(x: Tensor, columns: bool) -> tuple[int, int, tuple[int, int]]:
    """Rows and length of the operand, and the strides that read x so."""
    (height, width), (i, j) = x.shape, x.stride()
    return (width, height, (j, i)) if columns else (height, width, (i, j))


def _with_strides(tensor: Tensor | None) -> tuple:
    return (None, 0, 0) if tensor is None else (tensor, *tensor.stride())


def _bits(operand: Tensor | None) -> Tensor | None:
    """bfloat16 travels as int16: Triton's interpreter cannot convert it."""
    return operand.view(torch.int16) if operand is not None and operand.dtype == torch.bfloat16 else operand


def _decoded_type(scheme: Scheme) -> torch.dtype:
    return torch.bfloat16 if scheme.exact_in_bf16 else torch.float32


@lru_cache(maxsize=4096)
def _amax_work(rows: int, length: int, dtype: torch.dtype, scheme: Scheme) -> Work:
    tile_rows, tile_columns, programs = _tile(rows, length, scheme)
    constants = dict(BF16_BITS=dtype == torch.bfloat16, TR=tile_rows, TC=tile_columns, **_rotation(scheme))
    return Work(programs, constants, min(16, max(1, tile_rows * tile_columns // PER_WARP)))


@lru_cache(maxsize=4096)
def _work(rows: int, length: int, dtype: torch.dtype, scheme: Scheme, columns: bool, by_eights: bool) -> Work:
    tile_rows, tile_columns, programs = _tile(rows, length, scheme)
    fraction, exponent = math.frexp(scheme.number.largest)
    constants = dict(
        BF16_BITS=dtype == torch.bfloat16, COLUMN_FORM=columns, BY_EIGHTS=by_eights, TR=tile_rows, TC=tile_columns,
        **_element(scheme), LARGEST=scheme.number.largest,
        SCALE=scheme.scale, RULE=scheme.rule, BR=_block(scheme)[0], BC=_block(scheme)[1],
        TOP=scheme.top, RANGE=float(scheme.range), HEADROOM=float(scheme.headroom), TOP_EXPONENT=exponent - 1,
        TOP_FRACTION=int((2 * fraction - 1) * 2**23),
        ROUNDING=ROUNDINGS.index(scheme.rounding), **_rotation(scheme),
        OUTER=scheme.outer[1] if scheme.outer else 0, SELECT=scheme.select, CLIP=float(scheme.clip),
        TENSOR=scheme.tensor_scale_only, FLOAT32_OUT=not scheme.exact_in_bf16,
    )  # fmt: skip
    return Work(programs, constants, min(16, max(1, tile_rows * tile_columns // PER_WARP)))


@lru_cache(maxsize=4096)
def _decode_work(rows: int, padded: int, scheme: Scheme) -> Work:
    tile_rows, tile_columns, programs = _tile(rows, padded, scheme)
    constants = dict(
        TR=tile_rows, TC=tile_columns, **_element(scheme), SCALE=scheme.scale,
        BR=_block(scheme)[0], BC=_block(scheme)[1], WHOLE_ROW=scheme.block == (1, WHOLE),
        TENSOR=scheme.tensor_scale_only, OUTER=scheme.outer[1] if scheme.outer else 0,
        DIVISOR=scheme.top * scheme.range, FLOAT32_OUT=not scheme.exact_in_bf16,
    )  # fmt: skip
    return Work(programs, constants, min(16, max(1, tile_rows * tile_columns // PER_WARP)))


def _element(scheme: Scheme) -> dict:
    number = scheme.number
    return dict(INTEGER=number.integer, MANTISSA=number.mantissa, LEAST=number.least_exponent, BITS=number.bits)


def _rotation(scheme: Scheme) -> dict:
    step = scheme.sign_mask == PER_STEP
    mask = 0 if step else scheme.sign_mask
    words = {f"M{k}": (mask >> (32 * k)) & 0xFFFFFFFF for k in range(4)}
    return dict(N=scheme.hadamard, STEP=step, **words, FACTOR=1 / math.sqrt(scheme.hadamard or 1))


def _block(scheme: Scheme) -> tuple[int, int]:
    """The block as a tile sees it: whole rows and whole tensors are cut, their amax is found before."""
    return scheme.block[0] or 1, scheme.block[1] or 16


def _tile(rows: int, length: int, scheme: Scheme) -> tuple[int, int, int]:
    """(rows, columns, programs): a tile spans whole blocks, outer blocks and Hadamard groups."""
    scheme = replace(scheme, block=_block(scheme))
    columns = max(32, scheme.group)
    tile_rows = max(16, scheme.block[0], TILE // columns if scheme.block[0] == 1 else 0)
    tile_rows = min(tile_rows, max(16, scheme.block[0], 1 << max(0, rows - 1).bit_length()))
    padded = -(-length // scheme.group) * scheme.group
    return tile_rows, columns, -(-rows // tile_rows) * -(-padded // columns)
