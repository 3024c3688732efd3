"""Recipes: which operand of which GEMM is quantized how, which layers stay in BF16, and when that changes.

A recipe is a YAML file with every operand of every GEMM written out; nothing is filled in behind its back.
``load_recipe`` reads one by name, path or dict and tells all its faults at once.
"""

import re
from importlib import resources
from os import PathLike, fspath
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from pydantic import Field, ValidationInfo, field_validator

from nvfp4_kernels.scheme import Scheme
from nvfp4_train.operands import BF16, Dgrad, DgradSpec, Fprop, FpropSpec, GemmSpec, OperandSpec, Wgrad, WgradSpec
from nvfp4_train.recipe_errors import Fault, RecipeError, Strict, did_you_mean, listed, read_yaml
from nvfp4_train.selection import KeepBF16

__all__ = [
    "DgradSpec", "FpropSpec", "GemmSpec", "KeepBF16", "LinearPlan", "OperandSpec", "Phase", "Recipe", "RecipeError",
    "WgradSpec", "load_recipe", "recipe_names", "recipe_text",
]  # fmt: skip

GEMMS = ("fprop", "dgrad", "wgrad")


class LinearPlan(NamedTuple):
    """What one layer does now: for each operand ``str(scheme)`` or ``bf16``."""

    fprop_input: str
    fprop_weight: str
    dgrad_grad_output: str
    dgrad_weight: str
    wgrad_grad_output: str
    wgrad_input: str

    @property
    def stochastic(self) -> bool:
        return any("stochastic" in text for text in self)


class Phase(Strict):
    """From the fraction ``start`` (``from:``) of training on, the GEMMs named here run as written here.

    A GEMM stays as its last phase left it: phases add up.
    """

    start: float = Field(alias="from")
    fprop: Fprop | None = None
    dgrad: Dgrad | None = None
    wgrad: Wgrad | None = None

    @field_validator("start", mode="before")
    @classmethod
    def _start(cls, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
            raise ValueError(f"expected a fraction of training from 0 to below 1, such as 0.82, got {value!r}")
        return float(value)

    @property
    def gemms(self) -> dict[str, GemmSpec]:
        return {name: getattr(self, name) for name in GEMMS if getattr(self, name) is not None}

    def to_dict(self) -> dict[str, Any]:
        return {"from": self.start, **{name: gemm.to_dict() for name, gemm in self.gemms.items()}}


class Recipe(Strict):
    """One training recipe. Raises RecipeError (a ValueError) that lists all faults with their key paths.

    ``weight_match`` claims that Dgrad differentiates the weight that Fprop used, bit for bit. The claim is checked
    against the operands, both ways. A phase that turns one of the two GEMMs to BF16 breaks it by design, unasked.
    """

    name: str
    source: str = ""
    fprop: Fprop
    dgrad: Dgrad
    wgrad: Wgrad
    keep_bf16: KeepBF16 = KeepBF16()
    weight_match: bool = Field(True, validate_default=True)
    schedule: tuple[Phase, ...] = ()

    @field_validator("name", mode="before")
    @classmethod
    def _name(cls, value: Any) -> str:
        if not isinstance(value, str) or not re.fullmatch(r"[A-Za-z0-9][\w.-]*", value):
            raise ValueError(f"expected a name of letters, digits, '_', '-' and '.', got {value!r}")
        return value

    @field_validator("source", mode="before")
    @classmethod
    def _source(cls, value: Any) -> str:
        if not isinstance(value, str):
            raise ValueError(f"expected text, such as 'arXiv:2509.25149', got {value!r}")
        return value

    @field_validator("keep_bf16", mode="before")
    @classmethod
    def _keep_bf16(cls, value: Any) -> KeepBF16:
        return KeepBF16.of(value, "{modules: ['lm_head'], blocks: {last: 4}}")

    @field_validator("weight_match", mode="before")
    @classmethod
    def _weight_match(cls, value: Any, info: ValidationInfo) -> bool:
        if not isinstance(value, bool):
            raise ValueError(f"expected true or false, got {value!r}")
        fprop, dgrad = info.data.get("fprop"), info.data.get("dgrad")
        if fprop and dgrad:
            reason = _weights_differ(fprop.weight, dgrad.weight)
            if value and reason:
                raise ValueError(f"Dgrad cannot use Fprop's quantized weight: {reason}. Declare weight_match: false")
            if not value and not reason:
                raise ValueError("Dgrad uses Fprop's weight bit for bit in this recipe: declare weight_match: true")
        return value

    @field_validator("schedule", mode="before")
    @classmethod
    def _schedule(cls, value: Any, info: ValidationInfo) -> tuple[Phase, ...]:
        if not isinstance(value, list | tuple):
            raise ValueError(f"expected a list such as [{{from: 0.82, fprop: bf16}}], got {value!r}")
        phases: dict[int, Phase] = {}
        faults: list[Fault] = []
        for index, item in enumerate(value):
            try:
                phases[index] = Phase.of(item, "{from: 0.82, fprop: bf16}")
            except RecipeError as error:
                faults += [Fault((index, *fault.path), fault.message) for fault in error.faults]
            except ValueError as error:
                faults.append(Fault((index,), str(error)))
        now = {name: info.data.get(name) for name in GEMMS}
        faults += _schedule_faults(phases, now, info.data.get("weight_match"))
        if faults:
            raise RecipeError("schedule", faults)
        return tuple(phases.values())

    def gemms(self, progress: float = 0.0) -> dict[str, GemmSpec]:
        """``{"fprop": ..., "dgrad": ..., "wgrad": ...}`` at a fraction of training."""
        now = {name: getattr(self, name) for name in GEMMS}
        for phase in self.schedule:
            if progress >= phase.start:
                now |= phase.gemms
        return now

    def plan(self, progress: float = 0.0) -> LinearPlan:
        """What a layer does at a fraction of training."""
        return LinearPlan(*(spec.text for gemm in self.gemms(progress).values() for spec in gemm.operands.values()))

    @property
    def starts(self) -> tuple[float, ...]:
        """The fractions of training at which a plan begins; the first is 0."""
        return tuple(dict.fromkeys((0.0, *(phase.start for phase in self.schedule))))

    @property
    def quantizes_nothing(self) -> bool:
        return not any(gemm.quantized for start in self.starts for gemm in self.gemms(start).values())

    def to_dict(self) -> dict[str, Any]:
        """The recipe as its YAML would say it; ``load_recipe`` of it gives an equal recipe."""
        parts = {"name": self.name, "source": self.source}
        parts |= {name: getattr(self, name).to_dict() for name in GEMMS}
        parts |= {"keep_bf16": self.keep_bf16.to_dict(), "weight_match": self.weight_match}
        parts["schedule"] = [phase.to_dict() for phase in self.schedule]
        return {key: value for key, value in parts.items() if value not in ("", {}, [])}

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.to_dict(), sort_keys=False, default_flow_style=None, width=120)


