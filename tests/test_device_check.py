"""The self-check of a Blackwell GPU, with Triton's interpreter in the GPU's place: it passes what is right and says
what is not. What only a GPU has (its instruction, its speed) is read as nothing here."""

import pytest
import torch

from nvfp4_train import device_check

pytest.importorskip("triton")
from nvfp4_kernels.triton import codecs, native_check, native_matmul  # noqa: E402

CPU = torch.device("cpu")
pytestmark = [
    pytest.mark.skipif(not codecs.INTERPRETED.value, reason="triton was imported uninterpreted"),
    pytest.mark.filterwarnings("ignore:(divide by zero|invalid value|overflow):RuntimeWarning", "ignore:Tensor.T"),
]


@pytest.mark.parametrize("format_", ["nvfp4", "mxfp4"])
def test_native_and_emulated_differ_by_the_order_of_sums(format_):
    row = device_check.random(CPU, "native", format_, (40, 33, 160))
    assert row["ok"] and max(row["error_native"], row["error_emulated"]) <= 1


def test_a_wrong_product_is_no_matter_of_order(monkeypatch):
    right = native_matmul.native_matmul
    monkeypatch.setattr(
        native_matmul, "native_matmul", lambda a, b, *rest: right(a, b._replace(scales=b.scales.flip(4)), *rest)
    )
    row = device_check.random(CPU, "native", "nvfp4", (40, 33, 160))
    assert not row["ok"] and row["error_native"] > 1 >= row["error_emulated"]
    assert not device_check.layer(CPU, "native", (32, 64, 16))["ok"]


def test_conversions_and_layer():
    row = device_check.conversions(CPU)
    assert row["ok"] and row["differing"] == {"nearest": 0, "stochastic": 0, "stochastic8": 0}
    row = device_check.layer(CPU, "native", (32, 48, 16))
    assert row["ok"] and max(row[key] for key in ("y", "dx", "dw")) < 1e-5


def test_report_has_every_section_and_goes_on_past_a_failure(monkeypatch):
    monkeypatch.setattr(device_check, "_reason", lambda device, name: None if name == "native" else "not on a CPU")
    monkeypatch.setattr(native_check, "verified", lambda *what: None)
    once = lambda functions, device: {name: 1.0 for name, run in functions.items() if run() is not None}  # noqa: E731
    monkeypatch.setattr(device_check, "median_seconds", once)
    monkeypatch.setattr(device_check, "EXECUTED", (16, 16, 32))
    report = device_check.device_report(CPU, (16, 16, 32), (16, 32, 16), ((128, 128, 128),))
    assert [row["ok"] for row in report["exact"]] == [True, True] and report["backends"]["cublaslt"] == "not on a CPU"
    assert all(row["ok"] for row in (*report["random"], report["conversions"], *report["layer"]))
    assert {"native_tflops", "native_with_layout_tflops", "native_over_bf16"} <= report["speed"][0].keys()
    # the interpreter compiles nothing: no instruction can be read, and the report says so and goes on
    assert report["faults"] == 2 and all("executed" in row["section"] for row in report["instruction"])
    text = "\n".join(device_check.device_lines(report))
    assert "NOT ALL OF IT HOLDS" in text and "conversions:" in text and "differing (nearest 0" in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a CUDA device")
def test_without_a_gpu_it_says_so():
    with pytest.raises(ValueError, match="needs a CUDA device"):
        device_check.device_report()
    with pytest.raises(ValueError, match="an FP4 product needs a Blackwell GPU, not cpu"):
        device_check.device_report("cpu")
