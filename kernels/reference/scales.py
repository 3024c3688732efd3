"""Block scales: from the amax of a tensor and of its blocks to the stored scale and to what x is multiplied by.

All float32, in the order written here (B: a block's amax, T: the tensor's or the outer block's, ``top`` the magnitude
that B is mapped to: the largest element over the headroom, ``range`` the largest block scale aimed at):

    nvfp4    S_enc = min(top * range / T, FLT_MAX), 1 if T is 0;   S_dec = 1 / S_enc
             s = E4M3(min(B * (S_enc * f32(1 / top)), FLT_MAX));   enc = min(1 / (f32(s) * S_dec), FLT_MAX)
    nvfp4, four over six: b = (B / top) * S_enc;  s6 = E4M3(b), s4 = E4M3(b * 1.5);  see select.py
    amax     E4M3: s = E4M3(B / top), enc = min(1 / f32(s), FLT_MAX);   float32: s = B / top, and x is divided by s
    floor    e = floor(log2 B) - floor(log2 largest)                     OCP Microscaling v1.0
    even     the same, after B is rounded to the element's mantissa bits (ties up)
    ceil     the least e with largest * 2^e >= max(B, 1e-4)              DeepSeek
    up       the least e with largest * 2^e >= B                         arXiv:2506.08027
    down     the greatest e with largest * 2^e <= B                      QuEST, with B from ``spread``
    these five: s = 2^e, e clamped to [-127, 127], enc = 2^-e * f32(1 / headroom)

NVFP4's order is TransformerEngine's, four over six's TransformerEngine's and fouroversix's. A NaN or Inf in a block
gives a NaN scale.
"""

import math

import torch
from torch import Tensor

from nvfp4_kernels.reference import codecs
from nvfp4_kernels.scheme import Scheme

FLT_MAX = float.fromhex("0x1.fffffep127")
CEIL_SMALLEST_AMAX = 1e-4  # DeepSeek's floor under a block's amax
FOUR = 1.5  # the scale that maps amax to 4 over the one that maps it to 6


def encode_scale(amax: Tensor, scheme: Scheme) -> Tensor:
    """S_enc of rule ``nvfp4``, of the shape of ``amax``; NaN where amax is NaN or Inf."""
    one = torch.ones_like(amax)
    s_enc = torch.div(one * (scheme.top * scheme.range), amax).clamp(max=FLT_MAX)  # `2688 / amax` rounds twice
    s_enc = torch.where(amax == 0, one, s_enc)
    return torch.where(amax.isinf(), torch.nan, s_enc)  # the reference takes 1 here, which would hide the Inf


def two_level(block_amax: Tensor, s_enc: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor]:
    """Rule ``nvfp4``: (uint8 E4M3 bytes, float32 encode factors), both of the shape of ``block_amax``."""
    scale = (block_amax * (s_enc * (1 / scheme.top))).clamp_(max=FLT_MAX)
    byte = codecs.e4m3_encode(scale.masked_fill_(block_amax.isinf(), torch.nan))
    return byte, encode_factor(byte, s_enc)


def six_and_four(block_amax: Tensor, s_enc: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor]:
    """The E4M3 bytes that map a block's amax to 6, and those that map it to 4."""
    scale = (over(block_amax, scheme.top) * s_enc).clamp_(max=FLT_MAX)
    scale.masked_fill_(block_amax.isinf(), torch.nan)
    return codecs.e4m3_encode(scale), codecs.e4m3_encode(scale * FOUR)


def encode_factor(byte: Tensor, s_enc: Tensor) -> Tensor:
    return (codecs.e4m3_decode(byte) * s_enc.reciprocal()).reciprocal_().clamp_(max=FLT_MAX)


def one_level(block_amax: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor]:
    """Rule ``amax``: (E4M3 bytes, encode factors), or (float32 scales, what x is divided by)."""
    scale = over(block_amax, scheme.top).masked_fill(block_amax.isinf(), torch.nan)
    if scheme.scale == "float32":
        return scale, torch.where(scale == 0, 1.0, scale)
    byte = codecs.e4m3_encode(scale)
    return byte, codecs.e4m3_decode(byte).reciprocal_().clamp_(max=FLT_MAX)


def power_of_two(block_amax: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor]:
    """The rules for E8M0: (uint8 bytes, float32 encode factors). Exponents only, no log2."""
    finite = block_amax.isfinite()
    exponent = _exponent(block_amax.where(finite, 0.0), scheme).clamp(-127, 127)
    byte = torch.where(finite, exponent + 127, 255).to(torch.uint8)
    encode = codecs.power_of_two(-exponent)
    if scheme.headroom != 1.0:
        encode = encode * (1 / scheme.headroom)
    return byte, encode.masked_fill_(~finite, torch.nan)


def _exponent(amax: Tensor, scheme: Scheme) -> Tensor:
    element = scheme.number
    if scheme.rule in ("floor", "even"):
        if scheme.rule == "even":  # half a unit of the element's last mantissa bit, as an integer: it may carry
            half = 1 << (23 - max(element.significant - 1, 0) - 1)
            amax = ((amax.view(torch.int32) + half) & 0x7F800000).view(torch.float32)
        _, exponent = torch.frexp(amax)  # amax = m * 2^exponent, 0.5 <= m < 1
        return torch.where(amax == 0, -127, exponent - 1 - element.top_exponent)
    top, top_exponent = math.frexp(element.largest)
    mantissa, exponent = torch.frexp(amax.clamp(min=CEIL_SMALLEST_AMAX) if scheme.rule == "ceil" else amax)
    beyond = -(mantissa < top).to(torch.int32) if scheme.rule == "down" else (mantissa > top).to(torch.int32)
    return torch.where(mantissa == 0, -127, exponent - top_exponent + beyond)


def spread(blocked: Tensor, axis: int, multiple: float) -> Tensor:
    """``multiple`` times the standard deviation of each block (about its mean), in place of its amax (QuEST).

    ``blocked``: float32, blocks apart along ``axis``; returns [R, blocks]. Order: sums by halving (``tree_sum``), each
    over the block's length; mean square minus squared mean, not below 0; square root; times ``multiple``. Squares
    overflow above 1.8e19, and the scale is NaN.
    """
    dim = 2 if axis else 1
    size = blocked.shape[dim]
    mean, square = over(tree_sum(blocked, dim), size), over(tree_sum(blocked * blocked, dim), size)
    found = (square - mean * mean).clamp_(min=0.0).sqrt_() * multiple
    return found if axis else found.t()


def tree_sum(t: Tensor, dim: int) -> Tensor:
    """Float32 sums along ``dim`` by halving: the upper half is added to the lower until one is left.

    A length that is no power of two is filled up with zeros.
    """
    size = t.shape[dim]
    full = 1 << max(size - 1, 0).bit_length()
    if full != size:
        missing = list(t.shape)
        missing[dim] = full - size
        t = torch.cat((t, t.new_zeros(missing)), dim)
    while full > 1:
        full //= 2
        t = t.narrow(dim, 0, full) + t.narrow(dim, full, full)
    return t.squeeze(dim)


def over(t: Tensor, divisor: float) -> Tensor:
    """A true division by a constant: CUDA multiplies by the reciprocal of a host number."""
    return torch.div(t, torch.full((), divisor, dtype=torch.float32, device=t.device))