def _weights_differ(fprop: OperandSpec, dgrad: OperandSpec) -> str | None:
    """Why the two quantized weights are not one and the same, or None if they are."""
    if fprop.format == dgrad.format == BF16:
        return None
    if BF16 in (fprop.format, dgrad.format):
        return "one of the two GEMMs takes it in bf16"
    if fprop != dgrad:
        return f"fprop.weight is {fprop.text}, dgrad.weight is {dgrad.text}"
    scheme = Scheme.parse(fprop.text)
    if scheme.block[0] != scheme.block[1]:
        return f"{fprop.block} blocks lie along K in Fprop and along N in Dgrad; only square blocks serve both"
    if scheme.stochastic:
        return f"rounding: {fprop.rounding} is drawn anew for each; only nearest gives the same weight twice"
    return None


def _schedule_faults(
    phases: dict[int, Phase], now: dict[str, GemmSpec | None], weight_match: bool | None
) -> list[Fault]:
    faults, last = [], -1.0
    for index, phase in phases.items():
        if phase.start <= last:
            faults.append(Fault((index, "from"), f"{phase.start} is not after the phase before it, at {last}"))
        last = phase.start
        if not phase.gemms:
            faults.append(Fault((index,), f"switches nothing: give {listed(GEMMS)}"))
        faults += [
            Fault((index, name), "switches nothing: this GEMM runs so already")
            for name, gemm in phase.gemms.items()
            if gemm == now[name]
        ]
        now = now | phase.gemms
        fprop, dgrad = now["fprop"], now["dgrad"]
        if weight_match and fprop and dgrad and fprop.quantized and dgrad.quantized:
            reason = _weights_differ(fprop.weight, dgrad.weight)
            if reason:
                faults.append(Fault((index,), f"breaks weight_match: {reason}. Declare weight_match: false"))
    return faults


def recipe_names() -> list[str]:
    """The recipes that come with the library."""
    return sorted(item.name[:-5] for item in resources.files("nvfp4_recipes").iterdir() if item.name.endswith(".yaml"))


def recipe_text(recipe: str | PathLike) -> str:
    """The YAML text of a recipe given by name or path, comments included. RecipeError if there is none."""
    return _find(recipe)[0]


def load_recipe(recipe: str | PathLike | dict | Recipe) -> Recipe:
    """A recipe from its name, the path of a YAML file, a dict or a Recipe.

    Raises RecipeError that lists every fault: the file, the line, the key path, what was expected and the nearest valid
    spelling.
    """
    if isinstance(recipe, Recipe):
        return recipe
    if isinstance(recipe, dict):
        where, data, lines, faults = "recipe given as a dict", recipe, {}, []
    elif isinstance(recipe, str | PathLike):
        text, where = _find(recipe)
        data, lines, faults = read_yaml(text, where)
    else:
        raise RecipeError("recipe", [Fault((), f"expected a name, a path, a dict or a Recipe, got {recipe!r}")])
    try:
        loaded = Recipe.of(data, "{name: mine, fprop: ..., dgrad: ..., wgrad: ...}")
    except RecipeError as error:
        raise RecipeError(where, faults + error.faults, lines) from None
    except ValueError as error:
        raise RecipeError(where, [*faults, Fault((), str(error))], lines) from None
    if faults:
        raise RecipeError(where, faults, lines)
    return loaded


def _find(recipe: str | PathLike) -> tuple[str, str]:
    """(text, where it was found)"""
    word = fspath(recipe)
    names = recipe_names()
    if word in names:
        return (resources.files("nvfp4_recipes") / f"{word}.yaml").read_text("utf-8"), f"recipe {word}"
    path = Path(word)
    is_path = isinstance(recipe, PathLike) or path.suffix in (".yaml", ".yml") or len(path.parts) > 1 or path.exists()
    if not is_path:
        known = f"known recipes: {', '.join(names)}; or give the path of a .yaml file"
        raise RecipeError("recipe", [Fault((), f"no recipe is named {word!r}{did_you_mean(word, names)} ({known})")])
    try:
        return path.read_text("utf-8"), str(path)
    except FileNotFoundError:
        hint = did_you_mean(path.stem, names) if path.stem in names else ""
        raise RecipeError(str(path), [Fault((), f"no such file{hint}")]) from None
    except UnicodeDecodeError:
        raise RecipeError(str(path), [Fault((), "not a text file in UTF-8")]) from None
    except OSError as error:
        raise RecipeError(str(path), [Fault((), f"cannot be read: {error.strerror}")]) from None
