"""The layer: its three GEMMs against a float64 model of the very operands that ran, and what users do to layers."""

import copy
import pickle

import pytest
import torch
from torch import nn

import nvfp4_train as nt
from nvfp4_train import ledger
from nvfp4_train.linear import STREAM
from nvfp4_train.quantization import quantize

SIZES = [1, 15, 16, 17, 33, 127, 129]
NEAREST = "nvidia_nvfp4_no_sr"


def make(n_in, n_out, recipe="nvidia_nvfp4", bias=False, dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    return nt.QuantizedLinear(n_in, n_out, bias=bias, dtype=dtype, recipe=recipe)


def run(layer, x, dy, seed=1):
    """Output and gradients of one call whose randomness is ``seed``."""
    torch.manual_seed(seed)
    layer.zero_grad()
    x = x.detach().requires_grad_()
    y = layer(x)
    y.backward(dy)
    return y.detach(), x.grad, layer.weight.grad


def float64_model(layer, x, dy, seed=1):
    """The same three products from the same quantized operands, in float64."""
    torch.manual_seed(seed)
    key = torch.randint(0, 2**32, (), dtype=torch.int64)
    plan = layer.plan

    def operand(t, scheme, name, transpose=False):
        q = quantize(t, scheme, transpose=transpose, seed=key, stream=STREAM[name])
        return q.dequantize(torch.float32).double()

    weight = layer.weight.detach()
    y = operand(x, plan.fprop_input, "input") @ operand(weight, plan.fprop_weight, "weight").T
    dx = operand(dy, plan.dgrad_grad_output, "grad_output") @ operand(weight, plan.dgrad_weight, "weight", True).T
    dyt = operand(dy, plan.wgrad_grad_output, "grad_output", True)
    dw = dyt @ operand(x, plan.wgrad_input, "input", True).T
    return y, dx, dw


def close(actual, expected, reduction, scale=None):
    """float32 sums of ``reduction`` products, and one rounding of the factors: a few units of 2**-24 a term."""
    scale = expected.abs().max() if scale is None else scale
    return (actual.double() - expected).abs().max() <= (reduction + 8) * 2**-22 * scale


@pytest.mark.parametrize("recipe", ["nvidia_nvfp4", "nvidia_nvfp4_no_rht", "nvidia_nvfp4_1d_weights", "mxfp4"])
def test_products_equal_a_float64_model_of_the_operands(recipe):
    layer = make(48, 80, recipe)
    x, dy = torch.randn(64, 48), torch.randn(64, 80)
    for actual, expected, terms in zip(run(layer, x, dy), float64_model(layer, x, dy), (48, 80, 64), strict=True):
        assert close(actual, expected, terms)


@pytest.mark.parametrize("n_in", SIZES)
@pytest.mark.parametrize("n_out", SIZES)
@pytest.mark.parametrize("tokens", [1, 17, 33])
def test_every_size(n_in, n_out, tokens):
    layer = make(n_in, n_out)
    x, dy = torch.randn(tokens, n_in), torch.randn(tokens, n_out)
    y, dx, dw = run(layer, x, dy)
    assert y.shape == (tokens, n_out) and dx.shape == x.shape and dw.shape == layer.weight.shape
    for actual, expected, terms in zip((y, dx), float64_model(layer, x, dy), (n_in, n_out), strict=False):
        assert close(actual, expected, terms, scale=1e-6 + expected.abs().max())
    # the Hadamard transform of both Wgrad operands cancels: what is left is quantization error
    exact = dy.double().T @ x.double()
    error = (dw.double() - exact).norm() / (dy.norm() * x.norm()).double()
    assert error < 0.25


def test_one_rounding_to_bfloat16():
    layer = make(64, 64, NEAREST)
    x = torch.randn(32, 64, dtype=torch.bfloat16)
    y, _, _ = run(layer, x, torch.randn(32, 64).bfloat16())
    x_q = quantize(x, layer.plan.fprop_input, form="both")
    w_q = quantize(layer.weight.detach(), layer.plan.fprop_weight, form="both")
    alpha = (x_q.global_amax * w_q.global_amax) * (1.0 / (36.0 * 448.0 * 448.0))
    accumulated = (x_q.operand.double() @ w_q.operand.double().T).float()  # exact: few bits, few terms
    assert torch.equal(y, (accumulated * alpha).to(torch.bfloat16))


def test_bias():
    layer, plain = make(32, 24, NEAREST, bias=True), make(32, 24, NEAREST)
    plain.weight.data.copy_(layer.weight.data)
    x, dy = torch.randn(8, 32), torch.randn(8, 24)
    torch.testing.assert_close(run(layer, x, dy)[0], run(plain, x, dy)[0] + layer.bias.detach(), rtol=0, atol=0)
    assert torch.equal(layer.bias.grad, dy.sum(0))


@pytest.mark.parametrize("shape", [(48,), (6, 48), (2, 3, 48), (2, 1, 3, 48)])
def test_leading_dimensions(shape):
    layer = make(48, 32)
    x = torch.randn(shape)
    dy = torch.randn(*shape[:-1], 32)
    y, dx, dw = run(layer, x, dy)
    flat_y, flat_dx, flat_dw = run(layer, x.reshape(-1, 48), dy.reshape(-1, 32))
    assert torch.equal(y.reshape(-1, 32), flat_y) and torch.equal(dx.reshape(-1, 48), flat_dx)
    assert torch.equal(dw, flat_dw)


def test_zero_tokens():
    layer = make(48, 32, bias=True)
    y, dx, dw = run(layer, torch.randn(0, 48), torch.randn(0, 32))
    assert y.shape == (0, 32) and dx.shape == (0, 48)
    assert torch.equal(dw, torch.zeros(32, 48)) and torch.equal(layer.bias.grad, torch.zeros(32))


@pytest.mark.parametrize("tokens", [5, 16, 40])
def test_appended_zero_rows_change_nothing(tokens):
    layer = make(40, 24)
    x, dy = torch.randn(tokens, 40), torch.randn(tokens, 24)
    y, dx, dw = run(layer, x, dy)
    pad = 32 - tokens % 16
    y2, dx2, dw2 = run(layer, torch.cat([x, torch.zeros(pad, 40)]), torch.cat([dy, torch.zeros(pad, 24)]))
    assert torch.equal(y, y2[:tokens]) and torch.equal(dx, dx2[:tokens])
    assert not y2[tokens:].any()
    # stochastic draws included: they are counted by element. Only the order of the float32 sums may differ
    torch.testing.assert_close(dw, dw2, rtol=0, atol=float(dw.abs().max()) * 2**-20)


def test_fresh_memory_full_of_nan_changes_nothing(monkeypatch):
    layer = make(48, 32)
    x, dy = torch.randn(5, 48), torch.randn(5, 32)
    before = run(layer, x, dy)
    real_empty, real_empty_like, real_new_empty = torch.empty, torch.empty_like, torch.Tensor.new_empty

    def poisoned(make_tensor):
        def make(*args, **kwargs):
            t = make_tensor(*args, **kwargs)
            return t.fill_(float("nan")) if t.is_floating_point() else t.fill_(77)

        return make

    monkeypatch.setattr(torch, "empty", poisoned(real_empty))
    monkeypatch.setattr(torch, "empty_like", poisoned(real_empty_like))
    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned(real_new_empty))
    for a, b in zip(before, run(layer, x, dy), strict=True):
        assert torch.equal(a, b)


