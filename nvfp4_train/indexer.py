"""LightningIndexer: learns in 4 bits which keys attention will look at (DeepSeek sparse attention).

    q, k, weights   three small projections of the hidden state; RoPE; a Hadamard transform; 4-bit codes
    I[t, s]         = sum_h relu(q[t, h] . k[s]) * weights[t, h]                  fp4_mqa_logits
    top-k of I[t]   the keys that attention then attends to                       select
    loss            = mean_t KL( p[t] || softmax I[t] )                           indexer_kl

p[t] is attention's own distribution, summed over its heads and normalized. The forward pass quantizes, the backward
pass goes straight through, so the indexer is trained as it will be used. Hidden state and attention are targets:
no gradient reaches them.

The loss goes over the queries in chunks and makes its gradients on the way, so it never holds a matrix of all queries
by all keys, let alone two in float32 (the scores and p).

Source: DeepSeek-V3.2 (arXiv:2512.02556); dense warm-up is the form without ``indices``, sparse training the other.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from nvfp4_kernels.reference.mqa_logits import query_chunks
from nvfp4_train import ledger
from nvfp4_train.ledger import UNNAMED
from nvfp4_train.mqa_logits import fp4_mqa_logits
from nvfp4_train.mqa_operands import DEEPSEEK, HEAD_DIMS, MOST_HEADS, MQAOperand, mqa_operand, parts
from nvfp4_train.mqa_ops import logits_at_backward_op, logits_at_op, logits_backward_op, logits_op
from nvfp4_train.recipe import OperandSpec


class Index(NamedTuple):
    """What T tokens ask for and offer: the arguments of ``fp4_mqa_logits``."""

    q: MQAOperand  # [T, H, D]
    k: MQAOperand  # [T, D]
    weights: Tensor  # float32 [T, H]


class Attention(NamedTuple):
    """The attention to be imitated: queries [T, A, E], keys [N, G, E] (A a multiple of G), scores q . k * scale."""

    q: Tensor
    k: Tensor
    scale: float


class LightningIndexer(nn.Module):
    """The indexer's projections and their quantization.

    Args:
        hidden_size: of the tokens.
        heads, head_dim: H (1 to 64) and D (64 or 128).
        rope_dim: how many of the D dimensions, the first ones, are rotated by position (halves, not interleaved).
        query_size: width of what the queries are projected from, where that is not the hidden state (MLA's latent).
        topk: keys selected for a query.
        spec: format of q and k; ``OperandSpec(format="bf16")`` for the control. ``ties``: see ``mqa_operand``.

    Raises:
        ValueError: sizes that cannot be.
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        heads: int = 64,
        head_dim: int = 128,
        rope_dim: int = 64,
        query_size: int | None = None,
        topk: int = 2048,
        spec: OperandSpec = DEEPSEEK,
        ties: str = "even",
        rope_theta: float = 10000.0,
        label: str = "indexer",
        device=None,
        dtype=None,
    ):
        super().__init__()
        if head_dim not in HEAD_DIMS or not 1 <= heads <= MOST_HEADS:
            raise ValueError(f"heads must be 1 to {MOST_HEADS} and head_dim 64 or 128, got {heads} and {head_dim}")
        if rope_dim % 2 or not 0 <= rope_dim <= head_dim:
            raise ValueError(f"rope_dim must be even and at most head_dim {head_dim}, got {rope_dim}")
        if topk < 1:
            raise ValueError(f"topk must be at least 1, got {topk}")
        options = dict(bias=False, device=device, dtype=dtype)
        self.heads, self.head_dim, self.rope_dim, self.topk = heads, head_dim, rope_dim, topk
        self.spec, self.ties, self.rope_theta, self.label = spec, ties, rope_theta, label
        self.site = ledger.site(label)
        self.q_proj = nn.Linear(query_size or hidden_size, heads * head_dim, **options)
        self.k_proj = nn.Linear(hidden_size, head_dim, **options)
        self.k_norm = nn.LayerNorm(head_dim, eps=1e-6, device=device, dtype=dtype)
        self.weights_proj = nn.Linear(hidden_size, heads, **options)

    def forward(self, x: Tensor, query: Tensor | None = None, positions: Tensor | None = None) -> Index:
        """Tokens ``x [T, hidden_size]`` (of several documents, one after the other) to their ``Index``.

        ``query [T, query_size]``: what the queries are projected from, x if None. ``positions``: integers [T],
        0 to T - 1 if None.
        """
        if x.dim() != 2:
            raise ValueError(f"the indexer takes tokens [T, hidden_size], got {tuple(x.shape)}")
        x = x.detach()
        query = x if query is None else query.detach()
        positions = torch.arange(len(x), device=x.device) if positions is None else positions
        q = self._turned(self.q_proj(query).view(len(x), self.heads, self.head_dim), positions[:, None])
        k = self._turned(self.k_norm(self.k_proj(x)), positions)
        weights = self.weights_proj(x).float() * (self.heads * self.head_dim) ** -0.5
        where = len(self.site)
        return Index(*(mqa_operand(part, self.spec, ties=self.ties, where=where) for part in (q, k)), weights)

    @torch.no_grad()
    def select(self, index: Index, ks: Tensor, ke: Tensor) -> Tensor:
        """int64 ``[T, min(topk, N)]``: the best keys of [ks, ke), best first; -1 where a range holds fewer."""
        count = index.k.shape[0]
        best = torch.empty(len(index.weights), min(self.topk, count), dtype=torch.int64, device=index.weights.device)
        for rows in query_chunks(len(best), self.heads * count, best.device):
            logits = fp4_mqa_logits(
                _queries(index.q, rows), index.k, index.weights[rows], ks[rows], ke[rows],
                where=len(self.site),
            )  # fmt: skip
            values, keys = logits.topk(best.shape[1], dim=1)
            best[rows] = keys.masked_fill_(values == -torch.inf, -1)
        return best

    def loss(self, index: Index, ks: Tensor, ke: Tensor, attention: Attention, indices: Tensor | None = None) -> Tensor:
        """``indexer_kl``, under this module's name in the ledger."""
        return indexer_kl(index, ks, ke, attention, indices=indices, where=len(self.site))

    def __getstate__(self):
        return {key: value for key, value in self.__dict__.items() if key != "site"}

    def __setstate__(self, state):
        super().__setstate__(state)
        self.site = ledger.site(self.label)  # sites are numbered anew in each process

    def _turned(self, x: Tensor, positions: Tensor) -> Tensor:
        """RoPE on the first dimensions, then the transform, which spreads what outliers there are over all of D."""
        half = self.rope_dim // 2
        exponents = torch.arange(half, device=x.device) / max(half, 1)
        angles = positions.unsqueeze(-1) * self.rope_theta**-exponents
        cos, sin = angles.cos(), angles.sin()
        a, b, rest = x.float().split((half, half, self.head_dim - self.rope_dim), dim=-1)
        turned = torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1)
        return (turned.to(x.dtype) @ _hadamard(self.head_dim, x.device).to(x.dtype)) * self.head_dim**-0.5


