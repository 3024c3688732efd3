"""One job on several ranks: who works on what, and what all of them must hear.

The ranks (processes that `torchrun` starts) form a mesh data x tensor. Ranks that differ in `tensor` share layers
(colwise and rowwise, by the model's own plan); ranks that differ in `data` work on different microbatches: of the
`accumulation` microbatches of a step each takes an equal run. So the numbers of a step belong to (step, microbatch),
whatever the number of ranks; gradients are summed over ranks as one process sums them over microbatches.

A fault that one rank finds is raised on every rank, with the same sentence: nobody is left waiting.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nvfp4_train.experiment.compiling import compile_blocks
from nvfp4_train.experiment.errors import ExperimentError
from nvfp4_train.experiment.processes import die_with_parent
from nvfp4_train.sharding import agree, is_sharded

if TYPE_CHECKING:
    from pathlib import Path

    from nvfp4_train.experiment.config import Arm, Experiment
    from nvfp4_train.experiment.sections import TrainingSection

PATIENCE = timedelta(minutes=30)  # rank 0 may prepare a corpus while the others wait


class World:
    """The ranks of a job as one of them sees them; one process alone is a world of size 1."""

    def __init__(self, device: torch.device, tensor_ranks: int = 1):
        self.device = device
        self.size = dist.get_world_size() if dist.is_initialized() else 1
        self.rank = dist.get_rank() if self.size > 1 else 0
        self.tensor_ranks, self.data_ranks = tensor_ranks, self.size // tensor_ranks
        self.data_rank = self.rank // tensor_ranks
        self.mesh = None
        if self.size > 1:
            shape = (self.data_ranks, tensor_ranks)
            self.mesh = dist.init_device_mesh(device.type, shape, mesh_dim_names=("data", "tensor"))
        self._wrapped: nn.Module | None = None
        self._compared = False  # the gradients of tensor-parallel ranks, once

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def parts(self, accumulation: int) -> range:
        """The microbatches of a step that this rank works on."""
        mine = accumulation // self.data_ranks
        return range(self.data_rank * mine, (self.data_rank + 1) * mine)

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """An ExperimentError (or any ValueError) inside, on any rank, is raised on all, after all have left."""
        if self.size == 1:
            yield
            return
        told = None
        try:
            yield
        except ValueError as error:
            told = str(error)
        if (found := self.first(told)) is not None:
            raise ExperimentError(found)

    def first(self, found: Any) -> Any:
        """The first rank's finding that is not None; the same on every rank."""
        if self.size == 1:
            return found
        everyone = [None] * self.size
        dist.all_gather_object(everyone, found)
        return next((one for one in everyone if one is not None), None)

    @staticmethod
    def agree(facts: dict[str, str | None]) -> None:
        """Raises ExperimentError, on every rank, that names the first fact in which a rank differs from the first."""
        try:
            agree(facts)
        except ValueError as error:
            raise ExperimentError(str(error)) from None

    def all_losses(self, losses: list[Tensor]) -> Tensor:
        """float32 [microbatches of the step], in their order, from what each rank has of them."""
        mine = torch.stack(losses).float()
        if self.data_ranks == 1:
            return mine
        everyone = [torch.empty_like(mine) for _ in range(self.data_ranks)]
        dist.all_gather(everyone, mine, group=self.mesh["data"].get_group())
        return torch.cat(everyone)

    def wrap(self, experiment: Experiment, model: nn.Module) -> nn.Module:
        """The model (converted already) as the ranks run it; parameters become DTensors where they are sharded."""
        if self.size == 1:
            self._wrapped = model
            if experiment.training.compile:
                compile_blocks(model)
            return model
        from nvfp4_train.experiment import layouts  # imports much that one process has no use for

        try:
            self._wrapped = layouts.wrap(self, experiment, model)
        except ValueError as error:  # of sizes and recipes: all ranks find the same
            raise ExperimentError(str(error)) from None
        return self._wrapped

    def shares_weights(self, experiment: Experiment, arm: Arm) -> bool:
        """Whether the ranks of a job have a part of the weights each, so that none needs all of them."""
        return self.size > 1 and experiment.parallel.data == "fsdp" and arm.backend is None

    def materialise(self, model: nn.Module, source: nn.Module | None) -> None:
        """Gives a model that was wrapped on the meta device its memory and the values of the first rank's `source`."""
        from nvfp4_train.experiment.deferred import materialise

        with self.together():  # a backend that the device cannot run, on all ranks alike
            materialise(model, source, self.device)

    def whole_gradients(self, experiment: Experiment, model: nn.Module) -> None:
        """After a step's last backward: sums what tensor parallelism has left as partial sums.

        The first time it refuses a model whose plan is not all that tensor parallelism would need.
        """
        if self.tensor_ranks == 1:
            return
        from nvfp4_train.experiment import layouts
        from nvfp4_train.parallel import whole_gradients

        whole_gradients(model.parameters())
        if not self._compared:
            layouts.refuse_other_gradients(self, experiment, model)
            self._compared = True

    def settle(self) -> None:
        """Back to shards: FSDP leaves the root's weights whole after a forward without a backward."""
        for module in self._wrapped.modules():
            if hasattr(module, "reshard"):
                module.reshard()

    @contextlib.contextmanager
    def summing(self, last: bool) -> Iterator[None]:
        """Around one microbatch; gradients meet over the ranks in the backward of the last."""
        if isinstance(self._wrapped, nn.parallel.DistributedDataParallel) and not last:
            with self._wrapped.no_sync():
                yield
            return
        if hasattr(self._wrapped, "set_requires_gradient_sync"):
            self._wrapped.set_requires_gradient_sync(last)
        yield


