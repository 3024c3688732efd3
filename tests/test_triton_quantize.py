"""The Triton quantize kernels give the reference's bits (here in Triton's interpreter, on a GPU where there is one)."""

import pytest
import torch

from nvfp4_kernels.reference import quantize as reference
from nvfp4_kernels.scheme import Scheme

pytest.importorskip("triton")
from nvfp4_kernels.triton import codecs, tiles  # noqa: E402
from nvfp4_kernels.triton import quantize as kernels  # noqa: E402

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
pytestmark = [
    pytest.mark.skipif(not (GPU or codecs.INTERPRETED.value), reason="no GPU, and triton was imported uninterpreted"),
    pytest.mark.filterwarnings("ignore:(divide by zero|invalid value|overflow):RuntimeWarning"),
]
SR, SR8 = "stochastic", "stochastic8"
MX = dict(scale="e8m0", block=(1, 32))
BF16 = torch.bfloat16


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def assert_same_bits(expected: torch.Tensor | None, found: torch.Tensor | None) -> None:
    if expected is None or found is None:
        assert expected is None and found is None
        return
    found = found.cpu()
    assert (expected.shape, expected.dtype) == (found.shape, found.dtype)
    if expected.is_floating_point():
        integer = {BF16: torch.int16, torch.float32: torch.int32}[expected.dtype]
        assert torch.equal(expected.isnan(), found.isnan())
        expected, found = (t.nan_to_num().contiguous().view(integer) for t in (expected, found))
    assert torch.equal(expected, found)


def check(x: torch.Tensor, rows: Scheme | None, columns: Scheme | None, form: str = "both", streams=(0, 1)):
    """Amax, codes, scales, operands and the decoded codes, of both forms."""
    options = dict(row_stream=streams[0], column_stream=streams[1], rows_form=form, columns_form=form)
    seed = torch.tensor(2**33 + 17)
    moved = x.to(DEVICE) if x.is_contiguous() else torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).copy_(x)
    moved = moved.to(DEVICE)
    amax = reference.global_amax(x, rows, columns)
    found_amax = kernels.global_amax(moved, rows, columns)
    expected = reference.quantize(x, rows, columns, amax_rows=amax[0], amax_columns=amax[1], seed=seed, **options)
    found = kernels.quantize(
        moved, rows, columns, amax_rows=found_amax[0], amax_columns=found_amax[1], seed=seed.to(DEVICE), **options
    )
    for index, scheme in enumerate((rows, columns)):
        assert_same_bits(amax[index], found_amax[index])
        if scheme is None:
            assert found[index] is None
            continue
        for want, got in zip(expected[index], found[index], strict=True):
            assert_same_bits(want, got)
        if form == "both":
            q = found[index]
            width = expected[index].operand.shape[1]
            assert_same_bits(expected[index].operand, kernels.decode(q.codes, q.scales, scheme, width))
    return found


SCHEMES = {
    "1x16": (Scheme(), Scheme()),
    "16x16": (Scheme(block=(16, 16)), Scheme(block=(16, 16))),
    "stochastic, columns rotated": (Scheme(rounding=SR), Scheme(rounding=SR, hadamard=16)),
    "rows rotated, stochastic8": (Scheme(rounding=SR8, hadamard=16), Scheme(rounding=SR8, block=(16, 16))),
    "mx": (Scheme(rule="floor", **MX), Scheme(rule="ceil", rounding=SR, **MX)),
    "mx rotated": (Scheme(rule="ceil", **MX), Scheme(rule="floor", rounding=SR8, hadamard=16, **MX)),
}


