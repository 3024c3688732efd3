"""experiments/corpus/build.py: each text once, split by content, shards that an experiment reads."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

SCRIPT = Path(__file__).parents[1] / "experiments/corpus/build.py"
pytest.importorskip("tokenizers")


def run(*arguments: object, fails: bool = False) -> str:
    done = subprocess.run([sys.executable, SCRIPT, *map(str, arguments)], capture_output=True, text=True)
    assert (done.returncode != 0) == fails, done.stderr
    return done.stdout + done.stderr


def test_from_folders_to_shards(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for number in range(40):
        (source / f"text{number}.py").write_text("".join(f"value_{number}_{i} = {i * number}\n" for i in range(40)))
    (source / "copy.py").write_bytes((source / "text3.py").read_bytes())
    (source / "table.h").write_text("".join(f"#define REGISTER_{i} {i}\n" for i in range(100)))
    (source / "photo.png").write_bytes(b"\x89PNG" * 100)
    (source / "binary.c").write_bytes(b"int\0main" * 100)
    assert "40 documents" in run("collect", "--out", tmp_path / "packs", source)
    assert "holds packs already" in run("collect", "--out", tmp_path / "packs", source, fails=True)

    packs = sorted((tmp_path / "packs").iterdir())
    run("tokenize", "--vocabulary", 400, "--held-out", 0.3, "--out", tmp_path / "a", *packs)
    run("tokenize", "--tokenizer", tmp_path / "a/tokenizer.json", "--held-out", 0.3, "--out", tmp_path / "b", *packs)
    manifest = json.loads((tmp_path / "a/manifest.json").read_text())
    assert manifest == json.loads((tmp_path / "b/manifest.json").read_text())
    assert manifest["train"]["documents"] + manifest["held_out"]["documents"] == 40
    assert manifest["held_out"]["documents"] >= 3
    train = np.load(tmp_path / "a/train-000.npy")
    assert len(train) == manifest["train"]["tokens"] and train.max() < manifest["vocabulary"]
    assert (train == 0).sum() == manifest["train"]["documents"]  # one end mark for each document


def test_nothing_to_collect(tmp_path):
    assert "no text was found" in run("collect", "--out", tmp_path / "packs", tmp_path, fails=True)
