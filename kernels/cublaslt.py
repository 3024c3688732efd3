"""The FP4 tensor core through cuBLASLt, as torch offers it (``torch.nn.functional.scaled_mm``): NVFP4 on Blackwell.

The same operands as the Triton kernel's: packed along K, swizzled E4M3 scales. cuBLASLt takes one float32 factor for
the whole product, from the device; torch makes it of two global scales, of which the second is 1 here, so that the
factor is the one that this library computes, in its order.
"""

import torch
from torch import Tensor

from nvfp4_kernels.triton.native_operands import NativeOperand

COLUMNS = 16  # torch wants N to be a multiple of this


def missing() -> str | None:
    """Why this torch cannot, as the end of a sentence; None if it can. Says nothing about the GPU."""
    if not hasattr(torch.nn.functional, "scaled_mm") or not hasattr(torch, "float4_e2m1fn_x2"):
        return f"torch {torch.__version__} has no torch.nn.functional.scaled_mm: install torch 2.10 or newer"
    if torch.version.cuda is None or tuple(map(int, torch.version.cuda.split(".")[:2])) < (12, 8):
        return f"torch is built for CUDA {torch.version.cuda}: NVFP4 needs 12.8 or newer"
    return None


def nvfp4_matmul(
    a: NativeOperand,
    b: NativeOperand,
    alpha: Tensor | None,
    out_dtype: torch.dtype = torch.bfloat16,
    accumulate_into: Tensor | None = None,
) -> Tensor:
    """``alpha * (a [M, K] @ b [N, K].T)``, float32 sums, rounded once to ``out_dtype`` (bfloat16 or float32).

    ``alpha``: float32 0-d on the device, None for 1. ``accumulate_into``: float32 [M, N] that the product is added to,
    in float32; it is returned.
    """
    from torch.nn.functional import ScalingType, SwizzleType, scaled_mm

    m, n = a.codes.shape[0], b.codes.shape[0]
    dtype = torch.float32 if accumulate_into is not None else out_dtype
    if m == 0 or n == 0 or a.codes.shape[1] == 0:
        return accumulate_into if accumulate_into is not None else a.codes.new_zeros(m, n, dtype=dtype)
    right = torch.nn.functional.pad(b.codes, (0, 0, 0, -n % COLUMNS)) if n % COLUMNS else b.codes
    one = torch.ones((), dtype=torch.float32, device=a.codes.device)
    recipe = [ScalingType.BlockWise1x16, ScalingType.TensorWise]
    swizzle = [SwizzleType.SWIZZLE_32_4_4, SwizzleType.NO_SWIZZLE]
    scales = [x.scales.view(torch.float8_e4m3fn).flatten() for x in (a, b)]
    product = scaled_mm(
        a.codes.view(torch.float4_e2m1fn_x2), right.view(torch.float4_e2m1fn_x2).T,
        [scales[0], one if alpha is None else alpha], recipe, [scales[1], one], recipe, swizzle, swizzle,
        output_dtype=dtype,
    )[:, :n]  # fmt: skip
    return accumulate_into.add_(product) if accumulate_into is not None else product.contiguous()
