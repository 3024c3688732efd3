"""Checkpoints that are there whole or not at all, and that know what they belong to.

    checkpoint/step_00000400/
        model.safetensors, config.json   a Hugging Face folder: can be the `model: {checkpoint: ...}` of an experiment
        state.pt                         optimizer, step, place in metrics.jsonl
        shards/                          of a job on several ranks: weights and optimizer, a file for each rank
        checkpoint.json                  which experiment, arm, seed, recipe and model wrote it

A folder is written under another name, flushed to the disk and then renamed; only then is the one before it deleted.
A kill between any two instructions leaves either the old one, or both, or the new one.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file
from safetensors.torch import save as to_safetensors
from torch import Tensor, nn

from nvfp4_train.experiment.diagnosis import first_bad_weight
from nvfp4_train.experiment.distributed import World
from nvfp4_train.experiment.errors import ExperimentError, disk_faults
from nvfp4_train.experiment.weights import fill, refuse_other_weights, whole_weights

if TYPE_CHECKING:
    from nvfp4_train.experiment.config import Arm, Experiment

PREFIX = "step_"
SHARDS = "shards"
WEIGHTS = "model.safetensors"


def identity(experiment: Experiment, arm: Arm, seed: int, model: nn.Module) -> dict[str, Any]:
    """What a job's checkpoints belong to."""
    return {
        "experiment": experiment.name, "settings": experiment.digest(), "arm": arm.name, "seed": seed,
        "recipe": arm.text, "model": type(model).__name__,
    }  # fmt: skip


def save(folder: Path, step: int, model: nn.Module, state: dict[str, Any], identity: dict[str, Any]) -> Path:
    """Writes `folder`/step_<step> and removes older ones. ExperimentError when the disk is full: the old one stays."""
    final, scratch = folder / f"{PREFIX}{step:08d}", folder / f"writing.{os.getpid()}"
    # Serialised in memory: both libraries hide the reason when a write to the disk fails.
    buffer = io.BytesIO()
    torch.save(state, buffer)
    files = {
        WEIGHTS: to_safetensors(whole_weights(model), metadata={"format": "pt"}),
        **_described(step, model, identity), "state.pt": buffer.getbuffer(),
    }  # fmt: skip
    with disk_faults(folder):
        try:
            _begin(folder, scratch)
            _publish(scratch, final, files)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return final


def save_shards(
    folder: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any],
    identity: dict[str, Any], world: World, whole: bool,
) -> Path:  # fmt: skip
    """As `save`, by all ranks: each writes its shards; with `whole` the first adds model.safetensors. A collective."""
    from nvfp4_train.experiment import sharded_checkpoint  # imports much that one process has no use for

    final, scratch = folder / f"{PREFIX}{step:08d}", folder / "writing.shards"
    with world.together():
        if world.is_first:
            with disk_faults(folder):
                _begin(folder, scratch)
    with world.together():
        sharded_checkpoint.save(scratch / SHARDS, model, optimizer)
    weights = whole_weights(model) if whole else None  # every rank sends its part of each
    with world.together():
        if world.is_first:
            if missing := sharded_checkpoint.missing_files(scratch / SHARDS):
                raise ExperimentError(
                    f"the checkpoint {final} is not whole: the first rank does not see {', '.join(missing)} of the "
                    "others: --out must be one folder that all machines share"
                )
            buffer = io.BytesIO()
            torch.save(state, buffer)
            files = {**_described(step, model, identity), "state.pt": buffer.getbuffer()}
            if weights is not None:
                files[WEIGHTS] = to_safetensors(weights, metadata={"format": "pt"})
            with disk_faults(folder):
                _publish(scratch, final, files)
    return final


def _described(step: int, model: nn.Module, identity: dict[str, Any]) -> dict[str, bytes]:
    return {
        "config.json": model.config.to_json_string(use_diff=False).encode(),
        "checkpoint.json": json.dumps({"step": step, **identity}, indent=1).encode(),
    }


