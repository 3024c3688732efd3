"""One job: pairs start equal and stay paired; killed at any moment it goes on bitwise; broken numbers stop it."""

import errno
import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tiny_experiment import tiny
from torch import nn
from torch.overrides import TorchFunctionMode

from nvfp4_train.experiment import checkpoint, randomness
from nvfp4_train.experiment.errors import ExperimentError, TrainingStopped
from nvfp4_train.experiment.model import build_model
from nvfp4_train.experiment.record import job_folder, prepare_run
from nvfp4_train.experiment.train import Job, run_job

CPU = torch.device("cpu")
WITH_DROPOUT = {
    "model_type": "opt", "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
    "word_embed_proj_dim": 32, "max_position_embeddings": 64, "dropout": 0.5, "attention_dropout": 0.5,
}  # fmt: skip
WALL_CLOCK = {"tokens_per_s", "seconds", "peak_memory_bytes"}


def lines_of(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in WALL_CLOCK} for line in lines]


def weights_of(folder):
    return load_file(checkpoint.latest(folder / "checkpoint") / "model.safetensors")


def same_weights(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def job(experiment, arm, out, seed=1):
    return Job(experiment, arm, seed, job_folder(out, arm, seed), prepare_run(experiment, out))


def test_arms_of_a_seed_start_from_the_same_bits(tmp_path):
    experiment = tiny(tmp_path)
    bf16, nvfp4 = (job(experiment, arm, tmp_path / "out").model.state_dict() for arm in ("bf16", "nvfp4"))
    assert same_weights(bf16, nvfp4)
    torch.rand(7)  # what was drawn before does not matter
    assert same_weights(bf16, build_model(experiment, 1, 256).state_dict())
    assert not same_weights(bf16, build_model(experiment, 2, 256).state_dict())


def test_the_noise_floor_is_nudged_by_one_bf16_ulp(tmp_path):
    experiment = tiny(tmp_path)
    plain, nudged = build_model(experiment, 1, 256), build_model(experiment, 1, 256, nudged=True)
    ups = []
    for a, b in zip(plain.parameters(), nudged.parameters(), strict=True):
        low, high = (x.detach().bfloat16().view(torch.int16).int() for x in (a, b))
        assert int((low - high).abs().max()) <= 2  # just above a power of two, an ulp down is two steps of half
        ulp = 2.0 ** (torch.frexp(a.detach())[1] - 8)
        assert ((b - a).abs() / ulp - 1).abs().max() < 1e-4
        ups.append((b > a).float().flatten())
    assert 0.4 < torch.cat(ups).mean() < 0.6
    again = build_model(experiment, 1, 256, nudged=True)
    assert same_weights(nudged.state_dict(), again.state_dict())


def test_the_quantizer_does_not_disturb_dropout(tmp_path):
    """Two streams: whatever is drawn between two dropouts, the masks are the same; and the draws are theirs alone."""

    def masks(extra_draws):
        torch.manual_seed(3)
        drawn = []
        with randomness.DropoutStream(CPU, seed=1):
            for _ in range(3):
                drawn.append(F.dropout(torch.ones(64), 0.5))
                drawn.append(nn.functional.scaled_dot_product_attention(*torch.ones(3, 1, 1, 8, 8), dropout_p=0.5))
                torch.rand(extra_draws)
        return torch.cat([d.flatten() for d in drawn]), torch.rand(4)

    (few, after_few), (many, after_many) = masks(1), masks(1000)
    assert torch.equal(few, many) and not torch.equal(few[:64], few[128:192])
    torch.manual_seed(3)
    torch.rand(3)
    assert torch.equal(after_few, torch.rand(4))  # no dropout took from the default generator
    assert not torch.equal(after_few, after_many)


class Masks(TorchFunctionMode):
    """Keeps the mask of every F.dropout of a training step."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is not F.dropout or not kwargs.get("training"):
            return func(*args, **kwargs)
        self.seen.append(func(torch.ones_like(args[0]), **kwargs))
        return args[0] * self.seen[-1]


def test_both_arms_see_the_same_dropout_masks(tmp_path):
    experiment = tiny(tmp_path, {"model.config": WITH_DROPOUT, "training.steps": 2})
    masks = []
    for arm in ("bf16", "nvfp4"):
        started = job(experiment, arm, tmp_path / "out")
        with Masks() as mode:
            started.run()
        masks.append(mode.seen)
    assert len(masks[0]) >= 4 and any(0.3 < (mask == 0).float().mean() < 0.7 for mask in masks[0])
    for a, b in zip(*masks, strict=True):
        assert torch.equal(a, b)


def test_dropout_under_compile_is_refused(tmp_path):
    with pytest.raises(ExperimentError, match="compile"):
        job(tiny(tmp_path, {"model.config": WITH_DROPOUT, "training.compile": True}), "bf16", tmp_path / "out")


def test_a_killed_job_goes_on_bitwise(tmp_path):
    """kill -9 in the middle, resumed twice (once after a cut inside a line), stochastic rounding on."""
    steps = {"training.steps": 24, "evaluation.every": 8, "checkpoint.every": 5}
    experiment = tiny(tmp_path, steps)
    whole = run_job(experiment, "nvfp4", 1, tmp_path / "whole")
    out = tmp_path / "killed"
    folder = job_folder(out, "nvfp4", 1)
    command = [
        sys.executable, "-m", "nvfp4_train.cli", "train", str(experiment.path), "--arm", "nvfp4", "--seed", "1",
        "--out", str(out),
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, cwd=tmp_path)
    limit = time.monotonic() + 120
    while checkpoint.latest(folder / "checkpoint") is None and time.monotonic() < limit:
        assert process.poll() is None, process.stderr.read().decode()
        time.sleep(0.002)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not (folder / "result.json").exists()
    with open(folder / "metrics.jsonl", "a") as metrics:
        metrics.write('{"kind": "train", "st')
    resumed = run_job(experiment, "nvfp4", 1, out)
    assert {k: v for k, v in resumed.items() if k not in {*WALL_CLOCK}} == {
        k: v for k, v in whole.items() if k not in {*WALL_CLOCK}
    }
    reference = job_folder(tmp_path / "whole", "nvfp4", 1)
    assert lines_of(folder) == lines_of(reference)
    assert [line["step"] for line in lines_of(folder) if line["kind"] == "train"] == list(range(1, 25))
    assert same_weights(weights_of(folder), weights_of(reference))


class Killed(BaseException):
    pass


@pytest.mark.parametrize("arm", ["bf16", "nvfp4"])
def test_five_steps_save_load_five_steps(tmp_path, arm):
    experiment = tiny(tmp_path, {"training.steps": 10, "checkpoint.every": 5, "training.accumulation": 2})
    whole = job(experiment, arm, tmp_path / "whole")
    whole.run()
    half = job(experiment, arm, tmp_path / "half")
    half._save, save = (lambda: (save(), (_ for _ in ()).throw(Killed()))), half._save
    with pytest.raises(Killed):
        half.run()
    torch.rand(100)
    second = job(experiment, arm, tmp_path / "half")
    assert second.step == 5
    second.run()
    assert same_weights(whole.model.state_dict(), second.model.state_dict())
    one, two = whole.optimizer.state_dict()["state"], second.optimizer.state_dict()["state"]
    assert all(torch.equal(one[i][k], two[i][k]) for i in one for k in one[i])
    assert lines_of(whole.folder) == lines_of(second.folder)


def test_a_checkpoint_is_whole_or_not_there(tmp_path, monkeypatch):
    model = build_model(tiny(tmp_path), 1, 256)
    folder, identity = tmp_path / "checkpoint", {"experiment": "tiny"}
    checkpoint.save(folder, 1, model, {"step": 1}, identity)
    calls = []

    def full_disk(handle):
        calls.append(handle)
        if len(calls) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(ExperimentError, match="the disk is full"):
        checkpoint.save(folder, 2, model, {"step": 2}, identity)
    assert [path.name for path in folder.iterdir()] == ["step_00000001"]
    monkeypatch.undo()
    monkeypatch.setattr(os, "rename", lambda *_: (_ for _ in ()).throw(Killed()))
    with pytest.raises(Killed):
        checkpoint.save(folder, 2, model, {"step": 2}, identity)
    monkeypatch.undo()
    assert checkpoint.load(checkpoint.latest(folder), model, identity)["step"] == 1
    checkpoint.save(folder, 3, model, {"step": 3}, identity)
    assert [path.name for path in folder.iterdir()] == ["step_00000003"]


def test_a_checkpoint_of_something_else_is_refused_by_name(tmp_path):
    experiment = tiny(tmp_path)
    run_job(experiment, "bf16", 1, tmp_path / "out")
    folder = job_folder(tmp_path / "out", "bf16", 1)
    step = checkpoint.latest(folder / "checkpoint")
    model = build_model(experiment, 1, 256)
    known = json.loads((step / "checkpoint.json").read_text())
    known.pop("step")
    for key, value in {"experiment": "another", "recipe": "name: mine", "model": "GPT2LMHeadModel"}.items():
        with pytest.raises(ExperimentError, match=f"belongs to another {key}: .*{known[key].split()[0]}"):
            checkpoint.load(step, model, known | {key: value})
    weights = load_file(step / "model.safetensors")
    weights["model.norm.weight"][3] = float("nan")
    save_file(weights, step / "model.safetensors")
    with pytest.raises(ExperimentError, match="model.norm.weight holds NaN"):
        checkpoint.load(step, model, known)
    (step / "state.pt").write_bytes(b"torn")
    with pytest.raises(ExperimentError, match="cannot be read"):
        checkpoint.load(step, model, known)


def test_a_checkpoint_is_a_model_to_start_from(tmp_path):
    """It is a Hugging Face folder, tied weights included; one with NaN is refused by name."""
    first = tiny(tmp_path, {"model.config.tie_word_embeddings": True})
    run_job(first, "bf16", 1, tmp_path / "out")
    step = checkpoint.latest(job_folder(tmp_path / "out", "bf16", 1) / "checkpoint")
    second = tiny(tmp_path, {"model": {"checkpoint": str(step)}})
    model = build_model(second, 9, 256)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    weights = load_file(step / "model.safetensors")
    assert "lm_head.weight" not in weights
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in weights.items())
    norm = weights.pop("model.norm.weight")
    save_file(weights, step / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ExperimentError, match="model.checkpoint: .* lacks weights of its model: model.norm.weight"):
        build_model(second, 9, 256)
    norm[0] = float("inf")
    save_file(weights | {"model.norm.weight": norm}, step / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ExperimentError, match="model.norm.weight holds NaN or Inf"):
        build_model(second, 9, 256)


@pytest.mark.parametrize(
    "where, told",
    [("forward", "output of model.layers.1.mlp.down_proj"), ("backward", "gradient of model.layers.0")],
)
def test_broken_numbers_stop_the_job_by_name(tmp_path, where, told):
    experiment = tiny(tmp_path, {"checkpoint.every": 2})
    broken = job(experiment, "nvfp4", tmp_path / "out")
    layer = broken.model.model.layers[1 if where == "forward" else 0].mlp.down_proj

    def poison(_module, _inputs, output):
        if broken.step < 5:
            return output
        if where == "forward":
            return output * float("inf")
        output.register_hook(lambda gradient: gradient * float("nan"))
        return output

    layer.register_forward_hook(poison)
    with pytest.raises(TrainingStopped) as caught:
        broken.run()
    failure = json.loads((broken.folder / "result.json").read_text())["failure"]
    assert failure["step"] == 6 and told in failure["tensor"]
    assert failure["checkpoint"] == "nvfp4/seed1/checkpoint/step_00000004" and failure["checkpoint"] in str(
        caught.value
    )
    os.rename(tmp_path / "out", tmp_path / "moved")
    with pytest.raises(TrainingStopped, match="step 6") as again:  # asked again, it says so again
        run_job(experiment, "nvfp4", 1, tmp_path / "moved")
    assert str(tmp_path / "moved" / failure["checkpoint"]) in str(again.value)


@pytest.mark.parametrize("every", [1, 8])
def test_weights_that_are_not_finite_are_never_saved(tmp_path, every):
    """Found at the checkpoint itself, and by name at an evaluation of the same step."""
    experiment = tiny(tmp_path, {"checkpoint.every": 1, "evaluation.every": every})
    broken = job(experiment, "bf16", tmp_path / "out")
    update = broken.optimizer.step

    def overflow():
        update()
        if broken.step == 3:
            broken.model.model.norm.weight.data[0] = float("inf")

    broken.optimizer.step = overflow
    with pytest.raises(TrainingStopped, match="step 4: the weight model.norm.weight is not finite"):
        broken.run()
    failure = json.loads((broken.folder / "result.json").read_text())["failure"]
    assert (failure["step"], failure["checkpoint"]) == (4, "bf16/seed1/checkpoint/step_00000003")
    assert checkpoint.latest(broken.folder / "checkpoint").name == "step_00000003"


def test_a_spike_and_a_switch_are_written_down(tmp_path, monkeypatch):
    arms = [{"name": "bf16", "recipe": "bf16", "control": True}, {"name": "late", "recipe": "nvidia_nvfp4_late_fprop"}]
    experiment = tiny(tmp_path, {"arms": arms, "training.steps": 12})
    monkeypatch.setattr("nvfp4_train.experiment.train.SPIKE_WINDOW", 4)
    late = job(experiment, "late", tmp_path / "out")
    late.recent = type(late.recent)([1.0, 1.01, 0.99, 1.0], maxlen=4)
    late.run()
    lines = lines_of(late.folder)
    phases = [line for line in lines if line["kind"] == "phase"]
    assert [line["step"] for line in phases] == [10]  # 10 of 12 steps done: the first step at or after 0.82
    assert "fprop_input" in phases[0]["text"] and "-> bf16" in phases[0]["text"]
    assert [line["step"] for line in lines if line["kind"] == "spike"][0] == 1  # 5.5 nats after four losses of 1


def test_a_second_process_in_the_folder_is_refused(tmp_path):
    import fcntl

    experiment = tiny(tmp_path)
    folder = job_folder(tmp_path / "out", "bf16", 1)
    folder.mkdir(parents=True)
    (tmp_path / "out" / "data").mkdir()
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        from nvfp4_train.experiment.train import _only_one

        with pytest.raises(ExperimentError, match="another process is training"), _only_one(folder):
            pass
    assert experiment.seeds == [1]


def test_evaluation_does_not_disturb_training(tmp_path):
    often = tiny(tmp_path, {"evaluation.every": 1})
    rarely = tiny(tmp_path, {"evaluation.every": 8})
    one = job(often, "nvfp4", tmp_path / "a")
    one.run()
    two = job(rarely, "nvfp4", tmp_path / "b")
    two.run()
    assert same_weights(one.model.state_dict(), two.model.state_dict())
    evaluations = [line for line in lines_of(one.folder) if line["kind"] == "eval"]
    assert len(evaluations) == 8 and all(e["loss"] != e["loss_bf16_forward"] for e in evaluations)
