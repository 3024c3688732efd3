"""Is this operand the quantization of that tensor? Worked out again in float64, without any of the library's kernels.

A GEMM's operand is ``code x block scale``; from the tensor it should come from (the source) follow the block scales,
and with them the codes. ``agreement`` says what share of the elements is explained by a scheme, and what the rounding
did: an element rounded to nearest has one right code, one rounded stochastically has two, and how often the farther one
is taken has an expectation. Where an operand is not explained, ``signs_of`` and other schemes tell what it is instead.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor

from nvfp4_kernels.elements import ELEMENTS
from nvfp4_kernels.reference.hadamard import step_signs
from nvfp4_kernels.scheme import PER_STEP, Scheme
from nvfp4_train.auditing.choices import fitted, right_choice, rounded_scales, tile_amax
from nvfp4_train.auditing.scale_rules import RULES, Scales, candidates, grid, whole_tensor

ELEMENTS_SEEN = 2**18  # of one operand: enough for a share of 1e-4, and a large model takes no longer than a small one
SCALES = ("e4m3", "e8m0", "float32")
ROUNDINGS = ("nearest", "stochastic", "stochastic8", "stochastic_scale")
CHECKED = {
    "element", "scale", "rule", "block", "rounding", "hadamard", "sign_mask", "outer", "range", "headroom", "select",
    "clip", "masked", "requantized", "split", "history",
}  # fmt: skip
SLACK = 2.0**-9  # of a step: what float32 may have rounded where an element is multiplied by its encode factor
HOLDS = 0.995  # float64 against float32 may put single values on the other side of a tie


def not_checked(scheme: Scheme) -> list[str]:
    """The mechanisms of a scheme that this file does not know, in words: what it cannot prove."""
    known = {"element": ELEMENTS, "scale": SCALES, "rule": RULES, "rounding": ROUNDINGS}
    found = [f"{name} {getattr(scheme, name)}" for name, values in known.items() if getattr(scheme, name) not in values]
    defaults = Scheme()
    for item in fields(scheme):
        if item.name not in CHECKED and getattr(scheme, item.name) != getattr(defaults, item.name):
            found.append(f"{item.name} {getattr(scheme, item.name)}")
    return found


@dataclass
class Agreement:
    """How an operand compares with a scheme applied to its source; shares are of the elements looked at."""

    elements: int
    explained: float  # the code is one that the scheme allows
    explained_inside: float  # the same, without the last group along the reduction dimension
    farther: int  # elements whose code is not the nearest
    farther_expected: float  # by stochastic rounding
    farther_variance: float
    lean: float  # sum of |code| - |exact| in steps over elements that do not saturate; 0 is expected of SR
    lean_variance: float
    saturated: float
    underflow: float  # nonzero elements that became zero
    scale_underflow: float  # blocks that are not zero and whose scale is
    second: float  # four over six: blocks whose amax was mapped to 4
    choice: float  # four over six: blocks that took the one of the two with the smaller error; 1 without it
    noise: float  # squared error over squared norm
    amax: float
    outlier: float  # amax over the root mean square

    @property
    def holds(self) -> bool:
        return self.explained >= HOLDS


def local(scheme: Scheme, source: Tensor, transposed: bool) -> Scheme:
    """The scheme with the sizes of whole-dimension blocks filled in, for the padded operand of ``source``."""
    rows, columns = source.shape[::-1] if transposed else source.shape
    return scheme.on(rows, columns + -columns % scheme.group)


def prepared(source: Tensor, transposed: bool, scheme: Scheme, mask: int | None = None) -> Tensor:
    """The matrix that the scheme's rounding sees: float64 [rows, K padded to the group], rotated if it says so."""
    z = (source.T if transposed else source).float()
    z = F.pad(z, (0, -z.shape[1] % scheme.group))
    if scheme.hadamard:
        z = rotated(z, scheme.hadamard, scheme.sign_mask if mask is None else mask)
    return z.double()


def rotated(z: Tensor, size: int, mask: int | Tensor) -> Tensor:
    """float32 [R, K] -> the same after the signed Hadamard transform of each group of ``size``, rounded to BF16.

    ``mask``: of signs, or float32 signs.

    In the order that defines the bits: signs, butterflies of stride 1, 2, 4, ..., the factor 1/sqrt(size), all float32.
    """
    shape = z.shape
    z = z.reshape(-1, size) * (mask if isinstance(mask, Tensor) else (1.0 - 2.0 * _bits(mask, size)).to(z))
    stride = 1
    while stride < size:
        pairs = z.view(-1, size // (2 * stride), 2, stride)
        z = torch.stack((pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]), 2).view(-1, size)
        stride *= 2
    return (z * (1 / math.sqrt(size))).to(torch.bfloat16).float().view(shape)


