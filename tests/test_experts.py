"""Experts: each one is a linear layer of its own; who gets no token, uneven groups, draws, gradients, wrappers."""

import pytest
import torch
from tiny_models import recipe
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from nvfp4_train import ledger
from nvfp4_train.experts import QuantizedExperts, expert_seeds
from nvfp4_train.linear import LinearFunction

torch.set_num_threads(1)
HIDDEN, INNER = 32, 24


def experts(count=4, seed=0, **options):
    torch.manual_seed(seed)
    return QuantizedExperts(count, HIDDEN, INNER, recipe=options.pop("recipe", recipe()), **options)


def routed(*pairs):
    """top_k_index and weights from one tuple of experts a token"""
    index = torch.tensor(pairs)
    return index, torch.linspace(0.1, 0.9, index.numel()).reshape(index.shape)


def run(layer, x, index, weights, seed=3):
    layer.zero_grad()
    x = x.clone().requires_grad_()
    weights = weights.clone().requires_grad_()
    torch.manual_seed(seed)
    y = layer(x, index, weights)
    y.square().sum().backward()
    return {"y": y.detach(), "x": x.grad, "share": weights.grad,
            "gate_up": layer.gate_up_proj.grad, "down": layer.down_proj.grad}  # fmt: skip


# Against one linear layer an expert


def by_hand(layer, x, index, weights, seed=3):
    """Token by token: rows gathered per expert by a mask, one LinearFunction a product, summed by index_add_."""
    gate_up = layer.gate_up_proj.detach().requires_grad_()
    down = layer.down_proj.detach().requires_grad_()
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    torch.manual_seed(seed)
    call_seeds = [int(torch.randint(0, 2**32, (), dtype=torch.int64)) for _ in range(2)]
    y = torch.zeros_like(x)
    needs = (True, True)
    for expert in range(layer.num_experts):
        token, place = torch.where(index == expert)
        if len(token) == 0:
            continue
        key = [torch.tensor((s + expert * 0x9E3779B1) % 2**32) for s in call_seeds]
        common = (ledger.UNNAMED, layer.plan, layer.backend, x.dtype, needs)
        h = LinearFunction.apply(x[token], gate_up[expert], None, key[0], *common)
        h = nn.functional.silu(h[:, :INNER]) * h[:, INNER:]
        h = LinearFunction.apply(h, down[expert], None, key[1], *common)
        y = y.index_add(0, token, h * weights[token, place].unsqueeze(-1))
    y.square().sum().backward()
    return {"y": y.detach(), "x": x.grad, "share": weights.grad, "gate_up": gate_up.grad, "down": down.grad}


@pytest.mark.parametrize(
    "pairs",
    [
        [(0, 1), (1, 2), (0, 2), (2, 1), (1, 0)],  # the last expert gets nothing
        [(3, 1)] * 37 + [(1, 3)] * 2,  # two get nothing, 39 tokens each: not a multiple of 16
        [(0, 1), (2, 3)] * 16,  # 16 tokens each
        [(2, 3)],  # one token
    ],
)
def test_every_expert_is_a_linear_layer_of_its_own(pairs):
    layer = experts()
    index, weights = routed(*pairs)
    x = torch.randn(len(pairs), HIDDEN, generator=torch.Generator().manual_seed(5))
    got, wanted = run(layer, x, index, weights), by_hand(layer, x, index, weights)
    for name in ("share", "gate_up", "down"):  # same sums in the same order: same bits
        assert torch.equal(got[name], wanted[name]), name
    for name in ("y", "x"):  # a token's two experts are added in another order
        torch.testing.assert_close(got[name], wanted[name], rtol=1e-6, atol=1e-6)


