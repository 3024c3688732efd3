"""MQA logits against arithmetic in float64, their layouts against bytes by hand. Gradients: test_mqa_gradients.py."""

import math

import numpy as np
import pytest
import torch
from mqa_cases import FORMATS, assert_close, difference, exact, inside, ranges, tensors

from nvfp4_kernels.reference import mqa_logits as reference
from nvfp4_train import quantize
from nvfp4_train.mqa_logits import fp4_mqa_logits, fp4_paged_mqa_logits
from nvfp4_train.mqa_operands import DEEPSEEK, mqa_operand, paged_cache


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
