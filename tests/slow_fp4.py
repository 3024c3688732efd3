"""FP4 products that a compiler takes without a word and turns into something slower than they look: what the audit of
kernels must refuse. Compiled by test_kernel_audit.py, never run."""

import triton
import triton.language as tl


@triton.jit
def pointwise_kernel(
    a_desc, b_desc, a_scales_ptr, b_scales_ptr, out_ptr, steps, scale_stride,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, VECTOR: tl.constexpr, K_PACKED: tl.constexpr,
):  # fmt: skip
    """Scales as plain [rows, K / VECTOR] matrices; with K_PACKED false, b is packed along its other dimension."""
    m = tl.arange(0, BM)
    n = tl.arange(0, BN)
    s = tl.arange(0, BK // VECTOR)
    sums = tl.zeros((BM, BN), dtype=tl.float32)
    for step in tl.range(0, steps, num_stages=3):
        a = a_desc.load([0, step * (BK // 2)])
        a_scales = tl.load(a_scales_ptr + m[:, None] * scale_stride + step * (BK // VECTOR) + s[None, :])
        b_scales = tl.load(b_scales_ptr + n[:, None] * scale_stride + step * (BK // VECTOR) + s[None, :])
        if K_PACKED:
            b = b_desc.load([0, step * (BK // 2)])
            sums = tl.dot_scaled(a, a_scales, "e2m1", b.T, b_scales, "e2m1", sums)
        else:
            b = b_desc.load([step * BK, 0])
            sums = tl.dot_scaled(a, a_scales, "e2m1", b, b_scales, "e2m1", sums, rhs_k_pack=False)
    tl.store(out_ptr + m[:, None] * BN + n[None, :], sums)


def arguments(scale: str, k_packed: bool, m: int = 128, n: int = 128, k: int = 128, vector: int = 16):
    """(signature, constexprs); ``scale``: Triton's name of the type the scales are loaded with."""
    b = f"{n}, {k // 2}" if k_packed else f"{k}, {n // 2}"
    signature = {
        "a_desc": f"tensordesc<u8[{m}, {k // 2}]>", "b_desc": f"tensordesc<u8[{b}]>", "a_scales_ptr": f"*{scale}",
        "b_scales_ptr": f"*{scale}", "out_ptr": "*fp32", "steps": "i32", "scale_stride": "i32",
    }  # fmt: skip
    return signature, dict(BM=m, BN=n, BK=k, VECTOR=vector, K_PACKED=k_packed)
