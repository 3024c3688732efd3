"""The sections of an experiment file, one class each: which keys there are, what they may be, what contradicts what."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, model_validator

from nvfp4_train.recipe_errors import Strict, one_of

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length=80)]


def _no_flag(value: Any) -> Any:
    """pydantic would read true as 1."""
    if isinstance(value, bool):
        raise ValueError(f"expected a number, got {str(value).lower()}")
    return value


# Numbers may be written as text, because YAML reads 2e-3 as text; flags may not.
Fraction = Annotated[float, BeforeValidator(_no_flag), Field(ge=0.0, le=1.0)]
Positive = Annotated[float, BeforeValidator(_no_flag), Field(gt=0.0, allow_inf_nan=False)]
Count = Annotated[int, BeforeValidator(_no_flag), Field(ge=1)]
Seed = Annotated[int, Field(strict=True, ge=0, lt=2**31)]
Flag = Annotated[bool, Field(strict=True)]


def _choice(*choices: str, what: str) -> BeforeValidator:
    return BeforeValidator(partial(one_of, choices=choices, what=what))


class ModelSection(Strict):
    """`config`: keys of a transformers config, with `model_type`. `checkpoint`: a Hugging Face folder."""

    config: dict[str, Any] | None = None
    checkpoint: str | None = None
    attention: Annotated[str, _choice("sdpa", "eager", what="an attention implementation")] = "sdpa"

    @model_validator(mode="after")
    def _one(self):
        if (self.config is None) == (self.checkpoint is None):
            raise ValueError("give either 'config' (a transformers config with model_type) or 'checkpoint' (a folder)")
        if self.config is not None and not isinstance(self.config.get("model_type"), str):
            raise ValueError("'config' needs model_type, a name such as llama or qwen3")
        return self


class DatasetSection(Strict):
    """A dataset for the `datasets` library: a name or a local folder; one row of `column` is one document."""

    path: str
    subset: str | None = None
    data_files: list[str] | None = None
    split: str = "train"
    column: str = "text"
    streaming: Flag = False
    documents: Count | None = None

    @model_validator(mode="after")
    def _bounded(self):
        if self.streaming and self.documents is None:
            raise ValueError("a streamed dataset needs 'documents': how many rows to take")
        return self


class DataSection(Strict):
    """Exactly one of source, files, dataset and shards; `held_out` is a share of the text, taken by whole files."""

    source: Annotated[str, _choice("stdlib", what="a built-in source")] | None = None
    files: list[str] | None = None
    dataset: DatasetSection | None = None
    shards: list[str] | None = None
    tokenizer: str | None = None
    end_of_document: str | None = None
    sequence_length: Annotated[int, Field(ge=2)]
    held_out: Annotated[float, Field(gt=0.0, lt=1.0)] | list[str] = 0.05
    bytes_per_token: Positive | None = None

    @model_validator(mode="after")
    def _consistent(self):
        given = [key for key in ("source", "files", "dataset", "shards") if getattr(self, key)]
        if len(given) != 1:
            raise ValueError(
                f"give exactly one of source, files, dataset, shards (found: {', '.join(given) or 'none of them'})"
            )
        if self.shards and (self.tokenizer or self.end_of_document):
            raise ValueError("shards are tokens already: leave out 'tokenizer' and 'end_of_document'")
        if self.bytes_per_token and not self.shards:
            raise ValueError("'bytes_per_token' is measured for text; it belongs to shards only")
        if self.end_of_document and (self.tokenizer or "bytes") == "bytes":
            raise ValueError("'end_of_document' belongs to a tokenizer.json; bytes are separated by byte 0")
        if isinstance(self.held_out, list) and not (self.files or self.shards):
            raise ValueError("'held_out' as a list of globs belongs to files and shards; give a fraction here")
        return self


class TrainingSection(Strict):
    """`warmup` and `decay_fraction` are fractions of training; `decay_to` is a fraction of `learning_rate`.

    `cuda_graphs` records a microbatch's forward and backward once and replays it: for small models, on a GPU.
    """

    steps: Count | None = None
    tokens: Count | None = None
    batch_size: Count
    accumulation: Count = 1
    learning_rate: Positive
    warmup: Fraction = 0.05
    schedule: Annotated[str, _choice("cosine", "wsd", what="a schedule")] = "cosine"
    decay_fraction: Fraction | None = None
    decay_to: Fraction = 0.0
    weight_decay: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] = 0.1
    betas: tuple[Annotated[float, Field(ge=0.0, lt=1.0)], Annotated[float, Field(ge=0.0, lt=1.0)]] = (0.9, 0.95)
    clip: Positive | None = 1.0
    compile: Flag = False
    cuda_graphs: Flag = False
    threads: Count = 1
    device: Annotated[str, _choice("auto", "cpu", "cuda", what="a device")] = "auto"

    @model_validator(mode="after")
    def _consistent(self):
        if (self.steps is None) == (self.tokens is None):
            raise ValueError("give either 'steps' or 'tokens'")
        if (self.schedule == "wsd") != (self.decay_fraction is not None):
            raise ValueError("'decay_fraction' belongs to schedule: wsd, which needs it")
        if self.warmup + (self.decay_fraction or 0.0) > 1.0:
            raise ValueError("'warmup' and 'decay_fraction' together exceed the whole of training")
        return self


class ParallelSection(Strict):
    """How a job is laid out over ranks; the numbers do not depend on it.

    `ranks`: how many processes `compare` starts for a job (`train` takes what torchrun gives it). `tensor`: over how
    many of them a layer is cut. `data`: how the rest share the microbatches. `gather_fp4`: FSDP gathers packed weights.
    """

    ranks: Count = 1
    tensor: Count = 1
    data: Annotated[str, _choice("ddp", "fsdp", what="a data-parallel layout")] = "ddp"
    gather_fp4: Flag = False

    @model_validator(mode="after")
    def _consistent(self):
        if self.gather_fp4 and (self.data != "fsdp" or self.tensor > 1):
            raise ValueError("'gather_fp4' belongs to data: fsdp with tensor: 1")
        return self


class ArmSection(Strict):
    """`learning_rate`: this arm's own, in place of that of `training`."""

    name: Name
    recipe: str | dict[str, Any]
    learning_rate: Positive | None = None
    control: Flag = False


class EvaluationSection(Strict):
    """Held-out loss every so many steps (and at the end), over the first `batches` batches of held-out text."""

    every: Count
    batches: Count = 16


class CheckpointSection(Strict):
    every: Count


class EquivalenceSection(Strict):
    """The band, in percent of the control's loss, within which an arm counts as equivalent: set before the run."""

    percent: Positive


class AuditSection(Strict):
    """Operands measured and warnings raised every so many steps, while a job trains; see monitoring.py."""

    every: Count = 500


class WandbSection(Strict):
    mode: Annotated[str, _choice("offline", "online", what="a wandb mode")] = "offline"
    project: str = "nvfp4-train"


class TrackingSection(Strict):
    wandb: WandbSection | None = None
