"""The general formats on a GPU: the reference gives the CPU's bits there, and float32 products stay float32."""

import pytest
import torch
from mechanism_recipes import RECIPES
from quantize_oracle import gaussian, same
from test_scales import schemes

import nvfp4_train as nt
from nvfp4_kernels.reference.quantize import quantize
from nvfp4_train import ledger

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_the_reference_gives_the_same_bits_on_the_device():
    x, seed = gaussian(70, 300) * gaussian(70, 300, seed=1).exp(), torch.tensor(5)
    options = dict(rows_form="both", columns_form="both", row_stream=1, column_stream=1)
    for scheme in schemes():
        host = quantize(x, scheme, scheme, seed=seed, **options)
        device = quantize(x.cuda(), scheme, scheme, seed=seed.cuda(), **options)
        for a, b in zip(host, device, strict=True):
            assert same(a, [t if t is None else t.cpu() for t in b]), scheme
            extra = [(p, q) for p, q in zip(a[3:], b[3:], strict=True) if p is not None]
            assert all(torch.equal(p, q.cpu()) for p, q in extra), scheme


@pytest.mark.parametrize("name", ["deepseek", "int8_e4m3", "channel"])
@pytest.mark.parametrize("rows", [1, 48])
def test_float32_products_are_not_tf32(name, rows):
    """Whatever the process allows elsewhere: TF32 would leave 2^-11 of each operand."""
    torch.manual_seed(0)
    m = torch.nn.Sequential(torch.nn.Linear(256, 64, bias=False))
    nt.convert(m, RECIPES[name])
    x, dy = torch.randn(rows, 256), torch.randn(rows, 64)
    before = torch.backends.cuda.matmul.allow_tf32
    results = []
    try:
        for device in ("cpu", "cuda"):
            torch.backends.cuda.matmul.allow_tf32 = True
            leaf, layer = x.clone().to(device).requires_grad_(), m.to(device)
            layer.zero_grad()
            with ledger.recording() as log:
                y = layer(leaf)
                y.backward(dy.to(device))
            assert {row["backend"] for row in log.gemms()} == {"emulated-fp32"}
            results.append([t.detach().cpu() for t in (y, leaf.grad, layer[0].weight.grad)])
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    for a, b in zip(*results, strict=True):
        assert (a - b).abs().max() <= 2e-5 * a.abs().max()


@pytest.mark.parametrize("name", RECIPES)
def test_layers_run_on_the_device_as_on_the_host(name):
    torch.manual_seed(0)
    m = torch.nn.Sequential(torch.nn.Linear(96, 112))
    nt.convert(m, RECIPES[name])
    x, dy = torch.randn(70, 96), torch.randn(70, 112)
    seeds, results = {}, []
    for device in ("cpu", "cuda"):
        twin = nt.QuantizedLinear.from_linear(torch.nn.Linear(96, 112), RECIPES[name], "twin").to(device)
        twin.load_state_dict(m[0].state_dict())
        nt.set_progress(torch.nn.Sequential(twin), 0, 10)
        seeds[device] = twin
        leaf = x.clone().to(device).requires_grad_()
        y = twin(leaf)
        y.backward(dy.to(device))
        results.append([t.detach().cpu() for t in (y, leaf.grad, twin.weight.grad)])
    drawn = seeds["cpu"].plan.stochastic  # the devices have generators of their own
    for a, b in zip(*results, strict=True):
        assert ((a - b).norm() / a.norm()) < (0.7 if drawn else 1e-4)
