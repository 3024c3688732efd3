"""A recipe as TransformerEngine says it: ``NVFP4BlockScaling``, or the fields that it cannot express.

TransformerEngine has one NVFP4 recipe and switches for its parts. What it computes, without any:

    input        1x16 along K; for Wgrad anew from the source, 1x16 along the tokens after a 16-point Hadamard transform
    weight       16x16, shared by Fprop and Dgrad (``disable_2d_quantization``: 1x16 each way)
    grad_output  1x16, stochastic, for Dgrad; for Wgrad the same after the Hadamard transform

Everything else a recipe may ask for is refused, field by field. Two recipes that say the same still draw other random
numbers: TransformerEngine rounds with the GPU's instruction, by 8 bits an element from a generator of its own.

The arguments are those of TransformerEngine 2.20.2, read from its wheel: ``transformer_engine/common/recipe`` (the
class), ``pytorch/quantization.py`` (which quantizer gets which switch). ``tests/test_te_translation.py`` reads the
wheel again, without importing it.
"""

from typing import Any

from nvfp4_kernels.scheme import SIGN_MASK, Scheme
from nvfp4_train.quantization import BF16
from nvfp4_train.recipe import GEMMS, LinearPlan, Recipe
from nvfp4_train.recipe_errors import Fault, RecipeError

VERSION = "2.20.2"
NAMES = ("fprop.input", "fprop.weight", "dgrad.grad_output", "dgrad.weight", "wgrad.grad_output", "wgrad.input")
# Every argument whose default TransformerEngine takes from an environment variable, so that none decides unseen
EXPLICIT = {
    "disable_rht": False, "disable_stochastic_rounding": False, "disable_2d_quantization": False,
    "row_scaled_activation": False, "nvfp4_4over6": "none", "nvfp4_4over6_e4m3_use_256": "none",
    "nvfp4_4over6_err_mode": "MAE", "backward_override": None,
}  # fmt: skip
KEYS = {  # attributes of a scheme that recipes write otherwise
    "select": "four_over_six", "range": "scale_range", "masked": "mask_clipped", "requantized": "requantize",
}  # fmt: skip
ROUNDINGS = ("stochastic", "stochastic8")
SELECTIONS = ("mse", "mae")


def te_phases(recipe: Recipe) -> list[tuple[str, dict[str, Any] | None]]:
    """(key path, arguments of ``NVFP4BlockScaling``) of each phase of training; None for one that is BF16 throughout.

    The first path is empty, the others are ``schedule.0`` and so on. Raises RecipeError (a ValueError) that lists every
    field TransformerEngine cannot express.
    """
    faults: list[Fault] = []
    if recipe.oscillation_reset is not None:
        faults.append(Fault(("oscillation_reset",), "TransformerEngine quantizes weights where nothing can reach them"))
    now = {name: getattr(recipe, name) for name in GEMMS}
    phases = []
    for index, phase in enumerate([None, *recipe.schedule]):
        path = () if phase is None else ("schedule", index - 1)
        now = now if phase is None else now | phase.gemms
        plan = LinearPlan(*(spec.text for gemm in now.values() for spec in gemm.operands.values()))
        try:
            phases.append((".".join(map(str, path)), te_arguments(plan)))
        except RecipeError as error:
            faults += [Fault((*path, *fault.path), fault.message) for fault in error.faults]
    if faults:
        raise RecipeError(f"recipe {recipe.name} with TransformerEngine {VERSION}", faults)
    return phases


def te_arguments(plan: LinearPlan) -> dict[str, Any] | None:
    """Arguments of ``NVFP4BlockScaling`` for one plan, each that an environment variable could change among them; None
    if all three GEMMs are BF16. Raises RecipeError as ``te_phases`` does."""
    schemes = {name: None if text == BF16 else Scheme.parse(text) for name, text in zip(NAMES, plan, strict=True)}
    gemms = {name: schemes[f"{name}.{'grad_output' if name == 'wgrad' else 'weight'}"] is not None for name in GEMMS}
    if not any(gemms.values()):
        return None
    faults = _which_gemms(gemms)
    for name, scheme in schemes.items():
        if scheme is not None:
            faults += [Fault((*name.split("."), field), message) for field, message in _own_faults(name, scheme)]
    faults += _between(schemes)
    if faults:
        raise RecipeError(f"TransformerEngine {VERSION}", faults)
    forward_only = not (gemms["dgrad"] or gemms["wgrad"])
    gradient = schemes["dgrad.grad_output"]
    hadamard = schemes["wgrad.input"].hadamard if gemms["wgrad"] else 0
    return EXPLICIT | _four_over_six(schemes) | {
        "disable_rht": not hadamard,
        "disable_stochastic_rounding": forward_only or not gradient.stochastic,
        "disable_2d_quantization": schemes["fprop.weight"].block == (1, 16),
        "backward_override": "high_precision" if forward_only else None,
    }  # fmt: skip


