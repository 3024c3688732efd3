"""The custom ops under MQA logits: where they run, what they count, what torch.compile needs to know of them.

An operand travels as (codes or BF16 values, scale bytes, amax, scheme text), see ``mqa_operands.parts``.

4-bit operands on a GPU run in the Triton kernels, which never wait for the device; everything else (a CPU, the BF16
control) runs in the reference. The ledger says which.
"""

import torch
from torch import Tensor

from nvfp4_kernels.reference import mqa_logits as reference
from nvfp4_kernels.scheme import Scheme
from nvfp4_train import ledger
from nvfp4_train.backend import choose
from nvfp4_train.mqa_operands import kernel_operand
from nvfp4_train.quantization import BF16

BACKEND: str | None = None  # "reference" or "triton" for every call; None chooses by the operands


def backend_of(q: Tensor, scheme: str) -> str:
    """``reference`` or ``triton``: what runs for queries like these."""
    if scheme == BF16:
        return "reference"
    return BACKEND or (choose(q.device).quantize if q.is_cuda else "reference")


def kernels_of(q: Tensor, scheme: str):
    """The module with the kernels: all have the reference's signatures."""
    if backend_of(q, scheme) == "reference":
        return reference
    from nvfp4_kernels.triton import mqa_logits as triton_kernels  # triton is not installed everywhere

    return triton_kernels


@torch.library.custom_op("nvfp4_train::mqa_logits", mutates_args=())
def logits_op(
    q: Tensor, q_scales: Tensor | None, q_amax: Tensor | None, q_scheme: str,
    k: Tensor, k_scales: Tensor | None, k_amax: Tensor | None, k_scheme: str,
    weights: Tensor, ks: Tensor, ke: Tensor, out_dtype: torch.dtype, clean_logits: bool, max_seqlen_k: int | None,
    where: int,
) -> Tensor:  # fmt: skip
    _count(where, "mqa_logits", q_scheme, k_scheme, q, len(k))
    with torch.autocast(q.device.type, enabled=False):  # a caller's autocast must not reach the products in here
        return kernels_of(q, q_scheme).mqa_logits(
            kernel_operand(q, q_scales, q_amax), kernel_operand(k, k_scales, k_amax), _scheme(q_scheme), weights,
            ks, ke, out_dtype=out_dtype, clean_logits=clean_logits, max_seqlen_k=max_seqlen_k,
        )  # fmt: skip


@logits_op.register_fake
def _(q, qs, qa, qf, k, k_s, ka, kf, weights, ks, ke, out_dtype, clean_logits, max_seqlen_k, where):
    return weights.new_empty(len(weights), len(k) if max_seqlen_k is None else max_seqlen_k, dtype=out_dtype)


