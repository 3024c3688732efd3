"""A layer on the native product gives what it gives emulated; a request that cannot be met is told what to do.

In Triton's interpreter on a CPU (``triton+native``), on FP4 tensor cores where there are some.
"""

import pytest
import torch

import nvfp4_train as nt
from nvfp4_kernels.fp4 import fp4_format, product_format
from nvfp4_kernels.scheme import Scheme
from nvfp4_train import backend, ledger
from nvfp4_train.backend import Backend, choose

pytest.importorskip("triton")
from nvfp4_kernels.triton import codecs, native_matmul  # noqa: E402

GPU = torch.cuda.is_available()
FP4 = codecs.INTERPRETED.value if not GPU else torch.cuda.get_device_capability()[0] in native_matmul.TILES
DEVICE = "cuda" if GPU else "cpu"
multiplies = pytest.mark.skipif(not FP4, reason="no FP4 tensor cores here, and triton was imported uninterpreted")
pytestmark = pytest.mark.filterwarnings(
    "ignore:(divide by zero|invalid value|overflow):RuntimeWarning", "ignore:Tensor.T"
)


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def run(matmul: str, recipe: str, sizes: tuple[int, int, int], main_grad: bool = False, compiled: bool = False):
    """(y, dx, dw) and the ledger of one step of a layer on ``triton+matmul``."""
    tokens, k, n = sizes
    label = f"{matmul} {recipe} {sizes} {main_grad} {compiled}"
    layer = nt.QuantizedLinear(k, n, bias=False, recipe=recipe, backend=f"triton+{matmul}", label=label, device=DEVICE)
    layer.weight.data.copy_(normal(n, k, seed=1))
    if main_grad:
        layer.weight.main_grad = normal(n, k, seed=2)
    x = normal(tokens, k, seed=3).requires_grad_()
    torch.manual_seed(4)
    call = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer
    with ledger.recording() as log:
        y = call(x)
        y.backward(normal(tokens, n, seed=5))
    return (y.detach(), x.grad, layer.weight.main_grad if main_grad else layer.weight.grad), log.gemms()


def assert_close(found, expected, k: int) -> None:
    """Two orders of at most ``k`` float32 additions: each rounds by half a unit of its partial sum."""
    for a, b in zip(found, expected, strict=True):
        assert a.shape == b.shape and (a - b).abs().max() <= k * 2.0**-24 * b.abs().max() * 4


@multiplies
@pytest.mark.parametrize("recipe", ["nvidia_nvfp4", "mxfp4"])
def test_three_gemms_as_emulated(recipe):
    """Sizes that are no multiple of a block, a pair or a tile: padding, square blocks read transposed, both forms."""
    sizes = (130, 72, 33)
    expected, emulated = run("emulated", recipe, sizes)
    found, native = run("native", recipe, sizes)
    assert_close(found, expected, 256)
    assert [row["backend"] for row in native] == ["native"] * 3 and [row["backend"] for row in emulated] == [
        "emulated"
    ] * 3
    drop = lambda rows: [{key: row[key] for key in ("gemm", "a", "b", "calls", "flops")} for row in rows]  # noqa: E731
    assert drop(native) == drop(emulated)


@multiplies
def test_main_grad_and_compile():
    sizes = (32, 48, 16)
    expected, _ = run("emulated", "nvidia_nvfp4", sizes, main_grad=True)
    assert_close(run("native", "nvidia_nvfp4", sizes, main_grad=True)[0], expected, 64)
    compiled, rows = run("native", "nvidia_nvfp4", sizes, compiled=True)
    assert_close(compiled, run("native", "nvidia_nvfp4", sizes)[0], 64)
    assert {row["backend"] for row in rows} == {"native"}


@multiplies
def test_a_bf16_gemm_runs_as_bf16_and_half_precision_comes_out():
    recipe = nt.load_recipe("nvidia_nvfp4").to_dict() | {"wgrad": "bf16"}
    layer = nt.QuantizedLinear(32, 16, recipe=recipe, backend="triton+native", label="mixed", device=DEVICE)
    with ledger.recording() as log:
        layer(normal(16, 32, seed=1).half().requires_grad_()).sum().backward()
    assert [row["backend"] for row in log.gemms()] == ["native", "native", "emulated"]
    q = nt.quantize(normal(16, 32, seed=2), nt.OperandSpec(), backend="triton")
    assert nt.matmul(q, q, torch.float16, backend="native").dtype == torch.float16


