"""Combinations of formats and mechanisms that cannot be: refused when the recipe is read, all at once, with the
reason."""

import pytest
from mechanism_recipes import DELAYED, EDEN, FOUR, HOT, MEAN, MXFP8, NVFP4, RECIPES, SR
from tiny_recipes import base

from nvfp4_train.hardware import instruction
from nvfp4_train.operand import OperandSpec
from nvfp4_train.recipe import RecipeError, load_recipe

CUSTOM = {
    "format": "custom",
    "element": "e2m1",
    "scale": "e4m3",
    "block": "1x16",
    "rounding": "nearest",
    "scale_rule": "amax",
}


def faults(recipe) -> dict[str, str]:
    """key path -> message"""
    with pytest.raises(RecipeError) as caught:
        load_recipe(recipe)
    return dict(str(fault).split(": ", 1) for fault in caught.value.faults)


def wgrad(first, second=None):
    return base(wgrad={"grad_output": first, "input": first if second is None else second})


@pytest.mark.parametrize("name", RECIPES)
def test_mechanisms_load_and_survive_their_yaml(name):
    recipe = load_recipe(RECIPES[name])
    assert load_recipe(recipe.to_dict()) == recipe and recipe.plan() == load_recipe(recipe.to_dict()).plan()


@pytest.mark.parametrize(
    "spec, key, told",
    [
        (NVFP4 | {"element": "e2m1"}, "element", "has its own element"),
        (MXFP8 | {"scale": "e8m0"}, "scale", "has its own scale"),
        ({k: v for k, v in CUSTOM.items() if k != "element"}, "element", "missing"),
        (CUSTOM | {"scale_rule": "floor"}, "scale_rule", "expected nvfp4 or amax"),
        (CUSTOM | {"scale": "e8m0"}, "scale_rule", "floor, ceil, up, even or down"),
        ({k: v for k, v in CUSTOM.items() if k != "scale_rule"}, "scale_rule", "missing"),
        (CUSTOM | {"block": "1x8"}, "block", "1x16"),
        (NVFP4 | {"hadamard": 8}, "hadamard", "0, 4, 16"),
        (NVFP4 | {"block": "16x16", "hadamard": 16}, "hadamard", "square blocks"),
        (NVFP4 | {"signs": "step"}, "signs", "no effect without hadamard"),
        (NVFP4 | {"hadamard": 16, "signs": 0x10000}, "signs", "more bits"),
        (NVFP4 | {"hadamard": 16, "signs": "random"}, "signs", "fixed, step or none"),
        (NVFP4 | {"outer": "1x16"}, "outer", "several blocks"),
        (NVFP4 | {"outer": "16x128"}, "outer", "not an outer block"),
        (NVFP4 | {"block": "16x16", "outer": "1x128"}, "outer", "16x16"),
        (MXFP8 | {"outer": "1x128"}, "outer", "rule nvfp4"),
        (MXFP8 | {"scale_range": 256}, "scale_range", "rule nvfp4"),
        (NVFP4 | {"scale_range": 449}, "scale_range", "at most 448"),
        (NVFP4 | {"headroom": "4/0"}, "headroom", "4/3"),
        (NVFP4 | {"headroom": -1}, "headroom", "above 0"),
        (NVFP4 | {"four_over_six": "mse"}, "four_over_six", "at most 298"),
        (FOUR | {"four_over_six": "rms"}, "four_over_six", "mse, mae or max"),
        (MXFP8 | {"four_over_six": "mse"}, "four_over_six", "rule nvfp4"),
        (FOUR | {"format": "nvint4"}, "four_over_six", "E2M1"),
        (FOUR | {"headroom": 1.1}, "four_over_six", "headroom"),
        (FOUR | {"clip": 2.0}, "clip", "four_over_six"),
        (NVFP4 | {"block": "16x16", "clip": 2.0}, "clip", "16x16"),
        (DELAYED | {"block": "128x128"}, "scale_rule", "block: tensor"),
        ({k: v for k, v in DELAYED.items() if k != "history"}, "history", "missing"),
        (NVFP4 | {"history": 4}, "history", "no effect"),
        (DELAYED | {"history": 0}, "history", "number of steps"),
        (EDEN | {"hadamard": 0, "signs": "fixed"}, "rounding", "random rotations"),
        (EDEN | {"signs": "none"}, "rounding", "signs: step"),
        (EDEN | {"four_over_six": "mse", "headroom": 1, "scale_range": 256}, "four_over_six", "stochastic_scale"),
        (MXFP8 | {"rounding": "stochastic_scale", "hadamard": 32, "signs": "step"}, "rounding", "E4M3 scale"),
        (NVFP4 | {"block": "16x16", "rounding": "stochastic_scale"}, "rounding", "1-D"),
        (CUSTOM | {"scale_rule": "nvfp4"} | EDEN | {"format": "custom", "block": "1x64"},
         "hadamard", "whole blocks"),
        (NVFP4 | {"mask_clipped": "yes"}, "mask_clipped", "true or false"),
        (NVFP4 | {"split": {"part": "meen"}}, "split.part", "did you mean 'mean'"),
        (NVFP4 | {"split": MEAN | {"fraction": 0.1}}, "split.fraction", "no effect"),
        (NVFP4 | {"split": MEAN | {"format": "mxfp8"}}, "split.format", "no effect"),
        (NVFP4 | {"split": {k: v for k, v in HOT.items() if k != "fraction"}}, "split.fraction", "missing"),
        (NVFP4 | {"split": {k: v for k, v in HOT.items() if k != "scale_rule"}}, "split.scale_rule", "spells every"),
        (NVFP4 | {"split": HOT | {"observe": [5, 2]}}, "split.observe", "first and the last step"),
        (NVFP4 | {"split": HOT | {"hadamard": 16}}, "split.hadamard", "unknown key"),
    ],
)  # fmt: skip
def test_an_operand_that_cannot_be(spec, key, told):
    found = faults(wgrad(spec))
    assert told in found[f"wgrad.grad_output.{key}"], found


