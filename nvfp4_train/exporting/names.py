"""Which rows of which weight stand under which name in a Hugging Face folder.

transformers 5 keeps all experts of a layer in one parameter, and gate and up in one matrix; folders and engines have a
matrix for each. transformers knows the way back, per architecture, as operations on tensors. To learn where the rows of
a quantized weight go, it is asked to convert their numbers: a weight ``[N, K]`` goes in as ``[N, 1]``, row by row.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from nvfp4_train.exporting.packing import ExportError


class Piece(NamedTuple):
    """A matrix of the folder: ``rows`` of expert ``expert`` of ``weight`` (0 for what is no group of experts)."""

    weight: str
    expert: int
    rows: Tensor


class Named(NamedTuple):
    packed: dict[str, Piece]  # by name in the folder
    plain: dict[str, Tensor]  # what is not quantized, as the folder has it
    renamed: dict[str, str]  # name in the model -> in the folder, for tensors that go over as they are
    untied: bool  # whether a packed weight was tied to a plain one, so that the folder holds both

    def module(self, name: str) -> str:
        """The folder's name of a module of the model."""
        prefix = f"{name}."
        for old, new in self.renamed.items():
            if old.startswith(prefix) and new.endswith(old.removeprefix(prefix)):
                return new.removesuffix(old.removeprefix(prefix)).removesuffix(".")
        return name


def checkpoint_names(model: nn.Module, packed: dict[str, list[int]]) -> Named:
    """Sorts the state_dict of ``model`` into packed pieces and plain tensors, under the names of its folder.

    Args:
        packed: the quantized weights by state_dict name, with the number of rows of each of their matrices.

    Raises ExportError for experts that stay together in the folder, too.
    """
    starts, probes, first = [], {}, 0
    for name, rows in packed.items():
        starts.append((first, name))
        numbers = torch.arange(first, first + sum(rows)).reshape(len(rows), -1, 1)
        probes[name] = numbers if model.get_parameter(name).dim() == 3 else numbers[0]
        first += sum(rows)
    once, untied = _each_once(model, set(packed))
    state = {name: probes.get(name, once.get(name)) for name in model.state_dict() if name in probes or name in once}
    converted = _revert(model, state)

    pieces, plain = {}, {}
    for name, tensor in converted.items():
        if tensor.dtype == torch.int64 and tensor.dim() == 3 and tensor.shape[2] == 1:
            raise ExportError(f"{name}: folders of this model keep all experts in one tensor: no 4-bit layout")
    probed = {name for name in converted if converted[name].dtype == torch.int64 and converted[name].shape[1:] == (1,)}
    for name, tensor in converted.items():
        if name not in probed:
            plain[name] = tensor
            continue
        numbers = tensor.flatten()
        begin, weight = [start for start in starts if start[0] <= int(numbers.min())][-1]
        local, rows = numbers - begin, packed[weight][0]
        expert = int(local[0]) // rows
        assert (local // rows == expert).all(), f"{name} mixes rows of several matrices"
        pieces[name if name.endswith(".weight") else f"{name}.weight"] = Piece(weight, expert, local % rows)
    by_storage = {tensor.data_ptr(): name for name, tensor in plain.items() if tensor.numel()}
    renamed = {name: by_storage[t.data_ptr()] for name, t in once.items() if t.numel() and t.data_ptr() in by_storage}
    for name, piece in pieces.items():
        if len(packed[piece.weight]) == 1 and len(piece.rows) == packed[piece.weight][0]:
            renamed[piece.weight] = name
    return Named(pieces, plain, renamed, untied)


def _each_once(model: nn.Module, packed: set[str]) -> tuple[dict[str, Tensor], bool]:
    """(plain tensors of the state_dict, each tied one under its first name; whether one is tied to a packed weight)"""
    seen, once, untied = set(), {}, False
    parameters = dict(model.named_parameters(remove_duplicate=False))
    shared_with_packed = {id(parameters[name]) for name in packed}
    for name, tensor in model.state_dict().items():
        if name in packed:
            continue
        key = id(parameters.get(name, tensor))
        untied |= key in shared_with_packed
        if key not in seen:
            seen.add(key)
            once[name] = tensor
    return once, untied


def _revert(model: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # a transformers without fused experts: its names are those of its folders
        return state
    return revert_weight_conversion(model, state)
