"""Case 29: every option of an operand changes the numbers or is refused; none is stored and never read."""

import pytest
import torch
from mechanism_recipes import DELAYED, HOT, MEAN, NVFP4, RECIPES
from quantize_oracle import gaussian

import nvfp4_train as nt
from nvfp4_train.operand import OperandSpec
from nvfp4_train.operand_split import SplitSpec
from nvfp4_train.quantization import quantize
from nvfp4_train.recipe import Recipe
from nvfp4_train.schedule import Phase
from nvfp4_train.selection import OscillationReset

CUSTOM = {
    "format": "custom",
    "element": "e2m1",
    "scale": "e8m0",
    "block": "1x32",
    "scale_rule": "floor",
    "rounding": "nearest",
}
ROTATED = NVFP4 | {"hadamard": 32}
HALF = HOT | {"fraction": 0.5}
# option -> two operands that differ in it alone
DIFFER = {
    "format": (CUSTOM, {k: v for k, v in CUSTOM.items() if k not in ("element", "scale")} | {"format": "mxfp8"}),
    "element": (CUSTOM, CUSTOM | {"element": "int4"}),
    "scale": (CUSTOM | {"scale_rule": "amax", "scale": "float32"}, CUSTOM | {"scale_rule": "amax", "scale": "e4m3"}),
    "block": (NVFP4, NVFP4 | {"block": "16x16"}),
    "rounding": (NVFP4, NVFP4 | {"rounding": "stochastic"}),
    "hadamard": (NVFP4, ROTATED),
    "signs": (ROTATED, ROTATED | {"signs": "none"}),
    "scale_rule": (CUSTOM, CUSTOM | {"scale_rule": "up"}),
    "outer": (NVFP4, NVFP4 | {"outer": "1x128"}),
    "scale_range": (NVFP4, NVFP4 | {"scale_range": 256}),
    "headroom": (NVFP4, NVFP4 | {"headroom": "17/16"}),
    "four_over_six": (NVFP4 | {"scale_range": 256}, NVFP4 | {"scale_range": 256, "four_over_six": "mse"}),
    "clip": (CUSTOM, CUSTOM | {"clip": 2.5}),
}
# options that act in a layer: option -> (recipe, path of the operand, the other value)
IN_LAYERS = {
    "mask_clipped": ("quartet", ("fprop", "input"), False),
    "requantize": ("quartet2", ("wgrad", "input"), False),
    "history": ("delayed", ("fprop", "input"), 1),
    "split": ("tetrajet2", ("fprop", "input"), None),
}


def values(spec: dict) -> torch.Tensor:
    x = gaussian(160, 256) * torch.linspace(0.1, 3, 256)
    q = quantize(x, OperandSpec(**spec), seed=torch.tensor(1))
    return q.dequantize(torch.float32)


@pytest.mark.parametrize("option", OperandSpec.model_fields)
def test_every_option_of_an_operand_has_an_effect(option):
    if option in IN_LAYERS:
        return  # below
    one, other = (values(spec) for spec in DIFFER[option])
    assert not torch.equal(one, other)


@pytest.mark.parametrize("choices, fixed", [
    (("mse", "mae", "max"), ("four_over_six", NVFP4 | {"scale_range": 256})),
    (("floor", "ceil", "up", "even", "down"), ("scale_rule", CUSTOM)),
    (("nearest", "stochastic", "stochastic8"), ("rounding", NVFP4)),
    (("fixed", "step", "none", 0x12345678), ("signs", ROTATED)),
    ((4, 16, 32, 64, 128), ("hadamard", NVFP4)),
    (("e2m1", "e3m2", "e2m3", "e4m3", "e5m2", "int4", "int8"), ("element", CUSTOM)),
    (("tensor", "channel", "1x16", "1x32", "1x64", "1x128", "16x16", "32x32", "128x128"), ("block", CUSTOM)),
    (("1x32", "1x64", "1x128"), ("outer", NVFP4)),
])  # fmt: skip
def test_every_choice_is_another(choices, fixed):
    key, spec = fixed
    found = {}
    for choice in choices:
        key_of = values(spec | {key: choice})
        twin = next((other for other, seen in found.items() if torch.equal(seen, key_of)), None)
        assert twin is None or (choice == "up" and twin == "ceil"), (twin, choice)  # they part below 1e-4 only
        found[choice] = key_of
    if key == "scale_rule":
        tiny = gaussian(4, 64) * 1e-6
        one, other = (quantize(tiny, OperandSpec(**spec | {key: rule})).dequantize() for rule in ("ceil", "up"))
        assert not torch.equal(one, other)


