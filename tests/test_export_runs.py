"""Export by the command line: checkpoints of a run, of one process or many ranks; going on from the folder."""

import json
import shutil
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_experiment import tiny

from nvfp4_train.experiment.train import run_job
from nvfp4_train.exporting.loading import load_exported
from nvfp4_train.recipe import load_recipe

transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run, and checkpoints that claim to be of other recipes: bf16, and one with a schedule."""
    folder = tmp_path_factory.mktemp("run")
    run_job(tiny(folder, {"training.steps": 6}), "nvfp4", 1, folder / "out")
    for arm, recipe in (("bf16", "bf16"), ("late", "nvidia_nvfp4_late_fprop")):
        step = folder / "out" / arm / "seed1" / "checkpoint" / "step_00000006"
        shutil.copytree(folder / "out" / "nvfp4" / "seed1" / "checkpoint" / step.name, step)
        known = json.loads((step / "checkpoint.json").read_text())
        known["recipe"] = load_recipe(recipe).to_yaml()
        (step / "checkpoint.json").write_text(json.dumps(known))
    return folder


def command(monkeypatch, capsys, *words):
    from nvfp4_train import cli

    monkeypatch.setattr(sys, "argv", ["nvfp4-train", *map(str, words)])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    return stopped.value.code, capsys.readouterr()


def test_a_checkpoint_of_a_run_is_exported_and_trained_further(run, monkeypatch, capsys):
    from nvfp4_train.experiment.model import build_model

    job = run / "out" / "nvfp4" / "seed1"
    (job / "checkpoint" / "step_00000006" / "tokenizer.json").write_text("{}")
    words = ("export", job, "--format", "compressed-tensors", "--json", "--calibrate", 3)
    code, told = command(monkeypatch, capsys, *words)
    assert code == 0, told.err
    said = json.loads(told.out)
    folder = job / "step_00000006-compressed-tensors"
    assert said["folder"] == str(folder) and said["calibrated"] and len(said["layers"]) == 14
    assert (folder / "config.json").is_file() and (folder / "tokenizer.json").read_text() == "{}"
    again = tiny(run, {"model": {"checkpoint": str(folder)}, "training.steps": 2})
    built = build_model(again, 1, 256)
    assert all(torch.equal(a, b) for a, b in zip(built.parameters(), load_exported(folder).parameters(), strict=True))
    assert run_job(again, "nvfp4", 1, run / "again")["status"] == "finished"
    saved = json.loads(next((run / "again").glob("nvfp4/seed1/checkpoint/*/config.json")).read_text())
    assert "quantization_config" not in saved  # what it writes is unpacked again
    code, told = command(monkeypatch, capsys, "export", job, "--format", "compressed-tensors")
    assert code == 2 and "not empty" in told.err


def test_shards_of_many_ranks_are_put_together(run, tmp_path, monkeypatch, capsys):
    """What ranks wrote gives the bytes that the whole checkpoint gives."""
    from nvfp4_train.experiment import sharded_checkpoint

    step = run / "out" / "nvfp4" / "seed1" / "checkpoint" / "step_00000006"
    sharded = tmp_path / "job" / "checkpoint" / step.name
    sharded.mkdir(parents=True)
    for name in ("config.json", "checkpoint.json"):
        (sharded / name).write_bytes((step / name).read_bytes())
    whole = transformers.AutoModelForCausalLM.from_pretrained(step, dtype=torch.float32)
    sharded_checkpoint.save(sharded / "shards", whole, torch.optim.AdamW(whole.parameters()))
    for folder, out in ((step, "one"), (sharded, "many")):
        assert command(monkeypatch, capsys, "export", folder, "--out", tmp_path / out)[0] == 0
    one, many = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "many"))
    assert one == many


def test_what_a_run_cannot_export_exits_with_2(run, monkeypatch, capsys):
    out = run / "out"
    step = out / "nvfp4" / "seed1" / "checkpoint" / "step_00000006"
    for words, said in (
        ((out / "bf16" / "seed1",), "recipe bf16, which quantizes nothing: name --recipe"),
        ((out / "late" / "seed1",), "Fprop runs in BF16 at this point of the recipe's schedule"),
        ((out / "nowhere",), "is no checkpoint"),
        ((step, "--format", "gguf"), "unknown format 'gguf'"),
        ((step, "--recipe", "nvidia_nvfp5"), "no recipe is named 'nvidia_nvfp5'"),
    ):
        code, told = command(monkeypatch, capsys, "export", *words)
        assert code == 2 and said in told.err, told.err
    late = ("export", out / "late" / "seed1", "--recipe", "nvidia_nvfp4", "--out", run / "late")
    assert command(monkeypatch, capsys, *late)[0] == 0  # asked for by name, the recipe's first phase is exported
    weights = load_file(step / "model.safetensors")
    norm = weights.pop("model.norm.weight")
    no = ("export", step, "--out", run / "no")
    save_file(weights, step / "model.safetensors", metadata={"format": "pt"})
    assert command(monkeypatch, capsys, *no)[0] == 2 and not (run / "no").exists()
    known = (step / "checkpoint.json").read_bytes()
    (step / "checkpoint.json").unlink()  # now a folder of another origin
    code, told = command(monkeypatch, capsys, *no, "--recipe", "nvidia_nvfp4")
    assert code == 2 and "lacks weights of its model: model.norm.weight" in told.err and not (run / "no").exists()
    (step / "checkpoint.json").write_bytes(known)
    norm[0] = float("nan")
    save_file(weights | {"model.norm.weight": norm}, step / "model.safetensors", metadata={"format": "pt"})
    code, told = command(monkeypatch, capsys, *no)
    assert code == 2 and "model.norm.weight holds NaN" in told.err and not (run / "no").exists()
