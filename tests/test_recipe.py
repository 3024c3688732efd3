"""Recipes: what ships, and what each option does. What is refused: test_recipe_faults.py."""

import copy
import pickle

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from tiny_recipes import NEAREST, ROTATED, SQUARE, STOCHASTIC, base

from nvfp4_kernels.scheme import Scheme
from nvfp4_train.recipe import LinearPlan, OperandSpec, load_recipe, recipe_names, recipe_text
from nvfp4_train.selection import Blocks

# What ships


def test_the_named_recipes_are_there_and_bear_their_files_names():
    variants = "last15 first2_last8 last4 late_fprop late_backward late_both no_sr no_rht 1d_weights".split()
    expected = {"bf16", "mxfp4", "nvidia_nvfp4", *(f"nvidia_nvfp4_{variant}" for variant in variants)}
    assert expected <= set(recipe_names())
    for name in recipe_names():
        recipe = load_recipe(name)
        assert recipe.name == name and recipe.source


def test_nvidia_nvfp4_is_the_published_recipe():
    recipe = load_recipe("nvidia_nvfp4")
    assert recipe.plan() == LinearPlan(
        fprop_input="e2m1:e4m3:nvfp4:1x16:nearest",
        fprop_weight="e2m1:e4m3:nvfp4:16x16:nearest",
        dgrad_grad_output="e2m1:e4m3:nvfp4:1x16:stochastic",
        dgrad_weight="e2m1:e4m3:nvfp4:16x16:nearest",
        wgrad_grad_output="e2m1:e4m3:nvfp4:1x16:stochastic:h16:D7E8",
        wgrad_input="e2m1:e4m3:nvfp4:1x16:nearest:h16:D7E8",
    )
    assert recipe.weight_match and not recipe.quantizes_nothing and recipe.keep_bf16.blocks is None
    assert {recipe.plan(step / 100) for step in range(101)} == {recipe.plan()}


def test_variants_differ_from_it_in_one_thing():
    full = load_recipe("nvidia_nvfp4").to_dict()

    def difference(name):
        variant = load_recipe(f"nvidia_nvfp4_{name}").to_dict()
        keys = [key for key in {**full, **variant} if full.get(key) != variant.get(key)]
        return {key: variant.get(key) for key in keys if key not in ("name", "source")}

    assert difference("late_fprop") == {"schedule": [{"from": 0.82, "fprop": "bf16"}]}
    switch = {"from": 0.82, "fprop": "bf16", "dgrad": "bf16", "wgrad": "bf16"}
    assert difference("late_both") == {"schedule": [switch]}
    assert difference("last15") == {"keep_bf16": full["keep_bf16"] | {"blocks": {"last_fraction": 0.15}}}
    assert difference("first2_last8") == {"keep_bf16": full["keep_bf16"] | {"blocks": {"first": 2, "last": 8}}}
    assert difference("last4") == {"keep_bf16": full["keep_bf16"] | {"blocks": {"last": 4}}}
    assert difference("no_rht") == {"wgrad": {"grad_output": STOCHASTIC, "input": NEAREST}}
    assert difference("no_sr") == {
        "dgrad": {"grad_output": NEAREST, "weight": SQUARE},
        "wgrad": {"grad_output": ROTATED, "input": ROTATED},
    }
    assert difference("1d_weights") == {
        "fprop": {"input": NEAREST, "weight": NEAREST},
        "dgrad": {"grad_output": STOCHASTIC, "weight": NEAREST},
        "weight_match": False,
    }


def test_late_backward_goes_on_with_1d_weights_in_fprop():
    plan = load_recipe("nvidia_nvfp4_late_backward").plan(0.9)
    assert plan == LinearPlan("e2m1:e4m3:nvfp4:1x16:nearest", "e2m1:e4m3:nvfp4:1x16:nearest", *["bf16"] * 4)


def test_bf16_and_mxfp4():
    assert load_recipe("bf16").quantizes_nothing and set(load_recipe("bf16").plan()) == {"bf16"}
    recipe = load_recipe("mxfp4")
    assert {Scheme.parse(text).rule for text in recipe.plan()} == {"ceil"}
    assert {Scheme.parse(text).block for text in recipe.plan()} == {(1, 32)}
    assert not recipe.weight_match


@pytest.mark.parametrize("name", recipe_names())
def test_round_trips(name, tmp_path):
    recipe = load_recipe(name)
    path = tmp_path / "copy.yaml"
    path.write_text(recipe.to_yaml())
    again = (
        load_recipe(recipe.to_dict()),
        load_recipe(path),
        pickle.loads(pickle.dumps(recipe)),
        copy.deepcopy(recipe),
    )
    assert all(other == recipe and other.plan(0.9) == recipe.plan(0.9) for other in again)
    assert load_recipe(recipe) is recipe
    assert yaml.safe_load(recipe_text(name))["name"] == name and recipe_text(name).startswith("#")


