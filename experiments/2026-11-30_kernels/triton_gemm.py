"""scaled_matmul: ``alpha * (a @ b.T)`` of BF16 operands, float32 sums, one rounding to the output type.

The emulated GEMM of two decoded operands. The factor ``alpha`` (both global scales) must enter *before* the rounding:
a BF16 result that is scaled afterwards is rounded twice. ``torch.mm`` takes no factor from the device, so the choice is

- ``persistent``: one Triton kernel on tensor descriptors (TMA), which scales its accumulator in registers. Each program
  walks over several output tiles; the copy engine fills the next tile's operands while this one is written.
- ``library``: ``torch.mm(out_dtype=float32)`` and one elementwise pass that scales, rounds and stores. The pass moves
  4 + 2 bytes an output element, so it is cheap where K is large beside the output; any shape and alignment will do.

``route`` chooses by device, layout and shape alone, so a call always runs the same way. A descriptor may lie over
either layout of an operand, K-major ``[rows, K]`` or its transpose: Fprop, Dgrad and Wgrad need no copies.
"""

from functools import cache, lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

INTERPRETED = triton.knobs.runtime.interpret
OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Config(NamedTuple):
    """Tile of the persistent kernel. ``group`` rows of tiles are walked together, so that they share b in L2."""

    block_m: int = 128
    block_n: int = 256
    block_k: int = 64
    group: int = 8
    subtiles: int = 1
    flatten: bool = True
    num_warps: int = 8
    num_stages: int = 3


@triton.jit
def _load(desc, row, k, ROWS_FIRST: tl.constexpr, INTERPRETED: tl.constexpr):
    """[rows, BLOCK_K] from a descriptor over [rows, K] (ROWS_FIRST) or over [K, rows]."""
    if ROWS_FIRST:
        tile = desc.load([row, k])
    else:
        tile = desc.load([k, row]).T
    if INTERPRETED:
        # the interpreter multiplies the bit patterns of bf16 as integers; these are the same numbers in float32
        tile = (tile.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return tile


@triton.jit
def _store(desc, row, column, value, ACCUMULATE: tl.constexpr, INTERPRETED: tl.constexpr):
    """Rounds float32 to the descriptor's type, or adds it in float32 to what is there."""
    if INTERPRETED:
        if ACCUMULATE:
            value += desc.load([row, column])
        if desc.dtype == tl.bfloat16:
            # the interpreter does not round to nearest even; NaN keeps a quiet bit
            bits = value.to(tl.uint32, bitcast=True)
            rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
            rounded = tl.where(value == value, rounded, 0x7FC0)
            desc.store([row, column], rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True))
        else:
            desc.store([row, column], value.to(desc.dtype))
    else:
        if ACCUMULATE:
            # the copy engine's reduction: one float32 addition an element in L2, each element by one program only
            desc.atomic_add([row, column], value)
        else:
            desc.store([row, column], value.to(desc.dtype))


