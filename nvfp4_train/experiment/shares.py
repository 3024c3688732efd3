"""Which share of a training step's matmul FLOPs runs in which format: measured on one sequence, not computed."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from nvfp4_train import ledger
from nvfp4_train.auditing.coverage import format_name
from nvfp4_train.auditing.matmuls import ForeignMatmuls
from nvfp4_train.conversion import converted_layers, set_progress
from nvfp4_train.layer_state import forget
from nvfp4_train.recipe import BF16, Recipe

TICKS = 10**6  # a schedule's fractions as steps of a training this long
GEMM_ORDER = ("fprop", "dgrad", "wgrad", "attention")


def matmul_shares(model: nn.Module, windows: Tensor, recipe: Recipe) -> list[dict[str, Any]]:
    """Rows {gemm, format, share} whose shares sum to 1, over the whole of training: phases weigh by their length.

    GEMMs of converted layers come from the ledger, the rest (head, attention) is seen as it runs. `windows`: int64
    [1, sequence_length + 1].
    """
    starts = [*recipe.starts, 1.0]
    total: Counter[tuple[str, str]] = Counter()
    for start, end in zip(starts, starts[1:], strict=False):
        if not recipe.quantizes_nothing:
            set_progress(model, math.ceil(start * TICKS), TICKS)
        flops = _flops_of_a_step(model, windows)
        everything = sum(flops.values())
        for key, value in flops.items():
            total[key] += (end - start) * value / everything
    if not recipe.quantizes_nothing:
        set_progress(model, 0, TICKS)
        for layer in converted_layers(model).values():
            forget(layer)  # this was no step of the training
    ordered = sorted(total, key=lambda key: (GEMM_ORDER.index(key[0]), key[1] == f"{BF16} x {BF16}", key[1]))
    return [{"gemm": gemm, "format": kind, "share": total[gemm, kind]} for gemm, kind in ordered]


def _flops_of_a_step(model: nn.Module, windows: Tensor) -> Counter[tuple[str, str]]:
    foreign = ForeignMatmuls(model)
    model.train()
    # The plain attention backend has no products but those of the definition, on every device.
    with ledger.recording() as log, sdpa_kernel(SDPBackend.MATH), foreign.watching(model):
        with torch.autocast(windows.device.type, dtype=torch.bfloat16):
            logits = model(input_ids=windows[:, :-1], use_cache=False).logits
        F.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten()).backward()
    model.zero_grad(set_to_none=True)
    flops: Counter[tuple[str, str]] = Counter()
    for row in log.gemms():
        flops[row["gemm"], f"{format_name(row['a'])} x {format_name(row['b'])}"] += row["flops"]
    for (kind, _), count in foreign.flops.items():
        flops[kind, f"{BF16} x {BF16}"] += count
    return flops
