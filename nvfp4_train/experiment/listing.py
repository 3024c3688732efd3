"""The shipped recipes: format and bits per value of each GEMM's operands."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from nvfp4_train.formats import FORMATS
from nvfp4_train.recipe import GEMMS, load_recipe, recipe_names


def recipe_rows() -> list[dict[str, Any]]:
    """One row a recipe: {name, source, fprop, dgrad, wgrad, keep_bf16, schedule}; a GEMM is a list of its operands."""
    rows = []
    for name in recipe_names():
        recipe = load_recipe(name)
        row: dict[str, Any] = {"name": name, "source": recipe.source}
        for gemm in GEMMS:
            row[gemm] = [
                {"operand": operand, "bits": FORMATS[spec.format].bits_per_value, **spec.to_dict()}
                for operand, spec in getattr(recipe, gemm).operands.items()
            ]
        rows.append(row | {"keep_bf16": recipe.keep_bf16.to_dict(), "schedule": [p.to_dict() for p in recipe.schedule]})
    return rows


def recipe_lines(rows: list[dict[str, Any]]) -> list[str]:
    """Two lines a recipe: formats with their bits per value, and what sets it apart."""
    width = max(len(row["name"]) for row in rows)
    lines = [f"{'':{width}}  " + "".join(f"{gemm:14}" for gemm in GEMMS).rstrip()]
    for row in rows:
        lines.append(f"{row['name']:{width}}  " + "".join(f"{_formats(row[gemm]):14}" for gemm in GEMMS).rstrip())
        if special := _special(row):
            lines.append(f"    {'; '.join(special)}")
    return lines


def _formats(operands: list[dict[str, Any]]) -> str:
    return " x ".join(dict.fromkeys(f"{operand['format']} {operand['bits']:g}" for operand in operands))


def _special(row: dict[str, Any]) -> list[str]:
    operands = [(gemm, operand) for gemm in GEMMS for operand in row[gemm]]
    special = []
    if rounded := _gemms(g for g, o in operands if str(o.get("rounding", "")).startswith("stochastic")):
        special.append(f"SR in {rounded}")
    if rotated := _gemms(g for g, o in operands if o.get("hadamard")):
        special.append(f"Hadamard in {rotated}")
    if square := _gemms(g for g, o in operands if o["operand"] == "weight" and o.get("block") == "16x16"):
        special.append(f"16x16 weights in {square}")
    if blocks := row["keep_bf16"].get("blocks"):
        special.append(f"blocks in BF16: {', '.join(f'{key} {value}' for key, value in blocks.items())}")
    return special + [_switch(phase) for phase in row["schedule"]]


def _gemms(names: Iterable[str]) -> str:
    return "/".join(dict.fromkeys(names))


def _switch(phase: dict[str, Any]) -> str:
    gemms = [f"{gemm} {'to bf16' if phase[gemm] == 'bf16' else 'changes'}" for gemm in GEMMS if gemm in phase]
    return f"from {phase['from']:g}: {', '.join(gemms)}"
