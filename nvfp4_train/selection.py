"""What a recipe keeps in BF16 (modules by glob, blocks by place) and which weights it resets; the schema only."""

import math
from fractions import Fraction
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator

from nvfp4_train.recipe_errors import Fault, RecipeError, Strict


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"expected a number of blocks (0, 1, 2, ...), got {value!r}")
    return value


class Blocks(Strict):
    """The first and last blocks of the model, by number or as a fraction of all (rounded up)."""

    first: Annotated[int, BeforeValidator(_count)] = 0
    last: Annotated[int, BeforeValidator(_count)] = 0
    last_fraction: float | None = None

    @field_validator("last_fraction", mode="before")
    @classmethod
    def _fraction(cls, value: Any, info: ValidationInfo) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1:
            raise ValueError(f"expected a fraction above 0 and below 1, such as 0.15, got {value!r}")
        if info.data.get("last"):
            raise ValueError(f"contradicts last: {info.data['last']}; give one of them")
        return float(value)

    def kept(self, count: int) -> tuple[int, int]:
        """(how many of ``count`` blocks are kept at the start, how many at the end)."""
        if self.last_fraction is None:
            return self.first, self.last
        # exact: 0.07 of 100 blocks is 7, not the 8 that rounding up a float product gives
        return self.first, math.ceil(Fraction(str(self.last_fraction)) * count)

    def __str__(self) -> str:
        return ", ".join(f"{key}: {value}" for key, value in self.to_dict().items())

    def to_dict(self) -> dict[str, Any]:
        return {key: value for key, value in self if value}


def _globs(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        raise ValueError(f"expected a list of globs over module names: write [{value!r}]")
    if not isinstance(value, list | tuple):
        raise ValueError(f"expected a list of globs over module names, got {value!r}")
    faults = []
    for index, glob in enumerate(value):
        if not isinstance(glob, str) or not glob.strip():
            faults.append(Fault((index,), f"expected a glob over module names, such as 'lm_head', got {glob!r}"))
        elif glob in value[:index]:
            faults.append(Fault((index,), f"{glob!r} stands twice"))
    if faults:
        raise RecipeError("globs", faults)
    return tuple(value)


Globs = Annotated[tuple[str, ...], BeforeValidator(_globs)]


class KeepBF16(Strict):
    """``modules``: globs over qualified names; each must match a module. ``if_present``: globs that may match nothing
    (output heads go by many names). A glob keeps the module it matches and all inside it; ``*`` matches dots too.
    ``blocks``: see ``Blocks``."""

    modules: Globs = ()
    if_present: Globs = ()
    blocks: Blocks | None = None

    @field_validator("blocks", mode="before")
    @classmethod
    def _blocks(cls, value: Any) -> Blocks:
        blocks = Blocks.of(value, "{first: 2, last: 8} or {last_fraction: 0.15}")
        if not blocks.to_dict():
            raise ValueError("keeps no block: give first, last or last_fraction, or leave blocks out")
        return blocks

    @field_validator("if_present")
    @classmethod
    def _once(cls, value: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        twice = [glob for glob in value if glob in info.data.get("modules", ())]
        if twice:
            raise ValueError(f"{twice[0]!r} stands in modules already, where it must match")
        return value

    def to_dict(self) -> dict[str, Any]:
        parts = {"modules": list(self.modules), "if_present": list(self.if_present)}
        parts["blocks"] = self.blocks.to_dict() if self.blocks else None
        return {key: value for key, value in parts.items() if value}


class OscillationReset(Strict):
    """OsciReset (TetraJet-v2, arXiv:2510.27527): weights that flip between two quantized values are set to one of them.

    From the fraction ``from`` of training on, in the first ``window`` steps of every ``every`` steps the moves of
    each weight and of its quantized value are summed; where the sum of the latter is at least ``ratio`` times the
    former, the weight becomes its quantized value. oscillation.py applies it.
    """

    start: float = Field(0.0, alias="from")
    every: int
    window: int
    ratio: float

    @field_validator("start", mode="before")
    @classmethod
    def _start(cls, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
            raise ValueError(f"expected a fraction of training from 0 to below 1, such as 0.63, got {value!r}")
        return float(value)

    @field_validator("every", "window", mode="before")
    @classmethod
    def _steps(cls, value: Any, info: ValidationInfo) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"expected a number of steps, such as 50, got {value!r}")
        if info.field_name == "window" and value > info.data.get("every", value):
            raise ValueError(f"is longer than every: {info.data['every']}")
        return value

    @field_validator("ratio", mode="before")
    @classmethod
    def _ratio(cls, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise ValueError(f"expected a ratio above 0, such as 8, got {value!r}")
        return float(value)

    def to_dict(self) -> dict[str, Any]:
        return {"from": self.start, "every": self.every, "window": self.window, "ratio": self.ratio}
