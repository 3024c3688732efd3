"""Gradients of MQA logits against autograd of the definition; the ledger, torch.compile, errors."""

import pytest
import torch
from mqa_cases import FORMATS, NVFP4, assert_close, inside, ranges, tensors
from torch.utils._python_dispatch import TorchDispatchMode

from nvfp4_kernels.reference import mqa_logits as reference
from nvfp4_train import OperandSpec, ledger, quantize
from nvfp4_train.mqa_logits import fp4_mqa_logits, fp4_mqa_logits_at, fp4_paged_mqa_logits
from nvfp4_train.mqa_operands import DEEPSEEK, mqa_operand, paged_cache
from nvfp4_train.mqa_ops import logits_op


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
