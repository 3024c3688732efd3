"""The model of an experiment: any causal language model of transformers, from a config or a local folder.

Initial weights come from a generator of their own, so every arm of a seed starts from the same bits.
Nothing is ever downloaded.
"""

from __future__ import annotations

import copy
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from nvfp4_train.experiment.attention import use_for_graphs
from nvfp4_train.experiment.errors import ExperimentError
from nvfp4_train.experiment.randomness import generator, isolated
from nvfp4_train.experiment.weights import listed_names
from nvfp4_train.exporting.loading import is_exported, load_exported
from nvfp4_train.exporting.writing import ExportError
from nvfp4_train.recipe_errors import did_you_mean

if TYPE_CHECKING:
    from pathlib import Path

    from nvfp4_train.experiment.config import Arm, Experiment

BF16_FRACTION_BITS = 7
# Keys of config.json files that transformers still reads but writes no longer. The rope keys go into
# config.rope_parameters, under the name given here; those of PASSIVE say nothing about the model we train.
ROPE_KEYS = {
    "rope_theta": "rope_theta", "rotary_emb_base": "rope_theta", "rope_local_base_freq": "rope_theta",
    "rotary_pct": "partial_rotary_factor", "partial_rotary_factor": "partial_rotary_factor", "rope_scaling": None,
}  # fmt: skip
PASSIVE_KEYS = {"architectures", "torch_dtype", "transformers_version"}


def resolve_config(experiment: Experiment, vocab_size: int | None):
    """The transformers config with the vocabulary filled in; refuses keys the architecture does not know."""
    data, path = experiment.data, experiment.path
    if experiment.model.checkpoint is not None:
        folder = experiment.local(experiment.model.checkpoint)
        if not (folder / "config.json").is_file():
            raise ExperimentError(f"model.checkpoint: {folder} is not a Hugging Face folder (it has no config.json)")
        config = _config_of(folder)
    else:
        # A deep copy: transformers writes into the rope_scaling it is given.
        config = _config_from(copy.deepcopy(experiment.model.config), vocab_size, path)
    if vocab_size is None and experiment.model.config is not None and "vocab_size" not in experiment.model.config:
        raise ExperimentError(f"{path}: model.config.vocab_size is needed: shards do not say how large it is")
    if vocab_size is not None and config.vocab_size < vocab_size:
        raise ExperimentError(
            f"{path}: the model's vocab_size is {config.vocab_size} but the tokens go up to {vocab_size - 1}: "
            f"set model.config.vocab_size to {vocab_size} or more"
        )
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and longest < data.sequence_length:
        raise ExperimentError(
            f"{path}: data.sequence_length is {data.sequence_length} but the model reads at most {longest} tokens "
            "(max_position_embeddings)"
        )
    return config


def _config_of(folder: Path):
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # OSError, ValueError, KeyError: as many as there are ways to damage a config.json
        raise ExperimentError(f"model.checkpoint: {folder}/config.json cannot be read: {_one_line(error)}") from error


def shard_limit(experiment: Experiment) -> tuple[int | None, str]:
    """How many tokens the model knows (None where it does not say), and the key that says so."""
    if experiment.model.checkpoint is None:
        found, key = experiment.model.config.get("vocab_size"), "model.config.vocab_size"
    else:
        config = resolve_config(experiment, None)
        found, key = getattr(config, "vocab_size", None), "the vocab_size of model.checkpoint"
    return (found if isinstance(found, int) else None), key


def _config_from(settings: dict, vocab_size: int | None, path):
    kind = settings.pop("model_type")
    if kind not in CONFIG_MAPPING:
        raise ExperimentError(
            f"{path}: model.config.model_type: transformers knows no {kind!r}{did_you_mean(str(kind), CONFIG_MAPPING)}"
        )
    cls = CONFIG_MAPPING[kind]
    known = set(cls().to_dict()) | set(getattr(cls, "attribute_map", {}))
    rope = {key: settings[key] for key in ROPE_KEYS if key in settings and key not in known}
    legacy = PASSIVE_KEYS | (set(rope) if "rope_parameters" in known else set())
    unknown = [
        f"{key!r}{did_you_mean(key, known)}"
        for key in settings
        if key not in known | legacy and not key.startswith("_")
    ]
    if unknown:
        raise ExperimentError(f"{path}: model.config: a {kind} config does not know {', '.join(unknown)}")
    if vocab_size is not None:
        settings.setdefault("vocab_size", vocab_size)
    try:
        config = AutoConfig.for_model(kind, **copy.deepcopy(settings))
    except Exception as error:  # each architecture checks itself in its own way
        raise ExperimentError(f"{path}: model.config: {error}") from error
    for key, value in rope.items():
        if value is not None and not _acts(key, value, config.rope_parameters):
            raise ExperimentError(
                f"{path}: model.config.{key}: a {kind} config ignores it; write it in rope_parameters"
            )
    return config


