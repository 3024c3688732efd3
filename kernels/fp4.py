"""Which quantized operands an FP4 tensor core reads, and as what."""

from nvfp4_kernels.scheme import Scheme

VECTOR = {"nvfp4": 16, "mxfp4": 32}  # elements that share a scale where the hardware reads it
_BY_SCALE = {"e4m3": "nvfp4", "e8m0": "mxfp4"}


def fp4_format(scheme: Scheme) -> str | None:
    """``nvfp4`` (E4M3 scales of 16) or ``mxfp4`` (E8M0 scales of 32) if codes and block scales of ``scheme`` are that
    once they are laid out; None for everything else.

    How codes and scales were found does not matter; the scale of a larger block is repeated. A float32 scale for each
    row or outer block has no place in the instruction; and an operand that a layer treats apart (requantized, split,
    masked) is multiplied in the way it was made for, decoded.
    """
    rows, columns = scheme.block
    format_ = _BY_SCALE.get(scheme.scale)
    apart = scheme.requantized or scheme.split is not None or scheme.masked or scheme.history
    if format_ is None or scheme.element != "e2m1" or scheme.outer is not None or apart:
        return None
    return format_ if rows and columns and columns % VECTOR[format_] == 0 else None


def product_format(a: str, b: str) -> str | None:
    """The format both operands share, given as the text of a scheme or ``bf16``; None if one FP4 instruction cannot
    multiply them."""
    formats = {None if text == "bf16" else fp4_format(Scheme.parse(text)) for text in (a, b)}
    return formats.pop() if len(formats) == 1 else None
