"""`train` on several ranks: the numbers of one process, checkpoints for any number of ranks, faults told on each."""

import functools
import shutil
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from rich.console import Console
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from nvfp4_train.experiment import checkpoint, sharded_checkpoint
from nvfp4_train.experiment.auditing import audit_subject
from nvfp4_train.experiment.checkpoint import WEIGHTS, latest, load_weights
from nvfp4_train.experiment.compare import compare
from nvfp4_train.experiment.errors import ExperimentError, TrainingStopped
from nvfp4_train.experiment.model import build_model
from nvfp4_train.experiment.train import Job, run_job
from tests.distributed_harness import on_ranks, returned
from tests.distributed_runs import (
    FSDP,
    GATHERED,
    TENSOR,
    TENSOR_BOUND,
    TWO_PARTS,
    assert_near,
    assert_same,
    experiment_in,
    outcome,
    run,
)
from tests.tiny_experiment import write_text


def go_on(folder, out, killed, changes):
    """From a copy of a folder whose job was killed."""
    if dist.get_rank() == 0:
        shutil.copytree(killed, out)
    dist.barrier()
    return run(folder, out, changes)


def broken(folder, out):
    """A NaN in the part of a weight that only the second rank has."""
    step = Job._step

    def breaking(job):
        if job.step == 2 and dist.get_rank():
            weight = job.model.model.norm.weight
            weight.detach().to_local().view(-1)[0] = torch.nan
        step(job)

    with mock.patch.object(Job, "_step", breaking), pytest.raises(TrainingStopped) as told:
        run_job(experiment_in(folder, FSDP), "nvfp4", 1, out)
    return str(told.value)


def different(folder, out, changes):
    """The second rank was started with something else."""
    return run(folder, out, changes if dist.get_rank() else None)


def other_out(folder, out):
    """The second rank writes to another folder."""
    return run(folder, out.with_name("elsewhere") if dist.get_rank() else out)


def unseen(folder, out, killed):
    """The second rank does not see what the first does, as on a machine with a disk of its own."""
    if dist.get_rank():
        with mock.patch.object(checkpoint, "latest", lambda folder: None):
            return go_on(folder, out, killed, GATHERED)
    return go_on(folder, out, killed, GATHERED)


def unseen_shards(folder, out):
    save = sharded_checkpoint.save
    move = "elsewhere" if dist.get_rank() else ""
    with mock.patch.object(sharded_checkpoint, "save", lambda place, *rest: save(place / move, *rest)):
        return run(folder, out, FSDP)


