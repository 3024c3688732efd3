"""MQA logits, the score of a lightning indexer: the definition, forward and backward, in plain PyTorch.

    logits[m, n] = sum_h relu(q[m, h] . k[n]) * weights[m, h]      for ks[m] <= n < ke[m]

One key head serves all query heads. Operands are decoded without their global scales, where they have any: these
values are exact in BF16 (and in TF32), so no setting of a matrix unit can round them; as scales are positive they pass
through the relu, and they enter once, as a float32 factor of the logit. Everything else is float32.

Queries are worked on in chunks, so that no M x H x N tensor is ever held. Backward recomputes the scores from the
quantized operands; each of its sums has one order, so repeats agree bit for bit.

Source of the function: DeepSeek-V3.2 (arXiv:2512.02556), section on the lightning indexer.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from nvfp4_kernels.quantized import Quantized
from nvfp4_kernels.reference import codecs
from nvfp4_kernels.reference.quantize import ENCODE_RANGE, decode, quantize
from nvfp4_kernels.scheme import Scheme

SCORES_AT_ONCE = {"cpu": 1 << 21}  # float32 scores of one chunk: on a CPU what its cache holds
SCORES_AT_ONCE_ELSEWHERE = 1 << 26
MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # between neighbours of the E2M1 grid
TOWARD_ZERO = Scheme(scale="e8m0", rule="ceil", block=(1, 32))


def mqa_logits(
    q: Quantized,
    k: Quantized,
    scheme: Scheme | None,
    weights: Tensor,
    ks: Tensor,
    ke: Tensor,
    *,
    out_dtype: torch.dtype = torch.float32,
    clean_logits: bool = True,
    max_seqlen_k: int | None = None,
) -> Tensor:
    """``out_dtype [M, N]``, or ``[M, max_seqlen_k]`` whose column j is key ``ks + j``.

    ``q``: rows m * H + h of D columns; ``k``: N rows. ``scheme``: how both are coded, 1-D blocks; None for BF16
    operands (``Quantized.operand``). ``weights``: float32 [M, H]. ``ks``, ``ke``: integers [M], clamped to [0, N].
    Outside [ks, ke): -inf with ``clean_logits``, unspecified without. Keys beyond ``max_seqlen_k`` are left out.
    """
    queries, keys, factor = _operands(q, k, scheme, weights)
    count, width = len(keys), len(keys) if max_seqlen_k is None else max_seqlen_k
    out = torch.empty(len(queries), width, dtype=out_dtype, device=weights.device)
    for rows in query_chunks(len(queries), weights.shape[1] * count, weights.device):
        logits = _weighted(queries[rows].float() @ keys.T, weights[rows], factor)
        inside, source = _window(ks[rows], ke[rows], count, max_seqlen_k)
        if source is not None:
            logits = logits.gather(1, source) if count else logits.new_zeros(inside.shape)
        out[rows] = logits.masked_fill_(~inside, -torch.inf) if clean_logits else logits
    return out


def mqa_logits_backward(
    grad: Tensor,
    q: Quantized,
    k: Quantized,
    scheme: Scheme | None,
    weights: Tensor,
    ks: Tensor,
    ke: Tensor,
    *,
    max_seqlen_k: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """float32 (dq [M, H, D], dk [N, D], dweights [M, H]) straight through the quantizers, for ``grad`` of the logits.

    What stands in ``grad`` outside [ks, ke), NaN included, has no effect.
    """
    queries, keys, _ = _operands(q, k, scheme, weights)
    q_scale, k_scale = _global_scale(q), _global_scale(k)
    dq = torch.empty(queries.shape, dtype=torch.float32, device=weights.device)
    dk, dweights = torch.zeros_like(keys), torch.empty_like(weights)
    for rows in query_chunks(len(queries), 2 * weights.shape[1] * len(keys), weights.device):
        inside, _ = _window(ks[rows], ke[rows], len(keys), None)
        dlogits = _dense_grad(grad[rows].float(), inside, ks[rows], max_seqlen_k)
        query = queries[rows].float()
        scores = query @ keys.T
        dscores, dweights[rows] = _through_relu(scores, weights[rows], dlogits)
        dq[rows] = dscores @ keys
        dk += dscores.flatten(0, 1).T @ query.flatten(0, 1)
    return _scaled(dq, k_scale), _scaled(dk, q_scale), _scaled(_scaled(dweights, q_scale), k_scale)


def mqa_logits_at(
    q: Quantized,
    k: Quantized,
    scheme: Scheme | None,
    weights: Tensor,
    indices: Tensor,
    *,
    out_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """``out_dtype [M, K]``: the logits of the keys ``indices [M, K]`` only (the top-k form); -inf outside [0, N)."""
    queries, keys, factor = _operands(q, k, scheme, weights)
    out = torch.empty(indices.shape, dtype=out_dtype, device=weights.device)
    for rows in query_chunks(len(queries), indices.shape[1] * sum(queries.shape[1:]), weights.device):
        chosen, inside, _ = _choose(keys, indices[rows])
        logits = _weighted(queries[rows].float() @ chosen.transpose(1, 2), weights[rows], factor)
        out[rows] = logits.masked_fill_(~inside, -torch.inf)
    return out


def mqa_logits_at_backward(
    grad: Tensor, q: Quantized, k: Quantized, scheme: Scheme | None, weights: Tensor, indices: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """As ``mqa_logits_backward``, for ``grad [M, K]`` of the logits at ``indices``."""
    queries, keys, _ = _operands(q, k, scheme, weights)
    q_scale, k_scale = _global_scale(q), _global_scale(k)
    dq = torch.empty(queries.shape, dtype=torch.float32, device=weights.device)
    dk, dweights = torch.zeros_like(keys), torch.empty_like(weights)
    for rows in query_chunks(len(queries), 2 * indices.shape[1] * sum(queries.shape[1:]), weights.device):
        chosen, inside, index = _choose(keys, indices[rows])
        query = queries[rows].float()
        scores = query @ chosen.transpose(1, 2)
        dscores, dweights[rows] = _through_relu(scores, weights[rows], grad[rows].float().where(inside, 0.0))
        dq[rows] = dscores @ chosen
        if len(keys):
            _add_rows(dk, index.flatten(), (dscores.transpose(1, 2) @ query).flatten(0, 1))
    return _scaled(dq, k_scale), _scaled(dk, q_scale), _scaled(_scaled(dweights, q_scale), k_scale)


def paged_mqa_logits(
    q: Quantized,
    cache: Tensor,
    cache_amax: Tensor | None,
    scheme: Scheme,
    weights: Tensor,
    limits: Tensor,
    block_table: Tensor,
    max_context_len: int,
    *,
    out_dtype: torch.dtype = torch.float32,
    clean_logits: bool = True,
) -> Tensor:
    """``out_dtype [B * T, max_context_len]``: T queries of each of B sequences against its own paged keys.

    ``cache``: uint8 [pages, page, 1, D/2 + S], a page holding its keys' codes first, then their S scale bytes each.
    ``limits``: integers [B, T], how many keys a query sees. ``block_table``: integers [B, P], pages of a sequence in
    order. Neither a page nor a slot beyond a sequence's longest limit is read, nor the table's entry for it.
    """
    batch, each = limits.shape
    heads, half = weights.shape[1], q.codes.shape[1]
    page = cache.shape[1]
    fill = -torch.inf if clean_logits else 0.0
    out = torch.full((batch * each, max_context_len), fill, dtype=out_dtype, device=weights.device)
    for index, length in enumerate(limits.amax(dim=1).clamp(0, max_context_len).tolist() if each else ()):
        if length == 0:
            continue
        bytes_ = cache[block_table[index, : -(-length // page)].long()].flatten(1)
        codes = bytes_[:, : page * half].reshape(-1, half)[:length]
        scales = bytes_[:, page * half :].reshape(-1, cache.shape[3] - half)[:length]
        keys = Quantized(codes, scales[:, : 2 * half // scheme.block[1]].contiguous(), None, cache_amax)
        rows = slice(index * each, (index + 1) * each)
        query = slice(index * each * heads, (index + 1) * each * heads)
        out[rows, :length] = mqa_logits(
            Quantized(q.codes[query], q.scales[query], None, q.amax), keys, scheme, weights[rows],
            torch.zeros_like(limits[index]), limits[index], out_dtype=out_dtype, clean_logits=clean_logits,
        )  # fmt: skip
    return out


def quantize_toward_zero(x: Tensor) -> Quantized:
    """MXFP4 codes and scales of ``x [R, D]``, DeepSeek's scale rule, ties to the neighbour nearer to zero.

    The twin of DeepGEMM's Python helper, which also knows no negative zero. Non-finite input gives a NaN scale.
    """
    scales = quantize(x, TOWARD_ZERO, None)[0].scales
    blocks = x.float().unflatten(1, (-1, 32))
    finite = (scales != 255).unsqueeze(2)
    y = blocks * codecs.e8m0_decode(254 - scales.clamp(max=254)).unsqueeze(2)  # exact: a power of two
    magnitude = torch.stack([y.abs() > midpoint for midpoint in MIDPOINTS]).sum(0, dtype=torch.uint8)
    codes = magnitude | ((y < 0) & (magnitude > 0)).to(torch.uint8) << 3
    return Quantized(codecs.pack((codes * finite).flatten(1), 1), scales, None)


def _operands(q: Quantized, k: Quantized, scheme: Scheme | None, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(queries [M, H, D] bfloat16, keys [N, D] float32, both without global scales, their product or None)."""
    queries, keys = (
        part.operand if scheme is None else decode(part.codes, part.scales, scheme, 2 * part.codes.shape[1])
        for part in (q, k)
    )
    factor = None if _global_scale(q) is None else _global_scale(q) * _global_scale(k)
    return queries.reshape(*weights.shape, keys.shape[1]), keys.float(), factor


