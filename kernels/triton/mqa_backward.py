"""Gradients of MQA logits, straight through the quantizers: scores again from the quantized operands, no atomics.

    dq[m, h] = weights[m, h] sum_n g[m, n] [s > 0] k[n]           one program for some queries
    dweights[m, h] = sum_n g[m, n] relu(s)                        in the same
    dk[n] = sum_{m, h} g[m, n] weights[m, h] [s > 0] q[m, h]      one program for some keys

g is the logits' gradient, s[m, h, n] the score. Each sum has one owner and one order, so repeats agree bit for bit. A
float32 factor enters the matrix unit as the sum of three bfloat16 numbers, which hold all of its 24 bits; the other
factor is a quantized operand, exact in bfloat16. So products are exact, as in float32, and sums are float32.
"""

import torch
from torch import Tensor

import triton
import triton.language as tl
from nvfp4_kernels.triton import codecs
from nvfp4_kernels.triton.mqa_dense import query_range
from nvfp4_kernels.triton.mqa_expand import Expanded
from nvfp4_kernels.triton.mqa_tile import GLOBAL, on_device, readable, relu

COLUMNS, KEYS = 64, 64  # of a tile
PROGRAMS = 132 * 2  # the queries of dk are split until so many run


@triton.jit
def exact_dot(x, y, acc):
    """acc + x @ y for float32 x and a bfloat16 y."""
    if codecs.INTERPRETED:
        return tl.dot(x, y, acc, input_precision="ieee")
    else:
        first = x.to(tl.bfloat16)
        rest = x - first.to(tl.float32)
        second = rest.to(tl.bfloat16)
        third = (rest - second.to(tl.float32)).to(tl.bfloat16)
        return tl.dot(third, y, tl.dot(second, y, tl.dot(first, y, acc)))


