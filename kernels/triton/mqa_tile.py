"""What every MQA kernel does to a tile of scores: relu, weight, sum over the heads, mask, one rounding, store.

A tile has keys along its rows and (query, head) along its columns. On Hopper a thread of the matrix unit's accumulator
holds pairs of columns of two rows, so most of a sum over heads happens within a thread, and the rest within four lanes.
"""

import torch
from torch import Tensor

import triton
import triton.language as tl
from nvfp4_kernels.triton import codecs

MINUS_INFINITY = tl.constexpr(float("-inf"))
GLOBAL = tl.constexpr(1 / 2688)  # a tensor's amax times this is its global scale


@triton.jit
def relu(x):
    """max(x, 0) that keeps NaN."""
    if codecs.INTERPRETED:  # its maximum follows numpy's NaN rules
        return tl.where(x < 0, 0.0, x)
    else:
        return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def weighted(scores, weights, BN: tl.constexpr, QB: tl.constexpr, HP: tl.constexpr):
    """float32 [BN, QB]: sums over heads of relu(scores [BN, QB * HP]) * weights [QB * HP]."""
    return tl.sum(tl.reshape(relu(scores) * weights[None, :], (BN, QB, HP)), 2)


@triton.jit
def readable(tile):
    """A tile of E5M2 or bfloat16 as the dot takes it: the interpreter multiplies bit patterns, so float32 there."""
    if codecs.INTERPRETED:
        if tile.dtype.primitive_bitwidth == 8:
            half = (tile.to(tl.int8, bitcast=True).to(tl.int16) << 8).to(tl.float16, bitcast=True)
            return half.to(tl.float32)
        else:
            return codecs.float_of(tile.to(tl.int16, bitcast=True).to(tl.int32) << 16)
    else:
        return tile


@triton.jit
def global_scale(q_amax_ptr, k_amax_ptr):
    """The product of both tensors' global scales, 1 where they have none."""
    if q_amax_ptr is None:
        return 1.0
    else:
        return (tl.load(q_amax_ptr) * GLOBAL) * (tl.load(k_amax_ptr) * GLOBAL)


@triton.jit
def put(pointers, value, mask, BF16_BITS: tl.constexpr):
    """Rounds float32 once to the output's type and stores it; bfloat16 leaves as int16 bits."""
    if BF16_BITS:
        tl.store(pointers, codecs.bfloat16_bits(codecs.round_to_bfloat16(value)), mask=mask)
    else:
        tl.store(pointers, value.to(pointers.dtype.element_ty), mask=mask)


def on_device(x: Tensor):
    """Triton launches on the current device, which need not be the tensor's."""
    return torch.cuda.device(x.device if x.is_cuda else -1)
