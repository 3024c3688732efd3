"""Rounding to an element's grid, the codes of what lies on it, and their values; the two byte scales.

A value on the grid is held in float32 ("grid") until codes are asked for: on a CPU the decoded form is what a GEMM
wants, and skipping the codes halves the work. Rounding is arithmetic, not a search in a table: divide by the grid's
step at that magnitude, round to an integer, multiply back; every one of these but the rounding is exact.

Sources: OCP Microscaling Formats (MX) specification v1.0 (E2M1, E3M2, E2M3, E8M0), OCP 8-bit floating point v1.0
(E4M3, E5M2).
"""

from functools import cache

import torch
from torch import Tensor

from nvfp4_kernels.elements import ELEMENTS, Element

E2M1, E4M3 = ELEMENTS["e2m1"], ELEMENTS["e4m3"]
E2M1_LARGEST = E2M1.largest
E4M3_LARGEST = E4M3.largest
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # by magnitude code; bit 3 is the sign

_EXPONENT = 0x7F800000  # the exponent field of a float32
_BYTE = torch.arange(256, dtype=torch.int32)
_E4M3 = _BYTE.to(torch.uint8).view(torch.float8_e4m3fn).to(torch.float32)
_E8M0 = torch.where(_BYTE == 0, 0x00400000, torch.where(_BYTE == 255, 0x7FC00000, _BYTE << 23))
_E8M0 = _E8M0.to(torch.int32).view(torch.float32)


def _steps(y: Tensor, element: Element) -> Tensor:
    """The spacing of a float element's grid above |y|, as float32: uniform below 2^least_exponent. NaN gives Inf."""
    bits = torch.bitwise_and(y.view(torch.int32), _EXPONENT)  # the sign goes too
    least = (127 + element.least_exponent) << 23
    return bits.clamp_(min=least).sub_(element.mantissa << 23).view(torch.float32)


def nearest_(y: Tensor, element: Element) -> Tensor:
    """Round float32 ``y`` to the grid in place: nearest, ties to the even code, clamped to the largest; keeps NaN."""
    y.clamp_(-element.largest, element.largest)
    if element.integer:
        return y.round_().add_(0.0)  # integers have no -0.0
    step = _steps(y, element)
    return y.div_(step).round_().mul_(step)


def stochastic_(y: Tensor, draws: Tensor, element: Element, bits: int = 16) -> Tensor:
    """Round float32 ``y`` to the grid in place, away from zero iff ``draw < floor(frac * 2**bits)``.

    ``draws``: uint16 of y's shape; of each the high ``bits`` (16 or 8) are used. |y| above the largest saturates first.
    """
    y.clamp_(-element.largest, element.largest)
    step = None if element.integer else _steps(y, element)
    # With up = 2^bits - 1 - draw, the condition is floor(frac * 2^bits) + up >= 2^bits: a carry into the integer
    # part. Both summands are integers below 2^23, so float32 adds them exactly. (With 8 bits `up` keeps the draw's low
    # byte as a fraction, which cannot make a carry.)
    up = torch.bitwise_not(draws.view(torch.int16)).view(torch.uint16).to(torch.float32)
    if bits == 8:
        up.mul_(2.0**-8)
    y = y if step is None else y.div_(step)
    y.mul_(2.0**bits).trunc_()
    y.add_(torch.copysign(up, y, out=up))
    y.mul_(2.0**-bits).trunc_()
    return y.add_(0.0) if step is None else y.mul_(step)


def encode(grid: Tensor, element: Element) -> Tensor:
    """uint8 codes, one a byte, of float32 values that lie on the grid; integers in two's complement. Not for NaN.

    A float's sign is the highest of its bits, so E2M1's -0.0 is code 8.
    """
    if element.integer:
        return grid.to(torch.int8).view(torch.uint8) & (0xFF >> (8 - element.bits))
    # A narrow float is a wider one with the exponent moved so that their subnormals meet: the codes have the same bits.
    wide, moved, dropped = _WIDER[element.name]
    byte = (grid if moved == 1.0 else grid * moved).to(wide).view(torch.uint8)
    if element.bits == 8:
        return byte
    sign = 1 << (element.bits - 1)
    return ((byte >> dropped) & (sign - 1)) | ((byte >> (8 - element.bits)) & sign)


def values(element: Element) -> Tensor:
    """float32 ``[2**bits]``: the value of each code."""
    return _VALUES[element.name]


# The 8-bit float whose codes hold a narrow one's, what its values are multiplied by, mantissa bits that are then 0.
_WIDER = {
    "e2m1": (torch.float8_e4m3fn, 2.0**-6, 2),
    "e3m2": (torch.float8_e5m2, 2.0**-12, 0),
    "e2m3": (torch.float8_e4m3fn, 2.0**-6, 0),
    "e4m3": (torch.float8_e4m3fn, 1.0, 0),
    "e5m2": (torch.float8_e5m2, 1.0, 0),
}


