"""Cheap numbers of the operands that run in a training step: a sample of each, no wait for the device until the end."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nvfp4_kernels.reference.codecs import unpack
from nvfp4_kernels.reference.decode import decode
from nvfp4_kernels.reference.hadamard import step_signs
from nvfp4_kernels.scheme import PER_STEP, Scheme
from nvfp4_train.auditing.operands import rotated
from nvfp4_train.ledger import Product, Quantization
from nvfp4_train.quantization import BF16, quantize

SAMPLE = 2**13  # elements of an operand
WINDOW = 8  # steps over which weights are watched
STILL = 0.5  # steps of the grid: a weight whose whole way is shorter stands still


class OperandNumbers(NamedTuple):
    """Of one operand of one layer. ``amax`` is the tensor's where it has a global scale, else the sample's; ``outlier``
    is the sample's amax over its root mean square."""

    sqnr_db: float | None
    underflow: float  # nonzero elements that became zero
    clipped: float  # elements above what the largest code of their block can say
    scale_underflow: float  # blocks that are not zero and became zero as a whole
    amax: float
    outlier: float


class OperandMeter:
    """A ledger observer: measures every quantization of a layer; the last one of each operand counts."""

    def __init__(self) -> None:
        self._measured: dict[tuple[str, str], Tensor] = {}

    def quantized(self, event: Quantization) -> None:
        if event.layer and event.source.numel():
            self._measured[event.layer, event.operand] = _measure(event)

    def multiplied(self, event: Product) -> None:
        pass

    def numbers(self) -> dict[tuple[str, str], OperandNumbers]:
        """(layer, operand) -> numbers. Waits for the device, once."""
        if not self._measured:
            return {}
        rows = torch.stack(list(self._measured.values())).cpu().tolist()
        return {key: _numbers(row) for key, row in zip(self._measured, rows, strict=True)}


@torch.no_grad()
def _measure(event: Quantization) -> Tensor:
    """float32 [10] on the device: sums over the sample that ``_numbers`` turns into shares."""
    source = event.source.T if event.transposed else event.source
    rows, columns = source.shape
    given = Scheme.parse(event.scheme)
    count = min(rows, max(SAMPLE // max(columns, 1) // 16, 1) * 16)
    z = F.pad(source[:count].float(), (0, -columns % given.group))
    if given.hadamard:
        signs = step_signs(event.seed, given.hadamard) if given.sign_mask == PER_STEP else given.sign_mask
        z = rotated(z, given.hadamard, signs)
    values = _values(event, given, count, z.shape[1], rows)
    block = given.on(rows, z.shape[1]).block[1]
    z, values = z.view(count, -1, block), values.view(count, -1, block)
    size, kept = z.abs(), values.abs()
    top = kept.amax(2, keepdim=True)
    nonzero, alive = size > 0, size.amax(2) > 0
    counts = (
        (values - z).square().sum(), z.square().sum(), ((kept == 0) & nonzero).sum(), nonzero.sum(),
        ((size > kept) & (kept == top) & (top > 0)).sum(), (alive & (top.squeeze(2) == 0)).sum(), alive.sum(),
        size.amax() if event.made.amax is None else event.made.amax, size.amax(), z.square().mean(),
    )  # fmt: skip
    return torch.stack([count.float() for count in counts])


def _values(event: Quantization, given: Scheme, count: int, columns: int, rows: int) -> Tensor:
    """float32 [count, columns]: the first rows of what was made, global scale included."""
    made = event.made
    if made.operand is not None:
        values = made.operand[:count].float()
        values = F.pad(values, (0, columns - values.shape[1]))
    else:
        tile = given.on(rows, columns).block[0]
        scales = made.scales[: -(-count // tile)]
        outer = None if made.outer is None else made.outer[: len(scales)]
        values = decode(made.codes[:count], scales, given, columns, outer).float()
    factor = given.factor
    return values * (made.amax * (factor / given.divisor) if given.has_global_scale else factor)


def _numbers(row: list[float]) -> OperandNumbers:
    noise, signal, zeros, nonzero, clipped, lost, alive, amax, top, mean_square = row
    return OperandNumbers(
        10 * math.log10(signal / noise) if noise > 0 and signal > 0 else None,
        zeros / max(nonzero, 1), clipped / max(nonzero, 1), lost / max(alive, 1), amax,
        top / math.sqrt(mean_square) if mean_square > 0 else 0.0,
    )  # fmt: skip


class WeightWatch:
    """Codes of weights over a few steps: those that flip while their weight stands still oscillate.

    The idea of TetraJet (arXiv:2502.20853, 2510.27527: the way of the quantized weight over that of the weight),
    counted by element: at least two changes of code, while the weight's whole way is shorter than half a step of the
    grid. Weights that are rounded stochastically flip by design and are left out.
    """

    def __init__(self, layers: dict[str, nn.Module]):
        # kept, since a schedule may change the plan meanwhile
        texts = {name: layer.plan.fprop_weight for name, layer in layers.items()}
        self._texts = {name: text for name, text in texts.items() if text != BF16 and not Scheme.parse(text).random}
        self._layers = {name: layers[name] for name in self._texts}
        self._last = {name: self._sample(layer) for name, layer in self._layers.items()}
        self._way = {name: torch.zeros_like(sample) for name, sample in self._last.items()}
        self._codes = {name: self._code(name) for name in self._layers}
        self._flips = {name: torch.zeros_like(code, dtype=torch.int16) for name, code in self._codes.items()}
        self.steps = 0

    def state(self) -> dict[str, Any]:
        return {**self._tensors(), "steps": self.steps}

    def restore(self, state: dict[str, Any]) -> None:
        for key, own in self._tensors().items():
            own.update({name: tensor.to(own[name].device) for name, tensor in state[key].items()})
        self.steps = state["steps"]

    def _tensors(self) -> dict[str, dict[str, Tensor]]:
        return {"last": self._last, "way": self._way, "codes": self._codes, "flips": self._flips}

    @torch.no_grad()
    def after_step(self) -> bool:
        """Call after each optimizer step; True when the window is over."""
        for name, layer in self._layers.items():
            now = self._sample(layer)
            self._way[name] += (now - self._last[name]).abs()
            self._last[name] = now
            code = self._code(name)
            self._flips[name] += code != self._codes[name]
            self._codes[name] = code
        self.steps += 1
        return self.steps >= WINDOW

    def shares(self) -> dict[str, float]:
        """layer -> the share of its sampled weights that oscillate."""
        found = {}
        for name in self._layers:
            scheme = Scheme.parse(self._texts[name])
            now = self._last[name]
            rows, columns = now.shape
            block = scheme.block[1] or columns
            size = F.pad(now.abs(), (0, -columns % block)).view(rows, -1, block)
            step = size.amax(2, keepdim=True).expand_as(size).flatten(1)[:, :columns] / scheme.number.largest
            still = self._way[name] < STILL * step
            found[name] = float(((self._flips[name][:, :columns] >= 2) & still).float().mean())
        return found

    @staticmethod
    def _sample(layer: nn.Module) -> Tensor:
        weight = layer.weight.detach()
        columns = min(weight.shape[1], 128)
        rows = max(SAMPLE // 4 // columns // 16, 1) * 16
        return weight[:rows, :columns].to(torch.float32, copy=True)

    def _code(self, name: str) -> Tensor:
        layer = self._layers[name]
        scheme = Scheme.parse(self._texts[name])
        amax = layer.weight.detach().abs().amax().float() if scheme.has_global_scale else None
        made = quantize(self._last[name], self._texts[name], amax=amax)
        return unpack(made.codes, scheme.number).float()
