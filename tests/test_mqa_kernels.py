"""The Triton kernels of MQA logits against the reference: in Triton's interpreter, on a GPU where there is one."""

import pytest
import torch
from mqa_cases import FORMATS, assert_close, difference, exact, inside, ranges, tensors

pytest.importorskip("triton")
from nvfp4_kernels.reference import mqa_logits as reference  # noqa: E402
from nvfp4_kernels.triton import codecs, mqa_dense, mqa_scaled  # noqa: E402
from nvfp4_kernels.triton import mqa_logits as kernels  # noqa: E402
from nvfp4_kernels.triton.mqa_expand import expand  # noqa: E402
from nvfp4_train import mqa_benchmark, mqa_ops  # noqa: E402
from nvfp4_train.mqa_logits import fp4_mqa_logits, fp4_paged_mqa_logits  # noqa: E402
from nvfp4_train.mqa_operands import kernel_operand, mqa_operand, paged_cache, parts  # noqa: E402

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
pytestmark = [
    pytest.mark.skipif(not (GPU or codecs.INTERPRETED.value), reason="no GPU, and triton was imported uninterpreted"),
    pytest.mark.filterwarnings("ignore:(divide by zero|invalid value|overflow):RuntimeWarning"),
]


def operands(m, h, n, d, name="mxfp4", change=None):
    """(q and k of quantize, arguments of a kernel before the ranges), on the device."""
    q, k, weights = tensors(m, h, n, d)
    if change:
        change(q, k)
    a, b = mqa_operand(q, FORMATS[name]), mqa_operand(k, FORMATS[name])
    taken = (kernel_operand(*(None if x is None else x.to(DEVICE) for x in parts(y.quantized)[:3])) for y in (a, b))
    return a, b, weights, (*taken, FORMATS[name].scheme, weights.to(DEVICE))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("m", "h", "n", "d"), [(9, 6, 150, 64), (5, 64, 70, 128), (33, 8, 130, 128), (3, 1, 65, 64)])
