"""The audit of a run's newest weights: all of them, of one process or of many ranks, or a refusal that names why."""

import shutil
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from tiny_experiment import tiny, write_experiment

from nvfp4_train.experiment import checkpoint, sharded_checkpoint
from nvfp4_train.experiment.auditing import audit_subject
from nvfp4_train.experiment.errors import ExperimentError
from nvfp4_train.experiment.model import build_model
from nvfp4_train.experiment.train import run_job

LOST = "model.layers.1.mlp.down_proj.weight"
CHANGES = {"training.steps": 2, "training.batch_size": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("run")
    run_job(tiny(place, CHANGES), "nvfp4", 1, place / "out")
    return place


@pytest.fixture
def copy(folder, tmp_path):
    """(experiment file, run folder, its checkpoint) to damage."""
    shutil.copytree(folder, tmp_path / "copy")
    step = checkpoint.latest(tmp_path / "copy" / "out" / "nvfp4" / "seed1" / "checkpoint")
    return tmp_path / "copy" / "tiny.yaml", tmp_path / "copy" / "out", step


def audited(path, out):
    return audit_subject(str(path), out=out)["nvfp4"]


def as_shards(step, path, change):
    """Puts shards in the place of the whole weights, as ranks leave them before their last step."""
    model = build_model(tiny(path.parent, CHANGES), 1, 256)
    checkpoint.load_weights(step, model)
    kept = sharded_checkpoint.tensors(model, torch.optim.AdamW(model.parameters()))
    change(kept["model"])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*single process")  # which is what it is
        dcp.save(kept, checkpoint_id=step / checkpoint.SHARDS, no_dist=True)
    (step / checkpoint.WEIGHTS).unlink()


def test_shards_are_audited_like_the_whole_weights(copy):
    path, out, step = copy
    whole = audited(path, out)
    as_shards(step, path, lambda weights: None)
    sharded = audited(path, out)
    assert whole.ok and "weights after 2 steps" in whole.notes[0]
    assert sharded.to_dict() == whole.to_dict()  # SQNR of every operand, measured on the same weights


@pytest.mark.parametrize("shards", [False, True])
@pytest.mark.parametrize(
    "change, told",
    [
        (lambda weights: weights.pop(LOST), f"belongs to another model: it lacks {LOST}$"),
        (lambda weights: weights.update(extra=torch.ones(2)), "belongs to another model: it has in addition extra$"),
        (
            lambda weights: weights.update({LOST: torch.ones(32, 16)}),
            rf"belongs to another model: {LOST} is \(32, 16\) there and \(32, 48\) here$",
        ),
        (lambda weights: weights.update({LOST: torch.full((32, 48), torch.nan)}), f"is damaged: the weight {LOST}"),
    ],
    ids=["missing", "extra", "size", "nan"],
)
def test_weights_that_are_not_all_of_the_model_are_refused(copy, shards, change, told):
    path, out, step = copy
    if shards:
        as_shards(step, path, change)
    else:
        weights = load_file(step / checkpoint.WEIGHTS)
        change(weights)
        save_file(weights, step / checkpoint.WEIGHTS, metadata={"format": "pt"})
    with pytest.raises(ExperimentError, match=told):
        audited(path, out)
    assert not (out / "audit.json").exists()


def test_a_checkpoint_without_weights_or_with_torn_shards_is_refused(copy):
    path, out, step = copy
    as_shards(step, path, lambda weights: None)
    for part in (step / checkpoint.SHARDS).glob("*.distcp"):
        part.unlink()
    with pytest.raises(ExperimentError, match="cannot be read"):
        audited(path, out)
    shutil.rmtree(step / checkpoint.SHARDS)
    with pytest.raises(ExperimentError, match="cannot be read"):
        audited(path, out)


def test_the_folder_of_another_experiment_is_refused(copy):
    path, out, _ = copy
    write_experiment(path.parent, CHANGES | {"training.learning_rate": 1.0e-4})
    with pytest.raises(ExperimentError, match="belongs to another experiment: training.learning_rate is 0.003 there"):
        audited(path, out)
