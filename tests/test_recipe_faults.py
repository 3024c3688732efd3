"""What a recipe cannot be, and how its faults are told: all at once, with key path, reason and nearest spelling."""

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_recipes import NEAREST, ROTATED, SQUARE, STOCHASTIC, base

from nvfp4_train.recipe import RecipeError, load_recipe

MX = {"format": "mxfp4", "block": "1x32", "rounding": "nearest", "scale_rule": "ceil"}


def faults(recipe) -> dict[str, str]:
    """key path -> message"""
    with pytest.raises(RecipeError) as caught:
        load_recipe(recipe)
    return dict(str(fault).split(": ", 1) for fault in caught.value.faults)


# How faults are told


def test_all_faults_at_once_with_file_line_path_and_spelling(tmp_path):
    path = tmp_path / "broken.yaml"
    path.write_text(
        "name: broken\n"
        "fprop:\n"
        "  input:  {format: nvfp4, block: 1x16, rounding: nearst}\n"
        "  weight: {format: nvfp5, block: 16x16, rounding: nearest}\n"
        "dgrad:\n"
        "  grad_output: {format: nvfp4, block: 1x16, roundin: stochastic}\n"
        "  weight: bf16\n"
        "wgrad: bf1\n"
        "keep_bf16: {modules: lm_head, blocks: {frst: 2}}\n"
        "weight_match: maybe\n"
        "weight_match: true\n"
        "schedul: []\n"
    )
    with pytest.raises(RecipeError) as caught:
        load_recipe(path)
    text = str(caught.value)
    assert text.startswith(f"{path}: 9 faults")
    for line, key, hint in (
        (3, "fprop.input.rounding", "did you mean 'nearest'?"),
        (4, "fprop.weight.format", "did you mean 'nvfp4'?"),
        (6, "dgrad.grad_output.roundin", "did you mean 'rounding'?"),
        (7, "dgrad.weight", "write bf16 for the GEMM"),
        (8, "wgrad", "did you mean 'bf16'?"),
        (9, "keep_bf16.modules", "['lm_head']"),
        (9, "keep_bf16.blocks.frst", "did you mean 'first'?"),
        (11, "weight_match", "twice, on lines 10 and 11"),
        (12, "schedul", "did you mean 'schedule'?"),
    ):
        told = [entry for entry in text.split("\n") if f"line {line}: {key}: " in entry]
        assert len(told) == 1 and hint in told[0], (key, text)


def test_nothing_is_left_to_a_default():
    found = faults(base(fprop={"input": {"format": "nvfp4"}, "weight": {"block": "16x16", "rounding": "nearest"}}))
    assert set(found) == {"fprop.input.block", "fprop.input.rounding", "fprop.weight.format"}
    assert "1x16 or 16x16" in found["fprop.input.block"]
    assert set(faults({"name": "mine", "fprop": "bf16"})) == {"dgrad", "wgrad"}
    no_rule = {key: value for key, value in MX.items() if key != "scale_rule"}
    found = faults(base(wgrad={"grad_output": no_rule, "input": MX}))
    assert list(found) == ["wgrad.grad_output.scale_rule"]
    assert "expected floor, ceil" in found["wgrad.grad_output.scale_rule"]


@pytest.mark.parametrize(
    "text, told",
    [
        ("name: [a\nfprop: b}\n", "line 2, column 6"),
        ("a: b: c\n", "line 1, column 5"),
        ("", "empty"),
        ("- 1\n- 2\n", "expected a mapping"),
        ("a: &a [*a]\n", "alias"),
        ("name: !!python/object:os.system x\n", "line 1"),
        ("1: 2\n", "keys must be text"),
        ("[" * 30000, "nested too deeply"),
        ("name: 2026-99-99\n", "not valid YAML"),
        ("a: \x00", "not valid YAML"),
    ],
)
def test_files_that_are_no_recipe(tmp_path, text, told):
    path = tmp_path / "odd.yaml"
    path.write_text(text)
    with pytest.raises(RecipeError, match="odd.yaml") as caught:
        load_recipe(str(path))
    assert told in str(caught.value)


def test_what_cannot_be_read_is_named(tmp_path):
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    for recipe, told in (
        ("nvidia_nvfp", "did you mean 'nvidia_nvfp4'?"),
        ("zzz", "known recipes: averis, bf16"),
        (tmp_path / "absent.yaml", "no such file"),
        (str(tmp_path), "cannot be read"),
        (tmp_path / "binary.yaml", "not a text file"),
        (7, "expected a name"),
    ):
        with pytest.raises(RecipeError) as caught:
            load_recipe(recipe)
        assert told in str(caught.value), recipe


def test_a_named_recipe_is_found_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bf16").write_text("not a recipe")
    assert load_recipe("bf16").quantizes_nothing
    (tmp_path / "own").write_text(load_recipe("mxfp4").to_yaml())
    assert load_recipe("own") == load_recipe("mxfp4")


# What cannot be


