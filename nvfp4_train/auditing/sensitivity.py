"""Which layers cost the most: each quantized alone, all others in BF16, on a fixed batch. And what to keep in BF16.

The loss is evaluated without a backward pass, so this ranks the error of Fprop; a layer whose gradients are the
problem shows in the operand statistics.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import yaml
from torch import Tensor, nn

from nvfp4_train.conversion import converted_layers
from nvfp4_train.recipe import BF16

BUDGET = 0.15  # of the step's matmul FLOPs that now run quantized: what the suggestion may give back to BF16


@torch.no_grad()
def rank_layers(
    model: nn.Module, losses: Sequence[Callable[[], Tensor]], coverage: dict[str, Any], budget: float = BUDGET
) -> dict[str, Any]:
    """``loss_bf16`` (nats), ``layers`` ranked by ``added`` (nats that quantizing this layer alone adds to the loss),
    and ``keep_bf16``: YAML for the layers that give back most loss a FLOP, up to ``budget`` of the quantized FLOPs.

    ``coverage``: that of an audit of the same model and batch; FLOPs are those that ran.
    """
    layers = converted_layers(model)
    plans = {name: layer.plan for name, layer in layers.items()}
    flops = {name: 0 for name in layers}
    for row in coverage["phases"][0]:
        for name, layer in layers.items():
            if row["ours"] and (row["layer"] == layer.label or row["layer"].startswith(f"{layer.label}.")):
                flops[name] += row["flops"]
    total = sum(flops.values()) or 1

    def loss() -> float:
        with torch.random.fork_rng(devices=_devices(model)):
            torch.manual_seed(0)  # stochastic recipes draw the same numbers each time
            return sum(float(one()) for one in losses) / len(losses)

    plain = next(iter(plans.values()))._replace(**dict.fromkeys(next(iter(plans.values()))._fields, BF16))
    try:
        for layer in layers.values():
            layer.plan = plain
        base = loss()
        rows = []
        for name, layer in layers.items():
            layer.plan = plans[name]
            rows.append({"layer": name, "added": loss() - base, "flops": flops[name] / total})
            layer.plan = plain
        for name, layer in layers.items():
            layer.plan = plans[name]
        together = loss() - base
    finally:
        for name, layer in layers.items():
            layer.plan = plans[name]
    rows.sort(key=lambda row: -row["added"])
    chosen, left = [], budget
    for row in sorted(rows, key=lambda row: -row["added"] / max(row["flops"], 1e-12)):
        if row["added"] > 0 and row["flops"] <= left:
            chosen.append(row)
            left -= row["flops"]
    return {
        "loss_bf16": base, "added_by_all": together, "layers": rows, "budget": budget,
        "kept_flops": budget - left, "keep_bf16": suggestion([row["layer"] for row in chosen]),
    }  # fmt: skip


def suggestion(names: list[str]) -> str:
    """YAML ready to paste into a recipe."""
    return yaml.safe_dump({"keep_bf16": {"modules": sorted(names)}}, sort_keys=False, width=100)


def _devices(model: nn.Module) -> list[int]:
    return sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})
