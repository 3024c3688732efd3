"""What the gradients of a recipe with several mechanisms are the gradients of, by their mean over many calls.

A recipe that requantizes promises that, over the draws, Dgrad multiplies with the weight that Fprop used and Wgrad with
its input. So the mean of dx is dy times Fprop's quantized weight, and not dy times the weight; and so for dw.
"""

import pytest
import torch
from test_recipes_errors import table

import nvfp4_train as nt
from nvfp4_train.operand import OperandSpec

torch.set_num_threads(1)
M, K, N, CALLS = 128, 128, 128, 100
SEED = torch.tensor(0)


def tensors():
    generator = torch.Generator().manual_seed(3)
    x, w, dy = (torch.randn(*size, generator=generator) for size in ((M, K), (N, K), (M, N)))
    return x * (0.25 + torch.rand(K, generator=generator)), 0.1 * w, dy


def layer_of(recipe, w):
    layer = nt.QuantizedLinear(K, N, bias=False, recipe=recipe)
    with torch.no_grad():
        layer.weight.copy_(w)
    return layer


def mean_gradients(recipe, x, w, dy):
    """float64 means of dx and dw over CALLS calls, and y of the last."""
    layer = layer_of(recipe, w)
    torch.manual_seed(5)
    dx, dw = torch.zeros(M, K, dtype=torch.float64), torch.zeros(N, K, dtype=torch.float64)
    for _ in range(CALLS):
        leaf = x.clone().requires_grad_()
        layer.weight.grad = None
        y = layer(leaf)
        y.backward(dy)
        dx += leaf.grad
        dw += layer.weight.grad
    return dx / CALLS, dw / CALLS, y.detach().double()


def fprop_operands(recipe, x, w):
    """float64: the values of Fprop's operands before any rotation; the weight is split as the input is."""
    x_spec, w_spec = recipe.fprop.input, recipe.fprop.weight
    wq = table.quantized(w, w_spec, SEED)
    if x_spec.split is not None and x_spec.split.part == "channels":
        hot = table.hot_channels(x, x_spec)
        apart = table.quantized(w[:, hot].contiguous(), OperandSpec(**x_spec.split.spec.to_dict()), SEED)
        wq = table.quantized(w.index_fill(1, hot, 0.0), w_spec, SEED).index_copy(1, hot, apart)
    return table.quantized(x, x_spec, SEED), wq


@pytest.mark.parametrize("name", ["quartet2", "tetrajet2", "fp4_all_the_way"])
def test_the_backward_pass_belongs_to_fprops_operands(name):
    recipe = nt.load_recipe(name)
    if name == "tetrajet2":  # with its hot channels, chosen in each call
        as_dict = recipe.to_dict()
        del as_dict["fprop"]["input"]["split"]["observe"]
        recipe = nt.load_recipe(as_dict)
    x, w, dy = tensors()
    dx, dw, y = mean_gradients(recipe, x, w, dy)
    xq, wq = fprop_operands(recipe, x, w)
    assert table.relative(y, xq @ wq.T) < 1e-5
    requantized = recipe.dgrad.weight.requantize
    weight, activation = (wq, xq) if requantized else (w.double(), x.double())
    noise = 0.25 / CALLS**0.5  # of the mean: two operands of about 0.1 to 0.17
    near_dx, near_dw = table.relative(dx, dy.double() @ weight), table.relative(dw, dy.double().T @ activation)
    if requantized:
        assert near_dx < noise + 0.03 and near_dw < noise + 0.03
        assert table.relative(dx, dy.double() @ w.double()) > 2 * near_dx
        assert table.relative(dw, dy.double().T @ x.double()) > 2 * near_dw
    else:  # Dgrad's weight is rounded to nearest along N; Wgrad's operands are both unbiased
        assert near_dw < noise + 0.02 < near_dx


def test_quartet_masks_in_the_rotated_space():
    recipe = nt.load_recipe("quartet")
    x, w, dy = tensors()
    dx, dw, y = mean_gradients(recipe, x, w, dy)
    xq, wq = fprop_operands(recipe, x, w)
    assert table.relative(y, xq @ wq.T) < 1e-5
    hadamard = torch.ones(1, 1, dtype=torch.float64)
    while len(hadamard) < 32:
        hadamard = torch.cat((torch.cat((hadamard, hadamard), 1), torch.cat((hadamard, -hadamard), 1)))
    hadamard /= 32**0.5

    def rotated(t):
        return (t.reshape(-1, 32) @ hadamard).view(t.shape)  # its own inverse

    def kept(t):
        """1 where an element does not saturate: QuEST's scale is the block's own spread."""
        blocks = rotated(t.double()).bfloat16().double().view(-1, 32)
        scale = torch.exp2((2.92247856 / 6 * blocks.std(1, correction=0, keepdim=True)).log2().floor())
        return (blocks.abs() <= 6 * scale).double().view(t.shape)

    assert 0.7 < kept(x).mean() < 0.999
    wanted_dx = rotated(rotated(dy.double() @ wq) * kept(x))
    wanted_dw = rotated(rotated(dy.double().T @ xq) * kept(w))
    noise = 0.3 / CALLS**0.5
    assert table.relative(dx, wanted_dx) < noise + 0.02 and table.relative(dw, wanted_dw) < noise + 0.02
    assert table.relative(dx, dy.double() @ wq) > 2 * table.relative(dx, wanted_dx)


def test_averis_splits_the_means():
    recipe = nt.load_recipe("averis")
    x, w, dy = tensors()
    x, dy = x + 10.0 * torch.randn(1, K, generator=torch.Generator().manual_seed(1)), dy + 2.0
    dx, dw, y = mean_gradients(recipe, x, w, dy)
    xq, wq = fprop_operands(recipe, x, w)
    assert table.relative(y, xq @ wq.T) < 1e-4
    assert table.relative(dx, dy.double() @ wq) < 0.02
    means = M * torch.outer(dy.double().mean(0), x.double().mean(0))
    residual = (dy.double() - dy.double().mean(0)).T @ (xq - x.double().mean(0))
    assert table.relative(dw, means + residual) < 0.02
    whole = layer_of("nvidia_nvfp4_no_rht", w)(x).double()
    exact = x.double() @ wq.T
    assert table.relative(y, exact) < 0.2 * table.relative(whole, exact)  # what the split is for