@pytest.mark.parametrize(
    "changes, key, told",
    [
        ({"wgrad": {"grad_output": STOCHASTIC, "input": ROTATED}}, "wgrad.input.hadamard", "both operands"),
        ({"fprop": {"input": ROTATED, "weight": SQUARE}}, "fprop.weight.hadamard", "both operands"),
        ({"wgrad": {"grad_output": MX, "input": NEAREST}}, "wgrad.input.format", "one format"),
        ({"wgrad": {"grad_output": NEAREST, "input": {"format": "bf16"}}}, "wgrad.input.format", "one format"),
        ({"fprop": {"input": ROTATED, "weight": {**SQUARE, "hadamard": 16}}}, "fprop.weight.hadamard", "16x16"),
        ({"fprop": {"input": {**NEAREST, "block": "1x32"}, "weight": SQUARE}}, "fprop.input.block", "1x16 or 16x16"),
        ({"fprop": {"input": {**NEAREST, "scale_rule": "floor"}, "weight": SQUARE}}, "fprop.input.scale_rule", "nvfp4"),
        ({"fprop": {"input": {"format": "bf16", "block": "1x16"}, "weight": {"format": "bf16"}}},
         "fprop.input.block", "contradicts format: bf16"),
        ({"keep_bf16": {"blocks": {"last": 2, "last_fraction": 0.1}}}, "keep_bf16.blocks.last_fraction", "last: 2"),
        ({"keep_bf16": {"blocks": {"last_fraction": 1.0}}}, "keep_bf16.blocks.last_fraction", "below 1"),
        ({"keep_bf16": {"blocks": {"first": -1}}}, "keep_bf16.blocks.first", "-1"),
        ({"keep_bf16": {"blocks": {"first": 0}}}, "keep_bf16.blocks", "keeps no block"),
        ({"keep_bf16": {"modules": ["a", "", "a"]}}, "keep_bf16.modules[1]", "glob"),
        ({"keep_bf16": {"modules": ["a"], "if_present": ["a"]}}, "keep_bf16.if_present", "'a'"),
        ({"schedule": [{"from": 1.2, "fprop": "bf16"}]}, "schedule[0].from", "1.2"),
        ({"schedule": [{"from": True, "fprop": "bf16"}]}, "schedule[0].from", "True"),
        ({"schedule": [{"from": 0.5}]}, "schedule[0]", "switches nothing"),
        ({"schedule": [{"from": 0.5, "fprop": "bf16"}, {"from": 0.6, "fprop": "bf16"}]},
         "schedule[1].fprop", "switches nothing"),
        ({"schedule": [{"from": 0.5, "fprop": "bf16"}, {"from": 0.5, "dgrad": "bf16"}]},
         "schedule[1].from", "not after"),
        ({"schedule": {"from": 0.5}}, "schedule", "expected a list"),
        ({"name": "a/b"}, "name", "letters"),
        ({"weight_match": "true"}, "weight_match", "true or false"),
        ({"wgrad": {"grad_output": {**STOCHASTIC, "hadamard": True}, "input": ROTATED}},
         "wgrad.grad_output.hadamard", "0, 4, 16, 32, 64 or 128"),
    ],
)  # fmt: skip
def test_impossible_combinations_are_refused_with_their_reason(changes, key, told):
    found = faults(base(**changes))
    assert told in found[key]


@pytest.mark.parametrize(
    "fprop_weight, dgrad_weight, reason",
    [
        (NEAREST, NEAREST, "square"),
        (SQUARE, NEAREST, "dgrad.weight is"),
        ({**SQUARE, "rounding": "stochastic"}, {**SQUARE, "rounding": "stochastic"}, "drawn anew"),
        (SQUARE, None, "bf16"),
    ],
)
def test_weight_match_must_be_declared_as_it_is(fprop_weight, dgrad_weight, reason):
    dgrad = {"grad_output": STOCHASTIC, "weight": dgrad_weight} if dgrad_weight else "bf16"
    changes = {"fprop": {"input": NEAREST, "weight": fprop_weight}, "dgrad": dgrad}
    for claim in ({}, {"weight_match": True}):  # the default is a claim like any other
        found = faults(base(**changes, **claim))
        assert list(found) == ["weight_match"] and reason in found["weight_match"]
    assert load_recipe(base(**changes, weight_match=False)).weight_match is False
    assert "declare weight_match: true" in faults(base(weight_match=False))["weight_match"]


def test_a_phase_may_not_break_weight_match_unsaid_unless_it_goes_to_bf16():
    phase = {"from": 0.5, "dgrad": {"grad_output": STOCHASTIC, "weight": NEAREST}}
    assert "breaks weight_match" in faults(base(schedule=[phase]))["schedule[0]"]
    assert load_recipe(base(schedule=[{"from": 0.5, "dgrad": "bf16"}])).weight_match


SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=4), st.binary(max_size=2),
    st.sampled_from(["bf16", "nvfp4", "mxfp4", "1x16", "16x16", "1x32", "stochastic", "ceil", "input", "from"]),
)  # fmt: skip
ANYTHING = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(SCALARS, inner, max_size=3), max_leaves=5
)
FULL = base(
    source="here", weight_match=True, schedule=[{"from": 0.5, "fprop": "bf16"}],
    keep_bf16={"modules": ["a"], "if_present": ["b"], "blocks": {"first": 1, "last_fraction": 0.1}},
)  # fmt: skip


@given(st.lists(st.integers(0, 7), min_size=1, max_size=4), ANYTHING)
def test_whatever_stands_in_a_recipe_it_loads_or_tells_its_faults(way, thing):
    recipe = copy.deepcopy(FULL)
    at = recipe
    for turn in way[:-1]:  # down a branch of the recipe
        keys = list(at) if isinstance(at, dict) else list(range(len(at)))
        if not keys or not isinstance(at[keys[turn % len(keys)]], dict | list):
            break
        at = at[keys[turn % len(keys)]]
    keys = list(at) if isinstance(at, dict) else list(range(len(at)))
    if keys:
        at[keys[way[-1] % len(keys)]] = thing
    try:
        loaded = load_recipe(recipe)
    except RecipeError as error:
        assert error.faults and str(error)
    else:
        assert load_recipe(loaded.to_dict()) == loaded