@contextlib.contextmanager
def joined(experiment: Experiment, arm: str, seed: int, device: torch.device, out: Path) -> Iterator[World]:
    """The world of this job: that of torchrun, whose process group is made here and ended with the job.

    Raises ExperimentError, on every rank: ranks that were not started alike, a number of ranks that does not divide.
    """
    size, settings = int(os.environ.get("WORLD_SIZE", "1")), experiment.parallel
    ours = size > 1 and not dist.is_initialized()
    if ours:
        die_with_parent()
        if device.type == "cuda":
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=PATIENCE)
    try:
        if dist.is_initialized():
            facts = _flat(experiment.identity())
            facts |= {"arm": arm, "seed": str(seed), "parallel": str(settings), "torch": torch.__version__}
            facts["--out"] = str(out.absolute())
            facts[f"the recipe of arm {arm}"] = experiment.arm(arm).recipe.to_yaml()
            World.agree(facts)
        refuse_indivisible(experiment, dist.get_world_size() if dist.is_initialized() else 1)
        yield World(_own(device), settings.tensor)
    finally:
        if ours:
            dist.destroy_process_group()


def _flat(settings: dict[str, Any], path: str = "") -> dict[str, str]:
    """{"training.batch_size": "8", ...}"""
    found = {}
    for key, value in settings.items():
        found |= _flat(value, f"{path}{key}.") if isinstance(value, dict) else {f"{path}{key}": str(value)}
    return found


def _own(device: torch.device) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" else device


def refuse_indivisible(experiment: Experiment, size: int) -> None:
    """Raises ExperimentError where `size` ranks cannot share this experiment's jobs equally."""
    settings, parts = experiment.parallel, experiment.training.accumulation
    if size % settings.tensor:
        raise ExperimentError(
            f"{experiment.path}: parallel.tensor is {settings.tensor}, which does not divide the {size} "
            f"{'rank' if size == 1 else 'ranks'} of this job: start a multiple of {settings.tensor} with torchrun"
        )
    data = size // settings.tensor
    if size > 1 and experiment.training.cuda_graphs:
        raise ExperimentError(f"{experiment.path}: training.cuda_graphs cannot record collectives: use it on one rank")
    if parts % data:
        raise ExperimentError(
            f"{experiment.path}: {data} data-parallel ranks cannot share training.accumulation: {parts} microbatches "
            f"equally: make accumulation a multiple of {data} (and batch_size smaller, to keep the step as it is)"
        )
    if settings.tensor > 1 and data > 1 and settings.data == "ddp":
        raise ExperimentError(
            f"{experiment.path}: parallel.data: ddp cannot be combined with parallel.tensor: choose data: fsdp"
        )


def by_layout(parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Parameters that torch's list operations take together: plain ones, and those of each mesh."""
    groups: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault(parameter.device_mesh if is_sharded(parameter) else None, []).append(parameter)
    return list(groups.values())


def total_norm(parameters: list[nn.Parameter]) -> Tensor:
    """The norm of all gradients, of the whole of those that are sharded; the same on every rank."""
    norms = []
    for group in by_layout([p for p in parameters if p.grad is not None]):
        norm = nn.utils.get_total_norm([p.grad for p in group])
        norms.append(norm.full_tensor() if is_sharded(norm) else norm)
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))


def clip(parameters: list[nn.Parameter], largest: float, norm: Tensor) -> None:
    for group in by_layout(parameters):
        nn.utils.clip_grads_with_norm_(group, largest, norm)


def adamw(parameters: list[nn.Parameter], settings: TrainingSection) -> torch.optim.AdamW:
    """Weight decay on matrices only."""
    groups = []
    for matrices in (True, False):
        chosen = [p for p in parameters if (p.ndim > 1) == matrices]
        decay = settings.weight_decay if matrices else 0.0
        groups += [{"params": group, "weight_decay": decay} for group in by_layout(chosen) or [[]]]
    return torch.optim.AdamW(groups, lr=settings.learning_rate, betas=settings.betas, fused=True)


@contextlib.contextmanager
def gathered_bytes() -> Iterator[list[int]]:
    """Within it, the size of every all-gather that FSDP makes on this rank, as received, is appended to the list."""
    sizes: list[int] = []
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    collective = getattr(dist, name)

    def counting(output: Tensor, *arguments: Any, **keywords: Any) -> Any:
        sizes.append(output.nbytes)
        return collective(output, *arguments, **keywords)

    setattr(dist, name, counting)
    try:
        yield sizes
    finally:
        setattr(dist, name, collective)
