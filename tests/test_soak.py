"""The soak script in small: killed twice at random moments, a job ends as the undisturbed one; differences are seen."""

import importlib.util
import multiprocessing
import random
import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_experiment import tiny

from nvfp4_train.experiment.config import load_experiment
from nvfp4_train.experiment.train import run_job

SCRIPT = Path(__file__).parents[1] / "experiments" / "soak" / "soak.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("soak", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Forked:
    """In place of the script's Process: a fork needs no imports. (test_train.py kills a job of the command line.)"""

    def __init__(self, experiment: Path, arm: str, out: Path):
        self.metrics = out / arm / "seed1" / "metrics.jsonl"
        context = multiprocessing.get_context("fork")
        self.process = context.Process(target=run_job, args=(load_experiment(experiment), arm, 1, out))
        self.process.start()

    def running(self) -> bool:
        return self.process.is_alive()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        assert self.process.exitcode == -signal.SIGKILL


def test_two_kills_leave_no_trace_and_a_difference_is_seen(tmp_path, script, monkeypatch):
    monkeypatch.setattr(Forked, "step", script.Process.step, raising=False)
    monkeypatch.setattr(script, "Process", Forked)
    experiment = tiny(tmp_path, {"training.steps": 30, "checkpoint.every": 4, "evaluation.every": 15})
    moments = script.killed_at_random(experiment.path, "nvfp4", tmp_path / "killed", 30, 2, random.Random(4))
    assert len(moments) == 2 and 0 < max(moments) < 30
    for run in ("whole", "killed"):
        run_job(experiment, "nvfp4", 1, tmp_path / run)
    whole, killed = (tmp_path / run / "nvfp4" / "seed1" for run in ("whole", "killed"))
    assert script.differences(whole, killed) == []
    changed = tmp_path / "changed"
    shutil.copytree(killed, changed)
    file = next((changed / "checkpoint").glob("step_*")) / "model.safetensors"
    weights = load_file(file)
    weights["model.norm.weight"][3] = torch.nextafter(weights["model.norm.weight"][3], torch.tensor(9.0))
    save_file(weights, file)
    lines = (changed / "metrics.jsonl").read_text().splitlines()
    (changed / "metrics.jsonl").write_text("\n".join(lines[:-1]) + "\n")
    assert script.differences(whole, changed) == [
        "weight model.norm.weight", f"metrics have {len(lines)} and {len(lines) - 1} lines"
    ]  # fmt: skip


def test_growth_is_the_last_tenth_against_the_second(script):
    assert script.growth_mb([(step, 100.0 + step / 10) for step in range(1000)], 1000) == pytest.approx(80.0, abs=0.11)
    assert script.growth_mb([(step, 900.0 if step < 50 else 300.0) for step in range(1000)], 1000) == 0.0
    assert script.growth_mb([(1000, 5.0)], 1000) is None
    assert script.by_tenths([(0, 1.0), (99, 3.0), (1000, 7.0)], 1000) == [2.0, *[None] * 8, 7.0]
