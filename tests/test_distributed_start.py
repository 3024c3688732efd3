"""Jobs whose ranks share the weights start from the bits of one process, and only the first rank builds the model."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist

from nvfp4_train.experiment import model as models
from nvfp4_train.experiment import train
from nvfp4_train.experiment.config import load_experiment
from nvfp4_train.experiment.model import build_model, build_skeleton
from nvfp4_train.experiment.train import Job, run_job
from tests.distributed_harness import on_ranks, returned
from tests.tiny_experiment import write_experiment, write_text

STEPS = {
    "training.accumulation": 4, "training.batch_size": 1, "training.steps": 2, "model.config.intermediate_size": 64,
}  # fmt: skip
FSDP = STEPS | {"parallel.data": "fsdp"}
CASES = {
    "fsdp": FSDP,
    "ddp": STEPS,
    "gathered": FSDP | {"parallel.gather_fp4": True},
    "tied": FSDP | {"model.config.tie_word_embeddings": True},
    "odd": FSDP | {"model.config.intermediate_size": 49, "model.config.vocab_size": 257},
    "biased": FSDP | {"model.config.attention_bias": True, "model.config.rope_scaling": {
        "rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}},
    "gpt2": FSDP | {"model.config": {"model_type": "gpt2", "n_embd": 32, "n_head": 2, "n_layer": 2, "n_positions": 64,
                                     "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}},
    "experts": FSDP | {"model.config": {
        "model_type": "mixtral", "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64, "num_local_experts": 2,
        "num_experts_per_tok": 1}},
}  # fmt: skip
TENSOR = FSDP | {"parallel.tensor": 2}


def file_of(folder, name):
    return folder / name / "tiny.yaml"


def started(folder, name, arm="nvfp4"):
    """(weights and buffers of the job before its first step, how often this rank built the model, ties)."""

    def look(job):
        tensors = [*job.model.named_parameters(), *job.model.named_buffers()]
        whole = {n: t.full_tensor() if hasattr(t, "full_tensor") else t for n, t in tensors}
        names = [n for n, _ in job.model.named_parameters(remove_duplicate=False)]
        return {n: t.detach().clone() for n, t in whole.items()}, built.call_count, len(names)

    with (
        mock.patch.object(Job, "run", look),
        mock.patch.object(train, "build_model", wraps=build_model) as built,
    ):
        return run_job(load_experiment(file_of(folder, name)), arm, 1, folder / name / f"{arm}-{dist.get_world_size()}")


def no_skeleton(folder, name):
    """A model that cannot be built without values is built whole, on every rank."""
    with mock.patch.object(models.AutoModelForCausalLM, "from_config", side_effect=on_meta_it_fails):
        return started(folder, name, "bf16")


from_config = models.AutoModelForCausalLM.from_config


def on_meta_it_fails(*arguments, **options):
    if torch.empty(0).is_meta:
        raise RuntimeError("Tensor.item() cannot be called on meta tensors")
    return from_config(*arguments, **options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("start")
    for name, changes in {**CASES, "tensor": TENSOR}.items():
        (place / name).mkdir()
        write_text(place / name / "text")
        write_experiment(place / name, {"noise_floor": True} | changes)
    return place


@pytest.fixture(scope="module")
def two(folder):
    cases = {name: (started, (folder, name)) for name in CASES}
    cases |= {"nudged": (started, (folder, "fsdp", "noise_floor")), "valued": (no_skeleton, (folder, "fsdp"))}
    return on_ranks(2, cases)


def assert_starts_like_one_process(found, folder, name, nudged=False):
    source = build_model(load_experiment(file_of(folder, name)), 1, 256, nudged)
    expected = dict(source.named_parameters()) | dict(source.named_buffers())
    ties = len(list(source.named_parameters(remove_duplicate=False)))
    for weights, _, names in found:
        assert weights.keys() == expected.keys() and names == ties
        for key, value in expected.items():
            assert torch.equal(weights[key], value), key


@pytest.mark.parametrize("name", [name for name in CASES if name != "ddp"])
def test_shared_weights_are_those_of_one_process_and_one_rank_builds_them(two, folder, name):
    found = returned(two[name])
    assert_starts_like_one_process(found, folder, name)
    assert [built for _, built, _ in found] == [1, 0]


def test_the_noise_floor_starts_from_the_nudged_weights(two, folder):
    assert_starts_like_one_process(returned(two["nudged"]), folder, "fsdp", nudged=True)


@pytest.mark.parametrize("case", ["ddp", "valued"])
def test_where_each_rank_needs_the_whole_model_each_builds_it(two, folder, case):
    found = returned(two[case])
    assert_starts_like_one_process(found, folder, "fsdp")
    assert [built for _, built, _ in found] == [1, 1]


def test_weights_cut_by_tensor_parallelism_and_fsdp_start_alike(folder):
    found = returned(on_ranks(4, {"tensor": (started, (folder, "tensor"))})["tensor"])
    assert_starts_like_one_process(found, folder, "tensor")
    assert [built for _, built, _ in found] == [1, 0, 0, 0]


def test_a_model_with_tensors_of_its_own_has_no_skeleton(folder):
    experiment = load_experiment(file_of(folder, "fsdp"))
    skeleton = build_skeleton(experiment, 1, 256)
    assert all(t.is_meta for t in (*skeleton.parameters(), *skeleton.buffers()))

    def with_a_tensor(*arguments, **options):
        model = from_config(*arguments, **options)
        model.model.table = torch.zeros(3)
        return model

    with mock.patch.object(models.AutoModelForCausalLM, "from_config", side_effect=with_a_tensor):
        assert build_skeleton(experiment, 1, 256) is None


