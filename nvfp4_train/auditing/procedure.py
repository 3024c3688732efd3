"""``nt.audit``: runs training steps of a model as it stands and says what of the recipe was proven.

The model, its gradients, its buffers and torch's generators are left as they were found.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from os import PathLike
from typing import Any

import torch
from torch import nn

from nvfp4_train import ledger
from nvfp4_train.auditing import chain_rule, coverage
from nvfp4_train.auditing.evidence import Call, Tape
from nvfp4_train.auditing.expectations import TICKS, Point, points, texts_at, weights_match_at
from nvfp4_train.auditing.findings import Audit, Verdicts
from nvfp4_train.auditing.gradients import gradients
from nvfp4_train.auditing.matmuls import ForeignMatmuls
from nvfp4_train.auditing.statistics import operand_statistics
from nvfp4_train.auditing.steps import Loss, backward_of, left_as_found, nudge
from nvfp4_train.auditing.switches import Others, Switches, repeated_seeds
from nvfp4_train.auditing.who_ran import received, skipped, who_ran
from nvfp4_train.conversion import converted_layers, set_progress
from nvfp4_train.linear import QuantizedLinear
from nvfp4_train.recipe import BF16, Recipe, load_recipe


def audit(
    model: nn.Module,
    losses: Loss | Sequence[Loss],
    recipe: str | PathLike | dict | Recipe | None = None,
    *,
    require: float | None = None,
    total_steps: int = TICKS,
) -> Audit:
    """Proves from what is executed that ``model`` trains as its recipe says, or says by name what is not so.

    Args:
        model: converted; or left as it is, for a recipe that quantizes nothing.
        losses: runs a forward pass on a batch and gives the scalar loss; called several times, so it must give the same
            batch each time. Several of them are the microbatches of one step: with two, an activation saved from the
            wrong one is found. Token counts that are no multiple of 16 also show that padding leaks nothing.
        recipe: what is asked for; None takes the recipe of the converted layers.
        require: the share (0..1) of the step's matmul FLOPs that must run quantized.
        total_steps: of the training, for recipes with a schedule: a phase must begin at exactly its step.

    Raises:
        ValueError: a model without converted layers and no recipe; a loss that is no finite scalar.
    """
    losses = [losses] if callable(losses) else list(losses)
    inner = getattr(model, "_orig_mod", model)
    wanted = _recipe_of(inner, recipe)
    result = Audit(wanted.name)
    verdicts = Verdicts()
    with left_as_found(inner) as reset:
        _Run(inner, losses, wanted, total_steps, verdicts, result, reset).everything()
    if require is not None and result.coverage["quantized"] < require:
        verdicts.failed(
            "coverage", "", f"{100 * require:g}% of the step's matmul FLOPs were to run quantized, "
            f"{100 * result.coverage['quantized']:.1f}% did",
        )  # fmt: skip
    elif require is not None:
        verdicts.held(f"at least {100 * require:g}% of the step's matmul FLOPs ran quantized")
    result.findings, result.proven = verdicts.findings, verdicts.proven
    return result


def _recipe_of(model: nn.Module, recipe: str | PathLike | dict | Recipe | None) -> Recipe:
    if recipe is not None:
        return load_recipe(recipe)
    recipes = {layer.recipe.name: layer.recipe for layer in converted_layers(model).values()}
    if len(recipes) != 1:
        found = f"runs {len(recipes)} recipes" if recipes else "has no converted layer"
        raise ValueError(f"the model {found}: give the recipe to audit, as in nt.audit(model, losses, 'nvidia_nvfp4')")
    return next(iter(recipes.values()))


class _Run:
    """One audit while it runs."""

    def __init__(
        self, model: nn.Module, losses: list[Loss], recipe: Recipe, total_steps: int, verdicts: Verdicts,
        result: Audit, reset: Callable[[], None],
    ):  # fmt: skip
        self.model, self.losses, self.recipe, self.total = model, losses, recipe, total_steps
        self.verdicts, self.result, self.reset = verdicts, result, reset
        self.layers = converted_layers(model)
        self.modules: dict[str, nn.Module] = {}
        for name, layer in self.layers.items():
            if isinstance(layer, QuantizedLinear):
                if layer.label in self.modules:
                    told = f"another layer is called {layer.label!r} too: their calls cannot be told apart"
                    verdicts.failed("label", name, told)
                self.modules[layer.label] = layer
        self.compiled = any(getattr(m, "_compiled_call_impl", None) is not None for m in model.modules())
        self.switches = Switches(verdicts, Others())

    def everything(self) -> None:
        parts: list[tuple[float, list[dict[str, Any]]]] = []
        moments = points(self.recipe, self.total)
        for number, (at, weight) in enumerate(moments):
            if number and at.step:
                self._just_before(at, moments[number - 1][0])
            self._move_to(at)
            tape, log, foreign = self._step(self.losses)
            self._judge(tape, at, number == 0)
            rows = coverage.table(log.gemms(), foreign.flops)
            parts.append((weight, rows))
            if number == 0:
                who_ran(self.model, self.recipe, self.layers, foreign, self.verdicts)
                self.result.notes += [f"{count} x {what}" for what, count in foreign.unknown.items()]
                if self.compiled:
                    self._compiled_step(log, at)
                self._after_an_optimizer_step(at)
        self.switches.conclude()
        self.result.coverage = coverage.shares(parts) | {"phases": [rows for _, rows in parts]}
        self.result.coverage["skipped"] = skipped(self.model, self.recipe, self.layers, parts[0][1])
        self.result.coverage["sentence"] = coverage.sentence(self.result.coverage)
        self.result.statistics = operand_statistics(self.switches)

    def _move_to(self, at: Point) -> None:
        """As a trainer does before a step, with a measurement where a phase waits for one."""
        if not self.layers:
            return
        waiting = [phase for phase in self.recipe.schedule if phase.start is None and phase.from_step is None]
        step = min(at.step, self.total)
        if not waiting:
            set_progress(self.model, step, self.total)
            return
        below = [phase.below for phase in waiting[: at.reached]]
        measured = {waiting[0].when: min(below) / 2 if below else 2 * max(phase.below for phase in waiting)}
        set_progress(self.model, step, self.total, measured=measured)

    def _step(self, losses: list[Loss], hooks: bool = True) -> tuple[Tape, ledger.Ledger, ForeignMatmuls]:
        """One step in eager mode, watched from everywhere."""
        tape, foreign = Tape(), ForeignMatmuls(self.model)
        self.reset()
        with ExitStack() as stack:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(ledger.observing(tape))
            log = stack.enter_context(ledger.recording())
            stack.enter_context(tape.hooked(self.modules if hooks else {}))
            stack.enter_context(foreign.watching(self.model))
            for loss in losses:
                backward_of(loss)
        return tape, log, foreign

    @torch.no_grad()
    def _judge(self, tape: Tape, at: Point, first: bool) -> None:
        texts = texts_at(self.recipe, at)
        must_match = weights_match_at(self.recipe, at)
        self.switches.others.calls = tape.calls
        for call in tape.calls:
            if call.layer in self.modules:
                chain_rule.all_ran(call, self.verdicts)
            good = {}
            for gemm, product in call.products.items():
                right_format = self._format(call, gemm, (product.a_scheme, product.b_scheme), texts, at)
                good[gemm] = self.switches.judge_product(call, gemm, product) and right_format
                if good[gemm]:
                    chain_rule.right_product(call, gemm, product, self.verdicts)
            chain_rule.same_rotation(call, self.verdicts)
            row = chain_rule.same_weight(call, must_match, self.verdicts)
            if row is not None and first:
                self.result.weights.append(row)
        for layer, module in self.modules.items():
            calls = tape.of_layer(layer)
            if not calls:
                self.verdicts.failed("not_run", layer, "the layer was converted and never called")
            gradients(calls, module, received(self.model, module), self.verdicts)
        repeated_seeds(tape.quantizations, self.verdicts)

    def _format(self, call: Call, gemm: str, seen: tuple[str, str], texts: dict[str, str], at: Point) -> bool:
        keys = [key for key in texts if key.startswith(f"{gemm}.")]
        wanted = tuple(texts[key] for key in keys)
        if seen == wanted:
            self.verdicts.held(f"{gemm} ran in the formats of the recipe")
            return True
        when = f" {at}" if self.recipe.schedule else ""
        told = f"{gemm} ran{when} with {' x '.join(seen)}, the recipe says {' x '.join(wanted)}"
        others = [texts_at(self.recipe, moment) for moment, _ in points(self.recipe, self.total)]
        if any(seen == tuple(other[key] for key in keys) for other in others):
            self.verdicts.failed("schedule", call.layer, f"{told}: that is another phase of the schedule")
        elif seen == (BF16, BF16):
            self.verdicts.failed("bf16_fallback", call.layer, told)
        else:
            self.verdicts.failed("format", call.layer, told)
        return False

    def _just_before(self, at: Point, before: Point) -> None:
        """The last step before a switch still runs the old formats."""
        last = before if at.reached else Point(at.step - 1, at.total)
        self._move_to(last)
        found = len(self.verdicts.findings)
        texts = texts_at(self.recipe, last)
        tape, _, _ = self._step(self.losses[:1], hooks=False)
        for call in tape.calls:
            for gemm, product in call.products.items():
                self._format(call, gemm, (product.a_scheme, product.b_scheme), texts, last)
        if len(self.verdicts.findings) == found:
            self.verdicts.held(f"schedule: the formats change {at}, not before")

    def _compiled_step(self, eager: ledger.Ledger, at: Point) -> None:
        """The compiled model's own step: hooks and dispatch modes do not reach into it, the ops themselves do."""
        tape = Tape()
        self.reset()
        with ledger.observing(tape), ledger.recording() as log:
            for loss in self.losses:
                backward_of(loss)
        counts = [
            sorted((r["layer"], r["gemm"], r["a"], r["b"], r["calls"]) for r in table.gemms()) for table in (eager, log)
        ]
        self.result.notes.append(
            "the model is compiled: its own products were counted and judged in the compiled step too, all others "
            "(attention, head) and the gradients in an eager step"
        )
        if not counts[1]:
            self.verdicts.failed(
                "compiled", "", "the compiled step ran none of the library's operators in Python: a CUDA graph was "
                "replayed; audit the model before it is captured",
            )  # fmt: skip
        elif counts[0] != counts[1]:
            self.verdicts.failed("compiled", "", "the compiled step ran other GEMMs than the eager step")
        else:
            self.verdicts.held("the compiled step runs the GEMMs of the eager step", len(counts[1]))
        if log.captured:
            self.result.notes.append("part of the step was captured in a CUDA graph and counted there, at capture")
        with torch.no_grad():
            tape.link()
            self._judge_compiled(tape, at)

    def _judge_compiled(self, tape: Tape, at: Point) -> None:
        texts = texts_at(self.recipe, at)
        for call in tape.calls:
            for gemm, product in call.products.items():
                self._format(call, gemm, (product.a_scheme, product.b_scheme), texts, at)
                if self.switches.judge_product(call, gemm, product):
                    chain_rule.right_product(call, gemm, product, self.verdicts)
            chain_rule.same_weight(call, weights_match_at(self.recipe, at), self.verdicts)

    def _after_an_optimizer_step(self, at: Point) -> None:
        """Moves the weights in place, as an optimizer does, and looks whether the next forward uses the new ones."""
        if not self.modules:
            return
        old = self.switches.others.old_weights = nudge(self.modules)
        try:
            tape, _, _ = self._step(self.losses[:1])
            self._judge_weights(tape, at)
        finally:
            with torch.no_grad():
                for label, weight in old.items():
                    self.modules[label].weight.copy_(weight)
            self.switches.others.old_weights = {}

    @torch.no_grad()
    def _judge_weights(self, tape: Tape, at: Point) -> None:
        self.switches.others.calls = []
        for call in tape.calls:
            fprop = call.products.get("fprop")
            if call.layer in self.modules and fprop is not None and fprop.b_scheme != BF16:
                if self.switches.judge_product(call, "fprop", fprop):
                    self.verdicts.held("after an optimizer step Fprop uses the new weight")
                chain_rule.same_weight(call, weights_match_at(self.recipe, at), self.verdicts)
