"""explain: what a recipe does, where it saves, where it may fail and how to find out - in plain words and numbers.

explanation = explain("quartet2", config)       # config: of transformers, or None
print("\\n".join(explanation_lines(explanation)))
"""

from os import PathLike
from typing import Any

from nvfp4_train.explaining.costs import flops_by_format, model_costs, state_bytes
from nvfp4_train.explaining.operands import BF16_BITS, bits_of, in_words, needs, needs_lines
from nvfp4_train.explaining.risks import risks
from nvfp4_train.recipe import GEMMS, Recipe, load_recipe

TOKENS = 2048  # the sequence that activations and attention are counted for, where the model reads as many
WHO = {"bf16": "BF16", "recipe": "recipe", "here": "in this emulation"}


def explain(recipe: str | PathLike | dict | Recipe, config: Any = None, tokens: int | None = None) -> dict[str, Any]:
    """A recipe as data: operands, state_bytes (a converted parameter), flops (shares of training), risks, and ``model``
    if a transformers config is given: what it costs there, for one sequence of ``tokens``.

    Raises ValueError (RecipeError, ConversionError among them) for a recipe or model that cannot be.
    """
    recipe = load_recipe(recipe)
    found: dict[str, Any] = {"name": recipe.name, "source": recipe.source, "weight_match": recipe.weight_match}
    found["operands"] = [
        {"gemm": gemm, "operand": name, "bits": bits_of(spec), "words": in_words(spec), **spec.to_dict()}
        for gemm in GEMMS
        for name, spec in getattr(recipe, gemm).operands.items()
    ]
    found["needs"] = needs(recipe)
    found["state_bytes"] = state_bytes(recipe)
    found["flops"] = {
        gemm: {name: float(share) for name, share in parts.items()} for gemm, parts in flops_by_format(recipe).items()
    }
    found["saved_activation_bytes"] = {"bf16": BF16_BITS / 8, "recipe": bits_of(recipe.wgrad.input) / 8}
    found["schedule"] = [phase.to_dict() for phase in recipe.schedule]
    found["keep_bf16"] = recipe.keep_bf16.to_dict()
    found["risks"] = [vars(risk) | {"verify": risk.verify.format(recipe=recipe.name)} for risk in risks(recipe)]
    if config is not None:
        found["model"] = model_costs(recipe, config, tokens or _sequence(config))
    return found


def _sequence(config: Any) -> int:
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return min(TOKENS, getattr(text, "max_position_embeddings", None) or TOKENS)


def explanation_lines(explanation: dict[str, Any]) -> list[str]:
    """The same in words, for a terminal."""
    e = explanation
    lines = [f"{e['name']}  ({e['source']})", "", "What it does"]
    lines += [f"  {o['gemm']:5} {o['operand']:11} {o['bits']:5.4g} bits  {o['words']}" for o in e["operands"]]
    lines += [f"  then: {_phase(phase)}" for phase in e["schedule"]]
    lines += ["", "What it needs", *(f"  {line}" for line in needs_lines(e["needs"]))]
    lines += ["", "Where it saves", *(f"  {line}" for line in _saving_lines(e))]
    if "model" in e:
        lines += ["", *_model_lines(e["model"])]
    lines += ["", "Where it may fail", *_risk_lines(e["risks"])]
    return lines


def _phase(phase: dict[str, Any]) -> str:
    gemms = [f"{gemm} {'in BF16' if phase[gemm] == 'bf16' else 'changes'}" for gemm in GEMMS if gemm in phase]
    if "when" in phase:
        begin = f"once {phase['when']} is below {phase['below']:g}"
    elif "from_step" in phase:
        begin = f"from step {phase['from_step']}"
    else:
        begin = f"from {phase['from']:g} of training"
    return f"{begin}: {', '.join(gemms)}"


def _saving_lines(e: dict[str, Any]) -> list[str]:
    state = e["state_bytes"]
    rows = []
    for who, parts in state.items():
        told = " + ".join(f"{value:.4g} {name}" for name, value in parts.items() if value)
        rows.append(f"training state, bytes a converted parameter, {WHO[who]}: {sum(parts.values()):.4g} = {told}")
    before, after = (sum(state[who].values()) for who in ("bf16", "recipe"))
    rows.append(
        f"  gradient, master weight and optimizer stay as they are: {100 * (1 - after / before):.1f}% less than BF16"
    )
    saved = e["saved_activation_bytes"]
    rows.append(f"saved for backward, bytes an input element: {saved['recipe']:.4g} instead of {saved['bf16']:.4g}")
    for gemm, parts in e["flops"].items():
        told = ", ".join(f"{100 * share:.4g}% of training in {name}" for name, share in parts.items())
        rows.append(f"FLOPs of {gemm}: {told}")
    return rows


def _model_lines(m: dict[str, Any]) -> list[str]:
    share = m["converted_parameters"] / m["parameters"]
    lines = [
        f"On this model ({m['model_type']}, {m['parameters']:,} parameters, one sequence of {m['tokens']:,} tokens)",
        f"  {m['converted_layers']} layers with {100 * share:.1f}% of the parameters are converted",
    ]
    for what, label in (("state_bytes", "training state"), ("saved_activation_bytes", "inputs saved by linear layers")):
        told = ", ".join(f"{_bytes(value)} {WHO[who]}" for who, value in m[what].items())
        lines.append(f"  {label}: {told}")
    total = sum(m["flops_per_token"].values())
    lines.append(f"  training FLOPs a token: {total:.4g}")
    rows = sorted(m["flops_per_token"].items(), key=lambda item: -item[1])
    return lines + [f"    {100 * flops / total:5.1f}%  {name}" for name, flops in rows]


def _bytes(number: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{number:.4g} {unit}"
        number /= 1024
    return f"{number:.4g} TiB"


def _risk_lines(found: list[dict[str, Any]]) -> list[str]:
    if not found:
        return ["  nothing is quantized: nothing of this kind"]
    lines = []
    for risk in found:
        lines.append(f"  {'!' if risk['serious'] else '-'} {risk['where']}: {risk['text']} ({risk['source']})")
        lines.append(f"    check: {risk['verify']}")
    return lines
