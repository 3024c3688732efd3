"""Recipes as TransformerEngine says them, and a layer that has TransformerEngine do its GEMMs.

TransformerEngine itself runs only where we cannot test. Its arguments are therefore checked against the source in its
wheel, read as text (``make .te`` fetches it), and the layer against a stand-in with the same few functions.
"""

import ast
import os
import sys
import types
import zipfile
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from tiny_experiment import tiny
from torch import nn

import nvfp4_train as nt
from nvfp4_train import ledger
from nvfp4_train.experiment.errors import ExperimentError
from nvfp4_train.experiment.train import run_job
from nvfp4_train.integrations import te_translation, transformer_engine
from nvfp4_train.integrations.te_translation import EXPLICIT, te_phases
from nvfp4_train.recipe_errors import RecipeError

FOLDER = Path(os.environ.get("NVFP4_TE_WHEEL", Path(__file__).parent.parent / ".te"))


def of(name: str) -> list:
    return te_phases(nt.load_recipe(name))


@pytest.mark.parametrize(
    "name, different",
    [
        ("nvidia_nvfp4", {}),
        ("nvidia_nvfp4_no_rht", {"disable_rht": True}),
        ("nvidia_nvfp4_no_sr", {"disable_stochastic_rounding": True}),
        ("nvidia_nvfp4_1d_weights", {"disable_2d_quantization": True}),
    ],
)
def test_one_switch_for_each_part_of_the_recipe(name, different):
    assert of(name) == [("", EXPLICIT | different)]


def test_phases_of_a_schedule():
    (_, first), (path, then) = of("nvidia_nvfp4_late_backward")
    assert first == EXPLICIT and path == "schedule.0" and then["backward_override"] == "high_precision"
    assert [arguments for _, arguments in of("nvidia_nvfp4_late_both")] == [EXPLICIT, None]
    assert of("bf16") == [("", None)]


def changed(*paths: str, **fields) -> dict:
    """nvidia_nvfp4 with other fields of some operands."""
    recipe = nt.load_recipe("nvidia_nvfp4").to_dict()
    for path in paths:
        gemm, operand = path.split(".")
        recipe[gemm][operand] |= fields
    return recipe


@pytest.mark.parametrize(
    "recipe, path",
    [
        ("mxfp4", "fprop.input.format"),
        ("nvidia_nvfp4_late_fprop", "schedule[0].fprop"),
        (changed("fprop.input", rounding="stochastic"), "fprop.input.rounding"),
        (changed("wgrad.grad_output", rounding="nearest"), "wgrad.grad_output.rounding"),
        (changed("wgrad.grad_output", "wgrad.input", signs="step"), "wgrad.input.signs"),
        (changed("fprop.input", scale_range=256.0), "fprop.input.scale_range"),
        (changed("dgrad.grad_output", four_over_six="mse", scale_range=256.0), "dgrad.grad_output.four_over_six"),
        (nt.load_recipe("nvidia_nvfp4").to_dict() | {"wgrad": "bf16"}, "wgrad"),
    ],
    ids=lambda value: value if isinstance(value, str) else "changed",
)
def test_what_transformer_engine_cannot_express_is_refused_by_field(recipe, path):
    with pytest.raises(RecipeError) as refused:
        te_phases(nt.load_recipe(recipe))
    assert f"{path}: " in str(refused.value) and "TransformerEngine" in str(refused.value)


def test_four_over_six_of_weights():
    recipe = nt.load_recipe("nvidia_nvfp4").to_dict()
    for gemm in ("fprop", "dgrad"):
        recipe[gemm]["weight"] |= {"four_over_six": "mae", "scale_range": 256.0}
    ((_, arguments),) = te_phases(nt.load_recipe(recipe))
    assert arguments == EXPLICIT | {"nvfp4_4over6": "weights", "nvfp4_4over6_e4m3_use_256": "weights"}
    recipe["dgrad"]["weight"]["four_over_six"] = "mse"
    with pytest.raises(RecipeError, match=r"dgrad\.weight\.four_over_six: differs from that of fprop\.weight"):
        te_phases(nt.load_recipe(recipe | {"weight_match": False}))


