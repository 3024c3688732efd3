"""OperandSpec: how one operand of a GEMM is quantized; the YAML schema and the Python API at once.

What cannot be is refused when it is written down, all faults at once, each with its key path and its reason. What two
operands cannot do together stands in operands.py.
"""

from typing import Any

from pydantic import Field, ValidationInfo, field_validator

from nvfp4_kernels.scheme import E4M3_LARGEST, PER_STEP, SELECTIONS, Scheme, sign_mask
from nvfp4_train.operand_format import (
    BF16,
    FormatSpec,
    element_of,
    missing_keys,
    needs_rule,
    number,
    only_quantized,
    sizes,
)  # fmt: skip
from nvfp4_train.operand_split import SplitSpec
from nvfp4_train.recipe_errors import Fault, RecipeError, listed, nearest, one_of

HADAMARD_SIZES = (0, 4, 16, 32, 64, 128)
SIGNS = ("fixed", PER_STEP, "none")
LARGEST_HEADROOM = 16.0


class OperandSpec(FormatSpec):
    """How one operand of a GEMM is quantized.

    ``format``: a name of ``formats.FORMATS``, or ``custom`` with ``element`` and ``scale``. ``block``: rows x columns
    that share a scale, columns along the reduction dimension; ``channel`` is one scale for a row, ``tensor`` one for
    all.
    ``rounding``: ``nearest`` (default), ``stochastic`` (16-bit draws), ``stochastic8`` (8-bit draws, as the Blackwell
    instruction makes them) or ``stochastic_scale`` (MS-EDEN: nearest elements, the corrected block scale is drawn).

    ``hadamard``: 0 or the size of the signed Hadamard transform along the reduction dimension that comes first;
    ``signs``: ``fixed`` (default), ``step`` (drawn at each call), ``none`` or a number whose bits are the mask.
    ``scale_rule``: how the block scale follows from the block's amax (``Scheme`` and ``reference/scales.py``);
    ``outer``: rule ``nvfp4``'s float32 scale for each such block in place of the tensor; ``scale_range``: the largest
    block scale that rule aims at; ``headroom``: amax is mapped to the largest element divided by it;
    ``four_over_six``: the error by which 4 or 6 is chosen as a block's top; ``clip``: so many standard deviations of
    the block stand in for its amax.

    ``mask_clipped``: elements that saturate get no gradient. ``history``: steps whose amax decides rule ``delayed``.
    ``requantize``: made from Fprop's quantized operand. ``split``: a part that is not quantized like the rest.

    Raises RecipeError (a ValueError) for anything else.
    """

    hadamard: int = 0
    signs: str | int = Field("fixed", validate_default=True)
    outer: str | None = None
    scale_range: float = E4M3_LARGEST
    headroom: float = 1.0
    four_over_six: str | None = None
    clip: float = 0.0
    mask_clipped: bool = False
    history: int | None = Field(None, validate_default=True)
    requantize: bool = False
    split: SplitSpec | None = None

    @field_validator("hadamard", mode="before")
    @classmethod
    def _hadamard(cls, value: Any, info: ValidationInfo) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value not in HADAMARD_SIZES:
            raise ValueError(f"{value!r} is not a Hadamard size: expected {listed(HADAMARD_SIZES)}")
        if value and info.data.get("format") == BF16:
            raise ValueError("contradicts format: bf16, which is not quantized")
        rows, columns = sizes(info.data.get("block"))
        if value and rows not in (None, 1):
            raise ValueError(
                f"cannot go with block: {info.data['block']}: square blocks are there so that one quantized tensor "
                "serves both orientations, and a transform along one dimension undoes that; use 1-D blocks"
            )
        return value

    @field_validator("signs", mode="before")
    @classmethod
    def _signs(cls, value: Any, info: ValidationInfo) -> str | int:
        size = info.data.get("hadamard", 0)
        if isinstance(value, int) and not isinstance(value, bool):
            if size and not 0 <= value < 1 << size:
                raise ValueError(f"{value:#x} has more bits than the {size} signs of the transform")
        else:
            one_of(value, SIGNS, "a choice of signs, nor a number whose bits are a mask")
        if value != "fixed" and "hadamard" in info.data and not size:
            raise ValueError("has no effect without hadamard: there is no transform whose signs these could be")
        return value

    @field_validator("outer", mode="before")
    @classmethod
    def _outer(cls, value: Any, info: ValidationInfo) -> str | None:
        if value is None:
            return None
        rows, columns = sizes(value) if isinstance(value, str) else (None, None)
        if rows != 1 or not columns or columns & (columns - 1):
            raise ValueError(f"{value!r} is not an outer block: expected 1x32, 1x64, 1x128, ... (a power of two)")
        needs_rule(info, "nvfp4", "its float32 scale is the one that outer blocks replace")
        inner_rows, inner = sizes(info.data.get("block"))
        if inner_rows is not None and (inner_rows != 1 or not inner or columns <= inner):
            raise ValueError(f"must hold several blocks of one row, and block is {info.data['block']}")
        return value

    @field_validator("scale_range", mode="before")
    @classmethod
    def _scale_range(cls, value: Any, info: ValidationInfo) -> float:
        value = number(value, "the largest block scale, such as 256", E4M3_LARGEST)
        if value != E4M3_LARGEST:
            needs_rule(info, "nvfp4", "no other rule aims at a largest scale")
        return value

    @field_validator("headroom", mode="before")
    @classmethod
    def _headroom(cls, value: Any, info: ValidationInfo) -> float:
        value = number(value, "a factor such as 4/3 or 1.0625", LARGEST_HEADROOM)
        only_quantized(info, value != 1.0)
        return value

    @field_validator("four_over_six", mode="before")
    @classmethod
    def _four_over_six(cls, value: Any, info: ValidationInfo) -> str | None:
        if value is None:
            return None
        one_of(value, SELECTIONS, "an error that can choose between 4 and 6")
        needs_rule(info, "nvfp4", "a power of two cannot be made 1.5 times as large")
        if element_of(info) not in (None, "e2m1"):
            raise ValueError("chooses between E2M1's 4 and 6: it needs that element")
        if info.data.get("scale_range", 0) * 1.5 > E4M3_LARGEST:
            raise ValueError(
                "needs a scale_range of at most 298, such as 256: 4 as the top takes a scale 1.5 times as large, and "
                "E4M3 ends at 448"
            )
        if info.data.get("headroom", 1.0) != 1.0:
            raise ValueError("contradicts headroom: the two tops are 6 and 4 exactly")
        return value

    @field_validator("clip", mode="before")
    @classmethod
    def _clip(cls, value: Any, info: ValidationInfo) -> float:
        if value in (0, None) and not isinstance(value, bool):
            return 0.0
        value = number(value, "a number of standard deviations, such as 2.92", 1e3)
        only_quantized(info, True)
        rows, _ = sizes(info.data.get("block"))
        if rows not in (None, 1):
            raise ValueError(f"takes the standard deviation of a row's block, and block is {info.data['block']}")
        if info.data.get("scale_rule") == "delayed":
            raise ValueError("contradicts scale_rule: delayed, whose amax comes from the steps before")
        if info.data.get("four_over_six"):
            raise ValueError("contradicts four_over_six, which maps the block's amax to 4 or 6")
        return value

    @field_validator("mask_clipped", "requantize", mode="before")
    @classmethod
    def _flag(cls, value: Any, info: ValidationInfo) -> bool:
        if not isinstance(value, bool):
            raise ValueError(f"expected true or false, got {value!r}")
        only_quantized(info, value)
        return value

    @field_validator("history", mode="before")
    @classmethod
    def _history(cls, value: Any, info: ValidationInfo) -> int | None:
        rule = info.data.get("scale_rule")
        if value is None:
            if rule == "delayed":
                raise ValueError("missing: scale_rule: delayed needs the length of its history in steps, such as 16")
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 1 << 16:
            raise ValueError(f"expected a number of steps, such as 16, got {value!r}")
        if "scale_rule" in info.data and rule != "delayed":
            raise ValueError("has no effect without scale_rule: delayed")
        return value

    @field_validator("split", mode="before")
    @classmethod
    def _split(cls, value: Any, info: ValidationInfo) -> SplitSpec | None:
        if value is None:
            return None
        only_quantized(info, True)
        return SplitSpec.of(value, "{part: mean}")

    def __init__(self, /, **data: Any):
        super().__init__(**data)
        faults = list(self._late_faults())
        if faults:
            raise RecipeError(type(self).__name__, faults)

    def _late_faults(self):
        """What only the whole operand can tell."""
        if self.rounding == "stochastic_scale":
            if self.scale_rule != "nvfp4" or self.element_and_scale[0] != "e2m1":
                yield Fault(
                    ("rounding",), "stochastic_scale draws the E4M3 scale of NVFP4: it needs E2M1 and rule nvfp4"
                )
            elif self.block not in ("1x16", "1x32", "1x64", "1x128"):
                yield Fault(("rounding",), f"stochastic_scale corrects 1-D blocks, and block is {self.block}")
            elif not self.hadamard or self.signs != PER_STEP:
                yield Fault(("rounding",), "stochastic_scale is unbiased over random rotations only: give hadamard and "
                            "signs: step")  # fmt: skip
            elif self.four_over_six:
                yield Fault(("four_over_six",), "contradicts rounding: stochastic_scale, which draws the scale")
        rows, columns = sizes(self.block)
        if self.hadamard and columns and max(columns, self.hadamard) % min(columns, self.hadamard):
            yield Fault(("hadamard",), f"{self.hadamard} and block {self.block}: one must divide the other")
        if self.rounding == "stochastic_scale" and self.hadamard and columns and self.hadamard % columns:
            yield Fault(("hadamard",), f"a group of {self.hadamard} must hold whole blocks, and block is {self.block}")
        if self.split is not None and self.split.part == "mean" and self.requantize:
            yield Fault(("split",), "contradicts requantize: what Fprop quantized has no mean, or one that is lost")

    @property
    def scheme(self) -> Scheme | None:
        """What the kernels are told; None for ``bf16``."""
        if self.format == BF16:
            return None
        mask = {"fixed": sign_mask(self.hadamard or 16), "none": 0}.get(self.signs, self.signs)
        return Scheme(
            *self.element_and_scale, self.scale_rule, sizes(self.block), self.rounding, self.hadamard, mask,
            outer=None if self.outer is None else sizes(self.outer), range=self.scale_range, headroom=self.headroom,
            select=self.four_over_six or "", clip=self.clip, masked=self.mask_clipped, requantized=self.requantize,
            split=None if self.split is None else self.split.split, history=self.history or 0,
        )  # fmt: skip

    @property
    def text(self) -> str:
        """``str(scheme)`` or ``bf16``."""
        return BF16 if self.format == BF16 else str(self.scheme)

    def to_dict(self) -> dict[str, Any]:
        fields = super().to_dict()
        if self.hadamard:
            fields["hadamard"] = self.hadamard
        plain = type(self).model_fields
        for key in _OPTIONS:
            if getattr(self, key) != plain[key].default:
                fields[key] = getattr(self, key)
        return fields | ({} if self.split is None else {"split": self.split.to_dict()})


_OPTIONS = (
    "signs", "outer", "scale_range", "headroom", "four_over_six", "clip", "mask_clipped", "history", "requantize",
)  # fmt: skip


def spelled_out(value: Any) -> OperandSpec:
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
    faults += [fault for fault in missing_keys(value) if fault.path[0] not in meant]
    if faults:
        raise RecipeError("operand", faults)
    return spec