def indexer_kl(
    index: Index, ks: Tensor, ke: Tensor, attention: Attention, *, indices: Tensor | None = None, where: int = UNNAMED
) -> Tensor:
    """float32 scalar: KL(attention || softmax of the index), the mean over the queries that see a key.

    ``indices`` [T, K]: both distributions are taken over these keys only (within [ks, ke); -1 is none), at a cost that
    goes with K; without it over all of [ks, ke). ValueError where the shapes do not fit.
    """
    q, k, scale = attention
    tokens, keys = index.q.shape[0], index.k.shape[0]
    if q.dim() != 3 or k.dim() != 3 or len(q) != tokens or len(k) != keys or q.shape[1] % k.shape[1]:
        raise ValueError(
            f"attention must be queries [{tokens}, A, E] and keys [{keys}, G, E], A a multiple of G, got "
            f"{tuple(q.shape)} and {tuple(k.shape)}"
        )
    return _IndexerKL.apply(
        index.q.source, index.k.source, index.weights, index, ks, ke, q.detach(), k.detach(), scale, indices,
        where,
    )  # fmt: skip


class _IndexerKL(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q_source, k_source, weights, index, ks, ke, attn_q, attn_k, scale, indices, where):
        weights, keys = weights.detach(), index.k.shape[0]
        start, end = (x.clamp(0, keys).long().unsqueeze(1) for x in (ks, ke))
        columns = torch.arange(keys, device=ks.device).unsqueeze(0) if indices is None else indices
        seen = (end > start) if indices is None else ((columns >= start) & (columns < end)).any(1)
        share = 1 / seen.sum().clamp(min=1)
        loss = weights.new_zeros(())
        wanted = any(ctx.needs_input_grad[:3])
        dq = weights.new_empty(index.q.shape) if wanted else None
        dk = weights.new_zeros(index.k.shape) if wanted else None
        dweights = torch.empty_like(weights) if wanted else None
        heads = weights.shape[1] + attn_q.shape[1]
        each = heads * keys if indices is None else columns.shape[1] * heads * max(index.q.shape[2], attn_q.shape[2])
        for rows in query_chunks(len(weights), each, weights.device):
            column = columns if indices is None else columns[rows]
            inside = (column >= start[rows]) & (column < end[rows])
            operands = (*parts(_queries(index.q, rows).quantized), *parts(index.k.quantized), weights[rows])
            with torch.autocast(weights.device.type, enabled=False):
                if indices is None:
                    logits = logits_op(*operands, ks[rows], ke[rows], torch.float32, True, None, where)
                else:
                    column = column.where(inside, -1)
                    logits = logits_at_op(*operands, column, torch.float32, where)
                target = _attention_rows(attn_q[rows], attn_k, scale, None if indices is None else column, inside)
                predicted = logits.log_softmax(1).where(inside, 0.0)  # a query that sees nothing has NaN there
                loss += (torch.xlogy(target, target) - target * predicted).sum() * share
                if not wanted:
                    continue
                dlogits = ((predicted.exp() - target) * share).where(inside, 0.0)
            if indices is None:
                grads = logits_backward_op(dlogits, *operands, ks[rows], ke[rows], None, where)
            else:
                grads = logits_at_backward_op(dlogits, *operands, column, where)
            dq[rows], dweights[rows] = grads[0], grads[2]
            dk += grads[1]
        ctx.save_for_backward(dq, dk, dweights)
        ctx.dtypes = [None if source is None else source.dtype for source in (q_source, k_source, weights)]
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        grads = (
            (x * grad).to(dtype) if dtype is not None and needed else None
            for x, dtype, needed in zip(ctx.saved_tensors, ctx.dtypes, ctx.needs_input_grad[:3], strict=True)
        )
        return *grads, *(None,) * 8


