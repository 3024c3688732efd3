"""Scheme: everything a quantize kernel must know about one operand, as data.

Recipes name formats; kernels get a Scheme. It is hashable and has a text form, so that it can travel through a
custom op (whose arguments are tensors, numbers and strings) and stand in a ledger.
"""

from dataclasses import dataclass, field, replace

from nvfp4_kernels.elements import ELEMENTS, Element

SIGN_MASK = 0xD7E8  # bit i set: sign i of the 16-point Hadamard transform is -1 (TransformerEngine's default)
PER_STEP = "step"  # a sign mask that is drawn from the seed of the module call
SCALES = ("e4m3", "e8m0", "float32")
RULES = {
    "e4m3": ("nvfp4", "amax"),
    "e8m0": ("floor", "ceil", "up", "even", "down"),
    "float32": ("amax", "delayed"),
}
ROUNDINGS = ("nearest", "stochastic", "stochastic8", "stochastic_scale")
SELECTIONS = ("mse", "mae", "max")
WHOLE = 0  # as the size of a block: the whole dimension
E4M3_LARGEST = 448.0
E4M3_SIGNIFICANT = 4
BF16_SIGNIFICANT = 8


def sign_mask(size: int) -> int:
    """The default signs of a transform of ``size`` points: the 16-bit mask, cut or repeated."""
    return sum(((SIGN_MASK >> (i % 16)) & 1) << i for i in range(size))


@dataclass(frozen=True)
class Split:
    """A part of an operand that is not quantized like the rest. Layers act on it; kernels get the rest.

    ``part``: ``mean`` (over the tokens, kept in float32) or ``channels`` (the ``fraction`` of the features with the
    largest norm, quantized as ``hot`` says). ``observe``: (first, last) step whose norms decide, once; None: chosen
    at each call.
    """

    part: str
    fraction: float = 0.0
    observe: tuple[int, int] | None = None
    hot: "Scheme | None" = None
    hot_text: str = field(default="", init=False, compare=False, repr=False)  # ``str(hot)``, made once

    def __post_init__(self) -> None:
        object.__setattr__(self, "hot_text", "" if self.hot is None else str(self.hot))

    def __str__(self) -> str:
        if self.part != "channels":
            return self.part
        steps = "" if self.observe is None else f"{self.observe[0]}-{self.observe[1]}"
        return "/".join((self.part, repr(self.fraction), steps, self.hot_text.replace(":", "|")))

    @staticmethod
    def parse(text: str) -> "Split":
        part, *rest = text.split("/")
        if not rest:
            return Split(part)
        fraction, steps, hot = rest
        observe = tuple(map(int, steps.split("-"))) if steps else None
        return Split(part, float(fraction), observe, _parse(hot.replace("|", ":")))


