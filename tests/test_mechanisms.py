"""Layers whose recipes split, requantize, mask or remember: against a float64 model made of the same quantizers."""

import copy

import pytest
import torch
from mechanism_recipes import RECIPES
from torch import nn

import nvfp4_train as nt
from nvfp4_kernels.reference.codecs import unpack_bits
from nvfp4_kernels.reference.hadamard import rotate_back, step_signs
from nvfp4_kernels.scheme import Scheme
from nvfp4_train import ledger
from nvfp4_train.linear_mechanisms import HOT
from nvfp4_train.quantization import BF16, STREAM, quantize

M, K, N = 70, 96, 112


def layer_of(name, bias=False):
    torch.manual_seed(0)
    m = nn.Sequential(nn.Linear(K, N, bias=bias))
    nt.convert(m, RECIPES[name])
    nt.set_progress(m, 0, 10)
    return m[0]


def tensors(seed=3):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(M, K, generator=g) + torch.linspace(-1, 2, K)
    x[:, 7] *= 20
    return x, torch.randn(M, N, generator=g) * 0.1 + 0.05


def run(layer, x, dy, seed=1):
    torch.manual_seed(seed)
    layer.zero_grad()
    x = x.clone().requires_grad_()
    y = layer(x)
    y.backward(dy)
    return y.detach(), x.grad, layer.weight.grad


class Model:
    """The three products in float64, from values that ``quantize`` gives for the operands by themselves."""

    def __init__(self, layer, x, dy, seed=1):
        torch.manual_seed(seed)
        self.key = torch.randint(0, 2**32, (), dtype=torch.int64)
        plan = layer.plan
        self.schemes = {n: None if t == BF16 else Scheme.parse(t) for n, t in plan._asdict().items()}
        self.x, self.dy, self.w = x, dy, layer.weight.detach()

    def values(self, t, name, transpose=False, hot=None):
        scheme = self.schemes[name] if hot is None else hot
        stream = STREAM[name.split("_", 1)[1]] + (0 if hot is None else HOT)
        q = quantize(t, BF16 if scheme is None else str(scheme), transpose=transpose, seed=self.key, stream=stream)
        return q.dequantize(torch.float32).double(), q.mask

    def back(self, grad, name, mask):
        scheme = self.schemes[name]
        if mask is not None:
            grad = grad * unpack_bits(mask, grad.shape[1])
        if not scheme.hadamard:
            return grad
        signs = step_signs(self.key, scheme.hadamard) if scheme.sign_mask == "step" else scheme.sign_mask
        return rotate_back(grad.float(), scheme.hadamard, signs)[:, : self.w.shape[1]].double()


def close(actual, expected, scale=None):
    scale = expected.abs().max() if scale is None else scale
    assert actual.shape == expected.shape
    assert (actual.double() - expected).abs().max() <= 2e-5 * scale


@pytest.mark.parametrize("name", ["quartet", "quartet2"])
def test_requantized_operands_come_from_what_fprop_quantized(name):
    layer, (x, dy) = layer_of(name), tensors()
    y, dx, dw = run(layer, x, dy)
    model = Model(layer, x, dy)
    x_f, x_mask = model.values(x, "fprop_input")
    w_f, w_mask = model.values(model.w, "fprop_weight")
    close(y, x_f @ w_f.T)
    dy_d, dy_w = model.values(dy, "dgrad_grad_output")[0], model.values(dy, "wgrad_grad_output", True)[0]
    wt, _ = model.values(w_f.float(), "dgrad_weight", True)
    xt, _ = model.values(x_f.float(), "wgrad_input", True)
    close(dx, model.back(dy_d @ wt.T, "fprop_input", x_mask)[:, :K])
    close(dw, model.back(dy_w @ xt.T, "fprop_weight", w_mask)[:, :K])
    assert layer.plan.dgrad_weight.count("requantized") == 1


