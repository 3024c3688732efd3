"""E2M1, E4M3 and E8M0: rounding to them, their codes, their values.

A value on the E2M1 grid is held in float32 ("grid") until codes are asked for: on a CPU the decoded form is what a
GEMM wants, and skipping the codes halves the work. Rounding is arithmetic, not a search in a table: divide by the
grid's step at that magnitude, round to an integer, multiply back; every one of these but the rounding is exact.

Sources: OCP Microscaling Formats (MX) specification v1.0 (E2M1, E8M0), OCP 8-bit floating point v1.0 (E4M3).
"""

import torch
from torch import Tensor

E2M1_LARGEST = 6.0
E4M3_LARGEST = 448.0
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # by magnitude code; bit 3 is the sign

_EXPONENT = 0x7F800000  # the exponent field of a float32
_ONE = 127 << 23  # 1.0

_SIGNED = torch.tensor([*E2M1_VALUES, *(-value for value in E2M1_VALUES)], dtype=torch.bfloat16)
_BYTE = torch.arange(256, dtype=torch.int32)
_LOW, _HIGH = _SIGNED[_BYTE & 15], _SIGNED[_BYTE >> 4]  # bfloat16 [256]: the two values in a byte
_BOTH = torch.stack((_LOW, _HIGH), dim=1).view(torch.int32).view(-1)  # int32 [256]: both as one gatherable word
_E4M3 = _BYTE.to(torch.uint8).view(torch.float8_e4m3fn).to(torch.float32)
_E8M0 = torch.where(_BYTE == 0, 0x00400000, torch.where(_BYTE == 255, 0x7FC00000, _BYTE << 23))
_E8M0 = _E8M0.to(torch.int32).view(torch.float32)


def _steps(y: Tensor) -> Tensor:
    """The spacing of the E2M1 grid above |y|, as float32: 0.5 below 2, then 1, then 2 from 4 on. NaN gives Inf."""
    bits = torch.bitwise_and(y.view(torch.int32), _EXPONENT)  # the sign goes too
    return bits.clamp_(min=_ONE).sub_(1 << 23).view(torch.float32)


def e2m1_nearest_(y: Tensor) -> Tensor:
    """Round float32 ``y`` to the E2M1 grid in place: nearest, ties to the even code, clamped to +-6; keeps NaN."""
    y.clamp_(-E2M1_LARGEST, E2M1_LARGEST)
    step = _steps(y)
    return y.div_(step).round_().mul_(step)


def e2m1_stochastic_(y: Tensor, draws: Tensor, bits: int = 16) -> Tensor:
    """Round float32 ``y`` to the E2M1 grid in place, away from zero iff ``draw < floor(frac * 2**bits)``.

    ``draws``: uint16 of y's shape; of each the high ``bits`` (16 or 8) are used. |y| above 6 saturates first.
    """
    y.clamp_(-E2M1_LARGEST, E2M1_LARGEST)
    step = _steps(y)
    # With up = 2^bits - 1 - draw, the condition is floor(frac * 2^bits) + up >= 2^bits: a carry into the integer
    # part. Both summands are integers below 2^18, so float32 adds them exactly. (With 8 bits `up` keeps the draw's low
    # byte as a fraction, which cannot make a carry.)
    up = torch.bitwise_not(draws.view(torch.int16)).view(torch.uint16).to(torch.float32)
    if bits == 8:
        up.mul_(2.0**-8)
    y.div_(step).mul_(2.0**bits).trunc_()
    y.add_(torch.copysign(up, y, out=up))
    return y.mul_(2.0**-bits).trunc_().mul_(step)


def e2m1_encode(grid: Tensor) -> Tensor:
    """uint8 codes 0..15 of float32 values that lie on the E2M1 grid; -0.0 is code 8. Not for NaN."""
    # E4M3 with the exponent moved so that E2M1's subnormal 0.5 is one of E4M3's: its top two mantissa bits are then 0.
    byte = (grid * 2.0**-6).to(torch.float8_e4m3fn).view(torch.uint8)
    return ((byte >> 2) & 7) | ((byte >> 4) & 8)


def pack(codes: Tensor, dim: int) -> Tensor:
    """Two codes a byte along ``dim`` (0 or 1) of contiguous uint8 ``[I, J]``; the even index in the low nibble."""
    if dim == 0:
        return codes[0::2] | (codes[1::2] << 4)
    pairs = codes.reshape(-1).view(torch.int16)  # low byte: even index
    return (pairs | (pairs >> 4)).to(torch.uint8).view(codes.shape[0], codes.shape[1] // 2)


def unpack(codes: Tensor) -> Tensor:
    """bfloat16 ``[R, 2 * n]`` values of packed uint8 codes ``[R, n]``, in the memory layout of ``codes``."""
    rows, count = codes.shape
    if codes.t().is_contiguous() and not codes.is_contiguous():  # the column form: neighbours along K are rows here
        index = codes.t().reshape(-1).to(torch.int32)
        out = torch.empty(count, 2, rows, dtype=torch.bfloat16, device=codes.device)
        out[:, 0] = _LOW.to(codes.device).index_select(0, index).view(count, rows)
        out[:, 1] = _HIGH.to(codes.device).index_select(0, index).view(count, rows)
        return out.view(2 * count, rows).t()
    both = _BOTH.to(codes.device).index_select(0, codes.reshape(-1).to(torch.int32))
    return both.view(torch.bfloat16).view(rows, 2 * count)


def e4m3_encode(scale: Tensor) -> Tensor:
    """uint8 bytes of non-negative float32 ``scale``: nearest even, saturating at 448; NaN is 0x7F."""
    byte = scale.clamp(max=E4M3_LARGEST).to(torch.float8_e4m3fn).view(torch.uint8)
    return byte & 0x7F  # a NaN may carry a sign


def e4m3_decode(byte: Tensor) -> Tensor:
    """float32 values of E4M3 bytes."""
    return _lookup(_E4M3, byte)


def e8m0_decode(byte: Tensor) -> Tensor:
    """float32 values of E8M0 bytes: 2^(byte - 127), and NaN for 255."""
    return _lookup(_E8M0, byte)


def power_of_two(exponent: Tensor) -> Tensor:
    """float32 2^exponent, exact, for int32 exponents in [-127, 127]."""
    return e8m0_decode(exponent + 127)


def _lookup(table: Tensor, index: Tensor) -> Tensor:
    return table.to(index.device).index_select(0, index.reshape(-1).to(torch.int32)).view(index.shape)
