"""The experiment file: a question, the arms that answer it, and everything that both of them share.

    name, question
    model:    {config: {model_type: llama, hidden_size: 128, ...}} or {checkpoint: folder}
    data:     {source: stdlib, tokenizer: bytes, sequence_length: 256, held_out: 0.05}
    training: {steps: 200, batch_size: 8, learning_rate: 2.0e-3, warmup: 0.1, schedule: cosine, ...}
    arms:     [{name: bf16, recipe: bf16, control: true}, {name: nvfp4, recipe: nvidia_nvfp4}]
    seeds, noise_floor, evaluation, checkpoint, equivalence, tracking, jobs
    audit:    {every: 500}      operands measured and warnings raised along training
    parallel: {ranks: 1, data: ddp, tensor: 1}      how a job is laid out; its numbers do not depend on it

Weights, gradients' accumulation and optimizer states are float32; the forward runs under BF16 autocast; all arms alike.
Relative paths are read from the folder of the experiment file.
"""

from __future__ import annotations

import hashlib
import json
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import Field, PrivateAttr, model_validator

from nvfp4_train.experiment.errors import ExperimentError
from nvfp4_train.experiment.sections import (
    ArmSection,
    AuditSection,
    CheckpointSection,
    Count,
    DataSection,
    EquivalenceSection,
    EvaluationSection,
    Flag,
    ModelSection,
    Name,
    ParallelSection,
    Seed,
    TrackingSection,
    TrainingSection,
)
from nvfp4_train.integrations import transformer_engine
from nvfp4_train.recipe import Recipe, load_recipe
from nvfp4_train.recipe_errors import Fault, RecipeError, Strict, did_you_mean, nearest, read_yaml

NOISE_FLOOR = "noise_floor"
DATA = "data"  # the folder of the tokens, beside those of the arms


# of the run folder; the plots are all .png
FILES = {DATA, "experiment.yaml", "record.json", "report.html", "audit.json"}


def _is_taken(name: str, taken: set[str]) -> bool:
    """Whether a folder of this name would stand where the run folder has a file (some disks ignore case)."""
    name = name.lower()
    return name in taken or name.startswith(("experiment.yaml.", "record.json.")) or name.endswith(".png")


class Arm(NamedTuple):
    """One line of the comparison, resolved: the recipe is read, the noise floor is an arm like any other."""

    name: str
    recipe: Recipe
    role: str  # control | arm | noise_floor
    backend: str | None = None  # te, where the recipe is written NAME@te
    learning_rate: float | None = None  # where it is not that of `training`

    @property
    def recipe_name(self) -> str:
        return f"{self.recipe.name}@{self.backend}" if self.backend else self.recipe.name

    @property
    def text(self) -> str:
        """The recipe as YAML; what else is this arm's own (who does its GEMMs, its learning rate) in comments."""
        own = {"done by": self.backend, "learning rate": self.learning_rate}
        return self.recipe.to_yaml() + "".join(f"# {key}: {value}\n" for key, value in own.items() if value)

    def require(self) -> None:
        """ExperimentError where this machine lacks what does the GEMMs of this arm."""
        if self.backend is not None:
            try:
                transformer_engine.require()
            except ValueError as error:
                raise ExperimentError(f"arm {self.name!r}: {error}") from error