def _global_scale(x: Quantized) -> Tensor | None:
    return None if x.amax is None else x.amax * (1 / ENCODE_RANGE)


def _scaled(x: Tensor, scale: Tensor | None) -> Tensor:
    return x if scale is None else x.mul_(scale)


def _weighted(scores: Tensor, weights: Tensor, factor: Tensor | None) -> Tensor:
    """``sum_h relu(scores [c, H, n]) * weights [c, H]``; not as a matrix product, which might round the weights."""
    return _scaled(scores.relu_().mul_(weights.unsqueeze(2)).sum(1), factor)


def _through_relu(scores: Tensor, weights: Tensor, dlogits: Tensor) -> tuple[Tensor, Tensor]:
    """(dscores [c, H, n], dweights [c, H]) for scores without global scales; overwrites ``scores``."""
    dscores = dlogits.unsqueeze(1) * weights.unsqueeze(2)
    dscores.masked_fill_(scores <= 0, 0.0)
    return dscores, scores.relu_().mul_(dlogits.unsqueeze(1)).sum(2)


def _window(ks: Tensor, ke: Tensor, count: int, width: int | None) -> tuple[Tensor, Tensor | None]:
    """(bool [c, columns]: a key of the query's range; int64 [c, width]: which key, None where columns are keys)."""
    start, end = (x.clamp(0, count).long().unsqueeze(1) for x in (ks, ke))
    columns = torch.arange(count if width is None else width, device=ks.device)
    if width is None:
        return (columns >= start) & (columns < end), None
    source = start + columns
    return source < end, source.clamp(max=max(count - 1, 0))


