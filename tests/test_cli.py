"""The command line: bad input is one sentence and exit code 2, never a traceback, and nothing is written."""

import errno
import json
import os

import pytest
from tiny_experiment import TINY, tiny, write_experiment
from typer.testing import CliRunner

from nvfp4_train.cli import app
from nvfp4_train.experiment import checkpoint
from nvfp4_train.experiment.record import prepare_run

ARMS = TINY["arms"]
GEMMA2 = {
    "model_type": "gemma2", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "head_dim": 16,
    "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
KEEPS_ALL = {
    "name": "keeps_all", "dgrad": "bf16", "wgrad": "bf16", "weight_match": False, "keep_bf16": {"modules": ["*"]},
    "fprop": {
        "input": {"format": "nvfp4", "block": "1x16", "rounding": "nearest"},
        "weight": {"format": "nvfp4", "block": "16x16", "rounding": "nearest"},
    },
}  # fmt: skip


def with_recipe(recipe):
    return {"arms": [ARMS[0], {"name": "x", "recipe": recipe}]}


BAD_INPUT = {
    "unknown key": ({"trainin": {}}, "did you mean 'training'"),
    "unknown recipe": (with_recipe("nvidia_nvfp5"), "did you mean 'nvidia_nvfp4'"),
    "missing recipe file": (with_recipe("own/recipe.yaml"), "own/recipe.yaml"),
    "recipe that converts nothing": (with_recipe(KEEPS_ALL), "converts no layer"),
    "all blocks kept": (with_recipe("nvidia_nvfp4_first2_last8"), "block"),
    "unknown architecture": ({"model.config.model_type": "lama"}, "did you mean 'llama'"),
    "unknown model key": ({"model.config.hiden_size": 3}, "did you mean 'hidden_size'"),
    "impossible model": ({"model.config.num_attention_heads": 3}, "model"),
    "model too short": ({"data.sequence_length": 128}, "reads at most 64 tokens"),
    "vocabulary too small": ({"model.config.vocab_size": 100}, "vocab_size"),
    "missing model folder": ({"model": {"checkpoint": "nowhere"}}, "no config.json"),
    "broken model folder": ({"model": {"checkpoint": "broken"}}, "config.json cannot be read"),
    "no sdpa": ({"model.config": GEMMA2}, "set model.attention: eager"),
    "missing text": ({"data.files": ["nothing/*.txt"]}, "no file matches"),
    "missing tokenizer": ({"data.tokenizer": "tok.json"}, "there is no file"),
    "missing dataset": ({"data": {"dataset": {"path": "text", "data_files": ["x.txt"]}, "sequence_length": 32}},
                        "data.dataset.data_files: no file matches"),
    "corpus shorter than one batch": ({"training.batch_size": 10**5}, "shorter than one batch"),
    "no GPU": ({"training.device": "cuda"}, "sees no GPU"),
}  # fmt: skip


def call(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.mark.parametrize("changes, told", BAD_INPUT.values(), ids=BAD_INPUT.keys())
@pytest.mark.parametrize("command", ["compare", "train"])
def test_bad_input(tmp_path, monkeypatch, command, changes, told):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    path = write_experiment(tmp_path, changes)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{")
    words = ["--arm", "bf16", "--seed", 1] if command == "train" else []
    result = call(command, path, *words, "--out", tmp_path / "out")
    assert result.exit_code == 2, result.output
    assert told in result.stderr and result.stderr.startswith("error: ")
    assert "Traceback" not in result.output
    assert not (tmp_path / "out" / "record.json").exists()


@pytest.mark.parametrize("text, told", [("a: [", "not valid YAML"), ("", "empty"), ("7", "key: value")])
def test_broken_yaml(tmp_path, text, told):
    (tmp_path / "x.yaml").write_text(text)
    result = call("compare", tmp_path / "x.yaml", "--out", tmp_path / "out")
    assert result.exit_code == 2 and told in result.stderr and not (tmp_path / "out").exists()


def test_a_missing_file(tmp_path):
    result = call("compare", tmp_path / "none.yaml", "--out", tmp_path / "out", "--json")
    assert result.exit_code == 2 and "no experiment file" in result.stderr
    assert "no experiment file" in json.loads(result.stdout)["error"]


def test_an_unknown_arm_and_seed(tmp_path):
    path = write_experiment(tmp_path)
    for words, told in ((["nvfp", 1], "did you mean 'nvfp4'"), (["nvfp4", 7], "no seed 7")):
        result = call("train", path, "--arm", words[0], "--seed", words[1], "--out", tmp_path / "out")
        assert result.exit_code == 2 and told in result.stderr


def test_out_that_is_something_else(tmp_path):
    path = write_experiment(tmp_path)
    (tmp_path / "file").write_text("mine")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("mine")
    prepare_run(tiny(tmp_path, {"name": "other"}), tmp_path / "other")
    write_experiment(tmp_path)
    for out, told in (
        ("file", "is a file"),
        ("file/a/b", "is a file"),
        ("full", "is not empty"),
        ("other", "another experiment: name"),
    ):
        result = call("compare", path, "--out", tmp_path / out)
        assert result.exit_code == 2 and told in result.stderr, result.output
    assert [p.name for p in (tmp_path / "full").iterdir()] == ["thesis.txt"]


def test_a_full_disk(tmp_path, monkeypatch):
    path = write_experiment(tmp_path)
    prepare_run(tiny(tmp_path), tmp_path / "out")

    def full(handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    result = call("train", path, "--arm", "bf16", "--seed", 1, "--out", tmp_path / "out")
    assert result.exit_code == 2 and "the disk is full" in result.stderr and "same command" in result.stderr
    monkeypatch.undo()
    assert call("train", path, "--arm", "bf16", "--seed", 1, "--out", tmp_path / "out").exit_code == 0


def test_train_then_report(tmp_path):
    path, out = write_experiment(tmp_path), tmp_path / "out"
    for arm in ("bf16", "nvfp4"):
        result = call("train", path, "--arm", arm, "--seed", 1, "--out", out, "--json")
        assert result.exit_code == 0 and json.loads(result.stdout)["status"] == "finished"
    assert checkpoint.latest(out / "nvfp4" / "seed1" / "checkpoint").name == "step_00000008"
    result = call("report", out, "--json")
    numbers = json.loads(result.stdout)
    assert result.exit_code == 0 and [arm["name"] for arm in numbers["arms"]] == ["nvfp4"]
    assert (out / "report.html").is_file() and numbers["report"].endswith("report.html")
    result = call("report", out)
    assert result.exit_code == 0 and "report.html" in result.stdout and "nvfp4" in result.stdout


def test_numbers_that_break_exit_with_3(tmp_path):
    path = write_experiment(tmp_path, {"training.learning_rate": 1e30, "training.warmup": 0, "training.clip": None})
    result = call("train", path, "--arm", "bf16", "--seed", 1, "--out", tmp_path / "out")
    assert result.exit_code == 3 and "stopped at step 2" in result.stderr and "not finite" in result.stderr


def test_report_of_no_run(tmp_path):
    result = call("report", tmp_path)
    assert result.exit_code == 2 and "is not a run folder" in result.stderr


def test_recipes():
    result = call("recipes", "--json")
    rows = {row["name"]: row for row in json.loads(result.stdout)}
    assert {"bf16", "mxfp4", "nvidia_nvfp4"} <= rows.keys()
    assert [o["bits"] for o in rows["nvidia_nvfp4"]["wgrad"]] == [4.5, 4.5]
    assert [o["bits"] for o in rows["mxfp4"]["fprop"]] == [4.25, 4.25]
    table = call("recipes").stdout
    assert all(name in table for name in rows)
