"""The reference quantizer against an element-by-element oracle in numpy, and against what users ran into elsewhere."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from quantize_oracle import both_axes, gaussian, oracle, same

from nvfp4_kernels.reference import quantize as reference
from nvfp4_kernels.reference.codecs import unpack
from nvfp4_kernels.reference.hadamard import rotate
from nvfp4_kernels.reference.philox import random16
from nvfp4_kernels.reference.quantize import FLT_MAX, decode, dequantize, global_amax, quantize
from nvfp4_kernels.scheme import Scheme

ROW, TILE, STOCHASTIC = Scheme(), Scheme(block=(16, 16)), Scheme(rounding="stochastic")
FLOOR, CEIL = (Scheme(scale="e8m0", rule=rule, block=(1, 32)) for rule in ("floor", "ceil"))
SCHEMES = [
    ROW, TILE, STOCHASTIC, FLOOR, CEIL, Scheme(rounding="stochastic8"), Scheme(hadamard=16),
    Scheme(block=(16, 16), rounding="stochastic"), Scheme(rounding="stochastic", hadamard=16),
    Scheme(scale="e8m0", rule="floor", block=(1, 32), rounding="stochastic8"),
    Scheme(scale="e8m0", rule="ceil", block=(1, 32), hadamard=16),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@given(
    scheme=st.sampled_from(SCHEMES),
    height=st.integers(1, 35),
    width=st.integers(1, 35),
    seed=st.integers(0, 2**32 - 1),
    spread=st.sampled_from([0.0, 1.0, 8.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    layout=st.sampled_from(["plain", "transposed", "strided"]),
)
@settings(max_examples=150, deadline=None)
def test_against_the_oracle(scheme, height, width, seed, spread, dtype, layout):
    """Both forms: codes, scales, shapes; the operand is the decoded codes; each form alone equals the two together."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(height, width, generator=generator)
    x = x * torch.exp(spread * torch.randn(height, width, generator=generator)).clamp(1e-7, 1e3)
    x = (x * (torch.rand(height, width, generator=generator) > 0.1)).to(dtype)
    if layout == "transposed":
        x = x.t().contiguous().t()
    elif layout == "strided":
        x = torch.stack((x, x), dim=2)[:, :, 0]
    key = torch.tensor(seed)
    results = both_axes(x, scheme, seed=key, row_stream=4, column_stream=5)
    for axis, (result, source) in enumerate(results):
        rows, columns = source.shape
        padded = columns + -columns % scheme.group
        values = torch.zeros(rows, padded)
        values[:, :columns] = source.to(torch.float32)
        if scheme.hadamard:
            values = rotate(values, 16, scheme.sign_mask, 1).to(torch.float32)
        draws = random16(key, 4 + axis, (height + 32) * width + 32).tolist()
        codes, scales = oracle(
            values.numpy(), scheme, lambda r, c, axis=axis, draws=draws: draws[c * width + r if axis else r * width + c]
        )
        packed = torch.tensor(codes, dtype=torch.uint8)
        assert torch.equal(result.codes, packed[:, 0::2] | packed[:, 1::2] << 4)
        assert result.scales.tolist() == scales
        length = padded if scheme.hadamard else columns
        assert result.operand.shape == (rows, length) and result.operand.dtype == torch.bfloat16
        assert same([decode(result.codes, result.scales, scheme, length)], [result.operand])
    for form in ("packed", "decoded"):
        options = dict(seed=key, row_stream=4, column_stream=5, rows_form=form, columns_form=form)
        alone = [quantize(x, scheme, None, **options)[0], quantize(x, None, scheme, **options)[1]]
        for single, (result, _) in zip(alone, results, strict=True):
            assert same(single, (*result[:2], None) if form == "packed" else (None, None, result.operand))


# Numbers


def test_an_amax_that_is_too_small_saturates():
    """Case 1: the scale of the loud block stops at 448, the zero block's is 0; neither is NaN."""
    x = torch.zeros(1, 32)
    x[0, 16:] = 1e-3
    result, _ = quantize(x, ROW, None, amax_rows=torch.tensor(1e-4), rows_form="both")
    assert result.scales.tolist() == [[0x00, 0x7E]]
    assert result.operand[0].tolist() == [0.0] * 16 + [6 * 448.0] * 16
    result, _ = quantize(torch.full((1, 16), 12.0), ROW, None, amax_rows=torch.tensor(0.0), rows_form="both")
    assert (result.operand == 12).all()  # amax 0 means S_enc 1


@pytest.mark.parametrize("scheme", [ROW, TILE, FLOOR, CEIL, STOCHASTIC, Scheme(hadamard=16)], ids=str)
def test_zeros_stay_zeros(scheme):
    """Case 2, and what has no elements."""
    for shape in ((16, 32), (0, 32), (5, 0), (0, 0)):
        x = torch.zeros(shape)
        amax = global_amax(x, scheme, scheme)
        for (result, source), top in zip(both_axes(x, scheme, seed=torch.tensor(0)), amax, strict=True):
            assert top is None or top == 0
            values = dequantize(result.codes, result.scales, top, scheme, source.shape[1], torch.float32)
            assert values.shape == source.shape and (values == 0).all() and (result.operand == 0).all()