def wheel_source(path: str) -> ast.Module:
    wheels = sorted(FOLDER.glob(f"transformer_engine-{te_translation.VERSION}-*.whl"))
    if not wheels:
        pytest.skip(f"no wheel of transformer_engine {te_translation.VERSION} in {FOLDER}: make .te")
    with zipfile.ZipFile(wheels[0]) as wheel:
        return ast.parse(wheel.read(f"transformer_engine/{path}"))


def named(tree: ast.Module, kind: type, name: str):
    return next(node for node in ast.walk(tree) if isinstance(node, kind) and node.name == name)


def test_arguments_are_those_of_the_pinned_wheel():
    """Each is a field of the class, and every field that an environment variable can set is given."""
    module = wheel_source("common/recipe/__init__.py")
    fields = {
        node.target.id: ast.unparse(node.value) if node.value else ""
        for node in named(module, ast.ClassDef, "NVFP4BlockScaling").body
        if isinstance(node, ast.AnnAssign)
    }
    assert set(EXPLICIT) <= set(fields)
    assert {name for name, default in fields.items() if "getenv" in default} == set(EXPLICIT)
    constants = {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in module.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple)
    }
    assert set(constants["_NVFP4_4OVER6_SCOPES"]) == {"none", "weights", "activations", "all"}
    assert set(constants["_NVFP4_4OVER6_ERR_MODES"]) == {measure.upper() for measure in te_translation.SELECTIONS}
    assert {"high_precision", None} <= set(constants["_BACKWARD_OVERRIDES"])


def test_functions_the_layer_calls_are_in_the_pinned_wheel():
    autocast = named(wheel_source("pytorch/quantization.py"), ast.ClassDef, "autocast")
    start = next(node for node in autocast.body if isinstance(node, ast.FunctionDef) and node.name == "__init__")
    assert {"enabled", "recipe"} <= {argument.arg for argument in (*start.args.args, *start.args.kwonlyargs)}
    linear = named(wheel_source("pytorch/module/linear.py"), ast.ClassDef, "Linear")
    start = next(node for node in linear.body if isinstance(node, ast.FunctionDef) and node.name == "__init__")
    names = [argument.arg for argument in start.args.args]
    assert names[1:3] == ["in_features", "out_features"] and {"bias", "params_dtype", "device"} <= set(names)


@pytest.fixture
def stand_in(monkeypatch):
    """``transformer_engine`` with the functions the layer calls; ``calls`` holds the recipe each forward ran under."""
    calls, now = [], []

    class NVFP4BlockScaling:
        def __init__(self, **arguments):
            self.arguments = arguments

    @contextmanager
    def autocast(enabled, recipe):
        now.append(recipe.arguments)
        yield
        now.pop()

    class Linear(nn.Linear):
        def __init__(self, in_features, out_features, bias, params_dtype, device):
            super().__init__(in_features, out_features, bias, device=device, dtype=params_dtype)

        def forward(self, x):
            calls.append(dict(now[-1]))
            return super().forward(x)

    paths = ("", ".common", ".common.recipe", ".pytorch")
    modules = {name: types.ModuleType(name) for name in (f"transformer_engine{path}" for path in paths)}
    modules["transformer_engine"].__spec__ = types.SimpleNamespace(name="transformer_engine")
    modules["transformer_engine"].common = modules["transformer_engine.common"]
    modules["transformer_engine"].pytorch = modules["transformer_engine.pytorch"]
    modules["transformer_engine.common"].recipe = modules["transformer_engine.common.recipe"]
    modules["transformer_engine.common.recipe"].NVFP4BlockScaling = NVFP4BlockScaling
    modules["transformer_engine.pytorch"].autocast = autocast
    modules["transformer_engine.pytorch"].Linear = Linear
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    transformer_engine._recipes.clear()
    yield calls
    transformer_engine._recipes.clear()


