"""The ledger: what ran.

Every quantization and every matrix product of this library counts itself here, from inside its custom op, that is
when it is executed: also under ``torch.compile``, where Python above the op no longer runs. A captured CUDA graph
counts at capture, apart from the rest, because its replays run the same kernels without Python: ``gemms(replays=n)``
counts what was captured n times. What a recipe asked for is not evidence, what stands here is.

    with ledger.recording() as log:
        model(x).sum().backward()
    log.gemms()

An observer sees the tensors themselves: what each op was handed and what it gave back.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from nvfp4_kernels.quantized import Quantized

FIRST_SITE = 1_000_003  # torch.compile takes equal lengths for one symbol: far from any dimension of a model
_labels: list[str] = []
_recording: list["Ledger"] = []
_observers: list["Observer"] = []


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
    """Counts of one recording. Keys are tuples, values ``[calls, amount, calls captured, amount captured]``; amounts
    are FLOPs or elements, "captured" is what went into a CUDA graph instead of being run."""

    matmuls: dict[tuple[str, str, str, str, str], list[int]] = field(default_factory=dict)
    quantizations: dict[tuple[str, str, str, str], list[int]] = field(default_factory=dict)

    def gemms(self, replays: int = 1) -> list[dict]:
        """One row for each layer, GEMM and pair of operands: layer, gemm, a, b, backend, calls, flops.

        ``replays``: how often a CUDA graph that was captured during the recording has run.
        """
        return _rows(self.matmuls, ("layer", "gemm", "a", "b", "backend"), "flops", replays)

    def operands(self, replays: int = 1) -> list[dict]:
        """One row for each layer, operand and scheme: layer, operand, scheme, backend, calls, elements."""
        return _rows(self.quantizations, ("layer", "operand", "scheme", "backend"), "elements", replays)

    @property
    def captured(self) -> bool:
        """Whether part of it went into a CUDA graph."""
        return any(entry[2] for table in (self.matmuls, self.quantizations) for entry in table.values())


def _rows(table: dict[tuple, list[int]], names: tuple[str, ...], amount: str, replays: int) -> list[dict]:
    return [
        {
            **dict(zip(names, key, strict=True)),
            "calls": calls + replays * captured_calls,
            amount: run + replays * captured,
        }
        for key, (calls, run, captured_calls, captured) in table.items()
    ]


class Quantization(NamedTuple):
    """One quantization as it ran: ``made`` is the operand ``[rows, K]`` of ``source``, or of ``source.T``."""

    layer: str
    operand: str  # such as "wgrad.input"
    scheme: str
    backend: str
    source: Tensor
    transposed: bool
    seed: Tensor | None
    stream: int
    made: Quantized


class Product(NamedTuple):
    """One matrix product as it ran: ``out [M, N] = alpha * a [M, K] @ b [N, K].T``; ``a`` and ``b`` are decoded BF16.

    ``out`` is None where the product was added to a buffer (``main_grad``).
    """

    layer: str
    gemm: str
    a_scheme: str
    b_scheme: str
    backend: str
    a: Tensor
    b: Tensor
    alpha: Tensor | None
    out: Tensor | None


class Observer(Protocol):
    """Is shown every quantization and product, from inside the op, in the order in which they run.

    Nothing is copied for it: what it wants to keep it must clone where a caller might change it in place.
    """

    def quantized(self, event: Quantization) -> None: ...

    def multiplied(self, event: Product) -> None: ...


@contextmanager
def recording() -> Iterator[Ledger]:
    """Counts everything that runs inside, in any thread (autograd runs backward in its own)."""
    ledger = Ledger()
    _recording.append(ledger)
    try:
        yield ledger
    finally:
        _recording.remove(ledger)


@contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Shows the observer everything that runs inside, in any thread. Without one, nothing is installed anywhere."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


def observed() -> bool:
    """Whether anyone looks at the tensors. Never inside a CUDA graph's capture: looking would break it."""
    return bool(_observers) and not _capturing()


def show_quantization(where: int, operand: str, scheme: str, backend: str, *parts) -> None:
    """``parts``: source, transposed, seed, stream, made of ``Quantization``."""
    event = Quantization(_label(where), operand, scheme, backend, *parts)
    for observer in _observers:
        observer.quantized(event)


def show_product(where: int, gemm: str, a_scheme: str, b_scheme: str, backend: str, *parts) -> None:
    """``parts``: a, b, alpha, out of ``Product``."""
    event = Product(_label(where), gemm, a_scheme, b_scheme, backend, *parts)
    for observer in _observers:
        observer.multiplied(event)


def count_matmul(where: int, gemm: str, a: str, b: str, backend: str, flops: int) -> None:
    for ledger in _recording:
        _add(ledger.matmuls, (_label(where), gemm, a, b, backend), flops)


def count_quantization(where: int, operand: str, scheme: str, backend: str, elements: int) -> None:
    for ledger in _recording:
        _add(ledger.quantizations, (_label(where), operand, scheme, backend), elements)


def _label(where: int) -> str:
    return _labels[where - FIRST_SITE]


def _add(table: dict, key: tuple, amount: int) -> None:
    entry = table.setdefault(key, [0, 0, 0, 0])
    first = 2 if _capturing() else 0
    entry[first] += 1
    entry[first + 1] += amount


def _capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
