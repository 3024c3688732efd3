"""The native FP4 product and its operands: the same numbers as decoding and multiplying, whatever the layout.

In Triton's interpreter, so the instruction itself is not what is tested (test_kernel_audit.py reads that from PTX);
addresses, swizzled scales, padding, transposes and the epilogue are. Block scales are powers of two here where sums are
compared bit for bit: every partial sum is then exact in float32, in any order.
"""

import pytest
import torch

from nvfp4_kernels.fp4 import VECTOR, fp4_format
from nvfp4_kernels.reference import codecs as reference_codecs
from nvfp4_kernels.reference.decode import decode
from nvfp4_kernels.reference.swizzle import swizzle, unswizzle
from nvfp4_kernels.scheme import Scheme

pytest.importorskip("triton")
from nvfp4_kernels.triton import codecs, native_check, native_matmul  # noqa: E402
from nvfp4_kernels.triton.native_operands import NativeOperand, native_operand, swizzled  # noqa: E402

GPU = torch.cuda.is_available()
BLACKWELL = GPU and torch.cuda.get_device_capability()[0] in native_matmul.TILES
DEVICE = "cuda" if GPU else "cpu"
runs = pytest.mark.skipif(not (GPU or codecs.INTERPRETED.value), reason="no GPU, and triton was imported uninterpreted")
multiplies = pytest.mark.skipif(GPU and not BLACKWELL, reason="this GPU has no FP4 tensor cores")
pytestmark = [runs, pytest.mark.filterwarnings("ignore:(divide by zero|invalid value|overflow):RuntimeWarning")]

ROWS, SQUARE, MX = Scheme(), Scheme(block=(16, 16)), Scheme(scale="e8m0", rule="ceil", block=(1, 32))
WIDE = Scheme(block=(1, 32))
ONE = {"e4m3": 0x38, "e8m0": 127}  # the byte of a block scale of 1


