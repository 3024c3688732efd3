"""One job of the tiny experiment on one process or on several ranks, and how two finished jobs are compared."""

import hashlib
import json
from unittest import mock

import pytest
import torch
import yaml
from safetensors.torch import load_file

from nvfp4_train.experiment.config import load_experiment
from nvfp4_train.experiment.errors import ExperimentError
from nvfp4_train.experiment.train import Job, run_job
from tests.tiny_experiment import changed

# A norm below `clip` multiplies by exactly 1: the sum of squares may be added in any order.
STEPS = {
    "training.accumulation": 4, "training.batch_size": 1, "training.clip": 1.0e9, "training.steps": 4,
    "checkpoint.every": 2, "evaluation.batches": 3, "model.config.intermediate_size": 64,
}  # fmt: skip
BOUND = 1e-3  # of the loss, where gradients of ranks are added in another order than those of microbatches
TENSOR_BOUND = 5e-3  # where partial sums of an output are rounded to BF16 before they are added
FSDP = {"parallel.data": "fsdp"}
GATHERED = FSDP | {"parallel.gather_fp4": True}
TENSOR = {"parallel.tensor": 2}
TWO_PARTS = {"training.accumulation": 2}


class Killed(BaseException):
    pass


def experiment_in(folder, changes=None):
    """One file for each set of changes, written by this process before it starts the ranks."""
    text = yaml.safe_dump(changed(STEPS | (changes or {})), sort_keys=False)
    path = folder / f"{hashlib.sha256(text.encode()).hexdigest()[:8]}.yaml"
    if not path.exists():
        path.write_text(text)
    return load_experiment(path)


def run(folder, out, changes=None, stop=None, seed=1):
    """One job of the experiment, on this process or as one of several ranks; killed in step ``stop``."""
    step = Job._step

    def killed(job):
        if job.step == stop:
            raise Killed
        step(job)

    experiment = experiment_in(folder, changes)
    with mock.patch.object(Job, "_step", killed):
        try:
            run_job(experiment, "nvfp4", seed, out)
        except Killed:
            return "killed"
        except ExperimentError as error:
            return str(error)
    return "finished"


def outcome(out, arm="nvfp4"):
    """(losses of every step, held-out losses, final weights) of a finished job."""
    folder = out / arm / "seed1"
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    weights = load_file(next((folder / "checkpoint").glob("step_*")) / "model.safetensors")
    losses = {kind: [line["loss"] for line in lines if line["kind"] == kind] for kind in ("train", "eval")}
    return losses["train"], losses["eval"], weights


def assert_same(one, other):
    assert one[:2] == other[:2]
    assert one[2].keys() == other[2].keys()
    for name, value in one[2].items():
        assert torch.equal(value, other[2][name]), name


def assert_near(one, other, bound=BOUND):
    assert one[0] == pytest.approx(other[0], rel=bound) and one[1] == pytest.approx(other[1], rel=bound)
