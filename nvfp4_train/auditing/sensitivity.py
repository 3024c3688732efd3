"""Which layers cost the most: each quantized alone, all others in BF16, on a fixed batch. And what to keep in BF16.

Every number is nats of loss. The error of Fprop shows in the loss itself. That of Dgrad and Wgrad shows in what a step
is worth: the weights move once against the gradient g, by the length r that gains most (a search along that line, in
BF16), and the loss behind that step is compared with the loss behind a step whose gradient has the error e of the
quantized GEMM:

    fprop           loss(w), Fprop quantized, - loss(w) in BF16
    dgrad, wgrad    (loss(w - r (g + e)) + loss(w - r (g - e))) / 2 - loss(w - r g), all in BF16; e of that GEMM
    added           fprop + the same with the e of all three GEMMs together

Both signs of e are tried since one draw of stochastic rounding happens to help or to harm, which says nothing about the
next; what is left is what noise costs through the curvature of the loss. ``gradient_error`` is the norm of e against
that of g.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import yaml
from torch import Tensor, nn

from nvfp4_train.auditing.steps import Loss, left_as_found
from nvfp4_train.conversion import converted_layers
from nvfp4_train.layer_state import begin_step
from nvfp4_train.recipe import BF16, LinearPlan
from nvfp4_train.schedule import GEMMS

BUDGET = 0.15  # of the step's matmul FLOPs that now run quantized: what the suggestion may give back to BF16
HALVINGS = 60  # of the first guess at a step's length; where none of them gains, the weights stand at a minimum


def rank_layers(
    model: nn.Module, losses: Sequence[Loss], coverage: dict[str, Any], budget: float = BUDGET
) -> dict[str, Any]:
    """``loss_bf16``, ``added_by_all`` (all layers quantized at once), ``step`` (its ``rate`` r and what it ``gained``
    in BF16), ``layers`` ranked by ``added``, and ``keep_bf16``: YAML for the layers that give back most loss a FLOP,
    up to ``budget`` of the quantized FLOPs.

    ``coverage``: that of an audit of the same model and batch; FLOPs are those that ran. For each layer there are
    three backward passes and ten forward ones. A cost is None where a loss was not finite, and ranks first. The model
    is left as it was found.
    """
    flops = _flops(converted_layers(model), coverage)
    total = sum(flops.values()) or 1
    with _Bench.of(model, losses) as bench:
        rows = []
        for name in bench.layers:
            measured = bench.cost_of([name])
            rows.append({"layer": name, **measured, "flops": flops[name] / total})
        together = bench.cost_of(list(bench.layers))
        found = {
            "loss_bf16": bench.loss_bf16, "step": {"rate": bench.rate, "gained": bench.loss_bf16 - bench.loss_behind},
            "added_by_all": together["added"],
        }  # fmt: skip
    rows.sort(key=_cost, reverse=True)
    chosen, left = [], budget
    for row in sorted(rows, key=lambda row: _cost(row) / max(row["flops"], 1e-12), reverse=True):
        if _cost(row) > 0 and row["flops"] <= left:
            chosen.append(row)
            left -= row["flops"]
    kept = suggestion([row["layer"] for row in chosen])
    return found | {"layers": rows, "budget": budget, "kept_flops": budget - left, "keep_bf16": kept}


def suggestion(names: list[str]) -> str:
    """YAML ready to paste into a recipe."""
    return yaml.safe_dump({"keep_bf16": {"modules": sorted(names)}}, sort_keys=False, width=100)


def told(row: dict[str, Any], key: str) -> str:
    """A cost of a row of ``layers`` for a reader; a file of an earlier version may lack it."""
    if key not in row:
        return "–"
    return "not finite" if row[key] is None else f"{row[key]:+.5f}"


def _cost(row: dict[str, Any]) -> float:
    return math.inf if row["added"] is None else row["added"]


def _flops(layers: dict[str, nn.Module], coverage: dict[str, Any]) -> dict[str, int]:
    flops = dict.fromkeys(layers, 0)
    for row in coverage["phases"][0]:
        for name, layer in layers.items():
            if row["ours"] and (row["layer"] == layer.label or row["layer"].startswith(f"{layer.label}.")):
                flops[name] += row["flops"]
    return flops


def _only(plan: LinearPlan, gemms: Sequence[str]) -> LinearPlan:
    """``plan`` with every other GEMM in BF16."""
    return plan._replace(**{field: BF16 for field in plan._fields if field.partition("_")[0] not in gemms})


class _Bench:
    """A model on a fixed batch, whose layers can be quantized one by one and whose weights can take one step."""

    def __init__(self, model: nn.Module, losses: Sequence[Loss], reset: Callable[[], None]):
        self.model, self.losses, self.reset = model, losses, reset
        self.layers = converted_layers(model)
        self.plans = {name: layer.plan for name, layer in self.layers.items()}
        self.weights = [p for p in model.parameters() if p.requires_grad]
        self.start = [p.detach().clone() for p in self.weights]
        self.buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]

    @classmethod
    @contextmanager
    def of(cls, model: nn.Module, losses: Sequence[Loss]) -> Iterator[_Bench]:
        """Dropout is off: layers that draw would shift its masks."""
        modes = {module: module.training for module in model.modules()}
        with left_as_found(model) as reset, torch.compiler.set_stance("force_eager"):
            bench = cls(model, losses, reset)
            try:
                model.eval()
                for layer in bench.layers.values():
                    if layer.__dict__.get("quantizer_step") is None:  # what remembers steps needs one
                        begin_step(layer, 0)
                bench._find_step()
                yield bench
            finally:
                bench._stand_at_start()
                for module, mode in modes.items():
                    module.training = mode

    def cost_of(self, names: list[str]) -> dict[str, Any]:
        """What these layers add when they and no others are quantized; None for what is not finite."""
        self._quantize(names, ("fprop",))
        found, errors = {"fprop": self._loss() - self.loss_bf16}, {}
        for gemms in (("dgrad",), ("wgrad",), GEMMS):
            self._quantize(names, gemms)
            error = _difference(self._gradient(), self.gradient)
            self._quantize([], ())
            cost = (self._loss_behind(error) + self._loss_behind(error, -1.0)) / 2 - self.loss_behind
            if gemms == GEMMS:
                found["added"] = found["fprop"] + cost
            else:
                found[gemms[0]], errors[gemms[0]] = cost, _norm(error) / (self.norm or 1.0)
        found |= {f"{gemm}_error": error for gemm, error in errors.items()}
        return {key: value if math.isfinite(value) else None for key, value in found.items()}

    def _find_step(self) -> None:
        """The BF16 gradient, and the length of the step along it that gains most, to a factor of 2."""
        self._quantize([], ())
        self.loss_bf16 = self.loss_behind = self._loss()
        self.gradient = self._gradient()
        self.norm, self.rate = _norm(self.gradient), 0.0
        rate = abs(self.loss_bf16) / self.norm**2 if self.norm else 0.0
        for _ in range(HALVINGS if rate else 0):
            if self._try(rate):
                break
            rate /= 2
        while self.rate and self._try(2 * self.rate):
            pass

    def _try(self, rate: float) -> bool:
        """Takes ``rate`` for the step's length if that gains more."""
        before, self.rate = self.rate, rate
        loss = self._loss_behind()
        if not loss < self.loss_behind:
            self.rate = before
            return False
        self.loss_behind = loss
        return True

    @torch.no_grad()
    def _loss_behind(self, error: list[Tensor | None] | None = None, sign: float = 1.0) -> float:
        """The loss behind one step from where the model was found, with ``error`` in its gradient."""
        for i, (weight, start, grad) in enumerate(zip(self.weights, self.start, self.gradient, strict=True)):
            if grad is not None:
                wrong = grad if error is None else grad + sign * error[i]
                weight.copy_(start.float() - self.rate * wrong)
        loss = self._loss()
        self._stand_at_start()
        return loss

    def _quantize(self, names: Sequence[str], gemms: Sequence[str]) -> None:
        """``gemms`` of the layers ``names``, and nothing else."""
        for name, layer in self.layers.items():
            layer.plan = _only(self.plans[name], gemms if name in names else ())

    def _begin(self) -> None:
        """The same draws and the same memory of earlier steps each time."""
        torch.manual_seed(0)
        with torch.no_grad():
            for buffer, kept in self.buffers:
                buffer.copy_(kept)

    @torch.no_grad()
    def _loss(self) -> float:
        self._begin()
        return sum(float(one()) for one in self.losses) / len(self.losses)

    def _gradient(self) -> list[Tensor | None]:
        """Of the mean loss, float32, by weight; None for one that it does not reach."""
        if not self.weights:
            return []
        self._begin()
        self.reset()
        for loss in self.losses:
            loss().backward()
        grads = [p.grad if getattr(p, "main_grad", None) is None else p.main_grad for p in self.weights]
        found = [None if grad is None else grad.detach().float() / len(self.losses) for grad in grads]
        self.reset()
        return found

    @torch.no_grad()
    def _stand_at_start(self) -> None:
        for weight, start in zip(self.weights, self.start, strict=True):
            weight.copy_(start)


def _difference(one: list[Tensor | None], other: list[Tensor | None]) -> list[Tensor | None]:
    return [None if a is None or b is None else a - b for a, b in zip(one, other, strict=True)]


def _norm(gradient: list[Tensor | None]) -> float:
    return math.sqrt(sum(float(grad.double().square().sum()) for grad in gradient if grad is not None))
