"""The emulated GEMM: cuBLAS, with the float32 scale read from the device and applied before the one rounding.

``cublasGemmEx`` computes ``C = alpha * A @ B + beta * C`` in float32 and rounds once, and takes alpha and beta from
device memory in device-pointer mode; torch's own ``mm`` takes neither. Called through ctypes on the library and the
handle that torch already uses, so stream, workspace and CUDA-graph capture are torch's.

Measured on one H200 against ``torch.mm`` (BF16 out, no scale) in the same run: 0.90-1.04x of its time over all layouts
and shapes tried but two (1.11, 1.17), 29 us of host time; a persistent TMA kernel in Triton took 0.95-3.5x and 82 us,
``torch.mm(out_dtype=float32)`` and a pass over the result 1.03-4.1x (experiments/2026-11-30_kernels/gemm.json).
"""

import ctypes
from functools import cache

import torch
from torch import Tensor

_TYPES = {torch.float32: 0, torch.bfloat16: 14}  # cudaDataType_t
_COMPUTE_32F = 68  # cublasComputeType_t
_DEFAULT_ALGORITHM = -1
_DEVICE_POINTERS, _HOST_POINTERS = 1, 0
_FLOAT32_REDUCTION, _DEFAULT_MATH = 16, 0  # the sums of a split K are added in float32


def scaled_matmul(
    a: Tensor,
    b: Tensor,
    alpha: Tensor | None,
    out_dtype: torch.dtype = torch.bfloat16,
    accumulate_into: Tensor | None = None,
) -> Tensor:
    """``alpha * (a [M, K] @ b [N, K].T)``, float32 sums, rounded once to ``out_dtype``.

    ``a``, ``b``: both bfloat16 or both float32 (multiplied as float32, not TF32) on one CUDA device, each either
    K-major or transposed (another layout is copied).
    ``alpha``: float32 0-d on the device, None for 1. ``accumulate_into``: contiguous float32 [M, N] that the product
    is added to, in float32; it is returned.
    """
    (m, k), n = a.shape, b.shape[0]
    # cuBLAS has neither BF16 x BF16 -> FP16 nor float32 x float32 -> anything else
    half = out_dtype == torch.float16 or a.dtype == torch.float32
    out = accumulate_into
    if out is None:
        out = torch.empty((m, n), dtype=torch.float32 if half else out_dtype, device=a.device)
    if m == 0 or n == 0 or k == 0:
        return out if accumulate_into is not None else out.zero_().to(out_dtype)
    assert out.is_contiguous() and a.dtype == b.dtype and a.dtype in _TYPES
    if (m == 1 or n == 1) and (a.dtype == torch.bfloat16 or alpha is not None):
        # a matrix-vector product in cuBLAS scales each term, which rounds once more
        bf16 = a.dtype == torch.bfloat16
        product = torch.mm(a, b.T, out_dtype=torch.float32) if bf16 else scaled_matmul(a, b, None, torch.float32)
        product = product if alpha is None else product * alpha
        return out.add_(product) if accumulate_into is not None else product.to(out_dtype)
    a, b = _readable(a), _readable(b)
    a_first, b_first = a.stride(1) == 1, b.stride(1) == 1
    zero, one = _constants(a.device)
    library = _library()
    with torch.cuda.device(a.device):
        handle = torch.cuda.current_blas_handle()
        library.cublasSetPointerMode_v2(handle, _DEVICE_POINTERS)
        library.cublasSetMathMode(handle, _FLOAT32_REDUCTION)
        # cuBLAS counts columns first, so it is given out.T = b @ a.T
        status = library.cublasGemmEx(
            handle, int(b_first), int(not a_first), n, m, k, (one if alpha is None else alpha).data_ptr(),
            b.data_ptr(), _TYPES[b.dtype], max(b.stride(0), k) if b_first else max(b.stride(1), n),
            a.data_ptr(), _TYPES[a.dtype], max(a.stride(0), k) if a_first else max(a.stride(1), m),
            (zero if accumulate_into is None else one).data_ptr(),
            out.data_ptr(), _TYPES[out.dtype], n, _COMPUTE_32F, _DEFAULT_ALGORITHM,
        )  # fmt: skip
        library.cublasSetMathMode(handle, _DEFAULT_MATH)
        library.cublasSetPointerMode_v2(handle, _HOST_POINTERS)
    if status:
        raise RuntimeError(f"cublasGemmEx returned {status} for {tuple(a.shape)} @ {tuple(b.shape)}.T -> {out.dtype}")
    return out.to(out_dtype) if half else out


def prepare(device: torch.device) -> None:
    """Makes what must not be made while a CUDA graph is captured: the constants of this device."""
    _constants(device if device.index is not None else torch.device("cuda", torch.cuda.current_device()))


@cache
def available() -> bool:
    """Whether torch runs on CUDA and its cuBLAS can be called."""
    if torch.version.cuda is None or not torch.cuda.is_available():
        return False
    try:
        _library()
    except OSError:
        return False
    return True


def _readable(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 or x.stride(0) == 1 else x.contiguous()


@cache
def _constants(device: torch.device) -> tuple[Tensor, Tensor]:
    return torch.zeros((), device=device), torch.ones((), device=device)


@cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(f"libcublas.so.{torch.version.cuda.split('.')[0]}")
    pointer, number = ctypes.c_void_p, ctypes.c_int
    library.cublasGemmEx.argtypes = [
        pointer, number, number, number, number, number, pointer, pointer, number, number, pointer, number, number,
        pointer, pointer, number, number, number, number,
    ]  # fmt: skip
    library.cublasSetPointerMode_v2.argtypes = [pointer, number]
    library.cublasSetMathMode.argtypes = [pointer, number]
    return library
