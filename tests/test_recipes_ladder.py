"""experiments/recipe_ladder.yaml: every shipped recipe is an arm, and every arm can be put on its model."""

import copy
from pathlib import Path

import nvfp4_train as nt
from nvfp4_train.experiment.config import load_experiment
from nvfp4_train.experiment.data import BYTE_VOCABULARY
from nvfp4_train.experiment.model import build_model
from nvfp4_train.recipe import recipe_names

PATH = Path(__file__).parents[1] / "experiments" / "recipe_ladder.yaml"
TOO_DEEP = {"nvidia_nvfp4_last4", "nvidia_nvfp4_first2_last8"}  # keep more blocks in BF16 than the model has


def test_every_recipe_is_an_arm_that_fits_the_model():
    experiment = load_experiment(PATH)
    recipes = [arm.recipe for arm in experiment.all_arms if arm.role == "arm"]
    names = {recipe.name for recipe in recipes}
    assert len(names) == len(recipes) and names | {"bf16"} == set(recipe_names()) - TOO_DEEP
    model = build_model(experiment, 1, BYTE_VOCABULARY)
    for recipe in recipes:
        report = nt.convert(copy.deepcopy(model), recipe)
        blocks_kept = recipe.keep_bf16.blocks is not None
        assert len(report.converted) == (7 if blocks_kept else 14), recipe.name
