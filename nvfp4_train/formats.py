"""Number formats as data: element, block, scale, range, bits per value.

A format says what the bits mean. What a recipe may choose about it (which block shape, which scale rule) is listed
here too, so that the recipe schema, the ledger and the explanations all read the same table.

Sources: NVFP4 - arXiv:2509.25149; MXFP4 - OCP Microscaling Formats (MX) specification v1.0 (rule ``floor``), rule
``ceil`` as DeepSeek publishes its FP4 weights and indexer.
"""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Format:
    """One number format.

    ``blocks`` and ``rules`` list what may be chosen, the default first; both are empty for a format without block
    scales. ``native_instruction`` is the PTX MMA kind that multiplies two operands of this format, on the
    architectures in ``native_on``; elsewhere the product is emulated.
    """

    name: str
    element: str  # e2m1 | bf16
    element_bits: int
    largest_element: float
    smallest_element: float  # least positive element (subnormals included), without any scale
    scale: str | None  # e4m3 | e8m0
    scale_bits: int
    largest_scale: float
    block_size: int  # elements that share one scale where the hardware reads it (16x16 is expanded to 1x16 there)
    blocks: tuple[str, ...]
    rules: tuple[str, ...]
    global_scale: bool  # a float32 amax of the whole tensor stands above the block scales
    native_instruction: str
    native_on: tuple[str, ...]
    element_values: tuple[float, ...] = field(default=(), repr=False)  # magnitudes by code; empty: not enumerated

    @property
    def bits_per_value(self) -> float:
        """Storage of one value with its share of the block scale; the one float32 of a tensor is not counted."""
        return self.element_bits + (self.scale_bits / self.block_size if self.block_size else 0.0)


_E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

NVFP4 = Format(
    name="nvfp4",
    element="e2m1",
    element_bits=4,
    largest_element=6.0,
    smallest_element=0.5,
    scale="e4m3",
    scale_bits=8,
    largest_scale=448.0,
    block_size=16,
    blocks=("1x16", "16x16"),
    rules=("nvfp4",),
    global_scale=True,
    native_instruction="mxf4nvf4",
    native_on=("sm_100", "sm_103", "sm_120"),
    element_values=_E2M1_VALUES,
)

MXFP4 = Format(
    name="mxfp4",
    element="e2m1",
    element_bits=4,
    largest_element=6.0,
    smallest_element=0.5,
    scale="e8m0",
    scale_bits=8,
    largest_scale=2.0**127,
    block_size=32,
    blocks=("1x32",),
    rules=("floor", "ceil"),
    global_scale=False,
    native_instruction="mxf4",
    native_on=("sm_100", "sm_103", "sm_120"),
    element_values=_E2M1_VALUES,
)

BF16 = Format(
    name="bf16",
    element="bf16",
    element_bits=16,
    largest_element=float.fromhex("0x1.fep127"),
    smallest_element=2.0**-133,
    scale=None,
    scale_bits=0,
    largest_scale=1.0,
    block_size=0,
    blocks=(),
    rules=(),
    global_scale=False,
    native_instruction="bf16",
    native_on=("sm_80", "sm_90", "sm_100", "sm_103", "sm_120"),
)

FORMATS: dict[str, Format] = {format_.name: format_ for format_ in (NVFP4, MXFP4, BF16)}


def bits_per_value(name: str) -> float:
    """Bits one value takes in the named format. ValueError if there is no such format."""
    if name not in FORMATS:
        raise ValueError(f"unknown format {name!r}; known formats: {', '.join(FORMATS)}")
    return FORMATS[name].bits_per_value