def _dense_grad(grad: Tensor, inside: Tensor, ks: Tensor, width: int | None) -> Tensor:
    """The gradient by key, float32 [c, N], from that of the logits in either form; 0 outside the range."""
    if width is None:
        return grad.where(inside, 0.0)
    if width == 0:
        return grad.new_zeros(inside.shape)
    count = inside.shape[1]
    column = torch.arange(count, device=ks.device) - ks.clamp(0, count).long().unsqueeze(1)
    return grad.gather(1, column.clamp(0, width - 1)).where(inside & (column < width), 0.0)


def _choose(keys: Tensor, indices: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(keys [c, K, D], bool [c, K]: it is a key, int64 [c, K] indices that are safe to use)."""
    inside = (indices >= 0) & (indices < len(keys))
    index = indices.long().where(inside, 0)
    chosen = keys[index] if len(keys) else keys.new_zeros(*index.shape, keys.shape[1])
    return chosen, inside, index


def _add_rows(total: Tensor, index: Tensor, rows: Tensor) -> None:
    """``total[index[i]] += rows[i]`` in one order: index_add_ goes row by row on a CPU but uses atomics on a GPU,
    where index_put_ sorts first."""
    if total.device.type == "cpu":
        total.index_add_(0, index, rows)
    else:
        total.index_put_((index,), rows, accumulate=True)


def query_chunks(queries: int, scores_each: int, device: torch.device) -> Iterator[slice]:
    """Slices of the queries whose scores together stay in bounds, one query at the least."""
    budget = SCORES_AT_ONCE.get(device.type, SCORES_AT_ONCE_ELSEWHERE)
    step = max(1, budget // max(scores_each, 1))
    return (slice(start, min(start + step, queries)) for start in range(0, queries, step))