def _begin(folder: Path, scratch: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for left_over in folder.glob("writing.*"):
        shutil.rmtree(left_over)
    scratch.mkdir()


def _publish(scratch: Path, final: Path, files: dict[str, bytes | memoryview]) -> None:
    """Flushes everything to the disk, gives the folder its name, then deletes the older ones."""
    for name, content in files.items():
        write_durably(scratch / name, content)
    _flush_folder(scratch)
    os.rename(scratch, final)
    _flush_folder(final.parent)
    for old in _all(final.parent):
        if old != final:
            shutil.rmtree(old, ignore_errors=True)


def latest(folder: Path) -> Path | None:
    """The newest whole checkpoint, or None."""
    found = _all(folder)
    return found[-1] if found else None


def load(path: Path, model: nn.Module, identity: dict[str, Any]) -> dict[str, Any]:
    """Puts the weights into `model`, on one process, and returns the state.

    Refuses another experiment's checkpoint, weights that are not exactly those of `model`, and NaN.
    """
    state = _state(path, identity)
    load_weights(path, model)
    return state


def load_weights(path: Path, model: nn.Module) -> None:
    """The weights alone, written by one process or in shards by any number of ranks; refuses what `load` refuses."""
    if (path / WEIGHTS).is_file() or not (path / SHARDS).is_dir():
        fill(path, _whole(path), model)
        return
    from nvfp4_train.experiment import sharded_checkpoint  # imports much that one process has no use for

    with _readable(path):
        sharded_checkpoint.load(path / SHARDS, model)
    if weight := first_bad_weight(model):
        raise ExperimentError(f"the checkpoint {path} is damaged: {weight}; delete it")


def resume(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, identity: dict[str, Any], world: World
) -> dict[str, Any]:
    """Fills `model` and `optimizer` from a checkpoint of any number of ranks and returns the state; a collective.

    Refuses what `load` refuses, on every rank.
    """
    from nvfp4_train.experiment import sharded_checkpoint

    with world.together():
        state = _state(path, identity)
        whole = None if (path / SHARDS).is_dir() else _whole(path)
    if whole is None:
        with world.together(), _readable(path):
            sharded_checkpoint.load(path / SHARDS, model, optimizer)
        if weight := world.first(first_bad_weight(model)):
            raise ExperimentError(f"the checkpoint {path} is damaged: {weight}; delete it")
    elif world.size == 1:
        fill(path, whole, model)
        optimizer.load_state_dict(state["optimizer"])
    else:
        with world.together():
            refuse_other_weights(path, whole, model)
            sharded_checkpoint.fill_from_whole(whole, state["optimizer"], model, optimizer)
    return state


def _state(path: Path, identity: dict[str, Any]) -> dict[str, Any]:
    """state.pt of a checkpoint that belongs to `identity`."""
    with _readable(path):
        found = json.loads((path / "checkpoint.json").read_text())
        state = torch.load(path / "state.pt", map_location="cpu", weights_only=True)
    for key, wanted in identity.items():
        if found.get(key) != wanted:
            raise ExperimentError(
                f"the checkpoint {path} belongs to another {key.replace('_', ' ')}: {_short(found.get(key))}, "
                f"here it is {_short(wanted)}; choose another --out"
            )
    return state


def _whole(path: Path) -> dict[str, Tensor]:
    """The weights in model.safetensors, all finite."""
    with _readable(path):
        found = load_file(path / WEIGHTS)
    for name, tensor in found.items():
        if not torch.isfinite(tensor).all():
            raise ExperimentError(f"the checkpoint {path} is damaged: the weight {name} holds NaN or Inf; delete it")
    return found


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Around reading a file of the checkpoint."""
    try:
        yield
    except ExperimentError:
        raise
    except Exception as error:  # truncated or foreign files fail in as many ways as there are libraries
        raise ExperimentError(
            f"the checkpoint {path} cannot be read ({type(error).__name__}: {error}); delete it to begin anew"
        ) from error


def write_durably(path: Path, content: bytes | memoryview) -> None:
    """Writes a file and waits until it is on the disk."""
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def write_whole(path: Path, text: str) -> None:
    """Replaces a small file in one step: a reader sees the old text or the new one."""
    with disk_faults(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_name(f"{path.name}.{os.getpid()}")
        try:
            write_durably(scratch, text.encode())
            os.replace(scratch, path)
        finally:
            scratch.unlink(missing_ok=True)


def _all(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"{PREFIX}*"))


def _flush_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."
