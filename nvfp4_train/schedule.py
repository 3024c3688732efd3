"""The schedule of a recipe: which GEMMs run otherwise from some point of training on."""

from collections.abc import Callable, Iterable
from typing import Any

from pydantic import Field, ValidationInfo, field_validator

from nvfp4_train.operands import Dgrad, Fprop, GemmSpec, Wgrad
from nvfp4_train.recipe_errors import Fault, RecipeError, Strict, listed, one_of

GEMMS = ("fprop", "dgrad", "wgrad")
CONDITIONS = ("grad_to_noise",)  # measurements that a phase can wait for; see conditions.py


class Phase(Strict):
    """From some point of training on, the GEMMs named here run as written here.

    The point is the fraction ``start`` (``from:``), the step ``from_step``, or the first time that the measurement
    ``when`` falls below ``below``. A GEMM stays as its last phase left it: phases add up.
    """

    start: float | None = Field(None, alias="from")
    from_step: int | None = None
    when: str | None = None
    below: float | None = Field(None, validate_default=True)
    fprop: Fprop | None = None
    dgrad: Dgrad | None = None
    wgrad: Wgrad | None = None

    @field_validator("start", mode="before")
    @classmethod
    def _start(cls, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
            raise ValueError(f"expected a fraction of training from 0 to below 1, such as 0.82, got {value!r}")
        return float(value)

    @field_validator("from_step", mode="before")
    @classmethod
    def _from_step(cls, value: Any, info: ValidationInfo) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ValueError(f"expected a step, such as 1000, got {value!r}")
        if info.data.get("start") is not None:
            raise ValueError(f"contradicts from: {info.data['start']}; give one of them")
        return value

    @field_validator("when", mode="before")
    @classmethod
    def _when(cls, value: Any, info: ValidationInfo) -> str:
        for key, name in (("start", "from"), ("from_step", "from_step")):
            if info.data.get(key) is not None:
                raise ValueError(f"contradicts {name}: {info.data[key]}; give one of them")
        return one_of(value, CONDITIONS, "a measurement")

    @field_validator("below", mode="before")
    @classmethod
    def _below(cls, value: Any, info: ValidationInfo) -> float | None:
        condition = info.data.get("when")
        if value is None:
            if condition is not None:
                raise ValueError(f"missing: the value of {condition} under which the phase begins")
            return None
        if "when" in info.data and condition is None:
            raise ValueError("has no effect without when, the measurement that is compared with it")
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise ValueError(f"expected a number above 0, got {value!r}")
        return float(value)

    def __init__(self, /, **data: Any):
        super().__init__(**data)
        if self.start is None and self.from_step is None and self.when is None:
            raise RecipeError(type(self).__name__, [Fault(("from",), "missing; when does the phase begin? Give from, "
                              "from_step or when")])  # fmt: skip

    @property
    def gemms(self) -> dict[str, GemmSpec]:
        return {name: getattr(self, name) for name in GEMMS if getattr(self, name) is not None}

    def begun(self, progress: float, step: int | None) -> bool:
        """Whether a fraction or a step has begun it; a condition is for the caller to know."""
        if self.start is not None:
            return progress >= self.start
        return self.from_step is not None and step is not None and step >= self.from_step

    def to_dict(self) -> dict[str, Any]:
        begins = {"from": self.start, "from_step": self.from_step, "when": self.when, "below": self.below}
        begins = {key: value for key, value in begins.items() if value is not None}
        return begins | {name: gemm.to_dict() for name, gemm in self.gemms.items()}


def phases_of(value: Any) -> tuple[dict[int, Phase], list[Fault]]:
    """The valid phases by their place in the list ``value``, and the faults of the others."""
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
    return phases, faults


def schedule_faults(
    phases: dict[int, Phase], now: dict[str, GemmSpec | None], weight_match: bool | None, differ: Callable
) -> list[Fault]:
    """What is wrong with the phases as a whole. ``now``: the recipe's GEMMs; ``differ(fprop, dgrad)``: why the two
    weights are not one, or None."""
    faults: list[Fault] = []
    last: dict[str, float] = {}
    for index, phase in phases.items():
        for key, begins in (("from", phase.start), ("from_step", phase.from_step)):
            if begins is not None:
                if begins <= last.get(key, -1.0):
                    faults.append(Fault((index, key), f"{begins} is not after the phase before it, at {last[key]}"))
                last[key] = begins
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
            reason = differ(fprop, dgrad)
            if reason:
                faults.append(Fault((index,), f"breaks weight_match: {reason}. Declare weight_match: false"))
    return faults


def latched(schedule: Iterable[Phase], before: Iterable[int], measured: dict[str, float]) -> frozenset[int]:
    """The places in ``schedule`` of phases whose condition was met ``before`` or is met by ``measured``: once is
    enough.

    ValueError for a measurement that there is none of.
    """
    for name in measured:
        one_of(name, CONDITIONS, "a measurement")
    met = {i for i, phase in enumerate(schedule) if phase.when in measured and measured[phase.when] < phase.below}
    return frozenset(before) | met
