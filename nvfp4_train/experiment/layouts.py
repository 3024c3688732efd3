"""A model laid out over ranks: tensor parallel by its own plan, then DDP or FSDP2 over the data-parallel ranks."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from nvfp4_train.experiment.errors import ExperimentError
from nvfp4_train.layer_state import quantizer_state
from nvfp4_train.linear import QuantizedLinear
from nvfp4_train.parallel import refuse_cut
from nvfp4_train.survey import ConversionError, Survey
from nvfp4_train.weight_gather import gather_in_fp4

if TYPE_CHECKING:
    from nvfp4_train.experiment.config import Experiment
    from nvfp4_train.experiment.distributed import World

STYLES = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}


def wrap(world: World, experiment: Experiment, model: nn.Module) -> nn.Module:
    """What to call in place of ``model``, whose parameters are now this rank's."""
    settings = experiment.parallel
    if experiment.training.compile:
        # FSDP gathers between blocks, where a graph would break
        for module in _blocks(model) if settings.data == "fsdp" else [model]:
            module.compile()
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
        for block in _blocks(model):
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


def _blocks(model: nn.Module) -> list[nn.Module]:
    try:
        return Survey(model).blocks()[1]
    except ConversionError:
        return []  # all of the model is gathered at once


def _tensor_parallel(world: World, experiment: Experiment, model: nn.Module) -> None:
    """Colwise and rowwise layers as the config of the model's architecture lists them."""
    name, base = experiment.path, getattr(model, "base_model", model)
    plan = getattr(model.config, "base_model_tp_plan", None) or {}
    if not plan:
        raise ExperimentError(f"{name}: parallel.tensor: {model.config.model_type} has no plan in transformers; use 1")
    if unknown := sorted({style for style in plan.values() if style not in STYLES}):
        raise ExperimentError(
            f"{name}: parallel.tensor: the plan of {model.config.model_type} has layers that are {', '.join(unknown)}; "
            "this version lays out colwise and rowwise ones: use tensor: 1"
        )
    for key in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(model.config, key, None) or world.tensor_ranks
        if heads % world.tensor_ranks:
            raise ExperimentError(
                f"{name}: parallel.tensor is {world.tensor_ranks}, which does not divide the model's {heads} {key}"
            )
    modules = dict(base.named_modules())
    chosen = {key: style for glob, style in plan.items() for key in modules if fnmatchcase(key, glob)}
    for key, style in chosen.items():
        if isinstance(layer := modules[key], QuantizedLinear):
            refuse_cut(layer.label, layer.recipe, style, tuple(layer.weight.shape), world.tensor_ranks)
    parallelize_module(base, world.mesh["tensor"], {key: STYLES[style]() for key, style in chosen.items()})
