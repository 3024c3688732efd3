"""The error table's script: errors of known size, and that what claims to be unbiased is - by its mean over many draws.

The error of the mean of n unbiased draws falls as 1 / sqrt(n); a deterministic rounding's does not fall at all. What
keeps it from falling is bias, and the only one that a recipe may have is that of elements which saturate.
"""

import importlib.util
import math
from pathlib import Path

import pytest
import torch
from tiny_models import Model

import nvfp4_train as nt
from nvfp4_train.operand import OperandSpec
from nvfp4_train.recipe import recipe_names

SCRIPT = Path(__file__).parents[1] / "experiments" / "recipes" / "error_table.py"
specification = importlib.util.spec_from_file_location("error_table", SCRIPT)
table = importlib.util.module_from_spec(specification)
specification.loader.exec_module(table)
torch.set_num_threads(1)
DRAWS = 64


@pytest.fixture(scope="module")
def real_gradient():
    """float32 [128, 128]: the gradient at a layer's output after 30 steps of training."""
    torch.manual_seed(0)
    model = Model(blocks=2, size=64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    found = {}
    model.layers[0].up.register_forward_hook(lambda m, args, y: found.update(y=y))
    for _ in range(30):
        tokens = torch.randint(0, 32, (16, 9))
        tokens[:, 1::2] = (tokens[:, 0:-1:2] * 3 + 1) % 32
        loss = torch.nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        found["y"].retain_grad()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return found["y"].grad.reshape(-1, 128).float()


def gradient_operands():
    """(recipe and operand that have it first, spec) for each way in which the recipes round gradients at random."""
    found = {}
    for name in recipe_names():
        recipe = nt.load_recipe(name)
        for where in table.random_operands(recipe):
            gemm, operand = where.split(".")
            spec = getattr(recipe, gemm).operands[operand]
            if operand == "grad_output" and spec.split is None:
                found.setdefault(spec.text, (f"{name}-{where}", spec))
    return list(found.values())


def mean_errors(spec, t):
    """Relative errors of the mean of 1 and of DRAWS draws, the seed's signs and all."""
    draws = [table.quantized(t, spec, torch.tensor(n)) for n in range(DRAWS)]
    singles = [table.relative(draw, t.double()) for draw in draws[:8]]
    return sum(singles) / len(singles), table.relative(sum(draws) / DRAWS, t.double())


@pytest.mark.parametrize("spec", [s for _, s in gradient_operands()], ids=[name for name, _ in gradient_operands()])
def test_gradients_are_unbiased_but_for_what_saturates(spec, real_gradient):
    single, mean = mean_errors(spec, real_gradient)
    bias = math.sqrt(max(mean**2 - single**2 / DRAWS, 0.0))
    saturates = spec.scheme.rule == "nvfp4" and spec.rounding == "stochastic"
    limit = 0.02 if saturates else 0.35 * single / math.sqrt(DRAWS) + 2**-8 * (spec.hadamard > 0)
    assert bias < limit, (single, mean)
    assert mean < 0.5 * single


def test_nearest_is_not(real_gradient):
    spec = OperandSpec(format="nvfp4", block="1x16", rounding="nearest")
    single, mean = mean_errors(spec, real_gradient)
    assert mean == pytest.approx(single)


def test_ms_eden_has_half_the_error_of_stochastic_rounding(real_gradient):
    """In squared error, against rounding with room for no clipping: the claim of arXiv:2601.22813."""
    eden = nt.load_recipe("quartet2").wgrad.grad_output
    rounded = OperandSpec(
        format="nvfp4", block="1x16", rounding="stochastic", hadamard=128, signs="step", headroom="17/16"
    )
    assert mean_errors(eden, real_gradient)[0] ** 2 < 0.5 * mean_errors(rounded, real_gradient)[0] ** 2


def test_errors_have_their_known_sizes():
    tensors = table.made_up("gaussian")
    of = {name: table.errors(nt.load_recipe(name), tensors, draws=1)["fprop.input"] for name in
          ("nvidia_nvfp4", "four_over_six", "mxfp8", "mxfp6", "ladder_tensor", "deepseek_v3_fp8")}  # fmt: skip
    assert 0.09 < of["nvidia_nvfp4"] < 0.1
    assert of["four_over_six"] < of["nvidia_nvfp4"] < of["ladder_tensor"]
    assert 0.02 < of["mxfp8"] < 0.03 and 0.02 < of["deepseek_v3_fp8"] < 0.03 and 0.04 < of["mxfp6"] < 0.06
    heavy = table.errors(nt.load_recipe("ladder_tensor"), table.made_up("heavy"), draws=1)["fprop.input"]
    assert heavy > 2 * of["ladder_tensor"]


def test_a_split_takes_the_outliers():
    tensors = table.made_up("outlier")
    t = tensors["input"]
    t += 20.0 * torch.randn(1, t.shape[1], generator=torch.Generator().manual_seed(1))  # a mean over the tokens
    whole = OperandSpec(format="nvfp4", block="1x16", rounding="nearest")
    split = OperandSpec(**(whole.to_dict() | {"split": {"part": "mean"}}))
    seed = torch.tensor(0)
    errors = [table.relative(table.quantized(t, spec, seed), t.double()) for spec in (whole, split)]
    assert errors[1] < 0.5 * errors[0]


def test_the_tables_have_a_row_for_every_name():
    one = {where: 0.1 for where in table.OPERANDS}
    results = {
        "errors": {"a, b": {kind: one for kind in table.KINDS}, "c": {kind: one for kind in table.KINDS}},
        "bias": {"c": {"wgrad.input": {1: 0.16, 4: 0.08, 16: 0.04, 64: 0.02, 256: 0.0125}}},
    }
    text = table.tables(results)
    assert text.count("| `a`, `b` | 10.00 | 10.00 |") == text.count("| `c` | 10.00 | 10.00 |") == len(table.KINDS)
    assert "| `c` | wgrad.input | 16.00 | 8.00 | 4.00 | 2.00 | 1.25 | 0.75 |" in text


def test_the_committed_table_has_every_recipe():
    page = (SCRIPT.parents[1] / "2026-11-30_recipe_errors" / "README.md").read_text()
    assert all(page.count(f"`{name}`") >= len(table.KINDS) for name in recipe_names() if name != "bf16")
