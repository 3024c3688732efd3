"""Scheme: everything a quantize kernel must know about one operand, as data.

Recipes name formats; kernels get a Scheme. It is hashable and has a text form, so that it can travel through a
custom op (whose arguments are tensors, numbers and strings) and stand in a ledger.
"""

from dataclasses import dataclass

SIGN_MASK = 0xD7E8  # bit i set: sign i of the 16-point Hadamard transform is -1 (TransformerEngine's default)


@dataclass(frozen=True)
class Scheme:
    """How one operand ``[rows, K]`` of a GEMM is quantized.

    ``block`` is (rows, columns); columns run along K, the reduction dimension.
    ``scale`` is the type of the block scale, ``rule`` how it is chosen from the block's amax:
    ``nvfp4`` (two levels, with a float32 amax of the tensor), ``floor`` (OCP MX), ``ceil`` (DeepSeek).
    ``rounding``: ``nearest`` (ties to even), ``stochastic`` (16-bit draws), ``stochastic8`` (8-bit draws).
    ``hadamard``: 0, or the size of the signed Hadamard transform along K that comes first.
    """

    element: str = "e2m1"
    scale: str = "e4m3"
    rule: str = "nvfp4"
    block: tuple[int, int] = (1, 16)
    rounding: str = "nearest"
    hadamard: int = 0
    sign_mask: int = SIGN_MASK

    @property
    def has_global_scale(self) -> bool:
        return self.rule == "nvfp4"

    @property
    def stochastic(self) -> bool:
        return self.rounding != "nearest"

    @property
    def group(self) -> int:
        """K is padded with zeros to a multiple of this."""
        return max(self.block[1], self.hadamard)

    def __str__(self) -> str:
        rows, columns = self.block
        text = f"{self.element}:{self.scale}:{self.rule}:{rows}x{columns}:{self.rounding}"
        return text + (f":h{self.hadamard}:{self.sign_mask:04X}" if self.hadamard else "")

    @staticmethod
    def parse(text: str) -> "Scheme":
        """The inverse of ``str(scheme)``."""
        known = _parsed.get(text)  # a plain dict: torch.compile traces through lru_cache, with a warning
        if known is None:
            element, scale, rule, block, rounding, *hadamard = text.split(":")
            rows, columns = block.split("x")
            size, mask = (int(hadamard[0][1:]), int(hadamard[1], 16)) if hadamard else (0, SIGN_MASK)
            known = Scheme(element, scale, rule, (int(rows), int(columns)), rounding, size, mask)
            _parsed[text] = known
        return known


_parsed: dict[str, Scheme] = {}