@pytest.mark.parametrize("scheme", [ROW, TILE], ids=str)
def test_any_power_of_two_quantizes_alike(scheme):
    """Case 2: the same codes and the same relative error from 2^-120 (lifted by 2^64) to 2^124 (close to overflow)."""
    x = gaussian(32, 64).clamp(-3.9, 3.9)
    base, _ = quantize(x, scheme, None)
    amax, _ = global_amax(x, scheme, None)
    values = dequantize(base.codes, base.scales, amax, scheme, 64, torch.float32)
    for power in (-120, -100, -90, -20, 1, 60, 118, 124):
        factor = 2.0**power
        result, _ = quantize(x * factor, scheme, None)
        assert same(result, base), power
        top, _ = global_amax(x * factor, scheme, None)
        scaled = dequantize(result.codes, result.scales, top, scheme, 64, torch.float32)
        assert scaled.isfinite().all()
        assert torch.allclose(scaled.to(torch.float64) / factor, values.to(torch.float64), rtol=1e-6, atol=0), power


def test_subnormal_input_and_the_largest_floats():
    x = gaussian(16, 32) * 1e-38
    assert (x.abs() < 2.0**-126).any()
    amax, _ = global_amax(x, ROW, None)
    result, _ = quantize(x, ROW, None)
    values = dequantize(result.codes, result.scales, amax, ROW, 32, torch.float32)
    error = (values.double() - x.double()).norm() / x.double().norm()
    assert 0.05 < error < 0.15  # about 0.095 on Gaussian data, at any scale
    x = torch.full((1, 16), float(FLT_MAX))
    for scheme in (ROW, TILE, FLOOR):
        result, _ = quantize(x, scheme, None)
        amax, _ = global_amax(x, scheme, None)
        values = dequantize(result.codes, result.scales, amax, scheme, 16, torch.float32)
        assert values.isfinite().all() and (values > 0.7 * x).all()


