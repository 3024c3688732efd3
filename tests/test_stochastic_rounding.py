"""Stochastic rounding of the reference quantizer: its draws, its mean, and the clamp's bias apart from it."""

import math

import pytest
import torch
from quantize_oracle import gaussian, same

from nvfp4_kernels.reference.codecs import e4m3_decode
from nvfp4_kernels.reference.quantize import global_amax, quantize
from nvfp4_kernels.scheme import Scheme

ROW, STOCHASTIC = Scheme(), Scheme(rounding="stochastic")


def draws_of(value: float, scheme: Scheme, count: int, seed: int) -> torch.Tensor:
    """``count`` roundings of one value whose block scale is 1, float64."""
    x = torch.full((count // 15, 16), value)
    x[:, 0] = 6.0
    options = dict(amax_rows=torch.tensor(2688.0), seed=torch.tensor(seed), rows_form="decoded")
    return quantize(x, scheme, None, **options)[0].operand[:, 1:].flatten().to(torch.float64)


@pytest.mark.parametrize("value, low, high", [(0.1, 0, 0.5), (1.3, 1, 1.5), (-2.25, -2, -3), (4.01, 4, 6)])
def test_stochastic_rounding_of_one_value(value, low, high):
    """Case 6."""
    draws = draws_of(value, STOCHASTIC, 100_000, seed=7)
    assert set(draws.tolist()) == {low, high}
    share = (value - low) / (high - low)
    error = abs(high - low) * math.sqrt(share * (1 - share) / len(draws))
    assert abs(draws.mean().item() - value) < 4 * error
    assert torch.equal(draws, draws_of(value, STOCHASTIC, 100_000, seed=7))
    assert not torch.equal(draws, draws_of(value, STOCHASTIC, 100_000, seed=8))


def test_eight_bit_draws_are_biased_towards_zero():
    """floor(256 * frac) / 256: a fraction of 1/300 of a step never rounds up, sixteen bits see it."""
    value = 1 + 0.5 / 300
    assert set(draws_of(value, Scheme(rounding="stochastic8"), 60_000, seed=1).tolist()) == {1.0}
    assert set(draws_of(value, STOCHASTIC, 60_000, seed=1).tolist()) == {1.0, 1.5}


@pytest.mark.parametrize("axis", [0, 1])
def test_stochastic_rounding_is_unbiased(axis):
    """The error of the mean falls as 1/sqrt(n) over 1..4096 draws on elements that do not saturate.

    The clamp is apart: an element above 6 after its scale was rounded down has the same error in every draw.
    """
    x = gaussian(16, 64)
    scheme, nearest = STOCHASTIC, ROW
    copies = 4096
    stacked = x.repeat(copies, 1) if axis else x.repeat(1, copies)  # one call: every copy draws its own numbers
    schemes = (scheme, None) if axis else (None, scheme)
    result = quantize(stacked, *schemes, seed=torch.tensor(3), rows_form="decoded", columns_form="decoded")
    operand = result[0].operand if axis else result[1].operand.t()
    draws = operand.view(copies, 16, 64) if axis else operand.reshape(16, copies, 64).transpose(0, 1)
    plain = [nearest if one else None for one in schemes]
    amax = [top for top in global_amax(x, *plain) if top is not None][0]
    codes = [one for one in quantize(x, *plain) if one is not None][0]
    scale = e4m3_decode(codes.scales).repeat_interleave(16, dim=1)
    scale = (scale if axis else scale.t()).to(torch.float64)
    exact = x.to(torch.float64) * 2688 / amax.to(torch.float64)  # what the operand stands for without a global scale
    saturated = exact.abs() > 6 * scale * (1 + 1e-6)
    assert 0 < saturated.sum() < 0.1 * saturated.numel()

    def error(n: int) -> float:
        means = draws[: n * (copies // n)].to(torch.float64).view(copies // n, n, 16, 64).mean(dim=1)
        return ((means - exact)[:, ~saturated]).pow(2).mean().sqrt().item()

    errors = {n: error(n) for n in (1, 16, 256, 4096)}
    for n in (16, 256, 4096):
        # 1000 elements estimate a root mean square to about 1/sqrt(2000) = 2 percent; nearest would not fall at all.
        assert errors[n] * math.sqrt(n) == pytest.approx(errors[1], rel=0.12), errors
    clamped = draws[:, saturated].to(torch.float64)
    assert torch.equal(clamped, (6 * scale * exact.sign())[saturated].expand(copies, -1))
    bias = (clamped[0] - exact[saturated]).norm() / exact.norm()
    assert 0.001 < bias < 0.05  # the clamp's own bias: about one percent of the norm on Gaussian data


def test_two_forms_with_one_stream_share_their_draws():
    """A 16x16 tile has one scale for both directions: with one stream the column form is the row form, transposed."""
    x = gaussian(48, 32)
    scheme = Scheme(block=(16, 16), rounding="stochastic")
    options = dict(seed=torch.tensor(9), rows_form="decoded", columns_form="decoded")
    rows, columns = quantize(x, scheme, scheme, row_stream=2, column_stream=2, **options)
    assert same([rows.operand], [columns.operand.t()])
    rows, columns = quantize(x, scheme, scheme, row_stream=2, column_stream=3, **options)
    assert not torch.equal(rows.operand, columns.operand.t())
    assert same(quantize(x, ROW, None)[0], quantize(x, ROW, None, seed=torch.tensor(1))[0])