def test_a_decoded_operand_and_a_format_without_an_instruction_are_refused():
    decoded = nt.quantize(normal(16, 32, seed=1), nt.OperandSpec(), form="decoded", backend="reference")
    with pytest.raises(ValueError, match="quantize with form='packed'"):
        nt.matmul(decoded, decoded, backend="native")
    nv = nt.quantize(normal(16, 32, seed=1), nt.OperandSpec(), backend="reference")
    mx = nt.quantize(normal(16, 32, seed=1), nt.OperandSpec(format="mxfp4"), backend="reference")
    with pytest.raises(ValueError, match="no FP4 instruction multiplies e2m1:e4m3.* with e2m1:e8m0.*'emulated'"):
        nt.matmul(nv, mx, backend="native")
    with pytest.raises(ValueError, match="torch offers no mxfp4 product"):
        nt.matmul(mx, mx, backend="cublaslt")


def test_formats_an_instruction_reads():
    assert fp4_format(Scheme()) == fp4_format(Scheme(block=(16, 16), rounding="stochastic8", hadamard=16)) == "nvfp4"
    assert fp4_format(Scheme(scale="e8m0", rule="ceil", block=(1, 32))) == "mxfp4"
    assert fp4_format(Scheme(block=(1, 128))) == "nvfp4"  # eight times the same scale
    assert fp4_format(Scheme(scale="e8m0", rule="ceil")) is None and fp4_format(Scheme(outer=(1, 128))) is None
    assert fp4_format(Scheme(element="e4m3", scale="e8m0", rule="ceil", block=(1, 32))) is None
    assert fp4_format(Scheme(masked=True)) is None
    assert product_format(str(Scheme()), "bf16") is None


class Blackwell:
    """Stands in for torch.cuda: what a machine with such a GPU would say."""

    def __init__(self, monkeypatch, capability=(10, 0), wrong=None):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(backend.cublas, "available", lambda: False)
        monkeypatch.setattr(
            "nvfp4_kernels.triton.native_check.verified", lambda *what: self.asked.append(what) or wrong
        )
        self.asked = []


def test_fp4_tensor_cores_are_chosen_where_they_are_and_checked_first(monkeypatch):
    device, recipe = torch.device("cuda"), nt.load_recipe("nvidia_nvfp4")
    gpu = Blackwell(monkeypatch)
    assert choose(device, None, recipe.operand_texts) == Backend("triton", "native")
    assert gpu.asked == [("native", "nvfp4", torch.device("cuda", 0))]
    assert choose(device, "emulated") == Backend("triton", "emulated")
    assert choose(device, None, [str(Scheme(outer=(1, 128)))]) == Backend("triton", "emulated")
    with pytest.raises(ValueError, match="no FP4 instruction reads needs the backend 'emulated'"):
        choose(device, "native", [str(Scheme(outer=(1, 128)))])
    Blackwell(monkeypatch, capability=(9, 0))
    assert choose(device, None, recipe.operand_texts) == Backend("triton", "emulated")
    with pytest.raises(ValueError, match="is sm_90, without FP4 tensor cores: choose 'emulated'"):
        choose(device, "native")


def test_a_gpu_that_multiplies_wrongly_is_not_used(monkeypatch):
    Blackwell(monkeypatch, wrong="7 of 9 elements are wrong")
    with pytest.raises(ValueError, match="7 of 9 elements are wrong.* choose 'emulated'.* audit --device"):
        choose(torch.device("cuda"), "native")


def test_native_without_a_gpu_is_refused():
    with pytest.raises(ValueError, match="needs a Blackwell GPU, not cpu: choose 'emulated'"):
        choose(torch.device("cpu"), "reference+native")
    with pytest.raises(ValueError, match="needs a Blackwell GPU, not cpu"):
        choose(torch.device("cpu"), "cublaslt")
