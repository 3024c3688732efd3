"""The run folder and its record: what was asked, of which arms, on which text, with which versions.

    OUT/experiment.yaml            the file as it was written
    OUT/record.json                everything below, resolved
    OUT/data/                      the tokens
    OUT/<arm>/seed<k>/             metrics.jsonl, result.json, checkpoint/, log.txt

A folder belongs to one experiment. Seeds and arms may be added later; nothing that was run may change its meaning.
"""

from __future__ import annotations

import json
import os
import platform
import re
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from nvfp4_train.conversion import convert
from nvfp4_train.experiment import checkpoint
from nvfp4_train.experiment.config import DATA, Experiment
from nvfp4_train.experiment.data import Corpus, load_corpus
from nvfp4_train.experiment.errors import ExperimentError, disk_faults
from nvfp4_train.experiment.model import build_model
from nvfp4_train.experiment.randomness import isolated
from nvfp4_train.experiment.sections import TrainingSection
from nvfp4_train.experiment.shares import matmul_shares

RECORD = "record.json"
PACKAGES = ("nvfp4_train", "torch", "triton", "transformers", "tokenizers", "datasets", "numpy")


def job_folder(out: Path, arm: str, seed: int) -> Path:
    return out / arm / f"seed{seed}"


def choose_device(training: TrainingSection) -> torch.device:
    """The device of `training.device`; `auto` takes a GPU where torch sees one."""
    if training.device == "cuda" and not torch.cuda.is_available():
        raise ExperimentError("training.device is cuda, but torch sees no GPU here; use device: auto or cpu")
    device = torch.device("cuda" if training.device != "cpu" and torch.cuda.is_available() else "cpu")
    if training.cuda_graphs and device.type != "cuda":
        raise ExperimentError("training.cuda_graphs is true, and graphs need a GPU: set it to false to train on a CPU")
    return device


def prepare_run(experiment: Experiment, out: Path) -> Corpus:
    """Makes `out` this experiment's folder, or checks that it is; the corpus. Writes nothing before all is checked."""
    old = _read_record(out)
    if old is not None:
        _refuse_another(experiment, old, out)
    device = choose_device(experiment.training)
    corpus = load_corpus(experiment, out)
    if old is not None and old["data"]["sha256"] != corpus.info.sha256:  # somebody deleted OUT/data, as we advise
        raise ExperimentError(f"--out {out} was run on another text than data describes now; choose another --out")
    names = {arm.name for arm in experiment.all_arms}
    if old is not None and names <= set(old["conversion"]) and old["seeds"] == experiment.seeds:
        return corpus
    record = _record(experiment, corpus, device, old)
    with disk_faults(out):
        checkpoint.write_whole(out / "experiment.yaml", experiment.text)
        checkpoint.write_whole(out / RECORD, json.dumps(record, indent=1))
    return corpus


def refuse_another(experiment: Experiment, out: Path) -> None:
    """Raises ExperimentError where `out` is the folder of another experiment; one without a record is nobody's."""
    if (out / RECORD).is_file():
        _refuse_another(experiment, _read_record(out), out)


def _read_record(out: Path) -> dict[str, Any] | None:
    for place in (out, *out.parents):
        if place.exists() and not place.is_dir():
            raise ExperimentError(f"--out {out}: {place} is a file; name a folder")
    path = out / RECORD
    if path.is_file():
        try:
            return json.loads(path.read_text())
        except ValueError as error:
            raise ExperimentError(f"{path} is damaged ({error}); choose another --out") from None
    # A kill on the way to the first record leaves the copy of the experiment, or what write_whole was writing.
    ours = re.compile(rf"{DATA}.*|experiment\.yaml|(experiment\.yaml|record\.json)\.\d+")
    if out.is_dir() and any(not ours.fullmatch(p.name) for p in out.iterdir()):
        raise ExperimentError(f"--out {out} is not empty and is no run folder (it has no record.json); name a new one")
    return None


