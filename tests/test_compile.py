"""torch.compile, checkpointing, and the ledger under both."""

import pytest
import torch
from mechanism_recipes import RECIPES
from torch import nn
from torch.utils.checkpoint import checkpoint

import nvfp4_train as nt
from nvfp4_train import ledger

NVFP4 = {"format": "nvfp4", "block": "1x16", "rounding": "nearest"}
GENERAL = (
    NVFP4 | {"outer": "1x32", "mask_clipped": True}, {"format": "mxfp8", "block": "1x32", "rounding": "nearest"},
    {"format": "fp8", "block": "128x128", "rounding": "stochastic"}, {"format": "fp8", "block": "tensor"},
    {"format": "int8", "block": "channel"}, NVFP4 | {"hadamard": 32, "signs": "step", "rounding": "stochastic_scale"},
)  # fmt: skip


class Block(nn.Module):
    """Projections that share an input, and a residual: what a transformer block does with its linears."""

    def __init__(self, width):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        x = x + self.q(x) * torch.sigmoid(self.k(x)) + self.v(x)
        return x + self.down(torch.relu(self.up(x)))


def model(recipe="nvidia_nvfp4", blocks=2, width=32):
    torch.manual_seed(0)
    net = nn.Sequential(*[Block(width) for _ in range(blocks)])
    nt.convert(net, recipe)
    return net


def gradients(function, net, x, seed=3):
    net.zero_grad()
    torch.manual_seed(seed)
    leaf = x.clone().requires_grad_()
    y = function(leaf)
    y.square().sum().backward()
    return [y.detach(), leaf.grad] + [p.grad.clone() for p in net.parameters()]


def same(first, second):
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_without_graph_breaks_and_with_the_same_bytes(backend):
    torch._dynamo.reset()
    net, x = model(blocks=1), torch.randn(4, 8, 32)  # inductor's C++ takes its time
    eager = gradients(net, net, x)
    compiled = torch.compile(net, fullgraph=True, backend=backend)
    with ledger.recording() as log:
        result = gradients(compiled, net, x)
    if backend == "aot_eager":
        assert same(eager, result)
    else:  # inductor fuses the float32 additions around the layers; the layers' own bytes are compared above
        for a, b in zip(eager, result, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-4)
    assert len(log.gemms()) == 5 * 3 and all(row["calls"] == 1 for row in log.gemms())


def test_two_shapes_compile_at_most_twice():
    torch._dynamo.reset()
    net = model()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(net, fullgraph=True, backend=counter)
    for tokens in (8, 24, 40, 56):
        compiled(torch.randn(tokens, 32)).sum().backward()
    assert counter.frame_count <= 2


def test_blocks_compiled_one_by_one_share_their_code():
    torch._dynamo.reset()
    net = model(blocks=12)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    for block in net:
        block.compile(fullgraph=True, backend=counter)
    net(torch.randn(8, 32)).sum().backward()
    assert counter.frame_count <= 2


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("recipe", ["nvidia_nvfp4", "forward_sr"])
def test_checkpointing_gives_the_same_gradients(recipe, reentrant):
    if recipe == "forward_sr":
        recipe = {**nt.load_recipe("nvidia_nvfp4").model_dump(by_alias=True, exclude_none=True), "name": "forward_sr"}
        recipe["fprop"]["input"]["rounding"] = "stochastic"
    net, x = model(recipe), torch.randn(4, 8, 32)

    def checkpointed(t):
        for block in net:
            t = checkpoint(block, t, use_reentrant=reentrant)
        return t

    assert same(gradients(net, net, x), gradients(checkpointed, net, x))


def test_opcheck():
    from nvfp4_train.gemm import _matmul_op
    from nvfp4_train.quantization import quantize
    from nvfp4_train.quantize_ops import amaxes_op, decode_op, quantize_op

    where, seed = len(ledger.site("opcheck")), torch.tensor(7)
    plan = nt.load_recipe("nvidia_nvfp4").plan(0.0)
    x = torch.randn(40, 33)
    pair = (plan.dgrad_grad_output, plan.wgrad_grad_output)
    torch.library.opcheck(amaxes_op, (x, *pair, seed, "reference"), test_utils=("test_schema", "test_faketensor"))
    amaxes = amaxes_op(x, *pair, seed, "reference")
    for forms in (("both", "both"), ("decoded", "packed")):
        args = (x, *pair, amaxes, seed, 2, *forms, "reference", where, "a", "b", None)
        torch.library.opcheck(quantize_op, args, test_utils=("test_schema", "test_faketensor"))
    for transpose in (False, True):
        q = quantize(x, plan.fprop_input, transpose=transpose)
        args = (q.codes, q.scale_bytes, None, q.scheme_text, q.columns, "reference")
        torch.library.opcheck(decode_op, args, test_utils=("test_schema", "test_faketensor"))
    for spec in GENERAL:  # every kind of output: float32 scales and operands, wide codes, outer scales, masks
        text = str(nt.OperandSpec(**spec).scheme)
        amaxes = amaxes_op(x, text, text, seed, "reference")
        args = (x, text, text, amaxes, seed, 2, "both", "both", "reference", where, "a", "b", None)
        torch.library.opcheck(quantize_op, args, test_utils=("test_schema", "test_faketensor"))
        for transpose in (False, True):
            q = quantize(x, text, transpose=transpose, seed=seed)
            args = (q.codes, q.scale_bytes, q.outer_amax, text, q.columns, "reference")
            torch.library.opcheck(decode_op, args, test_utils=("test_schema", "test_faketensor"))
    a = torch.randn(8, 16).bfloat16()
    args = (a, a, torch.tensor(0.5), torch.float32, where, "fprop", "bf16", "bf16", "emulated")
    torch.library.opcheck(_matmul_op, args, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("name", ["quartet", "tetrajet2", "delayed"])
def test_mechanisms_compile_without_graph_breaks(name):
    m = nn.Sequential(nn.Linear(64, 96))
    nt.convert(m, RECIPES[name])
    x, dy, results = torch.randn(32, 64), torch.randn(32, 96), []
    for run in (m, torch.compile(m, fullgraph=True, backend="aot_eager")):
        for buffer in m[0]._buffers.values():
            buffer.zero_()
        nt.set_progress(m, 0, 10)
        torch.manual_seed(1)
        m.zero_grad()
        leaf = x.clone().requires_grad_()
        y = run(leaf)
        y.backward(dy)
        results.append((y.detach(), leaf.grad, m[0].weight.grad))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
    learned = {key for key, buffer in m[0]._buffers.items() if buffer is not None and buffer[0] > 0}
    names = ("fprop_input", "fprop_weight", "dgrad_grad_output", "wgrad_grad_output", "wgrad_input")
    # (Dgrad reads Fprop's quantized weight the other way round)
    assert learned == ({f"quantizer_{key}" for key in names} if name == "delayed" else set())


def test_siblings_quantize_their_input_once_and_draw_as_in_eager():
    """q, k and v share their input; what each of them draws for its own gradient stays its own."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.o = (nn.Linear(32, 32, bias=False) for _ in range(3))

        def forward(self, x):
            return self.o(self.q(x) + self.k(x))

    torch._dynamo.reset()
    net, x = Block(), torch.randn(48, 32)
    nt.convert(net, "nvidia_nvfp4")
    eager = gradients(net, net, x)
    with ledger.recording() as log:
        compiled = gradients(torch.compile(net, fullgraph=True), net, x)
    assert same(eager, compiled)
    # row and column forms of the shared input and of o's, three weights, three gradients in both forms
    assert sum(row["calls"] for row in log.operands()) == 2 + 2 + 3 + 6