TIED = {"model.config.tie_word_embeddings": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Texts, one process's runs of 4 and of 2 microbatches, and one killed in its fourth step (a checkpoint at 2)."""
    place = tmp_path_factory.mktemp("distributed")
    write_text(place / "text")
    assert run(place, place / "alone") == "finished"
    assert run(place, place / "alone2", TWO_PARTS) == "finished"
    assert run(place, place / "alone_tied", TWO_PARTS | TIED) == "finished"
    assert run(place, place / "killed1", stop=3) == "killed"
    shutil.copytree(place / "killed1", place / "from1to2")
    shutil.copytree(place / "killed1", place / "lacking")
    step = latest(place / "lacking" / "nvfp4" / "seed1" / "checkpoint")
    weights = load_file(step / WEIGHTS)
    del weights["model.norm.weight"]
    save_file(weights, step / WEIGHTS, metadata={"format": "pt"})
    return place


@pytest.fixture(scope="module")
def two(folder):
    def job(name, changes=None, **options):
        experiment_in(folder, changes)
        return functools.partial(run, folder, folder / name, changes, **options), ()

    for changes in (FSDP, {"arms": OTHER_ARMS}, {"training.learning_rate": 1.0e-4}):
        experiment_in(folder, changes)
    cases = {
        "ddp": job("ddp", TWO_PARTS), "fsdp": job("fsdp", TWO_PARTS | GATHERED),
        "tied": job("tied", TWO_PARTS | FSDP | TIED), "tensor": job("tensor", TWO_PARTS | TENSOR),
        "killed2": job("killed2", GATHERED, stop=3),
        "from2to2": (go_on, (folder, folder / "from2to2", folder / "killed2", GATHERED)),
        "from1to2": job("from1to2", GATHERED), "tensor_refused": job("bad", {"parallel.tensor": 3}),
        "accumulation_refused": job("bad", {"training.accumulation": 3}),
        "broken": (broken, (folder, folder / "broken")),
        "another_recipe": (different, (folder, folder / "bad", {"arms": OTHER_ARMS})),
        "another_setting": (different, (folder, folder / "bad", {"training.learning_rate": 1.0e-4})),
        "lacking": job("lacking"),
        "other_out": (other_out, (folder, folder / "bad")),
        "unseen": (unseen, (folder, folder / "unseen", folder / "killed2")),
        "unseen_shards": (unseen_shards, (folder, folder / "unseen_shards")),
        "another_run": job("alone", {"training.learning_rate": 1.0e-4}),
    }  # fmt: skip
    return on_ranks(2, cases)


OTHER_ARMS = [{"name": "bf16", "recipe": "bf16", "control": True}, {"name": "nvfp4", "recipe": "nvidia_nvfp4_no_sr"}]


@pytest.mark.parametrize(("case", "one"), [("ddp", "alone2"), ("fsdp", "alone2"), ("tied", "alone_tied")])
def test_two_ranks_train_to_the_bits_of_one_process(two, folder, case, one):
    assert returned(two[case]) == ["finished"] * 2
    assert_same(outcome(folder / case), outcome(folder / one))


def test_tensor_parallel_trains_near_one_process(two, folder):
    assert returned(two["tensor"]) == ["finished"] * 2
    assert_near(outcome(folder / "tensor"), outcome(folder / "alone2"), TENSOR_BOUND)


def test_the_audit_of_a_killed_run_reads_the_weights_of_all_ranks(two, folder, tmp_path):
    assert returned(two["killed2"]) == ["killed"] * 2
    shutil.copytree(folder / "killed2", tmp_path / "out")
    experiment = experiment_in(folder, GATHERED)
    found = audit_subject(str(experiment.path), out=tmp_path / "out")["nvfp4"]
    assert found.ok and "weights after 2 steps" in found.notes[0]
    step = latest(tmp_path / "out" / "nvfp4" / "seed1" / "checkpoint")
    assert not (step / WEIGHTS).exists()
    model = build_model(experiment, 1, 256)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    load_weights(step, model)
    dcp_to_torch_save(step / "shards", tmp_path / "whole.pt")  # torch's own way to put shards together
    expected = torch.load(tmp_path / "whole.pt")["model"]
    for name, value in model.state_dict().items():
        assert torch.equal(value, expected[name]) and not torch.equal(value, before[name]), name


def test_a_run_goes_on_under_another_number_of_ranks(two, folder):
    assert returned(two["killed2"]) == ["killed"] * 2
    shards = folder / "killed2" / "nvfp4" / "seed1" / "checkpoint" / "step_00000002" / "shards"
    assert len(list(shards.glob("*.distcp"))) == 2
    shutil.copytree(folder / "killed2", folder / "from2to4")
    shutil.copytree(folder / "killed2", folder / "from2to1")
    experiment_in(folder, FSDP)
    four = on_ranks(4, {"go": (run, (folder, folder / "from2to4", FSDP))})
    assert returned(four["go"]) == ["finished"] * 4
    assert run(folder, folder / "from2to1", FSDP) == "finished"
    assert returned(two["from1to2"]) == ["finished"] * 2
    assert returned(two["from2to2"]) == ["finished"] * 2
    for name in ("from2to2", "from2to4", "from2to1", "from1to2"):
        assert_near(outcome(folder / name), outcome(folder / "alone"))


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("tensor_refused", ["parallel.tensor is 3", "2 ranks"]),
        ("accumulation_refused", ["2 data-parallel ranks", "accumulation: 3", "multiple of 2"]),
        ("another_recipe", ["disagree", "the recipe of arm nvfp4"]),
        ("another_setting", ["disagree", "training", "learning_rate"]),
        ("other_out", ["disagree on --out", "bad", "elsewhere"]),
        ("unseen", ["disagree on the newest checkpoint in --out", "step_00000002", "none"]),
        ("unseen_shards", ["step_00000002 is not whole", "__1_0.distcp", "all machines share"]),
        ("broken", ["stopped at step 3", "the weight model.norm.weight is not finite", "step_00000002"]),
        ("lacking", ["belongs to another model", "it lacks model.norm.weight"]),
        ("another_run", ["belongs to another experiment", "learning_rate"]),
    ],
)
def test_what_cannot_be_is_refused_by_name_on_every_rank(two, case, words):
    first, second = returned(two[case])
    assert first == second
    assert all(word in first for word in words), first


def test_compare_starts_the_ranks_of_its_jobs_through_torchrun(folder, tmp_path):
    only = {"arms": [OTHER_ARMS[0]], "parallel.ranks": 2, "parallel.data": "fsdp", "training.steps": 1}
    experiment = experiment_in(folder, only | TWO_PARTS)
    (job,) = compare(experiment, tmp_path / "out", Console(quiet=True))
    assert (job.status, job.message) == ("finished", "")
    assert len(list(job.folder.glob("checkpoint/step_00000001/shards/*.distcp"))) == 2


@pytest.mark.parametrize(
    ("changes", "words"), [({"parallel.ranks": 3}, ["3 data-parallel ranks"]), ({}, ["parallel.ranks", "torchrun"])]
)
def test_compare_refuses_what_no_job_could_do(folder, tmp_path, monkeypatch, changes, words):
    monkeypatch.setenv("WORLD_SIZE", "1" if changes else "2")
    with pytest.raises(ExperimentError) as told:
        compare(experiment_in(folder, changes), tmp_path / "out", Console(quiet=True))
    assert all(word in str(told.value) for word in words)