def test_forward(name, m, h, n, d):
    a, b, weights, arguments = operands(m, h, n, d, name)
    right, bound = exact(a, b, weights)
    causal = torch.zeros(m, dtype=torch.int32), (torch.arange(m) * n // m + 1).int()
    for ks, ke in (ranges(m, n), causal):
        seen = inside(ks, ke, n)
        logits = kernels.mqa_logits(*arguments, ks.to(DEVICE), ke.to(DEVICE)).cpu()
        assert torch.equal(logits == -torch.inf, ~seen)
        assert ((logits - right).abs() <= bound)[seen].all() and difference(logits[seen], right[seen]) < 1e-7
        for width in (7, n):  # compressed: the keys of a query may be its own or shared
            found = kernels.mqa_logits(*arguments, ks.to(DEVICE), ke.to(DEVICE), max_seqlen_k=width).cpu()
            for row in range(m):
                kept, allowed = (x[row, ks[row] : ke[row]][:width] for x in (right, bound))
                assert ((found[row, : len(kept)] - kept).abs() <= allowed).all()
                assert (found[row, len(kept) :] == -torch.inf).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_output_is_the_float32_rounded_once(dtype):
    *_, arguments = operands(5, 16, 70, 64)
    ks, ke = (x.to(DEVICE) for x in ranges(5, 70))
    full = kernels.mqa_logits(*arguments, ks, ke)
    assert torch.equal(kernels.mqa_logits(*arguments, ks, ke, out_dtype=dtype), full.to(dtype))


CHANGES = {
    "one large key": lambda q, k: k[7].mul_(2.0**20),
    "a spread within a head": lambda q, k: (q[1, 2, :32].mul_(2.0**34), q[1, 2, 32:].mul_(2.0**-5)),
    "large keys, small queries": lambda q, k: (k.mul_(2.0**30), q.mul_(2.0**-12)),
    "zeros": lambda q, k: (k[3].zero_(), q[1].zero_(), q[2, 1, 32:].zero_()),
    "a spread that fits": lambda q, k: q[1, 2, :32].mul_(2.0**10),
}


@pytest.mark.parametrize("change", CHANGES)
def test_exponents_that_e5m2_does_not_hold(change):
    """The flag is up exactly where it must be, and the result is right either way."""
    a, b, weights, arguments = operands(4, 8, 70, 64, change=CHANGES[change])
    q, k, scheme, w = arguments
    x = expand(q.codes, q.scales, w, k.codes, k.scales, scheme.block[1], e5m2=True)
    assert bool(x.flag.item()) == (change not in ("zeros", "a spread that fits"))
    right, bound = exact(a, b, weights)
    zero = torch.zeros(4, dtype=torch.int32, device=DEVICE)
    for width in (None, 70):
        logits = kernels.mqa_logits(*arguments, zero, zero + 70, max_seqlen_k=width).cpu()
        assert ((logits - right).abs() <= bound).all()


def test_nan_keys_stay_so():
    def change(q, k):
        k[2, 5], k[6, 40] = torch.nan, torch.inf

    *_, arguments = operands(3, 2, 9, 64, change=change)
    zero = torch.zeros(3, dtype=torch.int32, device=DEVICE)
    logits = kernels.mqa_logits(*arguments, zero, zero + 9).cpu()
    assert torch.equal(logits.isnan(), torch.tensor([n in (2, 6) for n in range(9)]).expand(3, 9))


@pytest.mark.parametrize(("name", "m", "h", "n", "d"), [("mxfp4", 10, 5, 75, 64), ("nvfp4", 3, 16, 40, 128)])
def test_backward(name, m, h, n, d):
    *_, arguments = operands(m, h, n, d, name)
    ks, ke = (x.to(DEVICE) for x in ranges(m, n))
    make = torch.Generator().manual_seed(5)
    for width in (None, 20):
        grad = torch.randn(m, width or n, generator=make).to(DEVICE)
        found = kernels.mqa_logits_backward(grad, *arguments, ks, ke, max_seqlen_k=width)
        assert_close(found, reference.mqa_logits_backward(grad, *arguments, ks, ke, max_seqlen_k=width))
    indices = torch.randint(-2, n + 2, (m, 12), generator=make).to(DEVICE)
    indices[0] = 3  # one key many times
    logits, right = (x.mqa_logits_at(*arguments, indices) for x in (kernels, reference))
    assert torch.equal(logits == -torch.inf, right == -torch.inf)
    assert_close([logits[right.isfinite()]], [right[right.isfinite()]])
    grad = torch.randn(m, 12, generator=make).to(DEVICE)
    found = kernels.mqa_logits_at_backward(grad, *arguments, indices)
    assert_close(found, reference.mqa_logits_at_backward(grad, *arguments, indices))
    again = kernels.mqa_logits_at_backward(grad, *arguments, indices)
    assert all(torch.equal(x, y) for x, y in zip(found, again, strict=True))


def test_the_public_calls_run_them_and_the_ledger_says_so(monkeypatch):
    from nvfp4_train import ledger

    monkeypatch.setattr(mqa_ops, "BACKEND", "triton")
    q, k, weights = tensors(6, 4, 40, 64)
    a, b = mqa_operand(q.to(DEVICE)), mqa_operand(k.to(DEVICE))
    zero = torch.zeros(6, dtype=torch.int32, device=DEVICE)
    with ledger.recording() as log:
        dense = fp4_mqa_logits(a, b, weights.to(DEVICE), zero, zero + 40)
    assert {row["backend"] for row in log.gemms()} == {"triton"}
    table = torch.tensor([[0, 1], [1, 0]], dtype=torch.int32, device=DEVICE)
    context = torch.tensor([40, 35], dtype=torch.int32, device=DEVICE)  # the second sequence has the pages swapped
    pages = mqa_operand(q.to(DEVICE).view(2, 3, 4, 64))
    paged = fp4_paged_mqa_logits(pages, paged_cache(b, 32), weights.to(DEVICE), context, table)
    right, bound = exact(mqa_operand(q), mqa_operand(k), weights)
    assert ((dense.cpu() - right).abs() <= bound).all()
    paged = paged.cpu()
    for row in range(3):  # three queries to a sequence: each sees one key more than the one before
        seen = 40 - 2 + row
        assert ((paged[row, :seen] - right[row, :seen]).abs() <= bound[row, :seen]).all()
        assert (paged[row, seen:] == -torch.inf).all()
        few = 3 - 2 + row
        assert ((paged[3 + row, 32 : 32 + few] - right[3 + row, :few]).abs() <= bound[3 + row, :few]).all()


@pytest.mark.skipif(GPU, reason="needs an FP4 matrix unit, or the interpreter")
@pytest.mark.parametrize("name", FORMATS)
def test_the_kernel_for_fp4_matrix_units(name):
    a, b, weights, (q, k, scheme, w) = operands(5, 12, 140, 128, name)
    right, bound = exact(a, b, weights)
    ks, ke = ranges(5, 140)
    out = torch.empty(5, 140)
    mqa_scaled.logits(
        q.codes, q.scales, w, k.codes, k.scales, (q.amax, k.amax), ks, ke, out, block=scheme.block[1],
        compressed=False, clean=True,
    )  # fmt: skip
    seen = inside(ks, ke, 140)
    assert torch.equal(out == -torch.inf, ~seen)
    assert ((out - right).abs() <= bound)[seen].all()


def test_keys_are_split_into_parts_that_keep_a_gpu_busy():
    for groups, tiles in [(512, 128), (1, 1024), (3, 7), (264, 64), (1000, 1)]:
        each = mqa_dense.split(groups, tiles, 264)
        assert 1 <= each <= tiles
        parts_ = -(-tiles // each)
        assert groups * parts_ >= min(264, groups * min(tiles, 32)) * 0.5  # no more than half of it idle


def test_the_benchmark_and_its_rival_compute_the_same():
    rows = mqa_benchmark.bench_mqa_logits(torch.device("cpu"), [(4, 70)], repeats=1)
    assert [(row["case"], row["format"]) for row in rows] == [
        ("4x70 all keys", "mxfp4"), ("4x70 causal", "mxfp4"), ("4x70 all keys", "nvfp4"), ("4x70 causal", "nvfp4"),
        ("decode 4x512 one tensor", "mxfp4"), ("decode 4x512 paged", "mxfp4"),
    ]  # fmt: skip
    assert all(row["us"] > 0 for row in rows) and rows[0]["PyTorch / ours"] > 0
    zero = torch.zeros(4, dtype=torch.int32)
    for spec in FORMATS.values():
        q, k, weights = mqa_benchmark._operands(torch.device("cpu"), spec, 4, 70, 8, 64)
        rival = mqa_benchmark._rival(q, k, weights, torch.device("cpu"))()
        assert difference(rival, fp4_mqa_logits(q, k, weights, zero, zero + 70)) < 2e-5  # its scores are BF16