# What the options do


def test_schedule_switches_at_its_fraction_and_adds_up():
    recipe = load_recipe(base(schedule=[{"from": 0.25, "fprop": "bf16"}, {"from": 0.82, "wgrad": "bf16"}]))
    full = recipe.plan(0.0)
    late = full._replace(fprop_input="bf16", fprop_weight="bf16")
    last = late._replace(wgrad_grad_output="bf16", wgrad_input="bf16")
    steps = {0: full, 24: full, 25: late, 81: late, 82: last, 100: last}
    assert {step: recipe.plan(step / 100) for step in steps} == steps
    assert recipe.starts == (0.0, 0.25, 0.82)


def test_plan_knows_whether_it_draws():
    assert load_recipe("nvidia_nvfp4").plan().stochastic
    assert not load_recipe("nvidia_nvfp4_no_sr").plan().stochastic
    assert load_recipe("nvidia_nvfp4_late_fprop").plan(1.0).stochastic
    assert not load_recipe("nvidia_nvfp4_late_both").plan(1.0).stochastic


@pytest.mark.parametrize(
    "blocks, count, kept",
    [
        ({"last_fraction": 0.07}, 100, (0, 7)),  # 0.07 * 100 is 7.000000000000001 in floating point
        ({"last_fraction": 0.15}, 20, (0, 3)),
        ({"last_fraction": 0.15}, 21, (0, 4)),
        ({"last_fraction": 0.01}, 2, (0, 1)),
        ({"first": 1, "last_fraction": 0.5}, 4, (1, 2)),
        ({"first": 2, "last": 8}, 62, (2, 8)),
    ],
)
def test_blocks_round_up(blocks, count, kept):
    assert Blocks(**blocks).kept(count) == kept


def test_operand_spec():
    assert OperandSpec(format="nvfp4", block="1x16", rounding="nearest").scheme == Scheme()
    assert OperandSpec(format="nvfp4") == OperandSpec(block="1x16", rounding="nearest", scale_rule="nvfp4")
    assert OperandSpec(format="mxfp4").scheme == Scheme("e2m1", "e8m0", "floor", (1, 32))
    assert OperandSpec(format="bf16").scheme is None and OperandSpec(format="bf16").text == "bf16"
    for wrong, told in (
        ({"format": "nvfp"}, "did you mean 'nvfp4'?"),
        ({"format": "nvfp4", "blok": "1x16"}, "did you mean 'block'?"),
        ({"format": "bf16", "rounding": "nearest"}, "contradicts format: bf16"),
        ({"format": "bf16", "hadamard": 16}, "contradicts format: bf16"),
        ({"format": "mxfp4", "block": "16x16"}, "expected 1x32"),
        ({"format": "nvfp4", "rounding": "stochastic16"}, "nearest, stochastic, stochastic8 or stochastic_scale"),
    ):
        with pytest.raises(ValueError) as caught:
            OperandSpec(**wrong)
        assert told in str(caught.value) and "OperandSpec" in str(caught.value)
    with pytest.raises(ValueError, match="frozen"):
        OperandSpec(format="nvfp4").block = "16x16"


@given(
    st.sampled_from([("nvfp4", "1x16", "nvfp4"), ("nvfp4", "16x16", "nvfp4"), ("mxfp4", "1x32", "floor"),
                     ("mxfp4", "1x32", "ceil")]),
    st.sampled_from(["nearest", "stochastic", "stochastic8"]),
    st.sampled_from([0, 16]),
)  # fmt: skip
def test_every_field_reaches_the_kernels(choice, rounding, hadamard):
    format_, block, rule = choice
    if block == "16x16" and hadamard:
        return
    spec = OperandSpec(format=format_, block=block, rounding=rounding, hadamard=hadamard, scale_rule=rule)
    scheme = Scheme.parse(spec.text)
    assert scheme == spec.scheme
    assert (scheme.rule, scheme.rounding, scheme.hadamard) == (rule, rounding, hadamard)
    assert "x".join(map(str, scheme.block)) == block
    assert OperandSpec(**spec.to_dict()) == spec


def test_a_recipe_cannot_be_changed_behind_its_checks():
    recipe = load_recipe("nvidia_nvfp4")
    with pytest.raises(ValueError, match="frozen"):
        recipe.weight_match = False
