"""The ledger: what ran.

Every quantization and every matrix product of this library counts itself here, from inside its custom op, that is
when it is executed: also under ``torch.compile``, where Python above the op no longer runs. (A captured CUDA graph
counts at capture; its replays run the same kernels.) What a recipe asked for is not evidence, what stands here is.

    with ledger.recording() as log:
        model(x).sum().backward()
    log.gemms()
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor

FIRST_SITE = 1_000_003  # torch.compile takes equal lengths for one symbol: far from any dimension of a model
_labels: list[str] = []
_recording: list["Ledger"] = []


@cache
def site(label: str) -> Tensor:
    """A layer's name as the length of an empty tensor ``[number, 0]``, one for each label; ops get that number.

    A custom op needs to know for whom it works. A string or an integer on a module is a constant of the compiled
    graph, and blocks compiled one by one would recompile for each layer. A tensor's value is not guarded, but a CPU
    tensor among the saved ones keeps a graph out of CUDA graphs. A length becomes a symbol when it is seen to change.
    """
    _labels.append(label)
    return torch.empty(FIRST_SITE + len(_labels) - 1, 0, device="cpu")


UNNAMED = len(site(""))  # for a call outside any layer


@dataclass
class Ledger:
    """Counts of one recording. Keys are tuples, values ``[calls, amount]``; amounts are FLOPs or elements."""

    matmuls: dict[tuple[str, str, str, str, str], list[int]] = field(default_factory=dict)
    quantizations: dict[tuple[str, str, str, str], list[int]] = field(default_factory=dict)

    def gemms(self) -> list[dict]:
        """One row for each layer, GEMM and pair of operands: layer, gemm, a, b, backend, calls, flops."""
        names = ("layer", "gemm", "a", "b", "backend")
        return [
            {**dict(zip(names, key, strict=True)), "calls": calls, "flops": flops}
            for key, (calls, flops) in self.matmuls.items()
        ]

    def operands(self) -> list[dict]:
        """One row for each layer, operand and scheme: layer, operand, scheme, backend, calls, elements."""
        names = ("layer", "operand", "scheme", "backend")
        return [
            {**dict(zip(names, key, strict=True)), "calls": calls, "elements": elements}
            for key, (calls, elements) in self.quantizations.items()
        ]


@contextmanager
def recording() -> Iterator[Ledger]:
    """Counts everything that runs inside, in any thread (autograd runs backward in its own)."""
    ledger = Ledger()
    _recording.append(ledger)
    try:
        yield ledger
    finally:
        _recording.remove(ledger)


def count_matmul(where: int, gemm: str, a: str, b: str, backend: str, flops: int) -> None:
    for ledger in _recording:
        _add(ledger.matmuls, (_label(where), gemm, a, b, backend), flops)


def count_quantization(where: int, operand: str, scheme: str, backend: str, elements: int) -> None:
    for ledger in _recording:
        _add(ledger.quantizations, (_label(where), operand, scheme, backend), elements)


def _label(where: int) -> str:
    return _labels[where - FIRST_SITE]


def _add(table: dict, key: tuple, amount: int) -> None:
    entry = table.setdefault(key, [0, 0])
    entry[0] += 1
    entry[1] += amount
