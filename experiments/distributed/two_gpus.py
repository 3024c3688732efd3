"""Does the layout over GPUs change the numbers, and what does it cost? One command on a machine with two GPUs:

    torchrun --standalone --nproc-per-node 2 experiments/distributed/two_gpus.py --out two_gpus.json

Checks (through NCCL; gloo with --device cpu): sharded quantization, training under DDP, FSDP2 and FSDP2 with FP4 gather
against one process that accumulates the same microbatches, tensor-parallel layers against whole ones.
Measures: `bench step` on one GPU and under FSDP2 over all, recipe against BF16, and the bytes of weights gathered.
Exits with 1 where a check fails.
"""

import argparse
import copy
import json
import os
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import nvfp4_train as nt
from nvfp4_train import benchmark
from nvfp4_train.experiment.config import load_experiment
from nvfp4_train.experiment.distributed import gathered_bytes
from nvfp4_train.experiment.model import build_model
from nvfp4_train.quantization import quantize_both
from nvfp4_train.sharding import part_of
from nvfp4_train.survey import Survey

HERE = Path(__file__).parent
PARTIAL_SUMS = 2.0**-7  # BF16: partial sums of an output are rounded before they are added
REPEATS, WARM_UP = 20, 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument(
        "--experiment", default=str(HERE.parent / "bench" / "llama_350m.yaml"), help="the model to time"
    )
    parser.add_argument("--recipe", default="nvidia_nvfp4")
    parser.add_argument("--out", help="a JSON file for the results")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    results = {
        "ranks": dist.get_world_size(), "machine": benchmark.machine(device),
        "checks": {name: check(device) for name, check in CHECKS.items()},
    }  # fmt: skip
    if dist.get_rank() == 0:
        print(json.dumps(results["checks"]), flush=True)
    results["step"] = bench_step(arguments.experiment, arguments.recipe, device)
    failed = [name for name, check in results["checks"].items() if not check["passed"]]
    if dist.get_rank() == 0:
        text = json.dumps(results, indent=1)
        print(text)
        if arguments.out:
            Path(arguments.out).write_text(text + "\n")
    dist.destroy_process_group()
    sys.exit(1 if failed else 0)


def all_ranks(passed: bool, **numbers) -> dict:
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, bool(passed))
    return {"passed": all(everyone), **numbers}


# What is checked ----------------------------------------------------------------------------------------------------


def sharded_quantization(device: torch.device) -> dict:
    """Row and column shards, Hadamard and stochastic rounding: the bytes of the whole."""
    group, plan = dist.group.WORLD, nt.load_recipe("nvidia_nvfp4").plan(0.0)
    ranks, seed, differing = dist.get_world_size(), torch.tensor(7, device=device), 0
    draws = torch.Generator(device).manual_seed(1)
    x = torch.randn(64 * ranks, 48 * ranks, device=device, generator=draws).bfloat16()
    x[x.shape[0] // 2 :] *= 100
    schemes = (plan.dgrad_grad_output, plan.wgrad_grad_output)
    whole = quantize_both(x, *schemes, seed=seed, stream=2)
    for dimension in (0, 1):
        part = part_of("x", dimension, tuple(x.shape), group, {0: [schemes[1]], 1: [schemes[0]]})
        size = x.shape[dimension] // ranks
        mine = x.narrow(dimension, part.row + part.column, size)
        found = quantize_both(mine, *schemes, seed=seed, stream=2, part=part)
        for form in (0, 1):
            along = dimension if form == 0 else 1 - dimension
            for mine_of, whole_of in zip(found[form][4:6], whole[form][4:6], strict=True):
                length = whole_of.shape[along] // ranks
                differing += int((whole_of.narrow(along, group.rank() * length, length) != mine_of).sum())
    return all_ranks(differing == 0, differing_bytes=differing)


class Block(nn.Module):
    def __init__(self, size: int = 256, hidden: int = 512):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(size), nn.Linear(size, hidden), nn.Linear(hidden, size)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu())