class Experiment(Strict):
    name: Name
    question: str
    model: ModelSection
    data: DataSection
    training: TrainingSection
    arms: Annotated[list[ArmSection], Field(min_length=1)]
    noise_floor: Flag = False
    seeds: Annotated[list[Seed], Field(min_length=1)]
    evaluation: EvaluationSection
    checkpoint: CheckpointSection = CheckpointSection(every=1000)
    equivalence: EquivalenceSection
    tracking: TrackingSection = TrackingSection()
    audit: AuditSection | None = None
    parallel: ParallelSection = ParallelSection()
    jobs: Count | None = None

    _path: Path = PrivateAttr(default=Path("experiment.yaml"))
    _text: str = PrivateAttr(default="")

    @model_validator(mode="after")
    def _consistent(self):
        names = [arm.name for arm in self.arms]
        problems = [f"the arm name {name!r} is used twice" for name in sorted({n for n in names if names.count(n) > 1})]
        controls = [arm.name for arm in self.arms if arm.control]
        if len(controls) != 1:
            problems.append(f"exactly one arm must say control: true (found {len(controls)})")
        taken = FILES | {NOISE_FLOOR} if self.noise_floor else FILES
        problems += [f"the arm name {n!r} is taken; choose another" for n in sorted(names) if _is_taken(n, taken)]
        if len(set(self.seeds)) != len(self.seeds):
            problems.append("a seed is listed twice")
        if problems:
            raise ValueError("; ".join(problems))
        return self

    @property
    def path(self) -> Path:
        return self._path

    @property
    def text(self) -> str:
        """The file as it was written."""
        return self._text

    def local(self, path: str) -> Path:
        """A path of the experiment file, read from the file's own folder."""
        return (self._path.parent / Path(path).expanduser()).absolute()

    @property
    def tokens_per_step(self) -> int:
        t = self.training
        return t.batch_size * t.accumulation * self.data.sequence_length

    @property
    def total_steps(self) -> int:
        t = self.training
        return t.steps if t.steps is not None else max(1, round(t.tokens / self.tokens_per_step))

    @cached_property
    def all_arms(self) -> tuple[Arm, ...]:
        """Control first, then its noise floor, then the arms in the order of the file."""
        arms = []
        for section in sorted(self.arms, key=lambda arm: not arm.control):
            try:
                source, backend = transformer_engine.split(section.recipe)
                recipe = load_recipe(self._recipe_source(source))
                if backend:
                    transformer_engine.te_phases(recipe)
            except ValueError as error:
                raise ExperimentError(f"{self._path}: arms.{section.name}.recipe: {error}") from error
            role = "control" if section.control else "arm"
            own = {"recipe": recipe, "learning_rate": section.learning_rate}
            arms.append(Arm(name=section.name, role=role, backend=backend, **own))
            if section.control and not recipe.quantizes_nothing:
                raise ExperimentError(
                    f"{self._path}: arm {section.name!r} is the control but its recipe {recipe.name!r} quantizes; "
                    "the control must be bf16"
                )
            if section.control and self.noise_floor:
                arms.append(Arm(name=NOISE_FLOOR, role="noise_floor", **own))
        return tuple(arms)

    def _recipe_source(self, recipe: str | dict) -> str | dict | Path:
        is_file = isinstance(recipe, str) and (recipe.endswith((".yaml", ".yml")) or "/" in recipe)
        return self.local(recipe) if is_file else recipe

    def arm(self, name: str) -> Arm:
        for arm in self.all_arms:
            if arm.name == name:
                return arm
        raise ExperimentError(
            f"{self._path} has no arm {name!r}; its arms are {', '.join(arm.name for arm in self.all_arms)}"
            f"{did_you_mean(name, [arm.name for arm in self.all_arms])}"
        )

    def resolved(self) -> dict[str, Any]:
        """Every setting with its default filled in, as plain data."""
        return self.model_dump(mode="json")

    def identity(self) -> dict[str, Any]:
        """What makes a run this run: all but what may change between two calls (more seeds or arms, jobs, tracking)."""
        free = {"question", "arms", "noise_floor", "seeds", "checkpoint", "tracking", "audit", "parallel", "jobs"}
        return {key: value for key, value in self.resolved().items() if key not in free}

    def digest(self) -> str:
        return hashlib.sha256(json.dumps(self.identity(), sort_keys=True).encode()).hexdigest()


def load_experiment(path: str | Path) -> Experiment:
    """Reads and checks an experiment file, its recipes included; ExperimentError lists every fault of the file."""
    path = Path(path)
    text = _text_of(path)
    try:
        content, lines, faults = read_yaml(text, str(path))
    except RecipeError as error:
        raise ExperimentError(str(error)) from None
    if not isinstance(content, dict):
        raise ExperimentError(f"{path}: expected 'key: value' lines, such as 'name: quickstart', at the top level")
    experiment = None
    try:
        experiment = Experiment.of(content, "{name: ..., question: ..., model: {...}, ...}")
    except RecipeError as error:
        faults += error.faults
    except ValueError as error:
        faults.append(Fault((), str(error)))
    if faults:
        raise ExperimentError(str(RecipeError(str(path), faults, lines)))
    experiment._path, experiment._text = path.absolute(), text
    _ = experiment.all_arms
    return experiment


def _text_of(path: Path) -> str:
    if not path.is_file():
        near = nearest(path.name, [p.name for p in path.parent.glob("*.y*ml")])
        hint = f"; did you mean {path.parent / near}?" if near else ""
        raise ExperimentError(f"there is no experiment file {path}{hint}")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ExperimentError(f"{path} is not a UTF-8 text file") from None
