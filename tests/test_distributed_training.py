"""DDP and FSDP2 in a loop of one's own: N ranks equal one process that accumulates the same N microbatches."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import nvfp4_train as nt
from nvfp4_train import ledger
from nvfp4_train.experiment.distributed import gathered_bytes
from nvfp4_train.linear import QuantizedLinear
from tests import distributed_models as small
from tests.distributed_harness import on_ranks, returned

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)
LATE = {"schedule": [{"from": 0.5, "fprop": "bf16"}]}
ONE_DIMENSIONAL = {key: nt.load_recipe("nvidia_nvfp4_1d_weights").to_dict()[key] for key in ("fprop", "dgrad")}
ONE_DIMENSIONAL["weight_match"] = False
ODD = {"size": 33, "hidden": 47}  # neither blocks of 16 nor two ranks divide them


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def shard(model, **options):
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no average
    return model


def train(model, run, size=32, steps=small.STEPS):
    """Rank r works on microbatch r of every step."""
    rank, optimizer = dist.get_rank(), small.optimizer_of(model)
    for step in range(steps):
        nt.set_progress(model, step, steps)
        small.seed_microbatch(step, rank)
        small.loss_of(run, small.microbatch(step, rank, size)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: whole(p.detach()).clone() for name, p in model.named_parameters()}


def ddp():
    model = small.make()
    return train(model, nn.parallel.DistributedDataParallel(model))


def fsdp(sizes, **options):
    model = small.make(**sizes)
    return train(shard(model, **options), model, sizes.get("size", 32))


def fsdp_from_meta():
    model = small.Model(device="meta")
    nt.convert(model, small.recipe())
    shard(model)
    model.to_empty(device="cpu")
    source = small.Model()
    small.fill(source)
    sharded = dict(model.named_parameters())
    with torch.no_grad():
        for name, value in source.named_parameters():
            own = sharded[name]
            start = -(-value.shape[0] // dist.get_world_size()) * dist.get_rank()
            own.to_local().copy_(value[start : start + own.to_local().shape[0]])
    return train(model, model)


def fsdp_checkpointed():
    model = small.make()
    for index, block in enumerate(model.blocks):
        model.blocks[index] = checkpoint_wrapper(block)
    shard(model)
    return {name.replace("_checkpoint_wrapped_module.", ""): v for name, v in train(model, model).items()}


def fsdp_compiled():
    model = small.make(blocks=1)
    for block in model.blocks:
        block.compile(backend="aot_eager")
    return train(shard(model), model, steps=2)


def fsdp_memory():
    """What forward leaves behind for backward: bytes of packed weights, and of whole weights still allocated."""
    model = shard(small.make())
    codes = [(p.shape[0], p.shape[1] // 2) for p in model.parameters() if p.ndim == 2]
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):
        loss = small.loss_of(model, small.microbatch(0, 0))
    packed = [t.shape for t in saved if t.dtype == torch.uint8 and tuple(t.shape) in codes]
    shapes = [tuple(p.shape) for p in model.parameters() if p.ndim == 2]
    whole_weights = [t.untyped_storage().size() for t in saved if tuple(t.shape) in shapes and t.is_leaf]
    loss.backward()
    flags = [layer.sharded_at_rest for layer in model.modules() if isinstance(layer, QuantizedLinear)]
    return packed, whole_weights, flags


def gathered(fp4=True, changes=None, **options):
    """Five steps with weights gathered in FP4, or as they are; and the bytes that FSDP gathered."""
    model = small.make(changes)
    if fp4:
        nt.gather_in_fp4(model)
    shard(model, **options)
    with gathered_bytes() as counted, ledger.recording() as log:
        weights = train(model, model)
    quantized = {row["elements"] for row in log.operands() if row["operand"] == "fprop.weight"}
    return weights, sum(counted), quantized


def refused(make, **options):
    with pytest.raises(ValueError) as told:
        nt.gather_in_fp4(make(**options))
    return str(told.value)


def ranks_with_other_models(changes, **sizes):
    """The second rank's model is another one."""
    model = small.make(changes, **sizes) if dist.get_rank() else small.make()
    with pytest.raises(ValueError) as told:
        nt.same_on_all_ranks(model)
    return str(told.value)


def ranks_alike():
    nt.same_on_all_ranks(small.make())
    return "the same"


def converted_too_late():
    model = small.Model()
    shard(model)
    with pytest.raises(ValueError) as told:
        nt.convert(model, small.recipe())
    return str(told.value)


def fp4_under_tensor_parallel():
    model = small.make()
    nt.gather_in_fp4(model, ranks=1)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    with pytest.raises(ValueError) as told:
        parallelize_module(model, mesh["tp"], {"blocks.*.up": ColwiseParallel()})
        train(shard(model, mesh=mesh["dp"]), model)
    return str(told.value)


