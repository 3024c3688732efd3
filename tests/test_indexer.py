"""The lightning indexer: its parts against plain arithmetic, its loss against autograd, and that it learns."""

import pickle

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nvfp4_kernels.reference import mqa_logits as reference
from nvfp4_train import OperandSpec, ledger
from nvfp4_train.indexer import Attention, Index, LightningIndexer, indexer_kl
from nvfp4_train.mqa_logits import fp4_mqa_logits
from nvfp4_train.mqa_operands import DEEPSEEK, mqa_operand

BF16 = OperandSpec(format="bf16")


def causal(*lengths):
    """ks, ke of documents one after the other."""
    start, ks, ke = 0, [], []
    for length in lengths:
        ks += [start] * length
        ke += range(start + 1, start + length + 1)
        start += length
    return torch.tensor(ks, dtype=torch.int32), torch.tensor(ke, dtype=torch.int32)


def example(tokens, heads=4, d=64, seed=0):
    make = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=make)  # noqa: E731
    q, k, weights = draw(tokens, heads, d), draw(tokens, d), draw(tokens, heads) * d**-0.5
    for leaf in (q, k, weights):
        leaf.requires_grad_()
    attention = Attention(draw(tokens, 6, 8), draw(tokens, 2, 8), 0.5)
    return (q, k, weights), Index(mqa_operand(q), mqa_operand(k), weights), attention


def plain_kl(index, inside, attention):
    """(leaves, loss) with every matrix written out, float64; ``inside`` bool [T, N]."""
    leaves = [x.detach().double().requires_grad_() for x in (index.q.dequantize(), index.k.dequantize(), index.weights)]
    logits = (torch.einsum("mhd,nd->mhn", *leaves[:2]).relu() * leaves[2].unsqueeze(2)).sum(1)
    keys = attention.k.double().repeat_interleave(attention.q.shape[1] // attention.k.shape[1], dim=1)
    scores = torch.einsum("mae,nae->man", attention.q.double(), keys) * attention.scale
    rows = []
    for row in range(len(inside)):
        seen = inside[row]
        if seen.any():
            p = scores[row][:, seen].softmax(1).sum(0)
            p = p / p.sum()
            rows.append((p * (p.log() - logits[row][seen].log_softmax(0))).sum())
    return leaves, torch.stack(rows).mean()


@pytest.mark.parametrize("sparse", [False, True])
def test_kl_and_its_gradients(sparse):
    tokens = 45
    sources, index, attention = example(tokens)
    ks, ke = causal(20, 25)
    ke[7] = ks[7]  # a query that sees nothing
    columns = torch.arange(tokens)
    inside = (columns >= ks[:, None]) & (columns < ke[:, None])
    indices = None
    if sparse:
        shuffled = torch.rand(tokens, tokens, generator=torch.Generator().manual_seed(1)).argsort(1)
        indices = shuffled[:, :12]  # of other documents and of later tokens too, which must not count
        indices[9, 3:] = -1
        inside &= torch.zeros(tokens, tokens).scatter_add_(
            1, indices.clamp(min=0), (indices >= 0).float()
        ).bool()  # fmt: skip
    loss = indexer_kl(index, ks, ke, attention, indices=indices)
    grads = torch.autograd.grad(3 * loss, sources)
    leaves, right = plain_kl(index, inside, attention)
    expected = torch.autograd.grad(3 * right, leaves)
    assert loss.dtype == torch.float32 and abs(loss - right) < 1e-6 * right
    for x, y in zip(grads, expected, strict=True):
        assert (x - y).abs().max() < 1e-5 * y.abs().max()  # float32 against float64
    again = torch.autograd.grad(3 * indexer_kl(index, ks, ke, attention, indices=indices), sources)
    assert all(torch.equal(x, y) for x, y in zip(again, grads, strict=True))
    with torch.no_grad():
        assert torch.equal(indexer_kl(index, ks, ke, attention, indices=indices), loss)


def test_kl_is_zero_only_at_the_same_distribution():
    _, index, attention = example(30)
    ks, ke = causal(30)
    one = Attention(index.q.dequantize()[:, :1], index.k.dequantize()[:, None], 1.0)
    same = index._replace(q=mqa_operand(index.q.dequantize()[:, :1]), weights=torch.ones(30, 1))
    # relu(s) = s where it is positive: shift nothing, take only queries whose scores are positive
    positive = (torch.einsum("md,nd->mn", one.q[:, 0], one.k[:, 0]) > 0) & (torch.arange(30) < ke[:, None])
    indices = torch.arange(30).where(positive, -1)
    assert indexer_kl(same, ks, ke, one, indices=indices).abs() < 1e-6
    assert indexer_kl(index, ks, ke, attention) > 0.01


def test_kl_holds_no_matrix_of_all_scores(monkeypatch):
    tokens = 256
    sources, index, attention = example(tokens, heads=2)
    ks, ke = causal(tokens)
    whole = indexer_kl(index, ks, ke, attention)
    grads = torch.autograd.grad(whole, sources)
    monkeypatch.setattr(reference, "SCORES_AT_ONCE", {"cpu": 8 * 8 * tokens})  # 8 queries, 2 + 6 heads
    held = Held()
    with held:
        loss = indexer_kl(index, ks, ke, attention)
        loss.backward()
    assert held.most < tokens * tokens
    assert abs(loss - whole) < 1e-6 * whole
    for x, y in zip((source.grad for source in sources), grads, strict=True):
        assert (x - y).abs().max() < 1e-5 * y.abs().max()


class Held(TorchDispatchMode):
    """Elements of the largest tensor that an operation made."""

    most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, torch.Tensor):
                self.most = max(self.most, x.numel())
        return out


