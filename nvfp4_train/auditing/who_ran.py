"""Who ran how: every layer is converted, or kept by the recipe, or named; and what ran in high precision, with why."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import Tensor, nn

from nvfp4_train.auditing.expectations import kept
from nvfp4_train.auditing.findings import Verdicts
from nvfp4_train.auditing.matmuls import ForeignMatmuls
from nvfp4_train.recipe import Recipe
from nvfp4_train.survey import Survey, is_convertible


def who_ran(
    model: nn.Module, recipe: Recipe, layers: dict[str, nn.Module], foreign: ForeignMatmuls, verdicts: Verdicts
) -> None:
    """Every linear layer is either converted, or kept by the recipe, or named here."""
    keep = kept(model, recipe)
    for name, layer in layers.items():
        if layer in keep:
            verdicts.failed("keep_bf16", name, f"ran quantized, and the recipe keeps it ({keep[layer]})")
    ran = {where for (_, where), flops in foreign.flops.items() if flops}
    if recipe.quantizes_nothing:
        if layers:
            told = f"recipe {recipe.name} quantizes nothing, and layers are converted"
            verdicts.failed("format", "", told)
        return
    survey = Survey(model)
    for name, module in model.named_modules():  # not the survey's list: what it forgets must be found, too
        if name in layers or not (isinstance(module, nn.Linear) or is_convertible(module)):
            continue
        if module in keep:
            verdicts.held("keep_bf16: a layer that the recipe keeps ran in high precision")
        elif any(where.startswith(f"{name}.") for where in ran):
            why = survey.why_not(module, recipe) or "nothing is known that would keep it from being converted"
            verdicts.failed(
                "not_converted", name, f"a {type(module).__name__} ran in high precision and the recipe does not "
                f"keep it: {why}. Name it in keep_bf16 if that is meant",
            )  # fmt: skip
    if layers:
        verdicts.held("converted layers ran in this library's products", len(layers))
    else:
        verdicts.failed("not_converted", "", "no layer of the model is converted")


def skipped(
    model: nn.Module, recipe: Recipe, layers: dict[str, nn.Module], rows: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """What ran in high precision, each with its share of the step and the reason where there is one."""
    total = sum(row["flops"] for row in rows) or 1
    flops: Counter[str] = Counter()
    for row in rows:
        if not row["quantized"] and row["gemm"] != "attention":
            flops[row["layer"]] += row["flops"]
    labels = {layer.label for layer in layers.values()}
    keep = kept(model, recipe)
    survey = Survey(model)
    parents = {f"{n}.{k}": m for n, m in survey.modules.items() for k in m._parameters}
    found = []
    for layer, count in flops.items():
        module = parents.get(layer) or survey.modules.get(layer)
        reason = keep.get(module) if module is not None else None
        if reason is None and module is not None and module in survey.convertible().values():
            reason = survey.why_not(module, recipe) if module not in layers.values() else None
        reason = reason or ("by the recipe" if layer in labels else "a product outside any nn.Linear")
        found.append({"layer": layer, "reason": reason, "share": count / total})
    attention = sum(row["flops"] for row in rows if row["gemm"] == "attention")
    if attention:
        found.append({"layer": "attention", "reason": "products of two activations", "share": attention / total})
    return sorted(found, key=lambda row: -row["share"])


def received(model: nn.Module, module: nn.Module) -> dict[str, Tensor | None]:
    """What the run left in ``.grad`` (or ``main_grad``) of a layer's parameters that no other module uses."""
    found: dict[str, Tensor | None] = {}
    for key, parameter in module.named_parameters(recurse=False):
        users = sum(p is parameter for m in model.modules() for p in m._parameters.values())
        if users == 1:
            main = getattr(parameter, "main_grad", None)
            found[key] = main if main is not None and key == "weight" else parameter.grad
    return found
