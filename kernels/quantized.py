"""Quantized: what a quantize kernel returns for one operand."""

from typing import NamedTuple

from torch import Tensor


class Quantized(NamedTuple):
    """One operand ``[R, C]``, C padded with zeros to a multiple of ``scheme.group`` (Cpad).

    A form that was not asked for is None. Strides are free: the column form keeps the layout of the tensor it was
    made from and is a transposed view of it.
    """

    codes: Tensor | None  # uint8 [R, Cpad // 2], two 4-bit codes a byte, even index in the low nibble
    scales: Tensor | None  # uint8 bytes of E4M3 or E8M0, [R, Cpad // columns] or [ceil(R / 16), Cpad // 16]
    operand: Tensor | None  # bfloat16 [R, C] (Cpad after a Hadamard transform), decoded without the global scale
    amax: Tensor | None = None  # float32 0-d that the block scales were made with; None without a global scale
