"""Quantized: what a quantize kernel returns for one operand."""

from typing import NamedTuple

from torch import Tensor

from nvfp4_kernels.scheme import Scheme


class Quantized(NamedTuple):
    """One operand ``[R, C]``, C padded with zeros to a multiple of ``scheme.group`` (Cpad).

    A form that was not asked for is None. Strides are free: the column form keeps the layout of the tensor it was
    made from and is a transposed view of it.
    """

    codes: Tensor | None  # uint8 [R, Cpad // 2], two 4-bit codes a byte, even index first; [R, Cpad] of wider codes
    scales: Tensor | None  # E4M3 or E8M0 bytes, or float32: [ceil(R / rows of a block), Cpad // columns of a block]
    operand: Tensor | None  # [R, C] (Cpad after a Hadamard transform), decoded without the global scale: bfloat16, or
    #                         float32 where that would not be exact (``Scheme.exact_in_bf16``)
    amax: Tensor | None = None  # float32 0-d that the block scales were made with; None without a global scale
    outer: Tensor | None = None  # float32 [R, Cpad // columns of an outer block]: their amax; None without outer blocks
    mask: Tensor | None = None  # uint8 [R, Cpad // 8], bit k of byte n set where element 8n + k did not saturate


def amax_place(scheme: Scheme, columns: bool) -> int:
    """Where in a vector of three a form's amax stands: that of x as it is, rotated along its rows, along its
    columns."""
    return 0 if not scheme.hadamard else 2 if columns else 1
