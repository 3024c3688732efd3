"""An operand in plain words and numbers: its bits a value, its scales, what a machine needs to multiply it."""

from typing import Any

from nvfp4_kernels.scheme import PER_STEP, WHOLE, Scheme
from nvfp4_train.operands import BF16, OperandSpec
from nvfp4_train.recipe import GEMMS, Recipe

BF16_BITS = 16.0
_SCALES = {"e4m3": "E4M3", "e8m0": "E8M0 (a power of two)", "float32": "float32"}
_ROUNDINGS = {
    "nearest": "nearest",
    "stochastic": "stochastic",
    "stochastic8": "stochastic with 8-bit draws",
    "stochastic_scale": "nearest elements under a stochastically rounded scale (MS-EDEN)",
}


def bits_of(spec: OperandSpec) -> float:
    """Bits one value takes, its share of the block scales included; a tensor's one float32 is not counted."""
    if spec.format == BF16:
        return BF16_BITS
    bits = spec.scheme.bits_per_value
    if spec.split is not None and spec.split.part == "channels":
        other = spec.scheme.split.hot.bits_per_value
        bits = (1 - spec.split.fraction) * bits + spec.split.fraction * other
    return bits


def in_words(spec: OperandSpec) -> str:
    """Such as ``E2M1, one E4M3 scale for 1x16 under a float32 scale of the tensor, stochastic``."""
    if spec.format == BF16:
        return "BF16, not quantized"
    scheme = spec.scheme
    parts = [scheme.element.upper(), _scale_words(scheme)]
    if scheme.select:
        parts.append(f"the better of 6 and 4 as a block's top (by {scheme.select})")
    if scheme.clip:
        parts.append(f"clipped at {scheme.clip:.4g} standard deviations")
    if scheme.headroom != 1.0:
        parts.append(f"headroom {scheme.headroom:.6g}")
    parts.append(_ROUNDINGS[spec.rounding])
    if scheme.hadamard:
        signs = {PER_STEP: "signs drawn each step", 0: "no signs"}.get(scheme.sign_mask, "fixed signs")
        parts.append(f"after a {scheme.hadamard}-point Hadamard transform, {signs}")
    if spec.requantize:
        parts.append("made from Fprop's quantized operand")
    if spec.mask_clipped:
        parts.append("what saturates gets no gradient")
    if spec.split is not None:
        parts.append(_split_words(spec))
    return ", ".join(parts)


def _scale_words(scheme: Scheme) -> str:
    rows, columns = scheme.block
    if (rows, columns) == (WHOLE, WHOLE):
        where = "for the tensor"
    elif columns == WHOLE:
        where = "for a row"
    else:
        where = f"for {rows}x{columns}"
    words = f"one {_SCALES[scheme.scale]} scale {where}"
    if scheme.rule == "nvfp4":
        above = "of the tensor" if scheme.outer is None else f"for {scheme.outer[0]}x{scheme.outer[1]}"
        return f"{words} under a float32 scale {above}"
    return f"{words}, rule {scheme.rule}"


def _split_words(spec: OperandSpec) -> str:
    if spec.split.part == "mean":
        return "its mean over the tokens apart, in high precision"
    share = f"the {100 * spec.split.fraction:g}% of the channels with the largest norms"
    steps = spec.split.observe
    when = "" if steps is None else f", chosen over steps {steps[0]} to {steps[1]}"
    return f"{share} apart in {spec.split.spec.format}{when}"


def needs(recipe: Recipe) -> list[dict[str, Any]]:
    """What a machine needs for each GEMM, in every phase of training: {gemm, instruction, architectures, why_not,
    reference_on_gpu}.

    ``instruction`` is None and ``why_not`` the reason where no hardware multiplies the operands. ``reference_on_gpu``:
    operand -> reason, for those that have no Triton kernel and are quantized in plain PyTorch on a GPU too.
    """
    rows = []
    for gemms in ({name: getattr(recipe, name) for name in GEMMS}, *(phase.gemms for phase in recipe.schedule)):
        for gemm, spec in gemms.items():
            found = spec.hardware
            kind, architectures = (None, ()) if isinstance(found, str) else found
            reasons = {name: operand.scheme.why_not_triton for name, operand in spec.operands.items() if operand.scheme}
            row = {
                "gemm": gemm, "instruction": kind, "architectures": list(architectures),
                "why_not": found if isinstance(found, str) else "",
                "reference_on_gpu": {name: reason for name, reason in reasons.items() if reason},
            }  # fmt: skip
            if row not in rows:
                rows.append(row)
    return rows


def needs_lines(rows: list[dict[str, Any]]) -> list[str]:
    """``needs`` in words, GEMMs of one need on one line."""
    groups: dict[str, list[str]] = {}
    slow: dict[str, list[str]] = {}
    for row in rows:
        if row["instruction"] is None:
            words = f"emulation only: {row['why_not']}"
        elif row["instruction"] == BF16:
            words = "hardware instruction bf16"
        else:
            words = f"hardware instruction {row['instruction']} on {', '.join(row['architectures'])}"
        groups.setdefault(words, []).append(row["gemm"])
        for name, reason in row["reference_on_gpu"].items():
            slow.setdefault(reason, []).append(f"{row['gemm']}.{name}")
    lines = [f"{_joined(gemms)}: {words}" for words, gemms in groups.items()]
    return lines + [f"quantized in plain PyTorch on a GPU too: {_joined(n)} ({reason})" for reason, n in slow.items()]


def _joined(names: list[str]) -> str:
    return ", ".join(dict.fromkeys(names))