def _acts(key: str, value: Any, parameters: dict[str, Any] | None) -> bool:
    """Whether an old rope key has arrived in config.rope_parameters, which may have one level of layer types."""
    parameters = parameters or {}
    places = [parameters, *(inner for inner in parameters.values() if isinstance(inner, dict))]
    wanted = value if isinstance(value, dict) else {ROPE_KEYS[key]: value}
    wanted = {name: asked for name, asked in wanted.items() if name not in ("type", "rope_type")}  # su -> longrope
    return any(all(place.get(name) == asked for name, asked in wanted.items()) for place in places)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def build_model(experiment: Experiment, seed: int, vocab_size: int | None, nudged: bool = False) -> nn.Module:
    """A float32 causal language model on the CPU whose weights depend on the seed only (and on `nudged`)."""
    config = resolve_config(experiment, vocab_size)
    kind = dict(attn_implementation=experiment.model.attention, dtype=torch.float32)
    try:
        with isolated(torch.device("cpu"), "weights", seed):
            if experiment.model.checkpoint is not None:
                folder = experiment.local(experiment.model.checkpoint)
                if is_exported(folder):
                    model = load_exported(folder, config=config, **kind)
                else:
                    model = load_pretrained(folder, config=config, **kind)
            else:
                model = AutoModelForCausalLM.from_config(config, **kind)
    except ExperimentError as error:
        raise ExperimentError(f"{experiment.path}: model.checkpoint: {error}") from None
    except ExportError as error:
        raise ExperimentError(f"{experiment.path}: model.checkpoint: {error}") from None
    except Exception as error:  # transformers has no common error for a config that cannot be built
        told = f"{experiment.path}: model: transformers cannot build it: {error}"
        if experiment.model.attention != "eager" and "attn_implementation" in str(error):
            told = f"{experiment.path}: model: set model.attention: eager ({_one_line(error).split('. ')[0]})"
        raise ExperimentError(told) from error
    use_for_graphs(model)
    refuse_non_finite(model, experiment.model.checkpoint or "the freshly initialised model")
    if nudged:
        nudge(model, seed)
    return model


def build_skeleton(experiment: Experiment, seed: int, vocab_size: int | None) -> nn.Module | None:
    """The model of `build_model` on the meta device: every name, size and tie of it, no values.

    None for a model that computes with values while it is built, or keeps tensors that are no parameter or buffer.
    """
    config = resolve_config(experiment, vocab_size)
    config.__dict__.pop("quantization_config", None)  # of an exported folder, whose weights are unpacked
    kind = dict(attn_implementation=experiment.model.attention, dtype=torch.float32)
    try:
        with isolated(torch.device("cpu"), "weights", seed), torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, **kind)
    except Exception:  # what is wrong with the model by itself, build_model tells
        return None
    loose = [v for module in model.modules() for v in vars(module).values() if isinstance(v, torch.Tensor)]
    return None if any(tensor.is_meta for tensor in loose) else model


def load_pretrained(folder: Path, **options: Any) -> nn.Module:
    """The causal language model in a local Hugging Face folder; transformers fills what is missing with random numbers.

    Raises ExperimentError for a folder that lacks weights of its own model.
    """
    model, told = AutoModelForCausalLM.from_pretrained(
        folder, local_files_only=True, output_loading_info=True, **options
    )
    if missing := sorted(told["missing_keys"]):
        raise ExperimentError(f"{folder} lacks weights of its model: {listed_names(missing)}")
    return model


def refuse_non_finite(model: nn.Module, origin: str) -> None:
    """Raises for the first weight that holds NaN or Inf."""
    for name, tensor in model.named_parameters():
        if not torch.isfinite(tensor).all():
            raise ExperimentError(f"{origin}: the weight {name} holds NaN or Inf: use another checkpoint")


@torch.no_grad()
def nudge(model: nn.Module, seed: int) -> None:
    """Moves every weight by one bf16 ulp, up or down by a coin of its own seed: chaos alone, for the noise floor."""
    coin = generator("nudge", seed)
    for weight in model.parameters():
        ulp = torch.ldexp(torch.ones_like(weight), torch.frexp(weight)[1] - 1 - BF16_FRACTION_BITS)
        sign = torch.randint(0, 2, weight.shape, generator=coin, dtype=torch.float32) * 2 - 1
        weight.add_(torch.where(weight == 0, torch.zeros_like(weight), sign * ulp))


def learning_rate(experiment: Experiment, arm: Arm, step: int) -> float:
    """The rate of step `step` (0-based): linear warm-up, then cosine or warm-up-stable-decay to `decay_to`."""
    t, total = experiment.training, experiment.total_steps
    peak = arm.learning_rate or t.learning_rate
    warm = round(t.warmup * total)
    if step < warm:
        return peak * (step + 1) / warm
    if t.schedule == "cosine":
        done = (step - warm) / max(1, total - warm)
        shape = 0.5 * (1.0 + math.cos(math.pi * done))
    else:
        decay = max(1, round(t.decay_fraction * total)) if t.decay_fraction else 0
        shape = 1.0 if decay == 0 else min(1.0, (total - step) / decay)
    return peak * (t.decay_to + (1.0 - t.decay_to) * shape)