def test_experts_without_tokens_get_zero_gradients_and_cost_nothing():
    layer = experts(count=6)
    with ledger.recording() as log:
        got = run(layer, torch.randn(9, HIDDEN), *routed(*[(1, 4)] * 9))
    for key in ("gate_up", "down"):
        norms = got[key].flatten(1).norm(dim=1)
        assert (norms > 0).tolist() == [False, True, False, False, True, False]
    calls = {(row["layer"], row["gemm"]): row["calls"] for row in log.gemms()}
    assert calls == {
        (f"experts.{key}", gemm): 2 for key in ("gate_up_proj", "down_proj") for gemm in ("fprop", "dgrad", "wgrad")
    }
    flops = {gemm: sum(row["flops"] for row in log.gemms() if row["gemm"] == gemm) for gemm in ("fprop", "wgrad")}
    assert flops["fprop"] == 2 * 18 * (2 * INNER * HIDDEN + HIDDEN * INNER)  # exactly the routed rows
    assert flops["wgrad"] == 2 * 32 * (2 * INNER * HIDDEN + HIDDEN * INNER)  # 9 tokens fill one Hadamard group of 16


def test_no_token_at_all():
    layer = experts()
    got = run(layer, torch.zeros(0, HIDDEN), torch.zeros(0, 2, dtype=torch.long), torch.zeros(0, 2))
    assert got["y"].shape == (0, HIDDEN)
    assert not got["gate_up"].any() and not got["down"].any()


def test_nothing_leaks_from_one_expert_to_another():
    """A token 10,000 times as large goes to expert 0: experts 1 to 3 compute the same bits as without it."""
    layer = experts()
    x = torch.randn(10, HIDDEN)
    index, weights = routed(*[(1, 2), (3, 1)] * 5)
    alone = run(layer, x, index, weights)
    loud = run(
        layer, torch.cat([x, 1e4 * torch.randn(1, HIDDEN)]), torch.cat([index, torch.tensor([[0, 0]])]),
        torch.cat([weights, torch.ones(1, 2)]),
    )  # fmt: skip
    assert torch.equal(alone["y"], loud["y"][:10]) and torch.equal(alone["x"], loud["x"][:10])
    for key in ("gate_up", "down"):
        assert torch.equal(alone[key][1:], loud[key][1:]) and loud[key][0].any()


def test_draws_belong_to_the_expert_not_to_its_place_among_the_busy():
    """Expert 3 draws the same whether expert 1 has tokens or not, and not what expert 2 draws for the same rows."""
    layer = experts()
    with torch.no_grad():
        for weight in (layer.gate_up_proj, layer.down_proj):
            weight[2] = weight[3]
    x = torch.randn(16, HIDDEN)
    share = torch.ones(16, 1)
    three = run(layer, x, torch.full((16, 1), 3), share)["gate_up"][3]
    two = run(layer, x, torch.full((16, 1), 2), share)["gate_up"][2]
    assert not torch.equal(three, two)
    both = run(layer, torch.cat([x, x]), torch.tensor([[3]] * 16 + [[1]] * 16), torch.ones(32, 1))["gate_up"][3]
    assert torch.equal(three, both)
    keys = torch.stack(expert_seeds(torch.tensor(2**32 - 5), 4096))
    assert keys.unique().numel() == 4096 and keys.min() >= 0 and keys.max() < 2**32


def test_tokens_for_experts_that_live_elsewhere_contribute_nothing():
    """Expert parallelism marks them with num_experts; their rows are skipped and get no gradient."""
    layer = experts()
    x = torch.randn(6, HIDDEN)
    index, weights = routed(*[(0, 4), (4, 4), (3, 0)] * 2)
    got = run(layer, x, index, weights)
    assert not got["y"][[1, 4]].any() and not got["x"][[1, 4]].any()
    assert ((got["share"] != 0) == (index < 4)).all()
    assert got["y"][[0, 2]].any(dim=1).all()