def gradients(recipe: dict, steps: int = 3) -> list[torch.Tensor]:
    torch.manual_seed(0)
    m = torch.nn.Sequential(torch.nn.Linear(128, 64))
    nt.convert(m, recipe)
    for step in range(steps):
        nt.set_progress(m, step, steps)
        x = (torch.randn(64, 128) * (steps - step)).requires_grad_()  # falls: a history remembers
        m.zero_grad()
        y = m(x)
        y.backward(torch.randn(64, 64) / (1 + step))
    return [y.detach(), x.grad, m[0].weight.grad]


@pytest.mark.parametrize("option", IN_LAYERS)
def test_options_of_layers_have_an_effect(option):
    name, (gemm, operand), value = IN_LAYERS[option]
    recipe = RECIPES[name]
    changed = recipe | {gemm: recipe[gemm] | {operand: recipe[gemm][operand] | {option: value}}}
    if value is None:
        del changed[gemm][operand][option]
    if option == "split":
        changed["wgrad"] = changed["wgrad"] | {
            "input": {k: v for k, v in recipe["wgrad"]["input"].items() if k != "split"}
        }
    assert set(IN_LAYERS) | set(DIFFER) == set(OperandSpec.model_fields)
    assert not all(torch.equal(a, b) for a, b in zip(gradients(recipe), gradients(changed), strict=True))


@pytest.mark.parametrize("changes", [{"fraction": 0.3}, {"format": "custom", "element": "e2m1", "scale": "e8m0"},
                                     {"rounding": "stochastic"}, {"scale_rule": "floor"}, {"format": "mxfp6_e3m2"},
                                     {"observe": [0, 0]}, {"observe": [0, 9]}])  # fmt: skip
def test_options_of_a_split_have_an_effect(changes):
    def recipe(split):
        base = RECIPES["tetrajet2"]
        fprop = base["fprop"] | {"input": base["fprop"]["input"] | {"split": split}}
        wgrad = base["wgrad"] | {"input": base["wgrad"]["input"] | {"split": split}}
        return base | {"fprop": fprop, "wgrad": wgrad}

    plain, other = gradients(recipe(HALF)), gradients(recipe(HALF | changes))
    assert not all(torch.equal(a, b) for a, b in zip(plain, other, strict=True))
    own = set(SplitSpec.model_fields) - {"spec"}
    assert own == {"part", "fraction", "observe"}


def test_no_option_was_added_without_a_test_here_or_named():
    """A new key of a recipe must be entered where its effect is tested."""
    assert set(Recipe.keys()) == {
        "name", "source", "fprop", "dgrad", "wgrad", "weight_match", "schedule",  # test_recipe
        "keep_bf16",  # test_keep_bf16
        "oscillation_reset", "emulation_only",  # test_layer_state, test_format_faults
    }  # fmt: skip
    assert set(Phase.keys()) == {"from", "from_step", "when", "below", "fprop", "dgrad", "wgrad"}  # test_layer_state
    assert set(OscillationReset.keys()) == {"from", "every", "window", "ratio"}  # test_layer_state
    assert DELAYED["history"] == 4 and MEAN == {"part": "mean"}