def _values(element: Element) -> Tensor:
    code = torch.arange(2**element.bits, dtype=torch.int32)
    sign = 1 << (element.bits - 1)
    if element.integer:
        return torch.where(code < sign, code, code - 2 * sign).to(torch.float32)
    wide, moved, dropped = _WIDER[element.name]
    byte = ((code & (sign - 1)) << dropped) | ((code & sign) << (8 - element.bits))
    return byte.to(torch.uint8).view(wide).to(torch.float32) / moved


_VALUES = {name: _values(element) for name, element in ELEMENTS.items()}
_CODE_VALUES = {name: table.to(torch.bfloat16) for name, table in _VALUES.items()}  # exact: at most 7 bits
_LOW = {name: table[_BYTE & 15] for name, table in _CODE_VALUES.items() if ELEMENTS[name].packed}
_HIGH = {name: table[_BYTE >> 4] for name, table in _CODE_VALUES.items() if ELEMENTS[name].packed}
# bfloat16 pairs as one gatherable int32 word: the two values in a byte
_BOTH = {name: torch.stack((_LOW[name], _HIGH[name]), dim=1).view(torch.int32).view(-1) for name in _LOW}


def pack(codes: Tensor, dim: int) -> Tensor:
    """Two codes a byte along ``dim`` (0 or 1) of contiguous uint8 ``[I, J]``; the even index in the low nibble."""
    if dim == 0:
        return codes[0::2] | (codes[1::2] << 4)
    pairs = codes.reshape(-1).view(torch.int16)  # low byte: even index
    return (pairs | (pairs >> 4)).to(torch.uint8).view(codes.shape[0], codes.shape[1] // 2)


def pack_bits(mask: Tensor, dim: int) -> Tensor:
    """Eight bools a byte along ``dim`` (0 or 1) of contiguous ``[I, J]``; index 8n + k is bit k of byte n."""
    rows, columns = mask.shape
    shape = (rows, columns // 8, 8) if dim else (rows // 8, 8, columns)
    weights = (1 << torch.arange(8, device=mask.device)).to(torch.uint8).view((8,) if dim else (8, 1))
    return (mask.view(shape).to(torch.uint8) * weights).sum(dim=2 if dim else 1, dtype=torch.uint8)


def unpack_bits(packed: Tensor, columns: int) -> Tensor:
    """bool ``[R, columns]`` of bytes ``[R, n]``, packed along the second dimension."""
    bits = (packed.unsqueeze(2) >> torch.arange(8, device=packed.device).to(torch.uint8)) & 1
    return bits.view(packed.shape[0], 8 * packed.shape[1])[:, :columns].bool()


def unpack(codes: Tensor, element: Element = E2M1) -> Tensor:
    """bfloat16 ``[R, n]`` values of uint8 codes, ``[R, 2 * n]`` of packed ones, in the memory layout of ``codes``."""
    rows, count = codes.shape
    if not element.packed:
        turned = codes.t().is_contiguous() and not codes.is_contiguous()
        found = _lookup(_at(codes.device, _CODE_VALUES[element.name]), codes.t() if turned else codes)
        return found.t() if turned else found
    if codes.t().is_contiguous() and not codes.is_contiguous():  # the column form: neighbours along K are rows here
        index = codes.t().reshape(-1).to(torch.int32)
        out = torch.empty(count, 2, rows, dtype=torch.bfloat16, device=codes.device)
        out[:, 0] = _at(codes.device, _LOW[element.name]).index_select(0, index).view(count, rows)
        out[:, 1] = _at(codes.device, _HIGH[element.name]).index_select(0, index).view(count, rows)
        return out.view(2 * count, rows).t()
    both = _at(codes.device, _BOTH[element.name]).index_select(0, codes.reshape(-1).to(torch.int32))
    return both.view(torch.bfloat16).view(rows, 2 * count)


def e4m3_encode(scale: Tensor) -> Tensor:
    """uint8 bytes of non-negative float32 ``scale``: nearest even, saturating at 448; NaN is 0x7F."""
    byte = scale.clamp(max=E4M3_LARGEST).to(torch.float8_e4m3fn).view(torch.uint8)
    return byte & 0x7F  # a NaN may carry a sign


def e4m3_decode(byte: Tensor) -> Tensor:
    """float32 values of E4M3 bytes."""
    return _lookup(_at(byte.device, _E4M3), byte)


def e8m0_decode(byte: Tensor) -> Tensor:
    """float32 values of E8M0 bytes: 2^(byte - 127), and NaN for 255."""
    return _lookup(_at(byte.device, _E8M0), byte)


def power_of_two(exponent: Tensor) -> Tensor:
    """float32 2^exponent, exact, for int32 exponents in [-127, 127]."""
    return e8m0_decode(exponent + 127)


@cache
def _at(device: torch.device, table: Tensor) -> Tensor:
    """``table``, one of this module's, on ``device``: copied once, since a copy makes the host wait for the device."""
    return table.to(device)


def _lookup(table: Tensor, index: Tensor) -> Tensor:
    return table.index_select(0, index.reshape(-1).to(torch.int32)).view(index.shape)
