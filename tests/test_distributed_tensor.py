"""Tensor and sequence parallel by torch's own styles: codes are those of one process, sums over ranks are bounded."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

import nvfp4_train as nt
from nvfp4_train import ledger
from nvfp4_train.experts import QuantizedExperts
from nvfp4_train.parallel import NormOfHeads, whole_gradients
from nvfp4_train.transposed import QuantizedConv1D
from tests import distributed_models as small
from tests.distributed_harness import on_ranks, returned

LAYER_BOUND = 1e-6  # float32 partial sums: a few units in the last place of the largest output
# A sum that differs in its last bit can move a value over a rounding boundary of FP4; five steps carry that on.
TRAIN_BOUND = 1e-2
PLAN = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
SEQUENCE_PLAN = {
    "blocks.*.norm": SequenceParallel(sequence_dim=0, use_local_output=True),
    "blocks.*.up": ColwiseParallel(input_layouts=Shard(0)),
    "blocks.*.down": RowwiseParallel(output_layouts=Shard(0)),
}


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def layer_inputs(n=64, k=96, tokens=64):
    draws = torch.Generator().manual_seed(3)
    x = torch.randn(tokens, k, generator=draws)
    x[:, k // 2 :] *= 100  # a local amax would show
    dy = torch.randn(tokens, n, generator=draws)
    dy[:, n // 2 :] *= 0.01
    return x, dy


def layer(n=64, k=96, tokens=64):
    torch.manual_seed(1)
    made = nt.QuantizedLinear(k, n, label="blocks.0.up")
    with torch.no_grad():
        made.weight[n // 2 :] *= 100
    return made


def one_layer(style=None, **sizes):
    """(y, dx, dw, db) of one call, gathered; ``style``: how the layer is placed."""
    x, dy = layer_inputs(**sizes)
    model = layer(**sizes)
    x.requires_grad_()
    if style == "tokens":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for name in ("weight", "bias"):
            value = distribute_tensor(getattr(model, name).detach(), mesh, [Replicate()])
            model.register_parameter(name, nn.Parameter(value))
        x = distribute_tensor(x.detach(), mesh, [Shard(0)]).requires_grad_()
        dy = distribute_tensor(dy, mesh, [Shard(0)])
    elif style is not None:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        layouts = {"input_layouts": Replicate(), "output_layouts": Replicate()}
        styles = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
        model = parallelize_module(model, mesh, styles[style](**layouts))
    torch.manual_seed(7 + (dist.get_rank() if style else 0))  # the group's first rank's draws count
    y = model(x)
    y.backward(dy)
    return [whole(t).detach() for t in (y, x.grad, model.weight.grad, model.bias.grad)]


def cached():
    """Whether a cut layer that keeps its quantized weight gives the same, before and after a change of the weight."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    layouts = {"input_layouts": Replicate(), "output_layouts": Replicate()}
    model, x = parallelize_module(layer(), mesh, ColwiseParallel(**layouts)), layer_inputs()[0]
    plain = [model(x)]
    with nt.cached_weights(model), ledger.recording() as log:
        kept = [model(x), model(x)]
        with torch.no_grad():
            model.weight.mul_(1.5)
        kept.append(model(x))
    plain += [plain[0], model(x)]
    quantized = sum(row["calls"] for row in log.operands() if row["operand"] == "fprop.weight")
    return [torch.equal(a, b) for a, b in zip(plain, kept, strict=True)], quantized


def refused(style, *sizes):
    try:
        one_layer(style, **dict(zip(("n", "k", "tokens"), sizes, strict=False)))
    except ValueError as error:
        return str(error)
    return "nothing was refused"


def plain_input():
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = layer()
    model.register_parameter("weight", nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Shard(0)])))
    with pytest.raises(ValueError) as told:
        model(layer_inputs()[0])
    return str(told.value)