def small_model(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(3))).to(device)
    nt.convert(model, nt.load_recipe("nvidia_nvfp4").to_dict() | {"keep_bf16": {}})
    return model


def microbatch(step: int, part: int, device: torch.device) -> torch.Tensor:
    return torch.randn(128, 256, generator=torch.Generator().manual_seed(100 * step + part)).to(device)


def work(model: nn.Module, step: int, part: int, device: torch.device, share: float) -> None:
    torch.manual_seed(1000 + 100 * step + part)  # the draws belong to the microbatch
    (model(microbatch(step, part, device)).square().mean() * share).backward()


def train(model: nn.Module, run: nn.Module, device: torch.device, parts: range, share: float) -> dict:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(5):
        for part in parts:
            work(run, step, part, device, share)
        optimizer.step()
        optimizer.zero_grad()
    return {n: p.detach().full_tensor() if isinstance(p, DTensor) else p.detach() for n, p in model.named_parameters()}


def sharded(blocks: list[nn.Module], model: nn.Module, **options) -> nn.Module:
    for block in blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    if next(model.parameters()).device.type == "cpu":
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)  # gloo has no average
    return model


def training(layout: str):
    """Five steps; with two ranks the sum of two gradients has one order, so the bits must be equal."""

    def check(device: torch.device) -> dict:
        ranks, rank = dist.get_world_size(), dist.get_rank()
        alone = small_model(device)
        expected = train(alone, alone, device, range(ranks), 1 / ranks)
        model = small_model(device)
        if layout == "fsdp_fp4":
            nt.gather_in_fp4(model)
        run = nn.parallel.DistributedDataParallel(model) if layout == "ddp" else sharded(list(model), model)
        found = train(model, run, device, range(rank, rank + 1), 1.0)
        worst = max(float((found[n] - e).norm() / e.norm().clamp(min=1e-30)) for n, e in expected.items())
        same = all(torch.equal(found[n], e) for n, e in expected.items())
        return all_ranks(same if ranks == 2 else worst < 1e-2, bitwise=same, largest_difference=worst)

    return check


def tensor_parallel(device: torch.device) -> dict:
    """One colwise and one rowwise layer: what is no sum over ranks has the same operands, sums round to BF16 twice."""
    mesh, found = init_device_mesh(device.type, (dist.get_world_size(),)), {}
    for name, style in (("colwise", ColwiseParallel), ("rowwise", RowwiseParallel)):
        outcomes = []
        for parallel in (False, True):
            torch.manual_seed(3)
            layer = nt.QuantizedLinear(512, 384, bias=False, label=name).to(device)
            x = torch.randn(128, 512, device=device).bfloat16().requires_grad_()
            dy = torch.randn(128, 384, device=device).bfloat16()
            if parallel:
                layouts = {"input_layouts": Replicate(), "output_layouts": Replicate()}
                parallelize_module(layer, mesh, style(**layouts))
            torch.manual_seed(5)
            y = layer(x)
            y.backward(dy)
            dw = layer.weight.grad
            outcomes.append((y.detach(), x.grad, dw.full_tensor() if parallel else dw))
        differences = [
            float((b.float() - a.float()).abs().max() / a.float().abs().max()) for a, b in zip(*outcomes, strict=True)
        ]
        found[name] = dict(zip(("y", "dx", "dw"), differences, strict=True))
    whole = max(found["colwise"]["y"], found["colwise"]["dw"], found["rowwise"]["dx"], found["rowwise"]["dw"])
    sums = max(found["colwise"]["dx"], found["rowwise"]["y"])
    # a GPU's library adds in another order for another shape; the operands are the same bytes all the same
    passed = sums <= PARTIAL_SUMS and (whole == 0.0 or device.type == "cuda" and whole <= PARTIAL_SUMS)
    return all_ranks(passed, exact=whole == 0.0, differences=found)


