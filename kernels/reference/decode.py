"""From codes and scales back to numbers: the operand a GEMM multiplies, and the value the tensor stands for."""

import torch
from torch import Tensor

from nvfp4_kernels.reference import codecs
from nvfp4_kernels.reference.blocks import as_operand, beside, blocked, expand, within_outer
from nvfp4_kernels.reference.scales import FLT_MAX
from nvfp4_kernels.scheme import Scheme

LIFT = 2.0**64
LARGEST_AMAX = FLT_MAX / codecs.E4M3_LARGEST  # above it scale * amax overflows


def decode(codes: Tensor, scales: Tensor, scheme: Scheme, columns: int, outer: Tensor | None = None) -> Tensor:
    """The operand a GEMM multiplies, [R, columns], without the global scale and without ``scheme.factor``.

    bfloat16 and exact where ``scheme.exact_in_bf16``; else float32: code times block scale, which is
    (f32(scale) * outer) * f32(1 / divisor) under outer scales.
    """
    values = codecs.unpack(codes, scheme.number)
    dtype = torch.bfloat16 if scheme.exact_in_bf16 else torch.float32
    axis = 1 if values.is_contiguous() else 0
    values = (values if axis else values.t()).to(dtype)
    if not scheme.tensor_scale_only:
        local = scheme.on(codes.shape[0], values.shape[axis])
        scale = expand(block_scales(scales, scheme, outer)[0], local, codes.shape[0])
        values = blocked(values, local.block[1], axis).mul_(beside(scale, axis).to(dtype)).view(values.shape)
        if scheme.outer is not None:
            _unlift(values, outer, scheme, axis)
    return as_operand(values, axis, columns)


def dequantize(
    codes: Tensor, scales: Tensor, amax: Tensor | None, scheme: Scheme, columns: int, dtype: torch.dtype,
    outer: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The quantized tensor's values, ``dtype`` [R, columns] (of the transformed tensor after a Hadamard transform).

    ``amax``: float32 0-d, None for a scheme without a global scale. ``outer``: float32, the amax of each outer block.
    Order: code * ((f32(scale) * amax) * f32(1 / divisor)), then * f32(factor). At the ends of the float32 range amax is
    moved by a power of two and back, so that no step of the chain over- or underflows.
    """
    values = codecs.unpack(codes, scheme.number).to(torch.float32)
    axis = 1 if values.is_contiguous() else 0
    values = values if axis else values.t()
    local = scheme.on(codes.shape[0], values.shape[axis])
    if scheme.tensor_scale_only:
        scale, lift = scales, None
    else:
        scale, lift = block_scales(scales, scheme, amax if outer is None else outer)
    scale = expand(scale, local, codes.shape[0])
    values = blocked(values, local.block[1], axis).mul_(beside(scale, axis)).view(values.shape)
    if lift is not None and outer is None:
        values.mul_(lift.reciprocal())
    elif outer is not None:
        _unlift(values, outer, scheme, axis)
    if scheme.factor != 1.0:
        values.mul_(scheme.factor)
    return as_operand(values, axis, columns).to(dtype)


def block_scales(scales: Tensor, scheme: Scheme, amax: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """(float32 block scales, with the global or outer scale of ``amax`` where one is given; what they are lifted
    by)."""
    if scheme.scale == "float32":
        return scales, None
    scale = codecs.e4m3_decode(scales) if scheme.scale == "e4m3" else codecs.e8m0_decode(scales)
    if amax is None or scheme.rule != "nvfp4":
        return scale, None
    lift = _lift(amax, scheme)
    lifted = amax * lift
    return (scale * (lifted if scheme.outer is None else within_outer(lifted, scheme))) * (1 / _divisor(scheme)), lift


def _divisor(scheme: Scheme) -> float:
    return scheme.top * scheme.range


def _lift(amax: Tensor, scheme: Scheme) -> Tensor:
    one = torch.ones_like(amax)
    smallest = _divisor(scheme) / FLT_MAX
    return torch.where(amax > LARGEST_AMAX, one / LIFT, torch.where(amax < smallest, one * LIFT, one))


def _unlift(values: Tensor, outer: Tensor, scheme: Scheme, axis: int) -> None:
    blocked(values, scheme.outer[1], axis).mul_(beside(_lift(outer, scheme).reciprocal(), axis))