def test_a_main_grad_gathers_the_gradient_in_float32():
    layer = experts(dtype=torch.bfloat16)
    index, weights = routed(*[(0, 2), (2, 3)] * 8)
    x = torch.randn(16, HIDDEN, dtype=torch.bfloat16)
    plain = run(layer, x, index, weights.bfloat16())
    for weight in (layer.gate_up_proj, layer.down_proj):
        weight.main_grad = torch.zeros(weight.shape)
    for _ in range(2):
        run(layer, x, index, weights.bfloat16())
    for weight, key in ((layer.gate_up_proj, "gate_up"), (layer.down_proj, "down")):
        assert torch.equal((weight.main_grad / 2).bfloat16(), plain[key])
        assert weight.grad is None or not weight.grad.any()


def test_bad_input_is_refused():
    layer = experts()
    with pytest.raises(ValueError, match=r"experts: expected hidden_states \[tokens, hidden\]"):
        layer(torch.zeros(1, 4, HIDDEN), *routed((0, 1)))
    with pytest.raises(ValueError, match="float64"):
        layer(torch.zeros(1, HIDDEN, dtype=torch.float64), *routed((0, 1)))
    with pytest.raises(ValueError, match="experts: top_k_index has numbers below 0"):
        layer(torch.zeros(1, HIDDEN), *routed((0, -1)))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_tokens_are_counted_with_nothing_read_by_the_host_before(dtype):
    layer, index = experts(), torch.tensor([3, 0, 7, 3, 4, 3], dtype=dtype)
    assert layer._counts(index.sort().values) == [1, 0, 0, 3, 2]  # 4 and 7 live elsewhere
    assert layer._counts(index[:0]) == [0, 0, 0, 0, 0]
    read = []

    class Reads(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.bincount.default):
                read.append(func)
            return func(*args, **(kwargs or {}))

    with Reads():
        layer._counts(index.sort().values)
    assert read == []


def test_a_compiled_model_breaks_its_graph_at_the_experts_and_computes_the_same():
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.before, self.experts = nn.Linear(HIDDEN, HIDDEN), experts()

        def forward(self, x, index, weights):
            return self.experts(self.before(x).relu(), index, weights) + x

    layer, x = Layer(), torch.randn(20, HIDDEN)
    index, weights = routed(*[(0, 1), (3, 0)] * 10)
    results = []
    for call in (layer, torch.compile(layer, backend="eager")):
        layer.zero_grad()
        torch.manual_seed(3)
        y = call(x, index, weights)
        y.square().sum().backward()
        results.append((y.detach(), layer.experts.down_proj.grad, layer.before.weight.grad))
    assert all(torch.equal(one, two) for one, two in zip(*results, strict=True))


def test_activation_checkpointing_replays_the_same_draws():
    from torch.utils.checkpoint import checkpoint

    layer = experts()
    x, (index, weights) = torch.randn(20, HIDDEN), routed(*[(0, 1), (3, 0)] * 10)
    plain = run(layer, x, index, weights)

    class Replayed(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate_up_proj, self.down_proj = layer.gate_up_proj, layer.down_proj

        def forward(self, *inputs):
            return checkpoint(layer, *inputs, use_reentrant=False)

    again = run(Replayed(), x, index, weights)
    assert all(torch.equal(plain[key], again[key]) for key in plain)


def test_under_fsdp_nothing_quantized_is_kept_and_the_bits_are_the_same(tmp_path):
    """One rank of gloo: the weights are sharded at rest, so Dgrad quantizes them again."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    layer = experts()
    x, (index, weights) = torch.randn(20, HIDDEN), routed(*[(0, 1), (3, 0)] * 10)
    plain = run(layer, x, index, weights)
    sharded = experts()
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        fully_shard(sharded, mesh=dist.init_device_mesh("cpu", (1,)))
        with ledger.recording() as log:
            got = run(sharded, x, index, weights)
        assert sharded.sharded_at_rest
        for key in plain:
            value = got[key].full_tensor() if hasattr(got[key], "full_tensor") else got[key]
            assert torch.equal(value, plain[key]), key
    finally:
        dist.destroy_process_group()
    again = {row["layer"] for row in log.operands() if row["operand"] == "dgrad.weight"}
    assert again == {"experts.gate_up_proj", "experts.down_proj"}