def test_transposed_input_and_stride_zero_gradient():
    layer = make(48, 32)
    x = torch.randn(48, 20).T
    torch.manual_seed(1)
    leaf = x.detach().requires_grad_()
    layer(leaf).sum().backward()
    _, dx, dw = run(layer, x.contiguous(), torch.ones(20, 32))
    assert torch.equal(leaf.grad, dx) and torch.equal(layer.weight.grad, dw)


def test_frozen_weight_does_no_wgrad_work():
    layer = make(48, 32)
    x, dy = torch.randn(16, 48), torch.randn(16, 32)
    _, dx, _ = run(layer, x, dy)
    layer.weight.requires_grad_(False)
    with ledger.recording() as log:
        _, dx_frozen, dw = run(layer, x, dy)
    assert dw is None and torch.equal(dx, dx_frozen)
    assert {row["gemm"] for row in log.gemms()} == {"fprop", "dgrad"}
    assert not any(row["operand"].startswith("wgrad") for row in log.operands())


def test_gradients_off_does_no_backward_work():
    layer = make(48, 32)
    with torch.no_grad(), ledger.recording() as log:
        layer(torch.randn(4, 48))
    assert [row["operand"] for row in log.operands()] == ["fprop.input", "fprop.weight"]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("recipe", ["nvidia_nvfp4", "mxfp4"])