def test_projections_rope_and_hadamard():
    torch.manual_seed(0)
    indexer = LightningIndexer(24, heads=3, head_dim=64, rope_dim=32, query_size=10, topk=5, spec=BF16)
    x, query, positions = torch.randn(7, 24), torch.randn(7, 10), torch.tensor([0, 1, 2, 3, 0, 1, 2])
    index = indexer(x, query, positions)
    assert index.q.shape == (7, 3, 64) and index.k.shape == (7, 64) and index.weights.shape == (7, 3)

    matrix = torch.ones(1, 1)
    while len(matrix) < 64:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), matrix)
    k = indexer.k_norm(x @ indexer.k_proj.weight.T)
    rotated = k.clone()
    for row in range(7):
        for i in range(16):
            angle = positions[row].float() * 10000 ** (-i / 16)
            pair = torch.complex(k[row, i], k[row, 16 + i]) * torch.polar(torch.ones(()), angle)
            rotated[row, i], rotated[row, 16 + i] = pair.real, pair.imag
    torch.testing.assert_close(index.k.source, rotated @ matrix / 8, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(index.weights, x @ indexer.weights_proj.weight.T / (3 * 64) ** 0.5)
    # the score depends on the distance of positions only
    moved = indexer(x, query, positions + 40)
    score = lambda i: torch.einsum("mhd,nd->mhn", i.q.source, i.k.source)  # noqa: E731
    torch.testing.assert_close(score(moved), score(index), rtol=1e-4, atol=1e-4)


def test_select():
    torch.manual_seed(1)
    indexer = LightningIndexer(16, heads=2, head_dim=64, topk=6)
    x = torch.randn(30, 16, requires_grad=True)
    index = indexer(x)
    ks, ke = causal(12, 18)
    with ledger.recording() as log:
        best = pickle.loads(pickle.dumps(indexer)).select(index, ks, ke)
    assert {row["layer"] for row in log.gemms()} == {"indexer"}
    assert best.shape == (30, 6) and best.dtype == torch.int64
    logits = fp4_mqa_logits(index.q, index.k, index.weights, ks, ke)
    for row in range(30):
        seen = min(6, int(ke[row] - ks[row]))
        assert torch.equal(best[row, :seen], logits[row].topk(seen).indices)
        assert (best[row, seen:] == -1).all()
    # hidden state and attention are targets
    attention = Attention(torch.randn(30, 2, 8, requires_grad=True), torch.randn(30, 2, 8, requires_grad=True), 1.0)
    indexer_kl(index, ks, ke, attention, indices=best).backward()
    assert x.grad is attention.q.grad is attention.k.grad is None
    assert all(p.grad is not None and p.grad.isfinite().all() for p in indexer.parameters())
    assert set(indexer.state_dict()) == {
        "q_proj.weight", "k_proj.weight", "k_norm.weight", "k_norm.bias", "weights_proj.weight"
    }  # fmt: skip


def test_errors():
    with pytest.raises(ValueError, match="65"):
        LightningIndexer(16, heads=65)
    with pytest.raises(ValueError, match="rope_dim"):
        LightningIndexer(16, head_dim=64, rope_dim=66)
    with pytest.raises(ValueError, match="topk"):
        LightningIndexer(16, topk=0)
    with pytest.raises(ValueError, match=r"\(2, 3, 16\)"):
        LightningIndexer(16)(torch.zeros(2, 3, 16))
    _, index, attention = example(9)
    with pytest.raises(ValueError, match=r"\(8, 6, 8\) and \(9, 2, 8\)"):
        indexer_kl(index, *causal(9), attention._replace(q=attention.q[:8]))


def test_checkpointing_and_compile_change_nothing():
    torch.manual_seed(2)
    indexer = LightningIndexer(16, heads=2, head_dim=64, rope_dim=16, topk=6)
    x, (ks, ke) = torch.randn(20, 16), causal(20)
    attention = Attention(torch.randn(20, 2, 8), torch.randn(20, 2, 8), 1.0)

    def step(x):
        index = indexer(x)
        return indexer.loss(index, ks, ke, attention, indexer.select(index, ks, ke))

    def gradients(run):
        return torch.autograd.grad(run(x), tuple(indexer.parameters()))

    plain = gradients(step)
    for run in (
        lambda x: torch.utils.checkpoint.checkpoint(step, x, use_reentrant=False),
        torch.compile(step, fullgraph=True, backend="aot_eager"),
    ):
        assert all(torch.equal(a, b) for a, b in zip(gradients(run), plain, strict=True))


# learning

TOKENS, HIDDEN, KEPT, STEPS = 192, 16, 16, 200


def teacher(seed):
    """Tokens and the attention over them, three heads of 16 dimensions with fixed projections."""
    fixed = torch.Generator().manual_seed(99)
    project = torch.randn(2, HIDDEN, 3 * 16, generator=fixed) * HIDDEN**-0.5
    x = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(seed))
    q, k = (x @ matrix for matrix in project)
    return x, Attention(q.view(TOKENS, 3, 16), k.view(TOKENS, 3, 16), 0.5)


