"""The ranking of layers: what each GEMM costs alone and all three together, also where only backward suffers."""

import pytest
import torch
import yaml
from audit_faults import Model, microbatches, model
from torch import nn

import nvfp4_train as nt
from nvfp4_train.auditing import sensitivity
from nvfp4_train.auditing.sensitivity import rank_layers, told
from nvfp4_train.conversion import converted_layers

SIZE, TOKENS, SPIKE = 32, 48, 100.0
GRID = torch.tensor([0.5, 1.0, 1.5, 2.0, 3.0, 4.0])  # of E2M1, whose largest is 6


def ranked(net, losses, **options):
    return rank_layers(net, losses, nt.audit(net, losses).coverage, **options)


def by_layer(found):
    return {row["layer"]: row for row in found["layers"]}


def plans_of(net):
    return {name: layer.plan for name, layer in converted_layers(net).items()}


def bf16_but(plan, *gemms):
    return type(plan)(*[text if field[:5] in gemms else "bf16" for field, text in plan._asdict().items()])


def test_layers_are_ranked_by_what_they_add_to_the_loss():
    net = model("nvidia_nvfp4")
    losses, plans = microbatches(net), plans_of(net)
    found = ranked(net, losses, budget=0.5)

    def loss(quantized):
        for name, layer in converted_layers(net).items():
            layer.plan = bf16_but(plans[name], *(["fprop"] if name in quantized else []))
        torch.manual_seed(0)
        with torch.no_grad():
            return sum(float(one()) for one in losses) / 2

    rows = found["layers"]
    assert found["loss_bf16"] == loss(()) and 0 < found["step"]["gained"] < loss(())
    assert {row["layer"]: row["fprop"] for row in rows} == {name: loss((name,)) - loss(()) for name in plans}
    assert [row["added"] for row in rows] == sorted((row["added"] for row in rows), reverse=True)
    assert all(row["dgrad_error"] > 0 and row["wgrad_error"] > 0 for row in rows)
    assert {row["layer"]: row["flops"] for row in rows} == pytest.approx(
        {"layers.0.query": 1 / 6, "layers.0.key": 1 / 6, "layers.0.up": 1 / 3, "layers.0.down": 1 / 3}
    )
    kept = yaml.safe_load(found["keep_bf16"])["keep_bf16"]["modules"]
    assert kept and sum(row["flops"] for row in rows if row["layer"] in kept) <= 0.5 + 1e-9
    recipe = nt.load_recipe("nvidia_nvfp4").to_dict() | {"keep_bf16": {"modules": [*kept, "lm_head"]}}
    assert set(nt.convert(Model(), recipe).converted) == set(plans) - set(kept)


def test_the_model_is_left_as_it_was_found():
    net = model("fp8_delayed")
    nt.set_progress(net, 3, 10)
    losses = microbatches(net)
    losses[0]().backward()  # histories and gradients of somebody else's step
    net.layers[0].norm.eval()
    coverage = nt.audit(net, losses).coverage

    def state():
        tensors = [*net.parameters(), *net.buffers(), *(p.grad for p in net.parameters()), torch.get_rng_state()]
        modes = [(m.training, getattr(m, "plan", None), getattr(m, "quantizer_step", None)) for m in net.modules()]
        return [tensor.clone() for tensor in tensors], modes

    before = state()
    rank_layers(net, losses, coverage)
    after = state()
    assert all(torch.equal(a, b) for a, b in zip(before[0], after[0], strict=True)) and before[1] == after[1]


