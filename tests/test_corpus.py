"""experiments/corpus/build.py: each text once, split by content, shards that an experiment reads."""

import hashlib
import importlib.util
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
    given = ("--tokenizer", tmp_path / "a/tokenizer.json", "--workers", 2)
    run("tokenize", *given, "--held-out", 0.3, "--out", tmp_path / "b", *packs)
    manifest = json.loads((tmp_path / "a/manifest.json").read_text())
    assert manifest == json.loads((tmp_path / "b/manifest.json").read_text())
    assert manifest["train"]["documents"] + manifest["held_out"]["documents"] == 40
    assert manifest["held_out"]["documents"] >= 3
    train = np.load(tmp_path / "a/train-000.npy")
    assert len(train) == manifest["train"]["tokens"] and train.max() < manifest["vocabulary"]
    assert (train == 0).sum() == manifest["train"]["documents"]  # one end mark for each document


def test_tokenizer_by_itself_is_the_one_that_tokenize_trains(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    words = ["alpha", "beta", "gamma", "delta"]
    for number in range(12):
        (source / f"text{number}.py").write_text(f"{words[number % 4]}_{number} " * 100)
    run("collect", "--out", tmp_path / "packs", source)
    packs = sorted((tmp_path / "packs").iterdir())
    trained = ("--vocabulary", 300, "--sample", 4000)
    run("tokenizer", *trained, "--out", tmp_path / "tokenizer.json", *packs)
    run("tokenize", *trained, "--held-out", 0.5, "--out", tmp_path / "shards", *packs)
    assert (tmp_path / "tokenizer.json").read_bytes() == (tmp_path / "shards/tokenizer.json").read_bytes()
    assert "--workers must be" in run("tokenize", "--workers", 0, "--out", tmp_path / "none", *packs, fails=True)


def test_sample_is_bounded_and_drawn_by_content(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for number in range(30):
        (source / f"text{number:02}.py").write_text(f"value = {number:06}\n" * 30)  # 480 bytes each
    run("collect", "--out", tmp_path / "packs", source)
    build = importlib.util.module_from_spec(spec := importlib.util.spec_from_file_location("build", SCRIPT))
    spec.loader.exec_module(build)
    packs = sorted((tmp_path / "packs").iterdir())
    drawn, more = build._sample(packs, 5 * 480), build._sample(packs, 10 * 480)
    assert len(drawn) == 5 and len(more) == 10 and set(drawn) < set(more)
    smallest = sorted((text for _, text in build._packed(packs)), key=lambda t: hashlib.sha256(b"sample" + t).digest())
    assert set(drawn) == {text.decode() for text in smallest[:5]}


def test_nothing_to_collect(tmp_path):
    assert "no text was found" in run("collect", "--out", tmp_path / "packs", tmp_path, fails=True)