@triton.jit
def halves_of(ptr, row, there, D: tl.constexpr):
    """Even and odd elements [rows, D / 2] of widened operands; zero where there is no such row."""
    pointers = ptr + row.to(tl.int64)[:, None] * D + tl.arange(0, D // 2)[None, :]
    low = tl.load(pointers, mask=there[:, None], other=0.0)
    high = tl.load(pointers + D // 2, mask=there[:, None], other=0.0)
    return readable(low), readable(high)


@triton.jit
def store_halves(ptr, row, there, low, high, D: tl.constexpr):
    """The inverse, in float32 and in the elements' own order."""
    pointers = ptr + row.to(tl.int64)[:, None] * D + 2 * tl.arange(0, D // 2)[None, :]
    tl.store(pointers, low, mask=there[:, None])
    tl.store(pointers + 1, high, mask=there[:, None])


@triton.jit
def over_heads(x, BN: tl.constexpr, QB: tl.constexpr, HP: tl.constexpr):
    """[BN, QB] repeated for every head: [BN, QB * HP]."""
    return tl.reshape(tl.broadcast_to(x[:, :, None], (BN, QB, HP)), (BN, QB * HP))


@triton.jit
def scores_of(k_low, k_high, q_low, q_high):
    """float32 [BN, QB * HP]."""
    return tl.dot(k_high, q_high.T, tl.dot(k_low, q_low.T, input_precision="ieee"), input_precision="ieee")


@triton.jit
def one_scale(amax_ptr):
    if amax_ptr is None:
        return 1.0
    else:
        return tl.load(amax_ptr) * GLOBAL


@triton.jit
def queries_kernel(
    grad_ptr, q_ptr, weights_ptr, k_ptr, q_amax_ptr, k_amax_ptr, ks_ptr, ke_ptr, indices_ptr, dq_ptr, dw_ptr,
    M, N, width,
    H: tl.constexpr, HP: tl.constexpr, QB: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, COMPRESSED: tl.constexpr,
):  # fmt: skip
    """dq and dweights of QB queries; with ``indices_ptr`` of one query, over its list of keys."""
    block = tl.program_id(0)
    m = block * QB + tl.arange(0, QB)
    column = tl.arange(0, QB * HP)
    at = block.to(tl.int64) * (QB * HP) + column
    here = at // HP < M
    q_low, q_high = halves_of(q_ptr, at, here, D)
    if indices_ptr is None:
        start, end = query_range(ks_ptr, ke_ptr, m, M, N)
    else:
        start, end = tl.zeros((QB,), tl.int32), tl.zeros((QB,), tl.int32) + width
    if COMPRESSED:
        end = tl.minimum(end, (start.to(tl.int64) + width).to(tl.int32))
    empty = end <= start
    most = tl.max(tl.where(empty, 0, end), 0)
    least = tl.minimum(tl.min(tl.where(empty, N, start), 0), most) if indices_ptr is None else 0
    grads = grad_ptr + m.to(tl.int64) * width
    dq_low = tl.zeros((QB * HP, D // 2), tl.float32)
    dq_high = tl.zeros((QB * HP, D // 2), tl.float32)
    dw = tl.zeros((QB * HP,), tl.float32)
    for tile in range(least // BN, tl.cdiv(most, BN)):
        n = tile * BN + tl.arange(0, BN)
        inside = (n[:, None] >= start[None, :]) & (n[:, None] < end[None, :])
        key, there = n, n < N
        if indices_ptr is not None:
            key = tl.load(indices_ptr + block.to(tl.int64) * width + n, mask=n < width, other=-1)
            there = (key >= 0) & (key < N)
            inside = inside & there[:, None]
        k_low, k_high = halves_of(k_ptr, key, there, D)
        shift = start[None, :] if COMPRESSED else 0
        g = tl.load(grads[None, :] + (n[:, None] - shift), mask=inside, other=0.0).to(tl.float32)
        g = over_heads(g, BN, QB, HP)
        s = scores_of(k_low, k_high, q_low, q_high)
        dw += tl.sum(relu(s) * g, 0)
        passed = tl.where(s <= 0, 0.0, g).T
        dq_low = exact_dot(passed, k_low, dq_low)
        dq_high = exact_dot(passed, k_high, dq_high)
    q_scale, k_scale = one_scale(q_amax_ptr), one_scale(k_amax_ptr)
    weights = tl.load(weights_ptr + at, mask=here, other=0.0)[:, None]
    head = at % HP
    row = (at // HP) * H + head
    here = here & (head < H)
    store_halves(dq_ptr, row, here, dq_low * weights * k_scale, dq_high * weights * k_scale, D)
    tl.store(dw_ptr + row, dw * q_scale * k_scale, mask=here)


@triton.jit
def keys_kernel(
    grad_ptr, q_ptr, weights_ptr, k_ptr, q_amax_ptr, ks_ptr, ke_ptr, dk_ptr, M, N, width, key_blocks, blocks_each,
    HP: tl.constexpr, QB: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, COMPRESSED: tl.constexpr,
):  # fmt: skip
    """The part of dk [parts, N, D] that a range of query blocks gives to BN keys."""
    first_key = (tl.program_id(0) % key_blocks) * BN
    part = tl.program_id(0) // key_blocks
    n = first_key + tl.arange(0, BN)
    k_low, k_high = halves_of(k_ptr, n, n < N, D)
    dk_low = tl.zeros((BN, D // 2), tl.float32)
    dk_high = tl.zeros((BN, D // 2), tl.float32)
    for block in range(part * blocks_each, tl.minimum((part + 1) * blocks_each, tl.cdiv(M, QB))):
        m = block * QB + tl.arange(0, QB)
        start, end = query_range(ks_ptr, ke_ptr, m, M, N)
        if COMPRESSED:
            end = tl.minimum(end, (start.to(tl.int64) + width).to(tl.int32))
        if tl.max(((start < first_key + BN) & (end > first_key) & (end > start)).to(tl.int32), 0) > 0:
            at = tl.reshape(m.to(tl.int64)[:, None] * HP + tl.arange(0, HP)[None, :], (QB * HP,))
            here = at // HP < M
            q_low, q_high = halves_of(q_ptr, at, here, D)
            weights = tl.load(weights_ptr + at, mask=here, other=0.0)
            inside = (n[:, None] >= start[None, :]) & (n[:, None] < end[None, :])
            shift = start[None, :] if COMPRESSED else 0
            pointers = grad_ptr + m.to(tl.int64)[None, :] * width + (n[:, None] - shift)
            g = over_heads(tl.load(pointers, mask=inside, other=0.0).to(tl.float32), BN, QB, HP)
            s = scores_of(k_low, k_high, q_low, q_high)
            passed = tl.where(s <= 0, 0.0, g * weights[None, :])
            dk_low = exact_dot(passed, q_low, dk_low)
            dk_high = exact_dot(passed, q_high, dk_high)
    q_scale = one_scale(q_amax_ptr)
    out = dk_ptr + part.to(tl.int64) * N * D
    store_halves(out, n, n < N, dk_low * q_scale, dk_high * q_scale, D)


@triton.jit
def listed_keys_kernel(
    grad_ptr, q_ptr, weights_ptr, k_ptr, q_amax_ptr, order_ptr, bounds_ptr, dk_ptr, width,
    HP: tl.constexpr, QB: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """dk of one key: from entries ``order[bounds[n] : bounds[n + 1]]`` of the lists, QB at a time, in that order."""
    n = tl.program_id(0)
    half = tl.arange(0, D // 2)
    k_low = readable(tl.load(k_ptr + n.to(tl.int64) * D + half)).to(tl.float32)
    k_high = readable(tl.load(k_ptr + n.to(tl.int64) * D + D // 2 + half)).to(tl.float32)
    dk_low = tl.zeros((QB * HP, D // 2), tl.float32)
    dk_high = tl.zeros((QB * HP, D // 2), tl.float32)
    first, last = tl.load(bounds_ptr + n), tl.load(bounds_ptr + n + 1)
    column = tl.arange(0, QB * HP)
    for entry in range(first, last, QB):
        own = entry + column // HP
        there = own < last
        place = tl.load(order_ptr + own, mask=there, other=0)
        at = (place // width) * HP + column % HP
        q_low, q_high = halves_of(q_ptr, at, there, D)
        q_low, q_high = q_low.to(tl.float32), q_high.to(tl.float32)
        g = tl.load(grad_ptr + place, mask=there, other=0.0).to(tl.float32)
        g *= tl.load(weights_ptr + at, mask=there, other=0.0)
        s = tl.sum(q_low * k_low[None, :], 1) + tl.sum(q_high * k_high[None, :], 1)
        passed = tl.where(s <= 0, 0.0, g)[:, None]
        dk_low += passed * q_low
        dk_high += passed * q_high
    q_scale = one_scale(q_amax_ptr)
    tl.store(dk_ptr + n.to(tl.int64) * D + 2 * half, tl.sum(dk_low, 0) * q_scale)
    tl.store(dk_ptr + n.to(tl.int64) * D + 2 * half + 1, tl.sum(dk_high, 0) * q_scale)


def backward(
    grad: Tensor, x: Expanded, q_amax: Tensor | None, k_amax: Tensor | None, heads: int, *,
    ranges: tuple[Tensor, Tensor] | None = None, indices: Tensor | None = None, compressed: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """float32 (dq [M, H, D], dk [N, D], dweights [M, H]) from ``grad`` [M, N], [M, width] or [M, K].

    ``x``: both operands in bfloat16.
    ``ranges``: (ks, ke); or ``indices`` [M, K], of which those outside [0, N) count for nothing.
    """
    (n, head_dim), m, width = x.keys.shape, len(grad), grad.shape[1]
    device = grad.device
    dq = torch.empty(m, heads, head_dim, dtype=torch.float32, device=device)
    dw = torch.empty(m, heads, dtype=torch.float32, device=device)
    if m == 0 or n == 0 or width == 0:
        return dq.zero_(), torch.zeros(n, head_dim, dtype=torch.float32, device=device), dw.zero_()
    queries = max(COLUMNS // x.heads, 1)
    grad, bits = grad.contiguous(), (x.queries, x.keys)
    if codecs.INTERPRETED.value:
        bits = tuple(t.view(torch.int16) for t in bits)
    sizes = dict(HP=x.heads, D=head_dim)
    own = queries if indices is None else 1
    with on_device(grad):
        queries_kernel[(triton.cdiv(m, own),)](
            grad, bits[0], x.weights, bits[1], q_amax, k_amax, *(ranges or (None, None)), indices, dq, dw, m, n, width,
            H=heads, QB=own, BN=KEYS, COMPRESSED=compressed, **sizes, num_warps=4, num_stages=2,
            enable_fp_fusion=True,
        )  # fmt: skip
        if indices is not None:
            return dq, _listed(grad, bits, x.weights, q_amax, indices, queries, n, sizes), dw
        key_blocks, query_blocks = triton.cdiv(n, KEYS), triton.cdiv(m, queries)
        each = triton.cdiv(query_blocks, max(1, min(PROGRAMS // key_blocks, query_blocks)))
        parts = triton.cdiv(query_blocks, each)
        dk = torch.empty(parts, n, head_dim, dtype=torch.float32, device=device)
        keys_kernel[(key_blocks * parts,)](
            grad, bits[0], x.weights, bits[1], q_amax, *ranges, dk, m, n, width, key_blocks, each,
            QB=queries, BN=KEYS, COMPRESSED=compressed, **sizes, num_warps=4, num_stages=2,
            enable_fp_fusion=True,
        )  # fmt: skip
    return dq, dk[0] if parts == 1 else dk.sum(0), dw


def _listed(grad, bits, weights, q_amax, indices, queries, n, sizes) -> Tensor:
    """dk of the lists: their entries sorted by key (stably, so in one order), a program a key."""
    flat = indices.flatten().long()
    ordered, order = torch.where((flat < 0) | (flat >= n), n, flat).sort(stable=True)
    bounds = torch.searchsorted(ordered, torch.arange(n + 1, device=flat.device))
    dk = torch.empty(n, sizes["D"], dtype=torch.float32, device=flat.device)
    listed_keys_kernel[(n,)](
        grad, bits[0], weights, bits[1], q_amax, order, bounds, dk, grad.shape[1], QB=queries, **sizes, num_warps=4,
        enable_fp_fusion=True,
    )
    return dk
