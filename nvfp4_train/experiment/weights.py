"""The whole weights of a model, by name: what a checkpoint holds, and that it fits a model in every name and size."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from nvfp4_train.experiment.errors import ExperimentError
from nvfp4_train.sharding import is_sharded

SHOWN = 5  # names in a message


def whole_weights(model: nn.Module) -> dict[str, Tensor]:
    """The state_dict on the CPU with each shared tensor once: safetensors refuses the same memory under two names.

    A collective where weights are sharded.
    """
    tied = _tied_names(model)
    kept = {n: t.detach() for n, t in model.state_dict().items() if n not in tied}
    return {n: (t.full_tensor() if is_sharded(t) else t).cpu().contiguous() for n, t in kept.items()}


def fill(path: Path, weights: dict[str, Tensor], model: nn.Module) -> None:
    """Copies `weights`, read from `path`, into `model`; refuses all but exactly the model's own."""
    refuse_other_weights(path, weights, model)
    model.load_state_dict(weights, strict=False)  # strict would ask for tied weights under each of their names


def refuse_other_weights(path: Path, weights: dict[str, Tensor], model: nn.Module) -> None:
    """Raises ExperimentError, as `refuse_another_model`, where the whole `weights` are not those of `model`."""
    tied = _tied_names(model)
    wanted = {name: tensor.shape for name, tensor in model.state_dict().items() if name not in tied}
    refuse_another_model(path, {name: tensor.shape for name, tensor in weights.items()}, wanted)


def refuse_another_model(path: Path, found: Mapping[str, torch.Size], wanted: Mapping[str, torch.Size]) -> None:
    """Raises ExperimentError with the names that only one of the two has, else with the sizes that differ."""
    parts = [
        f"{verb} {listed_names(sorted(names))}"
        for verb, names in (("it lacks", set(wanted) - set(found)), ("it has in addition", set(found) - set(wanted)))
        if names
    ]
    parts = parts or [
        f"{name} is {tuple(found[name])} there and {tuple(size)} here"
        for name, size in wanted.items()
        if tuple(found[name]) != tuple(size)
    ][:SHOWN]
    if parts:
        raise ExperimentError(f"the checkpoint {path} belongs to another model: {'; '.join(parts)}")


def listed_names(names: list[str]) -> str:
    """The first few of them."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def _tied_names(model: nn.Module) -> set[str]:
    """Every name but the first of a parameter that has several."""
    first: dict[int, str] = {}
    return {
        name
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if first.setdefault(id(parameter), name) != name
    }