def test_layer_runs_transformer_engine_on_its_own_parameters(stand_in):
    model = nn.Sequential(nn.Linear(32, 16), nn.Linear(16, 8, bias=False))
    names = set(model.state_dict())
    parameters = list(model.parameters())
    nt.convert(model, "nvidia_nvfp4_late_backward", backend="te")
    assert set(model.state_dict()) == names and list(map(id, model.parameters())) == list(map(id, parameters))
    x = torch.randn(4, 32, requires_grad=True)
    with ledger.recording() as log:
        model(x).sum().backward()
    assert stand_in == [EXPLICIT, EXPLICIT]
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in parameters) and x.grad is not None
    assert [(row["gemm"], row["backend"], row["calls"]) for row in log.gemms()] == [
        (gemm, "te", 1) for gemm in ("fprop", "fprop", "dgrad", "wgrad", "dgrad", "wgrad")
    ]
    nt.set_progress(model, 99, 100)
    model(x)
    assert stand_in[-1]["backward_override"] == "high_precision"
    assert "backend=te" in repr(model)


def test_layer_without_it_and_recipes_beyond_it(stand_in, monkeypatch):
    with pytest.raises(RecipeError, match="fprop.input.format"):
        nt.convert(nn.Sequential(nn.Linear(32, 16)), "mxfp4", backend="te")
    monkeypatch.delitem(sys.modules, "transformer_engine")
    with pytest.raises(ValueError, match=r"needs TransformerEngine: pip install nvfp4-train\[te\]"):
        nt.convert(nn.Sequential(nn.Linear(32, 16)), "nvidia_nvfp4", backend="te")


def test_name_of_an_arm_carries_the_backend():
    assert transformer_engine.split("nvidia_nvfp4@te") == ("nvidia_nvfp4", "te")
    assert transformer_engine.split("nvidia_nvfp4") == ("nvidia_nvfp4", None)
    with pytest.raises(ValueError, match="only 'te' is known"):
        transformer_engine.split("nvidia_nvfp4@tee")


def test_arm_of_an_experiment_runs_on_transformer_engine(stand_in, tmp_path, monkeypatch):
    """``nvidia_nvfp4@te`` beside ``nvidia_nvfp4``: the same weights and batches, other GEMMs; named in the record."""
    arms = [
        {"name": "bf16", "recipe": "bf16", "control": True},
        {"name": "ours", "recipe": "nvidia_nvfp4"},
        {"name": "theirs", "recipe": "nvidia_nvfp4@te"},
    ]
    experiment = tiny(tmp_path, {"arms": arms})
    assert [arm.recipe_name for arm in experiment.all_arms] == ["bf16", "nvidia_nvfp4", "nvidia_nvfp4@te"]
    assert experiment.arm("theirs").text.endswith("# done by: te\n") and "te" not in experiment.arm("ours").text.split()
    run_job(experiment, "theirs", experiment.seeds[0], tmp_path / "out", lambda line: None)
    assert stand_in and all(arguments == EXPLICIT for arguments in stand_in)
    with pytest.raises(ExperimentError, match=r"(?s)arms\.theirs\.recipe: .*fprop\.input\.format"):
        tiny(tmp_path, {"arms": [arms[0], {"name": "theirs", "recipe": "mxfp4@te"}]})
    with pytest.raises(ExperimentError, match="only 'te' is known"):
        tiny(tmp_path, {"arms": [arms[0], {"name": "theirs", "recipe": "mxfp4@cutlass"}]})
    monkeypatch.delitem(sys.modules, "transformer_engine")
    with pytest.raises(ExperimentError, match="arm 'theirs': backend 'te' needs TransformerEngine"):
        experiment.arm("theirs").require()
