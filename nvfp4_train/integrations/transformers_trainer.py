"""transformers.Trainer: one line before ``trainer.train()``.

    trainer = Trainer(model, args, train_dataset=data)
    print(set_up(trainer, "nvidia_nvfp4_late_fprop"))
    trainer.train()

The model is converted in place; parameters stay the same objects, so it does not matter whether the optimizer exists.
The recipe's schedule moves inside Trainer's own loop, a switch to BF16 late in training included, and is where it must
be after ``resume_from_checkpoint``. Trainer saves and restores torch's generators, from which layers draw their seeds:
a resumed run rounds as the undisturbed one. Saved checkpoints are those of the unconverted model.
"""

import logging
from os import PathLike

from transformers import Trainer, TrainerCallback

from nvfp4_train.conversion import ConversionReport, convert, set_progress
from nvfp4_train.oscillation import after_optimizer_step
from nvfp4_train.recipe import Recipe, load_recipe

log = logging.getLogger(__name__)


def set_up(trainer: Trainer, recipe: str | PathLike | dict | Recipe, *, backend: str | None = None) -> ConversionReport:
    """Converts ``trainer.model`` and lets its schedule follow the trainer's steps.

    Raises what ``convert`` raises (ConversionError, RecipeError: ValueErrors), the trainer then being as it was.
    """
    recipe = load_recipe(recipe)
    report = convert(trainer.model, recipe, backend=backend)
    trainer.add_callback(ScheduleCallback())
    return report


class ScheduleCallback(TrainerCallback):
    """Moves the schedule of a model that is converted already: for one that ``convert`` was called on by hand."""

    def on_step_begin(self, args, state, control, model=None, **rest) -> None:
        """Before each optimizer step (not each microbatch): ``global_step`` counts the steps done."""
        if set_progress(model, min(state.global_step, state.max_steps), state.max_steps):
            log.info("step %d of %d: the recipe's schedule switched", state.global_step, state.max_steps)

    def on_step_end(self, args, state, control, model=None, **rest) -> None:
        """After each optimizer step, which ``global_step`` counts by now: recipes that reset oscillating weights."""
        after_optimizer_step(model, min(state.global_step - 1, state.max_steps), state.max_steps)
