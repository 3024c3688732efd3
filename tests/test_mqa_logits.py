"""MQA logits against arithmetic in float64, their gradients against autograd, their layouts against bytes by hand."""

import math

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nvfp4_kernels.reference import mqa_logits as reference
from nvfp4_train import OperandSpec, QuantizedTensor, ledger, quantize
from nvfp4_train.mqa_logits import fp4_mqa_logits, fp4_mqa_logits_at, fp4_paged_mqa_logits
from nvfp4_train.mqa_operands import DEEPSEEK, MQAOperand, mqa_operand, paged_cache
from nvfp4_train.mqa_ops import logits_op

NVFP4 = OperandSpec(format="nvfp4", block="1x16", rounding="nearest")
FORMATS = {"mxfp4": DEEPSEEK, "nvfp4": NVFP4}
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def tensors(m, h, n, d, seed=0, scale=1.0):
    make = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=make)  # noqa: E731
    sizes = torch.exp2(torch.randint(-6, 6, (m, h, d // 32), generator=make))  # so that block scales differ
    q = draw(m, h, d) * scale * sizes.repeat_interleave(32, dim=2)
    return q, draw(n, d), draw(m, h)


def ranges(m, n, seed=1):
    """Nonzero starts, an empty row in four, one that ends before it starts."""
    make = torch.Generator().manual_seed(seed)
    ks = torch.randint(1, max(n // 2, 2), (m,), generator=make)
    ke = ks + torch.randint(1, max(n, 2), (m,), generator=make)
    ke[::4] = ks[::4]
    ke[1:2] = ks[1:2] - 1
    return ks.int(), ke.clamp(max=n).int()


def values64(quantized: QuantizedTensor) -> np.ndarray:
    """The values in float64, from the bytes by a table and a power of two (or torch's own E4M3)."""
    codes = quantized.codes.numpy()
    nibbles = np.stack([codes & 15, codes >> 4], axis=-1).reshape(len(codes), -1)
    if quantized.scheme.scale == "e8m0":
        scales = 2.0 ** (quantized.scale_bytes.numpy().astype(np.float64) - 127)
    else:
        scales = quantized.block_scales.float().double().numpy() * float(quantized.global_amax.double()) / 2688
    return E2M1[nibbles] * np.repeat(scales, nibbles.shape[1] // scales.shape[1], axis=1)


def exact(q: MQAOperand, k: MQAOperand, weights):
    """(float64 logits [M, N], what a float32 sum of their terms may be off by, in units of its rounding)."""
    m, h, d = q.shape
    qv, kv, w = values64(q.quantized).reshape(m, h, d), values64(k.quantized), weights.double().numpy()
    logits = np.einsum("mhn,mh->mn", np.maximum(np.einsum("mhd,nd->mhn", qv, kv), 0), w)
    size = np.einsum("mhn,mh->mn", np.einsum("mhd,nd->mhn", abs(qv), abs(kv)), abs(w))
    # D products summed, H terms summed, and at most five factors (weight, two global scales, their product, 1 / 2688)
    return torch.from_numpy(logits), torch.from_numpy(size) * (d + h + 5) * 2.0**-24


def inside(ks, ke, n):
    columns = torch.arange(n)
    return (columns >= ks[:, None]) & (columns < ke[:, None])


def assert_close(ours, theirs):
    # both sum a few hundred float32 terms, each in its own order
    for x, y in zip(ours, theirs, strict=True):
        assert (x.float() - y).abs().max() <= 2e-6 * y.abs().max()


def difference(x, y):
    x, y = x.double(), y.double()
    return (1 - 2 * (x * y).sum() / (x * x + y * y).sum()).item()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("m", "h", "n", "d"), [(5, 64, 33, 128), (37, 8, 129, 64), (16, 1, 17, 128), (1, 3, 1, 64)])
def test_forward_is_the_sum_within_its_rounding(name, m, h, n, d):
    q, k, weights = tensors(m, h, n, d)
    a, b = mqa_operand(q, FORMATS[name]), mqa_operand(k, FORMATS[name])
    ks, ke = torch.zeros(m, dtype=torch.int32), torch.full((m,), n, dtype=torch.int32)
    logits = fp4_mqa_logits(a, b, weights, ks, ke)
    right, bound = exact(a, b, weights)
    assert logits.dtype == torch.float32 and logits.shape == (m, n)
    assert ((logits - right).abs() <= bound).all()
    assert difference(logits, right) < 1e-7

    ks, ke = ranges(m, n)
    masked = fp4_mqa_logits(a, b, weights, ks, ke)
    assert torch.equal(masked == -torch.inf, ~inside(ks, ke, n))
    assert torch.equal(masked.where(inside(ks, ke, n), 0.0), logits.where(inside(ks, ke, n), 0.0))


@pytest.mark.parametrize(("dtype", "rounding"), [(torch.bfloat16, 2.0**-8), (torch.float16, 2.0**-11)])
def test_narrow_output_is_rounded_once(dtype, rounding):
    q, k, weights = tensors(9, 16, 70, 128, scale=1 / 64)
    a, b = mqa_operand(q), mqa_operand(k)
    ks, ke = torch.zeros(9, dtype=torch.int64), torch.full((9,), 70)
    logits = fp4_mqa_logits(a, b, weights, ks, ke, out_dtype=dtype)
    assert torch.equal(logits, fp4_mqa_logits(a, b, weights, ks, ke).to(dtype))
    right, bound = exact(a, b, weights)
    assert ((logits.double() - right).abs() <= bound + rounding * right.abs() + 2.0**-25).all()
    assert difference(logits, right) < 2e-6


def test_compressed_columns_and_unclean_logits():
    m, n = 23, 61
    q, k, weights = tensors(m, 4, n, 64)
    a, b, (ks, ke) = mqa_operand(q), mqa_operand(k), ranges(m, n)
    dense = fp4_mqa_logits(a, b, weights, ks, ke)
    for width in (1, 7, n, 2 * n):
        compressed = fp4_mqa_logits(a, b, weights, ks, ke, max_seqlen_k=width)
        loose = fp4_mqa_logits(a, b, weights, ks, ke, clean_logits=False, max_seqlen_k=width)
        assert compressed.shape == loose.shape == (m, width)
        for row in range(m):
            kept = dense[row, ks[row] : ke[row]][:width]
            assert torch.equal(compressed[row, : len(kept)], kept) and torch.equal(loose[row, : len(kept)], kept)
            assert (compressed[row, len(kept) :] == -torch.inf).all()
    loose = fp4_mqa_logits(a, b, weights, ks, ke, clean_logits=False)
    assert torch.equal(loose[inside(ks, ke, n)], dense[inside(ks, ke, n)])
    assert not torch.equal(loose, dense)
    assert torch.equal(fp4_mqa_logits(a, b, weights, ks, ke, max_seqlen_k=0), dense)  # DeepGEMM's "not compressed"


def test_nothing_to_score():
    q, k, weights = tensors(6, 2, 9, 64)
    a, b = mqa_operand(q), mqa_operand(k)
    none = torch.zeros(6, dtype=torch.int32)
    assert fp4_mqa_logits(a, mqa_operand(k[:0]), weights, none, none + 9).shape == (6, 0)
    assert (fp4_mqa_logits(a, mqa_operand(k[:0]), weights, none, none, max_seqlen_k=3) == -torch.inf).all()
    assert fp4_mqa_logits(mqa_operand(q[:0]), b, weights[:0], none[:0], none[:0]).shape == (0, 9)
    assert (fp4_mqa_logits(a, b, weights, none + 4, none + 4) == -torch.inf).all()
    assert (fp4_mqa_logits(a, b, weights, none + 20, none + 30) == -torch.inf).all()
    everything = fp4_mqa_logits(a, b, weights, none, none + 9)
    assert everything.isfinite().all()
    assert torch.equal(fp4_mqa_logits(a, b, weights, none - 5, none + 99), everything)


def test_twenty_repeats_of_an_uneven_case_agree_bitwise():
    m, n = 129, 4100
    q, k, weights = tensors(m, 4, n, 64)
    a, b, (ks, ke) = mqa_operand(q), mqa_operand(k), ranges(m, n)
    first = fp4_mqa_logits(a, b, weights, ks, ke)
    assert torch.equal(first.isfinite(), inside(ks, ke, n))
    right, bound = exact(a, b, weights)
    assert ((first - right).abs() <= bound)[inside(ks, ke, n)].all()
    for _ in range(19):
        assert torch.equal(fp4_mqa_logits(a, b, weights, ks, ke), first)


def test_deepgemm_layout_by_hand():
    """One query, one head: element 70 (block 2) is 3 x 2^5, the key's is -1.5 x 2^-4; element 1 is 0.5 in both."""
    q_codes, k_codes = torch.zeros(1, 1, 64, dtype=torch.int8), torch.zeros(2, 64, dtype=torch.int8)
    q_codes[0, 0, 35] = 0x05  # element 70: low nibble of byte 35
    k_codes[0, 35] = 0x0B
    k_codes[1, 35] = 0x03
    q_codes[0, 0, 0], k_codes[0, 0], k_codes[1, 0] = 0x10, 0x10, 0x10  # element 1: high nibble of byte 0
    word = lambda *exponents: sum((e + 127) << 8 * i for i, e in enumerate(exponents))  # noqa: E731
    q_scale = torch.tensor([[word(0, 0, 5, 0)]], dtype=torch.int32)
    k_scale = torch.tensor([word(1, 0, -4, 0), word(1, 0, -4, 0)], dtype=torch.int32)
    logits = fp4_mqa_logits(
        (q_codes, q_scale), (k_codes, k_scale), torch.tensor([[2.0]]), torch.tensor([0]), torch.tensor([2])
    )
    small, large = 0.5 * (0.5 * 2), 3 * 32 * 1.5 / 16
    assert logits.tolist() == [[max(small - large, 0) * 2, (small + large) * 2]]
    # element 127's scale has its top bit in the int32's sign
    q_codes[0, 0, 63], k_codes[1, 63] = 0x20, 0x20
    logits = fp4_mqa_logits(
        (q_codes, torch.tensor([[word(0, 0, 5, 40) - (1 << 32)]], dtype=torch.int32)), (k_codes, k_scale),
        torch.tensor([[2.0]]), torch.tensor([0]), torch.tensor([2]),
    )  # fmt: skip
    assert logits[0, 1] == (small + large + 2.0**40) * 2


@pytest.mark.parametrize("d", [64, 128])
def test_deepgemm_layout_gives_the_same_bits(d):
    q, k, weights = tensors(7, 8, 40, d)
    a, b, (ks, ke) = mqa_operand(q), mqa_operand(k), ranges(7, 40)
    codes, scales = a.deepgemm()
    assert codes.dtype == torch.int8 and codes.shape == (7, 8, d // 2)
    assert scales.dtype == torch.int32 and scales.shape == (7, 8)
    expected = fp4_mqa_logits(a, b, weights, ks, ke)
    # positional, as DeepGEMM is called
    assert torch.equal(fp4_mqa_logits(a.deepgemm(), b.deepgemm(), weights, ks, ke, True, 0), expected)
    plain = [quantize(x.reshape(-1, d), DEEPSEEK) for x in (q, k)]
    assert torch.equal(fp4_mqa_logits(*plain, weights, ks, ke), expected)
    strided = codes.repeat_interleave(2, dim=1)[:, ::2], scales.repeat_interleave(2, dim=1)[:, ::2]
    assert torch.equal(fp4_mqa_logits(strided, b.deepgemm(), weights, ks, ke), expected)


def test_tie_rules():
    # the block's amax is 6, so its scale is 1
    x = torch.zeros(1, 64)
    x[0, :16] = torch.tensor([6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5, -0.0])
    x[0, 16:19] = torch.tensor([0.2500001, -0.1, 5.0000005])
    even = [6, 0, 1, 1, 2, 2, 4, 4, 0, -1, -1, -2, -2, -4, -4, 0, 0.5, 0, 6]
    zero = [6, 0, 0.5, 1, 1.5, 2, 3, 4, 0, -0.5, -1, -1.5, -2, -3, -4, 0, 0.5, 0, 6]
    assert mqa_operand(x).dequantize()[0, :19].tolist() == even
    toward = mqa_operand(x, ties="toward_zero")
    assert toward.dequantize()[0, :19].tolist() == zero
    codes = toward.deepgemm()[0].view(torch.uint8)[0]
    assert codes[4] & 15 == 0 and codes[7] >> 4 == 0 and codes[8] >> 4 == 0  # a zero has no sign in that helper


def test_toward_zero_differs_from_even_at_ties_only_and_shares_its_scales():
    x = torch.randn(200, 128, generator=torch.Generator().manual_seed(3)).bfloat16()  # 8 bits: ties do occur
    even, zero = mqa_operand(x), mqa_operand(x, ties="toward_zero")
    assert torch.equal(even.quantized.scale_bytes, zero.quantized.scale_bytes)
    scale = torch.exp2(even.quantized.scale_bytes.float() - 127).repeat_interleave(32, dim=1)
    units = x.float().abs() / scale
    a, b = even.dequantize() / scale, zero.dequantize() / scale
    differ = a != b
    assert differ.any() and torch.isin(units[differ], torch.tensor(reference.MIDPOINTS)).all()
    assert (b.abs()[differ] < a.abs()[differ]).all()


def test_deepseek_scale_rule():
    """The least power of two that brings the block's amax within 6, and amax counts as 1e-4 at the least."""
    amax = [0.0, 1e-9, 1e-4, 1.0, 5.999, 6.0, 6.0000005, 7.0, 12.0, 12.000001, 3e5, 2.0**100]
    x = torch.zeros(len(amax), 64)
    x[:, 3] = torch.tensor(amax)
    x[:, 40] = 1.0
    for ties in ("even", "toward_zero"):
        found = mqa_operand(x, ties=ties).quantized.scale_bytes
        for row, value in zip(found, x[:, 3].double().tolist(), strict=True):
            exponent = -100
            while 6 * 2.0**exponent < max(value, float(np.float32(1e-4))):
                exponent += 1
            assert row.tolist() == [exponent + 127, -2 + 127]


@pytest.mark.parametrize("ties", ["even", "toward_zero"])
def test_what_is_not_finite_stays_so(ties):
    q, k, weights = tensors(3, 2, 8, 64)
    k[2, 5], k[6, 40] = torch.nan, torch.inf
    logits = fp4_mqa_logits(
        mqa_operand(q), mqa_operand(k, ties=ties), weights, torch.zeros(3).int(), torch.full((3,), 8)
    )
    bad = torch.tensor([2, 6])
    assert logits[:, bad].isnan().all()
    good = torch.ones(8, dtype=torch.bool).index_fill(0, bad, False)
    assert logits[:, good].isfinite().all()


# paged keys


def scatter(k: torch.Tensor, lengths, page, spec, seed=0):
    """(cache with pages in random order, block table, amax, the keys of each sequence quantized), all slots that no
    sequence owns filled with bytes that decode to NaN, all table entries that none needs pointing nowhere."""
    whole = mqa_operand(k, spec)
    pages = [math.ceil(length / page) for length in lengths]
    total = sum(pages) + 3
    width = paged_cache(mqa_operand(k[:1], spec), page).shape[-1]
    storage = torch.full((total, page * width + 96), 0xFF, dtype=torch.uint8)  # pages further apart than they need be
    cache = storage[:, : page * width].unflatten(1, (page, 1, width))
    order = torch.randperm(total, generator=torch.Generator().manual_seed(seed))
    table = torch.full((len(lengths), max(*pages, 1) + 2), 10**6, dtype=torch.int32)
    start, used, keys = 0, 0, []
    for row, (length, count) in enumerate(zip(lengths, pages, strict=True)):
        part = whole.quantized._replace(
            rows=length, codes=whole.quantized.codes[start : start + length],
            scale_bytes=whole.quantized.scale_bytes[start : start + length],
        )  # fmt: skip
        keys.append(part)
        start += length
        filled = paged_cache(part, page).flatten(1)
        ids = order[used : used + count]
        used += count
        table[row, :count] = ids.int()
        for i, page_id in enumerate(ids):
            owned = min(page, length - i * page)
            half = part.codes.shape[1]
            storage[page_id, : owned * half] = filled[i, : owned * half]
            scales = slice(page * half, page * half + owned * (width - half))
            storage[page_id, scales] = filled[i, scales]
    return cache, table, whole.quantized.global_amax, keys


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("page", "each", "d"), [(64, 1, 128), (32, 3, 128), (32, 2, 64)])
def test_paged_equals_dense_and_reads_no_further(name, page, each, d):
    lengths, heads = [70, 0, 1, 64, 33], 4
    q, k, weights = tensors(len(lengths) * each, heads, sum(lengths), d)
    cache, table, amax, keys = scatter(k, lengths, page, FORMATS[name])
    a = mqa_operand(q.view(len(lengths), each, heads, d), FORMATS[name])
    context = torch.tensor(lengths, dtype=torch.int32)
    most = 100
    logits = fp4_paged_mqa_logits(a, cache, weights, context, table, None, most, cache_amax=amax)
    per_query = context[:, None] - each + 1 + torch.arange(each)
    assert torch.equal(
        fp4_paged_mqa_logits(a, cache, weights, per_query.int(), table, max_context_len=most, cache_amax=amax), logits
    )
    assert logits.shape == (len(lengths) * each, most)
    flat = a._replace(shape=(len(lengths) * each, heads, d))
    for row, limit in enumerate(per_query.flatten().tolist()):
        own = keys[row // each]
        ke = torch.full((len(logits),), limit)
        seen = max(limit, 0)
        expected = fp4_mqa_logits(flat, own, weights, torch.zeros_like(ke), ke)[row, :seen]
        assert (logits[row, seen:] == -torch.inf).all()
        assert logits[row, :seen].isfinite().all()  # nothing of what stands beside was read
        if seen:
            assert_close([logits[row, :seen]], [expected])
    narrow = fp4_paged_mqa_logits(a, cache, weights, context, table, None, 40, cache_amax=amax)
    assert torch.equal(narrow, logits[:, :40])
    loose = fp4_paged_mqa_logits(a, cache, weights, context, table, None, most, False, cache_amax=amax)
    assert torch.equal(loose[logits.isfinite()], logits[logits.isfinite()])


def test_paged_with_no_context_reads_nothing():
    q, _, weights = tensors(4, 2, 1, 128)
    a = mqa_operand(q.view(2, 2, 2, 128))
    cache = torch.full((1, 64, 1, 68), 0xFF, dtype=torch.uint8)
    table = torch.full((2, 3), -1, dtype=torch.int32)  # an access would raise
    logits = fp4_paged_mqa_logits(a, cache, weights, torch.zeros(2, dtype=torch.int32), table)
    assert logits.shape == (4, 192) and (logits == -torch.inf).all()
    with pytest.raises(ValueError, match="193 keys is longer than its block table: 3 pages of 64"):
        fp4_paged_mqa_logits(a, cache, weights, torch.tensor([193, 0]), table, None, 400)


# gradients


def by_autograd(a, b, weights, columns_of):
    """Leaves and logits of the definition written out: dequantize, einsum, relu, weighted sum."""
    leaves = [a.dequantize().requires_grad_(), b.dequantize().requires_grad_(), weights.detach().requires_grad_()]
    scores = torch.einsum("mhd,nd->mhn", leaves[0], leaves[1]).relu()
    return leaves, columns_of((scores * leaves[2].unsqueeze(2)).sum(1))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("width", [None, 20])
def test_backward_is_that_of_the_definition(name, width):
    m, n = 19, 47
    q, k, weights = (x.requires_grad_() for x in tensors(m, 4, n, 64))
    a, b, (ks, ke) = mqa_operand(q, FORMATS[name]), mqa_operand(k, FORMATS[name]), ranges(m, n)
    logits = fp4_mqa_logits(a, b, weights, ks, ke, max_seqlen_k=width)
    grad = torch.randn(logits.shape, generator=torch.Generator().manual_seed(5))
    ours = torch.autograd.grad(logits, (q, k, weights), grad.where(logits.isfinite(), torch.nan))
    window = inside(ks, ke, n)
    if width is not None:
        window &= torch.arange(n) < ks[:, None] + width
    # row by row, so that the definition knows nothing of the kernel's way to compress
    leaves, dense = by_autograd(a, b, weights, lambda x: x)
    assert window.any() and window.sum() == logits.isfinite().sum()
    total = (dense[window] * grad[logits.isfinite()]).sum()
    theirs = torch.autograd.grad(total, leaves)
    assert_close(ours, theirs)
    assert [x.dtype for x in ours] == [torch.float32] * 3


def test_top_k_form_and_its_backward():
    m, n, count = 21, 50, 12
    q, k, weights = (x.requires_grad_() for x in tensors(m, 4, n, 128))
    a, b = mqa_operand(q), mqa_operand(k)
    ks, ke = torch.zeros(m, dtype=torch.int32), torch.full((m,), n)
    dense = fp4_mqa_logits(a, b, weights, ks, ke)
    indices = dense.topk(count).indices
    indices[3, 5:], indices[4] = -1, n + 7  # a short row, an empty one
    indices[6, 1] = indices[6, 0]  # a key named twice counts twice
    chosen = fp4_mqa_logits_at(a, b, weights, indices)
    valid = (indices >= 0) & (indices < n)
    expected = dense.gather(1, indices.where(valid, 0)).masked_fill(~valid, -torch.inf)
    assert torch.equal(chosen == -torch.inf, ~valid)
    assert_close([chosen[valid]], [expected[valid]])  # batched products may add in another order than one large one
    assert torch.equal(fp4_mqa_logits_at(a, b, weights, indices.int()), chosen)

    grad = torch.randn(m, count, generator=torch.Generator().manual_seed(6))
    ours = torch.autograd.grad(chosen, (q, k, weights), grad.where(valid, torch.nan))
    leaves, picked = by_autograd(a, b, weights, lambda x: x.gather(1, indices.where(valid, 0)))
    assert_close(ours, torch.autograd.grad(picked, leaves, grad.where(valid, 0.0)))
    assert not ours[0][4].any()
    none = fp4_mqa_logits_at(a, mqa_operand(k[:0]), weights, indices)
    assert (none == -torch.inf).all()
    assert not any(x.any() for x in torch.autograd.grad(none, (q, weights), grad))


def test_backward_repeats_bitwise():
    m, n = 65, 300
    q, k, weights = (x.requires_grad_() for x in tensors(m, 8, n, 64))
    a, b, (ks, ke) = mqa_operand(q), mqa_operand(k), ranges(m, n)
    indices = torch.randint(0, n, (m, 30), generator=torch.Generator().manual_seed(2))

    def gradients():
        dense = fp4_mqa_logits(a, b, weights, ks, ke).where(inside(ks, ke, n), 0.0)
        total = dense.square().sum() + fp4_mqa_logits_at(a, b, weights, indices).square().sum()
        return torch.autograd.grad(total, (q, k, weights))

    first = gradients()
    for _ in range(5):
        assert all(torch.equal(x, y) for x, y in zip(gradients(), first, strict=True))


def test_gradients_go_where_they_are_wanted_in_the_dtype_of_the_source():
    q, k, weights = tensors(5, 2, 9, 64)
    ks, ke = torch.zeros(5, dtype=torch.int32), torch.full((5,), 9)
    q, weights = q.bfloat16().requires_grad_(), weights.bfloat16().requires_grad_()
    a, b = mqa_operand(q), mqa_operand(k)
    assert b.source is None
    dq, dw = torch.autograd.grad(fp4_mqa_logits(a, b, weights, ks, ke).sum(), (q, weights))
    assert dq.dtype == dw.dtype == torch.bfloat16
    leaves, logits = by_autograd(a, b, weights.float(), lambda x: x)
    right = torch.autograd.grad(logits.sum(), leaves)
    assert torch.equal(dw, right[2].bfloat16())
    assert (dq.float() - right[0]).abs().max() <= 2**-8 * right[0].abs().max()  # its own rounding to bfloat16
    assert not fp4_mqa_logits(a.quantized, b, weights.detach(), ks, ke).requires_grad


@pytest.mark.parametrize("queries", [0, 5])
def test_chunks_change_nothing_and_no_tensor_of_all_scores_is_made(monkeypatch, queries):
    m, h, n = 24, 8, 600
    q, k, weights = (x.requires_grad_() for x in tensors(m, h, n, 64))
    a, b, (ks, ke) = mqa_operand(q), mqa_operand(k), ranges(m, n)
    indices = torch.randint(-1, n, (m, 40), generator=torch.Generator().manual_seed(2))

    def run():
        dense, at = fp4_mqa_logits(a, b, weights, ks, ke), fp4_mqa_logits_at(a, b, weights, indices)
        loss = dense.where(dense.isfinite(), 0.0).sum() + at.where(at.isfinite(), 0.0).sum()
        return dense, at, *torch.autograd.grad(loss, (q, k, weights))

    whole = run()
    monkeypatch.setattr(reference, "SCORES_AT_ONCE", {"cpu": queries * 2 * h * n})
    largest = Largest()
    with largest:
        parts = run()
    assert largest.numel < m * h * n / 2
    for x, y in zip(parts, whole, strict=True):
        assert torch.equal(x.isinf(), y.isinf())
        assert_close([x[x.isfinite()]], [y[y.isfinite()]])  # dk adds by chunks


class Largest(TorchDispatchMode):
    """The elements of the largest tensor that any operation returns, inside custom ops too."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, torch.Tensor) and not x.is_sparse:
                self.numel = max(self.numel, x.untyped_storage().nbytes() // x.element_size())
        return out


# surroundings


def test_ledger_autocast_and_compile():
    q, k, weights = (x.requires_grad_() for x in tensors(6, 4, 20, 64))
    ks, ke = torch.zeros(6, dtype=torch.int32), torch.full((6,), 20, dtype=torch.int32)

    def step(q, k, weights):
        return fp4_mqa_logits(mqa_operand(q), mqa_operand(k), weights, ks, ke)

    with ledger.recording() as log:
        plain = step(q, k, weights)
        grads = torch.autograd.grad(plain.sum(), (q, k, weights))
    scheme = str(DEEPSEEK.scheme)
    rows = {row["gemm"]: row for row in log.gemms()}
    found = {gemm: (row["a"], row["b"], row["calls"]) for gemm, row in rows.items()}
    gradient = ("float32", scheme, 1)  # straight through: what backward multiplies is not quantized
    assert found == {
        "mqa_logits": (scheme, scheme, 1), "mqa_logits.scores": (scheme, scheme, 1),
        "mqa_logits.dq": gradient, "mqa_logits.dk": gradient,
    }  # fmt: skip
    assert {row["flops"] for row in rows.values()} == {2 * 6 * 4 * 20 * 64}
    assert {row["scheme"] for row in log.operands()} == {scheme}

    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(step(q, k, weights), plain)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")(q, k, weights)
    assert torch.equal(compiled, plain)
    again = torch.autograd.grad(compiled.sum(), (q, k, weights))
    assert all(torch.equal(x, y) for x, y in zip(again, grads, strict=True))

    a, b = (mqa_operand(x).quantized for x in (q, k))
    torch.library.opcheck(
        logits_op,
        (a.codes, a.scale_bytes, None, scheme, b.codes, b.scale_bytes, None, scheme, weights.detach(), ks, ke,
         torch.float32, True, 5, len(ledger.site(""))),
    )  # fmt: skip


def test_bf16_operands_are_the_control():
    q, k, weights = (x.requires_grad_() for x in tensors(6, 4, 20, 64))
    bf16 = OperandSpec(format="bf16")
    a, b = mqa_operand(q, bf16), mqa_operand(k, bf16)
    ks, ke = torch.zeros(6, dtype=torch.int32), torch.full((6,), 20)
    logits = fp4_mqa_logits(a, b, weights, ks, ke)
    leaves, right = by_autograd(a, b, weights, lambda x: x)
    assert torch.equal(leaves[0].detach(), q.detach().bfloat16().float())
    assert_close([logits.detach()], [right.detach()])
    assert_close(torch.autograd.grad(logits.sum(), (q, k, weights)), torch.autograd.grad(right.sum(), leaves))


def test_errors_name_the_shapes():
    q, k, weights = tensors(6, 4, 20, 128)
    a, b = mqa_operand(q), mqa_operand(k)
    ks, ke = torch.zeros(6, dtype=torch.int32), torch.full((6,), 20, dtype=torch.int32)
    codes, scales = b.deepgemm()
    other = mqa_operand(tensors(6, 4, 20, 64)[1])
    cases = [
        ((q, b, weights, ks, ke), r"q must be quantized.*got torch.float32 \(6, 4, 128\)"),
        ((a, other, weights, ks, ke), r"got kv \(20, 64\) and q \(6, 4, 128\)"),
        ((a, b, weights[:5], ks, ke), r"got \(6, 4, 128\) and \(5, 4\)"),
        ((a, b, weights.repeat(1, 17), ks, ke), r"1 to 64 heads, got \(6, 68\)"),
        ((a, b, weights.int(), ks, ke), r"floating \[M, H\], got torch.int32 \(6, 4\)"),
        ((a, b, weights, ks[:3], ke), r"ks must be .*\[6\].*got torch.int32 \(3,\)"),
        ((a, b, weights, ks, ke.float()), r"ke must be .*got torch.float32 \(6,\)"),
        ((a, (codes, scales.view(torch.uint8)), weights, ks, ke), r"kv in DeepGEMM's layout.*torch.uint8"),
        ((a, (codes, scales[:4]), weights, ks, ke), r"got \(20, 64\) and \(4,\)"),
        ((a, mqa_operand(k, NVFP4), weights, ks, ke), "one format"),
        ((a, quantize(k, OperandSpec(format="nvfp4", block="16x16")), weights, ks, ke), "1-D blocks"),
    ]
    for args, message in cases:
        with pytest.raises(ValueError, match=message):
            fp4_mqa_logits(*args)
    with pytest.raises(ValueError, match="out_dtype"):
        fp4_mqa_logits(a, b, weights, ks, ke, out_dtype=torch.float64)
    with pytest.raises(ValueError, match="max_seqlen_k"):
        fp4_mqa_logits(a, b, weights, ks, ke, max_seqlen_k=-1)
    with pytest.raises(ValueError, match=r"indices .*\[6, K\].*\(5, 3\)"):
        fp4_mqa_logits_at(a, b, weights, torch.zeros(5, 3, dtype=torch.int64))
    cache, table = paged_cache(b, 32), torch.zeros(6, 1, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"1, 68\].*torch.uint8 \(2, 16, 1, 68\)"):
        fp4_paged_mqa_logits(a, paged_cache(b, 16), weights, ks, table)
    with pytest.raises(ValueError, match=r"\(6,\), \(5, 1\) and \(6, 4\)"):
        fp4_paged_mqa_logits(a, cache, weights, ks, table[:5])
    with pytest.raises(ValueError, match="cache_amax"):
        fp4_paged_mqa_logits(a, cache, weights, ks, table, cache_amax=torch.ones(()))
    with pytest.raises(ValueError, match=r"D 64 or 128.*\(20, 96\)"):
        mqa_operand(torch.zeros(20, 96))
    with pytest.raises(ValueError, match="ties"):
        mqa_operand(k, ties="up")
    with pytest.raises(ValueError, match="toward_zero go with"):
        mqa_operand(k, NVFP4, ties="toward_zero")
    with pytest.raises(ValueError, match="hadamard 16"):
        mqa_operand(k, OperandSpec(format="nvfp4", hadamard=16))
    with pytest.raises(ValueError, match="MXFP4"):
        mqa_operand(k, NVFP4).deepgemm()
