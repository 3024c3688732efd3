"""Lightning: a callback that converts the module and moves the recipe's schedule.

    trainer = L.Trainer(max_steps=1000, callbacks=[NVFP4Callback("nvidia_nvfp4_late_fprop")])
    trainer.fit(module, data)

The conversion takes place in ``setup``, before ``configure_optimizers``: the optimizer gets the parameters it would
have got anyway. Lightning does not save torch's generators, from which layers draw the seeds of stochastic rounding.
With ``seed`` each batch starts from a state that follows from the seed, the rank and the batch alone: it rounds the
same in a process that was resumed there.
"""

from os import PathLike
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from nvfp4_train.conversion import ConversionReport, convert, converted_layers, set_progress
from nvfp4_train.experiment.randomness import derive_seed
from nvfp4_train.recipe import Recipe, load_recipe


class NVFP4Callback(Callback):
    """``recipe``: a name, a path, a dict or a Recipe. ``report``: what ``convert`` did, once the trainer has started.

    ``part`` names the submodule to convert (such as ``model``), so that globs and blocks of the recipe are its own;
    without it the whole LightningModule is converted. ``seed``: seeds torch's generators anew before each batch
    (dropout draws from them, too); None leaves them alone.

    Raises (from ``fit``): ConversionError; ValueError for a recipe with a schedule in a training without an end.
    """

    def __init__(
        self, recipe: str | PathLike | dict | Recipe, *, part: str = "", backend: str | None = None,
        seed: int | None = None,
    ):  # fmt: skip
        self.recipe, self.part, self.backend, self.seed = load_recipe(recipe), part, backend, seed
        self.report: ConversionReport | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self.report is None:
            self.report = convert(pl_module.get_submodule(self.part), self.recipe, backend=self.backend)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if len(self.recipe.starts) > 1 and trainer.estimated_stepping_batches == float("inf"):
            raise ValueError(f"recipe {self.recipe.name} has a schedule: give the Trainer max_steps or max_epochs")

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        total = trainer.estimated_stepping_batches
        if total != float("inf"):
            set_progress(pl_module, min(trainer.global_step, int(total)), int(total))
        if self.seed is not None:
            torch.manual_seed(derive_seed("batch", self.seed, trainer.global_rank, trainer.current_epoch, batch_idx))

    def layers(self, pl_module: LightningModule) -> list[str]:
        """Names of the converted layers."""
        return list(converted_layers(pl_module))
