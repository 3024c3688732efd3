"""Operands and GEMMs of a recipe: the schema of a GEMM, and what its two operands cannot do together.

The schema of one operand is ``OperandSpec`` (operand.py). Faults are told all at once, with key path and reason.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, ValidationInfo, field_validator

from nvfp4_train.hardware import Instruction, instruction
from nvfp4_train.operand import OperandSpec, spelled_out
from nvfp4_train.operand_format import BF16
from nvfp4_train.recipe_errors import Fault, RecipeError, Strict, one_of

__all__ = [
    "BF16", "Dgrad", "DgradSpec", "Fprop", "FpropSpec", "GemmSpec", "OperandSpec", "Wgrad", "WgradSpec",
    "across", "emulation_allowed", "gemm_of",
]  # fmt: skip

Operand = Annotated[OperandSpec, BeforeValidator(spelled_out)]
_emulation_only: ContextVar[bool] = ContextVar("emulation_only", default=False)


@contextmanager
def emulation_allowed(allowed: bool) -> Iterator[None]:
    """Within it a GEMM may be one that no hardware runs: a recipe says ``emulation_only`` beside its GEMMs, not in
    them."""
    token = _emulation_only.set(allowed)
    try:
        yield
    finally:
        _emulation_only.reset(token)


class GemmSpec(Strict):
    """The two operands of one GEMM."""

    _GEMM: ClassVar[str] = ""
    _MAY: ClassVar[dict[str, tuple[str, ...]]] = {}  # the options that depend on the place, by operand

    @property
    def operands(self) -> dict[str, OperandSpec]:
        return {name: getattr(self, name) for name in type(self).model_fields}

    @property
    def quantized(self) -> bool:
        return any(spec.format != BF16 for spec in self.operands.values())

    @property
    def hardware(self) -> Instruction | str:
        """The matrix instruction that multiplies the two operands, or why there is none."""
        return instruction(*(spec.scheme for spec in self.operands.values()))

    def to_dict(self) -> dict[str, Any] | str:
        return {name: spec.to_dict() for name, spec in self.operands.items()} if self.quantized else BF16

    @field_validator("*")
    @classmethod
    def _placed(cls, spec: OperandSpec, info: ValidationInfo) -> OperandSpec:
        """Refuses options that would have no effect on this operand."""
        may, operand = cls._MAY.get(info.field_name, ()), f"{cls._GEMM}.{info.field_name}"
        faults = []
        if spec.requantize and "requantize" not in may:
            faults.append(Fault(("requantize",), f"has no effect on {operand}: only dgrad.weight and wgrad.input can "
                                "be made from what Fprop quantized"))  # fmt: skip
        if spec.mask_clipped and "mask_clipped" not in may:
            faults.append(Fault(("mask_clipped",), f"has no effect on {operand}: only Fprop's operands get gradients"))
        if spec.split is not None and spec.split.part not in may:
            part = spec.split.part
            where = "fprop.input and wgrad.input"
            where = "fprop.input, dgrad.grad_output and wgrad's operands" if part == "mean" else where
            faults.append(Fault(("split",), f"part: {part} is possible on {where}, not on {operand}"))
        if faults:
            raise RecipeError("operand", faults)
        return spec

    @classmethod
    def _paired(cls, spec: OperandSpec, info: ValidationInfo) -> OperandSpec:
        """Refuses a second operand that no GEMM could multiply with the first."""
        faults = [fault for name, other in info.data.items() for fault in _pair_faults(spec, name, other)]
        if faults:
            raise RecipeError("operand", faults)
        return spec


def _pair_faults(spec: OperandSpec, name: str, other: OperandSpec) -> Iterator[Fault]:
    """``spec``: the second operand; ``other``: the first, called ``name``."""
    found = instruction(other.scheme, spec.scheme)
    if isinstance(found, str) and not _emulation_only.get():
        if spec.format != other.format:
            found = f"{spec.format}, but {name} is {other.format}: {found}"
        yield Fault(("format",), f"{found}; to emulate it all the same write emulation_only: true in the recipe")
    for key, mine, others in (("hadamard", spec.hadamard, other.hadamard), ("signs", spec.signs, other.signs)):
        if mine != others and (key == "hadamard" or spec.hadamard == other.hadamard):
            yield Fault((key,), f"{mine}, but {name} has {others}: the transform cancels only if both operands of the "
                        "GEMM share it")  # fmt: skip
    if spec.hadamard and spec.scheme.group != other.scheme.group:
        yield Fault(("block",), f"{spec.block}, but {name} has {other.block}: under a Hadamard transform both operands "
                    "are padded, and must be to the same length")  # fmt: skip


class FpropSpec(GemmSpec):
    """``y [M, N] = input [M, K] @ weight [N, K].T``"""

    _GEMM: ClassVar[str] = "fprop"
    _MAY: ClassVar = {"input": ("mask_clipped", "mean", "channels"), "weight": ("mask_clipped",)}
    input: Operand
    weight: Operand
    _pair = field_validator("weight")(GemmSpec._paired.__func__)


class DgradSpec(GemmSpec):
    """``dx [M, K] = grad_output [M, N] @ (weight.T [K, N]).T``"""

    _GEMM: ClassVar[str] = "dgrad"
    _MAY: ClassVar = {"grad_output": ("mean",), "weight": ("requantize",)}
    grad_output: Operand
    weight: Operand
    _pair = field_validator("weight")(GemmSpec._paired.__func__)


class WgradSpec(GemmSpec):
    """``dw [N, K] = grad_output.T [N, M] @ (input.T [K, M]).T``"""

    _GEMM: ClassVar[str] = "wgrad"
    _MAY: ClassVar = {"grad_output": ("mean",), "input": ("requantize", "mean", "channels")}
    grad_output: Operand
    input: Operand
    _pair = field_validator("input")(GemmSpec._paired.__func__)


def across(fprop: FpropSpec, dgrad: DgradSpec, wgrad: WgradSpec) -> Iterator[Fault]:
    """What the three GEMMs of a layer cannot do together, with key paths such as ``wgrad.input.requantize``."""
    for gemm, name, source in (("dgrad", "weight", fprop.weight), ("wgrad", "input", fprop.input)):
        operand = getattr({"dgrad": dgrad, "wgrad": wgrad}[gemm], name)
        path = (gemm, name, "requantize")
        if operand.requantize and source.format == BF16:
            yield Fault(path, f"fprop.{name} is bf16: there is no quantized operand to make it from")
        if operand.requantize and source.split is not None and source.split.part == "mean":
            yield Fault(path, "fprop.input is split: what is kept of it is its residual, without the mean")
    for gemm, first in (("fprop", fprop.input), ("dgrad", dgrad.grad_output)):
        if first.split is not None and first.hadamard:
            name = "input" if gemm == "fprop" else "grad_output"
            yield Fault((gemm, name, "split"), f"contradicts hadamard: {first.hadamard}: the part set apart is not "
                        "rotated, and the weight it is multiplied with would be")  # fmt: skip
    means = [operand.split is not None and operand.split.part == "mean" for operand in wgrad.operands.values()]
    if any(means) and not all(means):
        name = "grad_output" if not means[0] else "input"
        yield Fault(("wgrad", name, "split"), "missing: Wgrad's operands give up their means together, so that the "
                    "products of one's mean with the other's residual vanish")  # fmt: skip
    if fprop.input.split is not None:
        for name, operand in fprop.operands.items():
            if operand.mask_clipped:
                told = "contradicts fprop.input.split: each part has its own scales"
                yield Fault(("fprop", name, "mask_clipped"), told)


def _gemm(model: type[GemmSpec], value: Any) -> GemmSpec:
    names = list(model.model_fields)
    if isinstance(value, str):
        one_of(value, [BF16], f"a GEMM (a mapping with {' and '.join(names)}, or bf16)")
        return model(**{name: OperandSpec(format=BF16) for name in names})
    return model.of(value, "{" + ", ".join(f"{name}: {{...}}" for name in names) + "}, or bf16")


Fprop = Annotated[FpropSpec, BeforeValidator(partial(_gemm, FpropSpec))]
Dgrad = Annotated[DgradSpec, BeforeValidator(partial(_gemm, DgradSpec))]
Wgrad = Annotated[WgradSpec, BeforeValidator(partial(_gemm, WgradSpec))]

_MODELS = {"fprop": FpropSpec, "dgrad": DgradSpec, "wgrad": WgradSpec}


def gemm_of(name: str, value: Any) -> GemmSpec:
    """The GEMM called ``name`` from what stands in a recipe. ValueError (all faults) for what cannot be."""
    return _gemm(_MODELS[name], value)
