"""scaled_matmul against float64: exact sums must agree bitwise, whatever tile, layout, route or output type."""

import pytest
import torch

triton = pytest.importorskip("triton")
from nvfp4_kernels.triton import gemm  # noqa: E402
from nvfp4_kernels.triton.gemm import Config, choose_config, scaled_matmul  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def operand(rows, k, turned=False, seed=0):
    """Decoded NVFP4 has at most 6 significant bits; here they are signed multiples of 1/8 below 8. A product is a
    multiple of 1/64 below 2^6, so a float32 sum of up to 4096 of them is exact in any order."""
    generator = torch.Generator().manual_seed(seed + rows * 7919 + k)
    shape = (k, rows) if turned else (rows, k)
    x = (torch.randint(-63, 64, shape, generator=generator).float() / 8).to(torch.bfloat16).to(DEVICE)
    return x.T if turned else x


def product(a, b, alpha, dtype):
    """The exact product, scaled in float32 and rounded once."""
    exact = a.double() @ b.double().T
    assert torch.equal(exact.float().double(), exact)  # or the test would compare roundings of its own
    scaled = exact.float() if alpha is None else exact.float() * alpha
    return scaled.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("a_turned,b_turned", [(False, False), (False, True), (True, True), (True, False)])
def test_exact_sums_are_bitwise_right_in_every_layout(a_turned, b_turned, dtype):
    # 72 and 40 are ragged against the tiles but allow descriptors: edges read zero and write nothing
    a, b = operand(72, 104, a_turned), operand(40, 104, b_turned, seed=1)
    alpha = torch.tensor(0.0371, device=DEVICE)
    out = scaled_matmul(a, b, alpha, out_dtype=dtype)
    assert out.dtype == dtype and gemm.route(a, b, out) is not None
    assert torch.equal(out, product(a, b, alpha, dtype))


@pytest.mark.parametrize("m,n,k", [(1, 1, 1), (3, 5, 7), (17, 9, 33), (33, 16, 15)])
def test_ragged_shapes_take_the_library(m, n, k):
    a, b, alpha = operand(m, k), operand(n, k, seed=1), torch.tensor(3.25, device=DEVICE)
    for dtype in DTYPES:
        out = scaled_matmul(a, b, alpha, out_dtype=dtype)
        assert gemm.route(a, b, out) is None
        assert torch.equal(out, product(a, b, alpha, dtype))


def test_one_rounding_where_two_would_show():
    # bf16 has only even numbers here. One rounding: 257 * (1 + 1/256) = 258.004 -> 258. Two: 257 -> 256, 257 -> 256.
    a = torch.zeros((16, 16), dtype=torch.bfloat16, device=DEVICE)
    b = a.clone()
    a[0, :2], b[0, 0], b[0, 1] = 1, 256, 1
    alpha = torch.tensor(1 + 2.0**-8, device=DEVICE)
    assert scaled_matmul(a, b, alpha)[0, 0].item() == 258
    assert ((a @ b.T) * alpha)[0, 0].item() == 256


@pytest.mark.parametrize("k", [64, 63])  # through the descriptors and through the library
@pytest.mark.parametrize("alpha", [None, 0.37])
def test_accumulate_adds_in_float32(k, alpha):
    a, b = operand(48, k, True), operand(24, k, True, seed=1)
    if k == 63:
        a, b = a[:45], b[:21]
    alpha = None if alpha is None else torch.tensor(alpha, device=DEVICE)
    out = torch.randn((a.shape[0], b.shape[0]), device=DEVICE)
    wanted = out + product(a, b, alpha, torch.float32)
    result = scaled_matmul(a, b, alpha, out_dtype=torch.float32, out=out, accumulate=True)
    assert result is out
    assert torch.equal(out, wanted)


