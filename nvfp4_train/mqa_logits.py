"""FP4 MQA logits, the lightning indexer's score, with gradients.

    logits[m, n] = sum_h relu(q[m, h] . k[n]) * weights[m, h]      for ks[m] <= n < ke[m]

Two forms: ``fp4_mqa_logits`` scores a range of keys for each query, ``fp4_mqa_logits_at`` a list of them (its top-k).
Both are differentiable: by ``weights``, and straight through the quantizers by what ``mqa_operand`` quantized. Backward
keeps the packed operands only and recomputes the scores. ``fp4_paged_mqa_logits`` is for decoding, forward only.

A call written for DeepGEMM's ``fp8_fp4_mqa_logits`` runs as it is; only its ``logits_dtype`` is ``out_dtype`` here.

The data's way, and where precision is lost (MXFP4; NVFP4 in brackets):

1. Storage. E2M1 codes, largest value 6, two a byte; beside each 32 (16) of them one byte of scale, UE8M0, 2^-127 to
   2^127 (E4M3, under one float32 amax of the tensor). A key of 128 is 64 + 4 (64 + 8) bytes. *Lost here*: what
   quantizing x costs; everything after works on the quantized values.
2. Scores. A product of two codes is a multiple of 1/4 and at most 36, so the sum over a block is exact in float32
   (in 13 bits). Adding the blocks rounds in float32, about 2^-24 of the sum of magnitudes.
3. Relu, times the weight, sum over the heads: float32. (The amax of both tensors enter after it: they are positive.)
4. Output: *one rounding*, to ``out_dtype``.

On a GPU the products run in E5M2 or bfloat16 (exact in both) or as FP4, and are summed as its matrix unit does: Hopper
keeps about 13 bits below the largest product of E5M2. experiments/2026-11-30_mqa_logits/README.md follows the data
through the kernels.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nvfp4_train.ledger import UNNAMED
from nvfp4_train.mqa_operands import MOST_HEADS, MQAOperand, as_operand, check_pair, parts, scale_bytes_of
from nvfp4_train.mqa_ops import logits_at_backward_op, logits_at_op, logits_backward_op, logits_op, paged_op
from nvfp4_train.quantization import QuantizedTensor

OUT_TYPES = (torch.float32, torch.bfloat16, torch.float16)
INDEX_TYPES = (torch.int32, torch.int64)
PAGES = (32, 64, 128)

Operand = MQAOperand | QuantizedTensor | tuple[Tensor, Tensor]


def fp4_mqa_logits(
    q: Operand,
    kv: Operand,
    weights: Tensor,
    ks: Tensor,
    ke: Tensor,
    clean_logits: bool = True,
    max_seqlen_k: int | None = None,
    *,
    out_dtype: torch.dtype = torch.float32,
    where: int = UNNAMED,
) -> Tensor:
    """``[M, N]``: the score of every key in [ks, ke) for every query.

    Args:
        q: queries [M, H, D], H 1 to 64, D 64 or 128: an ``mqa_operand``, a QuantizedTensor [M * H, D], or DeepGEMM's
            (int8 [M, H, D/2], int32 [M, H]).
        kv: keys [N, D] of the same format (DeepGEMM's: int8 [N, D/2], int32 [N]).
        weights: [M, H], used in float32.
        ks, ke: int32 or int64 [M], clamped to [0, N]; ``ke <= ks`` is an empty row.
        clean_logits: -inf outside the range; without it, what stands there is unspecified.
        max_seqlen_k: compressed columns: ``[M, max_seqlen_k]``, column j being key ``ks + j``, later keys left out.
            None and 0 (DeepGEMM's default) mean all N columns.
        out_dtype: float32, bfloat16 or float16; sums are float32, rounded once.
        where: the ledger's number of the caller, ``len(ledger.site(label))``.

    Raises:
        ValueError: operands that do not fit each other, with the shapes.
    """
    q, kv = as_operand(q, "q"), as_operand(kv, "kv")
    check_pair(q, kv.quantized.scheme_text, "kv")
    weights = _check_queries(q, weights)
    _check_keys(q, kv)
    for name, index in (("ks", ks), ("ke", ke)):
        if index.dtype not in INDEX_TYPES or tuple(index.shape) != (len(weights),):
            raise ValueError(
                f"{name} must be int32 or int64 [{len(weights)}], as weights {tuple(weights.shape)} have it, got "
                f"{index.dtype} {tuple(index.shape)}"
            )
    _check_devices(weights, q=q.quantized, kv=kv.quantized, ks=ks, ke=ke)
    _check_out_dtype(out_dtype)
    if max_seqlen_k is not None and max_seqlen_k < 0:
        raise ValueError(f"max_seqlen_k must not be negative, got {max_seqlen_k}")
    return _Logits.apply(
        q.source, kv.source, weights, *parts(q.quantized), *parts(kv.quantized), ks, ke, out_dtype, clean_logits,
        max_seqlen_k or None, where,
    )  # fmt: skip


def fp4_mqa_logits_at(
    q: Operand,
    kv: Operand,
    weights: Tensor,
    indices: Tensor,
    *,
    out_dtype: torch.dtype = torch.float32,
    where: int = UNNAMED,
) -> Tensor:
    """``[M, K]``: the scores of the keys ``indices`` (int32 or int64 [M, K]) only; -inf for an index outside [0, N).

    Its cost, and that of its backward, goes with M * K. The other arguments are those of ``fp4_mqa_logits``.
    """
    q, kv = as_operand(q, "q"), as_operand(kv, "kv")
    check_pair(q, kv.quantized.scheme_text, "kv")
    weights = _check_queries(q, weights)
    _check_keys(q, kv)
    if indices.dtype not in INDEX_TYPES or indices.dim() != 2 or len(indices) != len(weights):
        raise ValueError(
            f"indices must be int32 or int64 [{len(weights)}, K], as weights {tuple(weights.shape)} have it, got "
            f"{indices.dtype} {tuple(indices.shape)}"
        )
    _check_devices(weights, q=q.quantized, kv=kv.quantized, indices=indices)
    _check_out_dtype(out_dtype)
    return _LogitsAt.apply(
        q.source, kv.source, weights, *parts(q.quantized), *parts(kv.quantized), indices, out_dtype, where
    )


def fp4_paged_mqa_logits(
    q: Operand,
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    schedule_meta: Tensor | None = None,
    max_context_len: int | None = None,
    clean_logits: bool = True,
    *,
    out_dtype: torch.dtype = torch.float32,
    cache_amax: Tensor | None = None,
    where: int = UNNAMED,
) -> Tensor:
    """``[B * T, max_context_len]``: T queries (``next_n``) of each of B sequences against its own cached keys.

    Args:
        q: queries [B, T, H, D]: an ``mqa_operand``, a QuantizedTensor [B * T * H, D] or DeepGEMM's (int8
            [B, T, H, D/2], int32 [B, T, H]).
        kv_cache: uint8 [pages, page, 1, D/2 + S] as ``paged_cache`` makes it, page 32, 64 or 128.
        weights: [B * T, H].
        context_lens: int32 or int64; [B, T]: how many keys each query sees; [B]: how many the last query of a
            sequence sees, the ones before it one less each.
        block_table: int32 or int64 [B, P]: the pages of a sequence, in order. Entries that no query needs are not read.
        schedule_meta: DeepGEMM's plan of its work, at DeepGEMM's place in the call; there is none to make here.
        max_context_len: columns of the result, P * page if None; later keys are left out.
        cache_amax: the global amax of NVFP4 keys.

    Raises:
        ValueError: operands that do not fit each other, with the shapes; on a CPU, a context longer than its block
            table (on a GPU, where finding out would wait for the device, such a context ends where its table does).
    """
    del schedule_meta
    q = as_operand(q, "q")
    weights = _check_queries(q, weights)
    for name, index in (("context_lens", context_lens), ("block_table", block_table)):
        if index.dtype not in INDEX_TYPES:
            raise ValueError(f"{name} must be int32 or int64, got {index.dtype} {tuple(index.shape)}")
    batch, table = len(context_lens), block_table.shape[-1]
    each = len(weights) // max(batch, 1)
    agree = tuple(context_lens.shape) in ((batch,), (batch, each)) and tuple(block_table.shape) == (batch, table)
    if not agree or each * batch != len(weights):
        raise ValueError(
            f"context_lens [B] or [B, T], block_table [B, P] and weights [B * T, H] must agree, got "
            f"{tuple(context_lens.shape)}, {tuple(block_table.shape)} and {tuple(weights.shape)}"
        )
    head_dim, scheme = q.shape[-1], q.quantized.scheme
    if scheme is None:
        raise ValueError("paged keys are of 4 bits: quantize q to their format, not to bf16")
    last = head_dim // 2 + scale_bytes_of(scheme, head_dim)
    shape = tuple(kv_cache.shape)
    if kv_cache.dtype != torch.uint8 or len(shape) != 4 or shape[1] not in PAGES or shape[2:] != (1, last):
        raise ValueError(
            f"kv_cache must be uint8 [pages, 32 | 64 | 128, 1, {last}] for queries of {scheme}, D {head_dim}, got "
            f"{kv_cache.dtype} {shape}"
        )
    if scheme.has_global_scale != (cache_amax is not None):
        raise ValueError(f"cache_amax goes with NVFP4 keys and only with them, and q is {scheme}")
    _check_devices(weights, q=q.quantized, kv_cache=kv_cache, context_lens=context_lens, block_table=block_table)
    _check_out_dtype(out_dtype)
    limits = context_lens
    if limits.dim() == 1:
        limits = limits.unsqueeze(1) + torch.arange(1 - each, 1, device=limits.device, dtype=limits.dtype)
    return paged_op(
        q.quantized.codes, q.quantized.scale_bytes, q.quantized.global_amax, kv_cache, cache_amax, weights.detach(),
        limits, block_table, q.quantized.scheme_text, table * shape[1] if max_context_len is None else max_context_len,
        out_dtype, clean_logits, where,
    )  # fmt: skip


class _Logits(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, q_source, k_source, weights, q, q_scales, q_amax, q_scheme, k, k_scales, k_amax, k_scheme, ks, ke,
        out_dtype, clean_logits, max_seqlen_k, where,
    ):  # fmt: skip
        operands = (q, q_scales, q_amax, q_scheme, k, k_scales, k_amax, k_scheme)
        _save(ctx, operands, weights, ks, ke, sources=(q_source, k_source))
        ctx.max_seqlen_k, ctx.where = max_seqlen_k, where
        return logits_op(*operands, weights, ks, ke, out_dtype, clean_logits, max_seqlen_k, where)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        operands, (weights, ks, ke) = _restore(ctx)
        grads = logits_backward_op(grad, *operands, weights, ks, ke, ctx.max_seqlen_k, ctx.where)
        return *_to_sources(ctx, grads), *(None,) * 14


class _LogitsAt(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, q_source, k_source, weights, q, q_scales, q_amax, q_scheme, k, k_scales, k_amax, k_scheme, indices,
        out_dtype, where,
    ):  # fmt: skip
        operands = (q, q_scales, q_amax, q_scheme, k, k_scales, k_amax, k_scheme)
        _save(ctx, operands, weights, indices, sources=(q_source, k_source))
        ctx.where = where
        return logits_at_op(*operands, weights, indices, out_dtype, where)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        operands, (weights, indices) = _restore(ctx)
        grads = logits_at_backward_op(grad, *operands, weights, indices, ctx.where)
        return *_to_sources(ctx, grads), *(None,) * 11


def _save(ctx, operands, *tensors, sources) -> None:
    ctx.save_for_backward(*(x for x in operands if not isinstance(x, str)), *tensors)
    ctx.schemes = [x for x in operands if isinstance(x, str)]
    ctx.sources = [None if x is None else (x.shape, x.dtype) for x in sources]


def _restore(ctx):
    q, q_scales, q_amax, k, k_scales, k_amax, *tensors = ctx.saved_tensors
    return (q, q_scales, q_amax, ctx.schemes[0], k, k_scales, k_amax, ctx.schemes[1]), tensors


def _to_sources(ctx, grads) -> tuple[Tensor | None, Tensor | None, Tensor]:
    *by_operand, dweights = grads
    dq, dk = (
        None if source is None else grad.view(source[0]).to(source[1])
        for grad, source in zip(by_operand, ctx.sources, strict=True)
    )
    return dq, dk, dweights


def _check_queries(q: MQAOperand, weights: Tensor) -> Tensor:
    """The weights in float32."""
    if weights.dim() != 2 or weights.dtype not in OUT_TYPES:
        raise ValueError(f"weights must be floating [M, H], got {weights.dtype} {tuple(weights.shape)}")
    heads = weights.shape[1]
    if not 1 <= heads <= MOST_HEADS:
        raise ValueError(f"weights [M, H] must have 1 to {MOST_HEADS} heads, got {tuple(weights.shape)}")
    fits = len(q.shape) == 2 or q.shape[-2] == heads
    if q.quantized.rows != weights.numel() or not fits:
        raise ValueError(f"q [M, H, D] and weights [M, H] must agree, got {q.shape} and {tuple(weights.shape)}")
    return weights.float()


def _check_keys(q: MQAOperand, kv: MQAOperand) -> None:
    if len(kv.shape) != 2 or kv.shape[1] != q.shape[-1]:
        raise ValueError(f"kv must be [N, D] with the D of q [M, H, D], got kv {kv.shape} and q {q.shape}")


def _check_devices(weights: Tensor, **others) -> None:
    for name, value in others.items():
        first = value if isinstance(value, Tensor) else parts(value)[0]
        if first.device != weights.device:
            raise ValueError(f"{name} is on {first.device}, weights are on {weights.device}")


def _check_out_dtype(out_dtype: torch.dtype) -> None:
    if out_dtype not in OUT_TYPES:
        raise ValueError(f"out_dtype must be one of {', '.join(str(t) for t in OUT_TYPES)}, not {out_dtype}")
