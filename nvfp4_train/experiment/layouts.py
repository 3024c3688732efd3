"""A model laid out over ranks: tensor parallel by its own plan, then DDP or FSDP2 over the data-parallel ranks."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from nvfp4_train.experiment.compiling import blocks_of, compile_blocks
from nvfp4_train.experiment.errors import ExperimentError
from nvfp4_train.layer_state import quantizer_state
from nvfp4_train.linear import QuantizedLinear
from nvfp4_train.parallel import NormOfHeads, refuse_cut
from nvfp4_train.sharding import is_sharded
from nvfp4_train.swapping import Quantized
from nvfp4_train.weight_gather import gather_in_fp4

if TYPE_CHECKING:
    from nvfp4_train.experiment.config import Experiment
    from nvfp4_train.experiment.distributed import World

# By the names that transformers has for them in its plans.
STYLES = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel, "replicated_with_grad_allreduce": NormOfHeads}

APART = 1e-2  # of the larger of two norms


def wrap(world: World, experiment: Experiment, model: nn.Module) -> nn.Module:
    """What to call in place of ``model``, whose parameters are now this rank's."""
    settings = experiment.parallel
    if experiment.training.compile:
        compile_blocks(model)
    if quantizer_state(model):
        raise ExperimentError(
            f"{experiment.path}: a recipe that remembers earlier steps (amax histories, norms of channels) would "
            "remember other ones on each rank: train it on one rank"
        )
    if world.tensor_ranks > 1:
        _tensor_parallel(world, experiment, model)
    if settings.data == "fsdp":
        if not hasattr(FSDPModule, "set_force_sum_reduction_for_comms"):
            raise ExperimentError(f"{experiment.path}: parallel.data: fsdp needs a newer torch; or choose ddp")
        if settings.gather_fp4:
            gather_in_fp4(model, world.data_ranks)
        mesh = world.mesh["data"]
        for block in blocks_of(model):  # without blocks all of the model is gathered at once
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        for module in model.modules():
            if isinstance(module, FSDPModule):  # a sum, as one process sums its microbatches
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        return model
    if world.data_ranks == 1:
        return model
    wrapped = nn.parallel.DistributedDataParallel(model)
    wrapped.register_comm_hook(wrapped.process_group, _sum)
    return wrapped


def _sum(group, bucket):  # no annotation: torch compares it with a class, not with the text it is here
    """A bucket's gradients summed over the ranks, where DDP by itself would average."""
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


def _tensor_parallel(world: World, experiment: Experiment, model: nn.Module) -> None:
    """Colwise and rowwise layers, and norms of heads, as the config of the model's architecture lists them."""
    name, base = experiment.path, getattr(model, "base_model", model)
    kind, plan = model.config.model_type, getattr(model.config, "base_model_tp_plan", None) or {}
    if not plan:
        raise ExperimentError(f"{name}: parallel.tensor: {kind} has no plan in transformers; use tensor: 1")
    modules = dict(base.named_modules())
    chosen = {key: style for glob, style in plan.items() for key in modules if fnmatchcase(key, glob)}
    beyond = [f"{glob} ({style})" for glob, style in plan.items() if style not in STYLES]
    beyond = beyond or [f"{key} ({style})" for key, style in chosen.items() if isinstance(modules[key], Quantized)]
    if beyond:
        raise ExperimentError(
            f"{name}: parallel.tensor: of the plan of {kind} this version cannot lay out {', '.join(beyond)}, "
            "but linear layers, colwise and rowwise, and norms of heads: use tensor: 1"
        )
    for key in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(model.config, key, None) or world.tensor_ranks
        if heads % world.tensor_ranks:
            raise ExperimentError(
                f"{name}: parallel.tensor is {world.tensor_ranks}, which does not divide the model's {heads} {key}"
            )
    for key, style in chosen.items():
        if isinstance(layer := modules[key], QuantizedLinear) and style in ("colwise", "rowwise"):
            refuse_cut(layer.label, layer.recipe, style, tuple(layer.weight.shape), world.tensor_ranks)
    parallelize_module(base, world.mesh["tensor"], {key: STYLES[style]() for key, style in chosen.items()})


@torch.no_grad()
def refuse_other_gradients(world: World, experiment: Experiment, model: nn.Module) -> None:
    """Raises ExperimentError, on every rank, for a weight that each tensor-parallel rank has whole and of which they
    have found different gradients: what it is applied to is cut, and the plan of the model does not say so.

    A collective. By the norms: ranks that differ see other heads, while kernels that add in no fixed order differ in
    the last bits.
    """
    group = world.mesh["tensor"].get_group()
    named = [(name, p) for name, p in model.named_parameters() if p.grad is not None]
    whole = [(n, p.grad) for n, p in named if not is_sharded(p) or p.device_mesh.mesh_dim_names == ("data",)]
    if not whole:
        return
    norms = torch.stack([(g.to_local() if is_sharded(g) else g).norm(dtype=torch.float32) for _, g in whole])
    everyone = [torch.empty_like(norms) for _ in range(world.tensor_ranks)]
    dist.all_gather(everyone, norms, group=group)
    together = torch.stack(everyone)
    apart = (together.amax(0) - together.amin(0)) > APART * together.amax(0)
    worst = [name for (name, _), differs in zip(whole, apart.tolist(), strict=True) if differs]
    if (found := world.first(worst or None)) is not None:
        raise ExperimentError(
            f"{experiment.path}: parallel.tensor: the ranks find different gradients of {', '.join(found[:3])}, which "
            f"the plan of {model.config.model_type} in transformers leaves whole although its input is cut over ranks: "
            "use tensor: 1"
        )