def test_non_finite_input_comes_out(recipe, value):
    layer = make(64, 32, recipe)
    x = torch.randn(8, 64)
    x[3, 5] = value
    y, _, dw = run(layer, x, torch.randn(8, 32))
    assert not torch.isfinite(y[3]).any() and not torch.isfinite(dw).all()


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_relative_error_does_not_depend_on_magnitude(scale):
    layer = make(64, 32, NEAREST)
    x, dy = torch.randn(8, 64), torch.randn(8, 32)
    exponent = 2.0 ** round(torch.log2(torch.tensor(scale)).item())
    small, one = run(layer, x * exponent, dy), run(layer, x, dy)
    assert torch.equal(small[0], one[0] * exponent)


def test_same_seed_reproduces_and_another_differs():
    layer = make(48, 32)
    x, dy = torch.randn(16, 48), torch.randn(16, 32)
    first, again, other = run(layer, x, dy, 1), run(layer, x, dy, 1), run(layer, x, dy, 2)
    assert torch.equal(first[1], again[1]) and torch.equal(first[2], again[2])
    assert not torch.equal(first[1], other[1]) and torch.equal(first[0], other[0])


def test_a_layer_called_twice_draws_twice():
    layer = make(48, 48)
    x = torch.randn(16, 48)
    torch.manual_seed(1)
    a = x.clone().requires_grad_()
    b = x.clone().requires_grad_()
    (layer(a) + layer(b)).backward(torch.randn(16, 48))
    assert not torch.equal(a.grad, b.grad)


def test_stochastic_gradients_average_to_the_exact_product():
    """Error falls as 1/sqrt(n): rounding to nearest cannot pass."""
    layer = make(32, 32)
    torch.manual_seed(5)
    x, dy = torch.randn(32, 32), torch.rand(32, 32) * 0.5 + 0.1
    dy[:, ::16] = 4.0  # keeps the block's top element off the clamp's bias: 4 is a grid point of every block
    w_q = quantize(layer.weight.detach(), layer.plan.fprop_weight).dequantize().double()
    exact = dy.double() @ w_q
    errors, total = {}, torch.zeros(32, 32, dtype=torch.float64)
    for n in range(1, 257):
        total += run(layer, x, dy, seed=n)[1].double()
        if n in (1, 16, 256):
            errors[n] = ((total / n - exact).norm() / exact.norm()).item()
    assert 2.5 < errors[1] / errors[16] < 6.5 and 2.5 < errors[16] / errors[256] < 6.5


def test_float32_main_grad_accumulates():
    layer = make(48, 32, NEAREST, dtype=torch.bfloat16)
    x, dy = torch.randn(16, 48), torch.randn(16, 32)
    _, _, once = run(copy.deepcopy(layer).float(), x, dy)
    layer.weight.main_grad = torch.ones(32, 48)
    run(layer, x, dy)
    assert layer.weight.grad is None
    torch.testing.assert_close(layer.weight.main_grad, 1 + once, rtol=1e-6, atol=1e-6)


