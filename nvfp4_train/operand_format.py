"""Format, block, rounding and scale rule of an operand: the part of its schema that says what the bits mean."""

import math
from fractions import Fraction
from typing import Any

from pydantic import Field, ValidationInfo, field_validator

from nvfp4_kernels.elements import ELEMENTS
from nvfp4_kernels.scheme import ROUNDINGS, RULES, SCALES, Scheme
from nvfp4_train.formats import BLOCKS, CUSTOM, FORMATS, NAMES
from nvfp4_train.recipe_errors import Fault, Strict, listed, one_of

BF16 = "bf16"


class FormatSpec(Strict):
    """What an operand and the channels set apart from it have in common: format, block, rounding and scale rule."""

    format: str = Field("nvfp4", validate_default=True)
    element: str | None = Field(None, validate_default=True)
    scale: str | None = Field(None, validate_default=True)
    block: str | None = Field(None, validate_default=True)
    rounding: str | None = Field(None, validate_default=True)
    scale_rule: str | None = Field(None, validate_default=True)

    @field_validator("format", mode="before")
    @classmethod
    def _format(cls, value: Any) -> str:
        return one_of(value, NAMES, "a format")

    @field_validator("element", "scale", mode="before")
    @classmethod
    def _part_of_custom(cls, value: Any, info: ValidationInfo) -> str | None:
        known = tuple(ELEMENTS) if info.field_name == "element" else SCALES
        format_ = info.data.get("format")
        if value is None:
            if format_ == CUSTOM:
                raise ValueError(f"missing: format: custom leaves it open; expected {listed(known)}")
            return None
        if format_ is not None and format_ != CUSTOM:
            raise ValueError(f"{format_} has its own {info.field_name}: leave it out, or write format: custom")
        return one_of(value, known, f"the name of {'an element' if info.field_name == 'element' else 'a scale type'}")

    @field_validator("block", mode="before")
    @classmethod
    def _block(cls, value: Any, info: ValidationInfo) -> str | None:
        return _choice(value, info, blocks_of, "block")

    @field_validator("rounding", mode="before")
    @classmethod
    def _rounding(cls, value: Any, info: ValidationInfo) -> str | None:
        return _choice(value, info, lambda format_: ROUNDINGS if blocks_of(format_) else (), "rounding")

    @field_validator("scale_rule", mode="before")
    @classmethod
    def _scale_rule(cls, value: Any, info: ValidationInfo) -> str | None:
        if info.data.get("format") == CUSTOM:
            scale = info.data.get("scale")
            rules = RULES[scale] if scale else tuple(dict.fromkeys(r for group in RULES.values() for r in group))
            if value is None:
                raise ValueError(f"missing: format: custom leaves it open; expected {listed(rules)}")
            one_of(value, rules, f"a scale rule for {scale} scales" if scale else "a scale rule")
        else:
            value = _choice(value, info, lambda format_: FORMATS[format_].rules, "scale rule")
        if value == "delayed" and info.data.get("block") not in (None, "tensor"):
            raise ValueError("delayed keeps a history of one amax a tensor: it needs block: tensor")
        return value

    @property
    def element_and_scale(self) -> tuple[str, str]:
        if self.format == CUSTOM:
            return self.element, self.scale
        return FORMATS[self.format].element, FORMATS[self.format].scale

    @property
    def scheme(self) -> Scheme | None:
        """What the kernels are told; None for ``bf16``."""
        if self.format == BF16:
            return None
        return Scheme(*self.element_and_scale, self.scale_rule, sizes(self.block), self.rounding)

    def to_dict(self) -> dict[str, Any]:
        keys = ["format", "element", "scale", "block", "rounding"]
        if self.format == CUSTOM or len(FORMATS[self.format].rules) > 1:
            keys.append("scale_rule")
        return {key: getattr(self, key) for key in keys if getattr(self, key) is not None}


def blocks_of(format_: str) -> tuple[str, ...]:
    return BLOCKS if format_ == CUSTOM else FORMATS[format_].blocks


def sizes(block: str | None) -> tuple[int | None, int | None]:
    """(rows, columns) of a block, 0 for the whole dimension; (None, None) where there is none."""
    named = {"tensor": (0, 0), "channel": (1, 0)}
    if block in named:
        return named[block]
    rows, _, columns = (block or "").partition("x")
    return (int(rows), int(columns)) if rows.isdigit() and columns.isdigit() else (None, None)


def element_of(info: ValidationInfo) -> str | None:
    format_ = info.data.get("format")
    if format_ in (None, CUSTOM):
        return info.data.get("element")
    return FORMATS[format_].element


def needs_rule(info: ValidationInfo, rule: str, reason: str) -> None:
    if "scale_rule" in info.data and info.data["scale_rule"] != rule:
        raise ValueError(f"needs scale rule {rule}: {reason}")


def only_quantized(info: ValidationInfo, given: bool) -> None:
    if given and info.data.get("format") == BF16:
        raise ValueError("contradicts format: bf16, which is not quantized")


def number(value: Any, what: str, largest: float) -> float:
    """A positive number, or a fraction as text."""
    if isinstance(value, str):
        try:
            value = float(Fraction(value))
        except (ValueError, ZeroDivisionError):
            raise ValueError(f"expected {what}, got {value!r}") from None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= largest or math.isnan(value):
        raise ValueError(f"expected {what}, above 0 and at most {largest:g}, got {value!r}")
    return float(value)


def _choice(value: Any, info: ValidationInfo, choices_of: Any, what: str) -> str | None:
    """``value``, or the format's first choice for None; refused where the format has no such thing."""
    name = info.data.get("format")
    if name is None:  # the format itself is a fault; this key may have one too
        known = dict.fromkeys(choice for format_ in FORMATS for choice in choices_of(format_))
        return None if value is None else one_of(value, known, f"a {what}")
    choices = choices_of(name)
    if value is None:
        return choices[0] if choices else None
    if not choices:
        raise ValueError(f"{value!r} contradicts format: {name}, which has no {what}")
    return one_of(value, choices, f"a {what} of {name}")


def missing_keys(value: dict[Any, Any]) -> list[Fault]:
    """Faults of a mapping that leaves format, block, rounding or a choice of scale rules to a default."""
    name = value.get("format") if value.get("format") in NAMES else None
    blocks = blocks_of(name) if name else ()
    rules = FORMATS[name].rules if name in FORMATS else ()
    needed = {"format": NAMES}
    if name is None or blocks:
        needed |= {"block": blocks, "rounding": ROUNDINGS}
    if len(rules) > 1:
        needed["scale_rule"] = rules
    faults = []
    for key, choices in needed.items():
        if value.get(key) is None:
            expected = f"; expected {listed(choices)}" if choices else ""
            faults.append(Fault((key,), f"missing: a recipe spells every operand out{expected}"))
    return faults
