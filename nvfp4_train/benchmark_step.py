"""``bench step``: a training step of an experiment's model, recipe against BF16, as ``train`` runs it."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from nvfp4_train import ledger
from nvfp4_train.benchmark import SETTLED_SECONDS, kernel_times, median_seconds, quantization_time
from nvfp4_train.conversion import convert
from nvfp4_train.experiment.compiling import compile_blocks, next_token_loss
from nvfp4_train.experiment.config import Experiment
from nvfp4_train.experiment.errors import ExperimentError
from nvfp4_train.experiment.graphs import Replayed
from nvfp4_train.experiment.model import build_model

PROFILED = 12  # kernels in a profile


def bench_step(
    experiment: Experiment, recipe: str, target: torch.device, *,
    compiled: bool = False, graphs: bool = False, threads: int = 1, repeats: int = 10,
) -> dict:  # fmt: skip
    """A training step (forward, backward, AdamW) of the experiment's model under the recipe against BF16, on random
    tokens; both sides ``compiled`` and replayed as CUDA ``graphs`` where asked.

    On a GPU also peak memory, one side at a time, beyond what stood there before its first step (a recorded one's
    includes the recording); the kernels that take longest; and the milliseconds that quantize. Raises ExperimentError
    for graphs on a CPU.
    """
    if graphs and target.type != "cuda":
        raise ExperimentError("CUDA graphs need a GPU: leave out --graphs on a CPU")
    torch.set_num_threads(threads)
    vocabulary = (experiment.model.config or {}).get("vocab_size", 256)
    size = (experiment.training.batch_size, experiment.data.sequence_length + 1)
    batch = torch.randint(0, vocabulary, size, device=target)
    functions, memory, profiles = {}, {}, {}
    for name in ("bf16", "quantized"):
        with ledger.recording() as log:
            chosen = recipe if name == "quantized" else None
            functions[name] = _step(experiment, vocabulary, chosen, batch.device, compiled, graphs)
            if target.type == "cuda":
                torch.cuda.reset_peak_memory_stats(target)
            before = torch.cuda.memory_allocated(target) if target.type == "cuda" else 0
            functions[name](batch)
        functions[name] = partial(functions[name], batch)
        if target.type == "cuda":
            memory[name] = torch.cuda.max_memory_allocated(target) - before
            profiles[name] = kernel_times(functions[name], target)
    seconds = median_seconds(functions, target, repeats, SETTLED_SECONDS)
    row = {
        "recipe": recipe,
        "tokens": experiment.training.batch_size * experiment.data.sequence_length,
        "compiled": compiled,
        "graphs": graphs,
        "bf16_ms": seconds["bf16"] * 1e3,
        "quantized_ms": seconds["quantized"] * 1e3,
        "ratio": seconds["quantized"] / seconds["bf16"],
        "quantized_gemms": len(log.gemms()),
        "peak_step_bytes": memory,
    }
    if profiles:
        row["device_ms"] = {name: sum(times.values()) for name, times in profiles.items()}
        row["quantization_ms"] = quantization_time(profiles["quantized"])
        row["kernels_ms"] = {name: dict(list(times.items())[:PROFILED]) for name, times in profiles.items()}
    return row


def _step(
    experiment: Experiment, vocabulary: int, recipe: str | None, device: torch.device, compiled: bool, graphs: bool
) -> Callable[[Tensor], None]:
    """One step of a model of its own on a batch; ``recipe`` None is the BF16 control."""
    model = build_model(experiment, 0, vocabulary).to(device).train()
    if recipe is not None:
        convert(model, recipe)
    if compiled:
        compile_blocks(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device.type == "cuda")

    def accumulate(windows: Tensor) -> Tensor:
        loss = next_token_loss(model, windows, compiled)
        loss.backward()
        return loss.detach()

    run = Replayed(accumulate, model.parameters()) if graphs else accumulate

    def step(windows: Tensor) -> None:
        run(windows)
        optimizer.step()
        optimizer.zero_grad(set_to_none=not graphs)

    return step
