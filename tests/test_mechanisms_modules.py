"""Recipes that do more than quantize two operands, in modules that are no nn.Linear: the numbers are an nn.Linear's."""

import copy

import pytest
import torch
from mechanism_recipes import HOT, RECIPES
from torch import nn

import nvfp4_train as nt
from nvfp4_train import linear
from nvfp4_train.experts import QuantizedExperts, expert_seeds

torch.set_num_threads(1)
IN, OUT, HIDDEN, INNER = 48, 80, 32, 24

REMEMBERING = {
    "delayed": RECIPES["delayed"],
    "observed": copy.deepcopy(RECIPES["tetrajet2"]) | {"name": "observed"},
    "oscillation": RECIPES["channel"] | {"name": "oscillation", "oscillation_reset": {
        "every": 100, "window": 2, "ratio": 1e-9,
    }},
}  # fmt: skip
for gemm in ("fprop", "wgrad"):
    REMEMBERING["observed"][gemm]["input"]["split"] = HOT | {"observe": [0, 1]}
STATELESS = {name: recipe for name, recipe in RECIPES.items() if name not in REMEMBERING}


def conv_and_linear(recipe):
    pytest.importorskip("transformers")
    from transformers.pytorch_utils import Conv1D

    torch.manual_seed(0)
    m = nn.ModuleDict({"conv": Conv1D(OUT, IN), "linear": nn.Linear(IN, OUT)})
    with torch.no_grad():
        m["conv"].weight.mul_(8)
        m["linear"].weight.copy_(m["conv"].weight.T)
        m["linear"].bias.copy_(m["conv"].bias.uniform_())
    assert nt.convert(m, recipe).converted == ["conv", "linear"]
    return m


@pytest.mark.parametrize("recipe", [*STATELESS.values(), *REMEMBERING.values()], ids=lambda recipe: recipe["name"])
def test_conv1d_is_the_linear_layer_of_its_transposed_weight(recipe):
    m = conv_and_linear(recipe)
    generator = torch.Generator().manual_seed(5)
    batches = [torch.randn(2, 21, IN, generator=generator) * 2**step + 0.3 for step in range(4)]
    resets = []
    for step, batch in enumerate(batches):
        nt.set_progress(m, step, 8)
        results = []
        for name in ("conv", "linear"):
            torch.manual_seed(step)
            m.zero_grad()
            x = batch.clone().requires_grad_()
            y = m[name](x)
            y.square().sum().backward()
            weight = m[name].weight.grad
            results.append((y, x.grad, weight.T if name == "conv" else weight, m[name].bias.grad))
            with torch.no_grad():
                m[name].weight -= 1e-6 * weight
        for one, two in zip(*results, strict=True):
            assert torch.equal(one, two), step
        resets.append(nt.after_optimizer_step(m, step, 8))
        assert torch.equal(m["conv"].weight.T, m["linear"].weight)
    assert (resets[2] > 0) == (recipe["name"] == "oscillation")
    state = nt.quantizer_state(m)
    assert bool(state) == (recipe["name"] in ("delayed", "observed"))
    kept = [[torch.as_tensor(value) for value in layer.values()] for layer in state.values()]
    assert all(torch.equal(one, two) for one, two in zip(*kept, strict=True))
    assert not state or sum(value.any() for value in kept[0]) >= 3  # histories or norms, channels, and the step


def test_what_a_conv1d_remembers_is_copied_and_restored():
    recipe = RECIPES["delayed"]
    m = conv_and_linear(recipe)
    nt.set_progress(m, 0, 8)
    m["conv"](torch.randn(5, IN)).sum().backward()
    twin, other = copy.deepcopy(m), conv_and_linear(recipe)
    nt.load_quantizer_state(other, nt.quantizer_state(m))
    nt.set_progress(m, 1, 8)
    x = torch.randn(5, IN) * 100  # saturates at what the step before saw
    wanted = m["conv"](x)
    for again in (twin, other):
        nt.set_progress(again, 1, 8)
        assert torch.equal(again["conv"](x), wanted)
    assert list(m["conv"].state_dict()) == ["weight", "bias"]


@pytest.mark.parametrize("recipe", STATELESS.values(), ids=STATELESS)
def test_experts_are_a_loop_of_linear_layers(recipe, monkeypatch):
    """One QuantizedLinear an expert and product, on the tokens routed to it; the keys of its draws are the expert's."""
    torch.manual_seed(0)
    experts = QuantizedExperts(4, HIDDEN, INNER, recipe=recipe)
    index = torch.tensor([(0, 1), (1, 3), (0, 3), (3, 1), (1, 0)] * 5)  # nothing for expert 2
    share = torch.rand(25, 2)
    x = torch.randn(25, HIDDEN) + torch.linspace(-1, 1, HIDDEN)

    got_x = x.clone().requires_grad_()
    torch.manual_seed(3)
    got = experts(got_x, index, share)
    got.square().sum().backward()

    torch.manual_seed(3)
    seeds = [expert_seeds(torch.randint(0, 2**32, (), dtype=torch.int64), 4) for _ in range(2)]
    wanted_x, wanted = x.clone().requires_grad_(), torch.zeros_like(x)
    layers = {}
    for e in (0, 1, 3):
        pair = []
        for call, weight in enumerate((experts.gate_up_proj, experts.down_proj)):
            layer = nt.QuantizedLinear(weight.shape[2], weight.shape[1], bias=False, recipe=recipe)
            layer.weight = nn.Parameter(weight[e].detach().clone())
            pair.append((layer, seeds[call][e]))
        token, place = torch.where(index == e)
        h = wanted_x[token]
        for layer, seed in pair:
            monkeypatch.setattr(linear, "draw_seed", lambda *_, seed=seed: seed)
            h = layer(h)
            if layer is pair[0][0]:
                h = nn.functional.silu(h[:, :INNER]) * h[:, INNER:]
        wanted = wanted.index_add(0, token, h * share[token, place].unsqueeze(-1))
        layers[e] = [layer for layer, _ in pair]
    wanted.square().sum().backward()
    for key, call in (("gate_up_proj", 0), ("down_proj", 1)):  # same sums in the same order: same bits
        grads = getattr(experts, key).grad
        assert not grads[2].any()
        for e, pair in layers.items():
            assert torch.equal(grads[e], pair[call].weight.grad) and grads[e].any(), (key, e)
    torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6)  # a token's two experts are added in another order
    torch.testing.assert_close(got_x.grad, wanted_x.grad, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("recipe", STATELESS.values(), ids=STATELESS)
def test_experts_without_any_token_get_zero_gradients(recipe):
    experts = QuantizedExperts(3, HIDDEN, INNER, recipe=recipe)
    y = experts(torch.zeros(0, HIDDEN), torch.zeros(0, 2, dtype=torch.long), torch.zeros(0, 2))
    y.sum().backward()
    assert y.shape == (0, HIDDEN)
    assert not experts.gate_up_proj.grad.any() and not experts.down_proj.grad.any()


@pytest.mark.parametrize(
    "name, kept",
    [
        ("delayed", "amaxes of the steps before"),
        ("observed", "norms of channels"),
        ("oscillation", "moves of each weight"),
    ],
)
def test_experts_refuse_a_recipe_that_remembers_and_say_what(name, kept):
    with pytest.raises(ValueError, match=f"^mlp.experts: recipe {name} keeps {kept} from step to step"):
        QuantizedExperts(3, HIDDEN, INNER, recipe=REMEMBERING[name], label="mlp.experts")
