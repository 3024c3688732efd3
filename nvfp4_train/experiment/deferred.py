"""A model that no rank but the first ever has whole, and the first only on the host: for FSDP.

Every rank builds the model on the meta device, where weights have a size and no memory, converts it and lays it out.
Then each gets memory for its own shards, and the first rank, which has built the model on the CPU as one process does,
sends the weights one by one: the run starts from the bits of one process, whatever draws the model's initialisation
makes and in whatever order.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from nvfp4_train.experiment.sharded_checkpoint import copy_part


@torch.no_grad()
def materialise(model: nn.Module, source: nn.Module | None, device: torch.device) -> None:
    """Memory for `model`, laid out on the meta device, and the values of `source`, which only the first rank has.

    A collective over all ranks.
    """
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    model.to_empty(device=device)
    for first, *others in names.values():  # each place got memory of its own: tied weights are one again
        for other in others:
            module, _, attribute = other.rpartition(".")
            setattr(model.get_submodule(module), attribute, model.get_parameter(first))
    values = {} if source is None else {**dict(source.named_parameters()), **dict(source.named_buffers())}
    for name, target in (*model.named_parameters(), *model.named_buffers()):
        whole = values.get(name)
        if whole is None:
            whole = torch.empty(target.shape, dtype=target.dtype, device=device)
        whole = whole.detach().to(device, target.dtype).contiguous()
        dist.broadcast(whole, 0)
        copy_part(target.detach(), whole)