@pytest.mark.parametrize(
    "config",
    [
        Config(32, 64, 32, 3, 1, False),
        Config(16, 32, 16, 2, 2, True),
        Config(64, 16, 32, 1, 1),
        Config(32, 32, 64, 8, 2),
    ],
    ids=str,
)
def test_every_tile_is_written_once_in_any_order(config):
    a, b = operand(200, 64), operand(136, 64, seed=1)
    out = torch.full((200, 136), float("nan"), device=DEVICE)
    gemm._persistent(a, b, None, out, False, config)
    assert torch.equal(out, product(a, b, None, torch.float32))
    gemm._persistent(a, b, None, out.zero_(), True, config)  # a tile visited twice would add twice
    assert torch.equal(out, product(a, b, None, torch.float32))


def test_views_into_larger_tensors():
    wide = operand(48, 96)
    a, b = wide[:, 16:80], operand(32, 64, seed=1)
    out = scaled_matmul(a, b, None)
    assert gemm.route(a, b, out) is not None  # stride 96, address 32 bytes in: still a multiple of 16
    assert torch.equal(out, product(a, b, None, torch.bfloat16))
    a = wide[:, 1:65]  # two bytes in: no descriptor
    assert gemm.route(a, b, out) is None
    assert torch.equal(scaled_matmul(a, b, None), product(a, b, None, torch.bfloat16))


def test_nan_and_infinity_come_out():
    a, b = operand(16, 32), operand(16, 32, seed=1)
    a[3, 5] = float("nan")
    for dtype in DTYPES:
        out = scaled_matmul(a, b, torch.tensor(1.0, device=DEVICE), out_dtype=dtype)
        assert out[3].isnan().all() and out.isnan().sum() == 16
    poisoned = scaled_matmul(operand(16, 32), b, torch.tensor(float("nan"), device=DEVICE))
    assert poisoned.isnan().all()


def test_empty_dimensions():
    assert scaled_matmul(operand(0, 16), operand(8, 16), None).shape == (0, 8)
    assert scaled_matmul(operand(8, 16), operand(0, 16), None).shape == (8, 0)
    alpha = torch.tensor(2.0, device=DEVICE)
    assert torch.equal(scaled_matmul(operand(8, 0), operand(8, 0), alpha).float(), torch.zeros(8, 8, device=DEVICE))
    out = torch.ones((8, 8), device=DEVICE)
    scaled_matmul(operand(8, 0), operand(8, 0), alpha, out_dtype=torch.float32, out=out, accumulate=True)
    assert torch.equal(out, torch.ones_like(out))


def test_the_tile_fits_the_shape():
    big = choose_config(8192, 8192, 8192, 2, 132)
    assert (big.block_m, big.block_n) == (128, 256)
    narrow = choose_config(65536, 384, 384, 2, 132)  # 384 columns waste a quarter of two tiles of 256
    assert narrow is not None and 384 % narrow.block_n == 0
    assert choose_config(384, 384, 65536, 4, 132) is None  # 9 tiles on 132 multiprocessors: the library splits K
    assert choose_config(14336, 4096, 16384, 4, 132).subtiles == 2  # a float32 tile of 128 x 256 is all shared memory


def test_faults_name_the_shapes():
    a, b = operand(16, 32), operand(8, 32)
    for bad in ((a, operand(8, 16)), (a.float(), b), (a[0], b)):
        with pytest.raises(ValueError, match="scaled_matmul needs"):
            scaled_matmul(*bad, None)
    with pytest.raises(ValueError, match="alpha"):
        scaled_matmul(a, b, torch.ones(2, device=DEVICE))
    with pytest.raises(ValueError, match="out_dtype"):
        scaled_matmul(a, b, None, out_dtype=torch.float64)
    with pytest.raises(ValueError, match="out must be"):
        scaled_matmul(a, b, None, out=torch.empty((8, 16), dtype=torch.bfloat16, device=DEVICE))
    with pytest.raises(ValueError, match="accumulate"):
        scaled_matmul(a, b, None, accumulate=True)
