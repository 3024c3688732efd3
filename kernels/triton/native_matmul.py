"""The FP4 tensor core: ``alpha * (a [M, K] @ b [N, K].T)`` on packed codes and swizzled block scales.

    tl.dot_scaled     e2m1 x e2m1 with E4M3 scales of 16 (NVFP4) or E8M0 scales of 32 (MXFP4), float32 accumulator
    codes, scales     fetched by tensor descriptors (TMA), several steps ahead; what lies outside is read as zero
    scales            swizzled in memory: they go to tensor memory by tcgen05.cp, beside the running matrix instruction
    epilogue          the global scales as one float32 factor, then the one rounding to the output type

What the compiler makes of this is read from PTX (kernels/targets.py, ``nvfp4-train audit --kernels``): the scales must
be typed as what they are, a tile needs 128 rows and 4 warps, both operands must be packed along K. Otherwise the same
source becomes a slower instruction without a word, and a tile that exceeds tensor memory becomes a kernel without any.
"""

from typing import NamedTuple

import torch
from torch import Tensor

import triton
import triton.language as tl
from nvfp4_kernels.triton import codecs
from nvfp4_kernels.triton.native_operands import NativeOperand

COMPILED = {torch.bfloat16: "bf16", torch.float32: "fp32"}  # types of the output


class NativeTile(NamedTuple):
    """One launch configuration; ``k`` counts elements."""

    m: int
    n: int
    k: int
    warps: int
    stages: int


# Tensor memory has 512 columns: 128 x 256 takes 256 for sums and 48 for scales, 256 x 256 does not fit.
SM100_TILES = {"large": NativeTile(128, 256, 256, 8, 4), "small": NativeTile(128, 128, 256, 4, 5)}
SM120_TILES = {"large": NativeTile(128, 128, 256, 8, 3), "small": NativeTile(128, 128, 128, 8, 4)}
TILES = {10: SM100_TILES, 12: SM120_TILES}  # by the major number of the compute capability
GROUP = 8  # row tiles that share column tiles while those are in the L2 cache


