"""Which share of a training step's matmul FLOPs runs in which format: measured on one sequence, not computed."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from nvfp4_kernels.scheme import Scheme
from nvfp4_train import ledger
from nvfp4_train.conversion import converted_layers, set_progress
from nvfp4_train.formats import FORMATS
from nvfp4_train.layer_state import forget
from nvfp4_train.recipe import BF16, Recipe

TICKS = 10**6  # a schedule's fractions as steps of a training this long
GEMM_ORDER = ("fprop", "dgrad", "wgrad", "attention")


def matmul_shares(model: nn.Module, windows: Tensor, recipe: Recipe) -> list[dict[str, Any]]:
    """Rows {gemm, format, share} whose shares sum to 1, over the whole of training: phases weigh by their length.

    GEMMs of converted layers come from the ledger. The rest (head, attention) is seen by torch's FLOP counter; a plain
    linear layer's backward is Dgrad and Wgrad in equal parts. `windows`: int64 [1, sequence_length + 1].
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
    plain = f"{BF16} x {BF16}"
    model.train()
    # The plain attention backend is made of matmuls that the counter knows on every device.
    with ledger.recording() as log, sdpa_kernel(SDPBackend.MATH):
        with FlopCounterMode(display=False) as forward, torch.autocast(windows.device.type, dtype=torch.bfloat16):
            logits = model(input_ids=windows[:, :-1], use_cache=False).logits
        with FlopCounterMode(display=False) as backward:
            F.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten()).backward()
    model.zero_grad(set_to_none=True)
    flops: Counter[tuple[str, str]] = Counter()
    for row in log.gemms():
        flops[row["gemm"], f"{format_name(row['a'])} x {format_name(row['b'])}"] += row["flops"]
    for counter, gemms in ((forward, ["fprop"]), (backward, ["dgrad", "wgrad"])):
        for operator, count in counter.get_flop_counts()["Global"].items():
            if "bmm" in str(operator):
                flops["attention", plain] += count
            else:
                for gemm in gemms:
                    flops[gemm, plain] += count / len(gemms)
    return flops


def format_name(scheme_text: str) -> str:
    """`e2m1:e4m3:...` -> `nvfp4`; `bf16` stays."""
    if scheme_text == BF16:
        return BF16
    scheme = Scheme.parse(scheme_text)
    return next(n for n, f in FORMATS.items() if (f.element, f.scale) == (scheme.element, scheme.scale))
