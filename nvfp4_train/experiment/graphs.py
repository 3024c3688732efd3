"""CUDA graphs: a microbatch's forward and backward recorded once and replayed, without the host's time for each kernel.

A small model's step is bound by launches, and a quantized one launches more. What a replay computes is what the
recorded call computed, to the bit, with fresh random draws: torch's generator goes on through replays as through calls.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from functools import cache

import torch
from torch import Tensor, nn

from nvfp4_train.experiment.errors import ExperimentError
from nvfp4_train.experiment.randomness import get_state, set_state

WARM_UPS = 3  # calls before a capture: lazy initialisation, autotuning and compilation must not be recorded


class Replayed:
    """``accumulate(batch)``, which adds to the gradients of ``parameters`` and returns the loss (0-d), as a graph.

    Gradients live in fixed buffers that ``zero_grad(set_to_none=False)`` clears. The first batch fixes shape and dtype.
    """

    def __init__(self, accumulate: Callable[[Tensor], Tensor], parameters: Iterable[nn.Parameter]):
        self.accumulate = accumulate
        self.parameters = list(parameters)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.recorded: Hashable = None
        for parameter in self.parameters:
            parameter.grad = torch.zeros_like(parameter)

    def __call__(self, batch: Tensor, plan: Hashable = None) -> Tensor:
        """The loss of ``batch``. Another ``plan`` (what the layers do now) is recorded anew, with gradients at zero."""
        if self.graph is None or plan != self.recorded:
            self._record(batch)
            self.recorded = plan
        self.batch.copy_(batch)
        self.graph.replay()
        return self.loss.clone()

    def _record(self, batch: Tensor) -> None:
        device = batch.device
        before = get_state(device)
        self.graph, self.batch = None, batch.clone()
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                self.accumulate(self.batch)
        torch.cuda.current_stream(device).wait_stream(stream)
        torch.cuda.empty_cache()  # what the warm-ups used is not at hand for the graph, which has memory of its own
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=_pool(device)):
                self.loss = self.accumulate(self.batch)
        except RuntimeError as error:
            first = error  # what ends a capture that failed says only that it did
            while first.__context__ is not None:
                first = first.__context__
            raise ExperimentError(
                f"training.cuda_graphs: this model cannot be recorded ({str(first).splitlines()[0]}): set it to false"
            ) from error
        torch._foreach_zero_([parameter.grad for parameter in self.parameters])
        set_state(device, before)
        self.graph = graph


def _pool(device: torch.device) -> tuple[int, int]:
    """One memory for all graphs of a device: they run one after the other and leave only losses behind."""
    return _anchor(device).pool()


@cache
def _anchor(device: torch.device) -> torch.cuda.CUDAGraph:
    """A graph that is never let go: with the last of its graphs a pool would go too, and could not be used again."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(device), torch.cuda.graph(graph):
        torch.zeros((), device=device)
    return graph
