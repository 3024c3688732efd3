"""The bench commands measure what they say: shapes, what ran, errors. No wall-clock assertion."""

import json

import pytest
import torch
from typer.testing import CliRunner

from nvfp4_train import benchmark
from nvfp4_train.cli import app
from nvfp4_train.linear import QuantizedLinear

CPU = torch.device("cpu")


def test_linear_rows_hold_a_ratio_for_each_rival():
    (row,) = benchmark.bench_linear("nvidia_nvfp4", CPU, [(32, 16, 48)], "float32", repeats=2)
    assert (row["tokens"], row["in"], row["out"], row["weights"]) == (32, 16, 48, "float32")
    for name in ("quantized", "plain_eager"):
        assert row[f"{name}_ratio"] == pytest.approx(row[f"{name}_ms"] / row["bf16_ms"])


def test_the_plain_recipe_is_the_recipe():
    """What the kernels are held against in speed computes the same numbers."""
    layer = QuantizedLinear(48, 32, bias=False, recipe="nvidia_nvfp4_no_sr")
    x, dy = torch.randn(64, 48, dtype=torch.bfloat16), torch.randn(64, 32, dtype=torch.bfloat16)
    y, dx, dw = benchmark.PlainRecipe(layer.plan)(x, layer.weight.detach(), dy, torch.tensor(0))
    leaf = x.clone().requires_grad_()
    out = layer(leaf)
    out.backward(dy)
    assert torch.equal(y, out) and torch.equal(dx, leaf.grad)
    assert torch.equal(dw, layer.weight.grad.bfloat16())


def test_quantize_rows_count_the_bytes_that_move():
    rows = {row["kernel"]: row for row in benchmark.bench_quantize(CPU, (32, 64), repeats=2)}
    assert rows["copy"]["of_copy_rate"] == 1.0
    moved = rows["1x16 nearest, packed"]["us"] * rows["1x16 nearest, packed"]["GB/s"] * 1e3
    assert moved == pytest.approx(32 * 64 * (2 + 0.5 + 1 / 16) + 4, rel=1e-6)  # and the amax, 4 bytes


def test_rivals_that_fail_are_named_and_hide_nothing(monkeypatch):
    def broken(*_):
        raise RuntimeError("no kernel for sm_90\nmore")

    monkeypatch.setattr(benchmark, "peers", lambda x: {"good": lambda: x.clone(), "bad": broken})
    monkeypatch.setattr(benchmark.PlainRecipe, "__call__", broken)
    (row,) = benchmark.bench_linear("nvidia_nvfp4", CPU, [(32, 16, 48)], repeats=2)
    assert row["plain_eager_failed"] == "RuntimeError: no kernel for sm_90" and row["quantized_ratio"] > 0
    result = CliRunner().invoke(app, ["bench", "quantize", "--device", "cpu", "--shape", "16x32"])
    assert result.exit_code == 0 and "RuntimeError" in result.output
    rows = {row["kernel"]: row for row in benchmark.bench_quantize(CPU, (16, 32), repeats=2)}
    assert rows["good, packed"]["of_copy_rate"] > 0 and set(rows["bad, packed"]) == {"kernel", "failed"}


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["bench", "linear", "--shape", "3x4"], "3x4"),
        (["bench", "quantize", "--shape", "0x16"], "0x16"),
        (["bench", "linear", "--weights", "fp8"], "fp8"),
        (["bench", "linear", "--recipe", "nvidia_nvfp5"], "nvidia_nvfp4"),
        (["bench", "step", "missing.yaml"], "missing.yaml"),
        (["bench", "linear", "--device", "tpu"], "tpu"),
    ],
)
def test_bad_input_is_one_sentence(arguments, named):
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2 and named in result.output and "Traceback" not in result.output


def test_json():
    result = CliRunner().invoke(app, ["bench", "quantize", "--device", "cpu", "--shape", "16x32", "--json"])
    assert result.exit_code == 0
    assert {"machine", "rows"} == set(json.loads(result.output))
