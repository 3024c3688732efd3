"""Number formats as data: element, block, scale, range, bits per value.

A format says what the bits mean. What a recipe may choose about it (which block shape, which scale rule) is listed
here too, so that the recipe schema, the ledger and the explanations all read the same table. ``custom`` leaves
everything open: any element under any scale.

Sources: NVFP4 - arXiv:2509.25149; MX formats - OCP Microscaling Formats (MX) specification v1.0; rule ``ceil`` as
DeepSeek publishes its FP4 weights and indexer, rule ``up`` - arXiv:2506.08027; FP8 with float32 scales -
arXiv:2209.05433 (a tensor), arXiv:2412.19437 (1x128 and 128x128).
"""

from dataclasses import dataclass

from nvfp4_kernels.elements import ELEMENTS
from nvfp4_kernels.scheme import RULES

CUSTOM = "custom"
BLOCKS = (
    "1x16", "1x32", "1x64", "1x128", "16x16", "32x32", "128x128", "channel", "tensor",
)  # fmt: skip
SCALE_BITS = {"e4m3": 8, "e8m0": 8, "float32": 32}
LARGEST_SCALE = {"e4m3": 448.0, "e8m0": 2.0**127, "float32": float.fromhex("0x1.fffffep127")}


@dataclass(frozen=True)
class Format:
    """One number format.

    ``blocks`` and ``rules`` list what may be chosen, the default first; both are empty for a format without block
    scales. ``block_size``: elements that share one scale where the hardware reads it (16x16 is expanded to 1x16
    there); 0 where it depends on the block chosen. ``native_instruction`` is the PTX MMA kind that multiplies two
    operands of this format in its default block, on the architectures in ``native_on``; elsewhere the product is
    emulated. Which GEMM runs natively is told by ``hardware.instruction``.
    """

    name: str
    element: str  # a name of ELEMENTS | bf16
    scale: str | None  # e4m3 | e8m0 | float32
    block_size: int
    blocks: tuple[str, ...]
    rules: tuple[str, ...]
    native_instruction: str
    native_on: tuple[str, ...]

    @property
    def element_bits(self) -> int:
        return 16 if self.element == "bf16" else ELEMENTS[self.element].bits

    @property
    def largest_element(self) -> float:
        return float.fromhex("0x1.fep127") if self.element == "bf16" else ELEMENTS[self.element].largest

    @property
    def smallest_element(self) -> float:
        """The least positive element (subnormals included), without any scale."""
        return 2.0**-133 if self.element == "bf16" else ELEMENTS[self.element].step

    @property
    def scale_bits(self) -> int:
        return SCALE_BITS[self.scale] if self.scale else 0

    @property
    def largest_scale(self) -> float:
        return LARGEST_SCALE[self.scale] if self.scale else 1.0

    @property
    def global_scale(self) -> bool:
        """Whether a float32 amax of the whole tensor stands above the block scales."""
        return self.rules == ("nvfp4",)

    @property
    def bits_per_value(self) -> float:
        """Storage of one value with its share of the block scales; what a tensor has once is not counted."""
        return self.element_bits + (self.scale_bits / self.block_size if self.block_size else 0.0)


_BLACKWELL = ("sm_100", "sm_103", "sm_120")
_MX_RULES = RULES["e8m0"]
_TWO_LEVELS = ("nvfp4",)
_WIDE_BLOCKS = ("tensor", "channel", "1x128", "128x128")
_FP8_ON = ("sm_89", "sm_90", *_BLACKWELL)

FORMATS: dict[str, Format] = {
    format_.name: format_
    for format_ in (
        Format("nvfp4", "e2m1", "e4m3", 16, ("1x16", "16x16"), _TWO_LEVELS, "mxf4nvf4", _BLACKWELL),
        Format("mxfp4", "e2m1", "e8m0", 32, ("1x32",), _MX_RULES, "mxf4", _BLACKWELL),
        Format("mxfp8", "e4m3", "e8m0", 32, ("1x32",), _MX_RULES, "mxf8f6f4", _BLACKWELL),
        Format("mxfp8_e5m2", "e5m2", "e8m0", 32, ("1x32",), _MX_RULES, "mxf8f6f4", _BLACKWELL),
        Format("mxfp6_e3m2", "e3m2", "e8m0", 32, ("1x32",), _MX_RULES, "mxf8f6f4", _BLACKWELL),
        Format("mxfp6_e2m3", "e2m3", "e8m0", 32, ("1x32",), _MX_RULES, "mxf8f6f4", _BLACKWELL),
        Format("fp8", "e4m3", "float32", 0, _WIDE_BLOCKS, RULES["float32"], "fp8", _FP8_ON),
        Format("fp8_e5m2", "e5m2", "float32", 0, _WIDE_BLOCKS, RULES["float32"], "fp8", _FP8_ON),
        Format("int8", "int8", "float32", 0, _WIDE_BLOCKS, RULES["float32"], "s8", ("sm_80", "sm_89", "sm_90")),
        Format("nvint4", "int4", "e4m3", 16, ("1x16", "16x16"), _TWO_LEVELS, "", ()),
        Format("bf16", "bf16", None, 0, (), (), "bf16", ("sm_80", "sm_90", *_BLACKWELL)),
    )
}
NAMES = (*FORMATS, CUSTOM)


def bits_per_value(name: str) -> float:
    """Bits one value takes in the named format. ValueError if there is no such format."""
    if name not in FORMATS:
        raise ValueError(f"unknown format {name!r}; known formats: {', '.join(FORMATS)}")
    return FORMATS[name].bits_per_value