def train_parallel(plan, data_ranks=1, tokens_sharded=False):
    """The small model under a plan of torch's, data parallel by FSDP2 over ``data_ranks``."""
    mesh = init_device_mesh("cpu", (data_ranks, dist.get_world_size() // data_ranks), mesh_dim_names=("dp", "tp"))
    model = small.make()
    parallelize_module(model, mesh["tp"], plan)
    if data_ranks > 1:
        for block in model.blocks:
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
    tp = mesh["tp"].get_local_rank()
    groups = {}
    for p in model.parameters():
        groups.setdefault(isinstance(p, DTensor), []).append(p)
    optimizers = [torch.optim.SGD(g, lr=0.05, momentum=0.9) for g in groups.values()]
    losses = []
    for step in range(small.STEPS):
        part = mesh["dp"].get_local_rank()
        small.seed_microbatch(step, part)
        x = small.microbatch(step, part)
        target = x.flip(-1)
        if tokens_sharded:
            x, target = (t.chunk(mesh["tp"].size())[tp] for t in (x, target))
        error = (model(x) - target).square()
        loss = error.sum() / (small.TOKENS * 32)
        loss.backward()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item() / (data_ranks if tokens_sharded else dist.get_world_size()))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return losses, {name: whole(p.detach()).clone() for name, p in model.named_parameters()}


class Heads(nn.Module):
    """What a model with norms of its heads does: a projection, a norm over each head, a projection back."""

    def __init__(self, heads=4, size=16):
        super().__init__()
        self.size, self.up, self.down = size, nn.Linear(64, heads * size), nn.Linear(heads * size, 64, bias=False)
        self.norm = nn.RMSNorm(size)

    def forward(self, x):  # [batch, tokens, 64]
        y = self.norm(self.up(x).view(*x.shape[:-1], -1, self.size).transpose(1, 2))
        return self.down(y.transpose(1, 2).flatten(2))


HEADS_PLAN = {"up": ColwiseParallel(), "norm": NormOfHeads(), "down": RowwiseParallel()}


def heads(plan=None):
    """(output, gradients) of one step, gathered, and the norm's weight on this rank after an SGD step."""
    torch.manual_seed(0)
    model = Heads()
    with torch.no_grad():
        model.norm.weight.copy_(torch.linspace(0.5, 2.0, 16))
    nt.convert(model, small.recipe())
    if plan is not None:
        parallelize_module(model, init_device_mesh("cpu", (dist.get_world_size(),)), plan)
    x = torch.randn(2, 24, 64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    torch.manual_seed(7)
    y = model(x)
    (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum().backward()
    whole_gradients(model.parameters())
    weight = model.norm.weight
    if isinstance(weight, DTensor):
        assert weight.grad.placements == weight.placements == (Replicate(),)
    found = [y.detach(), x.grad, *(whole(p.grad) for p in model.parameters())]
    torch.optim.SGD([weight], lr=0.1).step()
    return found, whole(weight.detach())


def not_cut(kind, how):
    """What a user hears who cuts experts or a Conv1D, by hand, or hands them a DTensor."""
    transformers = pytest.importorskip("transformers")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if kind == "experts":
        layer = QuantizedExperts(2, 32, 32, label="layers.0.mlp.experts")
        inputs = [torch.randn(8, 32), torch.zeros(8, 1, dtype=torch.long), torch.ones(8, 1)]
        name = "down_proj"
    else:
        layer = QuantizedConv1D.of(transformers.pytorch_utils.Conv1D(64, 32), small.recipe(), "h.0.attn.c_attn")
        inputs, name = [torch.randn(8, 32)], "weight"
    if how == "weight":
        layer.register_parameter(name, nn.Parameter(distribute_tensor(getattr(layer, name).detach(), mesh, [Shard(1)])))
    else:
        inputs[0] = distribute_tensor(inputs[0], mesh, [Shard(0)])
    with pytest.raises(ValueError) as told:
        layer(*inputs)
    return str(told.value)


@pytest.fixture(scope="module")
def two():
    cases = {style: (one_layer, (style,)) for style in ("colwise", "rowwise", "tokens")}
    cases |= {
        "cached": (cached, ()),
        "odd_colwise": (refused, ("colwise", 40)), "odd_rowwise": (refused, ("rowwise", 64, 72)),
        "odd_tokens": (refused, ("tokens", 64, 96, 48)), "plain_input": (plain_input, ()),
        "heads": (heads, (HEADS_PLAN,)),
        **{f"{kind}_{how}": (not_cut, (kind, how)) for kind in ("experts", "conv1d") for how in ("weight", "input")},
        "tp": (train_parallel, (PLAN,)), "sp": (train_parallel, (SEQUENCE_PLAN, 1, True)),
    }  # fmt: skip
    return on_ranks(2, cases)


@pytest.fixture(scope="module")
def four():
    return on_ranks(4, {"fsdp_tp": (train_parallel, (PLAN, 2))})


def test_a_cut_weight_is_quantized_once_for_each_version(two):
    assert returned(two["cached"]) == [([True, True, True], 2)] * 2


def assert_near(found, expected):
    """Within the bound, of the largest value: partial sums are added in another order, nothing else differs."""
    assert (found - expected).abs().max() <= LAYER_BOUND * expected.abs().max()


def test_colwise_quantizes_the_whole(two):
    y, dx, dw, db = one_layer()
    for found in returned(two["colwise"]):
        assert torch.equal(found[0], y) and torch.equal(found[2], dw) and torch.equal(found[3], db)
        assert_near(found[1], dx)


def test_rowwise_quantizes_the_whole(two):
    y, dx, dw, db = one_layer()
    for found in returned(two["rowwise"]):
        assert torch.equal(found[1], dx) and torch.equal(found[2], dw) and torch.equal(found[3], db)
        assert_near(found[0], y)


def test_sharded_tokens_quantize_the_whole(two):
    y, dx, dw, db = one_layer()
    for found in returned(two["tokens"]):
        assert torch.equal(found[0], y) and torch.equal(found[1], dx)
        assert_near(found[2], dw)
        assert_near(found[3], db)


def test_a_norm_of_heads_works_on_each_rank_s_own_and_its_gradient_is_that_of_all(two):
    expected, weight = heads()
    (first, one), (second, other) = returned(two["heads"])
    assert torch.equal(one, other)
    assert_near(one, weight)
    for found in (first, second):
        for value, wanted in zip(found, expected, strict=True):
            assert_near(value, wanted)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("odd_colwise", ["blocks.0.up", "size 40", "multiple of 32"]),
        ("odd_rowwise", ["blocks.0.up", "size 72", "multiple of 32"]),
        ("odd_tokens", ["blocks.0.up: input", "size 48", "multiple of 32"]),
        ("experts_weight", ["layers.0.mlp.experts", "weight is a DTensor", "experts cannot be cut"]),
        ("experts_input", ["layers.0.mlp.experts", "input is a DTensor", "experts cannot be cut"]),
        ("conv1d_weight", ["h.0.attn.c_attn", "weight is a DTensor", "Conv1D cannot be cut"]),
        ("conv1d_input", ["h.0.attn.c_attn", "input is a DTensor", "Conv1D cannot be cut"]),
        ("plain_input", ["blocks.0.up", "plain tensor", "parallelize_module"]),
    ],
)
def test_what_cannot_be_cut_is_refused_by_name_on_every_rank(two, case, words):
    first, second = returned(two[case])
    assert first == second
    assert all(word in first for word in words)


@pytest.mark.parametrize("case", ["tp", "sp"])
def test_five_steps_of_tensor_and_sequence_parallel_stay_near_one_process(two, case):
    model = small.make()
    expected = small.train_alone(model, 1)
    for losses, weights in returned(two[case]):
        assert losses == pytest.approx(expected, rel=TRAIN_BOUND)
        for name, value in small.weights_of(model).items():
            assert (weights[name] - value).norm() <= TRAIN_BOUND * value.norm(), name


def test_five_steps_of_fsdp_with_tensor_parallel_stay_near_one_process(four):
    model = small.make()
    expected = small.train_alone(model, 2)
    for losses, weights in returned(four["fsdp_tp"]):
        assert losses == pytest.approx(expected, rel=TRAIN_BOUND)
        for name, value in small.weights_of(model).items():
            assert (weights[name] - value).norm() <= TRAIN_BOUND * value.norm(), name
