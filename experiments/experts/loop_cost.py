"""What the loop over experts costs on a CPU: against one group of the same rows, and against grouped products.

    python experiments/experts/loop_cost.py > experiments/2026-11-30_experts/loop_cost.json

Forward and backward of one layer, one thread, medians, all variants measured in turn. ``loop``: QuantizedExperts.
``one group``: the same rows and the same FLOPs as one expert, so that only the splitting differs. ``bf16 loop``: every
operand in BF16, the same loop. ``bf16 grouped``: ``torch._grouped_mm`` on BF16, as transformers uses it. ``products``:
of what the loop does, only the Fprop products of decoded operands, each scaled in float32 and rounded once.
``weights``: only the quantization of the gate and up weights, by expert or as one matrix of the same elements (which is
not the same numbers: one amax), so that only the number of calls differs.
"""

import json
import statistics
import time

import torch
from torch import nn

from nvfp4_train.experts import QuantizedExperts
from nvfp4_train.quantization import quantize

TOKENS, TOP_K, HIDDEN, INNER = 512, 2, 128, 128
ROUNDS = 15


def routed(experts: int, tokens: int, top_k: int):
    """Uneven: expert e is chosen in proportion to 1 / (e + 1), and the last never."""
    chances = 1.0 / torch.arange(1, experts + 1)
    chances[-1] *= experts == 1
    index = torch.multinomial(chances.expand(tokens, -1), top_k, generator=torch.Generator().manual_seed(0))
    return index, torch.full((tokens, top_k), 1.0 / top_k)


def step_of(layer, rows: int, index, share):
    x = torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(1)).requires_grad_()

    def step():
        layer.zero_grad()
        layer(x, index, share).square().sum().backward()

    return step


class Grouped(nn.Module):
    """Experts in BF16 by grouped products; the sums over a token's experts as in QuantizedExperts."""

    def __init__(self, experts: int):
        super().__init__()
        self.up = nn.Parameter(torch.randn(experts, 2 * INNER, HIDDEN) / HIDDEN**0.5)
        self.down = nn.Parameter(torch.randn(experts, HIDDEN, INNER) / INNER**0.5)

    def forward(self, x, index, share):
        experts, order = torch.sort(index.reshape(-1), stable=True)
        ends = torch.searchsorted(experts, torch.arange(len(self.up)), right=True).int()
        y = torch._grouped_mm(x[order // index.shape[1]].bfloat16(), self.up.bfloat16().mT, offs=ends)
        gate, up = y.chunk(2, dim=-1)
        y = torch._grouped_mm(nn.functional.silu(gate) * up, self.down.bfloat16().mT, offs=ends)
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))
        return (y * share.reshape(-1)[order].unsqueeze(-1))[back].view(*index.shape, HIDDEN).sum(dim=1)


def products_of(experts: int):
    """(one by one, by one grouped product in float32) of the same operands; both round once, to the same bits."""
    counts = torch.bincount(routed(experts, TOKENS, TOP_K)[0].reshape(-1), minlength=experts)
    rows = torch.randn(TOKENS * TOP_K, HIDDEN).bfloat16()
    weights, alphas = torch.randn(experts, 2 * INNER, HIDDEN).bfloat16(), torch.rand(experts)
    split, ends = rows.split(counts.tolist()), counts.cumsum(0).int()

    def one_by_one():
        parts = zip(split, weights, alphas, strict=True)
        return torch.cat([((a.float() @ w.float().T) * alpha).bfloat16() for a, w, alpha in parts if len(a)])

    def grouped():
        y = torch._grouped_mm(rows.float(), weights.float().mT, offs=ends)
        return (y * alphas.repeat_interleave(counts).unsqueeze(-1)).bfloat16()

    assert torch.equal(one_by_one(), grouped())
    return one_by_one, grouped


def weights_of(layer):
    """(one by one, as one matrix) of the gate and up weights."""
    weight, scheme = layer.gate_up_proj.detach(), layer.plan.fprop_weight
    one_by_one = lambda: [quantize(w, scheme, form="both") for w in weight]  # noqa: E731
    return one_by_one, lambda: quantize(weight.flatten(0, 1), scheme, form="both")


def medians(steps):
    """Milliseconds of each, measured in turn."""
    seen = {name: [] for name in steps}
    for number in range(ROUNDS + 2):
        for name, step in steps.items():
            begin = time.perf_counter()
            step()
            if number >= 2:
                seen[name].append(1e3 * (time.perf_counter() - begin))
    return {name: round(statistics.median(times), 2) for name, times in seen.items()}


def main() -> None:
    torch.set_num_threads(1)
    found = []
    for experts in (8, 32, 128):
        routing = routed(experts, TOKENS, TOP_K)
        single = torch.zeros(TOKENS * TOP_K, 1, dtype=torch.int64), torch.ones(TOKENS * TOP_K, 1)
        layer, plain = (QuantizedExperts(experts, HIDDEN, INNER) for _ in range(2))
        plain.plan = type(plain.plan)(*["bf16"] * len(plain.plan))
        (one_by_one, grouped), (by_expert, as_one) = products_of(experts), weights_of(layer)
        steps = {
            "loop": step_of(layer, TOKENS, *routing),
            "one group": step_of(QuantizedExperts(1, HIDDEN, INNER), TOKENS * TOP_K, *single),
            "bf16 loop": step_of(plain, TOKENS, *routing), "bf16 grouped": step_of(Grouped(experts), TOKENS, *routing),
            "products one by one": one_by_one, "products grouped": grouped,
            "weights one by one": by_expert, "weights as one matrix": as_one,
        }  # fmt: skip
        busy = int((torch.bincount(routing[0].reshape(-1), minlength=experts) > 0).sum())
        found.append({"experts": experts, "with_tokens": busy, "milliseconds": medians(steps)})
    shape = {"tokens": TOKENS, "top_k": TOP_K, "hidden": HIDDEN, "inner": INNER}
    print(json.dumps({"torch": torch.__version__, "threads": 1, **shape, "rows": found}, indent=1))


if __name__ == "__main__":
    main()
