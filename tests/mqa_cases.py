"""Operands, ranges and float64 results that the tests of MQA logits share."""

import numpy as np
import torch

from nvfp4_train import OperandSpec, QuantizedTensor
from nvfp4_train.mqa_operands import DEEPSEEK, MQAOperand

NVFP4 = OperandSpec(format="nvfp4", block="1x16", rounding="nearest")
FORMATS = {"mxfp4": DEEPSEEK, "nvfp4": NVFP4}
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def tensors(m, h, n, d, seed=0, scale=1.0):
    make = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=make)  # noqa: E731
    sizes = torch.exp2(torch.randint(-6, 6, (m, h, d // 32), generator=make))  # so that block scales differ
    q = draw(m, h, d) * scale * sizes.repeat_interleave(32, dim=2)
    return q, draw(n, d), draw(m, h)


def ranges(m, n, seed=1):
    """Nonzero starts, an empty row in four, one that ends before it starts."""
    make = torch.Generator().manual_seed(seed)
    ks = torch.randint(1, max(n // 2, 2), (m,), generator=make)
    ke = ks + torch.randint(1, max(n, 2), (m,), generator=make)
    ke[::4] = ks[::4]
    ke[1:2] = ks[1:2] - 1
    return ks.int(), ke.clamp(max=n).int()


def values64(quantized: QuantizedTensor) -> np.ndarray:
    """The values in float64, from the bytes by a table and a power of two (or torch's own E4M3)."""
    codes = quantized.codes.numpy()
    nibbles = np.stack([codes & 15, codes >> 4], axis=-1).reshape(len(codes), -1)
    if quantized.scheme.scale == "e8m0":
        scales = 2.0 ** (quantized.scale_bytes.numpy().astype(np.float64) - 127)
    else:
        scales = quantized.block_scales.float().double().numpy() * float(quantized.global_amax.double()) / 2688
    return E2M1[nibbles] * np.repeat(scales, nibbles.shape[1] // scales.shape[1], axis=1)


def exact(q: MQAOperand, k: MQAOperand, weights):
    """(float64 logits [M, N], what a float32 sum of their terms may be off by, in units of its rounding)."""
    m, h, d = q.shape
    qv, kv, w = values64(q.quantized).reshape(m, h, d), values64(k.quantized), weights.double().numpy()
    logits = np.einsum("mhn,mh->mn", np.maximum(np.einsum("mhd,nd->mhn", qv, kv), 0), w)
    size = np.einsum("mhn,mh->mn", np.einsum("mhd,nd->mhn", abs(qv), abs(kv)), abs(w))
    # D products summed, H terms summed, and at most five factors (weight, two global scales, their product, 1 / 2688)
    bound = size * (d + h + 5) * 2.0**-24
    if adds_in_13_bits(q.quantized.scheme):
        bound = bound + np.einsum("mhn,mh->mn", lost_in_13_bits(qv, kv), abs(w))
    return torch.from_numpy(logits), torch.from_numpy(bound)


def adds_in_13_bits(scheme) -> bool:
    """Whether E5M2 products are summed on this machine, by a matrix unit that keeps 13 fraction bits: Hopper's."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9 and scheme.scale == "e8m0"


def lost_in_13_bits(q: np.ndarray, k: np.ndarray, at_once: int = 32) -> np.ndarray:
    """[M, H, N]: what a sum over D may lose whose terms, ``at_once`` of them and what was summed before, are moved to
    the exponent of the largest and cut 13 bits below it. At most a term's own size, at most 2^-13 of the largest."""
    before = lost = 0.0
    for begin in range(0, q.shape[2], at_once):
        terms = abs(q[:, :, None, begin : begin + at_once] * k[None, None, :, begin : begin + at_once])
        unit = (before + terms.sum(3)) * 2.0**-13
        lost = lost + np.minimum(terms, unit[..., None]).sum(3) + np.minimum(before, unit)
        before = before + terms.sum(3)
    return lost


def inside(ks, ke, n):
    columns = torch.arange(n)
    return (columns >= ks[:, None]) & (columns < ke[:, None])


def assert_close(ours, theirs):
    # both sum a few hundred float32 terms, each in its own order
    for x, y in zip(ours, theirs, strict=True):
        assert (x.float() - y).abs().max() <= 2e-6 * y.abs().max()


def difference(x, y):
    x, y = x.double(), y.double()
    return (1 - 2 * (x * y).sum() / (x * x + y * y).sum()).item()
