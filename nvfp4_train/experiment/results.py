"""What a run folder holds, read once into plain data.

```
OUT/record.json                      what was asked: arms, seeds, recipes, data, versions
OUT/<arm>/seed<k>/result.json        how that job ended (absent while it runs, or if it never started)
OUT/<arm>/seed<k>/metrics.jsonl      one JSON object a line: train, eval, spike, phase, audit, audit_weights, warning
OUT/audit.json                       what `nvfp4-train audit EXPERIMENT --out OUT` found, by arm
```
A folder may be read while jobs are still writing to it or after they were killed, so a torn last line is normal and
an absent result is a state with a name, never an error. No torch here: a report is arithmetic on text.
"""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Job:
    """One arm with one seed."""

    arm: str
    seed: int
    state: str  # finished | failed | unfinished (it has written something, but no result) | missing
    why: str = ""  # for every state but finished: what is known about it, in words
    result: dict[str, Any] = field(default_factory=dict)
    evals: list[dict[str, Any]] = field(default_factory=list)  # by step, each step once
    spikes: list[dict[str, Any]] = field(default_factory=list)
    phases: list[dict[str, Any]] = field(default_factory=list)
    audits: list[dict[str, Any]] = field(default_factory=list)
    weights: list[dict[str, Any]] = field(default_factory=list)  # audit_weights
    warnings: list[dict[str, Any]] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        return self.state == "finished"


@dataclass(frozen=True)
class Run:
    """A whole run folder."""

    path: Path
    record: dict[str, Any]
    jobs: dict[tuple[str, int], Job]
    audit: dict[str, Any] = field(default_factory=dict)  # arm -> the audit that `nvfp4-train audit --out` left here

    @property
    def seeds(self) -> list[int]:
        return list(self.record["seeds"])

    def arms(self, *roles: str) -> list[dict[str, Any]]:
        """The record's arms with one of these roles (all of them if none is named), in the experiment's order."""
        return [arm for arm in self.record["arms"] if not roles or arm["role"] in roles]

    @property
    def control(self) -> str:
        return self.arms("control")[0]["name"]

    def job(self, arm: str, seed: int) -> Job:
        return self.jobs[arm, seed]


def read_run(run_dir: str | Path) -> Run:
    """Read a run folder. Raises ValueError if it is none, or if its record names no control."""
    path = Path(run_dir)
    record_path = path / "record.json"
    if not record_path.is_file():
        raise ValueError(
            f"{path} is not a run folder: it has no record.json. Give the folder named by `compare --out`."
        )
    try:
        record = json.loads(record_path.read_text(encoding="utf-8"))
        roles = [arm["role"] for arm in record["arms"]]
        seeds = list(record["seeds"])
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise ValueError(
            f"{record_path} cannot be read as a run's record ({error}). Run `compare` again to write it."
        ) from None
    if roles.count("control") != 1:
        raise ValueError(f"{record_path}: one arm must be the control, found {roles.count('control')}.")
    jobs = {(arm["name"], seed): _read_job(path, arm["name"], seed) for arm in record["arms"] for seed in seeds}
    return Run(path, record, jobs, _read_audit(path / "audit.json"))


def _read_audit(path: Path) -> dict[str, Any]:
    try:
        audits = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return audits if isinstance(audits, dict) else {}


def _read_job(path: Path, arm: str, seed: int) -> Job:
    folder = path / arm / f"seed{seed}"
    lines = _read_metrics(folder / "metrics.jsonl")
    # After a resume a step may be there twice; the later line is the one the weights belong to.
    kinds = ("eval", "spike", "phase", "audit", "audit_weights")
    by_kind = [{line["step"]: line for line in lines if line.get("kind") == kind} for kind in kinds]
    warnings = {(line["step"], line["check"]): line for line in lines if line.get("kind") == "warning"}
    result, state, why = _read_result(folder / "result.json", lines)
    found = [[kind[key] for key in sorted(kind)] for kind in (*by_kind, warnings)]
    return Job(arm, seed, state, why, result, *found)


def _read_metrics(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    lines = []
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            line = json.loads(text)
        except json.JSONDecodeError:
            continue  # torn by a kill; a resume writes it again
        if isinstance(line, dict):
            lines.append(line)
    return lines


def _read_result(path: Path, lines: list[dict[str, Any]]) -> tuple[dict[str, Any], str, str]:
    """-> result, state, why. A result that says finished but holds no finite loss counts as failed."""
    if not path.is_file():
        steps = [line["step"] for line in lines if "step" in line]
        return (
            ({}, "unfinished", f"stopped or still running at step {max(steps)}")
            if steps
            else ({}, "missing", "never started")
        )
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
        status = result["status"]
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError):
        return {}, "unfinished", "its result.json cannot be read"
    if status == "finished":
        if is_number(result.get("final_loss")):
            return result, "finished", ""
        return result, "failed", f"ended with a loss of {result.get('final_loss')}"
    failure = result.get("failure") or {}
    why = f"stopped at step {failure.get('step', result.get('steps', '?'))}"
    if failure.get("tensor"):
        tensor = str(failure["tensor"])  # mostly a phrase such as "the weight x is not finite"
        why += f": {tensor}" if "finite" in tensor else f": {tensor} was not finite"
    if failure.get("checkpoint"):
        why += f"; last good checkpoint: {failure['checkpoint']}"
    return result, "failed" if status == "failed" else "unfinished", why


def is_number(value: Any) -> bool:
    """True for a finite int or float (JSON written by Python may hold NaN and Infinity)."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
