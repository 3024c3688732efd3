"""Rounding to each element's grid, its codes and their values: against the list of values that the bits spell."""

from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nvfp4_kernels.elements import ELEMENTS
from nvfp4_kernels.reference import codecs

NAMES = list(ELEMENTS)
# exponent bits, mantissa bits, bias; largest magnitude code that is a number
FLOATS = {
    "e2m1": (2, 1, 1, 7),
    "e3m2": (3, 2, 3, 31),
    "e2m3": (2, 3, 1, 31),
    "e4m3": (4, 3, 7, 126),
    "e5m2": (5, 2, 15, 123),
}


def magnitudes(name: str) -> list[Fraction]:
    """The magnitude of each magnitude code, spelled out from the bits."""
    if name.startswith("int"):
        return [Fraction(n) for n in range(2 ** (ELEMENTS[name].bits - 1))]
    _, mantissa, bias, last = FLOATS[name]
    found = []
    for code in range(last + 1):
        exponent, fraction = code >> mantissa, Fraction(code & (2**mantissa - 1), 2**mantissa)
        found.append(
            Fraction(2) ** (1 - bias) * fraction if exponent == 0 else Fraction(2) ** (exponent - bias) * (1 + fraction)
        )
    return found


@pytest.mark.parametrize("name", NAMES)
def test_values_and_codes(name):
    element, grid = ELEMENTS[name], magnitudes(name)
    assert element.largest == grid[-1] and element.step == grid[1]
    assert element.top_exponent == len(bin(int(grid[-1]))) - 3
    values = torch.tensor([float(v) for v in grid])
    table = codecs.values(element)
    assert torch.equal(table[: len(grid)], values)
    sign = 1 << (element.bits - 1)
    if element.integer:
        assert table[sign + 1 :].tolist() == [-float(v) for v in reversed(grid[1:])]
    else:
        assert torch.equal(table[sign : sign + len(grid)], -values)
    signed = torch.cat([values, -values[1:]])
    codes = codecs.encode(signed.clone(), element)
    assert codes.dtype == torch.uint8 and torch.equal(table[codes.long()], signed)
    rows = torch.cat([codes, codes.new_zeros(-len(codes) % 8)]).view(1, -1)
    stored = codecs.pack(rows, 1) if element.packed else rows
    assert torch.equal(codecs.unpack(stored, element).float(), table[rows.long()])


@given(st.sampled_from(NAMES), st.floats(-1.25, 1.25, width=32), st.integers(0, 65535), st.sampled_from([8, 16]))
def test_nearest_and_stochastic_rounding_of_any_value(name, share, draw, bits):
    element, grid = ELEMENTS[name], magnitudes(name)
    y = torch.tensor(share) * element.largest
    size = min(abs(Fraction(y.item())), grid[-1])
    below = max(n for n, v in enumerate(grid) if v <= size)
    above = min(below + 1, len(grid) - 1)
    gap = grid[above] - grid[below]
    fraction = (size - grid[below]) / gap if gap else Fraction(0)
    nearest = above if fraction > Fraction(1, 2) or (fraction == Fraction(1, 2) and above % 2 == 0) else below
    assert abs(codecs.nearest_(y.clone().view(1), element)).item() == float(grid[nearest])
    away = (draw >> (16 - bits)) < int(fraction * 2**bits)
    got = codecs.stochastic_(y.clone().view(1), torch.tensor([draw], dtype=torch.uint16), element, bits)
    assert abs(got).item() == float(grid[above if away else below])
    assert got.item() == 0 or (got.item() > 0) == (y.item() > 0)


@pytest.mark.parametrize("name", NAMES)
def test_not_a_number_stays_one_and_the_rest_saturates(name):
    element = ELEMENTS[name]
    y = torch.tensor([float("nan"), 1e30, -1e30, float("inf"), 0.0, -0.0])
    draws = torch.tensor([0] * 6, dtype=torch.uint16)
    for grid in (codecs.nearest_(y.clone(), element), codecs.stochastic_(y.clone(), draws, element)):
        assert grid[0].isnan() and grid[1:4].tolist() == [element.largest, -element.largest, element.largest]
        assert not grid[4:].any() and (not element.integer or not torch.signbit(grid[4:]).any())


@pytest.mark.parametrize("name", NAMES)
def test_stochastic_rounding_is_unbiased_on_every_element(name):
    """The mean over all 65536 draws is the value itself, but for what lies below 2^-16 of a step."""
    element = ELEMENTS[name]
    y = torch.linspace(-element.largest, element.largest, 41) * 0.999
    draws = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(-1, 1).expand(-1, 41)
    mean = codecs.stochastic_(y.expand(65536, -1).clone(), draws.contiguous(), element).double().mean(0)
    step = torch.tensor([float(max(b - a for a, b in zip(g, g[1:], strict=False))) for g in [magnitudes(name)]])
    assert ((mean - y.double()).abs() <= 2.0**-15 * step).all()


def test_bits_of_a_mask():
    mask = torch.rand(6, 40) < 0.5
    packed = codecs.pack_bits(mask, 1)
    assert packed.shape == (6, 5) and torch.equal(codecs.unpack_bits(packed, 40), mask)
    assert torch.equal(codecs.pack_bits(mask.t().contiguous(), 0).t(), packed)