def _refuse_another(experiment: Experiment, old: dict[str, Any], out: Path) -> None:
    """Compares what the folder was made for with what is asked now, and names the first difference."""
    identity = experiment.identity()
    there = {key: old["experiment"].get(key) for key in identity}
    if difference := _difference(there, identity):
        raise ExperimentError(f"--out {out} belongs to another experiment: {difference}; choose another --out")
    now = {arm.name: arm for arm in experiment.all_arms}
    for arm in old["arms"]:
        name = arm["name"]
        if name not in now:
            raise ExperimentError(f"--out {out} has an arm {name!r} that the experiment no longer has; keep it there")
        if arm["role"] != now[name].role or arm["recipe_text"] != now[name].text:
            raise ExperimentError(
                f"--out {out} belongs to another experiment: arm {name!r} was made with another recipe or role; "
                "give the changed arm a name of its own, or choose another --out"
            )
    if gone := [seed for seed in old["seeds"] if seed not in experiment.seeds]:
        raise ExperimentError(f"--out {out} was run with seeds {old['seeds']}; {gone} may not be left out now")


def _difference(there: Any, here: Any, path: str = "") -> str:
    """The first key whose values differ, as a phrase; empty if none does."""
    if isinstance(there, dict) and isinstance(here, dict):
        for key in {**there, **here}:
            if found := _difference(there.get(key), here.get(key), f"{path}.{key}".lstrip(".")):
                return found
        return ""
    return "" if there == here else f"{path} is {there!r} there and {here!r} here"


def _record(experiment: Experiment, corpus: Corpus, device: torch.device, old: dict | None) -> dict[str, Any]:
    torch.set_num_threads(experiment.training.threads)
    known = old or {"conversion": {}, "flops": {}}
    conversion, flops = dict(known["conversion"]), dict(known["flops"])
    parameters = (old or {}).get("parameters")
    for arm in experiment.all_arms:
        if arm.name in conversion:
            continue
        model = build_model(experiment, experiment.seeds[0], corpus.info.vocab_size)
        model.to(device)
        parameters = sum(p.numel() for p in model.parameters())
        arm.require()
        report = convert(model, arm.recipe, backend=arm.backend)
        conversion[arm.name] = {
            "converted": list(report.converted), "skipped": [s._asdict() for s in report.skipped]
        }  # fmt: skip
        window = corpus.held_out_batches(1, 1)[0].to(device)
        with isolated(device, "record"):
            flops[arm.name] = matmul_shares(model, window, arm.recipe)
    data = corpus.info
    return {
        "name": experiment.name, "question": experiment.question, "experiment": experiment.resolved(),
        "yaml": experiment.text,
        "arms": [
            {"name": a.name, "recipe": a.recipe_name, "role": a.role, "recipe_text": a.text}
            for a in experiment.all_arms
        ],
        "seeds": list(experiment.seeds), "tokens_per_step": experiment.tokens_per_step,
        "total_steps": experiment.total_steps, "parameters": parameters, "bytes_per_token": data.bytes_per_token,
        "equivalence": {"percent": experiment.equivalence.percent},
        "data": {
            "sha256": data.sha256, "train_tokens": data.train_tokens, "held_out_tokens": data.held_out_tokens,
            "source": data.source, "documents": data.documents,
            "epochs": round(experiment.total_steps * experiment.tokens_per_step / data.train_tokens, 4),
        },
        "versions": versions(), "hardware": hardware(device), "conversion": conversion, "flops": flops,
    }  # fmt: skip


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def hardware(device: torch.device) -> dict[str, Any]:
    found: dict[str, Any] = {"device": device.type, "cpu": _cpu_name(), "cpu_cores": os.cpu_count()}
    if device.type == "cuda":
        found["gpu"], found["gpus"] = torch.cuda.get_device_name(device), torch.cuda.device_count()
        found["cuda"] = torch.version.cuda
    return found


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