def test_a_block_that_underflows():
    """Case 3: beside 1e4, a block of 1e-4 gets scale 0: finite, its error is its amax, and it can be counted."""
    x = torch.full((1, 32), 1e-4)
    x[0, 0] = 1e4
    result, _ = quantize(x, ROW, None, rows_form="both")
    amax, _ = global_amax(x, ROW, None)
    values = dequantize(result.codes, result.scales, amax, ROW, 32, torch.float32)
    assert values.isfinite().all() and result.operand.isfinite().all()
    assert ((values - x)[0, 16:].abs() <= 1e-4).all() and values[0, 0] == pytest.approx(1e4, rel=1e-6)
    assert (result.scales == 0).sum() == 1  # the share of such blocks, as the bytes tell it


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("scheme", [ROW, TILE, STOCHASTIC, FLOOR, CEIL, Scheme(hadamard=16)], ids=str)
def test_non_finite_input_is_nan(scheme, poison):
    """Case 4. NVFP4: all of the tensor, for its global scale is NaN. MXFP4: the block."""
    x = gaussian(32, 64)
    x[17, 40] = poison
    tops = global_amax(x, scheme, scheme)
    for (result, source), top in zip(both_axes(x, scheme, seed=torch.tensor(1)), tops, strict=True):
        values = dequantize(result.codes, result.scales, top, scheme, source.shape[1], torch.float32)
        assert same([values.isnan()], [result.operand.isnan()])
        row, column = (17, 40) if source is x else (40, 17)
        if scheme.has_global_scale:
            assert top.isnan() and (result.scales == 0x7F).all() and (result.codes == 0).all()
            assert result.operand.isnan().all()
        else:
            block = slice(column // 32 * 32, column // 32 * 32 + 32)
            assert top is None and result.scales[row, column // 32] == 0xFF
            assert (unpack(result.codes)[row, block].view(torch.int16) == 0).all()
            assert result.operand[row, block].isnan().all() and result.operand.isnan().sum() == 32


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_non_finite_input_under_a_finite_amax_is_nan(poison):
    """An amax handed in may come from elsewhere: the poisoned block is NaN all the same."""
    x = gaussian(2, 32)
    x[1, 20] = poison
    result, _ = quantize(x, ROW, None, amax_rows=torch.tensor(4.0), rows_form="both")
    assert result.operand[1, 16:].isnan().all() and result.operand.isnan().sum() == 16
    assert result.scales[1, 1] == 0x7F and (result.codes[1, 8:] == 0).all()
    everywhere, _ = quantize(gaussian(2, 32), ROW, None, amax_rows=torch.tensor(float("inf")), rows_form="both")
    assert everywhere.operand.isnan().all()


def test_ties_with_the_scale_pinned_to_one():
    """Case 5. amax 2688 makes S_enc 1; the 6 in each block makes its scale 1."""
    x = torch.tensor([[6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5]]).repeat(1, 4)
    want = torch.tensor([[6.0, 0, 1, 1, 2, 2, 4, 4]]).repeat(1, 4)
    for scheme in (ROW, TILE, FLOOR, CEIL):
        amax = torch.tensor(2688.0) if scheme.has_global_scale else None
        result, _ = quantize(x, scheme, None, amax_rows=amax, rows_form="both")
        assert torch.equal(result.operand.to(torch.float32), want)


def test_mx_scales_at_powers_of_two():
    """floor(log2 amax) - 2 and ceil(log2(amax / 6)) at and beside the places where a float log2 slips."""
    up = [torch.tensor(value).nextafter(torch.tensor(1e38)).item() for value in (4.0, 6.0)]
    down = [torch.tensor(value).nextafter(torch.tensor(0.0)).item() for value in (4.0, 6.0)]
    x = torch.zeros(9, 32)
    x[:, 3] = torch.tensor([4.0, up[0], down[0], 6.0, up[1], down[1], 2.0**-130, 0.0, 2.0**127])
    scales = {scheme: quantize(x, scheme, None)[0].scales.flatten().tolist() for scheme in (FLOOR, CEIL)}
    assert scales[FLOOR] == [127, 127, 126, 127, 127, 127, 0, 0, 252]
    # 1e-4 / 6 = 2^-15.87: the least amax of `ceil` has exponent -15.
    assert scales[CEIL] == [127, 127, 127, 127, 128, 127, 112, 112, 252]


# Shapes and memory


@given(height=st.integers(1, 40), width=st.integers(1, 40), extra=st.integers(1, 40), scheme=st.sampled_from(SCHEMES))
@settings(max_examples=60, deadline=None)
def test_appended_zero_rows_change_nothing(height, width, extra, scheme):
    """Case 9. Exact for the row form; for the column form whole new blocks appear, the old ones are as they were."""
    x = gaussian(height, width, seed=height)
    longer = torch.cat((x, torch.zeros(extra, width)))
    seed = torch.tensor(2)
    assert same([t.view(1) for t in global_amax(x, ROW, Scheme(hadamard=16))],
                [t.view(1) for t in global_amax(longer, ROW, Scheme(hadamard=16))])  # fmt: skip
    (rows, _), (columns, _) = both_axes(x, scheme, seed=seed)
    (more_rows, _), (more_columns, _) = both_axes(longer, scheme, seed=seed)
    assert same(rows, (more_rows.codes[:height], more_rows.scales[: len(rows.scales)], more_rows.operand[:height]))
    parts = [part[:, : old.shape[1]] for part, old in zip(more_columns[:3], columns[:3], strict=True)]
    assert same(columns, parts)
    assert (more_columns.operand[:, columns.operand.shape[1] :] == 0).all()


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_rounding_in_pieces_changes_nothing(scheme, monkeypatch):
    x = gaussian(70, 41)
    want = both_axes(x, scheme, seed=torch.tensor(0))
    monkeypatch.setattr(reference, "ELEMENTS_AT_ONCE", 1000)
    got = both_axes(x, scheme, seed=torch.tensor(0))
    assert all(same(a, b) for (a, _), (b, _) in zip(got, want, strict=True))


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_fresh_memory_is_never_read(scheme, monkeypatch):
    """Case 10: whatever torch.empty returns, all of it is overwritten."""
    x = gaussian(5, 41)
    want = [result for result, _ in both_axes(x, scheme, seed=torch.tensor(0))]

    def poisoned(fresh):
        def call(*args, **kwargs):
            out = fresh(*args, **kwargs)
            return out.fill_(float("nan") if out.is_floating_point() else 127)

        return call

    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, poisoned(getattr(torch, name)))
    got = [result for result, _ in both_axes(x, scheme, seed=torch.tensor(0))]
    assert all(same(a, b) for a, b in zip(got, want, strict=True))
    for result in got:
        width = result.operand.shape[1]
        assert same([decode(result.codes, result.scales, scheme, width)], [result.operand])


def test_stride_zero_and_input_left_alone():
    """Case 16: the gradient of a sum is one number seen everywhere."""
    x = torch.tensor(0.3).expand(20, 33)
    assert all(same(a, b) for (a, _), (b, _) in zip(both_axes(x, ROW), both_axes(x.contiguous(), ROW), strict=True))
    x = gaussian(32, 32, scale=1e-37)
    before = x.clone()
    both_axes(x, TILE)
    assert torch.equal(x, before)


def test_a_tile_is_its_own_transpose():
    x = gaussian(33, 50)
    (rows, _), (columns, _) = both_axes(x, TILE)
    assert same([rows.operand], [columns.operand.t()]) and torch.equal(rows.scales, columns.scales.t())


def test_faults_of_the_caller():
    x = gaussian(4, 16)
    with pytest.raises(ValueError, match="two dimensions"):
        quantize(x[0], ROW, None)
    with pytest.raises(ValueError, match="float64"):
        global_amax(x.double(), ROW, None)
    with pytest.raises(ValueError, match="seed"):
        quantize(x, STOCHASTIC, None)
    with pytest.raises(ValueError, match="'codes'"):
        quantize(x, ROW, None, rows_form="codes")
