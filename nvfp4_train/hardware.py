"""Which matrix instruction multiplies two operands, or why none does: what ``emulation_only`` is about.

Block scales of a multiple of the instruction's own block are repeated for it (16x16 and 1x128 are 1x16 eight times);
a float32 scale of a tensor or of a row enters in the epilogue; a float32 scale of 128 or more along the reduction
dimension is applied to partial sums in registers, as DeepSeek-V3 does (arXiv:2412.19437). Shorter float32 blocks, other
element types and pairs of different scale types exist in no instruction.

Source: PTX ISA 9, mma and tcgen05.mma: kinds mxf4, mxf4nvf4, mxf8f6f4, f8f6f4; mma with s8 and s4 (sm_80 to sm_90).
"""

from typing import NamedTuple

from nvfp4_kernels.scheme import WHOLE, Scheme

BLACKWELL = ("sm_100", "sm_103", "sm_120")
FLOATS = ("e2m1", "e3m2", "e2m3", "e4m3", "e5m2")
PARTIAL_SUM = 128  # along the reduction dimension


class Instruction(NamedTuple):
    kind: str
    architectures: tuple[str, ...]


def instruction(a: Scheme | None, b: Scheme | None) -> Instruction | str:
    """The instruction for ``a @ b.T``, or the reason why there is none; None is a BF16 operand."""
    if a is None and b is None:
        return Instruction("bf16", ("sm_80", "sm_90", *BLACKWELL))
    if a is None or b is None:
        return "one operand is bf16: one matrix instruction reads both operands in one format"
    for scheme in (a, b):
        reason = _scale_reason(scheme)
        if reason:
            return reason
    found = _pair(a, b)
    splits = [scheme.split.hot for scheme in (a, b) if scheme.split is not None and scheme.split.hot is not None]
    for hot in splits:
        apart = instruction(hot, hot)
        if isinstance(apart, str):
            return f"the channels apart: {apart}"
    return found


def _scale_reason(scheme: Scheme) -> str | None:
    """Why no hardware applies the scales of this operand."""
    for name, block in (("scale", scheme.block if scheme.scale == "float32" else None), ("outer scale", scheme.outer)):
        if block is not None and block[1] != WHOLE and block[1] % PARTIAL_SUM:
            return (
                f"a float32 {name} of {block[0]}x{block[1]}: no matrix instruction takes one, and partial sums can be "
                f"scaled every {PARTIAL_SUM} elements at most"
            )
    return None


def _pair(a: Scheme, b: Scheme) -> Instruction | str:
    elements, scales = {a.element, b.element}, {a.scale, b.scale}
    if len(scales) > 1:
        return f"{a.scale} scales on one side, {b.scale} on the other: one matrix instruction reads both in one format"
    scale = a.scale
    if elements <= {"int8"} or elements <= {"int4"}:
        if scale != "float32":
            return f"{a.element} with {scale} block scales: integer matrix instructions take no block scales"
        bits = "s8" if elements == {"int8"} else "s4"
        return Instruction(bits, ("sm_80", "sm_89", "sm_90") if bits == "s8" else ("sm_80", "sm_89"))
    if not elements <= set(FLOATS):
        return f"{a.element} with {b.element}: one matrix instruction reads both operands in one format"
    if scale == "float32":
        old = ("sm_89", "sm_90") if elements <= {"e4m3", "e5m2"} else ()
        return Instruction("fp8" if old else "f8f6f4", (*old, *BLACKWELL))
    columns = min(scheme.block[1] or PARTIAL_SUM for scheme in (a, b))
    if elements == {"e2m1"}:
        return Instruction("mxf4nvf4" if scale == "e4m3" or columns % 32 else "mxf4", BLACKWELL)
    if scale == "e4m3":
        return f"{' with '.join(sorted(elements))} under E4M3 block scales: only E2M1 with E2M1 takes them"
    if columns % 32:
        return (
            f"E8M0 scales of {columns} elements with {' and '.join(sorted(elements))}: the instruction's blocks have 32"
        )
    return Instruction("mxf8f6f4", BLACKWELL)
