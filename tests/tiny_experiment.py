"""A whole experiment that trains in a second: what the tests of `experiment/` start from."""

import copy
import random
from pathlib import Path

import yaml

from nvfp4_train.experiment.config import Experiment, load_experiment

TINY = {
    "name": "tiny",
    "question": "does it run?",
    "model": {
        "config": {
            "model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
            "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64,
        }
    },
    "data": {"files": ["text"], "tokenizer": "bytes", "sequence_length": 32, "held_out": 0.1},
    "training": {"steps": 8, "batch_size": 2, "learning_rate": 3.0e-3, "warmup": 0.25, "device": "cpu"},
    "arms": [{"name": "bf16", "recipe": "bf16", "control": True}, {"name": "nvfp4", "recipe": "nvidia_nvfp4"}],
    "seeds": [1],
    "evaluation": {"every": 4, "batches": 2},
    "checkpoint": {"every": 3},
    "equivalence": {"percent": 5.0},
}  # fmt: skip


def write_text(folder: Path, files: int = 12) -> None:
    """Files of different made-up words, so that no two are equal."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(files):
        words = random.Random(number)
        text = " ".join(words.choice(["alpha", "beta", "gamma", "delta", str(number)]) for _ in range(300))
        (folder / f"{number:02d}.txt").write_text(text)


def changed(changes: dict) -> dict:
    """TINY with {"training.steps": 3, ...} put in; a value of None takes the key out."""
    content = copy.deepcopy(TINY)
    for path, value in changes.items():
        *parents, last = path.split(".")
        place = content
        for key in parents:
            place = place.setdefault(key, {})
        if value is None:
            place.pop(last, None)
        else:
            place[last] = value
    return content


def write_experiment(folder: Path, changes: dict | None = None, text: bool = True) -> Path:
    if text and not (folder / "text").exists():
        write_text(folder / "text")
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(changed(changes or {}), sort_keys=False))
    return path


def tiny(folder: Path, changes: dict | None = None) -> Experiment:
    return load_experiment(write_experiment(folder, changes))
