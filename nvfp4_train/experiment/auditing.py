"""The audit of a recipe, or of an experiment's arms: builds what `nt.audit` needs and keeps what it says.

A recipe by itself is audited on a small Llama with random tokens; an experiment on its own model and its own text, at
its first weights or, with a run folder, at the newest weights of each arm.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor, nn

from nvfp4_train.auditing import Audit, audit
from nvfp4_train.auditing.sensitivity import rank_layers, told
from nvfp4_train.auditing.statistics import by_operand
from nvfp4_train.conversion import convert
from nvfp4_train.experiment import checkpoint
from nvfp4_train.experiment.compiling import compile_blocks, next_token_loss
from nvfp4_train.experiment.config import Arm, Experiment, load_experiment
from nvfp4_train.experiment.data import load_corpus
from nvfp4_train.experiment.errors import ExperimentError, disk_faults
from nvfp4_train.experiment.model import build_model
from nvfp4_train.experiment.randomness import isolated
from nvfp4_train.experiment.record import choose_device, job_folder, refuse_another
from nvfp4_train.recipe import Recipe, load_recipe
from nvfp4_train.schedule import GEMMS

AUDIT_FILE = "audit.json"  # in the run folder; the report has a section for it
ROWS = 2  # sequences a microbatch: the audit works everything out again in float64
SAMPLE = {
    "hidden_size": 64, "intermediate_size": 160, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128,
    "max_position_embeddings": 64, "initializer_range": 0.1, "attention_bias": True,
}  # fmt: skip


def audit_subject(
    subject: str, *, require: float | None = None, arm: str | None = None, out: Path | None = None,
    sensitivity: bool = False,
) -> dict[str, Audit]:  # fmt: skip
    """Audits a recipe (by name or file) or each quantized arm of an experiment file. -> audits by name."""
    if not _is_experiment(subject):
        if arm is not None or out is not None:
            raise ExperimentError(f"--arm and --out belong to an experiment file, and {subject} is a recipe")
        recipe = load_recipe(subject)
        return {recipe.name: audit_recipe(recipe, require, sensitivity)}
    experiment = load_experiment(subject)
    if out is not None:
        refuse_another(experiment, out)
    arms = [experiment.arm(arm)] if arm else [a for a in experiment.all_arms if not a.recipe.quantizes_nothing]
    if not arms:
        raise ExperimentError(f"{experiment.path}: no arm quantizes anything: there is nothing to audit")
    with tempfile.TemporaryDirectory() as scratch:
        found = {a.name: audit_arm(experiment, a, out, Path(scratch), require, sensitivity) for a in arms}
    if out is not None:
        save(found, out)
    return found


def audit_lines(audits: dict[str, Audit]) -> list[str]:
    """For a terminal: what was proven and what not, where the FLOPs went, the worst operands, the ranking."""
    lines: list[str] = []
    for found in audits.values():
        lines += str(found).splitlines()
        lines += [
            f"  high precision  {100 * row['share']:5.1f}%  {row['layer']}  ({row['reason']})"
            for row in found.coverage["skipped"][:8]
        ]
        lines += [_operand_line(row) for row in by_operand(found.statistics)]
        if found.sensitivity:
            lines += [
                f"  adds {told(row, 'added')} nats  {row['layer']}  ("
                f"{', '.join(f'{gemm} {told(row, gemm)}' for gemm in GEMMS)}; "
                f"{100 * row['flops']:.1f}% of the quantized FLOPs)"
                for row in found.sensitivity["layers"][:10]
            ]
            kept = found.sensitivity["kept_flops"]
            lines += [f"  to give back {100 * kept:.1f}% of the quantized FLOPs where it helps most:", ""]
            lines += found.sensitivity["keep_bf16"].splitlines()
    return lines


def _operand_line(row: dict[str, Any]) -> str:
    signal = "exact" if row["sqnr_db"] is None else f"{row['sqnr_db']:.1f} dB (worst {row['worst_layer']})"
    return (
        f"  operand     {row['operand']:<18} SQNR {signal}, to zero {100 * row['underflow']:.1f}%, saturated "
        f"{100 * row['saturated']:.1f}%, scales lost {100 * row['scale_underflow']:.2f}%, outliers "
        f"{row['outlier']:.0f} x rms"
    )


def save(audits: dict[str, Audit], out: Path) -> None:
    """Writes OUT/audit.json, beside what stands there for other arms."""
    path = out / AUDIT_FILE
    with disk_faults(out):
        known = json.loads(path.read_text()) if path.is_file() else {}
        checkpoint.write_whole(path, json.dumps(known | {name: found.to_dict() for name, found in audits.items()}))


def require_share(text: str | None) -> float | None:
    """`80%` or `0.8` -> 0.8."""
    if text is None:
        return None
    try:
        share = float(text.strip().removesuffix("%")) / (100 if text.strip().endswith("%") else 1)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise ExperimentError(f"--require is a share of the step's matmul FLOPs such as 80% or 0.8, not {text!r}")
    return share


def _is_experiment(subject: str) -> bool:
    path = Path(subject)
    if path.suffix not in (".yaml", ".yml") or not path.is_file():
        return False
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError):
        return False  # the recipe's reader tells what is wrong with it
    return isinstance(content, dict) and "arms" in content


def audit_recipe(recipe: Recipe, require: float | None = None, sensitivity: bool = False) -> Audit:
    """On a small Llama with as many blocks as the recipe needs, two microbatches of 74 random tokens."""
    model = sample_model(recipe)
    convert(model, recipe)
    tokens = torch.randint(0, SAMPLE["vocab_size"], (2, 2, 38), generator=torch.Generator().manual_seed(0))
    losses = [_loss(model, windows) for windows in tokens]
    return _audited(model, losses, recipe, require, sensitivity)


def sample_model(recipe: Recipe) -> nn.Module:
    from transformers import AutoModelForCausalLM, LlamaConfig

    blocks = 2
    if recipe.keep_bf16.blocks is not None:
        while sum(recipe.keep_bf16.blocks.kept(blocks)) >= blocks:
            blocks += 1
    with isolated(torch.device("cpu"), "audit", recipe.name):
        return AutoModelForCausalLM.from_config(LlamaConfig(num_hidden_layers=blocks, **SAMPLE), dtype=torch.float32)


def audit_arm(
    experiment: Experiment, arm: Arm, out: Path | None, scratch: Path, require: float | None = None,
    sensitivity: bool = False,
) -> Audit:  # fmt: skip
    """One arm with its first seed: the experiment's model, two microbatches of its text."""
    settings, seed = experiment.training, experiment.seeds[0]
    torch.set_num_threads(settings.threads)
    device = choose_device(settings)
    corpus = load_corpus(experiment, out if out is not None and (out / "data").exists() else scratch)
    model = build_model(experiment, seed, corpus.info.vocab_size).to(device)
    arm.require()
    convert(model, arm.recipe, backend=arm.backend)
    step = 0
    if out is not None and (folder := checkpoint.latest(job_folder(out, arm.name, seed) / "checkpoint")) is not None:
        step = checkpoint.load(folder, model, checkpoint.identity(experiment, arm, seed, model))["step"]
    if settings.compile:
        compile_blocks(model)
    rows = min(ROWS, settings.batch_size)
    # one token less than a sequence: token counts that are no multiple of 16 go through the padding
    batches = [corpus.train_batch(seed, step, part, rows, 2)[:, :-1].to(device) for part in range(2)]
    model.train()
    found = _audited(
        model, [_loss(model, windows) for windows in batches], arm.recipe, require, sensitivity, experiment.total_steps
    )
    found.notes.insert(0, f"arm {arm.name} of {experiment.name}, seed {seed}, weights after {step} steps")
    return found


def _audited(
    model: nn.Module, losses: list[Callable[[], Tensor]], recipe: Recipe, require: float | None, sensitivity: bool,
    total_steps: int | None = None,
) -> Audit:  # fmt: skip
    steps: dict[str, Any] = {} if total_steps is None else {"total_steps": total_steps}
    device = next(model.parameters()).device
    with isolated(device, "audit", recipe.name):
        found = audit(model, losses, recipe, require=require, **steps)
        if sensitivity and not recipe.quantizes_nothing:
            found.sensitivity = rank_layers(model, losses, found.coverage)
    return found


def _loss(model: nn.Module, windows: Tensor) -> Callable[[], Tensor]:
    return lambda: next_token_loss(model, windows)