def rotation(size: int, mask: int) -> Tensor:
    """float64 [size, size]: diag(signs) @ Sylvester's Hadamard matrix / sqrt(size)."""
    index = torch.arange(size)
    ones = sum(((index[:, None] & index[None, :]) >> bit) & 1 for bit in range(size.bit_length()))
    return (1.0 - 2.0 * _bits(mask, size))[:, None] * (1.0 - 2.0 * (ones % 2).double()) / math.sqrt(size)


def _bits(mask: int, size: int) -> Tensor:
    return torch.tensor([mask >> i & 1 for i in range(size)]).double()


def agreement(
    source: Tensor, transposed: bool, operand: Tensor, scheme: Scheme, *, mask: int | None = None,
    amax: Tensor | None = None,
) -> Agreement | None:  # fmt: skip
    """Compares ``operand`` [rows, K] (decoded, without the global scale) with ``scheme`` applied to ``source``.

    ``mask``: the signs of a transform whose signs are drawn. ``amax``: the tensor's, where it comes from elsewhere
    (delayed scaling). None where nothing can be said: no elements, all zeros, or a source that is not finite.
    """
    given, scheme = scheme, local(scheme, source, transposed)
    z = prepared(source, transposed, scheme, mask)
    if z.numel() == 0 or operand.shape[0] != z.shape[0] or operand.shape[1] > z.shape[1] or not z.isfinite().all():
        return None
    largest = z.abs().max()
    if largest == 0:
        return None
    whole = largest if amax is None else amax.double()
    rows = _rows_seen(*z.shape, scheme.block[0]).to(z.device)
    z = z[rows]
    seen = F.pad(operand[rows].double(), (0, z.shape[1] - operand.shape[1]))
    blocks = z.view(len(rows), -1, scheme.block[1])  # [R, blocks, block]
    block_amax = tile_amax(blocks.abs().amax(2), rows, scheme.block[0])
    if scheme.clip:
        block_amax = blocks.std(2, correction=0) * scheme.clip
    level = whole if scheme.outer is None else _outer_amax(block_amax, scheme)
    values = seen.view(blocks.shape)
    magnitudes = grid(scheme.element).to(z.device)
    if given.tensor_scale_only:
        tries = [whole_tensor(whole, scheme, block_amax)]
    else:
        tries = candidates(block_amax, level, scheme)
    corrected = scheme.rounding == "stochastic_scale"
    best: dict[str, Tensor] = {}
    for number, scales in enumerate(tries):
        if corrected:
            scales = scales._replace(inside=fitted(blocks, values, scales, magnitudes))
        at = _compare(blocks, values, scales, scheme, magnitudes)
        at["second"] = torch.full_like(block_amax, float(bool(scheme.select) and number % 2 == 1))
        at["first"] = tries[number].inside
        if not best:
            best = at
        else:  # block by block, the scale that explains more
            better = (at["right"].float().mean(2) > best["right"].float().mean(2)).unsqueeze(2)
            best = {k: torch.where(better if v.dim() == 3 else better.squeeze(2), v, best[k]) for k, v in at.items()}
        if bool(best["right"].all()):
            break
    found = _summed(best, blocks, block_amax, scheme, magnitudes, largest)
    if corrected:
        for name, value in rounded_scales(best, scheme)._asdict().items():
            setattr(found, name, value)
    if scheme.select:
        either = [_compare(blocks, values, scales, scheme, magnitudes)["right"].all(2) for scales in tries[:2]]
        best["either"] = either[0] & either[1]  # the codes do not tell which of the two it was
        found.choice = right_choice(best, blocks, tries[:2], rows, scheme, magnitudes)
    return found


def _compare(blocks: Tensor, values: Tensor, scales: Scales, scheme: Scheme, grid: Tensor) -> dict[str, Tensor]:
    """Elementwise: the exact code, the code that is there, its neighbours on the grid, whether it may be."""
    unit, inside = (t.unsqueeze(2) for t in scales)
    dead = (unit == 0) | (inside == 0)
    # a block without a scale: whatever its codes are, they decode to zero
    exact = torch.where(dead, 0.0, blocks / unit.clamp(min=1e-300))
    code = torch.where(dead, values, values / inside.clamp(min=1e-300))
    size = exact.abs().clamp(max=grid[-1])
    above = torch.bucketize(size, grid).clamp(1, len(grid) - 1)
    lower, upper = grid[above - 1], grid[above]
    step = upper - lower
    slack = step * SLACK
    nearest = torch.where(size - lower > upper - size, upper, lower)
    is_lower, is_upper = ((code.abs() - edge).abs() <= slack for edge in (lower, upper))
    if scheme.rounding in ("stochastic", "stochastic8"):
        below = grid[(above - 2).clamp(min=0)]
        on_lower = size - lower <= slack  # on the grid itself: float32 may have had it just below
        right = is_lower | is_upper | (on_lower & ((code.abs() - below).abs() <= slack))
    else:
        tie = ((size - lower) - (upper - size)).abs() <= 2 * slack
        right = torch.where(tie, is_lower | is_upper, (code.abs() - nearest).abs() <= slack)
    right &= (code * exact >= 0) | (code.abs() <= slack) | (size <= slack)
    return {
        "right": right, "exact": exact, "code": code, "lower": lower, "step": step, "nearest": nearest,
        "unit": scales.unit, "inside": scales.inside, "dead": dead.squeeze(2).double(),
    }  # fmt: skip


