"""Whether this GPU's FP4 product is right, before a layer relies on it: on operands whose sums are exact in any order.

We have compiled the native kernels for Blackwell and read their instructions, but not run them. So the first layer that
chooses them on a GPU has them multiply once, and every element of the result must be the exact one.
"""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from nvfp4_kernels.reference.decode import decode
from nvfp4_kernels.scheme import Scheme
from nvfp4_kernels.triton.native_operands import native_operand

SCHEMES = {"nvfp4": Scheme(), "mxfp4": Scheme(scale="e8m0", rule="ceil", block=(1, 32))}
ONE = {"e4m3": 0x38, "e8m0": 127}  # byte of a block scale of 1
M, N, K = 300, 400, 1056  # more than one tile each way, none of them full


def exact_operand(rows: int, columns: int, scheme: Scheme, seed: int, nonzero: float = 1.0) -> tuple[Tensor, Tensor]:
    """uint8 codes [rows, columns / 2] and scale bytes: all codes, scales 1/2, 1 and 2; the share ``nonzero`` of bytes
    is kept. Products of two such operands are multiples of 2^-4 below 2^8, so a sum of a few of them is exact in any
    order, also where an adder aligns its terms to the largest and keeps few bits below it."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (rows, columns // 2), generator=generator, dtype=torch.uint8)
    codes = codes * (torch.rand(codes.shape, generator=generator) < nonzero)
    exponents = torch.randint(-1, 2, (rows, columns // scheme.block[1]), generator=generator)
    return codes, (exponents * (8 if scheme.scale == "e4m3" else 1) + ONE[scheme.scale]).to(torch.uint8)


def wrong_elements(multiply: Callable, scheme: Scheme, device: torch.device) -> int:
    """How many of the elements of one product differ from the exact ones, and of its BF16 rounding, and of its sum with
    what is there. ``multiply(a, b, alpha, vector, out_dtype, accumulate_into)``: such as ``native_matmul``."""
    pairs = exact_operand(M, K, scheme, 0, nonzero=8 / K), exact_operand(N, K, scheme, 1)
    left, right = (decode(codes, scales, scheme, K).double() for codes, scales in pairs)
    exact = (left @ right.T).float()
    alpha = torch.tensor(0.75)
    a, b = (native_operand(codes.to(device), scales.to(device), scheme, codes.shape[0]) for codes, scales in pairs)
    vector = scheme.block[1]
    total = torch.ones(M, N, device=device)
    found = (
        (multiply(a, b, None, vector, torch.float32, None), exact),
        (multiply(a, b, alpha.to(device), vector, torch.bfloat16, None), (exact * alpha).to(torch.bfloat16)),
        (multiply(a, b, alpha.to(device), vector, torch.float32, total), exact * alpha + 1),
    )
    return sum(int((got.cpu() != want).sum()) for got, want in found)


@cache
def verified(backend: str, format_: str, device: torch.device) -> str | None:
    """What is wrong with ``backend`` (native, cublaslt) for ``nvfp4`` or ``mxfp4`` on ``device``, else None."""
    if backend == "cublaslt":
        from nvfp4_kernels.cublaslt import nvfp4_matmul

        def multiply(a, b, alpha, vector, out_dtype, out):
            return nvfp4_matmul(a, b, alpha, out_dtype, out)
    else:
        from nvfp4_kernels.triton.native_matmul import native_matmul as multiply
    wrong = wrong_elements(multiply, SCHEMES[format_], device)
    return f"{wrong} of {3 * M * N} elements of a product whose exact value is known are wrong" if wrong else None
