"""MQA logits on the GPU: which kernels make a call, with the signatures of ``nvfp4_kernels.reference.mqa_logits``.

Keys that many queries share are widened once (``mqa_expand``) and multiplied from shared memory (``mqa_dense``). Keys
that are read once - pages, lists, ranges that do not overlap - are decoded in registers (``mqa_direct``). MXFP4 goes
through E5M2 where the GPU multiplies it faster than bfloat16. Whether the scales allow it is known on the device only:
the bfloat16 kernel is launched as well, and leaves at once where the flag is down. Nothing waits for the device.

    Blackwell     mqa_scaled: FP4 in the matrix unit (compiled, never run by us)
    Hopper        mqa_hopper, mqa_hopper_direct: Gluon, MXFP4 in E5M2; mqa_dense, mqa_direct for the rest
    8.0 and up    mqa_dense (E5M2 from 8.9 on), mqa_direct in bfloat16
"""

import torch
from torch import Tensor

import triton
from nvfp4_kernels.quantized import Quantized
from nvfp4_kernels.scheme import Scheme
from nvfp4_kernels.triton import codecs, mqa_dense
from nvfp4_kernels.triton.mqa_backward import backward
from nvfp4_kernels.triton.mqa_direct import LISTED, PAGED, RANGE, SECOND, direct
from nvfp4_kernels.triton.mqa_expand import Expanded, expand

LEAST_HEADS = 16  # columns of a dot product


def mqa_logits(
    q: Quantized, k: Quantized, scheme: Scheme, weights: Tensor, ks: Tensor, ke: Tensor, *,
    out_dtype: torch.dtype = torch.float32, clean_logits: bool = True, max_seqlen_k: int | None = None,
) -> Tensor:  # fmt: skip
    """``out_dtype [M, N]``, or ``[M, max_seqlen_k]``; see the reference."""
    q, k, weights = _contiguous(q), _contiguous(k), weights.contiguous()
    ks, ke = ks.contiguous(), ke.contiguous()
    (m, heads), n = weights.shape, len(k.codes)
    compressed = max_seqlen_k is not None
    width = max_seqlen_k if compressed else n
    out = torch.empty(m, width, dtype=out_dtype, device=weights.device)
    if compressed and clean_logits or n == 0:
        out.fill_(-torch.inf)
    if out.numel() == 0 or n == 0:
        return out
    options = dict(compressed=compressed, clean=clean_logits)
    amax, block = (q.amax, k.amax), scheme.block[1]
    narrow = _e5m2(scheme, weights.device)
    if compressed and 2 * n >= m * width:  # keys of their own
        _direct(q, k, weights, block, out, narrow, limit=n, ranges=(ks, ke), mode=RANGE, **options)
        return out
    if _blackwell(weights.device):
        from nvfp4_kernels.triton import mqa_scaled

        mqa_scaled.logits(
            q.codes, q.scales, weights, k.codes, k.scales, amax, ks, ke, out, block=block, **options
        )  # fmt: skip
        return out
    x = expand(q.codes, q.scales, weights, k.codes, k.scales, block, e5m2=narrow)
    if narrow and not compressed and x.heads >= 8 and _hopper(weights.device):
        from nvfp4_kernels.triton import mqa_hopper

        mqa_hopper.logits(x, ks, ke, out, clean=clean_logits)
    else:
        mqa_dense.logits(x, *amax, ks, ke, out, **options)
    if narrow:
        direct(
            (q.codes, q.scales, weights), (k.codes, k.scales), amax, x.flag, out, block=block, limit=n,
            heads=_heads(heads), ranges=(ks, ke), tile=SECOND, **options,
        )  # fmt: skip
    return out


def mqa_logits_at(
    q: Quantized, k: Quantized, scheme: Scheme, weights: Tensor, indices: Tensor, *,
    out_dtype: torch.dtype = torch.float32,
) -> Tensor:  # fmt: skip
    """``out_dtype [M, K]``: the logits of the keys ``indices [M, K]``; -inf outside [0, N)."""
    q, k, weights, indices = _contiguous(q), _contiguous(k), weights.contiguous(), indices.contiguous()
    out = torch.empty(indices.shape, dtype=out_dtype, device=weights.device)
    if len(k.codes) == 0:
        return out.fill_(-torch.inf)
    if out.numel():
        direct(
            (q.codes, q.scales, weights), (k.codes, k.scales), (q.amax, k.amax), None, out, block=scheme.block[1],
            limit=len(k.codes), heads=_heads(weights.shape[1]), table=indices, mode=LISTED,
        )  # fmt: skip
    return out


