"""Operands and GEMMs of a recipe: the schema, and what cannot be combined.

The classes here are the YAML schema and the Python API at once (``OperandSpec``). What cannot be is refused when it is
written down, all faults at once, each with its key path and its reason.
"""

from functools import partial
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator

from nvfp4_kernels.scheme import Scheme
from nvfp4_train.formats import FORMATS
from nvfp4_train.recipe_errors import Fault, RecipeError, Strict, listed, nearest, one_of

ROUNDINGS = ("nearest", "stochastic", "stochastic8")
HADAMARD_SIZES = (0, 16)
BF16 = "bf16"


class OperandSpec(Strict):
    """How one operand of a GEMM is quantized.

    ``format``: a name of ``formats.FORMATS``. ``block``: rows x columns that share a scale, columns along the
    reduction dimension (default: the format's own). ``rounding``: ``nearest`` (default), ``stochastic`` (16-bit draws)
    or ``stochastic8`` (8-bit draws, as the Blackwell instruction makes them). ``hadamard``: 0 or the size of the signed
    Hadamard transform along the reduction dimension that comes first. ``scale_rule``: how the block scale follows from
    the block's amax, where the format knows several (``mxfp4``: ``floor`` or ``ceil``).

    Raises RecipeError (a ValueError) for anything else.
    """

    format: str = Field("nvfp4", validate_default=True)
    block: str | None = Field(None, validate_default=True)
    rounding: str | None = Field(None, validate_default=True)
    hadamard: int = 0
    scale_rule: str | None = Field(None, validate_default=True)

    @field_validator("format", mode="before")
    @classmethod
    def _format(cls, value: Any) -> str:
        return one_of(value, FORMATS, "a format")

    @field_validator("block", mode="before")
    @classmethod
    def _block(cls, value: Any, info: ValidationInfo) -> str | None:
        return _choice(value, info, lambda format_: format_.blocks, "block")

    @field_validator("rounding", mode="before")
    @classmethod
    def _rounding(cls, value: Any, info: ValidationInfo) -> str | None:
        return _choice(value, info, lambda format_: ROUNDINGS if format_.blocks else (), "rounding")

    @field_validator("hadamard", mode="before")
    @classmethod
    def _hadamard(cls, value: Any, info: ValidationInfo) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value not in HADAMARD_SIZES:
            raise ValueError(f"{value!r} is not a Hadamard size: expected {listed(HADAMARD_SIZES)}")
        if value and info.data.get("format") == BF16:
            raise ValueError("contradicts format: bf16, which is not quantized")
        rows, _, columns = (info.data.get("block") or "").partition("x")
        if value and rows not in ("", "1"):
            raise ValueError(
                f"cannot go with block: {rows}x{columns}: square blocks are there so that one quantized tensor serves "
                "both orientations, and a transform along one dimension undoes that; use 1-D blocks"
            )
        return value

    @field_validator("scale_rule", mode="before")
    @classmethod
    def _scale_rule(cls, value: Any, info: ValidationInfo) -> str | None:
        return _choice(value, info, lambda format_: format_.rules, "scale rule")

    @property
    def scheme(self) -> Scheme | None:
        """What the kernels are told; None for ``bf16``."""
        if self.format == BF16:
            return None
        format_ = FORMATS[self.format]
        rows, columns = map(int, self.block.split("x"))
        return Scheme(format_.element, format_.scale, self.scale_rule, (rows, columns), self.rounding, self.hadamard)

    @property
    def text(self) -> str:
        """``str(scheme)`` or ``bf16``."""
        return BF16 if self.format == BF16 else str(self.scheme)

    def to_dict(self) -> dict[str, Any]:
        fields = {"format": self.format, "block": self.block, "rounding": self.rounding}
        if self.hadamard:
            fields["hadamard"] = self.hadamard
        if len(FORMATS[self.format].rules) > 1:
            fields["scale_rule"] = self.scale_rule
        return {key: value for key, value in fields.items() if value is not None}


def _choice(value: Any, info: ValidationInfo, choices_of: Any, what: str) -> str | None:
    """``value``, or the format's first choice for None; refused where the format has no such thing."""
    name = info.data.get("format")
    if name is None:  # the format itself is a fault; this key may have one too
        known = dict.fromkeys(choice for format_ in FORMATS.values() for choice in choices_of(format_))
        return None if value is None else one_of(value, known, f"a {what}")
    choices = choices_of(FORMATS[name])
    if value is None:
        return choices[0] if choices else None
    if not choices:
        raise ValueError(f"{value!r} contradicts format: {name}, which has no {what}")
    return one_of(value, choices, f"a {what} of {name}")