@triton.jit
def gemm_kernel(
    a_desc, b_desc, out_desc, alpha_ptr, M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    PROGRAMS: tl.constexpr, A_ROWS_FIRST: tl.constexpr, B_ROWS_FIRST: tl.constexpr, SCALED: tl.constexpr,
    ACCUMULATE: tl.constexpr, SUBTILES: tl.constexpr, FLATTEN: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """``out [M, N] = alpha * a [M, K] @ b [N, K].T``; ragged edges read as zero and are not written."""
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    steps = tl.cdiv(K, BLOCK_K)
    if SCALED:
        alpha = tl.load(alpha_ptr)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, PROGRAMS, flatten=FLATTEN):
        first = (tile // (GROUP * tiles_n)) * GROUP
        rows = min(tiles_m - first, GROUP)
        within = tile % (GROUP * tiles_n)
        row = (first + within % rows) * BLOCK_M
        column = (within // rows) * BLOCK_N
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for step in range(steps):
            a = _load(a_desc, row, step * BLOCK_K, A_ROWS_FIRST, INTERPRETED)
            b = _load(b_desc, column, step * BLOCK_K, B_ROWS_FIRST, INTERPRETED)
            acc = tl.dot(a, b.T, acc)
        if SCALED:
            acc = acc * alpha
        if SUBTILES == 1:
            _store(out_desc, row, column, acc, ACCUMULATE, INTERPRETED)
        else:
            # half a tile at a time through shared memory, which leaves room for another operand stage
            halves = tl.permute(tl.reshape(acc, (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1))
            left, right = tl.split(halves)
            _store(out_desc, row, column, left, ACCUMULATE, INTERPRETED)
            _store(out_desc, row, column + BLOCK_N // 2, right, ACCUMULATE, INTERPRETED)


def scaled_matmul(
    a: Tensor,
    b: Tensor,
    alpha: Tensor | None,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    out: Tensor | None = None,
    accumulate: bool = False,
) -> Tensor:
    """``[M, N] = alpha * (a [M, K] @ b [N, K].T)``; never waits for the device.

    Args:
        a, b: bfloat16; each may be a transposed view (contiguous along its rows instead of along K).
        alpha: float32 scalar tensor on the same device, or None for 1.
        out_dtype: bfloat16, float16 or float32.
        out: contiguous ``[M, N]`` of ``out_dtype`` to write to.
        accumulate: the product is added to ``out``, in float32 (``out`` must be float32).

    Raises:
        ValueError: dtypes, devices or shapes that do not fit, or no CUDA device.
    """
    _check(a, b, alpha, out_dtype, out, accumulate)
    m, n = a.shape[0], b.shape[0]
    if out is None:
        out = torch.empty((m, n), dtype=out_dtype, device=a.device)
    if m == 0 or n == 0:
        return out
    config = route(a, b, out)
    if config is None:
        return _library(a, b, alpha, out, accumulate)
    return _persistent(a, b, alpha, out, accumulate, config)


def route(a: Tensor, b: Tensor, out: Tensor) -> Config | None:
    """The tile of the persistent kernel for these operands, or None for the library."""
    if not (_rows_first(a) is not None and _rows_first(b) is not None and _describable(out)):
        return None
    if INTERPRETED:
        return Config(32, 32, 32, 2, 2)
    if _capability(a.device) not in (9, 10):
        return None  # no copy engine, or (sm_120) shared memory for small tiles only
    return choose_config(a.shape[0], b.shape[0], a.shape[1], out.element_size(), _multiprocessors(a.device))


# the time of a tile of 128 x 256 is 1 for each step of K; smaller tiles reuse less of what they load
TILES = (
    (1.00, Config()),
    (0.56, Config(128, 128, 64, num_warps=8, num_stages=4)),
    (0.34, Config(128, 64, 64, num_warps=4, num_stages=4)),
)


@lru_cache(maxsize=4096)
def choose_config(m: int, n: int, k: int, out_bytes: int, programs: int) -> Config | None:
    """The tile that finishes first when ``programs`` run at a time; None where the device would stand half empty."""
    best, best_time = None, 0.0
    for cost, config in TILES:
        tiles = triton.cdiv(m, config.block_m) * triton.cdiv(n, config.block_n)
        time = triton.cdiv(tiles, programs) * cost
        if best is None or time < best_time:
            best, best_time = config, time
            filled = tiles / programs
    if filled < 0.5 and k >= 2048:  # few tiles and a long sum: the library splits K
        return None
    return best if out_bytes < 4 or best.block_n < 256 else best._replace(subtiles=2)


def _persistent(a: Tensor, b: Tensor, alpha: Tensor | None, out: Tensor, accumulate: bool, config: Config) -> Tensor:
    (m, k), n = a.shape, b.shape[0]
    a_first, b_first = _rows_first(a), _rows_first(b)
    block_m, block_n, block_k = config[:3]
    tiles = triton.cdiv(m, block_m) * triton.cdiv(n, block_n)
    programs = min(tiles, _multiprocessors(a.device))
    with torch.cuda.device(a.device if a.is_cuda else -1):
        gemm_kernel[(programs,)](
            _descriptor(a, a_first, block_m, block_k),
            _descriptor(b, b_first, block_n, block_k),
            TensorDescriptor(out, [m, n], [n, 1], [block_m, block_n // config.subtiles]),
            alpha,
            m,
            n,
            k,
            *config[:4],
            PROGRAMS=_multiprocessors(a.device),
            A_ROWS_FIRST=a_first,
            B_ROWS_FIRST=b_first,
            SCALED=alpha is not None,
            ACCUMULATE=accumulate,
            SUBTILES=config.subtiles,
            FLATTEN=config.flatten,
            INTERPRETED=INTERPRETED,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            enable_fp_fusion=False,  # scale, then add: two float32 roundings, everywhere
        )
    return out


def _library(a: Tensor, b: Tensor, alpha: Tensor | None, out: Tensor, accumulate: bool) -> Tensor:
    product = _mm_float32(a, b)
    if accumulate:
        return out.add_(product if alpha is None else product.mul_(alpha))
    if alpha is None:
        return out.copy_(product)
    return torch.mul(product, alpha, out=out)  # one pass: scaled in float32, rounded as it is stored


def _mm_float32(a: Tensor, b: Tensor) -> Tensor:
    if a.is_cuda:
        return torch.mm(a, b.T, out_dtype=torch.float32)
    return a.float() @ b.float().T


def compile_arguments(config: Config, a_first: bool, b_first: bool, out_type: str, accumulate: bool = False):
    """Signature and constexprs of ``gemm_kernel``, for a compiler without a GPU; ``out_type``: bf16, fp16 or fp32."""
    (m, n, k), columns = config[:3], config.block_n // config.subtiles

    def operand(rows: int, rows_first: bool) -> str:
        return f"tensordesc<bf16[{rows}, {k}]>" if rows_first else f"tensordesc<bf16[{k}, {rows}]>"

    signature = {
        "a_desc": operand(m, a_first),
        "b_desc": operand(n, b_first),
        "out_desc": f"tensordesc<{out_type}[{m}, {columns}]>",
        "alpha_ptr": "*fp32",
        **dict.fromkeys("MNK", "i32"),
    }
    values = (m, n, k, config.group, 132, a_first, b_first, True, accumulate, config.subtiles, config.flatten, False)
    return signature, dict(zip(gemm_kernel.arg_names[7:], values, strict=True))


def _descriptor(x: Tensor, rows_first: bool, rows: int, columns: int) -> TensorDescriptor:
    if rows_first:
        return TensorDescriptor(x, list(x.shape), [x.stride(0), 1], [rows, columns])
    return TensorDescriptor(x, list(x.shape[::-1]), [x.stride(1), 1], [columns, rows])


def _rows_first(x: Tensor) -> bool | None:
    """True for a K-major operand, False for a transposed one, None if no descriptor can lie over it."""
    return True if _describable(x) else False if _describable(x.T) else None


def _describable(x: Tensor) -> bool:
    """Unit inner stride, outer stride and address in multiples of 16 bytes, indices in 32 bits."""
    rows, columns = x.shape
    outer = x.stride(0)
    return (
        x.stride(1) == 1
        and columns <= outer
        and outer * x.element_size() % 16 == 0
        and x.data_ptr() % 16 == 0
        and 0 < rows < 2**31
        and 0 < columns < 2**31
    )


@cache
def _capability(device: torch.device) -> int:
    return torch.cuda.get_device_capability(device)[0]


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def _check(a: Tensor, b: Tensor, alpha, out_dtype: torch.dtype, out: Tensor | None, accumulate: bool) -> None:
    shapes = f"a {tuple(a.shape)} {a.dtype} on {a.device}, b {tuple(b.shape)} {b.dtype} on {b.device}"
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[1]:
        raise ValueError(f"scaled_matmul needs a [M, K] and b [N, K], got {shapes}")
    if a.dtype != torch.bfloat16 or b.dtype != torch.bfloat16 or a.device != b.device:
        raise ValueError(f"scaled_matmul needs two bfloat16 operands on one device, got {shapes}")
    if not a.is_cuda and not INTERPRETED:
        raise ValueError(f"scaled_matmul needs a CUDA device, got {shapes}: choose the backend 'reference'")
    if alpha is not None and (alpha.dtype != torch.float32 or alpha.numel() != 1 or alpha.device != a.device):
        raise ValueError(f"alpha must be one float32 on {a.device}, got {tuple(alpha.shape)} {alpha.dtype}")
    if out_dtype not in OUT_DTYPES:
        raise ValueError(f"out_dtype must be bfloat16, float16 or float32, got {out_dtype}")
    if out is not None and (out.shape != (a.shape[0], b.shape[0]) or out.dtype != out_dtype or not out.is_contiguous()):
        raise ValueError(
            f"out must be contiguous {(a.shape[0], b.shape[0])} {out_dtype}, got {tuple(out.shape)} {out.dtype}"
        )
    if accumulate and (out is None or out_dtype != torch.float32):
        raise ValueError("accumulate adds to a float32 out: give both")
