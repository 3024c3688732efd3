"""Where a recipe may fail, as far as published experience goes, and how to look for it.

A risk states what was seen where; it does not say that it will happen to you. Most are read off one operand at a time
(``OPERAND_RISKS``, a table), the others off the recipe as a whole. The check of each is a command of this library.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from nvfp4_kernels.scheme import PER_STEP, WHOLE, Scheme
from nvfp4_train.operands import BF16, OperandSpec
from nvfp4_train.recipe import Recipe

AUDIT = "nvfp4-train audit {recipe}"
COMPARE = "nvfp4-train compare EXPERIMENT: {recipe} beside its control and its noise floor"
ELEMENT_DRAWS = ("stochastic", "stochastic8")


@dataclass(frozen=True)
class Risk:
    """``where``: the operands or GEMMs it is about. ``serious``: also told before an experiment starts."""

    key: str
    where: str
    text: str
    source: str
    verify: str
    serious: bool = False


def risks(recipe: Recipe) -> list[Risk]:
    """The risks of ``recipe``, the serious ones first; none for a recipe that quantizes nothing."""
    found = [*_of_operands(recipe), *_of_recipe(recipe)]
    return sorted(found, key=lambda risk: not risk.serious)


def warnings(recipe: Recipe) -> list[str]:
    """The serious risks, a line each: what ``compare`` prints before it starts."""
    return [f"{risk.where}: {risk.text} ({risk.source})" for risk in risks(recipe) if risk.serious]


@dataclass(frozen=True)
class OperandRisk:
    """A risk of every operand for which ``holds(where, spec, scheme)``; ``where`` is such as ``fprop.input``."""

    key: str
    holds: Callable[[str, OperandSpec, Scheme], bool]
    text: str
    source: str
    verify: str
    serious: bool = False


def _four_bits(scheme: Scheme) -> bool:
    return scheme.number.bits <= 4


OPERAND_RISKS = (
    OperandRisk(
        "stochastic_forward",
        lambda where, spec, s: where.startswith("fprop") and spec.rounding in ELEMENT_DRAWS and _four_bits(s),
        "stochastic rounding in the forward pass: its error is larger than that of nearest, and diverged",
        "2509.25149, section 4.4", COMPARE, serious=True,
    ),
    OperandRisk(
        "stochastic_activation",
        lambda where, spec, s: where == "wgrad.input" and spec.rounding in ELEMENT_DRAWS and _four_bits(s),
        "stochastic rounding of an activation: some recipes train with it, elsewhere it diverged",
        "2505.19115; 2509.25149, section 4.4", COMPARE,
    ),
    OperandRisk(
        "nearest_gradient",
        lambda where, spec, s: where.endswith("grad_output") and spec.rounding == "nearest" and _four_bits(s),
        "4-bit gradients rounded to nearest are biased: a 12B model did not converge properly",
        "2509.25149, section 4.4; 2605.09825 says the opposite", COMPARE, serious=True,
    ),
    OperandRisk(
        "clamp_bias",
        lambda where, spec, s: spec.rounding in ELEMENT_DRAWS and s.rule == "nvfp4" and s.headroom <= 1,
        "an element above the largest, after its scale was rounded down, saturates: stochastic rounding is unbiased "
        "but for that",
        "measured in experiments/2026-11-30_recipe_errors", AUDIT,
    ),
    OperandRisk(
        "eight_bit_draws",
        lambda where, spec, s: spec.rounding == "stochastic8",
        "8-bit draws, as the instruction makes them, round towards zero a little too often",
        "2504.20634", AUDIT,
    ),
    OperandRisk(
        "plain_wgrad",
        lambda where, spec, s: (
            where.startswith("wgrad") and not s.hadamard and _four_bits(s) and spec.split is None
        ),
        "4-bit Wgrad without a Hadamard transform: outliers set the scale of their block",
        "2509.25149, section 4.2; 2605.09825", COMPARE, serious=True,
    ),
    OperandRisk(
        "random_signs",
        lambda where, spec, s: (
            where.startswith("wgrad") and s.hadamard > 0 and s.sign_mask == PER_STEP and s.scale == "e8m0"
        ),
        "random signs in an MXFP4 Wgrad: one study could not train with them, and could with a fixed transform",
        "2605.09825; 2502.20586 and 2505.14669 say the opposite", COMPARE,
    ),
    OperandRisk(
        "saturating_scale",
        lambda where, spec, s: s.rule in ("floor", "even") and s.headroom <= 1,
        "the largest elements of a block may saturate (scale rule of the OCP specification); that can diverge",
        "2506.08027", AUDIT, serious=True,
    ),
    OperandRisk(
        "stale_scale",
        lambda where, spec, s: s.rule == "delayed",
        "the scale follows from earlier steps: what outgrows them saturates; your own loop has to call set_progress",
        "2209.05433; 2412.19437, section 3.3.2", AUDIT, serious=True,
    ),
    OperandRisk(
        "one_scale",
        lambda where, spec, s: WHOLE in s.block and _four_bits(s),
        "one scale for a whole tensor or row: a single outlier sends most 4-bit elements to zero",
        "2505.19115", COMPARE, serious=True,
    ),
    OperandRisk(
        "masked_gradient",
        lambda where, spec, s: s.masked,
        "what saturates gets no gradient",
        "2502.05003; 2505.14669", COMPARE,
    ),
    OperandRisk(
        "twice",
        lambda where, spec, s: spec.requantize,
        "quantized twice: the error of Fprop's operand and that of the backward pass add up",
        "2601.22813", AUDIT,
    ),
    OperandRisk(
        "chosen_channels",
        lambda where, spec, s: spec.split is not None and spec.split.part == "channels",
        "hot channels are chosen, gathered and multiplied apart: the FLOPs told here leave that out",
        "2510.27527", COMPARE,
    ),
)  # fmt: skip


def _of_operands(recipe: Recipe) -> Iterator[Risk]:
    operands = [
        (f"{gemm}.{name}", spec)
        for gemm, pair in recipe.gemms().items()
        for name, spec in pair.operands.items()
        if spec.format != BF16
    ]
    for risk in OPERAND_RISKS:
        found = [where for where, spec in operands if risk.holds(where, spec, spec.scheme)]
        if found:
            yield Risk(risk.key, ", ".join(found), risk.text, risk.source, risk.verify, risk.serious)


def _of_recipe(recipe: Recipe) -> Iterator[Risk]:
    fprop, dgrad = recipe.fprop.weight, recipe.dgrad.weight
    if not recipe.weight_match and BF16 not in (fprop.format, dgrad.format):
        text = "Dgrad differentiates another weight than Fprop used"
        if dgrad.requantize:
            text += ": Fprop's, quantized once more"
        elif fprop.scheme.block[0] != fprop.scheme.block[1]:
            text += ": 1-D blocks, along K in one and along N in the other"
        serious = _four_bits(fprop.scheme) and not dgrad.requantize
        yield Risk("other_weight", "dgrad.weight", text, "2509.25149, section 4.3", AUDIT, serious)
    for start in recipe.starts:
        gemms = recipe.gemms(start)
        if gemms["fprop"].quantized != gemms["dgrad"].quantized:
            when = f"from {start:g} of training on " if start else ""
            which = "Fprop" if gemms["fprop"].quantized else "Dgrad"
            text = f"{when}only {which} reads a quantized weight: the gradient is another function's, by design"
            yield Risk("one_sided", "fprop, dgrad", text, "2509.25149, appendix D; 2502.20586", AUDIT)
            break
    forward = [spec for spec in recipe.fprop.operands.values() if spec.format != BF16]
    if recipe.keep_bf16.blocks is None and any(_four_bits(spec.scheme) for spec in forward):
        text = "no block stays in BF16: 4-bit models of 1.2B and 12B diverged without some at the end"
        yield Risk("no_block_kept", "keep_bf16", text, "2509.25149, section 4.1 and appendix E.2", COMPARE)
    if any(phase.when is not None for phase in recipe.schedule):
        text = "a phase waits for a measured condition: in a loop of your own, give set_progress the measurement"
        yield Risk("measured_switch", "schedule", text, "2505.19115", COMPARE)
    if recipe.oscillation_reset is not None:
        text = "weights are overwritten by their quantized values: in a loop of your own, call after_optimizer_step"
        yield Risk("moves_weights", "oscillation_reset", text, "2510.27527", COMPARE)
    if recipe.emulation_only:
        text = "no hardware multiplies these operands: this tells what the numbers do, not what they would cost"
        yield Risk("no_hardware", "emulation_only", text, "PTX ISA", COMPARE)