def _attention_rows(q: Tensor, k: Tensor, scale: float, chosen: Tensor | None, inside: Tensor) -> Tensor:
    """float32 [c, columns]: the mean of the heads' distributions over the keys ``inside``; 0 elsewhere."""
    grouped = q.float().unflatten(1, (k.shape[1], -1))  # [c, G, A / G, E]
    if chosen is None:
        scores = torch.einsum("cgae,nge->cgan", grouped, k.float())
    else:
        safe = chosen.long().clamp(0, max(len(k) - 1, 0))
        keys = k[safe].float() if len(k) else k.new_zeros(*safe.shape, *k.shape[1:]).float()
        scores = torch.einsum("cgae,cnge->cgan", grouped, keys)
    scores = scores.flatten(1, 2).mul_(scale).masked_fill_(~inside.unsqueeze(1), -torch.inf)
    return scores.softmax(2).mean(1).where(inside, 0.0)


def _queries(q: MQAOperand, rows: slice) -> MQAOperand:
    """The operand of some of the queries, without a source."""
    heads = q.shape[1]
    part = slice(rows.start * heads, rows.stop * heads)
    cut = {
        name: value[part]
        for name in ("codes", "scale_bytes", "operand")
        if (value := getattr(q.quantized, name)) is not None
    }
    count = rows.stop - rows.start
    return MQAOperand(q.quantized._replace(rows=count * heads, **cut), (count, *q.shape[1:]))


def _hadamard(size: int, device: torch.device) -> Tensor:
    """[size, size] of +-1, Sylvester's order, exact in every type: -1 where row & column has an odd number of bits.

    Made anew each time: a buffer that is no part of the state_dict is lost when a module leaves the meta device.
    """
    index = torch.arange(size, device=device)
    bits = index.unsqueeze(1) & index
    for shift in (4, 2, 1):
        bits = bits ^ (bits >> shift)
    return 1 - 2 * (bits & 1)
