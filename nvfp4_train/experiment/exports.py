"""Exporting the checkpoint of a run: which recipe made it, where its schedule stood, on which text to calibrate."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor, nn

from nvfp4_train.conversion import convert, set_progress
from nvfp4_train.experiment import checkpoint as checkpoints
from nvfp4_train.experiment.config import DATA
from nvfp4_train.experiment.errors import ExperimentError, disk_faults
from nvfp4_train.experiment.model import load_pretrained
from nvfp4_train.experiment.token_files import TokenFiles
from nvfp4_train.exporting.writing import ExportError, ExportReport, calibrate, export
from nvfp4_train.recipe import Recipe, load_recipe

CALIBRATION_BATCH = 8
TOKENIZER_FILES = ("tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "chat_template*", "*.model")


def export_checkpoint(
    path: Path, format: str, out: Path | None = None, *, recipe: str | None = None, shared_scales: bool = False,
    calibration: int = 0,
) -> ExportReport:  # fmt: skip
    """Exports a checkpoint: of a run (it knows its recipe), or any local Hugging Face folder with ``recipe``.

    Args:
        path: a ``step_...`` folder, the folder of a job (its latest checkpoint is taken), or a Hugging Face folder.
        out: by default beside the job's ``checkpoint``, or beside a foreign folder, named after step and format.
        calibration: sequences of the run's held-out text to measure the inputs' scales on; 0: the weights only.

    Raises:
        ExperimentError, ConversionError, RecipeError (ValueErrors): whatever cannot be exported, by name.
    """
    from transformers.utils import logging

    logging.disable_progress_bar()
    path = Path(path)
    folder = checkpoints.latest(path / "checkpoint") or path
    if not (folder / "config.json").is_file():
        raise ExperimentError(f"{path} is no checkpoint: it has no config.json (give a step_... folder of a run)")
    known = _known(folder)
    chosen, progress = _recipe(folder, known, recipe)
    if chosen.quantizes_nothing:
        raise ExperimentError(f"{folder} was trained with recipe {chosen.name}, which quantizes nothing: name --recipe")
    home = folder.parents[1] if known else folder.parent
    out = out or home / f"{folder.name}-{format}"
    try:
        model = _model(folder, known)
    except ExperimentError:
        raise
    except Exception as error:  # torn and foreign folders fail in as many ways as there are libraries
        raise ExperimentError(f"the checkpoint {folder} cannot be read: {' '.join(str(error).split())}") from error
    convert(model, chosen)
    if progress is not None:
        set_progress(model, *progress)
    try:
        amax = calibrate(model, _held_out(home, calibration, model)) if calibration else None
        with disk_faults(out.parent):
            done = export(model, out, format, shared_scales=shared_scales, input_amax=amax)
            for file in (file for pattern in TOKENIZER_FILES for file in folder.glob(pattern)):
                shutil.copy(file, out)
            return done
    except ExportError as error:
        raise ExperimentError(f"{folder}: {error}") from None


def _model(folder: Path, known: dict[str, Any]) -> nn.Module:
    """The whole model in float32: of a run, by one process or from the shards of many ranks, or of another origin."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if not known:
        return load_pretrained(folder, dtype=torch.float32)
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    checkpoints.load_weights(folder, model)
    return model


def _known(folder: Path) -> dict[str, Any]:
    """checkpoint.json, which a run writes; nothing for a folder of another origin."""
    path = folder / "checkpoint.json"
    if not path.is_file():
        return {}
    try:
        known = json.loads(path.read_text())
        return {"recipe": known["recipe"], "step": known["step"]}
    except (ValueError, KeyError, TypeError) as error:
        raise ExperimentError(f"{path} is damaged ({error})") from None


def _recipe(folder: Path, known: dict[str, Any], asked: str | None) -> tuple[Recipe, tuple[int, int] | None]:
    """(recipe, (step, steps of the whole run) for one with a schedule); one asked for stands in its first phase."""
    if asked is not None:
        return load_recipe(asked), None
    if not known:
        told = f"{folder} does not say which recipe trained it (it has no checkpoint.json)"
        raise ExperimentError(f"{told}: name --recipe")
    recipe = load_recipe(yaml.safe_load(known["recipe"]))
    if len(recipe.starts) == 1:
        return recipe, None
    record = folder.parents[3] / "record.json"
    try:
        total = json.loads(record.read_text())["total_steps"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ExperimentError(
            f"recipe {recipe.name} has a schedule, and how far {folder} is in it stands in {record}, which cannot be "
            f"read ({error}): name --recipe"
        ) from None
    return recipe, (min(known["step"], total), total)


def _held_out(job: Path, count: int, model) -> list[Tensor]:
    """Sequences of the run's held-out text, spread evenly over it; int64 batches."""
    corpus = job.parents[1] / DATA / "corpus.json"
    try:
        files = json.loads(corpus.read_text())["held_out"]
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise ExperimentError(
            f"--calibrate reads the held-out text of the run that wrote a checkpoint; {corpus} cannot be read ({error})"
        ) from None
    tokens = TokenFiles([str(corpus.parent / file) for file in files])
    length = min(getattr(model.config, "max_position_embeddings", 512), 512, len(tokens))
    starts = [i * (len(tokens) - length) // max(1, count - 1) for i in range(count)]
    return [tokens.windows(starts[i : i + CALIBRATION_BATCH], length) for i in range(0, count, CALIBRATION_BATCH)]