def _summed(
    at: dict[str, Tensor], blocks: Tensor, block_amax: Tensor, scheme: Scheme, grid: Tensor, largest: Tensor
) -> Agreement:
    right, step, exact, code = at["right"], at["step"], at["exact"], at["code"]
    inside = right[:, :-1] if blocks.shape[1] > 1 else right
    fraction = ((exact.abs() - at["lower"]) / step).clamp(0, 1)
    free = (exact.abs() <= grid[-1]) & (at["dead"] == 0).unsqueeze(2)
    apart = torch.minimum(fraction, 1 - fraction).where(free, 0.0)
    farther = ((code.abs() - at["nearest"]).abs() > 0.25 * step) & free & right
    lean = ((code.abs() - exact.abs()) / step).where(free & right, 0.0)
    error = code * at["unit"].unsqueeze(2) - blocks
    nonzero = blocks != 0
    alive = block_amax > 0

    def share(part: Tensor, whole: Tensor) -> float:
        return float(part.double().sum() / whole.double().sum().clamp(min=1))

    return Agreement(
        right.numel(), float(right.double().mean()), float(inside.double().mean()),
        int(farther.sum()), float(apart.sum()), float((apart * (1 - apart)).sum()),
        float(lean.sum()), float((fraction * (1 - fraction)).where(free, 0.0).sum()),
        share((exact.abs() > grid[-1]), nonzero), share((code.abs() < SLACK * grid[1]) & nonzero, nonzero),
        share((at["dead"] > 0) & alive, alive), share((at["second"] > 0) & alive, alive), 1.0,
        float(error.square().sum() / blocks.square().sum().clamp(min=1e-300)),
        float(largest), float(largest / blocks.square().mean().sqrt().clamp(min=1e-300)),
    )  # fmt: skip


def _outer_amax(block_amax: Tensor, scheme: Scheme) -> Tensor:
    inside = scheme.outer[1] // scheme.block[1]
    return block_amax.view(len(block_amax), -1, inside).amax(2).repeat_interleave(inside, 1)


def _rows_seen(rows: int, columns: int, tile: int) -> Tensor:
    """Row numbers to look at: whole tiles from both ends, the last one (which padding may have touched) included."""
    most = max(2, ELEMENTS_SEEN // max(columns, 1) // tile) * tile
    if rows <= most:
        return torch.arange(rows)
    tail = (rows - 1) // tile * tile - (most // 2 // tile - 1) * tile
    return torch.cat([torch.arange(most // 2 // tile * tile), torch.arange(tail, rows)])


def signs_of(source: Tensor, transposed: bool, operand: Tensor, scheme: Scheme) -> tuple[int, float]:
    """(sign mask, certainty 0..1) of the Hadamard transform that made ``operand`` of ``source``.

    Undoing the unsigned transform leaves each element times its sign: the correlation with the source is the sign.
    """
    size = scheme.hadamard
    z = (source.T if transposed else source).double()
    z = F.pad(z, (0, -z.shape[1] % scheme.group)).view(len(z), -1, size)
    undone = operand.double().view(z.shape) @ rotation(size, 0).T.to(z)
    along = (undone * z).sum((0, 1))
    norm = (undone.square().sum((0, 1)) * z.square().sum((0, 1))).sqrt()
    mask = sum(1 << i for i, value in enumerate(along.tolist()) if value < 0)
    told = norm > 0  # a place that is zero in every group (padding) has no sign to tell
    return mask, float((along.abs() / norm.clamp(min=1e-300))[told].min()) if told.any() else 0.0


def mask_of(source: Tensor, transposed: bool, operand: Tensor, scheme: Scheme, seed: Tensor | None) -> int | None:
    """The signs that an operand was rotated with: the scheme's own; drawn ones from the seed of the call, and where
    that is not known those that are seen (a channel that is next to nothing has no sign to see)."""
    if not scheme.hadamard:
        return None
    if scheme.sign_mask != PER_STEP:
        return scheme.sign_mask
    if seed is not None:
        return sum(1 << i for i, sign in enumerate(step_signs(seed, scheme.hadamard).tolist()) if sign < 0)
    return signs_of(source, transposed, operand, scheme)[0]
