"""The layer on a GPU. ``pytest -m gpu`` there is the whole GPU suite."""

import pytest
import torch
from test_compile import gradients, model, same
from test_linear import make, run
from torch import nn
from torch.utils.checkpoint import checkpoint

import nvfp4_train as nt
from nvfp4_kernels import cublas
from nvfp4_kernels.reference import quantize as reference
from nvfp4_kernels.scheme import Scheme
from nvfp4_train import ledger

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("recipe", ["nvidia_nvfp4", "nvidia_nvfp4_1d_weights", "mxfp4"])
@pytest.mark.parametrize("sizes", [(256, 128, 384), (129, 48, 33), (5, 127, 17)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_triton_and_reference_layers_agree(recipe, sizes, dtype):
    """Same operands to the bit, so outputs differ by the order of float32 sums only: one BF16 rounding at most."""
    tokens, n_in, n_out = sizes
    triton = make(n_in, n_out, recipe, dtype=dtype).cuda()
    plain = nt.QuantizedLinear.from_linear(triton, recipe, "plain", "reference+emulated")
    assert triton.backend.quantize == "triton" and plain.backend.quantize == "reference"
    x, dy = (torch.randn(tokens, n, device="cuda", dtype=dtype) for n in (n_in, n_out))
    first = [t.clone() for t in run(triton, x, dy)]
    for a, b in zip(first, run(plain, x, dy), strict=True):
        spread = (a.float() - b.float()).abs().max() / b.float().abs().max().clamp_min(1e-30)
        assert spread <= (2**-8 if dtype == torch.bfloat16 else 1e-5)


def test_nothing_waits_for_the_device():
    net, x = model().cuda(), torch.randn(4, 8, 32, device="cuda", requires_grad=True)
    net(x).sum().backward()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        net(x).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_each_replay_of_a_cuda_graph_draws_afresh():
    layer = make(64, 64).cuda()
    x, dy = torch.randn(64, 64, device="cuda", requires_grad=True), torch.randn(64, 64, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            layer(x).backward(dy)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    x.grad = layer.weight.grad = None
    with torch.cuda.graph(graph), ledger.recording() as log:
        y = layer(x)
        y.backward(dy)
    assert {row["gemm"] for row in log.gemms()} == {"fprop", "dgrad", "wgrad"}
    results = []
    for _ in range(3):
        x.grad.zero_()
        graph.replay()
        results.append((y.clone(), x.grad.clone()))
    assert torch.equal(results[0][0], results[1][0])
    assert not torch.equal(results[0][1], results[1][1]) and not torch.equal(results[1][1], results[2][1])


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_gives_the_same_bytes(mode):
    torch._dynamo.reset()
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(6)]).cuda().bfloat16()
    nt.convert(net, "nvidia_nvfp4")
    x = torch.randn(128, 64, device="cuda", dtype=torch.bfloat16)
    eager = gradients(net, net, x)
    compiled = torch.compile(net, fullgraph=True, mode=mode)
    for _ in range(3):
        result = [t.clone() for t in gradients(compiled, net, x)]
    assert same(eager, result)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing(reentrant):
    net, x = model().cuda(), torch.randn(4, 8, 32, device="cuda")

    def checkpointed(t):
        for block in net:
            t = checkpoint(block, t, use_reentrant=reentrant)
        return t

    assert same(gradients(net, net, x), gradients(checkpointed, net, x))


@pytest.mark.parametrize("shape", [(512, 384, 1024), (131, 77, 33), (1, 8, 16), (7, 1, 5), (264, 8, 1)])
@pytest.mark.parametrize("a_turned", [True, False])
@pytest.mark.parametrize("b_turned", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_scale_enters_before_the_one_rounding(shape, a_turned, b_turned, dtype):
    """Sums of small integers are exact in float32, so the result is known to the bit."""
    m, n, k = shape

    def operand(rows, turned):
        x = torch.randint(-63, 64, (k, rows) if turned else (rows, k), device="cuda").to(torch.bfloat16)
        return x.T if turned else x

    a, b, alpha = operand(m, a_turned), operand(n, b_turned), torch.rand((), device="cuda") * 0.01
    exact = (a.double() @ b.double().T).float()
    assert torch.equal(cublas.scaled_matmul(a, b, alpha, dtype), (exact * alpha).to(dtype))
    assert torch.equal(cublas.scaled_matmul(a, b, None, dtype), exact.to(dtype))
    if dtype == torch.float32:
        start = torch.randn(m, n, device="cuda")
        total = cublas.scaled_matmul(a, b, alpha, dtype, start.clone())
        torch.testing.assert_close(total, start + exact * alpha, rtol=2e-7, atol=1e-5)  # may be one fused add


def test_main_grad_accumulates_in_float32():
    layer = make(128, 64, "nvidia_nvfp4_no_sr", dtype=torch.bfloat16).cuda()
    x, dy = (torch.randn(256, n, device="cuda", dtype=torch.bfloat16) for n in (128, 64))
    layer.weight.main_grad = torch.zeros(64, 128, device="cuda")
    run(layer, x, dy)
    once = layer.weight.main_grad.clone()
    run(layer, x, dy)
    torch.testing.assert_close(layer.weight.main_grad, 2 * once, rtol=1e-6, atol=0)


def test_more_than_two_to_the_31_elements():
    from nvfp4_kernels.triton import quantize as triton_kernels

    rows, columns = 2**31 // 8192 + 16, 8192
    x = torch.zeros(rows, columns, device="cuda", dtype=torch.bfloat16)
    x[-16:] = torch.randn(16, columns, device="cuda").bfloat16()
    amax = x[-16:].abs().max().float()
    scheme = Scheme()
    (whole, _), (tail, _) = (
        triton_kernels.quantize(x, scheme, None, amax_rows=amax),
        reference.quantize(x[-16:].cpu(), scheme, None, amax_rows=amax.cpu()),
    )
    assert torch.equal(whole.codes[-16:].cpu(), tail.codes) and torch.equal(whole.scales[-16:].cpu(), tail.scales)
    assert torch.equal(triton_kernels.global_amax(x, scheme, None)[0], amax)


def test_a_recorded_step_computes_what_the_step_computes():
    """Weights after several steps of two microbatches, a change of plan among them: bitwise."""
    from nvfp4_train.experiment.graphs import Replayed

    def train(graphs: bool) -> list[torch.Tensor]:
        torch.manual_seed(3)
        net = nn.Sequential(*[nn.Linear(64, 64) for _ in range(3)]).cuda()
        nt.convert(net, "nvidia_nvfp4_late_fprop")
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

        def accumulate(x):
            loss = net(x).square().mean()
            loss.backward()
            return loss.detach()

        run = Replayed(accumulate, net.parameters()) if graphs else lambda x, plan: accumulate(x)
        batches = torch.randn(12, 32, 64, generator=torch.Generator().manual_seed(1)).cuda()
        torch.cuda.manual_seed(7)
        losses = []
        for step in range(6):
            nt.set_progress(net, step, 6)
            losses += [run(batch, net[0].plan) for batch in batches[2 * step : 2 * step + 2]]
            optimizer.step()
            optimizer.zero_grad(set_to_none=not graphs)
        return [*losses, *(p.detach().clone() for p in net.parameters())]

    assert all(torch.equal(a, b) for a, b in zip(train(False), train(True), strict=True))
