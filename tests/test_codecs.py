"""E2M1, E4M3 and E8M0 against tables and exact arithmetic."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nvfp4_kernels.reference import codecs

FLOATS = st.floats(width=32, allow_nan=False)
E4M3 = [Fraction(m, 512) for m in range(8)]  # subnormals: steps of 2^-9
E4M3 += [Fraction(8 + m, 8) * Fraction(2) ** (e - 7) for e in range(1, 16) for m in range(8)][:-1]  # 0x7F is NaN


def nearest_even(value: Fraction, table: list[Fraction]) -> int:
    """The index of the nearest entry, the even index of two; beyond the last entry the last."""
    return min(range(len(table)), key=lambda i: (abs(table[i] - value), i % 2))


def code_of(y: float) -> int:
    if math.isinf(y):
        return 7 if y > 0 else 15
    index = nearest_even(abs(Fraction(y)), [Fraction(value) for value in codecs.E2M1_VALUES])
    return index + 8 * (math.copysign(1.0, y) < 0)


def test_ties():
    y = torch.tensor([6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 7, -0.25, -0.0, -5])
    want = torch.tensor([6, 0, 1, 1, 2, 2, 4, 4, 6, -0.0, -0.0, -4])
    grid = codecs.nearest_(y.clone(), codecs.E2M1)
    assert torch.equal(grid.view(torch.int32), want.view(torch.int32))  # the sign of zero counts
    assert codecs.encode(grid, codecs.E2M1).tolist() == [7, 0, 2, 2, 4, 4, 6, 6, 7, 8, 8, 14]


@given(st.lists(st.one_of(FLOATS, st.floats(-8, 8, width=32), st.sampled_from([0.25, 1.25, 5.0, -2.5])), min_size=1))
@settings(max_examples=150, deadline=None)
def test_nearest(values):
    codes = codecs.encode(codecs.nearest_(torch.tensor(values), codecs.E2M1), codecs.E2M1)
    assert codes.tolist() == [code_of(value) for value in torch.tensor(values).tolist()]


def test_nearest_beside_every_tie():
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    below, above = ties.nextafter(torch.zeros(())), ties.nextafter(torch.tensor(9.0))
    assert codecs.encode(codecs.nearest_(below, codecs.E2M1), codecs.E2M1).tolist() == list(range(7))
    assert codecs.encode(codecs.nearest_(above, codecs.E2M1), codecs.E2M1).tolist() == list(range(1, 8))


def test_nan_is_kept():
    y = torch.tensor([float("nan"), 1.0])
    draws = torch.zeros(2, dtype=torch.uint16)
    for grid in (codecs.nearest_(y.clone(), codecs.E2M1), codecs.stochastic_(y.clone(), draws, codecs.E2M1)):
        assert grid[0].isnan() and grid[1] == 1


@given(y=st.floats(-7, 7, width=32), draw=st.integers(0, 65535), bits=st.sampled_from([8, 16]))
@settings(max_examples=400, deadline=None)
def test_stochastic_rule(y, draw, bits):
    """Away from zero iff the draw's high bits < floor(frac * 2^bits), in exact arithmetic."""
    magnitude = min(abs(Fraction(y)), Fraction(6))
    grid = [Fraction(value) for value in codecs.E2M1_VALUES]
    low = max(value for value in grid if value <= magnitude)
    high = min((value for value in grid if value > magnitude), default=low)
    fraction = (magnitude - low) / (high - low) if high > low else Fraction(0)
    want = high if draw >> (16 - bits) < math.floor(fraction * 2**bits) else low
    got = codecs.stochastic_(torch.tensor([y]), torch.tensor([draw], dtype=torch.uint16), codecs.E2M1, bits)
    assert Fraction(got.item()) == want * (-1 if math.copysign(1.0, y) < 0 else 1)
    assert math.copysign(1.0, got.item()) == math.copysign(1.0, y)


def test_stochastic_at_the_border():
    """frac = k / 65536 exactly, and one float32 below: the draw k - 1 rounds up, then down."""
    k = 21846
    y = torch.tensor([1 + 0.5 * k / 65536, 2 + k / 65536, 4 + 2 * k / 65536])
    up = torch.full((3,), k - 1, dtype=torch.uint16)
    stay = torch.full((3,), k, dtype=torch.uint16)
    assert codecs.stochastic_(y.clone(), up, codecs.E2M1).tolist() == [1.5, 3, 6]
    assert codecs.stochastic_(y.clone(), stay, codecs.E2M1).tolist() == [1, 2, 4]
    assert codecs.stochastic_(y.nextafter(torch.zeros(())), up, codecs.E2M1).tolist() == [1, 2, 4]


def test_every_byte_unpacks_and_packs_again():
    byte = torch.arange(256, dtype=torch.uint8)
    for codes in (byte.view(2, 128), byte.view(128, 2).t(), byte.view(2, 128)[:, ::2], byte.view(1, 256)):
        values = codecs.unpack(codes).to(torch.float32)
        signed = [*codecs.E2M1_VALUES, *(-value for value in codecs.E2M1_VALUES)]
        want = [[signed[nibble] for code in row for nibble in (code & 15, code >> 4)] for row in codes.tolist()]
        assert torch.equal(values.contiguous().view(torch.int32), torch.tensor(want).view(torch.int32))
        again = codecs.encode(values.contiguous(), codecs.E2M1)
        assert torch.equal(codecs.pack(again, 1), codes)
        assert torch.equal(codecs.pack(again.t().contiguous(), 0).t(), codes)


def test_e4m3_decode():
    values = codecs.e4m3_decode(torch.arange(127, dtype=torch.uint8))
    assert [Fraction(value) for value in values.tolist()] == E4M3
    assert codecs.e4m3_decode(torch.tensor([0x7F], dtype=torch.uint8)).isnan().all()


@given(st.one_of(*(st.floats(0, top, width=32) for top in (0.03125, 500, 2.0**127))))
@settings(max_examples=200, deadline=None)
def test_e4m3_encode(value):
    assert codecs.e4m3_encode(torch.tensor([value])).item() == nearest_even(Fraction(value), E4M3)


def test_e4m3_ties_and_ends():
    middles = torch.tensor([float((a + b) / 2) for a, b in zip(E4M3, E4M3[1:], strict=False)])
    assert codecs.e4m3_encode(middles).tolist() == [i + i % 2 for i in range(126)]
    ends = torch.tensor([448, 460, 464, 480, 1e30, float("inf"), float("nan"), -float("nan")])
    assert codecs.e4m3_encode(ends).tolist() == [0x7E] * 6 + [0x7F] * 2


def test_e8m0():
    values = codecs.e8m0_decode(torch.arange(255, dtype=torch.int32).to(torch.uint8))
    assert [Fraction(value) for value in values.tolist()] == [Fraction(2) ** (i - 127) for i in range(255)]
    assert codecs.e8m0_decode(torch.tensor([255], dtype=torch.uint8)).isnan().all()
    assert codecs.power_of_two(torch.tensor([-127, -126, 0, 127])).tolist() == [2.0**-127, 2.0**-126, 1, 2.0**127]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_products_of_code_and_scale_are_exact(dtype):
    """Why a decoded operand needs no global scale: every E2M1 value times every finite E4M3 scale fits BF16."""
    values = torch.tensor(codecs.E2M1_VALUES, dtype=torch.float64)
    products = values[:, None] * codecs.e4m3_decode(torch.arange(127, dtype=torch.uint8)).to(torch.float64)
    assert torch.equal(products.to(dtype).to(torch.float64), products)
