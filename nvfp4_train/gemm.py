"""matmul: the product of two quantized operands, ``a @ b.T``. The only place that chooses emulated or native.

Emulated is exact by construction: an operand decoded without its global scale is exact in BF16 (E2M1 x E4M3 has at
most 6 significant bits), the product of two is exact in float32, sums run in float32, and the global scales enter as
one float32 factor before the one rounding to the output type. What stays different from an FP4 tensor core is the
order of the float32 sums.
"""

import torch
from torch import Tensor

from nvfp4_kernels import cublas
from nvfp4_train import ledger
from nvfp4_train.backend import choose
from nvfp4_train.operators import operator, shapes_of
from nvfp4_train.quantization import QuantizedTensor

ONE_GLOBAL_SCALE = 1.0 / 2688.0  # 6 * 448: largest code times largest block scale
TWO_GLOBAL_SCALES = 1.0 / (36.0 * 448.0 * 448.0)


def matmul(
    a: QuantizedTensor,
    b: QuantizedTensor,
    out_dtype: torch.dtype = torch.bfloat16,
    *,
    accumulate_into: Tensor | None = None,
    backend: str | None = None,
    where: int = ledger.UNNAMED,
    gemm: str = "matmul",
) -> Tensor:
    """``[M, N] = a [M, K] @ b [N, K].T``, float32 accumulation, one rounding to ``out_dtype``.

    Args:
        accumulate_into: float32 ``[M, N]``; the product is added to it in float32, and it is returned.
        backend: ``emulated`` or ``native``; None chooses by device.

    Raises:
        ValueError: reduction dimensions that differ, or a backend that cannot run here.
    """
    if a.columns != b.columns:
        raise ValueError(f"matmul needs operands of one K, got {tuple(a.shape)} and {tuple(b.shape)}")
    left, right, alpha = a.decode(), b.decode(), global_scale(a, b)
    backend = backend or choose(left.device).matmul
    labels = (gemm, a.scheme_text, b.scheme_text, backend)
    if accumulate_into is not None:
        if accumulate_into.dtype != torch.float32 or accumulate_into.shape != (a.rows, b.rows):
            raise ValueError(
                f"accumulate_into must be float32 {(a.rows, b.rows)}, got {accumulate_into.dtype} "
                f"{tuple(accumulate_into.shape)}"
            )
        _matmul_into_op(accumulate_into, left, right, alpha, where, *labels)
        return accumulate_into
    return _matmul_op(left, right, alpha, out_dtype, where, *labels)


def global_scale(a: QuantizedTensor, b: QuantizedTensor) -> Tensor | None:
    """The factor of the epilogue, float32 scalar on the device; None where neither operand has a global scale."""
    if a.global_amax is not None and b.global_amax is not None:
        return (a.global_amax * b.global_amax) * TWO_GLOBAL_SCALES
    amax = b.global_amax if a.global_amax is None else a.global_amax
    return None if amax is None else amax * ONE_GLOBAL_SCALE


@operator(
    "matmul(Tensor a, Tensor b, Tensor? alpha, ScalarType out_dtype, SymInt where, "
    "str gemm, str a_scheme, str b_scheme, str backend) -> Tensor"
)
def _matmul_op(
    a: Tensor, b: Tensor, alpha: Tensor | None, out_dtype: torch.dtype, where: int,
    gemm: str, a_scheme: str, b_scheme: str, backend: str,
) -> Tensor:  # fmt: skip
    ledger.count_matmul(where, gemm, a_scheme, b_scheme, backend, 2 * a.shape[0] * b.shape[0] * a.shape[1])
    return _emulated(a, b, alpha, out_dtype)


@shapes_of(_matmul_op)
def _(a, b, alpha, out_dtype, where, gemm, a_scheme, b_scheme, backend):
    return a.new_empty(a.shape[0], b.shape[0], dtype=out_dtype)


@operator(
    "matmul_into(Tensor(out!) out, Tensor a, Tensor b, Tensor? alpha, SymInt where, "
    "str gemm, str a_scheme, str b_scheme, str backend) -> ()"
)
def _matmul_into_op(
    out: Tensor, a: Tensor, b: Tensor, alpha: Tensor | None, where: int,
    gemm: str, a_scheme: str, b_scheme: str, backend: str,
) -> None:  # fmt: skip
    ledger.count_matmul(where, gemm, a_scheme, b_scheme, backend, 2 * a.shape[0] * b.shape[0] * a.shape[1])
    if a.device.type == "cuda" and cublas.available():
        cublas.scaled_matmul(a, b, alpha, torch.float32, accumulate_into=out)
    else:
        out += _emulated(a, b, alpha, torch.float32)


@shapes_of(_matmul_into_op)
def _(out, a, b, alpha, where, gemm, a_scheme, b_scheme, backend):
    return None


def _emulated(a: Tensor, b: Tensor, alpha: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    # a caller's autocast must not reach the float32 products in here
    with torch.autocast(a.device.type, enabled=False):
        if a.device.type == "cpu":
            product = a.float() @ b.float().T
        elif cublas.available():
            return cublas.scaled_matmul(a, b, alpha, out_dtype)
        else:
            product = torch.mm(a, b.T, out_dtype=torch.float32)
        return (product if alpha is None else product.mul_(alpha)).to(out_dtype)