def mixed_precision():
    """One step, weights gathered in BF16: the gradient of each rank's whole, reduced in float32."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=True)
    model = shard(small.make(), mp_policy=policy)
    small.seed_microbatch(0, dist.get_rank())
    model(small.microbatch(0, dist.get_rank())).float().square().mean().backward()
    return {name: whole(p.grad) for name, p in model.named_parameters()}


@pytest.fixture(scope="module")
def two():
    cases = {
        "ddp": (ddp, ()), "fsdp": (fsdp, ({},)), "odd": (fsdp, (ODD,)), "meta": (fsdp_from_meta, ()),
        "kept": (functools.partial(fsdp, reshard_after_forward=False), ({},)),
        "checkpointed": (fsdp_checkpointed, ()), "compiled": (fsdp_compiled, ()), "memory": (fsdp_memory, ()),
        "mixed": (mixed_precision, ()), "fp4": (gathered, ()), "fp32": (functools.partial(gathered, fp4=False), ()),
        "fp4_kept": (functools.partial(gathered, reshard_after_forward=False), ()),
        "fp4_bf16": (functools.partial(gathered, mp_policy=BF16), ()),
        "bf16": (functools.partial(gathered, fp4=False, mp_policy=BF16), ()),
        "fp4_late": (functools.partial(gathered, changes=LATE), ()),
        "late": (functools.partial(gathered, fp4=False, changes=LATE), ()),
        "other_recipe": (ranks_with_other_models, (ONE_DIMENSIONAL,)), "alike": (ranks_alike, ()),
        "other_size": (functools.partial(ranks_with_other_models, hidden=96), ({},)),
        "late_conversion": (converted_too_late, ()),
        "fp4_odd": (functools.partial(refused, small.make, hidden=48), ()),
        "fp4_recipe": (functools.partial(refused, small.make, changes=ONE_DIMENSIONAL), ()),
        "fp4_plain": (refused, (small.Model,)), "fp4_tensor_parallel": (fp4_under_tensor_parallel, ()),
    }  # fmt: skip
    return on_ranks(2, cases)


@functools.cache
def alone(sizes=(), compiled=False):
    sizes = dict(sizes)
    model = small.make(**sizes)
    for block in model.blocks if compiled else ():  # a compiled graph may draw its seeds in another order
        block.compile(backend="aot_eager")
    small.train_alone(model, 2, steps=2 if compiled else small.STEPS, size=sizes.get("size", 32))
    return small.weights_of(model)


@pytest.mark.parametrize("case", ["ddp", "fsdp", "odd", "meta", "kept", "checkpointed", "compiled"])
def test_two_ranks_end_with_the_bits_of_one_process(two, case):
    sizes = {"odd": ODD, "compiled": {"blocks": 1}}.get(case, {})
    expected = alone(tuple(sizes.items()), case == "compiled")
    for found in returned(two[case]):
        assert found.keys() == expected.keys()
        for name in expected:
            assert torch.equal(found[name], expected[name]), name


def test_under_fsdp_no_quantized_or_whole_weight_waits_for_backward(two):
    for packed, whole_weights, flags in returned(two["memory"]):
        assert packed == []
        assert len(whole_weights) == 4 and set(whole_weights) == {0}  # saved, and freed until backward gathers it
        assert all(flags)


def test_mixed_precision_quantizes_what_was_gathered(two):
    model = small.make().to(torch.bfloat16)
    grads = []
    for part in range(2):
        small.seed_microbatch(0, part)
        model(small.microbatch(0, part).bfloat16()).float().square().mean().backward()
        grads.append({name: p.grad.float() for name, p in model.named_parameters()})
        model.zero_grad()
    for found in returned(two["mixed"]):
        for name, value in found.items():
            assert torch.equal(value, (grads[0][name] + grads[1][name]) / 2), name


def test_gathering_in_fp4_changes_no_bit_and_moves_a_quarter_of_bf16(two):
    for fp4, fp32, kept in zip(*(returned(two[case]) for case in ("fp4", "fp32", "fp4_kept")), strict=True):
        for name, value in fp32[0].items():
            assert torch.equal(fp4[0][name], value) and torch.equal(kept[0][name], value), name
        assert fp4[2] == {32 * 64 // 2 * 2 * small.STEPS}  # half of each weight, before forward and before backward
    for fp4, late in zip(returned(two["fp4_late"]), returned(two["late"]), strict=True):
        assert all(torch.equal(fp4[0][name], value) for name, value in late[0].items())
        assert not torch.equal(late[0]["blocks.0.up.weight"], fp32[0]["blocks.0.up.weight"])
    for fp4, bf16 in zip(returned(two["fp4_bf16"]), returned(two["bf16"]), strict=True):
        assert all(torch.equal(fp4[0][name], value) for name, value in bf16[0].items())
        others = 2 * 5 * 2 * 2 * (32 + 32 + 64)  # norms and biases: 2 blocks, 5 steps, twice a step, 2 bytes
        assert (fp4[1] - others) / (bf16[1] - others) == pytest.approx((1 / 2 + 1 / 256) / 2)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("other_recipe", ["disagree", "the recipe of blocks.0.up"]),
        ("other_size", ["disagree", "the shape of blocks.0.up.weight", "(64, 32)", "(96, 32)"]),
        ("late_conversion", ["before fully_shard"]), ("alike", ["the same"]),
        ("fp4_odd", ["blocks.0.up", "48 rows", "multiple of 32"]), ("fp4_recipe", ["blocks.0.up", "nvidia_nvfp4"]),
        ("fp4_plain", ["no converted layer"]), ("fp4_tensor_parallel", ["blocks.0.up", "tensor parallelism"]),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_by_name_on_every_rank(two, case, words):
    first, second = returned(two[case])
    assert first == second
    assert all(word in first for word in words)
