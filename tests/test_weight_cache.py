"""cached_weights: a step's microbatches share one quantized weight, and get the bits of quantizing anew."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import nvfp4_train as nt
from nvfp4_train import ledger
from nvfp4_train.weight_cache import cached_weights
from tests import distributed_models as small


def gradients(model, cached, parts=4, changes=()):
    """Gradients of four microbatches; ``changes``: {part: what is done to the model before it}."""
    changes = dict(changes)
    with ledger.recording() as log:
        context = cached_weights(model) if cached else torch.enable_grad()
        with context:
            for part in range(parts):
                changes.get(part, lambda model: None)(model)
                small.seed_microbatch(0, part)
                small.loss_of(model, small.microbatch(0, part)).backward()
    weights = sum(row["calls"] for row in log.operands() if row["operand"].endswith(".weight"))
    return {name: p.grad.clone() for name, p in model.named_parameters()}, weights


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


@pytest.mark.parametrize(("recipe", "forms"), [("nvidia_nvfp4", 1), ("nvidia_nvfp4_1d_weights", 2), ("mxfp4", 2)])
def test_four_microbatches_quantize_each_weight_once_with_the_same_result(recipe, forms):
    changes = {key: nt.load_recipe(recipe).to_dict()[key] for key in ("fprop", "dgrad", "wgrad")}
    changes["weight_match"] = nt.load_recipe(recipe).weight_match
    plain, many = gradients(small.make(changes), cached=False)
    kept, few = gradients(small.make(changes), cached=True)
    assert_same(plain, kept)
    assert (many, few) == (4 * 4 * forms, 4 * forms)  # four layers


@torch.no_grad()
def add(model):
    model.blocks[0].up.weight.add_(0.25)


def load(model):
    model.load_state_dict({name: value * 1.5 for name, value in model.state_dict().items()})


def replace(model):
    model.blocks[0].up.weight = nn.Parameter(model.blocks[0].up.weight.detach() * 2)


def fused_step(model):
    torch.optim.AdamW(model.parameters(), lr=0.1, fused=True).step()


def foreach_step(model):
    torch.optim.SGD(model.parameters(), lr=0.1, foreach=True).step()


def move_storage(model):
    model.blocks[0].up.weight.data = model.blocks[0].up.weight.data * 3


@pytest.mark.parametrize("change", [add, load, replace, fused_step, foreach_step, move_storage])
def test_a_change_of_the_weight_invalidates(change):
    plain, _ = gradients(small.make(), cached=False, changes={2: change})
    kept, weights = gradients(small.make(), cached=True, changes={2: change})
    unchanged, _ = gradients(small.make(), cached=True)
    assert_same(plain, kept)
    assert 4 < weights <= 8
    assert any(not torch.equal(unchanged[name], kept[name]) for name in kept)


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("selective", [False, True])
def test_activation_checkpointing_gives_the_same_gradients(selective, cached):
    """Selective: products are kept, everything else is computed again, from the same draws."""
    products = [torch.ops.nvfp4_train.matmul.default, torch.ops.aten.mm.default]
    options = {"context_fn": partial(create_selective_checkpoint_contexts, products)} if selective else {}
    plain, _ = gradients(small.make(), cached=False)
    model = small.make()
    for block in model.blocks:
        inner = block.forward
        block.forward = lambda x, inner=inner: checkpoint(inner, x, use_reentrant=False, **options)
    again, _ = gradients(model, cached=cached)
    assert_same(plain, again)


def test_a_stochastic_weight_is_drawn_anew_at_each_call():
    stochastic = {"format": "nvfp4", "block": "16x16", "rounding": "stochastic"}
    changes = nt.load_recipe("nvidia_nvfp4").to_dict()
    changes["fprop"]["weight"] = changes["dgrad"]["weight"] = stochastic
    changes = {"fprop": changes["fprop"], "dgrad": changes["dgrad"], "weight_match": False}
    plain, many = gradients(small.make(changes), cached=False)
    kept, few = gradients(small.make(changes), cached=True)
    assert_same(plain, kept)
    assert many == few


def test_a_layer_called_twice_and_a_schedule_that_switches():
    torch.manual_seed(0)
    layer = nt.QuantizedLinear(32, 32, recipe="nvidia_nvfp4_late_fprop")
    x = torch.randn(16, 32)
    with cached_weights(layer), ledger.recording() as log:
        twice = layer(layer(x))
        assert sum(row["calls"] for row in log.operands() if row["operand"] == "fprop.weight") == 1
        nt.set_progress(layer, 9, 10)
        late = layer(x)
    nt.set_progress(layer, 0, 10)
    assert torch.equal(twice, layer(layer(x)))
    nt.set_progress(layer, 9, 10)
    assert torch.equal(late, layer(x))


def test_what_is_kept_is_packed_and_gone_afterwards():
    layer = nt.QuantizedLinear(64, 64)
    with cached_weights(layer):
        layer(torch.randn(16, 64, requires_grad=True)).sum().backward()
        ((_, kept),) = layer.weight_cache._kept.values()
        assert kept.operand is None and kept.codes.numel() + kept.scale_bytes.numel() == 64 * 32 + 16
        layer(torch.randn(16, 64))
    assert layer.weight_cache is None


def test_no_converted_layer_is_refused():
    with pytest.raises(ValueError, match="no converted layer"), cached_weights(nn.Linear(4, 4)):
        pass


def test_a_recipe_that_does_more_with_a_weight_is_refused():
    layer = nt.QuantizedLinear(32, 32, recipe="fp8_delayed", label="up")
    with pytest.raises(ValueError, match="the layer runs recipe fp8_delayed"), cached_weights(layer):
        pass