@dataclass(frozen=True)
class Scheme:
    """How one operand ``[rows, K]`` of a GEMM is quantized.

    ``element``: a name of ``ELEMENTS``. ``scale``: the type of the block scale. ``rule``: how it follows from the
    block's amax; see ``reference/scales.py``. ``block`` is (rows, columns); columns run along K, the reduction
    dimension; 0 is the whole dimension: (0, 0) per tensor, (1, 0) per channel (row).
    ``rounding``: ``nearest`` (ties to even), ``stochastic`` (16-bit draws), ``stochastic8`` (8-bit draws),
    ``stochastic_scale`` (MS-EDEN: nearest elements, the corrected scale is rounded stochastically).
    ``hadamard``: 0, or the size of the signed Hadamard transform along K that comes first, with ``sign_mask``:
    bit i set means sign i is -1; ``"step"`` draws the signs from the seed.
    ``outer``: with rule ``nvfp4`` the block of the float32 scale above the block scales; None: the tensor.
    ``range``: the largest block scale that rule ``nvfp4`` aims at. ``headroom``: amax is mapped to the largest
    element divided by it. ``select``: "" or the error that decides between 6 and 4 as a block's top (four over six).
    ``clip``: 0, or the multiple of the block's standard deviation that stands in for its amax. ``masked``: the elements
    that saturate are reported.

    What a layer does before the kernels see the operand stands here too, for the ledger; kernels ignore it:
    ``requantized`` (made from Fprop's quantized operand), ``split``, ``history`` (steps of rule ``delayed``).
    """

    element: str = "e2m1"
    scale: str = "e4m3"
    rule: str = "nvfp4"
    block: tuple[int, int] = (1, 16)
    rounding: str = "nearest"
    hadamard: int = 0
    sign_mask: int | str = SIGN_MASK
    outer: tuple[int, int] | None = None
    range: float = E4M3_LARGEST
    headroom: float = 1.0
    select: str = ""
    clip: float = 0.0
    masked: bool = False
    requantized: bool = False
    split: Split | None = None
    history: int = 0

    @property
    def has_global_scale(self) -> bool:
        """One float32 amax of the tensor scales the whole product, in the epilogue of the GEMM."""
        return (self.rule == "nvfp4" and self.outer is None) or self.tensor_scale_only

    @property
    def tensor_scale_only(self) -> bool:
        """One float32 scale and no other: the codes themselves are the operand."""
        return self.scale == "float32" and self.block == (WHOLE, WHOLE)

    @property
    def divisor(self) -> float:
        """Of the global scale: a value is code x block scale x amax / divisor."""
        return self.top if self.tensor_scale_only else self.top * self.range

    @property
    def factor(self) -> float:
        """A constant that belongs to the operand beside its scales: what a power of two cannot hold of the headroom."""
        return self.headroom if self.scale == "e8m0" else 1.0

    @property
    def top(self) -> float:
        """The magnitude that a block's amax is mapped to."""
        return self.number.largest / self.headroom

    @property
    def number(self) -> Element:
        return ELEMENTS[self.element]

    @property
    def stochastic(self) -> bool:
        """Whether an element's value depends on its random draw."""
        return self.rounding != "nearest"

    @property
    def random(self) -> bool:
        """Whether a seed is needed: for draws or for signs."""
        return self.stochastic or (self.hadamard > 0 and self.sign_mask == PER_STEP)

    @property
    def bits_per_value(self) -> float:
        """Element and share of the block scales; what a tensor, a row or a column has once is not counted."""
        rows, columns = self.block
        bits = float(self.number.bits)
        if rows and columns:
            bits += {"e4m3": 8, "e8m0": 8, "float32": 32}[self.scale] / columns  # square blocks are repeated over rows
        return bits + (32 / self.outer[1] if self.outer else 0)

    @property
    def exact_in_bf16(self) -> bool:
        """Whether code x block scale always fits BF16's 8 significant bits.

        (With E8M0, down to blocks whose scale is below 2^-110: their smallest codes leave BF16's exponents.)
        """
        scale = {"e4m3": E4M3_SIGNIFICANT, "e8m0": 1, "float32": 24}[self.scale]
        return self.tensor_scale_only or (self.outer is None and self.number.significant + scale <= BF16_SIGNIFICANT)

    @property
    def why_not_triton(self) -> str:
        """Why ``kernels/triton`` has it not, so that the reference runs, on a GPU too; empty where it has."""
        if self.block == (1, WHOLE) and self.hadamard:
            return "one scale a row after a Hadamard transform: the row's amax takes a pass of its own"
        return ""

    @property
    def in_triton(self) -> bool:
        return not self.why_not_triton

    @property
    def group(self) -> int:
        """K is padded with zeros to a multiple of this."""
        least = 8 if self.masked else 2 if self.number.packed else 1
        return max(self.block[1], self.hadamard, self.outer[1] if self.outer else 0, least)

    def on(self, rows: int, columns: int) -> "Scheme":
        """The same with the sizes of whole-dimension blocks filled in, for an operand of ``rows`` x ``columns``."""
        if self.block[0] and self.block[1]:
            return self
        return replace(self, block=(self.block[0] or rows, self.block[1] or columns))

    def __str__(self) -> str:
        rows, columns = self.block
        text = f"{self.element}:{self.scale}:{self.rule}:{rows}x{columns}:{self.rounding}"
        if self.hadamard:
            mask = PER_STEP if self.sign_mask == PER_STEP else f"{self.sign_mask:04X}"
            text += f":h{self.hadamard}:{mask}"
        text += "".join(f":{name}={value}" for name, value in self._additions())
        _parsed[text] = self  # so that a compiled graph, which may not write here, finds every text that can reach it
        return text

    def _additions(self) -> list[tuple[str, str]]:
        outer = "" if self.outer is None else f"{self.outer[0]}x{self.outer[1]}"
        items = (
            ("outer", outer, ""), ("range", self.range, E4M3_LARGEST), ("headroom", self.headroom, 1.0),
            ("select", self.select, ""), ("clip", self.clip, 0.0), ("masked", self.masked, False),
            ("requantized", self.requantized, False), ("split", self.split, None), ("history", self.history, 0),
        )  # fmt: skip
        return [(name, str(value)) for name, value, default in items if value != default]

    @staticmethod
    def parse(text: str) -> "Scheme":
        """The inverse of ``str(scheme)``."""
        known = _parsed.get(text)  # a plain dict: torch.compile traces through lru_cache, with a warning
        if known is None:
            known = _parsed[text] = _parse(text)
        return known


def _parse(text: str) -> Scheme:
    element, scale, rule, block, rounding, *rest = text.split(":")
    size, mask = 0, SIGN_MASK
    if rest and rest[0].startswith("h") and "=" not in rest[0]:
        size, mask = int(rest[0][1:]), PER_STEP if rest[1] == PER_STEP else int(rest[1], 16)
        rest = rest[2:]
    additions = dict(item.split("=", 1) for item in rest)
    return Scheme(
        element, scale, rule, _sizes(block), rounding, size, mask,
        outer=_sizes(additions["outer"]) if "outer" in additions else None,
        range=float(additions.get("range", E4M3_LARGEST)),
        headroom=float(additions.get("headroom", 1.0)),
        select=additions.get("select", ""),
        clip=float(additions.get("clip", 0.0)),
        masked="masked" in additions,
        requantized="requantized" in additions,
        split=Split.parse(additions["split"]) if "split" in additions else None,
        history=int(additions.get("history", 0)),
    )  # fmt: skip


def _sizes(text: str) -> tuple[int, int]:
    rows, columns = text.split("x")
    return int(rows), int(columns)


_parsed: dict[str, Scheme] = {}
