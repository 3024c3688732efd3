"""Recipes: which operand of which GEMM is quantized how, which layers stay in BF16, and when that changes.

A recipe is a YAML file with every operand of every GEMM written out; nothing is filled in behind its back.
``load_recipe`` reads one by name, path or dict and tells all its faults at once.
"""

import re
from collections.abc import Iterable
from dataclasses import replace
from importlib import resources
from os import PathLike, fspath
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from pydantic import Field, ValidationInfo, field_validator

from nvfp4_kernels.scheme import PER_STEP, Scheme
from nvfp4_train.operands import (
    BF16,
    Dgrad,
    DgradSpec,
    Fprop,
    FpropSpec,
    GemmSpec,
    OperandSpec,
    Wgrad,
    WgradSpec,
    across,
    emulation_allowed,
    gemm_of,
)  # fmt: skip
from nvfp4_train.recipe_errors import Fault, RecipeError, Strict, did_you_mean, read_yaml
from nvfp4_train.schedule import GEMMS, Phase, phases_of, schedule_faults
from nvfp4_train.selection import KeepBF16, OscillationReset

__all__ = [
    "DgradSpec", "FpropSpec", "GemmSpec", "KeepBF16", "LinearPlan", "OperandSpec", "Phase", "Recipe", "RecipeError",
    "WgradSpec", "load_recipe", "recipe_names", "recipe_text",
]  # fmt: skip

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
        """Whether a call needs a seed: for draws or for the signs of a transform."""
        return any("stochastic" in text or f":{PER_STEP}" in text for text in self)

    @property
    def shares_weight(self) -> bool:
        """Whether Dgrad can read Fprop's quantized weight the other way round, bit for bit."""
        if BF16 in (self.fprop_weight, self.dgrad_weight):
            return False
        if self.fprop_weight.replace(":masked=True", "") != self.dgrad_weight:
            return False
        scheme = Scheme.parse(self.dgrad_weight)
        return scheme.block[0] == scheme.block[1] and not scheme.hadamard

    @property
    def simple(self) -> bool:
        """Whether each GEMM is two quantized operands and nothing else: see linear_mechanisms.py for the rest."""
        return not any(mark in text for text in self for mark in ("requantized", "split", "masked", "history"))


class Recipe(Strict):
    """One training recipe. Raises RecipeError (a ValueError) that lists all faults with their key paths.

    ``emulation_only``: some GEMM of it exists in no matrix instruction; said where it is so, and only there.
    ``oscillation_reset``: see ``OscillationReset``. ``weight_match`` claims that Dgrad differentiates the weight that
    Fprop used, bit for bit. The claim is checked against the operands, both ways. A phase that turns one of the two
    GEMMs to BF16 breaks it by design, unasked.
    """

    name: str
    source: str = ""
    fprop: Fprop
    dgrad: Dgrad
    wgrad: Wgrad
    keep_bf16: KeepBF16 = KeepBF16()
    weight_match: bool = Field(True, validate_default=True)
    schedule: tuple[Phase, ...] = ()
    oscillation_reset: OscillationReset | None = None
    emulation_only: bool = Field(False, validate_default=True)

    def __init__(self, /, **data: Any):
        faults: list[Fault] = []
        with emulation_allowed(data.get("emulation_only") is True):
            try:
                super().__init__(**data)
            except RecipeError as error:
                faults += error.faults
            faults += _faults_across(data)
        if faults:
            raise RecipeError(type(self).__name__, faults)

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
            reason = weights_differ(fprop, dgrad)
            if value and reason:
                raise ValueError(f"Dgrad cannot use Fprop's quantized weight: {reason}. Declare weight_match: false")
            if not value and not reason:
                raise ValueError("Dgrad uses Fprop's weight bit for bit in this recipe: declare weight_match: true")
        return value

    @field_validator("schedule", mode="before")
    @classmethod
    def _schedule(cls, value: Any, info: ValidationInfo) -> tuple[Phase, ...]:
        phases, faults = phases_of(value)
        now = {name: info.data.get(name) for name in GEMMS}
        faults += schedule_faults(phases, now, info.data.get("weight_match"), weights_differ)
        if faults:
            raise RecipeError("schedule", faults)
        return tuple(phases.values())

    @field_validator("oscillation_reset", mode="before")
    @classmethod
    def _oscillation_reset(cls, value: Any, info: ValidationInfo) -> OscillationReset | None:
        if value is None:
            return None
        fprop = info.data.get("fprop")
        reason = None if fprop is None else _cannot_oscillate(fprop.weight)
        if reason:
            raise ValueError(f"fprop.weight {reason}")
        return OscillationReset.of(value, "{from: 0.63, every: 200, window: 50, ratio: 8}")

    @field_validator("emulation_only", mode="before")
    @classmethod
    def _emulation_only(cls, value: Any, info: ValidationInfo) -> bool:
        if not isinstance(value, bool):
            raise ValueError(f"expected true or false, got {value!r}")
        gemms = [info.data.get(name) for name in GEMMS]
        if value and all(gemms) and "schedule" in info.data:
            gemms += [gemm for phase in info.data["schedule"] for gemm in phase.gemms.values()]
            if not any(isinstance(gemm.hardware, str) for gemm in gemms):
                raise ValueError("has no effect: a matrix instruction exists for every GEMM here: leave it out")
        return value

    def gemms(
        self, progress: float = 0.0, step: int | None = None, reached: Iterable[int] = ()
    ) -> dict[str, GemmSpec]:
        """``{"fprop": ..., "dgrad": ..., "wgrad": ...}`` at a fraction of training, a step, and with the measured
        conditions of the phases ``reached`` (their places in ``schedule``) met."""
        now = {name: getattr(self, name) for name in GEMMS}
        for index, phase in enumerate(self.schedule):
            if phase.begun(progress, step) or index in reached:
                now |= phase.gemms
        return now

    def plan(self, progress: float = 0.0, step: int | None = None, reached: Iterable[int] = ()) -> LinearPlan:
        """What a layer does then; see ``gemms``."""
        now = self.gemms(progress, step, reached)
        return LinearPlan(*(spec.text for gemm in now.values() for spec in gemm.operands.values()))

    @property
    def starts(self) -> tuple[float, ...]:
        """The fractions of training at which a plan begins; the first is 0. (Steps and conditions are not
        fractions.)"""
        return tuple(dict.fromkeys((0.0, *(phase.start for phase in self.schedule if phase.start is not None))))

    @property
    def operand_texts(self) -> tuple[str, ...]:
        """``str(scheme)`` or ``bf16`` of every operand at any time of training, each once."""
        gemms = [getattr(self, name) for name in GEMMS]
        gemms += [gemm for phase in self.schedule for gemm in phase.gemms.values()]
        return tuple(dict.fromkeys(spec.text for gemm in gemms for spec in gemm.operands.values()))

    @property
    def operands_by_name(self) -> tuple[tuple[str, str], ...]:
        """(``fprop_input``, ``str(scheme)`` or ``bf16``) of every operand at any time of training, each pair once."""
        gemms = [{name: getattr(self, name) for name in GEMMS}, *(phase.gemms for phase in self.schedule)]
        pairs = [(f"{gemm}_{name}", spec.text) for now in gemms for gemm, pair in now.items()
                 for name, spec in pair.operands.items()]  # fmt: skip
        return tuple(dict.fromkeys(pairs))

    @property
    def quantizes_nothing(self) -> bool:
        gemms = [getattr(self, name) for name in GEMMS]
        gemms += [gemm for phase in self.schedule for gemm in phase.gemms.values()]
        return not any(gemm.quantized for gemm in gemms)

    def to_dict(self) -> dict[str, Any]:
        """The recipe as its YAML would say it; ``load_recipe`` of it gives an equal recipe."""
        parts = {"name": self.name, "source": self.source}
        parts |= {name: getattr(self, name).to_dict() for name in GEMMS}
        parts |= {"keep_bf16": self.keep_bf16.to_dict(), "weight_match": self.weight_match}
        parts["schedule"] = [phase.to_dict() for phase in self.schedule]
        parts["oscillation_reset"] = self.oscillation_reset.to_dict() if self.oscillation_reset else {}
        parts |= {"emulation_only": True} if self.emulation_only else {}
        return {key: value for key, value in parts.items() if value not in ("", {}, [])}

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.to_dict(), sort_keys=False, default_flow_style=None, width=120)


