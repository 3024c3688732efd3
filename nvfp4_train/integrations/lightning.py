"""Lightning: a callback that converts the module, moves the recipe's schedule and tells it of each optimizer step.

    trainer = L.Trainer(max_steps=1000, callbacks=[NVFP4Callback("nvidia_nvfp4_late_fprop")])
    trainer.fit(module, data)

The conversion takes place in ``setup``, before ``configure_optimizers``: the optimizer gets the parameters it would
have got anyway. Lightning does not save torch's generators, from which layers draw the seeds of stochastic rounding.
With ``seed`` each batch starts from a state that follows from the seed, the rank and the batch alone: it rounds the
same in a process that was resumed there. What a recipe remembers from step to step is in Lightning's checkpoint.
"""

from os import PathLike
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from nvfp4_train.conversion import ConversionReport, convert, converted_layers, set_progress
from nvfp4_train.experiment.randomness import derive_seed
from nvfp4_train.layer_state import load_quantizer_state, quantizer_state
from nvfp4_train.oscillation import after_optimizer_step
from nvfp4_train.recipe import Recipe, load_recipe

STATE = "nvfp4_quantizer_state"  # its key in a checkpoint


class NVFP4Callback(Callback):
    """``recipe``: a name, a path, a dict or a Recipe. ``report``: what ``convert`` did, once the trainer has started.

    ``part`` names the submodule to convert (such as ``model``), so that globs and blocks of the recipe are its own;
    without it the whole LightningModule is converted. ``seed``: seeds torch's generators anew before each batch
    (dropout draws from them, too); None leaves them alone.

    Raises (from ``fit``): ConversionError; ValueError for a recipe that goes by the progress of training in a training
    without an end.
    """

    def __init__(
        self, recipe: str | PathLike | dict | Recipe, *, part: str = "", backend: str | None = None,
        seed: int | None = None,
    ):  # fmt: skip
        self.recipe, self.part, self.backend, self.seed = load_recipe(recipe), part, backend, seed
        self.report: ConversionReport | None = None
        self._step = 0  # optimizer steps done when the batch began

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self.report is None:
            self.report = convert(pl_module.get_submodule(self.part), self.recipe, backend=self.backend)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        timed = "has a schedule" if len(self.recipe.starts) > 1 else "resets weights that oscillate"
        if (len(self.recipe.starts) > 1 or self.recipe.oscillation_reset) and _total(trainer) is None:
            raise ValueError(f"recipe {self.recipe.name} {timed}: give the Trainer max_steps or max_epochs")

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        total, self._step = _total(trainer), trainer.global_step
        if total is not None:
            set_progress(pl_module, min(self._step, total), total)
        if self.seed is not None:
            torch.manual_seed(derive_seed("batch", self.seed, trainer.global_rank, trainer.current_epoch, batch_idx))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """After a batch that ended in an optimizer step (not every microbatch does): ``global_step`` has moved."""
        total = _total(trainer)
        if total is not None and trainer.global_step > self._step:
            after_optimizer_step(pl_module, min(self._step, total), total)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint[STATE] = quantizer_state(pl_module)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        load_quantizer_state(pl_module, checkpoint.get(STATE, {}))

    def layers(self, pl_module: LightningModule) -> list[str]:
        """Names of the converted layers."""
        return list(converted_layers(pl_module))


def _total(trainer: Trainer) -> int | None:
    """How many optimizer steps the training has; None where it has no end."""
    total = trainer.estimated_stepping_batches
    return None if total == float("inf") else int(total)