@torch.library.custom_op("nvfp4_train::mqa_logits_backward", mutates_args=())
def logits_backward_op(
    grad: Tensor,
    q: Tensor, q_scales: Tensor | None, q_amax: Tensor | None, q_scheme: str,
    k: Tensor, k_scales: Tensor | None, k_amax: Tensor | None, k_scheme: str,
    weights: Tensor, ks: Tensor, ke: Tensor, max_seqlen_k: int | None, where: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    _count_backward(where, "mqa_logits", q_scheme, k_scheme, q, len(k))
    with torch.autocast(q.device.type, enabled=False):
        return kernels_of(q, q_scheme).mqa_logits_backward(
            grad, kernel_operand(q, q_scales, q_amax), kernel_operand(k, k_scales, k_amax), _scheme(q_scheme),
            weights, ks, ke, max_seqlen_k=max_seqlen_k,
        )  # fmt: skip


@logits_backward_op.register_fake
def _(grad, q, qs, qa, qf, k, k_s, ka, kf, weights, ks, ke, max_seqlen_k, where):
    return _empty_grads(q, qf, k, weights)


@torch.library.custom_op("nvfp4_train::mqa_logits_at", mutates_args=())
def logits_at_op(
    q: Tensor, q_scales: Tensor | None, q_amax: Tensor | None, q_scheme: str,
    k: Tensor, k_scales: Tensor | None, k_amax: Tensor | None, k_scheme: str,
    weights: Tensor, indices: Tensor, out_dtype: torch.dtype, where: int,
) -> Tensor:  # fmt: skip
    _count(where, "mqa_logits_at", q_scheme, k_scheme, q, indices.shape[1])
    with torch.autocast(q.device.type, enabled=False):
        return kernels_of(q, q_scheme).mqa_logits_at(
            kernel_operand(q, q_scales, q_amax), kernel_operand(k, k_scales, k_amax), _scheme(q_scheme), weights,
            indices, out_dtype=out_dtype,
        )  # fmt: skip


@logits_at_op.register_fake
def _(q, qs, qa, qf, k, k_s, ka, kf, weights, indices, out_dtype, where):
    return weights.new_empty(indices.shape, dtype=out_dtype)


@torch.library.custom_op("nvfp4_train::mqa_logits_at_backward", mutates_args=())
def logits_at_backward_op(
    grad: Tensor,
    q: Tensor, q_scales: Tensor | None, q_amax: Tensor | None, q_scheme: str,
    k: Tensor, k_scales: Tensor | None, k_amax: Tensor | None, k_scheme: str,
    weights: Tensor, indices: Tensor, where: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    _count_backward(where, "mqa_logits_at", q_scheme, k_scheme, q, indices.shape[1])
    with torch.autocast(q.device.type, enabled=False):
        return kernels_of(q, q_scheme).mqa_logits_at_backward(
            grad, kernel_operand(q, q_scales, q_amax), kernel_operand(k, k_scales, k_amax), _scheme(q_scheme),
            weights, indices,
        )  # fmt: skip


@logits_at_backward_op.register_fake
def _(grad, q, qs, qa, qf, k, k_s, ka, kf, weights, indices, where):
    return _empty_grads(q, qf, k, weights)


@torch.library.custom_op("nvfp4_train::paged_mqa_logits", mutates_args=())
def paged_op(
    q: Tensor, q_scales: Tensor, q_amax: Tensor | None, cache: Tensor, cache_amax: Tensor | None, weights: Tensor,
    limits: Tensor, block_table: Tensor, scheme: str, max_context_len: int, out_dtype: torch.dtype,
    clean_logits: bool, where: int,
) -> Tensor:  # fmt: skip
    if not limits.is_cuda:  # on a GPU this would wait for the device; there such a context ends where its table does
        longest = int(limits.amax()) if limits.numel() else 0
        if min(longest, max_context_len) > block_table.shape[1] * cache.shape[1]:
            raise ValueError(
                f"a context of {longest} keys is longer than its block table: {block_table.shape[1]} pages of "
                f"{cache.shape[1]}"
            )
    _count(where, "paged_mqa_logits", scheme, scheme, q, max_context_len)
    with torch.autocast(q.device.type, enabled=False):
        return kernels_of(q, scheme).paged_mqa_logits(
            kernel_operand(q, q_scales, q_amax), cache, cache_amax, _scheme(scheme), weights, limits, block_table,
            max_context_len, out_dtype=out_dtype, clean_logits=clean_logits,
        )  # fmt: skip


@paged_op.register_fake
def _(q, qs, qa, cache, ca, weights, limits, block_table, scheme, max_context_len, out_dtype, clean_logits, where):
    return weights.new_empty(len(weights), max_context_len, dtype=out_dtype)


def _scheme(text: str) -> Scheme | None:
    return None if text == BF16 else Scheme.parse(text)


def _count(where: int, name: str, q_scheme: str, k_scheme: str, q: Tensor, keys: int) -> None:
    """FLOPs of all pairs; what a range leaves out is computed by some kernels and not by others."""
    head_dim = q.shape[1] if q_scheme == BF16 else 2 * q.shape[1]
    ledger.count_matmul(where, name, q_scheme, k_scheme, backend_of(q, q_scheme), 2 * len(q) * head_dim * keys)


def _count_backward(where: int, name: str, q_scheme: str, k_scheme: str, q: Tensor, keys: int) -> None:
    """The scores again from the quantized operands; gradients are float32, the other side of each product is not."""
    _count(where, f"{name}.scores", q_scheme, k_scheme, q, keys)
    head_dim = q.shape[1] if q_scheme == BF16 else 2 * q.shape[1]
    backend, flops = backend_of(q, q_scheme), 2 * len(q) * head_dim * keys
    for gemm, other in (("dq", k_scheme), ("dk", q_scheme)):
        ledger.count_matmul(where, f"{name}.{gemm}", "float32", other, backend, flops)


def _empty_grads(q: Tensor, q_scheme: str, k: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    head_dim = q.shape[1] if q_scheme == BF16 else 2 * q.shape[1]
    return (
        weights.new_empty(*weights.shape, head_dim, dtype=torch.float32),
        weights.new_empty(len(k), head_dim, dtype=torch.float32),
        torch.empty_like(weights),
    )
