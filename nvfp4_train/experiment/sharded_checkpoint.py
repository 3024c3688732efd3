"""The tensors of a checkpoint written by many ranks, each its own shards, and read by any number of them.

`torch.distributed.checkpoint` keeps what stands where, by name: a run goes on under another number of ranks, another
layout or on one process. Tensors are named by parameter, never by their place in an optimizer.
"""

from __future__ import annotations

import itertools
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from nvfp4_train.experiment.errors import ExperimentError
from nvfp4_train.experiment.weights import refuse_another_model
from nvfp4_train.sharding import is_sharded

MOMENTS = ("exp_avg", "exp_avg_sq")


def save(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Writes `folder`, every rank its part, flushed to the disk. A collective."""
    try:
        dcp.save(tensors(model, optimizer), checkpoint_id=folder, no_dist=not dist.is_initialized())
    except CheckpointException as error:
        raise ExperimentError(f"cannot write the checkpoint {folder}: {_reasons(error)}") from error


def missing_files(folder: Path) -> list[str]:
    """Files that ranks have written by their own account and that cannot be seen from here."""
    places = dcp.FileSystemReader(folder).read_metadata().storage_data.values()
    return sorted(name for name in {place.relative_path for place in places} if not (folder / name).is_file())


def load(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Fills `model` and `optimizer`, in place, on whatever ranks there are. A collective.

    Without an optimizer only the weights are read, by a process that wants to look at them.
    """
    found = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    wanted = tensors(model, optimizer)
    for part, those in wanted.items():  # torch.distributed.checkpoint names them model.NAME, optimizer.NAME
        there = {name.removeprefix(f"{part}."): t.size for name, t in found.items() if name.startswith(f"{part}.")}
        refuse_another_model(folder, there, {name: tensor.shape for name, tensor in those.items()})
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*single process")  # which is what it is then
        try:
            dcp.load(wanted, checkpoint_id=folder, no_dist=not dist.is_initialized())
        except CheckpointException as error:  # no Exception: it would pass all who handle those
            raise ExperimentError(
                f"the checkpoint {folder} cannot be read ({_reasons(error)}); delete it to begin anew"
            ) from error


def _reasons(error: CheckpointException) -> str:
    """What the ranks met, each thing once."""
    return "; ".join(sorted({f"{type(e).__name__}: {e}" for e, _ in error.failures.values()}))


def tensors(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, dict[str, Tensor]]:
    """{"model": {name: tensor}, "optimizer": {name.key: tensor}}: the live tensors, once each where they are tied."""
    values, moments = {}, {}
    for name, parameter in model.named_parameters():
        values[name] = parameter.detach()
        if optimizer is not None and parameter.requires_grad:
            moments |= {f"{name}.{key}": value for key, value in _state(optimizer, parameter).items()}
    kept = model.state_dict().keys()
    values |= {name: buffer for name, buffer in model.named_buffers() if name in kept}
    return {"model": values} if optimizer is None else {"model": values, "optimizer": moments}


def _state(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> dict[str, Tensor]:
    """AdamW's state of one parameter, made as AdamW makes it where no step was done yet."""
    state = optimizer.state[parameter]
    if not state:
        state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
        state |= {key: torch.zeros_like(parameter.detach()) for key in MOMENTS}
    return state


def fill_from_whole(
    weights: dict[str, Tensor], state: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """Takes over what one process wrote: its whole weights and its optimizer's state_dict, each rank its part.

    `state`: AdamW's state_dict, its parameters numbered as one process lists them: matrices first, then the others.
    """
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    order = [name for name, p in named if p.ndim > 1] + [name for name, p in named if p.ndim <= 1]
    place = {name: number for number, name in enumerate(order)}
    wanted = tensors(model, optimizer)
    for name, tensor in itertools.chain(wanted["model"].items(), wanted["optimizer"].items()):
        if name in weights:
            whole = weights[name]
        else:
            parameter, _, key = name.rpartition(".")
            whole = state["state"][place[parameter]][key]
        copy_part(tensor, whole)


@torch.no_grad()
def copy_part(target: Tensor, whole: Tensor) -> None:
    """`target` becomes `whole`, or this rank's part of it."""
    if is_sharded(target):
        sizes, starts = compute_local_shape_and_global_offset(target.shape, target.device_mesh, target.placements)
        whole = whole[tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))]
        target = target.to_local()
    target.copy_(whole)
