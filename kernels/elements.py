"""Elements: the numbers that a quantized value can be, before any scale. Data only; rounding lives in the backends.

A float element ``eXmY`` has a sign, X exponent bits and Y mantissa bits; below 2^``least_exponent`` its grid is
uniform (subnormals). An integer element is the symmetric grid -largest .. largest; "E1M2", a uniform 4-bit float, is
int4 times 1/4: the same grid under a scale.

Sources: OCP Microscaling Formats (MX) specification v1.0 (E2M1, E3M2, E2M3), OCP 8-bit floating point v1.0 (E4M3,
E5M2).
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Element:
    name: str
    bits: int
    mantissa: int  # stored mantissa bits; 0 for integers
    least_exponent: int  # of the smallest normal number; 0 for integers
    largest: float

    @property
    def integer(self) -> bool:
        return self.name.startswith("int")

    @property
    def significant(self) -> int:
        """Bits of the longest significand: two values multiply exactly if theirs add up to no more than the
        product's."""
        return self.bits - 1 if self.integer else self.mantissa + 1

    @property
    def step(self) -> float:
        """The smallest positive value."""
        return 1.0 if self.integer else 2.0 ** (self.least_exponent - self.mantissa)

    @property
    def top_exponent(self) -> int:
        """floor(log2(largest))."""
        return math.frexp(self.largest)[1] - 1

    @property
    def packed(self) -> bool:
        """Two codes share a byte; otherwise each has one of its own (6-bit codes too, as the MMA reads them)."""
        return self.bits == 4


ELEMENTS = {
    element.name: element
    for element in (
        Element("e2m1", 4, 1, 0, 6.0),
        Element("e3m2", 6, 2, -2, 28.0),
        Element("e2m3", 6, 3, 0, 7.5),
        Element("e4m3", 8, 3, -6, 448.0),
        Element("e5m2", 8, 2, -14, 57344.0),
        Element("int4", 4, 0, 0, 7.0),
        Element("int8", 8, 0, 0, 127.0),
    )
}
