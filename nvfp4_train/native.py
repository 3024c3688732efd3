"""The product on FP4 tensor cores: codes and block scales as they are, nothing decoded.

Two ways to the same instruction: ``native``, this library's Triton kernel (NVFP4 and MXFP4), and ``cublaslt``, NVIDIA's
library through torch (NVFP4). What is different from the emulated product is the order of the float32 sums. Operands
that a GEMM reads transposed are transposed in memory first: an FP4 instruction wants both packed along K.
"""

import torch
from torch import Tensor

from nvfp4_kernels.fp4 import VECTOR, product_format
from nvfp4_kernels.scheme import Scheme
from nvfp4_train import ledger
from nvfp4_train.backend import NATIVE
from nvfp4_train.operators import operator, shapes_of
from nvfp4_train.quantization import QuantizedTensor

OUTPUTS = (torch.bfloat16, torch.float32)  # what the kernels write; float16 is rounded from float32


def multiplies(a: QuantizedTensor, b: QuantizedTensor, backend: str) -> bool:
    """Whether ``backend`` multiplies these two on FP4 tensor cores.

    Raises ValueError where it is a native one and an operand is quantized to something no FP4 instruction reads.
    """
    if backend not in NATIVE:
        return False
    format_ = product_format(a.scheme_text, b.scheme_text)
    if format_ is None and not (a.scheme_text == b.scheme_text == "bf16"):
        raise ValueError(
            f"no FP4 instruction multiplies {a.scheme_text} with {b.scheme_text}: choose the backend 'emulated'"
        )
    if format_ is not None and backend == "cublaslt" and format_ != "nvfp4":
        raise ValueError(f"torch offers no {format_} product on its own: choose the backend 'native' or 'emulated'")
    return format_ is not None


def matmul(
    a: QuantizedTensor, b: QuantizedTensor, alpha: Tensor | None, out_dtype: torch.dtype,
    accumulate_into: Tensor | None, backend: str, where: int, gemm: str,
) -> Tensor:  # fmt: skip
    """``alpha * (a [M, K] @ b [N, K].T)`` for operands that hold codes; arguments as in ``gemm.matmul``."""
    for operand in (a, b):
        if operand.codes is None:
            raise ValueError(f"the {backend} product reads codes: quantize with form='packed' (not 'decoded')")
    labels = (where, gemm, a.scheme_text, b.scheme_text, backend)
    sizes = (alpha, a.rows, b.rows, a.columns)
    parts = (a.codes, a.scale_bytes, a.transposed, b.codes, b.scale_bytes, b.transposed)
    if accumulate_into is not None:
        _native_into_op(accumulate_into, *parts, *sizes, *labels)
        return accumulate_into
    return _native_op(*parts, *sizes, out_dtype, *labels)


_PARTS = (
    "Tensor a_codes, Tensor a_scales, bool a_transposed, Tensor b_codes, Tensor b_scales, bool b_transposed, "
    "Tensor? alpha, SymInt m, SymInt n, SymInt k, "
)
_LABELS = "SymInt where, str gemm, str a_scheme, str b_scheme, str backend"


@operator(f"native_matmul({_PARTS}ScalarType out_dtype, {_LABELS}) -> Tensor")
def _native_op(
    a_codes, a_scales, a_transposed, b_codes, b_scales, b_transposed, alpha, m, n, k, out_dtype, *labels
) -> Tensor:
    a, b = (a_codes, a_scales, a_transposed), (b_codes, b_scales, b_transposed)
    return _multiply(a, b, alpha, (m, n, k), out_dtype, None, *labels)


@shapes_of(_native_op)
def _(a_codes, a_scales, a_transposed, b_codes, b_scales, b_transposed, alpha, m, n, k, out_dtype, *labels):
    return a_codes.new_empty(m, n, dtype=out_dtype)


@operator(f"native_matmul_into(Tensor(out!) out, {_PARTS}{_LABELS}) -> ()")
def _native_into_op(
    out, a_codes, a_scales, a_transposed, b_codes, b_scales, b_transposed, alpha, m, n, k, *labels
) -> None:
    a, b = (a_codes, a_scales, a_transposed), (b_codes, b_scales, b_transposed)
    if out.is_contiguous():
        _multiply(a, b, alpha, (m, n, k), torch.float32, out, *labels)
    else:
        out += _multiply(a, b, alpha, (m, n, k), torch.float32, None, *labels)


@shapes_of(_native_into_op)
def _(out, *arguments):
    return None


def _multiply(a, b, alpha, sizes, out_dtype, out, where, gemm, a_scheme, b_scheme, backend) -> Tensor:
    """``a``, ``b``: (codes, scales, transposed). ``sizes``: M, N, K."""
    from nvfp4_kernels.triton.native_operands import native_operand  # triton is not installed everywhere

    m, n, k = sizes
    ledger.count_matmul(where, gemm, a_scheme, b_scheme, backend, 2 * m * n * k)
    written = out_dtype if out_dtype in OUTPUTS else torch.float32
    left = native_operand(a[0], a[1], Scheme.parse(a_scheme), m, a[2])
    right = native_operand(b[0], b[1], Scheme.parse(b_scheme), n, b[2])
    if backend == "cublaslt":
        from nvfp4_kernels.cublaslt import nvfp4_matmul

        product = nvfp4_matmul(left, right, alpha, written, out)
    else:
        from nvfp4_kernels.triton.native_matmul import native_matmul

        vector = VECTOR[product_format(a_scheme, b_scheme)]
        product = native_matmul(left, right, alpha, vector, written, out)
    product = product if out is not None else product.to(out_dtype)
    if ledger.observed():
        decoded = [
            QuantizedTensor(scheme, rows, k, None, codes, scales, None, transposed).decode()
            for (codes, scales, transposed), scheme, rows in ((a, a_scheme, m), (b, b_scheme, n))
        ]
        labels = (where, gemm, a_scheme, b_scheme, backend)
        ledger.show_product(*labels, *decoded, alpha, None if out is not None else product)
    return product