CHECKS = {
    "sharded quantization": sharded_quantization, "ddp": training("ddp"), "fsdp": training("fsdp"),
    "fsdp with FP4 gather": training("fsdp_fp4"), "tensor parallel": tensor_parallel,
}  # fmt: skip


# What is measured ---------------------------------------------------------------------------------------------------


def bench_step(path: str, recipe: str, device: torch.device) -> dict:
    """Milliseconds of a step on one GPU alone and under FSDP2; ratios to BF16; bytes gathered in a step.

    BF16 weights travel as BF16 (FSDP's mixed precision); the recipe's either so too, or as FP4.
    """
    experiment = load_experiment(path)
    vocabulary = (experiment.model.config or {}).get("vocab_size", 256)
    model, rows = build_model(experiment, 0, vocabulary), {}
    for layout in ("one GPU", "FSDP2"):
        for side in ("bf16", "quantized", "quantized, FP4 gather"):
            if layout == "one GPU" and side.endswith("gather"):
                continue
            rows[f"{layout}: {side}"] = _measure(copy.deepcopy(model), experiment, recipe, device, layout, side)
            dist.barrier()
            if dist.get_rank() == 0:
                print(f"{layout}: {side}: {rows[f'{layout}: {side}']}", flush=True)
    ms = {name: row["ms"] for name, row in rows.items()}
    bf16, fp4 = rows["FSDP2: bf16"], rows["FSDP2: quantized, FP4 gather"]
    # The converted layers lie in the blocks, which are gathered as often as there are gathers beyond the root's one.
    times = (bf16["gathers"] - 1) / bf16["blocks"]
    others = bf16["gathered_bytes"] - 2 * fp4["converted_elements"] * times
    return {
        "experiment": Path(path).stem, "recipe": recipe, "rows": rows,
        "ratio_one_gpu": ms["one GPU: quantized"] / ms["one GPU: bf16"],
        "ratio_fsdp": ms["FSDP2: quantized"] / ms["FSDP2: bf16"],
        "ratio_fsdp_fp4_gather": ms["FSDP2: quantized, FP4 gather"] / ms["FSDP2: bf16"],
        # of all weights, embedding and head included, and of those of converted layers alone
        "gathered_to_bf16": fp4["gathered_bytes"] / bf16["gathered_bytes"],
        "converted_gathered_to_bf16": (fp4["gathered_bytes"] - others) / (bf16["gathered_bytes"] - others),
    }  # fmt: skip


def _measure(model: nn.Module, experiment, recipe: str, device: torch.device, layout: str, side: str) -> dict:
    size = (experiment.training.batch_size, experiment.data.sequence_length)
    torch.manual_seed(dist.get_rank())
    batch = torch.randint(0, model.config.vocab_size, size, device=device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    model = model.to(device).train()
    elements = 0
    if side != "bf16":
        report = nt.convert(model, recipe)
        elements = report.elements[0]
    blocks = Survey(model).blocks()[1]
    if layout == "FSDP2":
        if side.endswith("gather"):
            nt.gather_in_fp4(model)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        sharded(blocks, model, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device.type == "cuda")

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16):
            loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    repeats, warm_up = (REPEATS, WARM_UP) if device.type == "cuda" else (2, 1)
    for _ in range(warm_up):
        step()
    with gathered_bytes() as gathered:
        step()
    times = []
    for _ in range(repeats):  # the same number on every rank: FSDP's collectives must meet
        if layout == "FSDP2":
            dist.barrier()
        times.append(_seconds(step, device))
    memory = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    return {
        "ms": statistics.median(times) * 1e3, "gathered_bytes": sum(gathered), "gathers": len(gathered),
        "blocks": len(blocks), "converted_elements": elements, "peak_memory_bytes": memory,
    }  # fmt: skip


def _seconds(step, device: torch.device) -> float:
    if device.type != "cuda":
        begin = time.perf_counter()
        step()
        return time.perf_counter() - begin
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    step()
    end.record()
    torch.cuda.synchronize(device)
    return start.elapsed_time(end) / 1e3


if __name__ == "__main__":
    main()
