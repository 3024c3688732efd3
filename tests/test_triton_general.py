"""The general Triton kernel gives the reference's bits for every scheme that the fused one has not."""

import pytest
import torch

from nvfp4_kernels.reference import quantize as reference
from nvfp4_kernels.scheme import PER_STEP, Scheme, sign_mask

pytest.importorskip("triton")
from test_triton_quantize import DEVICE, assert_same_bits, normal, pytestmark  # noqa: E402, F401

from nvfp4_kernels.triton import quantize as kernels  # noqa: E402
from nvfp4_kernels.triton.general import fused  # noqa: E402

SR = "stochastic"
MX = dict(scale="e8m0", block=(1, 32))
FP8 = dict(element="e4m3", scale="float32", rule="amax")
EDEN = dict(rounding="stochastic_scale", hadamard=128, sign_mask=PER_STEP, range=255.99, headroom=0.988125)
SCHEMES = {
    "four over six, mse": Scheme(select="mse", range=256.0),
    "four over six, mae, 16x16": Scheme(select="mae", range=256.0, block=(16, 16)),
    "four over six, max, stochastic": Scheme(select="max", range=256.0, rounding=SR),
    "MS-EDEN": Scheme(**EDEN),
    "MS-EDEN, rotation of 32": Scheme(**{**EDEN, "hadamard": 32}),
    "outer 1x128, rotated by drawn signs, stochastic": Scheme(
        outer=(1, 128), rounding=SR, hadamard=16, sign_mask=PER_STEP
    ),
    "outer 1x128": Scheme(outer=(1, 128)),
    "QuEST": Scheme(rule="down", clip=2.92247856, masked=True, hadamard=32, sign_mask=0, **MX),
    "tseng": Scheme(rule="floor", headroom=4 / 3, rounding=SR, hadamard=64, sign_mask=PER_STEP, **MX),
    "mxfp4 up": Scheme(rule="up", **MX),
    "mxfp4 even, stochastic8": Scheme(rule="even", rounding="stochastic8", **MX),
    "mxfp8": Scheme(element="e4m3", rule="up", **MX),
    "mxfp8 e5m2, ceil": Scheme(element="e5m2", rule="ceil", **MX),
    "mxfp6 e3m2, stochastic": Scheme(element="e3m2", rule="floor", rounding=SR, **MX),
    "mxfp6 e2m3, even": Scheme(element="e2m3", rule="even", **MX),
    "fp8 1x128": Scheme(block=(1, 128), **FP8),
    "fp8 128x128": Scheme(block=(128, 128), **FP8),
    "fp8 tensor": Scheme(block=(0, 0), **FP8),
    "fp8 channel, stochastic": Scheme(block=(1, 0), rounding=SR, **FP8),
    "int4 1x16, rotated": Scheme(element="int4", scale="float32", rule="amax", hadamard=16),
    "int8 1x128, stochastic": Scheme(element="int8", scale="float32", rule="amax", block=(1, 128), rounding=SR),
    "nvint4": Scheme(element="int4", rounding=SR),
    "e2m1, E4M3 scale alone": Scheme(rule="amax"),
    "e2m1, E8M0 by 16": Scheme(scale="e8m0", rule="up", block=(1, 16)),
    "rotated by 128 fixed signs": Scheme(hadamard=128, sign_mask=sign_mask(128), rounding=SR),
}


def compare(x: torch.Tensor, scheme: Scheme, columns: bool, form: str = "both", origin=None) -> None:
    seed = torch.tensor(2**34 + 99)
    pair = (None, scheme) if columns else (scheme, None)
    options = dict(row_stream=3, column_stream=3, rows_form=form, columns_form=form, origin=origin)
    amax = reference.global_amax(x, *pair, seed)[columns]
    found_amax = kernels.global_amax(x.to(DEVICE), *pair, seed.to(DEVICE))[columns]
    assert_same_bits(amax, found_amax)
    given = {("amax_columns" if columns else "amax_rows"): amax}
    want = reference.quantize(x, *pair, seed=seed, **given, **options)[columns]
    given = {name: value if value is None else value.to(DEVICE) for name, value in given.items()}
    found = kernels.quantize(x.to(DEVICE), *pair, seed=seed.to(DEVICE), **given, **options)[columns]
    for a, b in zip(want, found, strict=True):
        assert_same_bits(a, b)
    if form == "both":
        width = want.operand.shape[1]
        decoded = kernels.decode(found.codes, found.scales, scheme, width, found.outer)
        assert_same_bits(reference.decode(want.codes, want.scales, scheme, width, want.outer), decoded)


@pytest.mark.parametrize("columns", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES.keys())
def test_equals_the_reference(scheme, columns):
    assert not fused(scheme)
    x = normal(40, 136) * torch.exp2(6 * normal(40, 136, seed=1)).clamp(max=1e4)
    x[8:] *= torch.exp2(-torch.arange(32) / 1.5)[:, None]  # down to where block scales underflow
    x[3, 5:9] = -0.0
    x[:, 32:48] = 0.0
    compare(x.bfloat16(), scheme, columns)


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES.keys())
def test_finite_values_stay_finite(scheme):
    """Rows that fade until their block scales underflow, some of them inside a rotation's group."""
    x = normal(160, 256) * torch.exp2(-torch.arange(160) / 3.0)[:, None]
    for factor in (1.0, 1e-30):
        q = reference.quantize(x * factor, scheme, None, seed=torch.tensor(5), rows_form="both")[0]
        assert q.operand.isfinite().all()
        assert reference.dequantize(q.codes, q.scales, q.amax, scheme, 256, torch.float32, q.outer).isfinite().all()


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES.keys())
def test_values_at_the_edges(scheme):
    """Ties, subnormals, a NaN and an Inf, in float32."""
    x = torch.arange(-64, 64).float().div(8).repeat(17, 1)
    x[1] *= 1e-38
    x[2] *= 1e-42
    x[3] *= 1e36
    compare(x, scheme, False)
    x[5, 70], x[9, 3] = float("nan"), float("inf")
    compare(x, scheme, False)


@pytest.mark.parametrize("columns", [False, True], ids=["rows", "columns"])
def test_a_part_of_a_tensor_draws_as_the_whole_does(columns):
    compare(normal(16, 32).bfloat16(), SCHEMES["nvint4"], columns, origin=(5, 16, 64))
    compare(normal(16, 32).bfloat16(), SCHEMES["nvint4"], columns, origin=(3, 7, 50))


@pytest.mark.parametrize("form", ["packed", "decoded"])
def test_one_form_alone(form):
    for name in ("MS-EDEN", "fp8 channel, stochastic", "QuEST"):
        compare(normal(16, 128).bfloat16(), SCHEMES[name], True, form)


def test_both_forms_by_different_kernels():
    x, seed = normal(32, 64).bfloat16(), torch.tensor(5)
    rows, columns = Scheme(), Scheme(select="mse", range=256.0)
    want = reference.quantize(x, rows, columns, seed=seed, rows_form="both", columns_form="both")
    found = kernels.quantize(x.to(DEVICE), rows, columns, seed=seed.to(DEVICE), rows_form="both", columns_form="both")
    for expected, got in zip(want, found, strict=True):
        for a, b in zip(expected, got, strict=True):
            assert_same_bits(a, b)
