"""matmul: the product of two quantized operands, ``a @ b.T``. The only place that chooses emulated or native.

Emulated is exact by construction: an operand decoded without its global scale is exact in BF16 (E2M1 x E4M3 has at
most 6 significant bits), the product of two is exact in float32, sums run in float32, and the global scales enter as
one float32 factor before the one rounding to the output type. What stays different from an FP4 tensor core is the
order of the float32 sums.

Where an operand does not fit BF16 (float32 block or outer scales, INT8 under E4M3 scales) both are decoded to float32
and multiplied in float32, never in TF32: ``emulated-fp32``, as the ledger calls it. INT8 under E4M3 is exact there
too; a float32 scale times a code is rounded to float32, 2^-24 of each element.
"""

import torch
from torch import Tensor

from nvfp4_kernels import cublas
from nvfp4_train import ledger, native
from nvfp4_train.backend import choose
from nvfp4_train.operators import operator, shapes_of
from nvfp4_train.quantization import QuantizedTensor


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
        backend: ``emulated``, or FP4 tensor cores by ``native`` or ``cublaslt``; None chooses by device.

    Raises:
        ValueError: reduction dimensions that differ, or a backend that cannot run here.
    """
    if a.columns != b.columns:
        raise ValueError(f"matmul needs operands of one K, got {tuple(a.shape)} and {tuple(b.shape)}")
    if accumulate_into is not None:
        if accumulate_into.dtype != torch.float32 or accumulate_into.shape != (a.rows, b.rows):
            raise ValueError(
                f"accumulate_into must be float32 {(a.rows, b.rows)}, got {accumulate_into.dtype} "
                f"{tuple(accumulate_into.shape)}"
            )
    alpha = global_scale(a, b)
    backend = backend or _choose(a, b)
    if native.multiplies(a, b, backend):
        return native.matmul(a, b, alpha, out_dtype, accumulate_into, backend, where, gemm)
    left, right = a.decode(), b.decode()
    exact = left.dtype == right.dtype == torch.bfloat16
    if not exact:
        left, right = left.float(), right.float()
    # two BF16 operands run so under every backend
    labels = (gemm, a.scheme_text, b.scheme_text, "emulated" if exact else "emulated-fp32")
    if accumulate_into is not None:
        _matmul_into_op(accumulate_into, left, right, alpha, where, *labels)
        return accumulate_into
    return _matmul_op(left, right, alpha, out_dtype, where, *labels)


def _choose(a: QuantizedTensor, b: QuantizedTensor) -> str:
    """The backend by device, for operands that come from no layer."""
    if a.codes is None or b.codes is None:
        return "emulated"
    return choose(a.codes.device, operands=(a.scheme_text, b.scheme_text)).matmul


def global_scale(a: QuantizedTensor, b: QuantizedTensor) -> Tensor | None:
    """The factor of the epilogue, float32 scalar on the device; None where neither operand has one.

    The product of the amaxes, times one constant: of each operand 1 / ``Scheme.divisor`` (2688 for NVFP4: the largest
    code times the largest block scale) and ``Scheme.factor``.
    """
    constant = _constant(a) * _constant(b)
    if a.global_amax is not None and b.global_amax is not None:
        return (a.global_amax * b.global_amax) * constant
    amax = b.global_amax if a.global_amax is None else a.global_amax
    if amax is not None:
        return amax * constant
    if constant == 1.0:
        return None
    held = a.operand if a.codes is None else a.codes
    return torch.full((), constant, dtype=torch.float32, device=held.device)


def _constant(operand: QuantizedTensor) -> float:
    """What the constant of an operand contributes to the epilogue."""
    scheme = operand.scheme
    if scheme is None:
        return 1.0
    return scheme.factor / scheme.divisor if operand.global_amax is not None else scheme.factor


@operator(
    "matmul(Tensor a, Tensor b, Tensor? alpha, ScalarType out_dtype, SymInt where, "
    "str gemm, str a_scheme, str b_scheme, str backend) -> Tensor"
)
def _matmul_op(
    a: Tensor, b: Tensor, alpha: Tensor | None, out_dtype: torch.dtype, where: int,
    gemm: str, a_scheme: str, b_scheme: str, backend: str,
) -> Tensor:  # fmt: skip
    ledger.count_matmul(where, gemm, a_scheme, b_scheme, backend, 2 * a.shape[0] * b.shape[0] * a.shape[1])
    out = _emulated(a, b, alpha, out_dtype)
    if ledger.observed():
        ledger.show_product(where, gemm, a_scheme, b_scheme, backend, a, b, alpha, out)
    return out


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
    if ledger.observed():
        ledger.show_product(where, gemm, a_scheme, b_scheme, backend, a, b, alpha, None)


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
            product = torch.mm(a, b.T, out_dtype=torch.float32) if a.dtype == torch.bfloat16 else a @ b.T
        return (product if alpha is None else product.mul_(alpha)).to(out_dtype)
