"""What the recipe asks for, read anew from its fields: not from the plan that the layers were given.

The audit compares what ran with this. It shares no code with ``Recipe.plan`` or ``convert``, so that a fault in there
is seen as a difference and not made twice.
"""

from __future__ import annotations

import math
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from torch import nn

from nvfp4_train.recipe import BF16, Recipe
from nvfp4_train.survey import ConversionError, Survey

TICKS = 10**6  # a training of this many steps where the caller names none: fractions to six digits
GEMMS = ("fprop", "dgrad", "wgrad")


class Point(NamedTuple):
    """A moment of training: its step, and how many phases that wait for a measurement have begun (in their order)."""

    step: int
    total: int
    reached: int = 0

    @property
    def progress(self) -> float:
        return self.step / self.total

    def __str__(self) -> str:
        measured = ", after the measurement it waits for" if self.reached else ""
        return f"at step {self.step} of {self.total}{measured}"


def begun(recipe: Recipe, at: Point) -> list[Any]:
    """The phases of the schedule that have begun, in their order."""
    waiting = [phase for phase in recipe.schedule if phase.start is None and phase.from_step is None]
    return [
        phase
        for phase in recipe.schedule
        if (phase.start is not None and at.step / at.total >= phase.start)
        or (phase.from_step is not None and at.step >= phase.from_step)
        or phase in waiting[: at.reached]
    ]


def texts_at(recipe: Recipe, at: Point) -> dict[str, str]:
    """operand name (``fprop.input``) -> the scheme's text or ``bf16``."""
    now = {gemm: getattr(recipe, gemm) for gemm in GEMMS}
    for phase in begun(recipe, at):
        now |= {gemm: getattr(phase, gemm) for gemm in GEMMS if getattr(phase, gemm) is not None}
    return {
        f"{gemm}.{operand}": BF16 if spec.scheme is None else str(spec.scheme)
        for gemm, spec_of in now.items()
        for operand in type(spec_of).model_fields
        for spec in [getattr(spec_of, operand)]
    }


def weights_match_at(recipe: Recipe, at: Point) -> bool:
    """Whether Dgrad must use the very weight that Fprop used: declared, and both GEMMs quantized at that time."""
    texts = texts_at(recipe, at)
    return recipe.weight_match and BF16 not in (texts["fprop.weight"], texts["dgrad.weight"])


def points(recipe: Recipe, total: int) -> list[tuple[Point, float]]:
    """(its first moment, the fraction of training it takes) of each phase of the schedule, the start of training first.

    Phases that wait for a measurement come last and take no known share: weight 0.
    """
    steps = {0}
    for phase in recipe.schedule:
        if phase.start is not None:
            near = math.floor(phase.start * total)  # a product of floats may lie on either side
            steps.add(next(step for step in range(max(near - 1, 0), near + 2) if step / total >= phase.start))
        elif phase.from_step is not None and phase.from_step < total:
            steps.add(phase.from_step)
    ordered = sorted(steps)
    found = [
        (Point(step, total), (end - step) / total)
        for step, end in zip(ordered, [*ordered[1:], total], strict=True)
    ]
    waiting = sum(phase.start is None and phase.from_step is None for phase in recipe.schedule)
    return found + [(Point(ordered[-1], total, number + 1), 0.0) for number in range(waiting)]


def kept(model: nn.Module, recipe: Recipe) -> dict[nn.Module, str]:
    """The modules that ``keep_bf16`` keeps, with the words of the recipe that keep them."""
    keep = recipe.keep_bf16
    found: dict[nn.Module, str] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        for glob in (*keep.modules, *keep.if_present):
            if name and fnmatchcase(name, glob):
                for inner in module.modules():
                    found.setdefault(inner, f"keep_bf16: {glob!r}")
    if keep.blocks is not None:
        try:
            stack, blocks = Survey(model).blocks()
        except ConversionError:
            return found
        first, last = keep.blocks.kept(len(blocks))
        for index, block in enumerate(blocks):
            if index < first or index >= len(blocks) - last:
                for inner in block.modules():
                    found.setdefault(inner, f"keep_bf16.blocks ({keep.blocks}): block {index} of {stack}")
    return found
