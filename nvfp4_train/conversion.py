"""convert: linear layers and experts become quantized ones, in place, as a recipe says; the rest is told, with why.

Quantization that silently did nothing is the fault to fear, so everything doubtful is an error, and an error leaves the
model as it was.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike
from typing import Any

import torch
from torch import nn

from nvfp4_train.experts import QuantizedExperts, is_experts
from nvfp4_train.layer_state import begin_step
from nvfp4_train.linear import QuantizedLinear
from nvfp4_train.oscillation import remind
from nvfp4_train.recipe import LinearPlan, Recipe, load_recipe
from nvfp4_train.schedule import latched
from nvfp4_train.survey import ConversionError, Skipped, Survey, weights_of
from nvfp4_train.swapping import Quantized
from nvfp4_train.transposed import QuantizedConv1D

__all__ = [
    "ConversionError", "ConversionReport", "Skipped", "bf16_forward", "convert", "converted_layers", "set_progress",
]  # fmt: skip

# Marks a model given to convert with a recipe that quantizes nothing: set_progress and bf16_forward take it like any
# other, so that one training loop serves a recipe and its control. A plain attribute of the model, so that copies and
# pickles of it are marked too and its state_dict is not changed.
_CONTROL = "_nvfp4_train_control"


@dataclass(frozen=True)
class ConversionReport:
    """What ``convert`` did: the names of the layers it converted, and what it left alone and why."""

    recipe_name: str
    converted: list[str]
    skipped: list[Skipped]
    note: str = ""
    elements: tuple[int, int] = (0, 0)  # weight elements: converted, all matmul weights

    def to_dict(self) -> dict[str, Any]:
        return {
            "recipe": self.recipe_name,
            "converted": list(self.converted),
            "skipped": [skipped._asdict() for skipped in self.skipped],
            "note": self.note,
            "converted_elements": self.elements[0],
            "matmul_elements": self.elements[1],
        }

    def __str__(self) -> str:
        done, total = self.elements
        share = f", {100 * done / total:.1f}% of the matmul weights" if total else ""
        lines = [f"recipe {self.recipe_name}: {len(self.converted)} layers converted{share}"]
        lines += [self.note] if self.note else []
        rows = _grouped((name, "") for name in self.converted)
        left = _grouped((skipped.name, f"{skipped.kind}: {skipped.reason}") for skipped in self.skipped)
        width = max((len(name) for name, _, _ in rows + left), default=0)
        for verb, part in (("converted", rows), ("left", left)):
            lines += [f"  {verb:<9}  {count:>4} x {name:<{width}}  {why}".rstrip() for name, count, why in part]
        return "\n".join(lines)


def _grouped(rows: Iterable[tuple[str, str]]) -> list[tuple[str, int, str]]:
    """(name with its numbers as *, how many, why): the same layer of all blocks on one line."""
    counts = Counter(
        (re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name), re.sub(r"block \d+ of the", "among the", why))
        for name, why in rows
    )
    return [(name or "(the model itself)", count, why) for (name, why), count in counts.items()]


def convert(
    model: nn.Module, recipe: str | PathLike | dict | Recipe, *, backend: str | None = None
) -> ConversionReport:
    """Replaces, in place, the layers of ``model`` that ``recipe`` quantizes.

    These are ``nn.Linear``, and of transformers the experts of its MoE models and Conv1D. A subclass of nn.Linear that
    adds nothing but its construction is converted too; one with methods of its own would lose them and is left. The
    new layers hold the same Parameter objects (ties, requires_grad and optimizers stay as they are), hooks and training
    flag; a layer that hangs in several places is replaced in all of them. A recipe that quantizes nothing (``bf16``)
    leaves the modules and weights as they are.

    Args:
        recipe: a name, a path, a dict or a Recipe.
        backend: None chooses by each layer's device; or a request for ``backend.choose``; or ``te``, with which
            TransformerEngine does the GEMMs (linear layers only).

    Raises:
        ConversionError (a ValueError), with the model as it was: nothing would be converted; a glob that matches no
            module; blocks asked for that cannot be found or would all be kept; a model converted before; a parameter
            that is not finite.
        RecipeError, ValueError: a recipe or a backend that cannot be.
    """
    recipe = load_recipe(recipe)
    if not isinstance(model, nn.Module):
        raise ConversionError(f"expected a model (nn.Module), got {type(model).__name__}")
    survey = Survey(model)
    _refuse_sharded(model)
    _refuse_converted(survey)
    _refuse_not_finite(model)
    keep = recipe.keep_bf16
    kept = survey.kept_by_globs(keep)
    by_place = survey.kept_by_place(keep.blocks) if keep.blocks else {}
    if recipe.quantizes_nothing:
        setattr(model, _CONTROL, True)
        return _untouched(recipe, survey)

    chosen: dict[str, nn.Module] = {}
    skipped: list[Skipped] = []
    for name, module in survey.convertible().items():
        reason = kept.get(module) or by_place.get(module) or survey.why_not(module, recipe)
        if reason is None:
            chosen[name] = module
        else:
            skipped.append(Skipped(name, type(module).__name__, reason))
    skipped += [other for other, _ in survey.other_weights()] + survey.matched_only_others(keep)
    if not chosen:
        raise ConversionError(_nothing(recipe, skipped))
    if "" in chosen:
        raise ConversionError(
            f"the model itself is one {type(model).__name__} and cannot be replaced in place: use "
            "QuantizedLinear.from_linear or QuantizedExperts.of"
        )

    # all are built before one is put in its place, so that a backend that cannot run leaves the model whole
    built = {name: _twin(module, recipe, name, backend) for name, module in chosen.items()}
    for name, module in chosen.items():
        for parent, attribute in survey.places[module]:
            parent._modules[attribute] = built[name]
            if isinstance(parent, nn.TransformerEncoderLayer):
                parent.activation_relu_or_gelu = 0  # its fused inference path would read the weights unquantized
    return ConversionReport(recipe.name, list(chosen), skipped, elements=_elements(survey, chosen))


def _twin(module: nn.Module, recipe: Recipe, name: str, backend: str | None) -> QuantizedLinear | Quantized:
    if isinstance(module, nn.Linear):
        kind = QuantizedLinear
        if backend == "te":
            from nvfp4_train.integrations.transformer_engine import TransformerEngineLinear as kind
        return kind.from_linear(module, recipe, name, backend)
    kind = QuantizedExperts if is_experts(module) else QuantizedConv1D
    return kind.of(module, recipe, name, backend)


def set_progress(model: nn.Module, step: int, total_steps: int, measured: dict[str, float] | None = None) -> bool:
    """Moves the recipe's schedule to ``step`` of ``total_steps``; whether a GEMM of any layer switched.

    Call it before each step of a training loop (``step`` counts from 0); also right after a resume. ``measured``: what
    the trainer measured for phases that wait for it (conditions.py), where it did: ``{"grad_to_noise": 2.1}``. Raises
    ValueError for a step outside 0..total_steps, an unknown measurement and a model without converted layers.
    """
    for name, value in (("step", step), ("total_steps", total_steps)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(f"{name} must be a whole number, got {value!r}")
    if total_steps < 1:
        raise ValueError(f"total_steps must be at least 1, got {total_steps}")
    if not 0 <= step <= total_steps:
        raise ValueError(f"step must lie in 0..{total_steps} (total_steps), got {step}")
    switched = False
    plans: dict[int, LinearPlan] = {}
    for layer in _layers(model):
        key = id(layer.recipe)  # layers of one conversion share their recipe
        layer.reached = latched(layer.recipe.schedule, getattr(layer, "reached", ()), measured or {})
        if key not in plans:
            plans[key] = layer.recipe.plan(step / total_steps, step, layer.reached)
        if layer.plan != plans[key]:
            layer.plan = plans[key]
            switched = True
        remind(layer, step, total_steps)
        begin_step(layer, step)
    return switched


@contextmanager
def bf16_forward(model: nn.Module) -> Iterator[None]:
    """Within it, Fprop of every converted layer runs in BF16: the loss of the same weights without forward error.

    Raises ValueError for a model without converted layers.
    """
    before = [(layer, layer.plan) for layer in _layers(model)]
    try:
        for layer, plan in before:
            layer.plan = plan._replace(fprop_input="bf16", fprop_weight="bf16")
        yield
    finally:
        for layer, plan in before:
            layer.plan = plan


def converted_layers(model: nn.Module) -> dict[str, QuantizedLinear | Quantized]:
    """The converted layers of a model, by name: each has ``recipe``, ``plan``, ``label`` and ``backend``."""
    return {name: module for name, module in model.named_modules() if isinstance(module, QuantizedLinear | Quantized)}


def _layers(model: nn.Module) -> list[QuantizedLinear | Quantized]:
    layers = list(converted_layers(model).values())
    if not layers and not any(_CONTROL in module.__dict__ for module in model.modules()):
        raise ValueError("the model has no converted layer: call convert(model, recipe) first")
    return layers


def _refuse_sharded(model: nn.Module) -> None:
    """FSDP knows the modules it was given: it would gather weights into layers that are no longer there."""
    for name, module in model.named_modules():
        if hasattr(module, "unshard") and hasattr(module, "reshard"):
            raise ConversionError(f"{name or 'the model'} is sharded by FSDP already: call convert before fully_shard")


def _refuse_converted(survey: Survey) -> None:
    for name, module in survey.convertible().items():
        if isinstance(module, QuantizedLinear | Quantized):
            raise ConversionError(
                f"the model is converted already ({name or 'the model itself'} runs recipe {module.recipe.name}): "
                "build it anew and convert that; to give parts of a model recipes of their own, convert each part once"
            )


def _refuse_not_finite(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if parameter.is_meta or isinstance(parameter, nn.UninitializedParameter) or not parameter.is_floating_point():
            continue
        if not torch.isfinite(parameter.detach()).all():
            raise ConversionError(f"parameter {name} holds NaN or Inf: a model like that is not worth converting")


def _untouched(recipe: Recipe, survey: Survey) -> ConversionReport:
    reason = f"recipe {recipe.name} quantizes nothing"
    skipped = [Skipped(name, type(module).__name__, reason) for name, module in survey.convertible().items()]
    skipped += [other for other, _ in survey.other_weights()]
    note = f"{reason}: the model is left as it is"
    return ConversionReport(recipe.name, [], skipped, note, _elements(survey, {}))


def _nothing(recipe: Recipe, skipped: list[Skipped]) -> str:
    if not skipped:
        return f"recipe {recipe.name} converts no layer: the model has no nn.Linear, experts or Conv1D"
    rows = _grouped((other.name, f"{other.kind}: {other.reason}") for other in skipped)
    told = "; ".join(f"{count} x {name} ({why})" for name, count, why in rows[:5])
    return f"recipe {recipe.name} converts no layer. Left as they are: {told}{'; and more' if len(rows) > 5 else ''}"


def _elements(survey: Survey, chosen: dict[str, nn.Module]) -> tuple[int, int]:
    """Weight elements of the converted layers and of all layers of a matmul kind, tied weights counted once."""
    done = {id(weight): weight.numel() for module in chosen.values() for weight in weights_of(module)}
    everything = dict(done)
    for module in survey.convertible().values():
        everything |= {id(weight): weight.numel() for weight in weights_of(module)}
    everything |= {id(parameter): parameter.numel() for _, parameter in survey.other_weights()}
    return sum(done.values()), sum(everything.values())