@pytest.mark.parametrize("shape", [(48, 96), (33, 50)], ids=str)
@pytest.mark.parametrize("schemes", SCHEMES.values(), ids=SCHEMES.keys())
def test_both_forms_equal_the_reference(schemes, shape):
    check((normal(*shape) * torch.exp2(8 * normal(*shape, seed=1)).clamp(max=1e4)).to(BF16), *schemes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_input_types(dtype):
    check(normal(20, 40).to(dtype), Scheme(), Scheme(hadamard=16))


@pytest.mark.parametrize("form", ["packed", "decoded"])
def test_one_form_alone(form):
    rows, _ = check(normal(16, 48).to(BF16), Scheme(rounding=SR), None, form)
    assert (rows.operand is None) == (form == "packed") == (rows.codes is not None) == (rows.scales is not None)
    check(normal(16, 48).to(BF16), None, Scheme(rounding=SR, hadamard=16), form)


def test_equal_streams_share_their_draws():
    rows, columns = check(normal(32, 64).to(BF16), Scheme(rounding=SR), Scheme(rounding=SR), streams=(4, 4))
    other, _ = check(normal(32, 64).to(BF16), Scheme(rounding=SR), None, streams=(5, 4))
    assert not torch.equal(rows.codes, other.codes)  # the stream is part of the key


def test_a_tile_in_the_middle_draws_as_in_the_reference(monkeypatch):
    for kind, tile in tiles.TABLE.items():
        monkeypatch.setitem(tiles.TABLE, kind, tile._replace(columns=64))
    monkeypatch.setattr(tiles, "LEAST_WARPS", 1)  # one program makes all tiles of a column
    check(normal(48, 200).to(BF16), Scheme(rounding=SR), Scheme(rounding=SR, hadamard=16), streams=(0, 0))


@pytest.mark.parametrize("scale", [1e-36, 1e-39, 8e37, 0.0], ids=str)
def test_ends_of_the_float_range(scale):
    x = normal(32, 32).clamp(-4, 4) * scale
    check(x, Scheme(), Scheme(hadamard=16) if scale < 1 else Scheme())


@pytest.mark.parametrize("value", ["nan", "inf"])
@pytest.mark.parametrize("schemes", [SCHEMES["1x16"], SCHEMES["mx"]], ids=["nvfp4", "mx"])
def test_non_finite_input_is_nan_and_never_a_number(schemes, value):
    x = normal(32, 64).to(BF16)
    x[5, 37] = float(value)
    rows, columns = check(x, *schemes)
    assert rows.operand[5, 37].isnan() and columns.operand[37, 5].isnan()
    if schemes[0].has_global_scale:
        assert rows.operand.isnan().all() and (rows.scales == 0x7F).all() and (rows.codes == 0).all()


def test_ties_go_to_the_even_code():
    positive = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    values = torch.tensor([*positive, 6.0, *(-value for value in positive), -0.0])
    x = values.repeat(16, 1).to(DEVICE)
    amax = torch.tensor(6.0 * 448, device=DEVICE)  # S_enc is 1, the block's scale 1
    rows, _ = kernels.quantize(x, Scheme(), None, amax_rows=amax, rows_form="both")
    want = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0, -0.0, -1.0, -1.0, -2.0, -2.0, -4.0, -4.0, -0.0]
    assert rows.operand[3].tolist() == want
    low, high = rows.codes[3] & 15, rows.codes[3] >> 4
    assert torch.stack((low, high), 1).flatten().tolist() == [0, 2, 2, 4, 4, 6, 6, 7, 8, 10, 10, 12, 12, 14, 14, 8]


def test_strided_input():
    base = normal(40, 80).to(BF16)
    for view in (base[1:33, 3:67], base.T, base[::2], base[:, ::2]):
        check(view, Scheme(), Scheme(rounding=SR))


def test_column_form_keeps_the_layout_of_x():
    _, columns = kernels.quantize(normal(32, 48).to(BF16).to(DEVICE), None, Scheme(), columns_form="both")
    assert all(t.T.is_contiguous() for t in (columns.codes, columns.scales, columns.operand))


@pytest.mark.parametrize("shape", [(0, 32), (16, 0)], ids=str)
def test_empty(shape):
    rows, columns = kernels.quantize(torch.empty(shape, device=DEVICE), Scheme(), Scheme(), rows_form="both")
    assert rows.operand.shape == shape and columns.codes.shape[0] == shape[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(x=torch.zeros(3, dtype=torch.int32)), "two dimensions"),
        (dict(x=torch.zeros(3, 3, dtype=torch.float64)), "float64"),
        (dict(rows_form="half"), "form"),
        (dict(rows=Scheme(rounding=SR)), "seed"),
    ],
)
def test_faults_are_named(arguments, message):
    arguments = dict(x=torch.zeros(16, 16), rows=Scheme(), columns=None) | arguments
    with pytest.raises(ValueError, match=message):
        kernels.quantize(arguments.pop("x").to(DEVICE), **arguments)


@pytest.mark.parametrize("origin", [(5, 16, 64), (3, 7, 50)], ids=["by eights", "odd"])
def test_a_part_of_a_tensor_draws_as_the_whole_does(origin):
    scheme, seed = Scheme(rounding=SR), torch.tensor(11)
    x = normal(16, 32).to(BF16)
    options = dict(seed=seed, row_stream=0, column_stream=0, origin=origin, rows_form="both", columns_form="both")
    want = reference.quantize(x, scheme, scheme, **options)
    found = kernels.quantize(x.to(DEVICE), scheme, scheme, **{**options, "seed": seed.to(DEVICE)})
    for expected, got in zip(want, found, strict=True):
        for a, b in zip(expected, got, strict=True):
            assert_same_bits(a, b)
    assert not torch.equal(want[0].codes, reference.quantize(x, scheme, None, seed=seed)[0].codes)
