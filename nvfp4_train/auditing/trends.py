"""Warnings along training: what a number says beside those before it."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterator
from typing import Any

from nvfp4_train.auditing.meters import OperandNumbers

HISTORY = 8  # audits that a new one is compared with
NOISE_THRESHOLD = math.sqrt(3)  # arXiv:2505.19115: below, quantized training becomes less effective
RISING = (1.5, 0.02)  # underflow: so many times the least of before, and so much more (share)
JUMP = 4.0  # an amax over the largest of before
BEYOND = 2.0  # times the noise floor's largest gap: one run of chaos is no bound for another
OSCILLATING = 0.02  # share of a layer's weights


class Trends:
    """Remembers the audits of one job and says what is worth a warning. ``restore`` reads them back after a resume."""

    def __init__(self) -> None:
        self._underflow: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=HISTORY))
        self._amax: dict[tuple[str, str], deque[float]] = defaultdict(lambda: deque(maxlen=HISTORY))
        self._gaps: deque[tuple[int, float]] = deque(maxlen=HISTORY)

    def restore(self, line: dict[str, Any]) -> None:
        numbers = {
            (layer, operand): OperandNumbers(*row)
            for layer, rows in line["layers"].items()
            for operand, row in rows.items()
        }
        for _ in self.operands(numbers):
            pass

    def operands(self, numbers: dict[tuple[str, str], OperandNumbers]) -> Iterator[tuple[str, str]]:
        """(check, sentence) for operands that round more to zero than before, or whose amax jumped."""
        by_operand: dict[str, list[float]] = defaultdict(list)
        for (_, operand), row in numbers.items():
            by_operand[operand].append(row.underflow)
        for operand, shares in by_operand.items():
            now, before = sum(shares) / len(shares), self._underflow[operand]
            if len(before) >= 2 and all(now > RISING[0] * old and now > old + RISING[1] for old in before):
                yield "underflow", (
                    f"{operand}: {100 * now:.1f}% of the nonzero elements are rounded to zero, "
                    f"{100 * min(before):.1f}% before"
                )
            before.append(now)
        jumps = []
        for key, row in numbers.items():
            before = self._amax[key]
            if len(before) >= 2 and row.amax > JUMP * max(before) > 0:
                jumps.append((row.amax / max(before), *key))
            before.append(row.amax)
        if jumps:
            times, layer, operand = max(jumps)
            yield "amax", f"{layer}: {operand}: amax is {times:.1f} times the largest of the audits before"

    def noise(self, ratio: float | None) -> Iterator[tuple[str, str]]:
        if ratio is not None and ratio < NOISE_THRESHOLD:
            yield "gradient_noise", (
                f"the gradient's norm is {ratio:.2f} times its quantization noise; under sqrt(3) training in few bits "
                "becomes less effective (arXiv:2505.19115)"
            )

    def oscillation(self, shares: dict[str, float]) -> Iterator[tuple[str, str]]:
        if shares and max(shares.values()) > OSCILLATING:
            layer = max(shares, key=shares.__getitem__)
            yield "oscillation", (
                f"{layer}: {100 * shares[layer]:.1f}% of its weights change code again and again while they stand still"
            )

    def gap(self, step: int, gap: float, floor: float | None) -> Iterator[tuple[str, str]]:
        """``gap``: held-out loss over the control's at that step, as a share; ``floor``: the noise floor's largest."""
        self._gaps.append((step, gap))
        recent = [each for _, each in list(self._gaps)[-3:]]
        if floor is not None and len(recent) == 3 and recent[0] < recent[1] < recent[2] and gap > BEYOND * floor:
            yield "gap", (
                f"the gap to the control is {100 * gap:+.2f}% and grew over three evaluations; chaos alone makes at "
                f"most {100 * floor:.2f}%"
            )