def recall(indexer, ks, ke, seeds=range(1000, 1008)):
    """Share of attention's own top keys that the indexer selects."""
    found = []
    for seed in seeds:
        x, attention = teacher(seed)
        scores = torch.einsum("mae,nae->man", attention.q, attention.k) * attention.scale
        right = scores.softmax(2).sum(1).topk(KEPT).indices
        best = indexer.select(indexer(x), ks, ke)
        found.append((best.unsqueeze(2) == right.unsqueeze(1)).any(1).float().mean())
    return torch.stack(found).mean().item()


def trained(spec):
    torch.manual_seed(7)
    indexer = LightningIndexer(HIDDEN, heads=8, head_dim=128, rope_dim=0, topk=KEPT, spec=spec)
    optimizer = torch.optim.AdamW(indexer.parameters(), lr=0.04, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.04, STEPS)
    ks, ke = torch.zeros(TOKENS, dtype=torch.int32), torch.full((TOKENS,), TOKENS, dtype=torch.int32)
    before = recall(indexer, ks, ke)
    for step in range(STEPS):
        x, attention = teacher(step)
        index = indexer(x)
        # the last third trains as sparse attention does, on the keys selected
        indices = indexer.select(index, ks, ke) if step >= STEPS * 2 // 3 else None
        loss = indexer.loss(index, ks, ke, attention, indices)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return before, recall(indexer, ks, ke)


def test_it_learns_to_find_attentions_keys():
    chance = KEPT / TOKENS
    _, control = trained(BF16)
    before, after = trained(DEEPSEEK)
    print(f"recall@{KEPT}: {before:.3f} before, {after:.3f} after, {control:.3f} in BF16, {chance:.3f} by chance")
    assert after >= 0.95 * control
    assert after >= 3 * chance and after > 2 * before