@pytest.mark.parametrize(
    "recipe, key, told",
    [
        (wgrad(SR | {"hadamard": 32}, NVFP4), "wgrad.input.hadamard", "share it"),
        (wgrad(SR | {"hadamard": 32}, NVFP4 | {"hadamard": 32, "signs": "none"}), "wgrad.input.signs", "share it"),
        (wgrad(SR | {"hadamard": 16}, CUSTOM | {"block": "1x32", "hadamard": 16}), "wgrad.input.block", "same length"),
        (wgrad(NVFP4 | {"mask_clipped": True}), "wgrad.input.mask_clipped", "no effect on wgrad.input"),
        (wgrad(NVFP4 | {"requantize": True}), "wgrad.grad_output.requantize", "only dgrad.weight and wgrad.input"),
        (wgrad(NVFP4 | {"split": HOT}), "wgrad.grad_output.split", "fprop.input and wgrad.input"),
        (wgrad(NVFP4, NVFP4 | {"split": MEAN}), "wgrad.grad_output.split", "together"),
        (wgrad(SR, NVFP4 | {"requantize": True}) | {"fprop": "bf16", "weight_match": False},
         "wgrad.input.requantize", "fprop.input is bf16"),
        (RECIPES["averis"] | {"wgrad": {"grad_output": SR, "input": NVFP4 | {"requantize": True}}},
         "wgrad.input.requantize", "without the mean"),
        (base(fprop={"input": NVFP4 | {"split": MEAN, "hadamard": 16}, "weight": NVFP4 | {"hadamard": 16}},
              weight_match=False), "fprop.input.split", "not rotated"),
        (base(fprop={"input": NVFP4 | {"split": HOT, "mask_clipped": True}, "weight": NVFP4}, weight_match=False),
         "fprop.input.mask_clipped", "own scales"),
        (base(fprop={"input": NVFP4, "weight": {"format": "bf16"}}, weight_match=False), "fprop.weight.format", "bf16"),
        (base(emulation_only="yes"), "emulation_only", "true or false"),
        (base(emulation_only=True), "emulation_only", "exists for every GEMM"),
        ({k: v for k, v in RECIPES["ufp4"].items() if k != "emulation_only"}, "fprop.weight.format", "only: true"),
        (RECIPES["quartet2"] | {"weight_match": True}, "weight_match", "second time"),
        (base(oscillation_reset={"every": 10, "window": 20, "ratio": 8}), "oscillation_reset.window", "longer"),
        (base(oscillation_reset={"every": 10, "window": 5}), "oscillation_reset.ratio", "missing"),
        (RECIPES["quartet"] | {"oscillation_reset": {"every": 9, "window": 5, "ratio": 8}}, "oscillation_reset",
         "rotated"),
        (base(schedule=[{"when": "noise", "below": 1, "fprop": "bf16"}]), "schedule[0].when", "grad_to_noise"),
        (base(schedule=[{"when": "grad_to_noise", "fprop": "bf16"}]), "schedule[0].below", "missing"),
        (base(schedule=[{"below": 1, "from": 0.5, "fprop": "bf16"}]), "schedule[0].below", "no effect"),
        (base(schedule=[{"from": 0.5, "from_step": 3, "fprop": "bf16"}]), "schedule[0].from_step", "one of them"),
        (base(schedule=[{"fprop": "bf16"}]), "schedule[0].from", "when does the phase begin"),
        (RECIPES["quartet2"] | {"schedule": [{"from": 0.5, "fprop": "bf16"}]}, "schedule[0]", "fprop.input is bf16"),
    ],
)  # fmt: skip
def test_operands_that_cannot_be_together(recipe, key, told):
    found = faults(recipe)
    assert told in found[key], found


