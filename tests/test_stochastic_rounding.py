"""Stochastic rounding of the reference quantizer: its draws, its mean, and the clamp's bias apart from it."""

import math

import pytest
import torch
from quantize_oracle import gaussian, same

from nvfp4_kernels.reference.codecs import e4m3_decode, unpack
from nvfp4_kernels.reference.philox import random16, random16_rows
from nvfp4_kernels.reference.quantize import dequantize, global_amax, quantize
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


@pytest.mark.parametrize("scheme", [STOCHASTIC, Scheme(block=(16, 16), rounding="stochastic")])
@pytest.mark.parametrize("cut", [((16, 48), (32, 64)), ((0, 48), (16, 80)), ((16, 32), (0, 80)), ((0, 64), (0, 32))])
def test_a_part_of_a_tensor_draws_what_it_would_draw_there(scheme, cut):
    x = gaussian(64, 80)
    options = dict(seed=torch.tensor(11), row_stream=2, column_stream=2, rows_form="decoded", columns_form="decoded")
    amax = dict(amax_rows=x.abs().max(), amax_columns=x.abs().max())
    (top, bottom), (left, right) = cut
    rows, columns = quantize(x, scheme, scheme, **options, **amax)
    part = x[top:bottom, left:right]
    part_rows, part_columns = quantize(part, scheme, scheme, origin=(top, left, 80), **options, **amax)
    assert same([part_rows.operand], [rows.operand[top:bottom, left:right]])
    assert same([part_columns.operand], [columns.operand[left:right, top:bottom]])


def test_origin_counts_elements_of_the_whole_tensor_on_any_lane():
    numbers = random16(torch.tensor(5), 3, 400)
    part = random16_rows(torch.tensor(5), 3, 6, 9, 2 * 37 + 5, 37)
    assert torch.equal(part, torch.stack([numbers[(i + 2) * 37 + 5 :][:9] for i in range(6)]))
    assert torch.equal(random16(torch.tensor(5), 3, 50, first=13), numbers[13:63])


VARIANTS = {
    "tseng: headroom 4/3": Scheme("e2m1", "e8m0", "floor", (1, 32), "stochastic", headroom=4 / 3),
    "mxfp4 up": Scheme("e2m1", "e8m0", "up", (1, 32), "stochastic"),
    "mxfp8 up": Scheme("e4m3", "e8m0", "up", (1, 32), "stochastic"),
    "int4 float32": Scheme("int4", "float32", "amax", (1, 16), "stochastic"),
    "outer blocks": Scheme(outer=(1, 64), rounding="stochastic", headroom=17 / 16),
    "nvfp4 17/16": Scheme(rounding="stochastic", headroom=17 / 16),
    "nvfp4": Scheme(rounding="stochastic"),
    "nvfp4 four over six": Scheme(rounding="stochastic", select="mse", range=256.0),
}


def real_gradient() -> torch.Tensor:
    """float32 [16, 64]: the gradient at a hidden layer of a small classifier that has learned a little."""
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 10))
    optimizer = torch.optim.Adam(layers.parameters(), 1e-2)
    inputs, labels = torch.randn(256, 32), torch.arange(256) % 10
    for _ in range(20):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(layers(inputs), labels).backward()
        optimizer.step()
    hidden = layers[0](inputs).detach().requires_grad_()
    torch.nn.functional.cross_entropy(layers[2](layers[1](hidden)), labels).backward()
    return hidden.grad[:16].clone()


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_is_unbiased_but_for_what_it_clamps(name):
    """The error of the mean of n draws falls as 1/sqrt(n), the clamp's bias apart; without saturation there is none."""
    scheme, copies = VARIANTS[name], 1024
    x = real_gradient()
    result = quantize(x.repeat(copies, 1), scheme, None, seed=torch.tensor(3))[0]
    values = dequantize(result.codes, result.scales, result.amax, scheme, 64, torch.float32, result.outer)
    draws = values.to(torch.float64).view(copies, 16, 64)
    largest = unpack(result.codes[:16], scheme.number)[:, :64].abs() == scheme.number.largest
    saturated = largest & (draws[0].abs() < x.abs() * (1 - 1e-6))
    assert not saturated.any() or name in ("nvfp4", "nvfp4 four over six")
    assert saturated.any() or name != "nvfp4"

    def error(n: int) -> float:
        means = draws[: n * (copies // n)].view(copies // n, n, 16, 64).mean(dim=1)
        return ((means - x)[:, ~saturated]).pow(2).mean().sqrt().item()

    first = error(1)
    for n in (16, 256, 1024):
        assert error(n) * math.sqrt(n) == pytest.approx(first, rel=0.15)
    assert ((draws[0] - x)[saturated].norm() / x.norm()) < 0.05  # what the clamp costs, at most