def test_what_is_kept_for_backward_is_packed():
    layer = make(256, 512, "nvidia_nvfp4")
    sizes = {}

    def pack(t):
        sizes[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        layer(torch.randn(1024, 256, requires_grad=True))
    # 0.5625 bytes an element of x (1x16), 0.5039 of w (16x16), and a few scalars
    assert sum(sizes.values()) <= 0.5625 * 1024 * 256 + 0.504 * 256 * 512 + 64


@pytest.mark.parametrize("bias", [True, False])
def test_state_dict_is_that_of_linear(bias):
    layer, linear = make(48, 32, bias=bias), nn.Linear(48, 32, bias=bias)
    assert list(layer.state_dict()) == list(linear.state_dict())
    layer.load_state_dict(linear.state_dict(), strict=True)
    linear.load_state_dict(layer.state_dict(), strict=True)


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_compute_the_same(clone):
    layer = make(48, 32)
    twin = clone(layer)
    x, dy = torch.randn(16, 48), torch.randn(16, 32)
    for a, b in zip(run(layer, x, dy), run(twin, x, dy), strict=True):
        assert torch.equal(a, b)


DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("x_dtype", DTYPES)
@pytest.mark.parametrize("w_dtype", DTYPES)
@pytest.mark.parametrize("autocast", [True, False])
def test_dtypes(x_dtype, w_dtype, autocast):
    layer = make(48, 32, bias=True, dtype=w_dtype)
    x = torch.randn(16, 48).to(x_dtype).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = layer(x)
    assert y.dtype == (torch.bfloat16 if autocast else x_dtype)
    y.float().sum().backward()
    assert x.grad.dtype == x_dtype and layer.weight.grad.dtype == w_dtype
    assert x.grad.isfinite().all() and layer.weight.grad.isfinite().all()


def test_autocast_does_not_reach_the_products():
    layer = make(64, 32, NEAREST)
    x, dy = torch.randn(16, 64).bfloat16().float(), torch.randn(16, 32).bfloat16()
    outside = run(layer, x, dy.float())
    torch.manual_seed(1)
    layer.zero_grad()
    leaf = x.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(leaf)
        y.backward(dy)
    assert torch.equal(y, outside[0].bfloat16())
    assert torch.equal(leaf.grad, outside[1].bfloat16().float()) and torch.equal(layer.weight.grad, outside[2])


def test_autocast_casts_the_input_first_as_in_linear():
    """What is quantized is what the BF16 control would multiply: the input in autocast's dtype."""
    layer, x, dy = make(64, 32, NEAREST), torch.randn(16, 64), torch.randn(16, 32)
    whole = run(layer, x.bfloat16(), dy.bfloat16())
    torch.manual_seed(1)
    layer.zero_grad()
    leaf = x.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(leaf)
    y.backward(dy.bfloat16())
    assert torch.equal(y, whole[0]) and torch.equal(leaf.grad, whole[1].float())
    assert torch.equal(layer.weight.grad, whole[2])


def test_errors_name_the_layer_and_the_remedy():
    layer = make(48, 32)
    with pytest.raises(ValueError, match="in_features is 48"):
        layer(torch.randn(4, 32))
    with pytest.raises(ValueError, match="float64"):
        layer(torch.randn(4, 48, dtype=torch.float64))
    with pytest.raises(ValueError, match="choose from"):
        nt.QuantizedLinear(16, 16, backend="trition")
    with pytest.raises(ValueError, match="emulated"):
        nt.QuantizedLinear(16, 16, backend="native")
    with pytest.raises(ValueError, match="matrix"):
        nt.quantize(torch.randn(2, 3, 16), nt.OperandSpec(format="nvfp4", block="1x16", rounding="nearest"))


def test_public_quantize_and_matmul():
    spec = nt.OperandSpec(format="nvfp4", block="1x16", rounding="nearest")
    a, b = torch.randn(24, 64), torch.randn(40, 64)
    a_q, b_q = nt.quantize(a, spec), nt.quantize(b, spec)
    assert a_q.codes.shape == (24, 32) and a_q.codes.dtype == torch.uint8
    assert a_q.block_scales.shape == (24, 4) and a_q.block_scales.dtype == torch.float8_e4m3fn
    assert a_q.global_amax.shape == () and a_q.global_amax == a.abs().max()
    y = nt.matmul(a_q, b_q, out_dtype=torch.float32)
    expected = a_q.dequantize(torch.float32).double() @ b_q.dequantize(torch.float32).double().T
    assert close(y, expected, 64)
    with pytest.raises(ValueError, match="one K"):
        nt.matmul(a_q, nt.quantize(torch.randn(40, 32), spec))
    with pytest.raises(ValueError, match="quantized anew"):
        _ = a_q.T