def _operand(value: Any) -> OperandSpec:
    """An operand inside a recipe: nothing may be left to a default."""
    if isinstance(value, OperandSpec):
        return value
    example = "{format: nvfp4, block: 1x16, rounding: nearest}"
    if value == BF16:
        raise ValueError(f"a GEMM is bf16 as a whole: write bf16 for the GEMM, or a mapping such as {example}")
    faults: list[Fault] = []
    spec = None
    try:
        spec = OperandSpec.of(value, example)
    except RecipeError as error:
        faults += error.faults
    meant = {nearest(key, OperandSpec.keys()) for key in value if key not in OperandSpec.keys()}
    format_ = FORMATS.get(str(value.get("format")))
    needed = ["format"]
    if format_ is None or format_.blocks:
        needed += ["block", "rounding"]
    if format_ is not None and len(format_.rules) > 1:
        needed.append("scale_rule")
    choices = {
        "format": tuple(FORMATS), "block": format_.blocks if format_ else (), "rounding": ROUNDINGS,
        "scale_rule": format_.rules if format_ else (),
    }  # fmt: skip
    for key in needed:
        if value.get(key) is None and key not in meant:
            expected = f"; expected {listed(choices[key])}" if choices[key] else ""
            faults.append(Fault((key,), f"missing: a recipe spells every operand out{expected}"))
    if faults:
        raise RecipeError("operand", faults)
    return spec


Operand = Annotated[OperandSpec, BeforeValidator(_operand)]


class GemmSpec(Strict):
    """The two operands of one GEMM."""

    @property
    def operands(self) -> dict[str, OperandSpec]:
        return {name: getattr(self, name) for name in type(self).model_fields}

    @property
    def quantized(self) -> bool:
        return any(spec.format != BF16 for spec in self.operands.values())

    def to_dict(self) -> dict[str, Any] | str:
        return {name: spec.to_dict() for name, spec in self.operands.items()} if self.quantized else BF16

    @classmethod
    def _paired(cls, spec: OperandSpec, info: ValidationInfo) -> OperandSpec:
        """Refuses a second operand that no GEMM could multiply with the first."""
        faults = []
        for name, other in info.data.items():
            if spec.format != other.format:
                faults.append(Fault(("format",), f"{spec.format}, but {name} is {other.format}: one matrix instruction "
                                    "reads both operands in one format"))  # fmt: skip
            if spec.hadamard != other.hadamard:
                faults.append(Fault(("hadamard",), f"{spec.hadamard}, but {name} has {other.hadamard}: the transform "
                                    "cancels only if both operands of the GEMM share it"))  # fmt: skip
        if faults:
            raise RecipeError("operand", faults)
        return spec


class FpropSpec(GemmSpec):
    """``y [M, N] = input [M, K] @ weight [N, K].T``"""

    input: Operand
    weight: Operand
    _pair = field_validator("weight")(GemmSpec._paired.__func__)


class DgradSpec(GemmSpec):
    """``dx [M, K] = grad_output [M, N] @ (weight.T [K, N]).T``"""

    grad_output: Operand
    weight: Operand
    _pair = field_validator("weight")(GemmSpec._paired.__func__)


class WgradSpec(GemmSpec):
    """``dw [N, K] = grad_output.T [N, M] @ (input.T [K, M]).T``"""

    grad_output: Operand
    input: Operand
    _pair = field_validator("input")(GemmSpec._paired.__func__)


def _gemm(model: type[GemmSpec], value: Any) -> GemmSpec:
    names = list(model.model_fields)
    if isinstance(value, str):
        one_of(value, [BF16], f"a GEMM (a mapping with {' and '.join(names)}, or bf16)")
        return model(**{name: OperandSpec(format=BF16) for name in names})
    return model.of(value, "{" + ", ".join(f"{name}: {{...}}" for name in names) + "}, or bf16")


Fprop = Annotated[FpropSpec, BeforeValidator(partial(_gemm, FpropSpec))]
Dgrad = Annotated[DgradSpec, BeforeValidator(partial(_gemm, DgradSpec))]
Wgrad = Annotated[WgradSpec, BeforeValidator(partial(_gemm, WgradSpec))]