@triton.jit
def _decoded(codes, scales, VECTOR: tl.constexpr):
    """float32 [rows, K] of a tile of codes and scales: what the tensor core multiplies. For the interpreter."""
    code = codes.to(tl.int32)
    value = tl.join(codecs.e2m1_value(code & 15), codecs.e2m1_value(code >> 4))
    value = tl.reshape(value, (codes.shape[0], 2 * codes.shape[1] // VECTOR, VECTOR))
    scale = codecs.scale_value(scales.to(tl.int32), VECTOR == 16)
    return tl.reshape(value * scale[:, :, None], (codes.shape[0], 2 * codes.shape[1]))


@triton.jit
def _halves(x):
    """The left and the right half of the columns of ``x``."""
    return tl.split(tl.permute(tl.reshape(x, (x.shape[0], 2, x.shape[1] // 2)), (0, 2, 1)))


@triton.jit
def _store(sums, alpha_ptr, out_ptr, m0, n0, height, width, out_stride, ACCUMULATE: tl.constexpr):
    """alpha * sums, added to what is there or rounded once, at (m0, n0) of out [height, width]."""
    if alpha_ptr is not None:
        sums = sums * tl.load(alpha_ptr)
    m = (m0 + tl.arange(0, sums.shape[0])).to(tl.int64)
    n = n0 + tl.arange(0, sums.shape[1])
    out = out_ptr + m[:, None] * out_stride + n[None, :]
    inside = (m < height)[:, None] & (n < width)[None, :]
    if ACCUMULATE:
        sums += tl.load(out, mask=inside)
    elif codecs.INTERPRETED:  # it cuts a bfloat16 off instead of rounding to it
        sums = codecs.round_to_bfloat16(sums) if out_ptr.dtype.element_ty == tl.bfloat16 else sums
    tl.store(out, sums.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def native_matmul_kernel(
    a_desc, b_desc, a_scales_desc, b_scales_desc, alpha_ptr, out_ptr, height, width, steps, out_stride,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, VECTOR: tl.constexpr, STAGES: tl.constexpr,
    GROUP: tl.constexpr, ACCUMULATE: tl.constexpr,
):  # fmt: skip
    """out [height, width] in tiles of BM x BN; ``steps`` of BK elements along K. ``alpha_ptr`` may be None."""
    tiles_m = tl.cdiv(height, BM)
    tiles_n = tl.cdiv(width, BN)
    first = tl.program_id(0) // (GROUP * tiles_n) * GROUP
    group = tl.minimum(tiles_m - first, GROUP)
    within = tl.program_id(0) % (GROUP * tiles_n)
    tile_m = first + within % group
    tile_n = within // group
    MS: tl.constexpr = BM // 128
    NS: tl.constexpr = BN // 128
    KS: tl.constexpr = BK // VECTOR // 4
    sums = tl.zeros((BM, BN), dtype=tl.float32)
    for step in tl.range(0, steps, num_stages=STAGES):
        a = a_desc.load([tile_m * BM, step * (BK // 2)])
        b = b_desc.load([tile_n * BN, step * (BK // 2)])
        a_scales = a_scales_desc.load([0, tile_m * MS, step * KS, 0, 0])
        b_scales = b_scales_desc.load([0, tile_n * NS, step * KS, 0, 0])
        a_scales = a_scales.reshape(MS, KS, 32, 4, 4).trans(0, 3, 2, 1, 4).reshape(BM, BK // VECTOR)
        b_scales = b_scales.reshape(NS, KS, 32, 4, 4).trans(0, 3, 2, 1, 4).reshape(BN, BK // VECTOR)
        if codecs.INTERPRETED:
            products = tl.dot(_decoded(a, a_scales, VECTOR), _decoded(b, b_scales, VECTOR).T, input_precision="ieee")
            sums += products
        else:
            sums = tl.dot_scaled(a, a_scales, "e2m1", b.T, b_scales, "e2m1", sums)
    m0 = tile_m * BM
    n0 = tile_n * BN
    # in quarters: the addresses and the old values of a whole tile would not fit the registers beside its sums
    left, right = _halves(sums)
    for quarter in tl.static_range(4):
        first_half, second_half = _halves(left if quarter < 2 else right)
        part = first_half if quarter % 2 == 0 else second_half
        _store(part, alpha_ptr, out_ptr, m0, n0 + quarter * (BN // 4), height, width, out_stride, ACCUMULATE)


def native_matmul(
    a: NativeOperand,
    b: NativeOperand,
    alpha: Tensor | None,
    vector: int,
    out_dtype: torch.dtype = torch.bfloat16,
    accumulate_into: Tensor | None = None,
) -> Tensor:
    """``alpha * (a [M, K] @ b [N, K].T)`` on the FP4 tensor core, rounded once to ``out_dtype``.

    ``alpha``: float32 0-d on the device, None for 1. ``vector``: elements that share a block scale, 16 (E4M3 scales,
    NVFP4) or 32 (E8M0, MXFP4). ``out_dtype``: bfloat16 or float32. ``accumulate_into``: contiguous float32 [M, N] that
    the product is added to, in float32; it is returned.
    """
    m, n, packed = a.codes.shape[0], b.codes.shape[0], a.codes.shape[1]
    assert b.codes.shape[1] == packed and vector in (16, 32)
    out = accumulate_into
    if out is None:
        assert out_dtype in COMPILED
        out = torch.empty(m, n, dtype=out_dtype, device=a.codes.device)
    if m == 0 or n == 0 or packed == 0:
        return out if accumulate_into is not None else out.zero_()
    launch(a, b, alpha, vector, out, accumulate_into is not None)
    return out


def launch(a: NativeOperand, b: NativeOperand, alpha: Tensor | None, vector: int, out: Tensor, accumulate: bool):
    """Multiplies into ``out``; what Triton compiled for it is returned (None by the interpreter)."""
    assert out.is_contiguous()
    m, n, packed = *out.shape, a.codes.shape[1]
    tile = choose_tile(m, n, a.codes.device)
    with torch.cuda.device_of(a.codes):
        return native_matmul_kernel[(-(-m // tile.m) * -(-n // tile.n),)](
            *(_codes_descriptor(x.codes, rows, tile.k) for x, rows in ((a, tile.m), (b, tile.n))),
            *(_scales_descriptor(x.scales, rows, tile.k, vector) for x, rows in ((a, tile.m), (b, tile.n))),
            alpha, out, m, n, -(-2 * packed // tile.k), out.stride(0),
            BM=tile.m, BN=tile.n, BK=tile.k, VECTOR=vector, STAGES=tile.stages, GROUP=GROUP, ACCUMULATE=accumulate,
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip


def choose_tile(m: int, n: int, device: torch.device) -> NativeTile:
    """The large tile where it gives every multiprocessor one to do, else the small one."""
    if device.type != "cuda":  # the interpreter
        return SM120_TILES["small"]
    properties = torch.cuda.get_device_properties(device)
    tiles = TILES[properties.major]
    large = tiles["large"]
    enough = -(-m // large.m) * -(-n // large.n) >= properties.multi_processor_count
    return large if enough else tiles["small"]


def _codes_descriptor(codes: Tensor, rows: int, k: int):
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(codes, list(codes.shape), list(codes.stride()), [rows, k // 2])


def _scales_descriptor(scales: Tensor, rows: int, k: int, vector: int):
    from triton.tools.tensor_descriptor import TensorDescriptor

    down, across = scales.shape[:2]
    # typed as what they are, else the compiler takes another instruction (the interpreter cannot load every E4M3 byte)
    typed = scales.view(torch.float8_e4m3fn) if vector == 16 and scales.is_cuda else scales
    typed = typed.view(1, down, across, 2, 256)
    return TensorDescriptor(typed, list(typed.shape), list(typed.stride()), [1, rows // 128, k // vector // 4, 2, 256])


def compile_arguments(tile: NativeTile, vector: int, out: str = "bf16", accumulate: bool = False, alpha: bool = True):
    """(signature, constexprs) of one configuration, for ``instructions.compile_for``."""
    scale = "fp8e4nv" if vector == 16 else "u8"
    shared = f"{tile.k // vector // 4}, 2, 256"
    signature = {
        "a_desc": f"tensordesc<u8[{tile.m}, {tile.k // 2}]>",
        "b_desc": f"tensordesc<u8[{tile.n}, {tile.k // 2}]>",
        "a_scales_desc": f"tensordesc<{scale}[1, {tile.m // 128}, {shared}]>",
        "b_scales_desc": f"tensordesc<{scale}[1, {tile.n // 128}, {shared}]>",
        "out_ptr": f"*{out}",
        **dict.fromkeys(("height", "width", "steps", "out_stride"), "i32"),
    }
    constexprs = dict(
        BM=tile.m, BN=tile.n, BK=tile.k, VECTOR=vector, STAGES=tile.stages, GROUP=GROUP, ACCUMULATE=accumulate
    )
    if alpha:
        signature["alpha_ptr"] = "*fp32"
    else:
        constexprs["alpha_ptr"] = None
    return signature, constexprs
