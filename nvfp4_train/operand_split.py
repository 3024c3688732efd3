"""The split of an operand: a part that is not quantized like the rest."""

from typing import Any

from pydantic import Field, ValidationInfo, field_validator

from nvfp4_kernels.scheme import Split
from nvfp4_train.operand_format import BF16, FormatSpec, missing_keys
from nvfp4_train.recipe_errors import Fault, RecipeError, Strict, one_of

PARTS = ("mean", "channels")


class SplitSpec(Strict):
    """A part of an operand that is not quantized like the rest; one mechanism, by ``part``.

    ``mean``: the mean over the tokens, one row vector, stays in float32 (Averis, arXiv:2603.10444).
    ``channels``: the ``fraction`` of the features with the largest L2 norm, in a format of their own, spelled out as an
    operand's (TetraJet-v2, arXiv:2510.27527). ``observe``: [first, last], steps whose norms, summed, choose the
    channels for the rest of training; without it they are chosen at each call.
    """

    part: str
    fraction: float | None = Field(None, validate_default=True)
    observe: tuple[int, int] | None = None
    spec: FormatSpec | None = None

    @field_validator("part", mode="before")
    @classmethod
    def _part(cls, value: Any) -> str:
        return one_of(value, PARTS, "a part of an operand")

    @field_validator("fraction", mode="before")
    @classmethod
    def _fraction(cls, value: Any, info: ValidationInfo) -> float | None:
        part = info.data.get("part")
        if value is None:
            if part == "channels":
                raise ValueError("missing: which fraction of the channels, such as 0.1")
            return None
        if part == "mean":
            raise ValueError("has no effect on part: mean")
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1:
            raise ValueError(f"expected a fraction above 0 and below 1, such as 0.1, got {value!r}")
        return float(value)

    @field_validator("observe", mode="before")
    @classmethod
    def _observe(cls, value: Any, info: ValidationInfo) -> tuple[int, int] | None:
        if value is None:
            return None
        if info.data.get("part") == "mean":
            raise ValueError("has no effect on part: mean")
        whole = isinstance(value, list | tuple) and len(value) == 2
        if (
            not whole
            or any(isinstance(v, bool) or not isinstance(v, int) for v in value)
            or not 0 <= value[0] <= value[1]
        ):
            raise ValueError(f"expected the first and the last step, such as [501, 550], got {value!r}")
        return tuple(value)

    @classmethod
    def of(cls, value: Any, example: str) -> "SplitSpec":
        """``value``, or built from a mapping whose other keys are those of a ``FormatSpec``."""
        if not isinstance(value, dict):
            return super().of(value, example)
        own = {key: item for key, item in value.items() if key in cls.model_fields and key != "spec"}
        others = {key: item for key, item in value.items() if key not in own}
        faults = []
        if own.get("part") == "channels":
            others, faults = _spelled_out(others)
        elif own.get("part") == "mean":
            told = {key: "has no effect on part: mean" for key in others if key in FormatSpec.model_fields}
            faults = [Fault((key,), message) for key, message in told.items()]
            others = {key: item for key, item in others.items() if key not in told}
        try:
            spec = cls(**own, **others)
        except RecipeError as error:
            faults += error.faults
        if faults:
            raise RecipeError(cls.__name__, faults)
        return spec

    @property
    def format(self) -> str | None:
        """The format of the channels apart."""
        return None if self.spec is None else self.spec.format

    @property
    def split(self) -> Split:
        if self.part == "mean":
            return Split("mean")
        return Split("channels", self.fraction, self.observe, self.spec.scheme)

    def to_dict(self) -> dict[str, Any]:
        fields = {"part": self.part, "fraction": self.fraction, "observe": self.observe and list(self.observe)}
        fields |= {} if self.spec is None else self.spec.to_dict()
        return {key: value for key, value in fields.items() if value is not None}


def _spelled_out(keys: dict[Any, Any]) -> tuple[dict[Any, Any], list[Fault]]:
    """The keys of the channels' format as ``{"spec": FormatSpec}``, and their faults; unknown keys are left."""
    own = {key: item for key, item in keys.items() if key in FormatSpec.model_fields}
    rest = {key: item for key, item in keys.items() if key not in own}
    faults = missing_keys(own)
    try:
        spec = FormatSpec(**own)
        if spec.format == BF16:
            faults.append(Fault(("format",), "bf16 is not quantized: the channels apart need a format of their own"))
        elif spec.rounding == "stochastic_scale" or spec.scale_rule == "delayed":
            key = "scale_rule" if spec.scale_rule == "delayed" else "rounding"
            faults.append(Fault((key,), f"{getattr(spec, key)} cannot be used for channels apart"))
        return rest | {"spec": spec}, faults
    except RecipeError as error:
        return rest, faults + error.faults