def weights_differ(fprop_gemm: FpropSpec, dgrad_gemm: DgradSpec) -> str | None:
    """Why the two quantized weights are not one and the same, or None if they are."""
    fprop, dgrad = fprop_gemm.weight, dgrad_gemm.weight
    if fprop.format == dgrad.format == BF16:
        return None
    if BF16 in (fprop.format, dgrad.format):
        return "one of the two GEMMs takes it in bf16"
    if dgrad.requantize:
        return "dgrad.weight is quantized a second time, from Fprop's"
    if fprop_gemm.input.split is not None and fprop_gemm.input.split.part == "channels":
        return "fprop.input sets channels apart, and with them columns of the weight"
    scheme = replace(fprop.scheme, masked=False)
    if scheme != dgrad.scheme:
        return f"fprop.weight is {fprop.text}, dgrad.weight is {dgrad.text}"
    if scheme.block[0] != scheme.block[1]:
        return f"{fprop.block} blocks lie along K in Fprop and along N in Dgrad; only square blocks serve both"
    if scheme.stochastic:
        return f"rounding: {fprop.rounding} is drawn anew for each; only nearest gives the same weight twice"
    return None


def _cannot_oscillate(weight: OperandSpec) -> str | None:
    """Why weights that are quantized so cannot be reset to their quantized values, or None."""
    if weight.format == BF16:
        return "is not quantized: there is no grid to be reset to"
    if weight.hadamard:
        return "is rotated first: its grid is not one of the weight"
    if weight.rounding != "nearest":
        return f"has rounding: {weight.rounding}: it flips whether or not it oscillates"
    if weight.history:
        return "is scaled by a history of amaxes, which another quantization of it would disturb"
    return None


def _faults_across(data: dict[str, Any]) -> list[Fault]:
    """What the GEMMs cannot do together, where all three are valid by themselves; in each phase of a valid schedule
    too."""
    try:
        now = {name: gemm_of(name, data[name]) for name in GEMMS}
    except (KeyError, ValueError):
        return []
    faults = list(across(*now.values()))
    schedule = data.get("schedule", ())
    phases, broken = phases_of(schedule) if isinstance(schedule, list | tuple) else ({}, [])
    for index, phase in () if broken else phases.items():
        now |= phase.gemms
        told = {(fault.path, fault.message) for fault in faults}
        for fault in across(*now.values()):
            if (fault.path, fault.message) not in told:
                faults.append(Fault(("schedule", index), str(fault)))
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
