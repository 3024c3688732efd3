"""Did each switch of the recipe act? Judged on the operands that the GEMMs multiplied.

An operand passes if it is what its scheme makes of the tensor it should come from (``operands.agreement``). One that
does not is compared with what it might be instead - nearest for stochastic, unrotated, other signs, other blocks, an
older weight, another microbatch - so that the failure has a name.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field, fields, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from nvfp4_kernels.scheme import PER_STEP, Scheme
from nvfp4_train.auditing.coverage import format_name
from nvfp4_train.auditing.evidence import OPERANDS, Call
from nvfp4_train.auditing.findings import Verdicts
from nvfp4_train.auditing.operands import Agreement, agreement, mask_of, not_checked, signs_of
from nvfp4_train.auditing.origins import amax_of, channels_apart, origin, scheme_in
from nvfp4_train.ledger import Product

SIGMAS = 6.0  # thousands of operands are tested; at six standard deviations chance fails one run in a million
ENOUGH = 16.0  # variance of a count below which six deviations are no evidence


@dataclass
class Rounding:
    """What stochastic rounding did to one operand of one layer, summed over its calls."""

    farther: int = 0
    expected: float = 0.0
    variance: float = 0.0
    lean: float = 0.0
    lean_variance: float = 0.0

    def add(self, other: Rounding) -> None:
        for item in fields(self):
            setattr(self, item.name, getattr(self, item.name) + getattr(other, item.name))

    @staticmethod
    def of(found: Agreement) -> Rounding:
        return Rounding(
            found.farther, found.farther_expected, found.farther_variance, found.lean, found.lean_variance
        )


@dataclass
class Others:
    """Tensors that an operand must not come from: found out, they give the failure its name."""

    old_weights: dict[str, Tensor] = field(default_factory=dict)  # layer -> the weight before the optimizer's step
    calls: list[Call] = field(default_factory=list)


class Switches:
    """Judges operands one by one and keeps what has to be summed over a run."""

    def __init__(self, verdicts: Verdicts, others: Others):
        self.verdicts, self.others = verdicts, others
        self.rounding: dict[tuple[str, str, str], Rounding] = defaultdict(Rounding)
        self.statistics: dict[tuple[str, str], list[Agreement]] = defaultdict(list)
        self.drawn_signs: dict[tuple[str, str], set[int]] = defaultdict(set)

    def judge_product(self, call: Call, gemm: str, product: Product) -> bool:
        """Both operands of a product against their origins; whether both passed."""
        good = True
        for (name, key, transposed), seen in zip(OPERANDS[gemm], (product.a, product.b), strict=True):
            source = origin(call, name)
            if source is None:
                self.verdicts.failed("operand", call.layer, f"{name}: nothing tells what it was made of")
                good = False
            else:
                good &= self._judge(call, name, key, source, transposed, seen, scheme_in(call, name))
        if gemm in call.apart:
            good &= self._judge_apart(call, gemm, call.apart[gemm])
        return good

    def _judge_apart(self, call: Call, gemm: str, product: Product) -> bool:
        """The product of channels set apart: its operands are columns of the sources, in a format of their own."""
        good, channels = True, channels_apart(call)
        pairs = zip(OPERANDS[gemm], (product.a, product.b), (product.a_scheme, product.b_scheme), strict=True)
        for (name, key, transposed), seen, text in pairs:
            source = call.source(key)
            if source is not None and channels is not None:
                source = source if key == "grad_output" else source.index_select(1, channels)
                found = agreement(source, transposed, seen, Scheme.parse(text))
                if found is not None and not found.holds:
                    told = f"{name}: its channels apart do not follow from the source"
                    self.verdicts.failed("operand", call.layer, told)
                    good = False
                elif found is not None:
                    self.verdicts.held(f"split: channels of {name} ran apart, in {format_name(text)}")
        return good

    def _judge(
        self, call: Call, name: str, key: str, source: Tensor, transposed: bool, seen: Tensor, scheme: Scheme | None
    ) -> bool:
        rows, columns = source.shape[::-1] if transposed else source.shape
        if scheme is None:
            right = torch.equal((source.T if transposed else source).to(torch.bfloat16), seen[:, :columns])
            if not right:
                self.verdicts.failed("operand", call.layer, f"{name} in bf16 is not the tensor it should be")
            return right
        if unknown := not_checked(scheme):
            for mechanism in unknown:  # what cannot be checked is not proven
                self.verdicts.failed("not_checked", call.layer, f"{name}: the audit has no check for {mechanism}")
            return False
        mask = mask_of(source, transposed, seen, scheme, call.seed)
        found = agreement(source, transposed, seen, scheme, mask=mask, amax=amax_of(call, name))
        if found is None:
            zeros = not bool(source.any()) and not bool(seen.any())
            if not zeros and source.isfinite().all():
                self.verdicts.failed("operand", call.layer, f"{name}: its shape is not that of its source")
            return zeros
        if not found.holds:
            check, message = self._what_else(call, name, key, source, transposed, seen, scheme, found, mask)
            self.verdicts.failed(check, call.layer, f"{name}: {message}")
            return False
        if found.choice < 0.97:
            self.verdicts.failed(
                "four_over_six", call.layer, f"{name}: {100 * (1 - found.choice):.0f}% of its blocks did not take the "
                "scale with the smaller error",
            )  # fmt: skip
            return False
        self.statistics[call.layer, name].append(found)
        self._acted(call, name, scheme, found, mask)
        return True

    def _acted(self, call: Call, name: str, scheme: Scheme, found: Agreement, mask: int | None) -> None:
        held = self.verdicts.held
        held(f"{name} is {format_name(str(scheme))}, rounded from the tensor it should come from")
        if scheme.stochastic:
            self.rounding[call.layer, name, scheme.rounding].add(Rounding.of(found))
        if scheme.hadamard:
            held(f"Hadamard: {name} was rotated ({scheme.hadamard} points)")
        if scheme.hadamard and scheme.sign_mask == PER_STEP:
            self.drawn_signs[call.layer, name].add(mask)
        if scheme.block[0] > 1:
            rows, columns = scheme.block
            held(f"2-D: the scales of {name} are shared by {rows}x{columns} blocks")
        if scheme.select:
            held(f"4/6: every block of {name} took the scale with the smaller error")
        for what in ("requantized", "split", "masked", "outer"):
            if getattr(scheme, what):
                held(f"{what}: {name} was made so")

    def _what_else(
        self, call: Call, name: str, key: str, source: Tensor, transposed: bool, seen: Tensor, scheme: Scheme,
        found: Agreement, mask: int | None,
    ) -> tuple[str, str]:  # fmt: skip
        """(check, message) for an operand that is not what it should be."""

        def is_(other: Scheme, of: Tensor = source, turned: bool = transposed, what: Tensor = seen) -> bool:
            result = agreement(of, turned, what, other, mask=mask, amax=amax_of(call, name))
            return result is not None and result.holds

        if key == "weight" and (old := self.others.old_weights.get(call.layer)) is not None and is_(scheme, old):
            return "stale_weight", "quantized from the weight as it was before the last optimizer step"
        for other in self.others.calls:
            tensor = other.sources.get(key)
            if other is not call and other.layer == call.layer and tensor is not None and tensor is not source:
                if tensor.shape == source.shape and not torch.equal(tensor, source) and is_(scheme, tensor):
                    return "other_microbatch", f"made of the {key.replace('_', ' ')} of another microbatch"
        if _proportional(seen, source.T if transposed else source):
            return "bf16_fallback", "it is not quantized at all: the values are those of the source in high precision"
        if scheme.hadamard:
            if is_(replace(scheme, hadamard=0)):
                return "hadamard_missing", "the Hadamard transform was not applied"
            found_mask, sure = signs_of(source, transposed, seen, scheme)
            if sure > 0.5 and found_mask != mask:
                return "hadamard_signs", f"rotated with the signs {found_mask:04X}, it should be {mask:04X}"
        if scheme.block[0] > 1:
            line = replace(scheme, block=(1, scheme.block[1]))
            if is_(line):
                return "block_shape", f"its scales are shared by 1x{scheme.block[1]} blocks, not {_sizes(scheme)}"
        if found.explained_inside > 0.995:
            return "padding", "padding leaks: the last group along the reduction dimension is wrong, all others right"
        if is_(scheme, turned=not transposed, what=seen.T[: source.shape[1 - transposed]]) or (
            scheme.block[0] > 1
            and is_(replace(scheme, block=(1, scheme.block[1])), turned=not transposed, what=seen.T)
        ):
            return "block_axis", "its blocks lie along the wrong axis, not along the reduction dimension"
        if not scheme.stochastic and is_(replace(scheme, rounding="stochastic")):
            return "rounding", "rounded stochastically, the scheme says nearest"
        share = f"only {100 * found.explained:.1f}% of its codes follow from its source"
        return "operand", f"{share} by {scheme}"

    def conclude(self) -> None:
        """What can be said only over all calls: drawn signs, stochastic rounding layer by layer and over all."""
        for (layer, name), masks in self.drawn_signs.items():
            if len(masks) > 1:
                self.verdicts.held(f"Hadamard: the signs of {name} were drawn anew at each call")
            else:
                told = f"{name}: its signs should be drawn anew at each call and never changed"
                self.verdicts.failed("hadamard_signs", layer, told)
        whole: dict[tuple[str, str], Rounding] = defaultdict(Rounding)
        for (layer, name, kind), it in self.rounding.items():
            whole[name, kind].add(it)
            if it.variance < ENOUGH:
                self.verdicts.failed(
                    "sr_unproven", layer, f"{name}: too few elements off the grid to see stochastic rounding act "
                    f"({it.expected:.0f} expected to be rounded to the farther code): give a larger batch",
                )  # fmt: skip
            elif self._rounds(layer, name, kind, it):
                self.verdicts.held(f"SR: {name} was rounded stochastically, without bias")
        for (name, kind), it in whole.items():  # a bias too small for one layer's elements
            named = any(f.check.startswith("sr_") and f.message.startswith(name) for f in self.verdicts.findings)
            if it.variance >= ENOUGH and not named:
                self._rounds("", name, kind, it)

    def _rounds(self, layer: str, name: str, kind: str, it: Rounding) -> bool:
        off = (it.farther - it.expected) / math.sqrt(it.variance)
        lean = it.lean / math.sqrt(max(it.lean_variance, 1e-9))
        if it.farther < 0.1 * it.expected:
            self.verdicts.failed(
                "sr_inactive", layer, f"{name}: rounded to nearest: {it.farther} codes are not the nearest, "
                f"stochastic rounding would have made {it.expected:.0f}",
            )  # fmt: skip
            return False
        # 8-bit draws are biased by design, by up to 1/512 of a step
        if abs(off) > SIGMAS or (abs(lean) > SIGMAS and kind != "stochastic8"):
            self.verdicts.failed(
                "sr_biased", layer, f"{name}: {it.farther} codes are not the nearest where {it.expected:.0f} were "
                f"expected ({off:+.1f} standard deviations), mean error {lean:+.1f} standard deviations",
            )  # fmt: skip
            return False
        return True


def _proportional(seen: Tensor, source: Tensor) -> bool:
    """Whether the operand is the source times a number, to BF16's precision: nothing was quantized."""
    if seen.shape[0] != source.shape[0]:
        return False
    a = F.pad(source, (0, seen.shape[1] - source.shape[1])).double() if seen.shape[1] >= source.shape[1] else None
    if a is None or not a.any():
        return False
    b = seen.double()
    factor = (a * b).sum() / a.square().sum()
    return bool((b - factor * a).norm() < 2.0**-7 * b.norm())


def _sizes(scheme: Scheme) -> str:
    return "x".join(map(str, scheme.block))


def repeated_seeds(tape_events, verdicts: Verdicts) -> None:
    """Every call of every layer must draw numbers of its own: one key for two different tensors is a fault."""
    users: dict[tuple[int, int], dict[str, Tensor]] = {}
    for event in tape_events:
        if event.seed is None or not Scheme.parse(event.scheme).stochastic:
            continue
        users.setdefault((int(event.seed), event.stream), {}).setdefault(event.layer, event.source)
        first = users[int(event.seed), event.stream]
        mine = first[event.layer]
        if len(first) > 1:
            names = " and ".join(list(first)[:3])
            verdicts.failed("seed_repeated", event.layer, f"{names} draw the same random numbers")
        elif mine is not event.source and (mine.shape != event.source.shape or not torch.equal(mine, event.source)):
            verdicts.failed("seed_repeated", event.layer, "two calls draw the same random numbers")
    if users:
        verdicts.held("SR: every call of every layer drew its own random numbers", len(users))