def _which_gemms(gemms: dict[str, bool]) -> list[Fault]:
    if not gemms["fprop"]:
        return [Fault(("fprop",), "bf16 alone: TransformerEngine quantizes all three or Fprop only")]
    if gemms["dgrad"] != gemms["wgrad"]:
        plain = "wgrad" if gemms["dgrad"] else "dgrad"
        return [Fault((plain,), "bf16 alone: TransformerEngine keeps Dgrad and Wgrad in BF16 together")]
    return []


def _own_faults(name: str, scheme: Scheme) -> list[tuple[str, str]]:
    """(field, what TransformerEngine has in its place) for one operand."""
    found: list[tuple[str, str]] = []
    if (scheme.element, scheme.scale, scheme.rule) != ("e2m1", "e4m3", "nvfp4"):
        return [("format", "TransformerEngine's recipe has E2M1 elements, E4M3 scales and one scale of the tensor")]
    blocks = ((16, 16), (1, 16)) if name.endswith("weight") else ((1, 16),)
    if scheme.block not in blocks:
        allowed = " or ".join(f"{rows}x{columns}" for rows, columns in blocks)
        found.append(("block", f"{scheme.block[0]}x{scheme.block[1]}: TransformerEngine has {allowed} here"))
    roundings = ("nearest", *ROUNDINGS) if name.endswith("grad_output") else ("nearest",)
    if scheme.rounding not in roundings:
        found.append(("rounding", f"{scheme.rounding}: TransformerEngine has {' or '.join(roundings)} here"))
    sizes = (0, 16) if name.startswith("wgrad") else (0,)
    if scheme.hadamard not in sizes:
        found.append(("hadamard", f"{scheme.hadamard}: TransformerEngine has {' or '.join(map(str, sizes))} here"))
    elif scheme.hadamard and scheme.sign_mask != SIGN_MASK:
        found.append(("signs", f"{scheme.sign_mask}: TransformerEngine has the fixed vector 0x{SIGN_MASK:04X}"))
    selections = () if name.endswith("grad_output") else SELECTIONS
    if scheme.select and scheme.select not in selections:
        allowed = " or ".join(selections) or "none"
        found.append(("four_over_six", f"{scheme.select}: TransformerEngine has {allowed} here"))
    if scheme.range not in ((448.0, 256.0) if scheme.select else (448.0,)):
        found.append(("scale_range", f"{scheme.range:g}: TransformerEngine has 448, and 256 with a selection"))
    plain = Scheme()
    for field in ("outer", "headroom", "clip", "masked", "requantized", "split", "history"):
        if getattr(scheme, field) != getattr(plain, field):
            found.append((KEYS.get(field, field), "TransformerEngine has nothing of the kind"))
    return found


def _between(schemes: dict[str, Scheme | None]) -> list[Fault]:
    """What must agree between two operands, since one switch of TransformerEngine decides both."""
    found = []
    pairs = (
        ("fprop.weight", "dgrad.weight", ("block", "select", "range")),
        ("fprop.input", "wgrad.input", ("select", "range")),
        ("dgrad.grad_output", "wgrad.grad_output", ("rounding",)),
    )
    for first, second, fields in pairs:
        a, b = schemes[first], schemes[second]
        for field in fields if a is not None and b is not None else ():
            if getattr(a, field) != getattr(b, field):
                told = f"differs from that of {first}: one switch of TransformerEngine sets both"
                found.append(Fault((*second.split("."), KEYS.get(field, field)), told))
    weight, given = schemes["fprop.weight"], schemes["fprop.input"]
    if weight is not None and weight.select and given.select and weight.select != given.select:
        found.append(Fault(("fprop", "weight", "four_over_six"), "TransformerEngine has one error measure for all"))
    turned = schemes["wgrad.input"]
    if turned is not None and turned.select and turned.hadamard:
        found.append(Fault(("wgrad", "input", "four_over_six"), "TransformerEngine selects none after a transform"))
    return found


def _four_over_six(schemes: dict[str, Scheme]) -> dict[str, str]:
    """Arguments for scales chosen between 6 and 4 as a block's top."""
    parts = {"weights": schemes["fprop.weight"], "activations": schemes["fprop.input"]}
    selected = {name: scheme for name, scheme in parts.items() if scheme.select}
    if not selected:
        return {}
    narrow = [name for name, scheme in selected.items() if scheme.range == 256.0]

    def scope(names: list[str]) -> str:
        return "all" if len(names) == 2 else names[0] if names else "none"

    return {
        "nvfp4_4over6": scope(list(selected)),
        "nvfp4_4over6_e4m3_use_256": scope(narrow),
        "nvfp4_4over6_err_mode": next(iter(selected.values())).select.upper(),
    }