def paged_mqa_logits(
    q: Quantized, cache: Tensor, cache_amax: Tensor | None, scheme: Scheme, weights: Tensor, limits: Tensor,
    block_table: Tensor, max_context_len: int, *, out_dtype: torch.dtype = torch.float32, clean_logits: bool = True,
) -> Tensor:  # fmt: skip
    """``out_dtype [B * T, max_context_len]``; see the reference. A context ends where its block table does."""
    q, weights, limits = _contiguous(q), weights.contiguous(), limits.contiguous()
    out = torch.empty(len(weights), max_context_len, dtype=out_dtype, device=weights.device)
    if out.numel() == 0:
        return out
    longest = min(max_context_len, block_table.shape[1] * cache.shape[1])
    if longest == 0:
        return out.fill_(-torch.inf)
    if not cache[:1].is_contiguous() or cache.stride(0) % 4 or cache.data_ptr() % 4:
        cache = cache.clone(memory_format=torch.contiguous_format)
    if block_table.stride(1) != 1:
        block_table = block_table.contiguous()
    _direct(
        q, Quantized(cache, None, None, cache_amax), weights, scheme.block[1], out,
        _e5m2(scheme, weights.device), limit=longest, ranges=(None, limits), table=block_table, mode=PAGED,
        sequences=len(limits), clean=clean_logits,
    )  # fmt: skip
    return out


def _direct(
    q: Quantized, k: Quantized, weights: Tensor, block: int, out: Tensor, narrow: bool, *, ranges: tuple, limit: int,
    clean: bool, **options,
) -> None:  # fmt: skip
    """In E5M2 first, where that is faster, and then in bfloat16 what E5M2 did not hold."""
    keys, amax, heads = (k.codes, k.scales), (q.amax, k.amax), _heads(weights.shape[1])
    options |= dict(ranges=ranges, limit=limit, clean=clean)
    flag = None
    # that kernel copies 16 bytes at a time
    aligned = k.codes.data_ptr() % 16 == 0 and k.codes.stride(0) % 16 == 0
    if narrow and aligned and _hopper(weights.device) and 2 * q.codes.shape[1] == 128:
        from nvfp4_kernels.triton import mqa_hopper_direct

        x = expand(q.codes, q.scales, weights, q.codes[:0], q.codes[:0], block, e5m2=True, least=LEAST_HEADS)
        flag = x.flag
        shared = {name: options[name] for name in ("ranges", "limit", "clean", "table", "sequences") if name in options}
        mqa_hopper_direct.direct(x.queries, x.weights, *keys, flag, out, heads=x.heads, **shared)
    elif narrow and codecs.INTERPRETED.value:
        x = expand(q.codes, q.scales, weights, q.codes[:0], q.codes[:0], block, e5m2=True, least=LEAST_HEADS)
        flag = x.flag
        direct((x.queries, None, x.weights), keys, amax, flag, out, block=block, heads=heads, **options)
    direct(
        (q.codes, q.scales, weights), keys, amax, flag, out, block=block, heads=heads,
        tile=None if flag is None else SECOND, **options,
    )  # fmt: skip


def _heads(heads: int) -> tuple[int, int]:
    return heads, max(triton.next_power_of_2(heads), LEAST_HEADS)


def _contiguous(x: Quantized) -> Quantized:
    return Quantized(x.codes.contiguous(), x.scales.contiguous(), None, x.amax)


def _e5m2(scheme: Scheme, device: torch.device) -> bool:
    """MXFP4 on a GPU whose matrix units take E5M2 (8.9 and up), or anywhere in the interpreter."""
    if scheme.scale != "e8m0":
        return False
    return codecs.INTERPRETED.value or torch.cuda.get_device_capability(device) >= (8, 9)


def mqa_logits_backward(
    grad: Tensor, q: Quantized, k: Quantized, scheme: Scheme, weights: Tensor, ks: Tensor, ke: Tensor, *,
    max_seqlen_k: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """float32 (dq [M, H, D], dk [N, D], dweights [M, H]); see the reference."""
    x = _widened(q, k, scheme, weights)
    ranges = ks.contiguous(), ke.contiguous()
    return backward(grad, x, q.amax, k.amax, weights.shape[1], ranges=ranges, compressed=max_seqlen_k is not None)


def mqa_logits_at_backward(
    grad: Tensor, q: Quantized, k: Quantized, scheme: Scheme, weights: Tensor, indices: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """As ``mqa_logits_backward``, for ``grad [M, K]`` of the logits at ``indices``."""
    x = _widened(q, k, scheme, weights)
    return backward(grad, x, q.amax, k.amax, weights.shape[1], indices=indices.contiguous())


def _widened(q: Quantized, k: Quantized, scheme: Scheme, weights: Tensor) -> Expanded:
    """Both in bfloat16."""
    q, k = _contiguous(q), _contiguous(k)
    return expand(
        q.codes, q.scales, weights.contiguous(), k.codes, k.scales, scheme.block[1], e5m2=False, least=LEAST_HEADS
    )


def _blackwell(device: torch.device) -> bool:
    """FP4 in the matrix unit: 10.0, 10.3, 12.0, 12.1. ValueError where this Triton would compile another product."""
    if device.type != "cuda":
        return False
    major, minor = torch.cuda.get_device_capability(device)
    if major not in (10, 12):
        return False
    from nvfp4_kernels.targets import require  # needed there alone

    require(f"sm_{major}{minor}")
    return True


def _hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)