def packed(rows: int, k: int, scheme: Scheme, seed: int, exact: bool = True):
    """Random codes [rows, Kpad / 2] and scales, as ``quantize`` would lay them out, and their decoded form."""
    generator = torch.Generator().manual_seed(seed)
    padded = -(-k // scheme.group) * scheme.group
    codes = torch.randint(0, 256, (rows, padded // 2), generator=generator, dtype=torch.uint8)
    codes = reference_codecs.pack(masked(codes, k), 1)
    shape = (-(-rows // scheme.block[0]), padded // scheme.block[1])
    one = ONE[scheme.scale]
    if exact:
        step = 8 if scheme.scale == "e4m3" else 1
        scales = (torch.randint(-2, 3, shape, generator=generator) * step + one).to(torch.uint8)
    else:
        scales = torch.randint(one - 20, one + 20, shape, generator=generator).to(torch.uint8)
    return codes, scales, decode(codes, scales, scheme, k)


def masked(codes: torch.Tensor, k: int) -> torch.Tensor:
    """Codes one a byte, zeros from column k on."""
    both = torch.stack((codes & 15, codes >> 4), dim=2).view(codes.shape[0], -1).clone()
    both[:, k:] = 0
    return both


def codes_of(operand: NativeOperand) -> torch.Tensor:
    return masked(operand.codes.cpu(), 2 * operand.codes.shape[1])


@pytest.mark.parametrize("k", [16, 48, 64, 528])
@pytest.mark.parametrize("rows", [1, 17, 130])
def test_operand_of_rows_is_padded_with_zeros(rows, k):
    codes, scales, _ = packed(rows, k, ROWS, 1)
    found = native_operand(codes.to(DEVICE), scales.to(DEVICE), ROWS, rows)
    assert found.codes.shape[1] % 16 == 0 and found.codes.is_contiguous()
    both = codes_of(found)
    assert torch.equal(both[:, :k], masked(codes, k)) and not both[:, k:].any()
    assert torch.equal(found.scales.cpu(), swizzle(scales))


@pytest.mark.parametrize("rows, k", [(1, 16), (130, 48), (33, 272)])
def test_operand_of_the_column_form_is_turned(rows, k):
    """Wgrad: neighbours along K lie a row of memory apart; bytes are transposed, pairs stay pairs."""
    codes, scales, _ = packed(rows, k, ROWS, 2)
    turned = codes.T.contiguous().T, scales.T.contiguous().T
    found = native_operand(*(t.to(DEVICE) if GPU else t for t in turned), ROWS, rows)
    plain = native_operand(codes.to(DEVICE), scales.to(DEVICE), ROWS, rows)
    assert torch.equal(found.codes, plain.codes) and torch.equal(found.scales, plain.scales)


@pytest.mark.parametrize("rows, k", [(16, 16), (40, 130), (129, 65)])
def test_transpose_of_square_blocks_is_packed_along_the_other_dimension(rows, k):
    """Dgrad reads Fprop's weight the other way: the matrix of codes is transposed, with its scales, bit for bit."""
    codes, scales, _ = packed(rows, k, SQUARE, 3)
    found = native_operand(codes.to(DEVICE), scales.to(DEVICE), SQUARE, k, transposed=True)
    want = torch.zeros(k, found.codes.shape[1] * 2, dtype=torch.uint8)
    want[:, :rows] = masked(codes, k)[:, :k].T
    assert torch.equal(codes_of(found), want)
    expanded = scales.T.repeat_interleave(16, 0)[:k]
    assert torch.equal(unswizzle(found.scales.cpu(), k, scales.shape[0]), expanded)


@pytest.mark.parametrize(
    "rows, columns, block_rows, block_columns", [(1, 1, 1, 1), (257, 9, 1, 1), (100, 5, 16, 1), (40, 3, 16, 2)]
)
def test_swizzle_kernel_fills_its_padding(rows, columns, block_rows, block_columns, monkeypatch):
    scales = (torch.arange(-(-rows // block_rows) * columns) % 250 + 1).to(torch.uint8).view(-1, columns)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *sizes, **options: empty(*sizes, **options).fill_(0xFF))
    found = swizzled(scales.to(DEVICE), rows, block_rows, block_columns)
    repeated = scales.repeat_interleave(block_rows, 0)[:rows].repeat_interleave(block_columns, 1)
    assert torch.equal(found.cpu(), swizzle(repeated))


def product(a, b, scheme, alpha=None, **options):
    operands = [native_operand(c.to(DEVICE), s.to(DEVICE), scheme, c.shape[0]) for c, s, _ in (a, b)]
    return native_matmul.native_matmul(*operands, alpha, VECTOR[fp4_format(scheme)], **options)


@multiplies
@pytest.mark.parametrize("scheme", [ROWS, MX, WIDE], ids=["nvfp4", "mxfp4", "1x32 E4M3"])
@pytest.mark.parametrize("m, n, k", [(1, 1, 32), (130, 129, 160), (5, 300, 96)])
def test_product_is_that_of_the_decoded_operands(scheme, m, n, k):
    a, b = packed(m, k, scheme, 4), packed(n, k, scheme, 5)
    alpha = torch.tensor(0.75)
    exact = a[2].double() @ b[2].double().T
    assert (exact.float().double() == exact).all()
    found = product(a, b, scheme, out_dtype=torch.float32).cpu()
    assert torch.equal(found, exact.float())
    rounded_once = (exact.float() * alpha).to(torch.bfloat16)
    assert torch.equal(product(a, b, scheme, alpha.to(DEVICE)).cpu(), rounded_once)
    total = torch.full((m, n), 3.0, device=DEVICE)
    assert product(a, b, scheme, alpha.to(DEVICE), accumulate_into=total) is total
    assert torch.equal(total.cpu(), 3.0 + exact.float() * alpha)


@multiplies
def test_scales_of_every_size_and_nan_reach_their_block():
    a, b = packed(64, 64, ROWS, 6, exact=False), packed(128, 64, ROWS, 7, exact=False)
    a[1][3, 1] = 0x7F
    decoded = decode(a[0], a[1], ROWS, 64)
    found = product(a, b, ROWS, out_dtype=torch.float32).cpu()
    exact = decoded.double() @ b[2].double().T
    assert exact[3].isnan().all() and found[3].isnan().all()
    rest = [row for row in range(64) if row != 3]
    # float32 sums of 64 exact products: each of at most 63 additions rounds by at most half a unit of the sum of sizes
    bound = 63 * 2.0**-24 * (decoded.double().abs() @ b[2].double().abs().T)
    assert ((found.double() - exact).abs() <= bound)[rest].all()


@multiplies
def test_nothing_to_multiply():
    none = NativeOperand(
        torch.empty(0, 16, dtype=torch.uint8, device=DEVICE),
        swizzled(torch.empty(0, 2, dtype=torch.uint8, device=DEVICE), 0),
    )
    some = native_operand(*(t.to(DEVICE) for t in packed(4, 32, ROWS, 8)[:2]), ROWS, 4)
    assert native_matmul.native_matmul(none, some, None, 16).shape == (0, 4)
    thin = NativeOperand(torch.empty(4, 0, dtype=torch.uint8, device=DEVICE), some.scales)
    assert not native_matmul.native_matmul(thin, thin, None, 16).any()


@pytest.mark.parametrize("format_", ["nvfp4", "mxfp4"])
def test_self_check_of_a_gpu_finds_a_product_that_is_wrong(format_):
    """The check a Blackwell GPU must pass before a layer uses it, with products made in PyTorch in the GPU's place."""
    scheme = native_check.SCHEMES[format_]

    def multiply(a, b, alpha, vector, out_dtype, out, swap=False):
        left, right = (decoded(x, scheme) for x in (a, b))
        if swap:
            right[[0, 32]] = right[[32, 0]]  # as scales read in their plain order would do, or worse
        product = (left @ right.T) * (1 if alpha is None else alpha)
        return (out + product if out is not None else product).to(out_dtype)

    assert native_check.wrong_elements(multiply, scheme, torch.device(DEVICE)) == 0
    wrong = native_check.wrong_elements(lambda *given: multiply(*given, swap=True), scheme, torch.device(DEVICE))
    assert wrong > native_check.M  # two of its columns, three times over


def decoded(x: NativeOperand, scheme: Scheme) -> torch.Tensor:
    rows, k = x.codes.shape[0], 2 * x.codes.shape[1]
    scales = unswizzle(x.scales.cpu(), rows, k // scheme.block[1])
    return decode(x.codes.cpu(), scales, scheme, k).float().to(x.codes.device)
