"""The amax of a whole tensor, plain and after a Hadamard transform of its columns or rows, in one read.

Magnitudes are compared as the bits of non-negative float32 values, so that one integer atomic per program joins them
and NaN, being the largest, survives. The transform's factor and its rounding to bfloat16 are monotone: they are applied
to the largest value alone.
"""

from functools import lru_cache

import torch
from torch import Tensor

import triton
import triton.language as tl
from nvfp4_kernels.quantized import amax_place
from nvfp4_kernels.scheme import PER_STEP, Scheme
from nvfp4_kernels.triton import codecs, general, packed, tiles
from nvfp4_kernels.triton.hadamard import largest_candidates
from nvfp4_kernels.triton.launch import Work, launch


@triton.jit
def _publish(out, largest, FACTOR: tl.constexpr, ROTATED: tl.constexpr):
    largest = codecs.largest_magnitude(largest, 0)
    if ROTATED:
        largest = codecs.round_to_bfloat16(largest * FACTOR)
    bits = codecs.bits_of(largest)
    tl.atomic_max(out, tl.where(bits >= 0x7F800000, 0x7FC00000, bits), sem="relaxed")


@triton.jit
def amax_kernel(
    x_ptr, out, height, width, stride, strips,
    BF16_BITS: tl.constexpr, EVEN: tl.constexpr, BI: tl.constexpr, BJ: tl.constexpr, PLAIN: tl.constexpr,
    ROW_N: tl.constexpr, ROW_MASK: tl.constexpr, ROW_FACTOR: tl.constexpr,
    COLUMN_N: tl.constexpr, COLUMN_MASK: tl.constexpr, COLUMN_FACTOR: tl.constexpr,
    XORSIGN: tl.constexpr = False,
):  # fmt: skip
    """out: int32 [3] zeros, for the amax of x, of x rotated along its rows, of x rotated along its columns."""
    tiles_j = tl.cdiv(width, BJ)
    j = (tl.program_id(0) % tiles_j) * BJ + tl.arange(0, BJ)
    first = tl.program_id(0) // tiles_j
    i = tl.arange(0, BI)
    plain = tl.zeros((BJ,), tl.float32)
    by_rows = tl.zeros((BJ // 2,), tl.float32)
    by_columns = tl.zeros((BJ,), tl.float32)
    for strip in range(first, tl.cdiv(height, BI), strips):
        row = strip * BI + i
        pointers = x_ptr + row.to(tl.int64)[:, None] * stride + j[None, :]
        if EVEN:
            x = tl.load(pointers)
        else:
            x = tl.load(pointers, mask=(row < height)[:, None] & (j < width)[None, :], other=0)
        if PLAIN:
            if BF16_BITS:
                found = packed.largest_of_rows(tl.reshape(x, (1, BI, BJ)), XORSIGN)
                found = tl.abs(codecs.to_float32(tl.reshape(found, (BJ,)), True))
            else:
                found = codecs.largest_magnitude(x.to(tl.float32), 0)
            plain = codecs.nan_maximum(plain, found)
        x = packed.widened(x, BF16_BITS)
        if ROW_N > 0:
            turned = largest_candidates(x, ROW_N, ROW_MASK, True)
            by_rows = codecs.nan_maximum(by_rows, codecs.largest_magnitude(turned, 0))
        if COLUMN_N > 0:
            turned = largest_candidates(x, COLUMN_N, COLUMN_MASK, False)
            by_columns = codecs.nan_maximum(by_columns, codecs.largest_magnitude(turned, 0))
    if PLAIN:
        _publish(out, plain, 1.0, False)
    if ROW_N > 0:
        _publish(out + 1, by_rows, ROW_FACTOR, True)
    if COLUMN_N > 0:
        _publish(out + 2, by_columns, COLUMN_FACTOR, True)


def global_amax(
    x: Tensor, rows: Scheme | None, columns: Scheme | None, seed: Tensor | None = None
) -> tuple[Tensor | None, Tensor | None]:
    """The float32 0-d amax that each form of ``x`` [I, J] is scaled by; NaN if any element is NaN or Inf.

    None for a form that is not asked for or has no global scale. After a Hadamard transform it is the amax of the
    transformed tensor; ``seed`` as in ``quantize``, for signs that are drawn. Nothing waits for the GPU. ValueError for
    another dtype or rank.
    """
    rows, columns = (s if s is not None and s.has_global_scale else None for s in (rows, columns))
    if rows is None and columns is None:
        readable(x)
        return None, None
    found = amax_vector(x, rows, columns, seed)
    return (
        None if rows is None else found[amax_place(rows, False)],
        None if columns is None else found[amax_place(columns, True)],
    )


def amax_vector(x: Tensor, rows: Scheme | None, columns: Scheme | None, seed: Tensor | None = None) -> Tensor:
    """float32 [3]: the amax of ``x`` as it is, rotated along its rows, rotated along its columns, from one read.

    0 where neither form asks for it. Both schemes, where given, have a global scale.
    """
    x = readable(x)
    height, width = x.shape
    out = torch.zeros(3, dtype=torch.int32, device=x.device)
    if x.numel():
        for scheme, along_columns in ((rows, False), (columns, True)):
            if scheme is not None and not _here(scheme):
                general.amax_of(x, scheme, along_columns, seed, out[amax_place(scheme, along_columns)])
        rows, columns = (s if s is not None and _here(s) else None for s in (rows, columns))
    if x.numel() and (rows is not None or columns is not None):
        key = (height, width, x.dtype, rows, columns, has_xorsign(x.device))
        work, strips = _work(*key)
        launch(amax_kernel, work, key, (as_bits(x), out, height, width, x.stride(0), strips))
    return out.view(torch.float32)


@lru_cache(maxsize=4096)
def _work(
    height: int, width: int, dtype: torch.dtype, rows: Scheme | None, columns: Scheme | None, xorsign: bool
) -> tuple[Work, int]:
    row_n, column_n = (s.hadamard if s is not None else 0 for s in (rows, columns))
    kind = "amax_rotated" if row_n or column_n else "amax"
    tile = tiles.fit(kind, height, width, column_n)
    tiles_j, tiles_i = -(-width // tile.columns), -(-height // tile.rows)
    strips = min(tiles_i, max(1, tiles.AMAX_PROGRAMS[kind] // tiles_j))
    constants = dict(
        BF16_BITS=dtype == torch.bfloat16, EVEN=height % tile.rows == 0 and width % tile.columns == 0,
        BI=tile.rows, BJ=tile.columns, PLAIN=any(s is not None and not s.hadamard for s in (rows, columns)),
        ROW_N=row_n, ROW_MASK=rows.sign_mask if row_n else 0, ROW_FACTOR=factor(row_n),
        COLUMN_N=column_n, COLUMN_MASK=columns.sign_mask if column_n else 0, COLUMN_FACTOR=factor(column_n),
        XORSIGN=xorsign,
    )  # fmt: skip
    return Work(strips * tiles_j, constants, tile.warps), strips


def _here(scheme: Scheme) -> bool:
    """Whether this kernel has the rotation; the general one has the others."""
    return scheme.hadamard in (0, 16) and scheme.sign_mask != PER_STEP


def readable(x: Tensor) -> Tensor:
    """``x`` with neighbours of a row next to each other (copied if they are not). ValueError if it cannot be read."""
    if x.dim() != 2:
        raise ValueError(f"a tensor of two dimensions is quantized, not one of shape {tuple(x.shape)}")
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"float32, bfloat16 or float16 is quantized, not {x.dtype} of shape {tuple(x.shape)}")
    require_device(x)
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()


def require_device(x: Tensor) -> None:
    if not (x.is_cuda or codecs.INTERPRETED.value):
        raise ValueError(f"the triton backend needs a CUDA tensor, got one on {x.device}: choose backend 'reference'")


def as_bits(x: Tensor) -> Tensor:
    """bfloat16 travels as int16: Triton's interpreter cannot convert it."""
    return x.view(torch.int16) if x.dtype == torch.bfloat16 else x


def factor(n: int) -> float:
    """1 / sqrt(n) of a transform of size n."""
    return 1.0 / n**0.5 if n else 1.0


@lru_cache
def has_xorsign(device: torch.device) -> bool:
    """Whether the GPU has the larger of two magnitudes as an instruction."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 6)