def test_the_cost_of_wgrad_is_what_its_error_costs_in_a_quadratic_loss():
    """loss(w - r (g +- e)) of a quadratic loss is, on average over the sign, loss(w - r g) + r^2 mean((x e.T)^2)."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(SIZE, SIZE, bias=False))
    nt.convert(net, nt.load_recipe("nvidia_nvfp4").to_dict() | {"keep_bf16": {}})
    x, target = torch.randn(TOKENS, SIZE), torch.randn(TOKENS, SIZE)
    loss = lambda: (net(x) - target).square().mean()  # noqa: E731
    found = ranked(net, [loss])
    row, plan, grads = found["layers"][0], net[0].plan, []
    for gemms in ((), ("wgrad",)):
        net[0].plan = bf16_but(plan, *gemms)
        torch.manual_seed(0)
        (grad,) = torch.autograd.grad(loss(), net[0].weight)
        grads.append(grad)
    gradient, error = grads[0], grads[1] - grads[0]
    rate, expected = found["step"]["rate"], lambda w: float((x @ w.T).square().mean())
    best = float(gradient.square().sum()) / (2 * expected(gradient))
    assert best / 2 <= rate <= 2 * best
    # the weights behind a step are rounded to BF16 by each loss, which moves the small difference of losses
    assert row["wgrad"] == pytest.approx(rate**2 * expected(error), rel=0.05)
    assert row["wgrad_error"] == pytest.approx(float(error.norm() / gradient.norm()))
    assert row["dgrad"] == 0.0 and row["dgrad_error"] == 0.0  # nobody asks for the gradient of x


class Spiked(torch.autograd.Function):
    """Itself. Its gradient gets large entries of opposite sign, which whoever sums them exactly does not see."""

    @staticmethod
    def forward(ctx, x, dimension):
        ctx.dimension = dimension
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        spike = torch.zeros_like(grad).movedim(ctx.dimension, 0)
        spike[::16], spike[1::16] = SPIKE, -SPIKE  # in each block of 16
        return grad + spike.movedim(0, ctx.dimension), None


class Planted(nn.Module):
    """What comes before the spiked layer, in forward, is exact in FP4, and so are its weights."""

    def __init__(self, dimension):
        super().__init__()
        self.places = nn.Parameter(torch.zeros(TOKENS, SIZE))
        self.spiked, self.middle, self.last = (nn.Linear(SIZE, SIZE, bias=False) for _ in range(3))
        self.dimension = dimension

    def forward(self, x):
        x = self.spiked(x + self.places)
        return self.last(self.middle(Spiked.apply(x, self.dimension).relu()).relu())


def on_the_grid(*shape):
    """Values of E2M1 with a 6 in each block: they are quantized to themselves."""
    values = GRID[torch.randint(0, 6, shape)] * torch.randint(0, 2, shape).mul(2).sub(1)
    values[:, ::16] = 6.0
    return values


def planted(dimension):
    """Dimension 0: tokens that are the same. 1: rows of the weight that are the same; all weights are frozen."""
    torch.manual_seed(0)
    net, x, weight = Planted(dimension), on_the_grid(TOKENS, SIZE), on_the_grid(SIZE, SIZE)
    for name, parameter in net.named_parameters():
        parameter.requires_grad_((name == "places") == (dimension == 1))
    same = (x, weight)[dimension]
    same[1::16] = same[::16]
    net.spiked.weight.data.copy_(weight / 64)
    nt.convert(net, nt.load_recipe("nvidia_nvfp4").to_dict() | {"keep_bf16": {}})
    target = torch.randn(TOKENS, SIZE)
    found = rank_layers(net, [lambda: (net(x) - target).square().mean()], {"phases": [[]]})
    assert found["layers"][0]["layer"] == "spiked"
    rows = by_layer(found)
    return rows.pop("spiked"), rows


def test_a_layer_that_only_wgrad_harms_is_found():
    bad, others = planted(dimension=0)
    assert bad["fprop"] == 0.0 and bad["dgrad"] == 0.0  # exact, and never run
    assert bad["wgrad"] > 10 * max(abs(row["added"]) for row in others.values())
    assert bad["added"] == pytest.approx(bad["wgrad"])


def test_a_layer_that_only_dgrad_harms_is_found():
    bad, others = planted(dimension=1)
    assert bad["fprop"] == 0.0 and bad["wgrad"] == 0.0
    assert bad["dgrad"] > 10 * max(abs(row["added"]) for row in others.values())
    assert bad["added"] == pytest.approx(bad["dgrad"])


@pytest.mark.parametrize("recipe", ["averis", "quartet2", "tetrajet2", "mxfp8"])
def test_recipes_of_all_mechanisms_can_be_ranked(recipe):
    net = model(recipe)
    found = ranked(net, microbatches(net))
    assert set(by_layer(found)) == set(plans_of(net))
    assert all(row[key] is not None for row in found["layers"] for key in ("added", "fprop", "dgrad", "wgrad"))
    assert all(row["dgrad_error"] > 0 and row["wgrad_error"] > 0 for row in found["layers"])


def test_a_loss_behind_a_step_that_is_not_finite_ranks_first(monkeypatch):
    net, behind = model("nvidia_nvfp4"), sensitivity._Bench._loss_behind
    losses = microbatches(net)

    def broken(bench, error=None, sign=1.0):
        told_of = next(name for name, p in net.named_parameters() if p is bench.weights[-1])
        assert told_of == "lm_head.weight"
        return float("nan") if error is not None and sign < 0 else behind(bench, error, sign)

    monkeypatch.setattr(sensitivity._Bench, "_loss_behind", broken)
    row = ranked(net, losses)["layers"][0]
    assert row["added"] is None and told(row, "added") == "not finite" and told(row, "fprop") != "not finite"
    assert told({}, "wgrad") == "–"
