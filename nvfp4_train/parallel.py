"""Tensor and sequence parallel: a layer whose weight or input is a DTensor, told as local tensors and a Layout.

torch's styles stay as they are: after ``convert`` comes

    parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})

What they place is read here from the DTensors themselves; the layer then works on local tensors.
Sums over ranks (colwise dx, rowwise y) are made by DTensor, in the dtype of the tensor: there, and only there, the
numbers differ from one process, by the roundings of partial sums.

A norm of the query's and key's heads, between such layers, is ``NormOfHeads()`` in the plan. Experts and Conv1D cannot
be cut: leave them out of the plan.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import SequenceParallel

from nvfp4_train.recipe import LinearPlan, Recipe
from nvfp4_train.sharding import Layout, part_of, piece_of

Localized = tuple[Tensor, Tensor, Tensor | None, Layout, Callable[[Tensor], Tensor]]


class NormOfHeads(SequenceParallel):
    """For ``parallelize_module``: a norm over the last dimension of heads that ranks have shared out (Qwen3's q_norm).

    Each rank normalizes its own heads, as they are; the weight is whole on every rank and the same for all heads, so
    that its gradient is the sum over ranks. It comes as a DTensor that is a partial sum, as with torch's
    SequenceParallel: ``whole_gradients`` makes it one before a norm is taken or an optimizer steps; FSDP does so too.
    """

    def __init__(self) -> None:
        # Which dimension the heads are in does not matter to a norm over the last one; the first is always there.
        super().__init__(sequence_dim=0, use_local_output=True)


def whole_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Sums gradients that are partial sums over ranks, in place of ``.grad``. A collective where there are any."""
    for parameter in parameters:
        grad = parameter.grad
        if isinstance(grad, DTensor) and any(placement.is_partial() for placement in grad.placements):
            parameter.grad = grad.redistribute(placements=parameter.placements)


def localize(label: str, plan: LinearPlan, x: Tensor, weight: Tensor, bias: Tensor | None) -> Localized:
    """(x, weight, bias) of this rank, how they are parts of a whole, and what makes the local output a DTensor again.

    ``x [..., K]`` and ``weight [N, K]``: DTensors on one mesh of one dimension, placed colwise, rowwise, by tokens or
    replicated (see ``sharding``).

    Raises ValueError, on every rank alike, for tensors that are not both DTensors, another mesh or placement, and
    sizes whose cut lies inside a block.
    """
    for name, tensor in (("weight", weight), ("input", x)):
        if not isinstance(tensor, DTensor):
            other = "input" if name == "weight" else "weight"
            raise ValueError(
                f"{label}: the {other} is a DTensor but the {name} is a plain tensor: use parallelize_module with "
                "ColwiseParallel or RowwiseParallel, or call the layer through the module that fully_shard was given"
            )
    mesh = weight.device_mesh
    if mesh.ndim != 1 or x.device_mesh != mesh:
        raise ValueError(
            f"{label}: weight and input must share one mesh of one dimension, got {mesh} and {x.device_mesh}: "
            "slice the mesh first (mesh['tp'])"
        )
    group, shape = mesh.get_group(), (x.shape[:-1].numel(), weight.shape[0], weight.shape[1])
    kind = _kind(label, x.placements[0], weight.placements[0], x.dim())
    layout, grad_x, grad_w, out = _LAYOUTS[kind](label, _schemes(plan), group, shape, x)
    local_x, local_w = x.to_local(grad_placements=[grad_x]), weight.to_local(grad_placements=[grad_w])
    local_b = bias
    if isinstance(bias, DTensor):
        local_b = bias.to_local(grad_placements=list(bias.placements))
        if kind == "rowwise" and group.rank():  # the output is a partial sum: the first rank adds the bias
            local_b = local_b - local_b.detach()
    if kind == "tokens":  # each rank has the gradient of its own tokens
        local_w = _SummedGradient.apply(local_w, layout.group)
        local_b = None if local_b is None else _SummedGradient.apply(local_b, layout.group)
    whole = (*x.shape[:-1], weight.shape[0])

    def restore(y: Tensor) -> Tensor:
        stride = [1]
        for size in reversed(whole[1:]):
            stride.insert(0, stride[0] * size)
        return DTensor.from_local(y, mesh, [out], run_check=False, shape=whole, stride=tuple(stride))

    return local_x, local_w, local_b, layout, restore


def _kind(label: str, x: Any, w: Any, dimensions: int) -> str:
    last = dimensions - 1
    x = Shard(x.dim + dimensions) if isinstance(x, Shard) and x.dim < 0 else x
    if w == Shard(0) and x == Replicate():
        return "colwise"
    if w == Shard(1) and x == Shard(last):
        return "rowwise"
    if w == Replicate() and x == Replicate():
        return "replicated"
    if w == Replicate() and isinstance(x, Shard) and x.dim < last:
        if x.dim:
            raise ValueError(
                f"{label}: the input is sharded along dimension {x.dim} of a batch, so a rank's tokens are no "
                "neighbours in the whole: gather it (ColwiseParallel(input_layouts=Shard(1)) does) or shard the batch"
            )
        return "tokens"
    raise ValueError(f"{label}: weight placed {w} with input placed {x}: use ColwiseParallel or RowwiseParallel")


def refuse_cut(label: str, recipe: Recipe, kind: str, shape: tuple[int, int], ranks: int) -> None:
    """Raises ValueError where a weight ``[N, K]`` cannot be cut ``colwise`` or ``rowwise`` in any phase of training."""
    dimension, other = (0, "grad_output") if kind == "colwise" else (1, "input")
    for start in recipe.starts:
        plan = recipe.plan(start)
        if not plan.simple:
            raise ValueError(
                f"{label}: recipe {recipe.name} does more than quantize the two operands of each GEMM, which a layer "
                "cut over ranks cannot: choose another recipe, or leave the layer whole"
            )
        schemes = _schemes(plan)
        piece_of(f"{label}.weight", dimension, shape[dimension], ranks, schemes["weight"])
        piece_of(f"{label}: {other}", 1, shape[dimension], ranks, schemes[other])


def _schemes(plan: LinearPlan) -> dict[str, dict[int, list[str]]]:
    """For each tensor of a layer, by the dimension along which it is quantized."""
    return {
        "weight": {0: [plan.dgrad_weight], 1: [plan.fprop_weight]},
        "input": {0: [plan.wgrad_input], 1: [plan.fprop_input]},
        "grad_output": {0: [plan.wgrad_grad_output], 1: [plan.dgrad_grad_output]},
    }


def _colwise(label, schemes, group, shape, x):
    m, n, k = shape
    layout = Layout(
        group.group_name,
        weight=part_of(f"{label}.weight", 0, (n, k), group, schemes["weight"]),
        grad_output=part_of(f"{label}: grad_output", 1, (m, n), group, schemes["grad_output"]),
    )
    return layout, Partial(), Shard(0), Shard(x.dim() - 1)


def _rowwise(label, schemes, group, shape, x):
    m, n, k = shape
    layout = Layout(
        group.group_name,
        weight=part_of(f"{label}.weight", 1, (n, k), group, schemes["weight"]),
        input=part_of(f"{label}: input", 1, (m, k), group, schemes["input"]),
    )
    return layout, Shard(x.dim() - 1), Shard(1), Partial()


def _tokens(label, schemes, group, shape, x):
    """Rows of x are cut where torch cuts its first dimension; so are those of dy."""
    m, n, k = shape
    rows = x.shape[1:-1].numel()  # rows of the matrix for each step along the sharded dimension
    layout = Layout(
        group.group_name,
        input=part_of(f"{label}: input", 0, (m, k), group, schemes["input"], step=rows),
        grad_output=part_of(f"{label}: grad_output", 0, (m, n), group, schemes["grad_output"], step=rows),
    )
    return layout, Shard(0), Replicate(), Shard(0)


def _replicated(label, schemes, group, shape, x):
    return Layout(group.group_name), Replicate(), Replicate(), Replicate()


_LAYOUTS = {"colwise": _colwise, "rowwise": _rowwise, "tokens": _tokens, "replicated": _replicated}


class _SummedGradient(torch.autograd.Function):
    """Itself; its gradient is summed over a group."""

    @staticmethod
    def forward(ctx, tensor, group):
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, grad):
        summed = torch.ops._c10d_functional.all_reduce(grad.contiguous(), "sum", ctx.group)
        return torch.ops._c10d_functional.wait_tensor(summed), None
