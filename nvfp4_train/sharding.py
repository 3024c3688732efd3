"""How a tensor on one rank is a part of a whole, and what the ranks that share it must agree on.

The numbers of a quantized tensor do not depend on how it is laid out over ranks: its amax is that of the whole, a
random draw is counted by the element's place in the whole, and blocks and Hadamard groups are those of the whole. So a
part must begin where a block begins (refused by name elsewhere), its amax is all-reduced over exactly the ranks that
hold the other parts, and these ranks share the layer's seed.

Which tensor is a part follows from the placement of the weight, as torch's tensor-parallel styles set it:

    colwise  w [N/r, K]   x whole                dy [M, N/r] a part    dx a partial sum    dw whole for its rows
    rowwise  w [N, K/r]   x [M, K/r] a part      dy whole              dx a part           y a partial sum
    tokens   w whole      x [M/r, K] a part      dy [M/r, N] a part    dw a partial sum

Data-parallel ranks share no tensor: each quantizes its own microbatch. FSDP hands a layer the whole weight.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nvfp4_kernels.scheme import WHOLE, Scheme

BF16 = "bf16"
MAGNITUDE = 0x7FFFFFFF  # a float32 without its sign: such bits are ordered like the numbers, and NaN above Inf


class Part(NamedTuple):
    """A matrix ``[rows, columns]`` that begins at (row, column) of a whole one, ``width`` columns wide.

    ``group``: the name of the process group whose ranks hold the whole between them, each element once.
    """

    group: str
    row: int
    column: int
    width: int

    @property
    def origin(self) -> list[int]:
        return [self.row, self.column, self.width]


class Layout(NamedTuple):
    """What of one layer is a part; None: the rank has all of it. ``group``: the ranks that share the layer's seed."""

    group: str
    input: Part | None = None
    weight: Part | None = None
    grad_output: Part | None = None


def is_sharded(tensor: Tensor) -> bool:
    """Whether it is a DTensor (a plain tensor is told without importing what that is)."""
    if type(tensor) in (Tensor, nn.Parameter):
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def shared_maximum(bits: Tensor, group: str) -> Tensor:
    """The elementwise largest of float32 magnitudes over a group; NaN wins. ``bits``: the int32 view of them.

    A MAX of floats drops NaN or keeps it as the library at hand pleases; integers have no such case.
    """
    largest = torch.ops._c10d_functional.all_reduce(bits.bitwise_and(MAGNITUDE), "max", group)
    return torch.ops._c10d_functional.wait_tensor(largest).view(torch.float32)


def shared_seed(seed: Tensor, group: str) -> Tensor:
    """The seed that the first rank of the group drew: the others' generators may stand elsewhere."""
    return torch.ops._c10d_functional.wait_tensor(torch.ops._c10d_functional.broadcast(seed, 0, group))


def part_of(
    name: str, dimension: int, shape: tuple[int, int], group: Any, schemes: dict[int, list[str]], step: int = 1
) -> Part:
    """This rank's part of a matrix of ``shape`` cut along ``dimension``, as torch cuts it, every ceil(size / ranks).

    ``schemes``: for each dimension along which the whole is quantized, the scheme texts. ``step``: what is cut is a
    tensor of ``step`` rows of the matrix for each of its own.
    Raises ValueError, the same on every rank, where a piece would begin inside a block or Hadamard group.
    """
    size = shape[dimension]
    piece = piece_of(name, dimension, size, group.size(), schemes, step)
    start = min(group.rank() * piece, size)
    return Part(group.group_name, start if dimension == 0 else 0, start if dimension == 1 else 0, shape[1])


def piece_of(name: str, dimension: int, size: int, ranks: int, schemes: dict[int, list[str]], step: int = 1) -> int:
    """How much of ``size`` each rank has (the last ones less); ValueError as ``part_of``."""
    piece = -(-(size // step) // ranks) * step
    unit = _unit(schemes, dimension)
    if piece < size and (unit is None or piece % unit):
        where = "inside a scale that spans all of it" if unit is None else f"inside a block or Hadamard group of {unit}"
        right = "" if unit is None else f"make the size a multiple of {unit * ranks}, "
        raise ValueError(
            f"{name}: dimension {dimension} of size {size} over {ranks} ranks is cut every {piece}, {where}: {right}"
            "use fewer ranks, or keep the layer in bf16"
        )
    return piece


def _unit(schemes: dict[int, list[str]], dimension: int) -> int | None:
    """What a cut along ``dimension`` must be a multiple of; None where a scale spans the whole of it."""
    unit = 1
    for along, texts in schemes.items():
        for text in texts:
            if text == BF16:
                continue
            scheme = Scheme.parse(text)
            place = 1 if along == dimension else 0
            sizes = [scheme.group] if place else []
            sizes += [block[place] for block in (scheme.block, scheme.outer) if block is not None]
            if WHOLE in sizes and not scheme.tensor_scale_only:  # that one amax is shared like any tensor's
                return None
            unit = max(unit, *sizes)
    return unit


def agree(facts: dict[str, str | None]) -> None:
    """Raises ValueError, on every rank, that names the first fact in which a rank differs from the first rank.

    A collective over all ranks of the default group; does nothing where there is none.
    """
    import torch.distributed as dist

    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    everyone: list[dict[str, str | None]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyone, facts)
    for rank, theirs in enumerate(everyone):
        for name in {**everyone[0], **theirs}:
            if theirs.get(name) != everyone[0].get(name):
                raise ValueError(
                    f"the ranks disagree on {name}: rank 0 has {_short(everyone[0].get(name))}, rank {rank} has "
                    f"{_short(theirs.get(name))}: start every rank with the same model, recipe and settings"
                )


def _short(text: str | None) -> str:
    return "none" if text is None else text if len(text) <= 80 else f"{text[:77]}..."


def same_on_all_ranks(model: nn.Module) -> None:
    """Refuses, on every rank alike and before training, ranks whose converted layers are not the same.

    Call it after ``convert`` in a training loop of your own. Raises ValueError with the layer and what differs.
    """
    facts = {"the number of parameters": str(len(list(model.parameters())))}
    for name, module in model.named_modules():
        recipe = getattr(module, "recipe", None)
        if recipe is not None and hasattr(recipe, "to_yaml"):
            facts[f"the recipe of {name or 'the layer'}"] = f"{recipe.name} ({recipe.to_yaml()})"
    facts |= {f"the shape of {name}": str(tuple(p.shape)) for name, p in model.named_parameters()}
    agree(facts)
