"""Soak: a long job, killed ten times without warning, must end with the bits of the undisturbed one and not grow.

    python experiments/soak/soak.py --steps 5000 --kills 10 --out runs/soak

Two runs of one job (the arm, seed 1): one undisturbed, whose resident memory is watched; one that gets SIGKILL at
random moments - in a step, while a checkpoint is written, while it starts - and is started again. Then the last
checkpoints (weights, optimizer, generators) and the metrics must be equal, and memory in the last tenth of the
undisturbed run must be what it was in the second one. Exit code 0 if so. The numbers go to OUT/soak.json.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[2]
WALL_CLOCK = {"tokens_per_s", "seconds", "peak_memory_bytes"}
GROWTH_MB = 32.0  # what an allocator may still settle by; a leak of one activation a step is hundreds


class Process:
    """One ``nvfp4-train train``, watched from outside by its metrics and its resident memory."""

    def __init__(self, experiment: Path, arm: str, out: Path):
        command = [sys.executable, "-m", "nvfp4_train.cli", "train", str(experiment), "--arm", arm, "--seed", "1",
                   "--out", str(out)]  # fmt: skip
        self.metrics = out / arm / "seed1" / "metrics.jsonl"
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)

    def running(self) -> bool:
        return self.process.poll() is None

    def step(self) -> int:
        """Steps done, by the last whole line of the metrics."""
        try:
            with open(self.metrics, "rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - 4096))
                lines = file.read().split(b"\n")[:-1]
            return json.loads(lines[-1])["step"]
        except (OSError, IndexError, ValueError):
            return 0

    def resident_mb(self) -> float | None:
        """Resident memory; None where the system does not tell (it is read from /proc)."""
        try:
            pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        except OSError:
            return None
        return pages * os.sysconf("SC_PAGE_SIZE") / 1e6

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def finish(self) -> None:
        code, told = self.process.wait(), self.process.stderr.read().decode()
        if code != 0:
            raise SystemExit(f"the job ended with exit code {code}: {told[-2000:]}")


def undisturbed(experiment: Path, arm: str, out: Path, pause: float = 0.5) -> list[tuple[int, float]]:
    """Runs the job; (step, resident MB) once a pause."""
    job, seen = Process(experiment, arm, out), []
    while job.running():
        memory = job.resident_mb()
        if memory is not None:
            seen.append((job.step(), memory))
        time.sleep(pause)
    job.finish()
    return seen


def killed_at_random(experiment: Path, arm: str, out: Path, steps: int, kills: int, chance: random.Random) -> list[int]:
    """Starts the job and kills it, ``kills`` times, further on each time; the steps after which it was killed."""
    moments = sorted(chance.sample(range(1, steps), kills))
    killed = []
    for moment in moments:
        job = Process(experiment, arm, out)
        while job.running() and job.step() < moment:
            time.sleep(0.005)
        time.sleep(chance.random() * 0.2)  # anywhere in a step, an evaluation or a checkpoint
        if not job.running():
            job.finish()
            raise SystemExit(f"the job ended before it could be killed at step {moment}: give it more steps")
        killed.append(job.step())
        job.kill()
    return killed


def differences(one: Path, two: Path) -> list[str]:
    """What differs between two finished jobs, wall-clock figures aside; nothing if they are equal bit for bit."""
    found = []
    lasts = [sorted((job / "checkpoint").glob("step_*"))[-1] for job in (one, two)]
    weights = [load_file(last / "model.safetensors") for last in lasts]
    found += [f"weight {name}" for name in weights[0] if not torch.equal(weights[0][name], weights[1][name])]
    states = [torch.load(last / "state.pt", weights_only=True) for last in lasts]
    free = WALL_CLOCK | {"metrics"}  # how long the metrics are in bytes follows from the wall-clock figures in them
    found += [f"state {place}" for place in _unequal(*states, "") if place.rpartition(".")[2] not in free]
    lines = [_lines(job / "metrics.jsonl") for job in (one, two)]
    found += [f"metrics line {i}" for i, (a, b) in enumerate(zip(*lines, strict=False)) if a != b]
    if len(lines[0]) != len(lines[1]):
        found.append(f"metrics have {len(lines[0])} and {len(lines[1])} lines")
    return found


def _unequal(a: Any, b: Any, place: str) -> list[str]:
    if isinstance(a, torch.Tensor):
        return [] if torch.equal(a, b) else [place]
    if isinstance(a, dict) and isinstance(b, dict):
        if a.keys() != b.keys():
            return [f"{place} (other keys)"]
        return [found for key in a for found in _unequal(a[key], b[key], f"{place}.{key}")]
    if isinstance(a, list | tuple) and isinstance(b, list | tuple) and len(a) == len(b):
        return [found for i, (x, y) in enumerate(zip(a, b, strict=True)) for found in _unequal(x, y, f"{place}.{i}")]
    return [] if a == b else [place]


def _lines(path: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in WALL_CLOCK} for line in lines]


def by_tenths(seen: list[tuple[int, float]], steps: int) -> list[float | None]:
    """Median resident memory of each tenth of the steps, MB; None for a tenth that was over between two looks."""
    parts: list[list[float]] = [[] for _ in range(10)]
    for step, memory in seen:
        parts[min(9, 10 * step // steps)].append(memory)
    return [round(statistics.median(part), 1) if part else None for part in parts]


def growth_mb(seen: list[tuple[int, float]], steps: int) -> float | None:
    """Of the last tenth over the second, in which everything that training needs has been made once."""
    tenths = by_tenths(seen, steps)
    return None if None in (tenths[1], tenths[9]) else tenths[9] - tenths[1]


def soak(experiment: Path, arm: str, steps: int, kills: int, out: Path, seed: int = 0) -> dict[str, Any]:
    """Both runs, compared. ``experiment``: a file whose training.steps is ``steps``."""
    seen = undisturbed(experiment, arm, out / "whole")
    killed = killed_at_random(experiment, arm, out / "killed", steps, kills, random.Random(seed))
    Process(experiment, arm, out / "killed").finish()
    found = differences(*(out / run / arm / "seed1" for run in ("whole", "killed")))
    growth = growth_mb(seen, steps)
    return {
        "steps": steps, "arm": arm, "killed_after_step": killed, "differences": found, "growth_mb": growth,
        "resident_mb_by_tenths": by_tenths(seen, steps),
        "ok": not found and (growth is None or growth < GROWTH_MB),
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experiment", type=Path, default=ROOT / "experiments" / "quickstart.yaml")
    parser.add_argument("--arm", default="nvfp4")
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--checkpoint-every", type=int, default=100)
    parser.add_argument("--out", type=Path, default=Path("runs/soak"))
    parser.add_argument("--seed", type=int, default=0, help="of the moments at which it is killed")
    asked = parser.parse_args()
    content = yaml.safe_load(asked.experiment.read_text())
    content["training"] = {k: v for k, v in content["training"].items() if k != "tokens"} | {"steps": asked.steps}
    content |= {"checkpoint": {"every": asked.checkpoint_every}, "seeds": [1], "tracking": {}}
    content["evaluation"]["every"] = max(content["evaluation"]["every"], asked.steps // 10)
    asked.out.mkdir(parents=True, exist_ok=True)
    file = asked.out / "soak.yaml"
    file.write_text(yaml.safe_dump(content, sort_keys=False))
    begin = time.time()
    result = soak(file, asked.arm, asked.steps, asked.kills, asked.out, asked.seed)
    result["minutes"] = round((time.time() - begin) / 60, 1)
    (asked.out / "soak.json").write_text(json.dumps(result, indent=1))
    print(json.dumps(result, indent=1))
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
