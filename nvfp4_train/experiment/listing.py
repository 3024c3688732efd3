"""The shipped recipes as a list, and one of them explained for a model that is named by a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from nvfp4_train.experiment.errors import ExperimentError
from nvfp4_train.explaining.operands import bits_of, needs, needs_lines
from nvfp4_train.explaining.summary import explain
from nvfp4_train.recipe import GEMMS, Recipe, load_recipe, recipe_names

FOUR_BITS = 4


def recipe_rows() -> list[dict[str, Any]]:
    """One row a recipe: {name, source, fprop, dgrad, wgrad, four_bits, needs, keep_bf16, schedule, ...}.

    A GEMM is a list of its operands, each with its bits a value; ``four_bits`` names the GEMMs whose operands both have
    4-bit elements; ``needs`` is that of ``explaining.operands.needs``.
    """
    rows = []
    for name in recipe_names():
        recipe = load_recipe(name)
        row: dict[str, Any] = {"name": name, "source": recipe.source}
        for gemm in GEMMS:
            row[gemm] = [
                {"operand": operand, "bits": bits_of(spec), **spec.to_dict()}
                for operand, spec in getattr(recipe, gemm).operands.items()
            ]
        row["four_bits"] = [gemm for gemm in GEMMS if _in_four_bits(recipe, gemm)]
        row["needs"] = needs(recipe)
        row["keep_bf16"] = recipe.keep_bf16.to_dict()
        row["schedule"] = [phase.to_dict() for phase in recipe.schedule]
        row["oscillation_reset"] = recipe.oscillation_reset is not None
        rows.append(row)
    return rows


def _in_four_bits(recipe: Recipe, gemm: str) -> bool:
    schemes = [spec.scheme for spec in getattr(recipe, gemm).operands.values()]
    return all(scheme is not None and scheme.number.bits <= FOUR_BITS for scheme in schemes)


def recipe_lines(rows: list[dict[str, Any]]) -> list[str]:
    """A few lines a recipe: formats with their bits per value, what sets it apart, what it needs, its source."""
    width = max(len(row["name"]) for row in rows)
    wide = max(len(_formats(row[gemm])) for row in rows for gemm in GEMMS) + 2
    lines = [f"{'':{width}}  " + "".join(f"{gemm:{wide}}" for gemm in GEMMS) + "in 4 bits"]
    for row in rows:
        cells = "".join(f"{_formats(row[gemm]):{wide}}" for gemm in GEMMS)
        lines.append(f"{row['name']:{width}}  {cells}{', '.join(row['four_bits']) or 'none'}")
        if special := _special(row):
            lines.append(f"    {'; '.join(special)}")
        lines += [f"    {line}" for line in needs_lines(row["needs"])]
        lines.append(f"    {row['source']}")
    return lines


def _formats(operands: list[dict[str, Any]]) -> str:
    return " x ".join(dict.fromkeys(f"{_format(operand)} {operand['bits']:.4g}" for operand in operands))


def _format(operand: dict[str, Any]) -> str:
    return f"{operand['element']}/{operand['scale']}" if operand["format"] == "custom" else operand["format"]


def _special(row: dict[str, Any]) -> list[str]:
    operands = [(gemm, operand) for gemm in GEMMS for operand in row[gemm]]

    def where(holds) -> str:
        return "/".join(dict.fromkeys(gemm for gemm, operand in operands if holds(operand)))

    told = {
        "SR in": where(lambda o: o.get("rounding") in ("stochastic", "stochastic8")),
        "SR of the scales in": where(lambda o: o.get("rounding") == "stochastic_scale"),
        "Hadamard in": where(lambda o: o.get("hadamard")),
        "square weight blocks in": where(lambda o: o["operand"] == "weight" and _square(o.get("block"))),
        "four over six in": where(lambda o: o.get("four_over_six")),
        "clipped in": where(lambda o: o.get("clip")),
        "requantized in": where(lambda o: o.get("requantize")),
        "mean apart in": where(lambda o: o.get("split", {}).get("part") == "mean"),
        "hot channels apart in": where(lambda o: o.get("split", {}).get("part") == "channels"),
        "amax history in": where(lambda o: o.get("history")),
    }
    special = [f"{what} {gemms}" for what, gemms in told.items() if gemms]
    if blocks := row["keep_bf16"].get("blocks"):
        special.append(f"blocks in BF16: {', '.join(f'{key} {value}' for key, value in blocks.items())}")
    if row["oscillation_reset"]:
        special.append("oscillating weights are reset")
    return special + [_switch(phase) for phase in row["schedule"]]


def _square(block: str | None) -> bool:
    rows, _, columns = (block or "").partition("x")
    return rows == columns and rows.isdigit()


def _switch(phase: dict[str, Any]) -> str:
    gemms = [f"{gemm} {'to bf16' if phase[gemm] == 'bf16' else 'changes'}" for gemm in GEMMS if gemm in phase]
    if "when" in phase:
        begin = f"once {phase['when']} is below {phase['below']:.3g}"
    elif "from_step" in phase:
        begin = f"from step {phase['from_step']}"
    else:
        begin = f"from {phase['from']:g}"
    return f"{begin}: {', '.join(gemms)}"


def explanation(recipe: str, model: Path | None, tokens: int | None = None) -> dict[str, Any]:
    """``explain`` of a recipe, on the model that a file names: an experiment, a config.json, or a folder with one.

    Raises ExperimentError, RecipeError or ConversionError (ValueErrors) with what to do.
    """
    if model is None:
        return explain(recipe)
    config, length = _config_of(model)
    loaded = load_recipe(recipe)
    try:
        return explain(loaded, config, tokens or length)
    except ValueError as error:
        raise ExperimentError(f"{model}: {error}") from None


def _config_of(path: Path) -> tuple[Any, int | None]:
    """(transformers config, sequence length where the file says one)."""
    from transformers import AutoConfig

    from nvfp4_train.experiment.config import load_experiment
    from nvfp4_train.experiment.data import Tokenizer
    from nvfp4_train.experiment.model import resolve_config

    if path.suffix in (".yaml", ".yml"):
        experiment = load_experiment(path)
        vocabulary = None if experiment.data.shards else Tokenizer(experiment).vocab_size
        return resolve_config(experiment, vocabulary), experiment.data.sequence_length
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise ExperimentError(f"{path} is no experiment file (.yaml), no config.json and no folder with a config.json")
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
        return AutoConfig.for_model(**settings), None
    except Exception as error:  # as many as there are ways to damage a config.json
        raise ExperimentError(f"{file} cannot be read: {' '.join(str(error).split())}") from None