def test_all_of_it_is_told_at_once():
    found = faults(base(
        fprop={"input": NVFP4 | {"hadamard": 16}, "weight": NVFP4 | {"mask_clipped": 1}},
        wgrad={"grad_output": SR | {"requantize": True}, "input": NVFP4 | {"signs": "step"}},
        schedule=[{"from": 0.5}, {"when": "x"}],
    ))  # fmt: skip
    assert {"fprop.weight.mask_clipped", "wgrad.grad_output.requantize", "wgrad.input.signs", "schedule[0]",
            "schedule[1].when"} <= set(found)  # fmt: skip


@pytest.mark.parametrize(
    "a, b, kind",
    [
        (NVFP4, NVFP4 | {"block": "16x16"}, "mxf4nvf4"),
        (MXFP8, MXFP8 | {"format": "mxfp6_e3m2"}, "mxf8f6f4"),
        (MXFP8, MXFP8 | {"format": "mxfp4"}, "mxf8f6f4"),
        (MXFP8 | {"format": "mxfp4"},) * 2 + ("mxf4",),
        (CUSTOM | {"scale": "e8m0", "scale_rule": "floor"},) * 2 + ("mxf4nvf4",),  # E8M0 on 16: no format has that name
        (DELAYED, DELAYED | {"format": "fp8_e5m2"}, "fp8"),
        (CUSTOM | {"scale": "float32", "block": "channel"},) * 2 + ("f8f6f4",),
        (CUSTOM | {"scale": "float32", "block": "1x128", "element": "int8"},) * 2 + ("s8",),
        (NVFP4 | {"outer": "1x128"},) * 2 + ("mxf4nvf4",),
    ],
)
def test_what_hardware_multiplies(a, b, kind):
    assert instruction(OperandSpec(**a).scheme, OperandSpec(**b).scheme).kind == kind


@pytest.mark.parametrize(
    "a, b, reason",
    [
        (NVFP4, MXFP8, "one format"),
        (CUSTOM | {"scale": "float32"}, CUSTOM | {"scale": "float32"}, "partial sums"),
        (NVFP4 | {"outer": "1x64"}, NVFP4, "outer scale"),
        (CUSTOM | {"element": "e4m3"}, CUSTOM, "only E2M1"),
        (CUSTOM | {"element": "int8"}, CUSTOM | {"element": "int8"}, "no block scales"),
        (CUSTOM | {"element": "e4m3", "scale": "e8m0", "scale_rule": "up"},) * 2 + ("blocks have 32",),
        (
            NVFP4 | {"split": HOT | {"block": "1x16", "format": "custom", "element": "e4m3", "scale": "e8m0"}},
            NVFP4,
            "apart",
        ),
    ],
)
def test_what_no_hardware_multiplies(a, b, reason):
    assert reason in instruction(OperandSpec(**a).scheme, OperandSpec(**b).scheme)
