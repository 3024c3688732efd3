"""Every scale rule against its sentence in exact arithmetic, and the decoded forms of every combination."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from quantize_oracle import gaussian

from nvfp4_kernels.elements import ELEMENTS
from nvfp4_kernels.reference import codecs, scales
from nvfp4_kernels.reference.quantize import decode, dequantize, quantize
from nvfp4_kernels.scheme import RULES, Scheme, Split, sign_mask

SEED = torch.tensor(5)


def exponent_by_the_rule(rule: str, amax: float, largest: float, significant: int) -> int:
    if amax == 0 and rule != "ceil":
        return -127
    b, top = Fraction(amax), Fraction(largest)
    log = lambda v: math.frexp(float(v))[1] - 1  # noqa: E731 - floor(log2), exact for float32 values
    if rule == "floor":
        e = log(b) - log(top)
    elif rule == "even":  # round to the element's significand, ties away from zero, then floor
        unit = Fraction(2) ** (log(b) - (significant - 1))
        e = log((b / unit + Fraction(1, 2)).__floor__() * unit) - log(top)
    else:
        b = max(b, Fraction(float(torch.tensor(1e-4)))) if rule == "ceil" else b
        e = -200
        while top * Fraction(2) ** e < b:
            e += 1
        if rule == "down" and top * Fraction(2) ** e != b:
            e -= 1
    return max(-127, min(127, e))


@given(
    st.sampled_from(["floor", "even", "ceil", "up", "down"]), st.sampled_from(list(ELEMENTS)),
    st.one_of(st.just(0.0), st.floats(2.0**-100, 2.0**100, width=32),
              st.builds(lambda m, e: m * 2.0**e, st.sampled_from([1, 1.5, 1.75, 1.875, 1.9375, 127 / 64]),
                        st.integers(-60, 60))),
)  # fmt: skip
def test_exponent_rules(rule, name, amax):
    element = ELEMENTS[name]
    scheme = Scheme(name, "e8m0", rule, (1, 32))
    byte, encode = scales.power_of_two(torch.tensor([amax]), scheme)
    e = exponent_by_the_rule(rule, amax, element.largest, element.significant)
    assert byte.item() == e + 127 and encode.item() == 2.0**-e


def test_headroom_of_a_power_of_two_scale_goes_to_the_elements_and_back():
    x = gaussian(8, 64)
    plain, roomy = Scheme("e2m1", "e8m0", "floor", (1, 32)), Scheme("e2m1", "e8m0", "floor", (1, 32), headroom=4 / 3)
    q, r = quantize(x, plain, None, rows_form="both")[0], quantize(x, roomy, None, rows_form="both")[0]
    assert torch.equal(q.scales, r.scales) and roomy.factor == 4 / 3 and plain.factor == 1
    s = codecs.e8m0_decode(r.scales).repeat_interleave(32, 1)
    assert torch.equal(r.operand.float(), codecs.nearest_(x / s * 0.75, ELEMENTS["e2m1"]) * s)
    assert (x / s * 0.75).abs().max() < 6 <= (x / s).abs().max()  # nothing saturates with it, some did without
    values = dequantize(r.codes, r.scales, None, roomy, 64, torch.float32)
    assert torch.equal(values, r.operand.float() * (4 / 3))


@pytest.mark.parametrize("largest, headroom", [(448.0, 1.0), (256.0, 1.0), (255.99, 0.988125), (448.0, 17 / 16)])
@pytest.mark.parametrize("name", ["e2m1", "int4", "e4m3"])
def test_two_levels_for_any_range_headroom_and_element(largest, headroom, name):
    x = gaussian(16, 64) * 0.3
    scheme = Scheme(name, range=largest, headroom=headroom)
    q = quantize(x, scheme, None, rows_form="both")[0]
    top = ELEMENTS[name].largest / headroom
    amax = x.abs().max().double()
    block = x.view(16, 4, 16).abs().amax(2).double()
    ideal = block * largest / amax  # what the block scales round
    stored = codecs.e4m3_decode(q.scales).double()
    assert ((stored - ideal).abs() <= ideal * 2.0**-4 * 1.001).all() and stored.max() <= largest * 1.04
    values = dequantize(q.codes, q.scales, q.amax, scheme, 64, torch.float32)
    unit = (stored * amax / (top * largest)).repeat_interleave(16, 1)
    exact = codecs.nearest_((x.double() / unit).float(), ELEMENTS[name]).double() * unit
    off = (values.double() - exact).abs() > unit * 1e-4  # a value within rounding of a tie may go the other way
    assert off.float().mean() < 0.01 and scheme.divisor == top * largest


def test_float32_scales_divide():
    x = gaussian(130, 200)
    scheme = Scheme("e4m3", "float32", "amax", (128, 128))
    q = quantize(x, scheme, None, rows_form="both")[0]
    padded = torch.nn.functional.pad(x, (0, 56, 0, 126))
    amax = padded.view(2, 128, 2, 128).abs().amax((1, 3))
    assert torch.equal(q.scales, amax / 448) and q.scales.dtype == torch.float32
    unit = q.scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[:130, :200]
    assert torch.equal(q.operand, (x / unit).to(torch.float8_e4m3fn).float() * unit)


def test_a_tensor_scale_is_global_and_a_channel_scale_is_not():
    x = gaussian(20, 48)
    tensor, channel = Scheme("e4m3", "float32", "amax", (0, 0)), Scheme("e4m3", "float32", "amax", (1, 0))
    q = quantize(x, tensor, tensor, rows_form="both", columns_form="both")
    assert q[0].amax == x.abs().max() and q[0].operand.dtype == torch.bfloat16
    assert torch.equal(q[0].operand.float(), (x / (x.abs().max() / 448)).to(torch.float8_e4m3fn).float())
    assert torch.equal(q[0].operand, q[1].operand.t())
    given_amax = torch.tensor(1.0)  # from a history: what lies above saturates
    held = quantize(x, Scheme("e4m3", "float32", "delayed", (0, 0)), None, amax_rows=given_amax, rows_form="both")[0]
    assert held.amax == 1 and held.operand.abs().max() == 448 and (x.abs() > 1).any()
    c = quantize(x, channel, None, rows_form="both")[0]
    assert c.amax is None and torch.equal(c.scales[:, 0], x.abs().amax(1) / 448)


def test_outer_blocks_scale_each_by_its_own_amax():
    x = gaussian(6, 256) * torch.tensor([1.0, 1e-6]).repeat_interleave(128)
    scheme = Scheme(outer=(1, 128))
    q = quantize(x, scheme, None, rows_form="both")[0]
    assert torch.equal(q.outer, x.view(6, 2, 128).abs().amax(2)) and q.amax is None and q.operand.dtype == torch.float32
    for part in range(2):  # each outer block is NVFP4 of a tensor of its own
        for row in range(6):
            cut = x[row : row + 1, 128 * part :][:, :128].contiguous()
            alone = quantize(cut, Scheme(), None, rows_form="both")[0]
            own = q.codes[row : row + 1, 64 * part :][:, :64], q.scales[row : row + 1, 8 * part :][:, :8]
            assert torch.equal(own[0], alone.codes) and torch.equal(own[1], alone.scales)
            values = dequantize(alone.codes, alone.scales, alone.amax, Scheme(), 128, torch.float32)
            assert torch.equal(q.operand[row : row + 1, 128 * part :][:, :128], values)


def test_clip_takes_the_standard_deviation_in_place_of_amax():
    x = gaussian(64, 32)
    x[0, 0] = 100.0
    scheme = Scheme("e2m1", "e8m0", "down", (1, 32), clip=2.92247856, masked=True)
    q = quantize(x, scheme, None, rows_form="both")[0]
    spread = 2.92247856 * x.double().std(dim=1, correction=0)
    assert torch.equal(q.scales[:, 0].int() - 127, (spread / 6).log2().floor().int())
    s = codecs.e8m0_decode(q.scales)
    assert torch.equal(codecs.unpack_bits(q.mask, 32), x.abs() <= 6 * s)
    assert not codecs.unpack_bits(q.mask, 32)[0, 0] and q.operand[0, 0] == 6 * s[0]


def schemes():
    for name in ELEMENTS:
        for scale, rules in RULES.items():
            for rule, block in zip(rules, ((1, 16), (16, 16), (1, 32), (0, 0), (1, 0)), strict=False):
                yield Scheme(name, scale, rule, block)
    for block in ((1, 16), (16, 16)):
        yield from (Scheme(select=error, range=256.0, block=block) for error in ("mse", "mae", "max"))
    for size in (4, 16, 32, 64, 128):
        yield from (
            Scheme(hadamard=size, sign_mask=mask, rounding="stochastic") for mask in (0, sign_mask(size), "step")
        )
    yield Scheme(rounding="stochastic_scale", hadamard=64, sign_mask="step", range=255.99, headroom=0.988125)
    yield Scheme(outer=(1, 128), hadamard=16, rounding="stochastic")
    yield Scheme(
        scale="e8m0", rule="down", block=(1, 32), hadamard=32, sign_mask=0, clip=2.9, masked=True, headroom=1.25
    )


@pytest.mark.parametrize("scheme", list(schemes()), ids=str)
def test_all_forms_of_a_scheme_agree(scheme):
    assert Scheme.parse(str(scheme)) == scheme
    x = gaussian(37, 150) * gaussian(37, 150).exp()
    options = dict(seed=SEED, row_stream=0, column_stream=0, rows_form="both", columns_form="both")
    rows, columns = quantize(x, scheme, scheme, **options)
    for q in (rows, columns):
        width = q.operand.shape[1]
        assert q.operand.dtype == (torch.bfloat16 if scheme.exact_in_bf16 else torch.float32)
        assert torch.equal(decode(q.codes, q.scales, scheme, width, q.outer), q.operand)
        values = dequantize(q.codes, q.scales, q.amax, scheme, width, torch.float32, q.outer).double()
        scale = 1.0 if q.amax is None else q.amax.double() / scheme.divisor
        torch.testing.assert_close(values, q.operand.double() * scale * scheme.factor, rtol=3e-7, atol=0)
    if scheme.rounding == "nearest":
        turned = quantize(x.t().contiguous(), scheme, None, **options)[0]
        assert torch.equal(turned.operand, columns.operand) and torch.equal(turned.codes, columns.codes)
        assert torch.equal(turned.scales, columns.scales)
    if scheme.rule != "amax" or scheme.element != "e5m2":  # whose E4M3 scale underflows: amax / 57344
        if not scheme.hadamard:
            assert ((values.t() - x).norm() / x.norm()) < 0.6
    assert not quantize(torch.zeros(5, 40), scheme, None, **options)[0].operand.any()
    for bad in (float("nan"), float("inf")):
        y = x.clone()
        y[3, 7] = bad
        amax = torch.tensor(float("nan")) if scheme.rule == "delayed" else None
        q = quantize(y, scheme, None, amax_rows=amax, **options)[0]
        assert dequantize(q.codes, q.scales, q.amax, scheme, 150, torch.float32, q.outer)[3].isnan().any()


def test_text_holds_every_field():
    hot = Scheme("e4m3", "e8m0", "up", (1, 32))
    full = Scheme(
        "int8", "float32", "delayed", (0, 0), "stochastic8", 128, "step", (1, 128), 255.99, 4 / 3, "mae", 2.5, True,
        True, Split("channels", 0.1, (501, 550), hot), 16,
    )  # fmt: skip
    assert Scheme.parse(str(full)) == full
    assert Scheme.parse(str(Scheme(split=Split("mean")))).split == Split("mean")
    assert str(Scheme(hadamard=16)) == "e2m1:e4m3:nvfp4:1x16:nearest:h16:D7E8"
    assert full.in_triton and Scheme(select="mse", range=256.0).in_triton
    assert not Scheme(scale="float32", rule="amax", block=(1, 0), hadamard=16).in_triton