def test_a_mask_stops_the_gradient_of_what_saturates_and_of_nothing_else():
    layer, (x, dy) = layer_of("masked_nvfp4"), tensors()
    free = copy.deepcopy(layer)
    free.plan = layer.plan._replace(**{n: t.replace(":masked=True", "") for n, t in layer.plan._asdict().items()})
    assert free.plan.simple and not layer.plan.simple
    y, dx, dw = run(layer, x, dy)
    y_free, dx_free, dw_free = run(free, x, dy)
    assert torch.equal(y, y_free)
    model = Model(layer, x, dy)
    for got, all_of_it, t, name in ((dx, dx_free, x, "fprop_input"), (dw, dw_free, model.w, "fprop_weight")):
        mask = unpack_bits(model.values(t, name)[1], K)
        rotated = nn.functional.pad(all_of_it, (0, -K % 16)).double()
        h = torch.eye(16, dtype=torch.float32).repeat(1, K // 16)
        back = lambda g: rotate_back(g.float(), 16, 0xD7E8).double()  # noqa: E731
        matrix = back(h[:, :16].float())  # what rotate_back does to unit vectors: its transpose rotates
        forward = (rotated.view(-1, 16) @ matrix.T).view(rotated.shape)
        close(got, back(forward * mask))
        assert 0 < (~mask).sum() < 0.2 * mask.numel()
    assert not torch.equal(dx, dx_free)


def test_the_mean_stays_in_high_precision():
    layer, (x, dy) = layer_of("averis"), tensors()
    y, dx, dw = run(layer, x, dy)
    model = Model(layer, x, dy)
    m, g = x.mean(0), dy.mean(0)
    r, s = x - m, dy - g
    w_f, _ = model.values(model.w, "fprop_weight")
    close(y, model.values(r, "fprop_input")[0] @ w_f.T + (w_f @ m.double()))
    wt, _ = model.values(model.w, "dgrad_weight", True)
    close(dx, model.values(s, "dgrad_grad_output")[0] @ wt.T + (wt @ g.double()))
    dyt, xt = model.values(s, "wgrad_grad_output", True)[0], model.values(r, "wgrad_input", True)[0]
    close(dw, dyt @ xt.T + M * torch.outer(g, m).double())
    constant = x * 0 + torch.linspace(-3, 3, K)  # a tensor that is all mean has no quantization error but the weight's
    close(run(layer, constant, dy)[0], constant.double() @ w_f.T)


def test_channels_apart_go_through_both_formats():
    layer, (x, dy) = layer_of("tetrajet2"), tensors()
    with ledger.recording() as log:
        y, dx, dw = run(layer, x, dy)
    model = Model(layer, x, dy)
    hot = model.schemes["fprop_input"].split.hot
    channels = x.norm(dim=0).topk(round(0.1 * K)).indices.sort().values
    assert 7 in channels
    cold, w_cold = x.index_fill(1, channels, 0), model.w.index_fill(1, channels, 0)
    x_hot, _ = model.values(x[:, channels], "fprop_input", hot=hot)
    w_hot, _ = model.values(model.w[:, channels], "fprop_weight", hot=hot)
    x_f, w_f = model.values(cold, "fprop_input")[0], model.values(w_cold, "fprop_weight")[0]
    close(y, x_f @ w_f.T + x_hot @ w_hot.T)
    x_all, w_all = x_f.index_copy(1, channels, x_hot).float(), w_f.index_copy(1, channels, w_hot).float()
    close(dx, model.values(dy, "dgrad_grad_output")[0] @ model.values(w_all, "dgrad_weight", True)[0].T)
    dyt, dyt_hot = (model.values(dy, "wgrad_grad_output", True, hot=h)[0] for h in (None, hot))
    dw_cold = dyt @ model.values(x_all.index_fill(1, channels, 0), "wgrad_input", True)[0].T
    dw_hot = dyt_hot @ model.values(x_all[:, channels], "wgrad_input", True, hot=hot)[0].T
    close(dw, dw_cold.index_copy(1, channels, dw_hot))
    texts = {(row["gemm"], row["a"]) for row in log.gemms()}
    assert ("fprop", str(hot)) in texts and ("wgrad", str(hot)) in texts and ("dgrad", str(hot)) not in texts


@pytest.mark.parametrize("name", RECIPES)
def test_every_mechanism_in_a_layer(name):
    """Odd sizes, zero tokens, dtypes, no gradient, frozen weight, one seed."""
    layer, (x, dy) = layer_of(name, bias=True), tensors()
    first, again = run(layer, x, dy), run(layer, x, dy)
    if "delayed" not in name:
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    exact = x @ layer.weight.T + layer.bias, dy @ layer.weight, dy.T @ x
    for got, want in zip(first, exact, strict=True):
        assert ((got - want).norm() / want.norm()) < 0.55
    y, dx, dw = run(layer, x[:0], dy[:0])
    assert y.shape == (0, N) and dx.shape == (0, K) and not dw.any()
    half, grad = x[:33].bfloat16(), dy[:33].bfloat16()
    y, dx, dw = run(layer, half, grad)
    assert y.dtype == dx.dtype == torch.bfloat16 and dw.dtype == torch.float32 and dx.isfinite().all()
    with torch.no_grad(), ledger.recording() as log:
        assert torch.equal(layer(x), layer(x)) or layer.plan.stochastic
    assert {row["gemm"] for row in log.gemms()} == {"fprop"}
    layer.weight.requires_grad_(False)
    leaf = x.clone().requires_grad_()
    layer(leaf).backward(dy)
    assert leaf.grad.isfinite().all()
    bad = x.clone()
    bad[3, 5] = float("nan")
    with torch.no_grad():
        assert layer(bad)[3].isnan().any()


def test_which_product_was_exact_stands_in_the_ledger():
    found = {}
    for name in ("nvidia_nvfp4", "deepseek", "int8_e4m3", "mxfp8", "tensor"):
        m = nn.Sequential(nn.Linear(K, N))
        nt.convert(m, RECIPES.get(name, name))
        with ledger.recording() as log:
            m(torch.randn(4, K))
        found[name] = {row["backend"] for row in log.gemms()}
    assert found == {
        "nvidia_nvfp4": {"emulated"}, "mxfp8": {"emulated"}, "tensor": {"emulated"}, "deepseek": {"emulated-fp32"},
        "int8_e4m3": {"emulated-fp32"},
    }  # fmt: skip


@pytest.mark.parametrize("name", ["quartet2", "rotated_everywhere", "tseng"])
def test_the_mean_gradient_is_that_of_the_exact_product(name):
    """Over draws and rotations: errors fall as 1/sqrt(n). Of quartet2's Fprop operands the quantized ones are exact."""
    layer, (x, dy) = layer_of(name), tensors()
    if name == "rotated_everywhere":
        layer.plan = layer.plan._replace(
            dgrad_grad_output=layer.plan.dgrad_grad_output.replace("nearest", "stochastic"),
            dgrad_weight=layer.plan.dgrad_weight.replace("nearest", "stochastic"),
        )
    model = Model(layer, x, dy)
    w = model.values(model.w, "fprop_weight")[0] if name == "quartet2" else model.w.double()
    want, total, errors = dy.double() @ w, 0, {}
    for n in range(1, 37):
        total = total + run(layer, x, dy, seed=n)[1].double()
        errors[n] = ((total / n - want).norm() / want.norm()).item()
    assert errors[1] / errors[9] == pytest.approx(3, rel=0.25) and errors[9] / errors[36] == pytest.approx(2, rel=0.3)


def test_copies_checkpointing_and_main_grad():
    from torch.utils.checkpoint import checkpoint

    layer, (x, dy) = layer_of("quartet2"), tensors()
    want = run(layer, x, dy)
    for a, b in zip(want, run(copy.deepcopy(layer), x, dy), strict=True):
        assert torch.equal(a, b)
    torch.manual_seed(1)
    layer.zero_grad()
    leaf = x.clone().requires_grad_()
    checkpoint(layer, leaf, use_reentrant=False).backward(dy)
    assert torch.equal(leaf.grad, want[1]) and torch.equal(layer.weight.grad, want[2])
    layer.weight.main_grad = torch.ones(N, K)
    run(layer, x, dy)
    assert layer.weight.grad is None
    torch.testing.assert_close(layer.weight.main_grad, 1 + want[2], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("option", [{"split": {"part": "mean"}}, {"requantize": True}])
def test_what_acts_in_a_layer_only_is_refused_on_a_tensor(option):
    with pytest.raises(ValueError, match="acts in a layer"):
        nt.quantize(torch.randn(4, 32), nt.OperandSpec(**option))


def test_what_is_kept_is_packed():
    layer = layer_of("quartet2")
    kept = {}

    def pack(t):
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        layer(torch.randn(512, K, requires_grad=True))
    assert sum(kept.values()) <= 0.5625 * (512 * K + N * K) + 64
